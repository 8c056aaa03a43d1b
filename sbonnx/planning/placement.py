"""Placement of Q/DQ pairs: applies the backend's rules and the recipe's settings to one graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from sbonnx.backends import Rule
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import ADDS, EMBEDDING, EXPERTS, INTEGER_OPS, LINEAR, MOVES_DATA, NORMS, RECURRENT
from sbonnx.patterns import Block
from sbonnx.planning.site_builder import NO_EXPERTS, SiteBuilder, spec_of, weight_spec
from sbonnx.planning.survey import FLOATS, INFINITE, LinearInputs, Place
from sbonnx.planning.types import GivenParams, Reader
from sbonnx.report.codes import Reason

NORM_SCALE, NORM_BIAS = 1, 2
"""Inputs of a normalization that hold its scale and its bias."""

PRODUCERS = frozenset(LINEAR) | {"BatchNormalization"} | ADDS
"""Ops whose directly following activation gets no pair in between."""


@dataclass(frozen=True)
class Placer(SiteBuilder):
    """Placement of sites in one walk in topological order; fills `drafts` in place.

    Attributes:
        integer: names of the weighted ops with both data and weight quantized.
        ruled: names of the other ops with pairs on inputs and output, by a rule that the recipe does not name.
        declined: ops that stay float, with the reason.
        capable: ops whose kernels write integers if a reader wants them, by the tensor that they write.
    """

    integer: set[str] = field(default_factory=set)
    ruled: set[str] = field(default_factory=set)
    declined: Mapping[str, Reason] = field(default_factory=dict)
    capable: dict[str, Node] = field(default_factory=dict)

    def run(self) -> None:
        """Place every site. Rules that depend on the readers are applied in a second walk, backwards."""
        late: list[tuple[Place, Rule]] = []
        for place in self.survey.places:
            node = place.node
            block = self.survey.block_of.get(node.name)
            if block is not None and block.kind not in self.rules.opens and not self._is_unit(block, node):
                if node.name == block.nodes[0]:
                    self._at_block(place, block)
                continue
            if node.op in RECURRENT:
                self.recurrent(place)
                continue
            if node.op in EXPERTS:
                self.drafts.refuse("quantize", node.name, NO_EXPERTS)
                continue
            if node.op in INTEGER_OPS:
                self.drafts.refuse(
                    "quantize", node.name, Reason("already-quantized", f"{node.op}: is quantized already")
                )
                continue
            if node.name in self.survey.in_loop:
                self._refuse_loop(node)
                self.linear_storage(place)
                continue
            at = self.survey.linear.get(node.name)
            if node.op in self.rules.linear and at is not None:
                self._at_linear(place, at)
            elif node.op in LINEAR and at is not None:
                self.drafts.refuse(
                    "quantize",
                    node.name,
                    Reason("no-integer-kernel", f"{self.backend.name} has no integer kernel for {node.op}"),
                )
            elif node.op in EMBEDDING and isinstance(node.inputs[0], Constant):
                self._at_embedding(place)
            else:
                rule = self.rules.rule_for(node.op)
                if rule is not None and rule.when == "output_read_quantized":
                    late.append((place, rule))
                elif rule is not None:
                    self._at_rule(place, rule)
        for name, node in self.capable.items():
            keys = self.drafts.activation_keys(name)
            if len(keys) == 1:  # several types: each reader keeps its own
                self._share(self._behind_fold(node), keys[0])
        for place, rule in reversed(late):
            if self._asked(rule) or any(self._read_quantized(tensor) for tensor in place.node.outputs):
                self._at_rule(place, rule)

    def _refuse_loop(self, node: Node) -> None:
        if node.op in LINEAR:
            loop = self.survey.in_loop[node.name]
            self.drafts.refuse(
                "quantize",
                node.name,
                Reason("in-loop-body", f"it is in the body of '{loop}', whose steps are not observed"),
            )

    # --- one op ---------------------------------------------------------------------------------------

    def _at_linear(self, place: Place, at: LinearInputs) -> None:
        node = place.node
        unit = self.rules.unit_for(node.op)
        if at.weight == 0 and unit is not None:
            self._at_unit(place, unit)
            return
        if at.weight == 0 and not self.numbers.any_bits:
            self.drafts.refuse(
                "quantize",
                node.name,
                Reason("constant-on-left", f"{self.backend.name} wants the constant on the right of MatMul"),
            )
            return
        wanted = self.recipe.settings(
            "w", node=node.name, op=node.op, tensor=node.inputs[at.weight].name, place=self.survey.place_of(node)
        )
        kind = weight_spec(self.backend, node, at.weight, at.axis, wanted) if wanted.enabled else None
        if kind is not None and self.numbers.block_sizes(kind) and not isinstance(node.inputs[at.data], Constant):
            if self.weight(place, at.weight, at.axis, f"weight of {node.op}, whose input stays float") is not None:
                self.drafts.refuse(
                    "quantize input",
                    node.name,
                    Reason("weights-alone", f"{self.backend.name} has int4 for weights alone"),
                )
            return
        slow = (
            self.declined.get(node.name)
            or self.rules.slow_linear(node)
            or (None if kind is None else self.numbers.unfit(node, kind))
        )
        if isinstance(node.inputs[at.data], Constant):
            slow = Reason("both-inputs-constant", "both inputs are constants")
        if node.op in self.rules.linear_output and self._writes_float_output(node):
            slow = Reason(
                "writes-output", f"it writes an output of the graph, which stays float, and so does {node.op}"
            )
        if slow is not None:
            self.drafts.refuse("quantize", node.name, Reason.of(slow, "by-backend"))
            return
        data = self.activation(node, at.data, f"input of {node.op}", "linear")
        if data is None and not self.numbers.any_bits:
            self.drafts.refuse("quantize weight", node.name, Reason("input-stays-float", "its input stays float"))
            return
        weight = self.weight(place, at.weight, at.axis, f"weight of {node.op}")
        if data is not None and weight is not None:
            self.integer.add(node.name)
        if data is not None and weight is not None and self.numbers.int32_bias:
            if at.bias is not None:
                self.bias(place, node, at.bias, data, weight)
            elif node.op == "MatMul" and self.rules.unit_for("Add") is None:
                self._bias_after(place, data, weight)
        if data is not None and weight is not None and node.op in self.rules.linear_output:
            if self.rules.writes_float:
                self.capable[self._behind_fold(node).name] = node
            else:
                self._output(node, f"output of {node.op}: the integer kernel writes integers", "linear output")

    def _writes_float_output(self, node: Node) -> bool:
        """Return whether a node, or an activation folded into it, writes an output of the graph that stays float."""
        written = [self._behind_fold(node), *node.outputs[1:]]
        return not self._pairs_outputs and any(tensor.name in self.survey.outputs for tensor in written)

    @property
    def _pairs_outputs(self) -> bool:
        """Whether outputs of the graph get pairs."""
        return self.rules.writes_outputs and self.recipe.quantizes_graph("outputs")

    def _share(self, tensor: Tensor, key: str) -> None:
        """Let every reader of a tensor have its one site, so that the kernel before it writes integers alone."""
        self.written[tensor.name] = key
        for reader, index in query.readers(tensor):
            if self._wants_integers(reader, tensor) and tensor.name not in self.survey.outputs:
                self.drafts.by_key[key].readers[Reader(reader.name, index)] = None

    def _bias_after(self, place: Place, data: str, weight: str) -> None:
        """Quantize the bias in the Add after a MatMul: with static shapes onnxruntime fuses the two into a Gemm.

        That Gemm runs in integers only with an int32 bias, and is slower than float otherwise. With dynamic shapes the
        Add stays, and a float bias folds into the following op.
        """
        node = place.node
        shape = query.shape(node.inputs[0])
        if shape is None or not all(isinstance(axis, int) for axis in shape):
            return
        readers = query.readers(node.outputs[0])
        if len(readers) != 1 or readers[0][0].op not in ADDS or node.outputs[0].name in self.survey.outputs:
            return
        add, index = readers[0]
        if tuple(add.inputs[1 - index].shape or ()) == tuple(node.inputs[1].shape[-1:]):
            self.bias(place, add, 1 - index, data, weight)

    def _at_embedding(self, place: Place) -> None:
        node = place.node
        wanted = self.recipe.quantize_inputs_of.embedding
        if wanted is False or (wanted is None and node.op not in self.rules.stored):
            return
        table = node.inputs[0]
        if query.dtype(table) is None or not str(query.dtype(table)).startswith("float") or len(table.shape) != 2:
            return
        if node.attrs.get("axis", 0) == 0 and wanted is None and not self.numbers.any_bits:
            self.table(place)
        elif node.attrs.get("axis", 0) == 0:
            self.weight(place, 0, 0, "rows of an embedding")

    def _at_block(self, place: Place, block: Block) -> None:
        rule = self.rules.rule_for(f"block:{block.kind}")
        if rule is None or rule.inputs == "none" or not self._acts(rule) or not block.inputs:
            return
        names = set(block.nodes)
        for tensor_name in block.inputs[:1]:
            inputs = (tensor for name in names for tensor in self.survey.nodes[name].inputs)
            tensor = next((tensor for tensor in inputs if tensor.name == tensor_name), None)
            if tensor is None or self._stands_after_producer(rule, tensor):
                continue
            for node, index in query.readers(tensor):
                if node.name in names:
                    self.activation(node, index, rule.why, rule.name)

    def _wanted(self, rule: Rule) -> bool | None:
        """Return the recipe's switch for a rule; None leaves the decision to the backend."""
        return getattr(self.recipe.quantize_inputs_of, rule.switch) if rule.switch else None

    def _asked(self, rule: Rule) -> bool:
        """Return whether the recipe asks for a rule by its switch: it is then applied wherever possible."""
        return self._wanted(rule) is True

    def _acts(self, rule: Rule) -> bool:
        wanted = self._wanted(rule)
        return rule.default if wanted is None else wanted

    def _stands_after_producer(self, rule: Rule, tensor: Tensor) -> bool:
        if rule.when != "not_after_producer" or not self.recipe.schedule.disable_unnecessary_quant:
            return False
        producer = query.producer(tensor)
        if producer is None or producer.name in self.survey.block_of:
            return False  # the Add that ends an unrolled norm belongs to the norm
        return producer.op in PRODUCERS

    def _at_rule(self, place: Place, rule: Rule) -> None:
        node = place.node
        if not self._acts(rule) or rule.unless(node) is not None:
            return
        if rule.inputs == "unit":
            self._at_unit(place, rule)
            return
        dynamic = [
            i for i, tensor in enumerate(node.inputs) if not isinstance(tensor, Constant) and not tensor.is_empty()
        ]
        dynamic = [i for i in dynamic if self.survey.quantizable(node.inputs[i]) is None]
        if not dynamic:
            return
        if rule.inputs == "first":
            dynamic = [i for i in dynamic if i == 0]
        elif rule.inputs == "skip":
            dynamic = self._skip_branch(node, dynamic)
        elif len({node.inputs[i].name for i in dynamic}) < 2:
            return  # x + x, x * constant: there is no second input to align with
        if self._stands_after_producer(rule, node.inputs[dynamic[0]]) if dynamic else True:
            return
        if not self._asked(rule) and not self._continues_integers(rule, node, dynamic):
            return
        if node.name in self.declined:
            self.drafts.refuse("quantize", node.name, self.declined[node.name])
            return
        keys = [self.activation(node, i, rule.why, rule.name) for i in dynamic]
        if not rule.output or any(key is None for key in keys):
            return
        after = self._output(node, rule.why, rule.name)
        if after is not None and not self._asked(rule):
            self.ruled.add(node.name)
        if rule.one_scale and after is not None and keys[0] is not None:
            self.drafts.join(keys[0], after)

    def _is_unit(self, block: Block, node: Node) -> bool:
        """Return whether a recognised block is one node for which the backend has a rule of node units."""
        return len(block.nodes) == 1 and self.rules.unit_for(node.op) is not None

    def _at_unit(self, place: Place, rule: Rule) -> None:
        """Place pairs at every float input and output of a node, and integers for its float constants."""
        node = place.node
        if any(tensor.name in self.written for tensor in node.outputs):
            return  # folded into the op before it
        if self._writes_float_output(node):
            why = Reason("writes-output", f"it writes an output of the graph, which stays float, and so does {node.op}")
            self.drafts.refuse("quantize", node.name, why)
            return
        infinite = any(tensor.name in self.survey.infinite for tensor in (*node.inputs, *node.outputs))
        declined = self.declined.get(node.name, INFINITE if infinite else None)
        if declined is not None:
            self.drafts.refuse("quantize", node.name, declined)
            return
        dynamic = [i for i, tensor in enumerate(node.inputs) if self.survey.quantizable(tensor) is None]
        constants = [i for i, value in enumerate(node.inputs) if isinstance(value, Constant) and value.dtype in FLOATS]
        if not dynamic and (not constants or rule.constants != "operands"):
            return
        for index in dynamic:
            if self.settings_of("a", node, node.inputs[index]) is None:
                return  # a unit is quantized as a whole
        keys = {index: self.activation(node, index, rule.why, rule.name) for index in dynamic}
        if rule.constants == "parameters":
            self._parameters(place, keys.get(0), constants)
        for index in constants if rule.constants == "operands" else ():
            self.operand(place, index, f"constant of {node.op}")
        for tensor in node.outputs:
            self._output(node, rule.why, rule.name, tensor if len(node.outputs) > 1 else None)

    def _parameters(self, place: Place, data: str | None, constants: list[int]) -> None:
        """Quantize the scale of a normalization as a weight, and its bias to int32."""
        if data is None or NORM_SCALE not in constants:
            return
        weight = self.weight(place, NORM_SCALE, None, f"scale of {place.node.op}")
        if weight is not None and NORM_BIAS in constants:
            self.bias(place, place.node, NORM_BIAS, data, weight)

    def _continues_integers(self, rule: Rule, node: Node, dynamic: list[int]) -> bool:
        """Return whether an op continues a run of integer kernels, if its rule requires that.

        The final ops of a model (decoded boxes, scores) stay float, except pools: the ranges there differ by orders of
        magnitude, and no integer kernel follows.
        """
        if rule.when not in ("input_written", "between_linear", "inputs_integer"):
            return True
        if rule.when != "input_written" and not any(out.name in self.survey.feeds_linear for out in node.outputs):
            return False
        tensors = [node.inputs[i] for i in dynamic]
        written = [self._written(tensor) for tensor in tensors]
        if rule.when != "inputs_integer":
            return any(written)
        return any(written) and all(
            done or self.drafts.has_activation(tensor.name) for done, tensor in zip(written, tensors, strict=True)
        )

    def _output(self, node: Node, why: str, rule: str, tensor: Tensor | None = None) -> str | None:
        """Add a pair after `node` and any activation folded into it. Return its key, or None if nothing reads it.

        Args:
            tensor: the output; None: the first one, or that of the folded activation.
        """
        tensor = self._behind_fold(node) if tensor is None else tensor
        leaves = tensor.name in self.survey.outputs
        if leaves and not (self._pairs_outputs and self.survey.scope_of[tensor.name] == ""):
            return None
        if not leaves and not query.readers(tensor):
            return None
        if query.dtype(tensor) == np.dtype(np.float16):
            return None  # no integer kernel writes float16, and onnxruntime rejects the QLinearConcat it creates itself
        settings = self.recipe.settings("a", node=node.name, op=node.op, tensor=tensor.name)
        if not settings.enabled or self.survey.quantizable(tensor) is not None:
            return None
        readers = [use for use in query.readers(tensor) if self._wants_integers(use[0], tensor)]
        if not readers and not leaves:
            return None
        spec = spec_of(self.backend, "a", settings, None)
        key = self.written[tensor.name] = self.open_site(tensor, spec, settings, why, rule)
        draft = self.drafts.by_key[key]
        draft.leaves = leaves
        prescribed = self.numbers.output_params(node, spec)
        if prescribed is not None:
            draft.given = GivenParams((prescribed[0],), (prescribed[1],))
            draft.fixed = draft.given.covered(spec)
        for reader, index in readers:
            self.drafts.by_key[key].readers[Reader(reader.name, index)] = None
        return key

    def _wants_integers(self, reader: Node, tensor: Tensor) -> bool:
        """Return whether the recipe lets this reader have the dequantized tensor."""
        return self.recipe.settings("a", node=reader.name, op=reader.op, tensor=tensor.name).enabled

    def _behind_fold(self, node: Node) -> Tensor:
        """Return the tensor that the kernel of `node` writes: its output, or that of an activation folded into it."""
        tensor = node.outputs[0]
        readers = query.readers(tensor)
        if not readers or tensor.name in self.survey.outputs:
            return tensor
        follower, index = readers[0]
        block = self.survey.block_of.get(follower.name)
        if block is not None and f"block:{block.kind}" in self.rules.folds:
            inside = block.inputs == (tensor.name,) and all(reader.name in block.nodes for reader, _ in readers)
            return self.survey.nodes[block.nodes[-1]].outputs[0] if inside else tensor
        if len(readers) == 1 and follower.op in self.rules.folds and index == 0:
            return follower.outputs[0]
        return tensor

    def _written(self, tensor: Tensor) -> bool:
        """Return whether an integer kernel writes `tensor`, directly or through data movement."""
        while tensor.name not in self.written and tensor.name not in self.capable:
            producer = query.producer(tensor)
            if producer is None or producer.op not in MOVES_DATA:
                return False
            tensor = producer.inputs[0]
        return True

    def _skip_branch(self, node: Node, dynamic: list[int]) -> list[int]:
        """Return the input of a residual Add that no weighted op writes; of two weighted inputs, the shallower."""
        if len(dynamic) != 2 or node.inputs[dynamic[0]].name == node.inputs[dynamic[1]].name:
            return []
        main = [i for i in dynamic if self._fuses_into(node.inputs[i])]
        if not main:
            return []
        if len(main) == 2:
            # both inputs come from a convolution: the deeper one is the main branch
            main = [max(main, key=lambda i: self.survey.depth.get(node.inputs[i].name, 0))]
        return [i for i in dynamic if i != main[0]]

    def _fuses_into(self, tensor: Tensor) -> bool:
        producer = query.producer(tensor)
        if producer is not None and producer.op in NORMS:
            producer = query.producer(producer.inputs[0])
        return producer is not None and producer.name in self.integer and len(query.readers(tensor)) == 1

    def _read_quantized(self, tensor: Tensor) -> bool:
        """Return whether a reader of `tensor`, directly or through data movement, has it quantized."""
        if self.drafts.has_activation(tensor.name):
            return True
        return any(
            self._read_quantized(node.outputs[0])
            for node, index in query.readers(tensor)
            if node.op in MOVES_DATA and index == 0
        )

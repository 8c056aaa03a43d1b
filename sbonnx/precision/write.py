"""Applies a precision decision to the graph: types, constants, and the minimum of Casts between both types."""

from __future__ import annotations

from typing import Any

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.ops import QUANTIZE
from sbonnx.plan.magnitudes import FloatKind
from sbonnx.precision.constants import narrowed
from sbonnx.precision.decide import Decision
from sbonnx.precision.slots import FLOAT32, Slots, is_float32


def write(graph: Graph, decision: Decision, kind: FloatKind, *, keep_io: bool) -> int:
    """Convert the graph in place as decided. Returns the number of added Casts.

    Every tensor has the output type of its node, and is cast at most once, directly after that node, for all readers of
    the other type, including those in bodies. With `keep_io` inputs and outputs keep type and name; else they are
    converted if their values allow it. Outputs of bodies of If, Loop and Scan stay float32.
    """
    writer = _Writer(graph, decision, kind, keep_io)
    writer.main()
    edit.sort(graph)
    return writer.casts


class _Writer:
    def __init__(self, graph: Graph, decision: Decision, kind: FloatKind, keep_io: bool) -> None:
        self.graph, self.decision, self.kind, self.keep_io = graph, decision, kind, keep_io
        self.names = edit.Names(graph)
        self.casts = 0
        self.kept = list(query.all_tensors(graph))  # keeps the tensors alive, because their ids are used as keys
        self.floats = {id(tensor) for tensor in self.kept if is_float32(tensor)}
        self.home: dict[int, Body] = {}  # by tensor: the body that defines it
        self.forms: dict[tuple[int, bool], Tensor] = {}  # (tensor, narrow) -> the tensor in that type
        self.constants: dict[tuple[int, bytes], Constant] = {}

    def main(self) -> None:
        """Convert the graph and all bodies in it."""
        ends = {id(tensor) for tensor in self.graph.outputs}
        for tensor in self.graph.inputs:
            if id(tensor) in self.floats:
                narrow = not self.keep_io and id(tensor) not in self.decision.tensors and id(tensor) not in ends
                self._given(tensor, self.graph, narrow)
        self._body(self.graph, ends)

    def _body(self, body: Body, ends: set[int]) -> None:
        for node in query.ordered(body.nodes):
            slots = self._slots(node)
            self._inputs(node, slots)
            for _, inner in query.bodies(node):
                for tensor in inner.inputs:
                    if id(tensor) in self.floats:
                        self._given(tensor, inner, narrow=False)
                self._body(inner, set())
                self._end(inner)
            self._outputs(node, slots, body, ends)

    def _slots(self, node: Node) -> Slots | None:
        """Return the slots that change. A QuantizeLinear reads its input in the type that it has."""
        slots = self.decision.slots.get(id(node))
        if slots is None or node.op not in QUANTIZE or not isinstance(node.inputs[0], Variable):
            return slots
        return slots if (id(node.inputs[0]), True) in self.forms else None

    def _given(self, tensor: Tensor, body: Body, narrow: bool) -> None:
        """Register the type in which a tensor is available."""
        self.home[id(tensor)] = body
        self.forms[id(tensor), narrow] = tensor
        if narrow:
            tensor.dtype = self.kind.dtype

    # --- inputs of a node ---------------------------------------------------------------------------

    def _inputs(self, node: Node, slots: Slots | None) -> None:
        for index, tensor in enumerate(node.inputs):
            either = node.op == "Cast" or (slots is not None and slots.indifferent)
            if id(tensor) not in self.floats or (either and isinstance(tensor, Variable)):
                continue
            narrow = slots is not None and index in slots.inputs
            if isinstance(tensor, Constant):
                if narrow:
                    edit.replace_input(node, index, self._constant(node, index, tensor))
                continue
            wanted = self._form(tensor, narrow)
            if wanted is not tensor:
                edit.replace_input(node, index, wanted)

    def _form(self, tensor: Tensor, narrow: bool) -> Tensor:
        """Return a variable in the wanted type, with a Cast after its node if it has the other type."""
        if (id(tensor), narrow) not in self.forms:
            source = self.forms[id(tensor), not narrow]
            name = f"{tensor.name}_{self.kind.name if narrow else 'fp32'}"
            result = Variable(self.names.fresh(name), self._dtype(narrow), tensor.shape)
            self._cast(source, result, self.home[id(tensor)])
            self.forms[id(tensor), narrow] = result
        return self.forms[id(tensor), narrow]

    def _cast(self, source: Tensor, result: Tensor, body: Body) -> None:
        to = onnx_dtype(result.dtype)
        body.nodes.append(Node("Cast", self.names.fresh(f"{result.name}/Cast"), {"to": to}, [source], [result]))
        self.casts += 1

    def _dtype(self, narrow: bool) -> np.dtype[Any]:
        return self.kind.dtype if narrow else FLOAT32

    def _constant(self, node: Node, index: int, tensor: Constant) -> Constant:
        """Return a constant in the narrower type, shared by all its readers except those with a replaced value."""
        replaced = self.decision.replaced.get((id(node), index))
        value = query.constant(tensor) if replaced is None else replaced.values
        if value is None:
            raise ValueError(f"'{tensor.name}' is no constant")
        key = (id(tensor), b"" if replaced is None else value.tobytes())
        if key not in self.constants:
            made = edit.add_constant(
                self.graph, f"{tensor.name}_{self.kind.name}", narrowed(value, self.kind), self.names
            )
            self.constants[key] = made
        return self.constants[key]

    # --- outputs of a node --------------------------------------------------------------------------

    def _outputs(self, node: Node, slots: Slots | None, body: Body, ends: set[int]) -> None:
        for index, tensor in enumerate(node.outputs):
            if id(tensor) not in self.floats:
                continue
            narrow = slots is not None and index in slots.outputs
            if narrow:
                self._retype(node)
            fits = id(tensor) not in self.decision.tensors
            wanted = narrow if id(tensor) not in ends else not self.keep_io and fits
            if wanted == narrow:
                self._given(tensor, body, narrow)
                continue
            inner = Variable(
                self.names.fresh(f"{tensor.name}_{self.kind.name if narrow else 'fp32'}"), shape=tensor.shape
            )
            inner.dtype = self._dtype(narrow)
            edit.replace_output(node, index, inner)
            self._given(tensor, body, wanted)
            self.forms[id(tensor), narrow] = inner
            self._cast(inner, tensor, body)

    def _retype(self, node: Node) -> None:
        """Change the attribute that sets the output type of a node, if there is one."""
        if node.op == "Cast":
            node.attrs["to"] = onnx_dtype(self.kind.dtype)
        elif node.op == "ConstantOfShape":
            value = query.attribute(node, "value")
            node.attrs["value"] = Constant(f"{node.name}_value", narrowed(value, self.kind))
        elif "output_dtype" in node.attrs:
            node.attrs["output_dtype"] = onnx_dtype(self.kind.dtype)

    def _end(self, body: Body) -> None:
        """Keep the outputs of a body in float32."""
        for place, tensor in enumerate(body.outputs):
            if id(tensor) in self.floats and isinstance(tensor, Variable):
                body.outputs[place] = self._form(tensor, narrow=False)


def drop_idle_casts(graph: Graph) -> int:
    """Remove Casts to the type of their input, in place, except those that give an output. Return their number."""
    outputs = query.output_names(graph)
    dropped = 0
    for _, body in query.scopes(graph):
        for node in list(body.nodes):
            if node.op != "Cast" or node.outputs[0].name in outputs:
                continue
            kind = query.dtype(node.inputs[0])
            if kind is not None and kind == query.dtype(node.outputs[0]):
                for reader, index in query.readers(node.outputs[0]):
                    edit.replace_input(reader, index, node.inputs[0])
                dropped += 1
    if dropped:
        edit.sweep(graph)
    return dropped

"""An ONNX graph as a `torch.fx.GraphModule` that can be trained."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import fx, nn

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.query import attribute, bodies, constant, dtype, ordered, readers, shape
from sbonnx.ops import MAKES_TENSORS, STANDARD_DOMAINS
from sbonnx.qat.onnx_to_torch.constants import as_numbers, is_short, is_weight, made_of, plain
from sbonnx.qat.onnx_to_torch.identifiers import PythonNames
from sbonnx.qat.onnx_to_torch.norms import BatchNorm
from sbonnx.qat.onnx_to_torch.operators import AsTensor, Op, Placed, Sizes
from sbonnx.qat.onnx_to_torch.shape_arith import LONGEST, SIZES
from sbonnx.qat.onnx_to_torch.specialize import require_settled, settle
from sbonnx.spec import Array
from sbonnx.torchnet import FUNCTIONS, NUMBERS, Call, compute

CALLED: Final = "call_module"
"""torch's name of nodes that call a submodule."""

HELD: Final = "get_attr"
"""torch's name of nodes that read a parameter or a buffer."""

META: Final = "sbonnx"
"""Key of what `reimport` says of a module, in `module.meta`."""

STATISTICS: Final = {"BatchNormalization": (3, 4)}
"""Inputs that training updates without gradients."""

FOLDED: Final = 64
"""Integers that follow from constants are computed beforehand up to so many."""


class Reimported(fx.GraphModule):  # type: ignore[misc]
    """A graph of ONNX as a module. Copies and pickles keep what `meta` says."""

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _restored, (body, imports, self.meta)


def _restored(body: dict[str, Any], imports: str, meta: dict[str, Any]) -> Reimported:
    """A module from what was pickled of it."""
    plain = fx.graph_module.reduce_graph_module(body, imports)
    made = Reimported(plain, plain.graph, class_name="Reimported")
    made.meta.update(meta)
    return made


class Read(NamedTuple):
    """One read of one node: argument `position` of `node`."""

    node: fx.Node
    position: int

    @property
    def value(self) -> fx.Node:
        """What is read."""
        return self.node.args[self.position]


def reimport(
    graph: Graph,
    *,
    device: str | torch.device = "cpu",
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Reimported:
    """The graph as a module of torch, computing the same, for training.

        module = reimport(graph)
        logits = module(images)["logits"]

    - Its inputs are those of the graph in order, or by their names (as Python has them); its output is a dict by the
      names of the graph's outputs.
    - Every node is a submodule named after it (`sbonnx.qat.onnx_to_torch.operators.Op`); weights stand at the top,
      named after
      their initializers. Both by `naming.PythonNames`.
    - Floating point initializers of rank 1 and more are parameters. Buffers are: integers, single numbers of
      element-wise arithmetic, masks, and the statistics of norms, of which every node has its own. Shapes and axes
      stand in the code.
    - BatchNormalization is trained and updates its statistics in train mode (`norms.BatchNorm`); in eval mode all is
      as in onnxruntime. Dropout does nothing, as in a model for inference.
    - Shapes are computed when it runs: axes that the graph leaves open may have any size.
    - `module.meta["sbonnx"]` holds, by their names in Python: `parameters`, `buffers` and `inputs` with the names in
      the graph; `statistics` (by node, the names of mean and variance); `outputs`; `opset`.

    Args:
        graph: is not changed. Ops that lead to no output are left out.
        device: where parameters and buffers lie.
        fixed, shapes: what makes the conditions of branches constant: see `settle`.

    Raises:
        ModelError: an op that torch cannot compute here, named with opset and node; a branch with a condition that is
            not constant; a constant of a type that torch does not have.
    """
    settled = settle(graph, fixed=fixed, shapes=shapes)
    nodes = _needed(settled)
    require_settled(settled)
    _require_known(nodes, settled.opset)
    made: Reimported = _Importer(settled).module(nodes).to(device)
    return made


def parameter_name(module: fx.GraphModule, initializer: str) -> str:
    """The name of the parameter that an initializer became.

    Raises:
        ModelError: it became none.
    """
    meta = _meta(module)
    for name, source in meta["parameters"].items():
        if source == initializer:
            return str(name)
    what = "a buffer" if initializer in meta["buffers"].values() else "not read by a node as a tensor"
    raise ModelError(f"initializer '{initializer}' is no parameter of the module: it is {what}")


def site_of(module: fx.GraphModule, node_name: str, input_index: int) -> Read:
    """Where an input of an ONNX node is read: a module put between there changes what this node reads, and only that.

        read = site_of(module, "conv1", 0)
        with module.graph.inserting_before(read.node):
            quantized = module.graph.call_module("conv1_input_quantizer", (read.value,))
        read.node.update_arg(read.position, quantized)

    Raises:
        ModelError: there is no such node, or this input is no tensor (left out, or a shape in the code).
    """
    for node in module.graph.nodes:
        if node.op != CALLED:
            continue
        target = module.get_submodule(str(node.target))
        if isinstance(target, Op) and target.call.name == node_name:
            if not 0 <= input_index < len(node.args) or not isinstance(node.args[input_index], fx.Node):
                raise ModelError(f"input {input_index} of node '{node_name}' ({target.call.op}) is no tensor")
            return Read(node, input_index)
    raise ModelError(f"the module has no node '{node_name}': it leads to no output, or the graph was another one")


def _meta(module: nn.Module) -> dict[str, Any]:
    """What `reimport` said of a module."""
    found: dict[str, Any] | None = getattr(module, "meta", {}).get(META)
    if found is None:
        raise ModelError("the module does not come from sbonnx.qat.onnx_to_torch.reimport: it has no meta['sbonnx']")
    return found


def _needed(graph: Graph) -> list[Node]:
    """The nodes that lead to an output, in topological order."""
    stack = [node for tensor in graph.outputs for node in tensor.inputs]
    needed: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) not in needed:
            needed.add(id(node))
            stack.extend(maker for tensor in node.inputs for maker in tensor.inputs)
    return [node for node in ordered(graph.nodes) if id(node) in needed]


def _require_known(nodes: Iterable[Node], opset: int) -> None:
    """Nothing, where torch has every op.

    Raises:
        ModelError: it has not; names the first, and what else is missing.
    """
    unknown = {
        node.op: node
        for node in reversed(list(nodes))
        if node.op not in FUNCTIONS or bodies(node) or (node.domain or "") not in STANDARD_DOMAINS
    }
    if unknown:
        *others, first = unknown.values()
        domain = f" of domain '{first.domain}'" if (first.domain or "") not in STANDARD_DOMAINS else ""
        more = f" Nor are there {', '.join(sorted(node.op for node in others))}." if others else ""
        raise ModelError(
            f"there is no {first.op}{domain} (opset {opset}, node '{first.name}') among the ops that torch computes "
            f"here.{more} Leave that part out of the model to train, or write it in other ops"
        )


class _Importer:
    """Builds a graph of torch.fx beside the modules it calls.

    Attributes:
        values: node of fx by tensor name.
        sizes: names of tensors that are Python numbers there.
        known: integers that follow from constants alone, by tensor name.
    """

    def __init__(self, graph: Graph) -> None:
        self.source = graph
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.names = PythonNames()
        self.values: dict[str, fx.Node] = {}
        self.sizes: set[str] = set()
        self.known: dict[str, Array] = {}
        self.as_tensors: dict[str, fx.Node] = {}
        self.meta: dict[str, Any] = {
            **{key: {} for key in ("parameters", "buffers", "inputs", "statistics")},
            "outputs": [tensor.name for tensor in graph.outputs],
            "opset": graph.opset,
        }

    def module(self, nodes: Sequence[Node]) -> Reimported:
        """The module."""
        for tensor in self.source.inputs:
            name = self.names.fresh(tensor.name)
            self.meta["inputs"][name] = tensor.name
            self.values[tensor.name] = self.graph.placeholder(name)
        held = {tensor.name: tensor for node in nodes for tensor in node.inputs if isinstance(tensor, Constant)}
        reserved = {name: self.names.fresh(name) for name in held}  # weights keep their names, nodes give way
        self.reserved = reserved
        for node in nodes:
            self.add(node)
        self.graph.output({tensor.name: self.tensor(tensor, None) for tensor in self.source.outputs})
        self.graph.lint()
        made = Reimported(self.root, self.graph, class_name="Reimported")
        made.meta[META] = self.meta
        return made

    def add(self, node: Node) -> None:
        """One node."""
        attributes = {name: plain(attribute(node, name)) for name in node.attrs}
        used = [at for at, tensor in enumerate(node.outputs) if readers(tensor) or self._is_output(tensor)]
        count = len(node.outputs) if node.op == "Split" else used[-1] + 1
        call = Call(torch, node.name, node.op, attributes, self.source.opset, count)
        if self._fold(node, call):
            return
        if self._is_of_sizes(node):
            arguments = tuple(self.argument(node, index, numbers=True) for index in range(len(node.inputs)))
            self.values[node.outputs[0].name] = self._call(node.name, Sizes(call), arguments)
            self.sizes.add(node.outputs[0].name)
            return
        if node.op == "Range" and (kind := dtype(node.outputs[0])) is not None:
            attributes["dtype"] = kind.name
        arguments = tuple(self.argument(node, index) for index in range(len(node.inputs)))
        made = self._call(node.name, self._operator(node, call), arguments)
        if count == 1:
            self.values[node.outputs[0].name] = made
            return
        for index in used:
            self.values[node.outputs[index].name] = self.graph.call_function(operator.getitem, (made, index))

    def argument(self, node: Node, index: int, *, numbers: bool = False) -> Any:
        """What a node reads at one place: a node of fx, Python numbers, or None."""
        tensor = node.inputs[index]
        if not tensor.name:
            return None
        numbers = numbers or index in NUMBERS.get(node.op, ())
        if numbers and tensor.name in self.sizes:
            return self.values[tensor.name]
        values = self._constant(tensor)
        if numbers and values is not None and is_short(values) and not (node.op == "Pow" and values.ndim):
            return as_numbers(values)
        if index in STATISTICS.get(node.op, ()) and values is not None:
            return self._statistic(node, index, tensor)
        return self.tensor(tensor, node)

    def tensor(self, tensor: Tensor, reader: Node | None) -> fx.Node:
        """The node of fx that gives a tensor."""
        name = tensor.name
        if name in self.sizes:
            if name not in self.as_tensors:
                kind = dtype(tensor)
                module = AsTensor("int64" if kind is None else kind.name)
                self.as_tensors[name] = self._call(f"{name}_tensor", module, (self.values[name],))
            return self.as_tensors[name]
        if name not in self.values:
            self.values[name] = self._held(tensor, reader)
        return self.values[name]

    def _held(self, tensor: Tensor, reader: Node | None) -> fx.Node:
        """A constant as a parameter or buffer."""
        values = self._constant(tensor)
        if values is None:
            raise ModelError(f"'{tensor.name}' is computed by no node that leads to an output: the graph is not sorted")
        made = made_of(tensor.name, values, reader)
        name = self.reserved.get(tensor.name) or self.names.fresh(tensor.name)
        if is_weight(tensor, values):
            self.root.register_parameter(name, nn.Parameter(made))
            self.meta["parameters"][name] = tensor.name
        else:
            self.root.register_buffer(name, made)
            self.meta["buffers"][name] = tensor.name
        return self.graph.create_node(HELD, name, name=name)

    def _statistic(self, node: Node, index: int, tensor: Tensor) -> fx.Node:
        """A running mean or variance: of this node alone, for simplification lets equal constants be one."""
        values = constant(tensor)
        assert values is not None
        alone = len(readers(tensor)) == 1
        name = self.reserved[tensor.name] if alone else self.names.fresh(f"{node.name}_{('mean', 'var')[index - 3]}")
        self.root.register_buffer(name, made_of(tensor.name, values, node))
        self.meta["buffers"][name] = tensor.name
        self.meta["statistics"].setdefault(node.name, []).append(name)
        return self.graph.create_node(HELD, name, name=name)

    def _operator(self, node: Node, call: Call) -> Op:
        """The module for a node."""
        if node.op == "BatchNormalization":
            return BatchNorm(call, kept=all(isinstance(node.inputs[index], Constant) for index in (3, 4)))
        return (Placed if node.op in MAKES_TENSORS else Op)(call, single=call.outputs == 1)

    def _call(self, stem: str, module: nn.Module, arguments: tuple[Any, ...]) -> fx.Node:
        """Adds a module and a call of it."""
        name = self.names.fresh(stem)
        self.root.add_module(name, module)
        return self.graph.create_node("call_module", name, arguments, name=name)

    def _constant(self, tensor: Tensor) -> Array | None:
        """The values of a constant, or of what follows from constants."""
        return self.known[tensor.name] if tensor.name in self.known else constant(tensor)

    def _fold(self, node: Node, call: Call) -> bool:
        """Whether a node computes a few integers from constants, as exporters do for axes and pads: done here."""
        out, kind = node.outputs[0], dtype(node.outputs[0])
        given = [self._constant(tensor) if tensor.name else None for tensor in node.inputs]
        if len(node.outputs) != 1 or kind is None or kind.kind not in "iub" or call.op in ("Shape", "Size"):
            return False
        held = [values for tensor, values in zip(node.inputs, given, strict=True) if tensor.name]
        if not held or any(values is None or values.dtype.kind not in "iub" for values in held):
            return False
        if max(values.size for values in held if values is not None) > FOLDED or _count(out) > FOLDED:
            return False
        tensors = [None if values is None else made_of(node.name, values, node) for values in given]
        self.known[out.name] = compute(FUNCTIONS[node.op], call, tensors).numpy()
        return True

    def _is_output(self, tensor: Tensor) -> bool:
        return any(output is tensor for output in self.source.outputs)

    def _is_of_sizes(self, node: Node) -> bool:
        """Whether a node computes with sizes alone, and gives an integer or a short vector."""
        if node.op in ("Shape", "Size"):
            return True
        out = node.outputs[0]
        kind, dims = dtype(out), shape(out)
        if node.op not in SIZES or len(node.outputs) != 1 or kind is None or kind.kind not in "iub" or dims is None:
            return False
        known = [size for size in dims if isinstance(size, int)]
        if (
            len(dims) > 1
            or max(known, default=0) > LONGEST
            or (node.op == "ConstantOfShape" and len(known) < len(dims))
        ):
            return False
        given = [tensor for tensor in node.inputs if tensor.name]
        return any(tensor.name in self.sizes for tensor in given) and all(map(self._is_size, given))

    def _is_size(self, tensor: Tensor) -> bool:
        """Whether a tensor is an integer or a vector of them in Python, or a constant that can be."""
        values = self._constant(tensor)
        if values is None:
            return tensor.name in self.sizes
        return values.ndim <= 1 and values.size <= LONGEST and values.dtype.kind in "iub"


def _count(tensor: Tensor) -> int:
    """How many elements a tensor has; one too many where that is not known."""
    dims = shape(tensor)
    return FOLDED + 1 if dims is None else math.prod(size if isinstance(size, int) else FOLDED + 1 for size in dims)


__all__ = ["META", "Read", "Reimported", "parameter_name", "reimport", "settle", "site_of"]

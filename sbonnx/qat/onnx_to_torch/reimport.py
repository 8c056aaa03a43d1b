"""Conversion of an ONNX graph to a trainable `torch.fx.GraphModule`."""

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
"""torch.fx opcode of nodes that call a submodule."""

HELD: Final = "get_attr"
"""torch.fx opcode of nodes that read a parameter or a buffer."""

META: Final = "sbonnx"
"""Key in `module.meta` of the information that `reimport` stores."""

STATISTICS: Final = {"BatchNormalization": (3, 4)}
"""Inputs that are running statistics: training updates them without gradients."""

FOLDED: Final = 64
"""Largest number of elements of an integer tensor for constant folding."""


class Reimported(fx.GraphModule):  # type: ignore[misc]
    """ONNX graph as a module. Copying and pickling preserve `meta`."""

    def __reduce__(self) -> tuple[Any, ...]:
        _, (body, imports) = super().__reduce__()
        return _restored, (body, imports, self.meta)


def _restored(body: dict[str, Any], imports: str, meta: dict[str, Any]) -> Reimported:
    """Restore a pickled module."""
    plain = fx.graph_module.reduce_graph_module(body, imports)
    made = Reimported(plain, plain.graph, class_name="Reimported")
    made.meta.update(meta)
    return made


class Read(NamedTuple):
    """One input of a node: argument `position` of `node`."""

    node: fx.Node
    position: int

    @property
    def value(self) -> fx.Node:
        """Node whose value is read."""
        return self.node.args[self.position]


def reimport(
    graph: Graph,
    *,
    device: str | torch.device = "cpu",
    fixed: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int | str | None]] | None = None,
) -> Reimported:
    """Convert the graph to an equivalent torch module for training.

        module = reimport(graph)
        logits = module(images)["logits"]

    - Inputs are passed in the order of the graph, or by name (as Python identifiers). The output is a dict by the
      names of the graph's outputs.
    - Every node is a submodule named after it (`sbonnx.qat.onnx_to_torch.operators.Op`). Weights are attributes of the
      root module, named after their initializers. Names are converted by `identifiers.PythonNames`.
    - Floating-point initializers of rank 1 or more are parameters. Buffers are: integers, single numbers in
      element-wise arithmetic, masks, and the statistics of norms (separate for each node). Shapes and axes are Python
      constants in the code.
    - BatchNormalization is trained and updates its statistics in train mode (`norms.BatchNorm`); in eval mode the
      module computes the same as onnxruntime. Dropout is a no-op, as in a model for inference.
    - Shapes are computed at run time: dynamic axes of the graph may have any size.
    - `module.meta["sbonnx"]` contains: `parameters`, `buffers` and `inputs` (name in the graph by Python name);
      `statistics` (Python names of mean and variance by node); `outputs`; `opset`.

    Args:
        graph: graph to convert; not changed. Nodes that do not lead to an output are left out.
        device: device of parameters and buffers.
        fixed, shapes: values and shapes of inputs that make the conditions of branches constant; see `settle`.

    Raises:
        ModelError: an op is not supported (the message names opset and node), the condition of a branch is not
            constant, or torch does not have the type of a constant.
    """
    settled = settle(graph, fixed=fixed, shapes=shapes)
    nodes = _needed(settled)
    require_settled(settled)
    _require_known(nodes, settled.opset)
    made: Reimported = _Importer(settled).module(nodes).to(device)
    return made


def parameter_name(module: fx.GraphModule, initializer: str) -> str:
    """Return the name of the parameter of an initializer.

    Raises:
        ModelError: the initializer did not become a parameter.
    """
    meta = _meta(module)
    for name, source in meta["parameters"].items():
        if source == initializer:
            return str(name)
    what = "a buffer" if initializer in meta["buffers"].values() else "not read by a node as a tensor"
    raise ModelError(f"initializer '{initializer}' is no parameter of the module: it is {what}")


def site_of(module: fx.GraphModule, node_name: str, input_index: int) -> Read:
    """Find the read of an input of an ONNX node. A module inserted there changes this input of this node only.

        read = site_of(module, "conv1", 0)
        with module.graph.inserting_before(read.node):
            quantized = module.graph.call_module("conv1_input_quantizer", (read.value,))
        read.node.update_arg(read.position, quantized)

    Raises:
        ModelError: there is no such node, or this input is not a tensor (omitted, or a shape in the code).
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
    """Return the information that `reimport` stored in a module."""
    found: dict[str, Any] | None = getattr(module, "meta", {}).get(META)
    if found is None:
        raise ModelError("the module does not come from sbonnx.qat.onnx_to_torch.reimport: it has no meta['sbonnx']")
    return found


def _needed(graph: Graph) -> list[Node]:
    """Return the nodes that lead to an output, in topological order."""
    stack = [node for tensor in graph.outputs for node in tensor.inputs]
    needed: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) not in needed:
            needed.add(id(node))
            stack.extend(maker for tensor in node.inputs for maker in tensor.inputs)
    return [node for node in ordered(graph.nodes) if id(node) in needed]


def _require_known(nodes: Iterable[Node], opset: int) -> None:
    """Check that every op is supported.

    Raises:
        ModelError: an op is not supported; the message names the first such node and all other missing ops.
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
    """Builds a torch.fx graph and the modules that it calls.

    Attributes:
        values: fx node by tensor name.
        sizes: names of tensors that are Python numbers in the fx graph.
        known: constant-folded integers by tensor name.
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
        """Convert the nodes and return the finished module."""
        for tensor in self.source.inputs:
            name = self.names.fresh(tensor.name)
            self.meta["inputs"][name] = tensor.name
            self.values[tensor.name] = self.graph.placeholder(name)
        held = {tensor.name: tensor for node in nodes for tensor in node.inputs if isinstance(tensor, Constant)}
        reserved = {name: self.names.fresh(name) for name in held}  # before the nodes: weights keep their names
        self.reserved = reserved
        for node in nodes:
            self.add(node)
        self.graph.output({tensor.name: self.tensor(tensor, None) for tensor in self.source.outputs})
        self.graph.lint()
        made = Reimported(self.root, self.graph, class_name="Reimported")
        made.meta[META] = self.meta
        return made

    def add(self, node: Node) -> None:
        """Convert one node."""
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
        """Return one input of a node as an fx node, Python numbers, or None."""
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
        """Return the fx node of a tensor."""
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
        """Register a constant as a parameter or buffer and return its fx node."""
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
        """Register a running mean or variance as a buffer; a constant with several readers is copied for each."""
        values = constant(tensor)
        assert values is not None
        alone = len(readers(tensor)) == 1
        name = self.reserved[tensor.name] if alone else self.names.fresh(f"{node.name}_{('mean', 'var')[index - 3]}")
        self.root.register_buffer(name, made_of(tensor.name, values, node))
        self.meta["buffers"][name] = tensor.name
        self.meta["statistics"].setdefault(node.name, []).append(name)
        return self.graph.create_node(HELD, name, name=name)

    def _operator(self, node: Node, call: Call) -> Op:
        """Create the module of a node."""
        if node.op == "BatchNormalization":
            return BatchNorm(call, kept=all(isinstance(node.inputs[index], Constant) for index in (3, 4)))
        return (Placed if node.op in MAKES_TENSORS else Op)(call, single=call.outputs == 1)

    def _call(self, stem: str, module: nn.Module, arguments: tuple[Any, ...]) -> fx.Node:
        """Add a module and a call of it."""
        name = self.names.fresh(stem)
        self.root.add_module(name, module)
        return self.graph.create_node("call_module", name, arguments, name=name)

    def _constant(self, tensor: Tensor) -> Array | None:
        """Return the values of a constant or constant-folded tensor, else None."""
        return self.known[tensor.name] if tensor.name in self.known else constant(tensor)

    def _fold(self, node: Node, call: Call) -> bool:
        """Fold a node that computes a few integers from constants, such as exported axes and pads.

        Returns:
            False if the node cannot be folded.
        """
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
        """Return whether a node computes an integer or a short vector from sizes only."""
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
        """Return whether a tensor is, or can become, a Python integer or a tuple of integers."""
        values = self._constant(tensor)
        if values is None:
            return tensor.name in self.sizes
        return values.ndim <= 1 and values.size <= LONGEST and values.dtype.kind in "iub"


def _count(tensor: Tensor) -> int:
    """Count the elements of a tensor; a number above `FOLDED` if its shape is not known."""
    dims = shape(tensor)
    return FOLDED + 1 if dims is None else math.prod(size if isinstance(size, int) else FOLDED + 1 for size in dims)


__all__ = ["META", "Read", "Reimported", "parameter_name", "reimport", "settle", "site_of"]

"""Conversion of graph nodes to a `torch.fx` graph and its modules, and of constants to parameters or buffers."""

from __future__ import annotations

import keyword
import math
import operator
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import fx, nn

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Tensor
from sbonnx.graph.query import attribute, constant, dtype, readers, shape
from sbonnx.ops import MAKES_TENSORS, TAKES_NUMBERS
from sbonnx.spec import Array
from sbonnx.torchnet import FUNCTIONS, NUMBERS, Call, Unfit, as_tensor, compute
from sbonnx.torchnet.onnx_to_torch.operators import (
    BatchNorm,
    NodeModule,
    ShapeArithmetic,
    SizesToTensor,
    TensorCreation,
)
from sbonnx.torchnet.onnx_to_torch.shape_arith import LONGEST, SIZES

GET_ATTR: Final = "get_attr"
"""torch.fx opcode of nodes that read a parameter or a buffer."""

STATISTICS: Final = {"BatchNormalization": (3, 4)}
"""Inputs that are running statistics: training updates them without gradients."""

VALUES: Final = {
    "Resize": (1, 2), "OneHot": (2,), "QuantizeLinear": (1,), "DequantizeLinear": (1,), "Where": (1, 2),
    "RotaryEmbedding": (1, 2, 3), "GroupQueryAttention": (7, 8), "MatMulNBits": (3,), "GatherBlockQuantized": (3,),
}  # fmt: skip
"""Inputs that are never weights, regardless of their size: limits, zero points, tables of angles."""

MASKED: Final = 1e30
"""Constants of this magnitude or larger are masks and are not trained."""

FOLDED: Final = 64
"""Largest number of elements of an integer tensor for constant folding."""

_TAKEN: Final = frozenset(dir(fx.GraphModule)) | frozenset(dir(nn.Module())) | {"meta", "shape_env"}
"""Attributes of every graph module, which must not be used as names."""


class PythonNames:
    """Assigns a unique Python identifier to each name of a graph; characters other than letters and digits become "_".

    "/layer1/conv.0/Conv" becomes `layer1_conv_0_Conv`; a duplicate gets the suffix `_1`.
    """

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._next: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """Return an unused identifier that is not a keyword and not an attribute of graph modules."""
        stem = re.sub(r"\W", "_", name, flags=re.ASCII).strip("_") or "unnamed"
        stem = f"_{stem}" if stem[0].isdigit() else stem
        stem = f"{stem}_" if stem in _TAKEN or keyword.iskeyword(stem) else stem
        unique, count = stem, self._next.get(stem, 0)
        while unique in self._given:
            count += 1
            unique = f"{stem}_{count}"
        self._next[stem] = count
        self._given.add(unique)
        return unique


class GraphImporter:
    """Builds a torch.fx graph and the modules that it calls.

    Attributes:
        root: module that holds parameters, buffers and the modules of the nodes.
        graph: the torch.fx graph.
        meta: information on names, see `reimport.reimport`.
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
        self.reserved: dict[str, str] = {}
        self.meta: dict[str, Any] = {
            **{key: {} for key in ("parameters", "buffers", "inputs", "statistics")},
            "outputs": [tensor.name for tensor in graph.outputs],
            "opset": graph.opset,
        }

    def build(self, nodes: Sequence[Node]) -> None:
        """Convert the inputs, the nodes and the outputs."""
        for tensor in self.source.inputs:
            name = self.names.fresh(tensor.name)
            self.meta["inputs"][name] = tensor.name
            self.values[tensor.name] = self.graph.placeholder(name)
        constants = {tensor.name: tensor for node in nodes for tensor in node.inputs if isinstance(tensor, Constant)}
        self.reserved = {name: self.names.fresh(name) for name in constants}  # first, so that weights keep their names
        for node in nodes:
            self.add(node)
        self.graph.output({tensor.name: self.tensor(tensor, None) for tensor in self.source.outputs})
        self.graph.lint()

    def add(self, node: Node) -> None:
        """Convert one node."""
        attributes = {name: attribute(node, name) for name in node.attrs}  # arrays copied, so that they can be pickled
        attributes = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in attributes.items()}
        outputs = {id(tensor) for tensor in self.source.outputs}
        used = [at for at, tensor in enumerate(node.outputs) if readers(tensor) or id(tensor) in outputs]
        count = len(node.outputs) if node.op == "Split" else used[-1] + 1
        call = Call(torch, node.name, node.op, attributes, self.source.opset, count, node.domain or "")
        if self._fold(node, call):
            return
        if self._is_shape_arithmetic(node):
            arguments = tuple(self.argument(node, index, numbers=True) for index in range(len(node.inputs)))
            self.values[node.outputs[0].name] = self._call(node.name, ShapeArithmetic(call), arguments)
            self.sizes.add(node.outputs[0].name)
            return
        if node.op == "Range" and (kind := dtype(node.outputs[0])) is not None:
            attributes["dtype"] = kind.name
        arguments = tuple(self.argument(node, index) for index in range(len(node.inputs)))
        if node.op == "BatchNormalization":
            module: NodeModule = BatchNorm(call, kept=all(isinstance(node.inputs[at], Constant) for at in (3, 4)))
        else:
            module = (TensorCreation if node.op in MAKES_TENSORS else NodeModule)(call, single=count == 1)
        result = self._call(node.name, module, arguments)
        if count == 1:
            self.values[node.outputs[0].name] = result
            return
        for index in used:
            self.values[node.outputs[index].name] = self.graph.call_function(operator.getitem, (result, index))

    def argument(self, node: Node, index: int, *, numbers: bool = False) -> Any:
        """Return one input of a node as an fx node, Python numbers, or None."""
        tensor = node.inputs[index]
        if not tensor.name:
            return None
        numbers = numbers or index in NUMBERS.get(node.op, ())
        if numbers and tensor.name in self.sizes:
            return self.values[tensor.name]
        values = self._constant(tensor)
        if numbers and values is not None and _is_short(values) and not (node.op == "Pow" and values.ndim):
            return tuple(values.tolist()) if values.ndim else values.item()
        if index in STATISTICS.get(node.op, ()) and values is not None:
            return self._statistic(node, index, values)
        return self.tensor(tensor, node)

    def tensor(self, tensor: Tensor, reader: Node | None) -> fx.Node:
        """Return the fx node of a tensor; a constant is registered as a parameter or buffer."""
        name = tensor.name
        if name in self.sizes:
            if name not in self.as_tensors:
                kind = dtype(tensor)
                module = SizesToTensor("int64" if kind is None else kind.name)
                self.as_tensors[name] = self._call(f"{name}_tensor", module, (self.values[name],))
            return self.as_tensors[name]
        if name not in self.values:
            values = self._constant(tensor)
            if values is None:
                raise ModelError(f"no node before its readers computes '{name}': the graph is not sorted")
            value, python_name = _as_torch(name, values, reader), self.reserved.get(name) or self.names.fresh(name)
            if is_weight(tensor, values):
                self.root.register_parameter(python_name, nn.Parameter(value))
                self.meta["parameters"][python_name] = name
                self.values[name] = self.graph.create_node(GET_ATTR, python_name, name=python_name)
            else:
                self.values[name] = self._buffer(python_name, name, value)
        return self.values[name]

    def _buffer(self, python_name: str, name: str, value: torch.Tensor) -> fx.Node:
        self.root.register_buffer(python_name, value)
        self.meta["buffers"][python_name] = name
        return self.graph.create_node(GET_ATTR, python_name, name=python_name)

    def _statistic(self, node: Node, index: int, values: Array) -> fx.Node:
        """Register a running mean or variance as a buffer; a constant with several readers is copied for each."""
        tensor = node.inputs[index]
        alone = len(readers(tensor)) == 1
        name = self.reserved[tensor.name] if alone else self.names.fresh(f"{node.name}_{('mean', 'var')[index - 3]}")
        self.meta["statistics"].setdefault(node.name, []).append(name)
        return self._buffer(name, tensor.name, _as_torch(tensor.name, values, node))

    def _call(self, stem: str, module: nn.Module, arguments: tuple[Any, ...]) -> fx.Node:
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
        constants = [values for tensor, values in zip(node.inputs, given, strict=True) if tensor.name]
        if not constants or any(values is None or values.dtype.kind not in "iub" for values in constants):
            return False
        dims = shape(out)  # an unknown size is above the limit
        count = FOLDED + 1 if dims is None else math.prod(n if isinstance(n, int) else FOLDED + 1 for n in dims)
        if max(values.size for values in constants if values is not None) > FOLDED or count > FOLDED:
            return False
        tensors = [None if values is None else _as_torch(node.name, values, node) for values in given]
        self.known[out.name] = compute(FUNCTIONS[node.op], call, tensors).numpy()
        return True

    def _is_shape_arithmetic(self, node: Node) -> bool:
        if node.op in ("Shape", "Size"):
            return True
        out = node.outputs[0]
        kind, dims = dtype(out), shape(out)
        if node.op not in SIZES or len(node.outputs) != 1 or kind is None or kind.kind not in "iub" or dims is None:
            return False
        static_dims = [size for size in dims if isinstance(size, int)]
        dynamic = node.op == "ConstantOfShape" and len(static_dims) < len(dims)
        if len(dims) > 1 or max(static_dims, default=0) > LONGEST or dynamic:
            return False
        given = [tensor for tensor in node.inputs if tensor.name]
        return any(tensor.name in self.sizes for tensor in given) and all(map(self._is_size, given))

    def _is_size(self, tensor: Tensor) -> bool:
        """Return whether a tensor is, or can become, a Python number or a tuple of numbers."""
        values = self._constant(tensor)
        return tensor.name in self.sizes if values is None else _is_short(values, "iub")


def _is_short(values: Array, kinds: str = "iufb") -> bool:
    """Return whether the values can become Python numbers: a scalar or a short vector."""
    return values.ndim <= 1 and values.size <= LONGEST and values.dtype.kind in kinds


def _as_torch(name: str, values: Array, reader: Node | None) -> torch.Tensor:
    try:
        converted: torch.Tensor = as_tensor(torch, np.asarray(values), "cpu")
    except Unfit as error:
        by = f", which node '{reader.name}' ({reader.op}) reads" if reader is not None else ""
        raise ModelError(f"'{name}'{by}: {error}") from error
    return converted


def is_weight(tensor: Tensor, values: Array) -> bool:
    """Return whether a constant becomes a trainable parameter; see `reimport.reimport`."""
    if not (values.dtype.kind == "f" or values.dtype.name == "bfloat16") or values.ndim == 0 or not values.size:
        return False
    uses = readers(tensor)
    if values.size == 1 and all(node.op in TAKES_NUMBERS for node, _ in uses):
        return False
    if all(index in VALUES.get(node.op, ()) for node, index in uses):
        return False
    return bool(np.abs(np.asarray(values, np.float32)).max() < MASKED)

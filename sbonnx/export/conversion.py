"""Common parts of conversions: dequantized tensors and their quantized consumers, products, insertion of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import DEQUANTIZE, MATRIX_PRODUCTS, QUANTIZE, RECTIFIERS
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array


@dataclass(frozen=True)
class Converted:
    """Result of a conversion.

    Attributes:
        done: number of created nodes by op type.
        refusals: nodes that keep their Q/DQ, with the reason.
    """

    done: Counter[str] = field(default_factory=Counter)
    refusals: tuple[Refusal, ...] = ()

    def text(self) -> str:
        """Format the counts: ``3 MatMulNBits, 1 QGemm``."""
        return ", ".join(f"{count} {op}" for op, count in self.done.items()) or "nothing"


@dataclass(frozen=True)
class Codes:
    """A float tensor dequantized from another tensor with constant parameters.

    Attributes:
        node: the DequantizeLinear.
        tensor: the integers it reads.
        scale: float, shape (), (C,) along `axis`, or that of the tensor with `axis` divided into blocks.
        zero: zero point, in the type of the integers and the shape of `scale`.
        axis: axis of a vector or blocks of scales, counted from the front; None for one scale.
        block: block size along `axis`, or None.
    """

    node: Node
    tensor: Tensor
    scale: Array
    zero: Array
    axis: int | None
    block: int | None

    @property
    def values(self) -> Array | None:
        """The integers if they are constant, else None. Those of less than a byte are unpacked at every call."""
        return query.constant(self.tensor)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the integers if they are constant, else None."""
        return tuple(self.tensor.shape) if isinstance(self.tensor, Constant) else None


def dequantized(tensor: Tensor) -> Codes | None:
    """Return the codes of a float tensor; None unless a DequantizeLinear with constant parameters writes it."""
    node = query.producer(tensor)
    if node is None or node.op not in DEQUANTIZE:
        return None
    numbers = numbers_of(node)
    if numbers is None:
        return None
    scale, zero = numbers
    if scale.size == 1 and not node.attrs.get("block_size"):
        return Codes(node, node.inputs[0], scale.reshape(()), zero.reshape(()), None, None)
    rank = query.rank(node.inputs[0])
    axis = int(node.attrs.get("axis", 1))
    if axis < 0:
        if rank is None:
            return None
        axis += rank
    return Codes(node, node.inputs[0], scale, zero, axis, int(node.attrs.get("block_size", 0)) or None)


def numbers_of(node: Node) -> tuple[Array, Array] | None:
    """Return scale and zero point of a Q or DQ node if both are constant; an absent zero point becomes zeros."""
    scale = query.constant(node.inputs[1])
    given = query.optional_input(node, 2)
    zero = query.constant(given)
    if scale is None or (given is not None and zero is None):
        return None
    if zero is None:
        kind = query.dtype(node.inputs[0]) if node.op in DEQUANTIZE else np.dtype(np.uint8)
        if kind is None:
            return None
        zero = np.zeros(scale.shape, kind)
    return scale, zero


def float_of(codes: Codes) -> Array | None:
    """Dequantize constant integers with one scale or one per channel, in the type of the scale."""
    values = codes.values
    if values is None or codes.block is not None:
        return None
    along = [-1 if i == codes.axis else 1 for i in range(values.ndim)] if codes.axis is not None else []
    scale, zero = (part.reshape(along) if along else part for part in (codes.scale, codes.zero))
    steps = values.astype(np.int64) - zero.astype(np.int64)
    return np.asarray((steps.astype(np.float32) * scale.astype(np.float32)).astype(codes.scale.dtype))


def is_weight(tensor: Tensor) -> bool:
    """Return whether a float tensor is a constant or dequantized from one."""
    if isinstance(tensor, Constant):
        return True
    codes = dequantized(tensor)
    return codes is not None and codes.shape is not None


@dataclass(frozen=True)
class Sink:
    """Quantized form of a float tensor, common to all its readers.

    Attributes:
        quantizers: the QuantizeLinear nodes, all with the same parameters.
        scale, zero: per-tensor scale and zero point.
    """

    quantizers: tuple[Node, ...]
    scale: Array
    zero: Array


@dataclass(frozen=True)
class Sinks:
    """Lookup of the quantized form of tensors in one scope."""

    body: Body

    def of(self, tensor: Tensor) -> Sink | Reason:
        """Return the quantized form of a tensor, or the reason why there is none.

        A Relu or Clip in between is skipped if the zero point has the same effect.
        """
        rectifiers: list[Node] = []
        while True:
            readers = query.readers(tensor)
            if any(output is tensor for output in self.body.outputs):
                return Reason("is-output", "its output leaves the graph in float")
            if len(readers) == 1 and readers[0][0].op in RECTIFIERS and readers[0][1] == 0:
                rectifiers.append(readers[0][0])
                tensor = readers[0][0].outputs[0]
                continue
            break
        sink = self._quantized(tensor, [node for node, _ in readers])
        if isinstance(sink, Reason):
            return sink if not rectifiers else Reason(sink.code, f"after its {rectifiers[-1].op}, {sink}")
        for node in rectifiers:
            if not changes_no_code(node, sink.scale, sink.zero):
                return Reason(
                    "rectifier-has-effect", f"the {node.op} after it has an effect that its zero point does not have"
                )
        return sink

    def _quantized(self, tensor: Tensor, readers: list[Node]) -> Sink | Reason:
        mine = {id(node) for node in self.body.nodes}
        other = next((node for node in readers if node.op not in QUANTIZE), None)
        if other is not None or not readers:
            return (
                Reason("read-in-float", f"its output is read in float by '{other.name}'")
                if other is not None
                else Reason("nothing-reads", "nothing reads its output")
            )
        qparams: list[tuple[Array, Array]] = []
        for node in readers:
            numbers = numbers_of(node)
            if numbers is None or numbers[0].size != 1 or id(node) not in mine:
                return Reason("scale-not-constant", f"'{node.name}' has no single constant scale")
            if str(numbers[1].dtype) not in ("uint8", "int8"):
                return Reason("type-of-codes", f"'{node.name}' makes {numbers[1].dtype} of it")
            qparams.append((numbers[0].reshape(()), numbers[1].reshape(())))
        scale, zero = qparams[0]
        if any(other != (scale, zero) or other[1].dtype != zero.dtype for other in qparams):
            return Reason("readers-have-other-scales", "its readers quantize it by different scales")
        return Sink(tuple(readers), scale, zero)


def changes_no_code(node: Node, scale: Array, zero: Array) -> bool:
    """Return whether a Relu or Clip before a QuantizeLinear has no effect on any code.

    Rounding is monotonic: saturation replaces a bound if the bound itself has the lowest (highest) code.
    """
    info = np.iinfo(zero.dtype)
    low, high = bounds_of(node)
    if low is None or high is None:
        return False

    def code(value: Any) -> float:
        return float(np.rint(np.float32(value) / scale.astype(np.float32)) + float(zero))

    return bool((np.isinf(low) or code(low) <= info.min) and (np.isinf(high) or code(high) >= info.max))


def bounds_of(node: Node) -> tuple[float | None, float | None]:
    """Return the bounds of a Relu or Clip, infinite if absent; None for one that is not constant."""
    if node.op == "Relu":
        return 0.0, np.inf
    bounds: list[float | None] = []
    for index, (name, default) in enumerate((("min", -np.inf), ("max", np.inf)), start=1):
        given = query.optional_input(node, index)
        value = np.asarray(node.attrs.get(name, default)) if given is None else query.constant(given)
        bounds.append(None if value is None else float(value.reshape(())))
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class NodeSite:
    """A node, its scope, and the opset of the graph."""

    node: Node
    body: Body
    opset: int


class Writer:
    """State of one conversion: used names, and the number of written nodes by op type."""

    def __init__(self, graph: Graph) -> None:
        self.names = edit.Names(graph)
        self.done: Counter[str] = Counter()

    def constant(self, body: Body, stem: str, value: Array) -> Tensor:
        """Add a constant."""
        tensor: Tensor = edit.add_constant(body, stem, value, self.names)
        return tensor

    def numbers(self, body: Body, codes: Codes | Sink) -> list[Tensor]:
        """Return scale and zero point as tensors: those of the Q or DQ node; an absent zero point is added."""
        node = codes.node if isinstance(codes, Codes) else codes.quantizers[0]
        zero = query.optional_input(node, 2)
        return [node.inputs[1], self.constant(body, f"{node.name}_zero_point", codes.zero) if zero is None else zero]

    def add(
        self,
        site: NodeSite,
        op: str,
        inputs: Sequence[Tensor],
        *,
        attrs: Mapping[str, Any] | None = None,
        domain: str | None = None,
        outputs: Sequence[Tensor] = (),
        kind: Any = np.float32,
    ) -> Tensor:
        """Add a node of `op` in place of the node; return its output. Without `outputs`, a new one of type `kind`."""
        stem = f"{site.node.name}_{op}"
        outputs = list(outputs) or [Variable(self.names.fresh(f"{stem}_output"), np.dtype(kind))]
        added = edit.add_node(site.body, op, inputs, names=self.names, stem=stem, attrs=attrs, outputs=outputs)
        added.domain = domain
        self.done[op] += 1
        return outputs[0]

    def written(self, body: Body, sink: Sink) -> Tensor:
        """Return the tensor of codes for a new node to write, rewired so that all readers of `sink`'s codes read it."""
        first, *others = sink.quantizers
        tensor: Tensor = first.outputs[0]
        edit.replace_output(first, 0, Variable(self.names.fresh(f"{first.name}_replaced"), tensor.dtype, tensor.shape))
        for node in others:
            edit.replace_all_uses(node.outputs[0], tensor, graph=body)
        return tensor

    def given(self, node: Node, kind: Any) -> Tensor:
        """Detach and return the output of a node, for another node to write."""
        tensor: Tensor = node.outputs[0]
        spare = Variable(self.names.fresh(f"{node.name}_replaced"), np.dtype(kind), tensor.shape)
        edit.replace_output(node, 0, spare)
        return tensor

    def with_dequantize(self, body: Body, node: Node, index: int, codes: Codes) -> Tensor:
        """Return a new tensor of codes, followed by a DequantizeLinear that writes output `index` of `node`."""
        tensor: Tensor = node.outputs[index]
        stem = f"{tensor.name}_codes"
        codes_out = Variable(self.names.fresh(stem), codes.zero.dtype, tensor.shape)
        edit.replace_output(node, index, Variable(self.names.fresh(f"{stem}_replaced"), tensor.dtype, tensor.shape))
        inputs = [codes_out, *self.numbers(body, codes)]
        edit.add_node(
            body, "DequantizeLinear", inputs, names=self.names, stem=f"{stem}_DequantizeLinear", outputs=[tensor]
        )
        return codes_out


@dataclass(frozen=True)
class Product:
    """One product with a quantized weight.

    Attributes:
        node: the MatMul or Gemm.
        codes: its weight.
        turned: the weight is stored transposed, (N, K): Gemm with transB.
        alpha: factor of the product; can be folded into the scales.
        bias: float, (N,), including beta; None if there is none or `addend` holds it.
        addend: a term that is not a constant vector of length N, with beta 1; or None.
    """

    node: Node
    codes: Codes
    turned: bool
    alpha: float
    bias: Array | None
    addend: Tensor | None

    @property
    def data(self) -> Tensor:
        """Float matrix x, (..., K)."""
        return self.node.inputs[0]

    @property
    def sum_axis(self) -> int:
        """Reduction axis of the weight."""
        return 1 if self.turned else 0

    @property
    def scale(self) -> Array:
        """float32 scales of the weight times alpha."""
        return np.asarray(self.codes.scale.astype(np.float32) * np.float32(self.alpha))

    def matrix(self) -> tuple[Array, Array, Array]:
        """Return the integers (K, N), and scale and zero point in the same layout.

        Scales are () or (N,), for blocks (blocks, N).
        """
        values = self.codes.values
        if values is None:
            raise ValueError(f"the weight of '{self.node.name}' is not constant")
        if not self.turned:
            return values, self.scale, self.codes.zero
        return values.T, self.scale.T, self.codes.zero.T


def product(node: Node) -> Product | Reason | None:
    """Return `node` as a product, the reason why it is not one, or None without a quantized constant matrix.

    Source: ONNX Gemm: Y = alpha * A' * B' + beta * C, C broadcast to (M, N).
    """
    if node.op not in MATRIX_PRODUCTS or node.domain or len(node.inputs) < 2:
        return None
    codes = dequantized(node.inputs[1])
    shape = None if codes is None else codes.shape
    if codes is None or shape is None:
        return None
    if len(shape) != 2:
        return Reason("weight-not-matrix", f"its weight has {len(shape)} axes, a matrix is wanted")
    if node.op == "MatMul":
        return Product(node, codes, False, 1.0, None, None)
    if node.attrs.get("transA", 0):
        return Reason("gemm-transposes-input", "Gemm with transA")
    turned = bool(node.attrs.get("transB", 0))
    alpha, beta = float(node.attrs.get("alpha", 1.0)), float(node.attrs.get("beta", 1.0))
    if alpha <= 0:
        return Reason("gemm-alpha", f"Gemm with alpha {alpha:g}, which no scale can take in")
    width = shape[0 if turned else 1]
    third = query.optional_input(node, 2)
    if third is None or beta == 0:
        return Product(node, codes, turned, alpha, None, None)
    added = query.constant(third)
    if added is not None and added.size == width and added.shape[-1:] == (width,):
        return Product(node, codes, turned, alpha, (added.reshape(width) * beta).astype(added.dtype), None)
    if beta != 1:
        return Reason("gemm-beta", f"Gemm with beta {beta:g} on an addend that is not a constant vector")
    return Product(node, codes, turned, alpha, None, third)

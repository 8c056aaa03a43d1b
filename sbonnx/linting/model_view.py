"""Read-only view of a model for lint rules: its Q/DQ nodes with their parameters, and queries on their neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, query
from sbonnx.ops import DEQUANTIZE, LINEAR, MOVES_DATA, PICKS_MAX, QDQ, QUANTIZE, UNPACKS
from sbonnx.spec import Array
from sbonnx.system.cpu import CPUS, RECORDED_CPU, THIS, target_cpu

COMMUTES: Final = MOVES_DATA | PICKS_MAX
"""Ops that commute with quantization."""

RENAMES: Final = frozenset({"Cast", "Identity"})
"""Ops that parsers skip between a constant and its use."""

_ONNX_TYPES: Final = {
    2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32",
    17: "float8_e4m3fn", 18: "float8_e4m3fnuz", 19: "float8_e5m2", 20: "float8_e5m2fnuz",
    21: "uint4", 22: "int4", 23: "float4_e2m1fn", 24: "float8_e8m0fnu", 25: "uint2", 26: "int2",
}  # fmt: skip
"""Values of ``output_dtype`` that name a quantized type."""


@dataclass(frozen=True, eq=False)
class Quantizer:
    """One QuantizeLinear or DequantizeLinear, with its parameters as stored in the file.

    Attributes:
        node: the node itself.
        quantizes: True for QuantizeLinear.
        data: its first input.
        output: its output.
        scale: the values, read through one Cast or Identity; None if they are not constant.
        zero: the zero point, read in the same way; None if it is absent or not constant.
        has_zero: a zero point is given.
        codes: the quantized type ("int8", ...), or None if it is not specified.
        axis: the attribute as written, or None.
        block: ``block_size``, or 0.
    """

    node: Node
    quantizes: bool
    data: Tensor
    output: Tensor
    scale: Array | None
    zero: Array | None
    has_zero: bool
    codes: str | None
    axis: int | None
    block: int

    @property
    def name(self) -> str:
        """Name of the node."""
        return str(self.node.name)

    @property
    def scale_name(self) -> str:
        """Name of the scale."""
        return str(self.node.inputs[1].name)

    @property
    def zero_name(self) -> str:
        """Name of the zero point, or "" if there is none."""
        return str(self.node.inputs[2].name) if self.has_zero else ""

    @property
    def scale_type(self) -> str | None:
        """Type of the scale as the node reads it."""
        kind = query.dtype(self.node.inputs[1])
        return None if kind is None else str(kind)

    @property
    def scale_shape(self) -> tuple[int | str | None, ...] | None:
        """Shape of the scale, constant or not."""
        return self.scale.shape if self.scale is not None else query.shape(self.node.inputs[1])

    @property
    def many(self) -> bool:
        """Whether there is more than one scale: per-channel or block-wise."""
        shape = self.scale_shape
        return bool(shape) and any(dim != 1 for dim in shape or ())

    @property
    def blocked(self) -> bool:
        """Whether blocks share a scale: by attribute, or by the shape of the scale."""
        return self.block > 0 or (self.many and len(self.scale_shape or ()) > 1)

    @property
    def blocked_axis(self) -> int | None:
        """The dimension in which data and scale differ, or None unless it is exactly one."""
        data, scale = query.shape(self.data), self.scale_shape
        if data is None or scale is None or len(data) != len(scale):
            return None
        differ = [at for at, (size, scale_size) in enumerate(zip(data, scale, strict=True)) if size != scale_size]
        return differ[0] if len(differ) == 1 else None

    @property
    def block_length(self) -> int | None:
        """Number of values that share a scale along the blocked axis, or None if it is unknown."""
        if self.block:
            return self.block
        axis, data, scale = self.blocked_axis, query.shape(self.data), self.scale_shape
        if axis is None or data is None or scale is None:
            return None
        whole, parts = data[axis], scale[axis]
        return whole // parts if isinstance(whole, int) and isinstance(parts, int) and parts else None

    @property
    def channel_axis(self) -> int:
        """Axis of a vector of scales, counted from the front; the default in ONNX is 1."""
        axis = 1 if self.axis is None else self.axis
        return axis + (query.rank(self.data) or 0) if axis < 0 else axis

    def same_numbers(self, other: Quantizer) -> bool:
        """Return whether two nodes have the same scale and zero point; computed scales must be the same tensor."""
        return self.same_scale(other) and _equal(self.zero, other.zero)

    def same_scale(self, other: Quantizer) -> bool:
        """Return whether two scales are one tensor, or hold the same values."""
        mine, theirs = self.node.inputs[1], other.node.inputs[1]
        if mine is theirs:
            return True
        if self.scale is None or other.scale is None:
            return False
        if self.scale.size == 1 and other.scale.size == 1:
            return bool(self.scale.reshape(()) == other.scale.reshape(()))
        return self.scale.shape == other.scale.shape and bool((self.scale == other.scale).all())


def _equal(first: Array | None, other: Array | None) -> bool:
    """Return whether two zero points are equal; None counts as 0."""
    if first is None or other is None:
        given = first if first is not None else other
        return given is None or not np.any(given.astype(np.float32))
    return bool(np.array_equal(first.astype(np.float32).ravel(), other.astype(np.float32).ravel()))


class View:
    """Read-only view of a model for the rules of one runtime.

    Attributes:
        graph: the model, with its opset as in the file.
        target: such as "tensorrt@11".
        family: "tensorrt", "onnxruntime", "openvino", "qnn" or "web".
        release: its version, such as "11"; "" if the target names none.
        opset: opset of the default domain, as in the file.
        cpu: kind of CPU that the file is for, by request or by its metadata; None: not known.
    """

    def __init__(self, graph: Graph, target: str, cpu: str = "") -> None:
        self.graph = graph
        self.target = target
        self.family, _, self.release = target.partition("@")
        self.opset: int = graph.opset
        named = cpu or graph.info.metadata.get(RECORDED_CPU, "")
        self.cpu = target_cpu(named) if named in CPUS or named == THIS else None

    @property
    def saturates(self) -> bool:
        """Whether 8-bit products saturate on the CPU that the file is for; if none is known, on this one."""
        return not (self.cpu or target_cpu()).exact

    @cached_property
    def scopes(self) -> list[tuple[str, Body]]:
        """Every graph of the model with its path."""
        return list(query.scopes(self.graph))

    @cached_property
    def nodes(self) -> list[Node]:
        """Every node of every scope that has inputs and outputs."""
        return [node for _, scope in self.scopes for node in scope.nodes if node.inputs and node.outputs]

    @cached_property
    def outputs(self) -> set[int]:
        """Ids of the outputs of all scopes."""
        return {id(tensor) for _, scope in self.scopes for tensor in scope.outputs}

    @cached_property
    def quantizers(self) -> list[Quantizer]:
        """Every QuantizeLinear and DequantizeLinear, in node order."""
        return [self._read(node) for node in self.nodes if node.op in QDQ and len(node.inputs) > 1]

    @cached_property
    def _by_node(self) -> dict[int, Quantizer]:
        return {id(quantizer.node): quantizer for quantizer in self.quantizers}

    @cached_property
    def distinct(self) -> list[Quantizer]:
        """Quantizers without the DequantizeLinear nodes that repeat the parameters of their QuantizeLinear."""
        kept = []
        for quantizer in self.quantizers:
            before = None if quantizer.quantizes else self.quantizer_of(quantizer.data)
            if before is None or not quantizer.same_numbers(before):
                kept.append(quantizer)
        return kept

    def _read(self, node: Node) -> Quantizer:
        quantizes = node.op in QUANTIZE
        zero = query.optional_input(node, 2)
        axis = node.attrs.get("axis")
        kind = query.dtype(zero) if zero is not None else None
        named = _ONNX_TYPES.get(int(node.attrs.get("output_dtype", 0))) if quantizes else None
        if kind is None and not quantizes:
            kind = query.dtype(node.inputs[0])
        return Quantizer(
            node=node,
            quantizes=quantizes,
            data=node.inputs[0],
            output=node.outputs[0],
            scale=self.value(node.inputs[1]),
            zero=self.value(zero),
            has_zero=zero is not None,
            codes=str(kind) if kind is not None else named,
            axis=None if axis is None else int(axis),
            block=int(node.attrs.get("block_size", 0)),
        )

    def value(self, tensor: Tensor | None) -> Array | None:
        """Return the values of a constant, read through one Identity, Cast and Sub; None if it is computed."""
        if tensor is None:
            return None
        node = query.producer(tensor)
        if node is not None and node.op == "Identity":
            tensor = node.inputs[0]
        return query.unpacked(tensor)

    def leaves(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an output of the graph, or of a body."""
        return id(tensor) in self.outputs

    def quantizer_of(self, tensor: Tensor) -> Quantizer | None:
        """Return the Q or DQ that computes a tensor."""
        node = query.producer(tensor)
        return None if node is None else self._by_node.get(id(node))

    def dequantizer(self, tensor: Tensor) -> Quantizer | None:
        """Return the DequantizeLinear that writes a tensor, directly or through data movement; None if it is float."""
        node = query.producer(tensor)
        while node is not None and node.op in COMMUTES | RENAMES and node.inputs:
            node = query.producer(node.inputs[0])
        return self._by_node.get(id(node)) if node is not None and node.op in DEQUANTIZE else None

    def quantized_readers(self, tensor: Tensor, through: frozenset[str] = COMMUTES) -> Iterator[Quantizer]:
        """Yield every QuantizeLinear that reads a tensor, directly or through ops of `through`."""
        stack, seen = [tensor], {id(tensor)}
        while stack:
            for node, index in query.readers(stack.pop()):
                if node.op in QUANTIZE and index == 0 and id(node) in self._by_node:
                    yield self._by_node[id(node)]
                elif node.op in through and index == 0:
                    for output in node.outputs:
                        if id(output) not in seen:
                            seen.add(id(output))
                            stack.append(output)

    def dequantizers_of(self, quantizer: Quantizer) -> list[Quantizer]:
        """Return the DequantizeLinear nodes that read the output of a QuantizeLinear."""
        return [
            self._by_node[id(node)]
            for node, index in query.readers(quantizer.output)
            if node.op in DEQUANTIZE and index == 0 and id(node) in self._by_node
        ]

    def is_constant(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a constant, possibly quantized or moved: a weight."""
        if isinstance(tensor, Constant):
            return True
        node = query.producer(tensor)
        if node is None or node.op not in QDQ | COMMUTES | RENAMES | UNPACKS:
            return False
        needed = node.inputs[:1] if node.op in QDQ else [operand for operand in node.inputs if not operand.is_empty()]
        return bool(needed) and all(self.is_constant(operand) for operand in needed)

    def is_activation_pair(self, quantizer: Quantizer) -> bool:
        """Return whether a quantizer works on computed values."""
        return not self.is_constant(quantizer.data)

    @cached_property
    def weighted(self) -> list[Node]:
        """Nodes of linear ops whose weight is a constant."""
        return [node for node in self.nodes if self.weight(node) is not None]

    def weight(self, node: Node) -> Tensor | None:
        """Return the constant weight of a linear op as the op reads it; None if there is none."""
        linear = LINEAR.get(node.op)
        if linear is None or len(node.inputs) <= linear.weight:
            return None
        tensor = node.inputs[linear.weight]
        return tensor if self.is_constant(tensor) else None

"""Finds tensors that a narrower float type cannot represent, by the values seen in calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from sbonnx.graph import Node, Tensor, query
from sbonnx.ops import DEQUANTIZE, QUANTIZE, READS_RELATIVE, SUMS, SUMS_SQUARES
from sbonnx.plan import BITS
from sbonnx.plan.magnitudes import FloatKind, Magnitudes
from sbonnx.precision.constants import finite_peak, lowest_db, misfit
from sbonnx.precision.slots import is_float32
from sbonnx.spec import Array

MARGIN: Final = 2.0
"""Factor by which values may exceed those seen in calibration."""

UNSEEN: Final = "no sample reached it: its values are not known"


class Ranges:
    """Value ranges of float tensors, including those that Q/DQ insertion added to the graph.

    Args:
        seen: magnitudes of the float graph, by name.
        kind: the narrower type.
    """

    def __init__(self, seen: Mapping[str, Magnitudes], kind: FloatKind) -> None:
        self.seen = seen
        self.kind = kind

    def of(self, tensor: Tensor) -> Magnitudes | None:
        """Return the magnitudes of a tensor; for outputs of Q/DQ pairs and their Clip, those of the original tensor."""
        while tensor.name not in self.seen:
            maker = query.producer(tensor)
            ours = maker is not None and (maker.op in DEQUANTIZE or maker.op in QUANTIZE or BITS in maker.attrs)
            if maker is None or not ours:
                return None
            tensor = maker.inputs[0]
        return self.seen[tensor.name]

    def peak(self, tensor: Tensor) -> float | None:
        """Return the largest magnitude of a constant or variable, or None if unknown."""
        value = query.constant(tensor)
        if value is not None:
            return finite_peak(value)
        found = self.of(tensor)
        return None if found is None else found.peak

    def misfit(self, tensor: Tensor) -> str | None:
        """Return why the narrower type cannot represent a variable, or None."""
        maker = query.producer(tensor)
        if maker is not None and maker.op in DEQUANTIZE:
            codes = weight_codes(maker)
            if codes is not None:
                return misfit(codes, self.kind)
            limit = code_limit(maker)
            if limit is not None and limit > self.kind.largest:
                return f"its codes reach {limit:.3g}, past {self.kind.largest:.6g}, the largest {self.kind.name}"
        found = self.of(tensor)
        if found is None:
            return UNSEEN
        if found.peak * MARGIN > self.kind.largest:
            return f"reaches {found.peak:.3g}, too near to {self.kind.largest:.6g}, the largest {self.kind.name}"
        left = found.sqnr_db(self.kind)
        if left < lowest_db(self.kind):
            return f"holds values so small (up to {found.peak:.2g}) that {self.kind.name} keeps {max(left, 0):.0f} dB"
        return self._whole(tensor, found) or self._relative(tensor, found)

    def _whole(self, tensor: Tensor, found: Magnitudes) -> str | None:
        """Return why integers that are stored as floats would be rounded, or None."""
        makers = [query.producer(tensor)] if query.producer(tensor) is not None else []
        casts = [node.inputs[0] for node in makers if node is not None and node.op == "Cast"]
        casts += [node.outputs[0] for node, _ in query.readers(tensor) if node.op == "Cast"]
        if found.peak > self.kind.exact and any(getattr(query.dtype(x), "kind", "") in "iu" for x in casts):
            return (
                f"holds whole numbers up to {found.peak:.6g}; {self.kind.name} has all of them up to {self.kind.exact}"
            )
        return None

    def _relative(self, tensor: Tensor, found: Magnitudes) -> str | None:
        """Return why subnormal values are a problem, if a reader depends on their relative error; or None."""
        if found.smallest >= self.kind.normal:
            return None
        for node, index in query.readers(tensor):
            if node.op in READS_RELATIVE or (node.op == "Div" and index == 1) or (node.op == "Pow" and index == 0):
                small = f"{found.smallest:.1g}, where {self.kind.name} loses digits"
                if node.op != "Pow" or self._root(node):
                    return f"'{node.name}' ({node.op}) reads values down to {small}"
        return None

    def _root(self, node: Node) -> bool:
        """Return whether a Pow takes a root or a reciprocal."""
        power = query.constant(node.inputs[1])
        return power is None or bool((power < 1).any())

    def inside(self, node: Node) -> str | None:
        """Return why a node would overflow internally although its inputs and outputs fit; or None."""
        limit = self.kind.largest / MARGIN
        data = node.inputs[0] if node.inputs else None
        if data is None or not is_float32(data):
            return None
        peak = self.peak(data)
        if node.op in SUMS:
            found = self.of(node.outputs[0])
            terms = self._terms(node)
            if found is not None and found.peak * terms > limit:
                return f"{node.op} sums {terms} values, to about {found.peak * terms:.2g}"
        if node.op in SUMS_SQUARES and peak is not None:
            terms = 1 if node.op == "ReduceL2" else self._terms(node)
            root = self.peak(node.outputs[0]) if node.op == "ReduceL2" else peak
            if root is not None and root**2 * terms > limit:
                return f"{node.op} sums squares, to about {root**2 * terms:.2g}"
        if node.op == "ReduceLogSumExp" and peak is not None and math.exp(min(peak, 700.0)) > limit:
            return f"{node.op} sums exponentials of up to {peak:.3g}"
        return None

    def _terms(self, node: Node) -> int:
        """Return how many values a node sums for one output: by kernel, axis, or ratio of input and output sizes."""
        kernel = node.attrs.get("kernel_shape")
        if kernel:
            return int(np.prod(kernel))
        if node.op == "LRN":
            return int(node.attrs["size"])
        if node.op == "LpNormalization":
            axes = query.shape(node.inputs[0]) or ()
            length = axes[node.attrs.get("axis", -1)] if axes else None
            return length if isinstance(length, int) else 1
        before, after = self.of(node.inputs[0]), self.of(node.outputs[0])
        if before is None or after is None or not after.count:
            return 1
        return max(1, round(before.count / after.count))


def weight_codes(node: Node) -> Array | None:
    """Return the output of a DequantizeLinear over a constant, float32; None if its input is not constant."""
    source = node.inputs[0]
    maker = query.producer(source)
    values = query.constant(maker.inputs[0]) if maker is not None and maker.op in QUANTIZE else None
    if values is not None:
        return values.astype(np.float32)
    codes, scale = query.constant(source), query.constant(node.inputs[1])
    if codes is None or scale is None:
        return None
    zero = query.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    steps = _along(scale.astype(np.float32), node, codes.shape)
    shift = np.float32(0) if zero is None else _along(zero.astype(np.float32), node, codes.shape)
    return np.asarray((codes.astype(np.float32) - shift) * steps, np.float32)


def _along(numbers: Array, node: Node, shape: tuple[int, ...]) -> Array:
    """Reshape scales or zero points of a DequantizeLinear so that they broadcast with its input.

    Source: ONNX DequantizeLinear: one number, one per index of `axis`, or one per block of `block_size` indices.
    """
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    if numbers.size == 1:
        return numbers.reshape(())
    if numbers.ndim == 1 and not block:
        return numbers.reshape([-1 if at == axis % len(shape) else 1 for at in range(len(shape))])
    return np.take(np.repeat(numbers, block, axis=axis), np.arange(shape[axis]), axis=axis)


def code_limit(node: Node) -> float | None:
    """Return the largest possible magnitude of a DequantizeLinear output, by the type of its input and its scales."""
    scale = query.constant(node.inputs[1])
    zero = query.constant(node.inputs[2]) if len(node.inputs) > 2 else None
    codes = query.dtype(node.inputs[0])
    if scale is None or codes is None:
        return None
    bits = node.attrs.get(BITS)
    if str(codes).startswith("float8"):
        reach = 448.0
    else:
        width = int(bits) if bits is not None else int("".join(x for x in str(codes) if x.isdigit()))
        reach = float(1 << (width - 1)) if not str(codes).startswith("u") else float((1 << width) - 1)
        if zero is not None and zero.size and str(codes).startswith("u"):
            reach = max(float(zero.max()), reach - float(zero.min()))
    return reach * float(np.max(np.abs(scale.astype(np.float64))))

"""Limits of a narrower float type: inputs and outputs that follow it, constants that fit, and observed value ranges."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.graph import Node, Tensor, query
from sbonnx.graph.storage.weights import onnx_dtype
from sbonnx.metrics.error_sums import energy, ratio_db
from sbonnx.ops import CONTROL_FLOW, DEQUANTIZE, QUANTIZE, READS_RELATIVE, STANDARD_DOMAINS, SUMS, SUMS_SQUARES
from sbonnx.planning import BITS
from sbonnx.planning.magnitudes import FloatKind, Magnitudes
from sbonnx.qdq.arithmetic import numbers
from sbonnx.report.codes import Reason
from sbonnx.spec import Array

FLOAT32 = np.dtype(np.float32)


def is_float32(tensor: Tensor) -> bool:
    """Return whether a tensor is float32, the type that is converted."""
    return bool(tensor.name) and query.dtype(tensor) == FLOAT32


@dataclass(frozen=True)
class Slots:
    """Positions of the float32 inputs and outputs of a node that are converted with it; others keep their type."""

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()

    @property
    def indifferent(self) -> bool:
        """Whether the node reads one float tensor in either type and has no float output: Shape, ArgMax, IsNaN."""
        return not self.outputs and len(self.inputs) == 1


@cache
def _schema(op: str, opset: int) -> Any:
    return onnx.defs.get_schema(op, opset, "") if onnx.defs.has(op, "") else None


def slots_of(node: Node, opset: int, kind: FloatKind) -> Slots | Reason:
    """Return the slots of a node, or the reason why it stays float32.

    A type parameter of the schema ties inputs and outputs together; each that has a float32 tensor must allow the
    narrower type. Formal parameters of the fixed type tensor(float) (the scales of Resize) stay float32. An output type
    that is tied to no input is set by an attribute: supported for Cast and ConstantOfShape only.
    """
    if node.op in CONTROL_FLOW:
        return Slots()
    if (node.domain or "") not in STANDARD_DOMAINS:
        return Reason("operator-not-known", f"{node.domain}.{node.op} is not an ONNX operator: its types are unknown")
    schema = _schema(node.op, opset)
    allowed = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    by_attribute = node.op == "Cast" or (node.op == "ConstantOfShape" and "value" in node.attrs)
    wanted = f"tensor({onnx.TensorProto.DataType.Name(onnx_dtype(kind.dtype)).lower()})"
    places: list[set[int]] = [set(), set()]
    bound: set[str] = set()
    for side, tensors, formals in ((0, node.inputs, schema.inputs), (1, node.outputs, schema.outputs)):
        for index, tensor in enumerate(tensors):
            if not tensor.name:
                continue
            formal = formals[min(index, len(formals) - 1)]
            parameter = formal.type_str
            if parameter in allowed and query.dtype(tensor) is None:
                return Reason("type-unknown", f"the type of '{tensor.name}' is not known")
            if not is_float32(tensor) or parameter not in allowed:
                continue
            if wanted not in allowed[parameter]:
                return Reason("not-in-opset", f"{node.op} has no {kind.name} in opset {opset}")
            if side == 0:
                bound.add(parameter)
            elif parameter not in bound and not by_attribute:
                return Reason("type-is-attribute", f"the type of what {node.op} gives is an attribute of it")
            places[side].add(index)
    return Slots(frozenset(places[0]), frozenset(places[1]))


SPARE_DB: Final = 16.0
"""Tolerated excess of rounding noise over that of normal numbers, in dB, before a tensor stays float32.

The limit is 50 dB in float16, where most of the signal is carried by values under 5e-6. 8-bit quantization gives 30 to
45 dB.
"""

CHUNK: Final = 1 << 20
"""Number of values processed at a time."""


def lowest_db(kind: FloatKind) -> float:
    """Return the signal-to-noise ratio of rounding, in dB, below which a tensor stays float32."""
    return kind.worst_db - SPARE_DB


def _chunks(values: Array) -> Iterator[Array]:
    flat = values.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def narrowed(values: Array, kind: FloatKind) -> Array:
    """Return `values`, float32, in the narrower type. Infinities and NaN are preserved."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(values.astype(kind.dtype))


def finite_peak(values: Array) -> float:
    """Return the largest finite magnitude, 0 if there is none."""
    peaks = [np.max(np.abs(part), where=np.isfinite(part), initial=0.0) for part in _chunks(values)]
    return float(max(peaks, default=0.0))


def rounding_db(values: Array, kind: FloatKind) -> float:
    """Return the signal-to-noise ratio of finite values rounded to `kind`, in dB; inf if rounding is exact."""
    signal = noise = 0.0
    for part in _chunks(values):
        wide = part[np.isfinite(part)].astype(np.float64)
        near = narrowed(wide.astype(np.float32), kind).astype(np.float64)
        signal += energy(wide)
        noise += energy((wide - near)[np.isfinite(near)])
    return ratio_db(signal, noise)


def misfit(values: Array, kind: FloatKind) -> Reason | None:
    """Return why a float32 constant cannot be converted to the narrower type, or None."""
    peak = finite_peak(values)
    if peak > kind.largest:
        return Reason("too-large", f"holds {peak:.3g}, past {kind.largest:.6g}, the largest {kind.name}")
    left = rounding_db(values, kind)
    if left < lowest_db(kind):
        return Reason("too-small", f"holds values so small that {kind.name} keeps {max(left, 0.0):.0f} dB of them")
    return None


def exactly(values: Array, kind: FloatKind) -> bool:
    """Return whether all values, float32, are normal numbers of the narrower type, as required for scales."""
    wide = np.asarray(values, np.float32)
    return bool((np.abs(wide) >= kind.normal).all() and (narrowed(wide, kind).astype(np.float32) == wide).all())


MARGIN: Final = 2.0
"""Factor by which values may exceed those seen in calibration."""

UNSEEN: Final = Reason("not-reached", "no sample reached it: its values are not known")


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
        observed = self.of(tensor)
        return None if observed is None else observed.peak

    def misfit(self, tensor: Tensor) -> Reason | None:
        """Return why the narrower type cannot represent a variable, or None."""
        maker = query.producer(tensor)
        if maker is not None and maker.op in DEQUANTIZE:
            codes = weight_codes(maker)
            if codes is not None:
                return misfit(codes, self.kind)
            limit = code_limit(maker)
            if limit is not None and limit > self.kind.largest:
                return Reason(
                    "too-large",
                    f"its codes reach {limit:.3g}, past {self.kind.largest:.6g}, the largest {self.kind.name}",
                )
        observed = self.of(tensor)
        if observed is None:
            return UNSEEN
        if observed.peak * MARGIN > self.kind.largest:
            return Reason(
                "too-large",
                f"reaches {observed.peak:.3g}, too near to {self.kind.largest:.6g}, the largest {self.kind.name}",
            )
        left = observed.sqnr_db(self.kind)
        if left < lowest_db(self.kind):
            return Reason(
                "too-small",
                f"holds values so small (up to {observed.peak:.2g}) that {self.kind.name} keeps {max(left, 0):.0f} dB",
            )
        return self._whole(tensor, observed) or self._relative(tensor, observed)

    def _whole(self, tensor: Tensor, found: Magnitudes) -> Reason | None:
        """Return why integers that are stored as floats would be rounded, or None."""
        makers = [query.producer(tensor)] if query.producer(tensor) is not None else []
        casts = [node.inputs[0] for node in makers if node is not None and node.op == "Cast"]
        casts += [node.outputs[0] for node, _ in query.readers(tensor) if node.op == "Cast"]
        if found.peak > self.kind.exact and any(getattr(query.dtype(x), "kind", "") in "iu" for x in casts):
            return Reason(
                "whole-numbers",
                f"holds whole numbers up to {found.peak:.6g}; {self.kind.name} has all of them up to {self.kind.exact}",
            )
        return None

    def _relative(self, tensor: Tensor, found: Magnitudes) -> Reason | None:
        """Return why subnormal values are a problem, if a reader depends on their relative error; or None."""
        if found.smallest >= self.kind.normal:
            return None
        for node, index in query.readers(tensor):
            if node.op in READS_RELATIVE or (node.op == "Div" and index == 1) or (node.op == "Pow" and index == 0):
                power = query.constant(node.inputs[1]) if node.op == "Pow" else None
                if power is None or (power < 1).any():  # of Pow only roots and reciprocals
                    small = f"{found.smallest:.1g}, where {self.kind.name} loses digits"
                    return Reason("too-small", f"'{node.name}' ({node.op}) reads values down to {small}")
        return None

    def inside(self, node: Node) -> Reason | None:
        """Return why a node would overflow internally although its inputs and outputs fit; or None."""
        limit = self.kind.largest / MARGIN
        data = node.inputs[0] if node.inputs else None
        if data is None or not is_float32(data):
            return None
        peak = self.peak(data)
        if node.op in SUMS:
            observed = self.of(node.outputs[0])
            terms = self._terms(node)
            if observed is not None and observed.peak * terms > limit:
                return Reason("sum-too-large", f"{node.op} sums {terms} values, to about {observed.peak * terms:.2g}")
        if node.op in SUMS_SQUARES and peak is not None:
            terms = 1 if node.op == "ReduceL2" else self._terms(node)
            root = self.peak(node.outputs[0]) if node.op == "ReduceL2" else peak
            if root is not None and root**2 * terms > limit:
                return Reason("sum-too-large", f"{node.op} sums squares, to about {root**2 * terms:.2g}")
        if node.op == "ReduceLogSumExp" and peak is not None and math.exp(min(peak, 700.0)) > limit:
            return Reason("sum-too-large", f"{node.op} sums exponentials of up to {peak:.3g}")
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
    codes, params = query.constant(source), numbers(node)
    return None if codes is None or params is None else params.dequantized(codes, np.float32)


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

"""Quantization arithmetic: `QuantSpec` (format of a quantized tensor) and `QParams` (scale and zero point).

This is the only module with rounding arithmetic. It follows ONNX QuantizeLinear and
DequantizeLinear bit for bit: ``q = saturate(round_half_even(x / scale) + zero_point)`` and
``x' = (q - zero_point) * scale``, in float32. Quantized values are called codes. Those of the kinds of
`sbonnx.small_floats` are floats of 8 or 4 bits without a zero point: ``q = saturate(to_float(x / scale))``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from sbonnx.errors import NumericError
from sbonnx.small_floats import FLOATS, Kind, SmallFloat

Array = NDArray[Any]
ScaleRule = Literal["exact", "sparsebit"]

MIN_SCALE: Final = float(np.float32(2.0**-126))
"""Smallest normal float32: a smaller scale would be a denormal, which runtimes flush to 0."""

PAIR_LIMIT: Final = (1 << 15) - 1
"""Saturation limit of VPMADDUBSW, which sums two neighbouring products in int16."""

PAIR_SUM: Final = PAIR_LIMIT // 255
"""Largest sum of the sizes of two neighbouring weight codes of one sign, times 255 each, within `PAIR_LIMIT`: 128."""

SAFE_CODE: Final = PAIR_SUM // 2
"""Largest weight code for which no two neighbours can exceed `PAIR_LIMIT`: 64, the limit of reduce_range."""

MIN_SCALE_FP16: Final = 2.0**-14
"""Smallest normal float16, the minimum of scales stored in half precision."""

MAX_SCALE_FP16: Final = 65504.0
"""Largest float16."""

FP8_BITS: Final = FLOATS["fp8"].bits

SPARSEBIT_MIN_SCALE: Final = 1e-6
"""Minimum of every scale in Sparsebit."""

AT_ONCE: Final = 1 << 22
"""Values that are quantized at a time: temporary arrays of large tensors stay small."""

BIAS_BITS: Final = 32
"""Bit width of a bias, whose scale is the product of two others."""

CODES_SINCE: Final = {
    "int8": 10, "uint8": 10, "int32": 10,
    "float8_e4m3fn": 19, "float8_e5m2": 19, "float8_e4m3fnuz": 19, "float8_e5m2fnuz": 19,
    "int4": 21, "uint4": 21, "int16": 21, "uint16": 21,
    "float4_e2m1fn": 23,
    "int2": 25, "uint2": 25,
}  # fmt: skip
"""First opset whose QuantizeLinear or DequantizeLinear supports a code type. Source: ONNX changelog of both ops."""

CHANNELS_SINCE: Final = 13
"""First opset whose Q/DQ support per-channel scales."""

HALF_SCALES_SINCE: Final = 19
"""First opset whose Q/DQ support half-precision scales."""

BLOCKS_SINCE: Final = 21
"""First opset whose Q/DQ support per-block scales."""

UNUSED_SCALE: Final = 1.0
"""Scale of a range that contains only zero: any scale is exact, 1 is safe in every float type."""


PAIRED: Final = (8, True, True, None, "int")
"""Bits, sign, symmetry, block size and kind of types that may have limits of pairs."""


@dataclass(frozen=True)
class QuantSpec:
    """Format of a quantized tensor: integers, or small floats.

    Attributes:
        bits: bit width, 2 to 16; 32 for biases.
        signed: codes in [-2^(bits-1), 2^(bits-1) - 1], else in [0, 2^bits - 1].
        symmetric: zero_point fixed at 0 (signed) or 2^(bits-1) (unsigned).
        axis: channel axis (>= 0) of per-channel scales, or None for one scale.
        block_size: length of a block along ``axis`` that shares a scale, or None.
        narrow: exclude the lowest code, so that the signed range is symmetric about 0.
        kind: "int", or one of `FLOATS`, with its bits, signed, symmetric, not narrow.
        pairs: axes of a weight over which products are summed, in the order of the kernel, the slowest first; codes of
            neighbours in this order never exceed `PAIR_SUM`, see `pair_limits`. Empty: no such limit.
    """

    bits: int = 8
    signed: bool = True
    symmetric: bool = True
    axis: int | None = None
    block_size: int | None = None
    narrow: bool = False
    kind: Kind = "int"
    pairs: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple(self.pairs))  # a list, if it comes from JSON
        if not 2 <= self.bits <= 16 and self.bits != BIAS_BITS:
            raise ValueError(f"bits must be between 2 and 16, or {BIAS_BITS}, got {self.bits}")
        if self.axis is not None and self.axis < 0:
            raise ValueError(f"axis must be counted from the front, got {self.axis}")
        if self.block_size is not None and (self.axis is None or self.block_size < 1):
            raise ValueError("a block size needs an axis and must be positive")
        float_kind = self.float_kind
        form = (self.bits, self.signed, self.symmetric, self.narrow)
        if float_kind is not None and form != (float_kind.bits, True, True, False):
            raise ValueError(f"{self.kind} has {float_kind.bits} bits and a sign, and its range is symmetric")
        if self.pairs and (self.bits, self.signed, self.symmetric, self.block_size, self.kind) != PAIRED:
            raise ValueError("limits of pairs are for symmetric signed integers of 8 bits without blocks")

    def short(self) -> QuantSpec:
        """Return the 7-bit type, whose codes are within `SAFE_CODE`, so that no two neighbours exceed `PAIR_LIMIT`."""
        return replace(self, bits=7, pairs=())

    def unpaired(self) -> QuantSpec:
        """Return a type without limits of pairs that is as safe, for scales that are set by hand."""
        return self.short() if self.pairs else self

    @property
    def float_kind(self) -> SmallFloat | None:
        """Type of small floats, or None for integers."""
        return FLOATS.get(self.kind)

    @property
    def is_float(self) -> bool:
        """Whether codes are small floats, not integers."""
        return self.kind in FLOATS

    @property
    def qmin(self) -> int:
        """Lowest code, as a number."""
        if self.kind in FLOATS:
            return -FLOATS[self.kind].most
        return (-(1 << (self.bits - 1)) if self.signed else 0) + int(self.narrow)

    @property
    def qmax(self) -> int:
        """Highest code, as a number."""
        if self.kind in FLOATS:
            return FLOATS[self.kind].most
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def centre(self) -> int:
        """Zero point of a symmetric range."""
        return 0 if self.signed else 1 << (self.bits - 1)

    @property
    def storage_bits(self) -> int:
        """Bit width of the integer type for arrays of codes: 8, 16 or 32."""
        return next(width for width in (8, 16, BIAS_BITS) if self.bits <= width)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Numpy type of an array of codes (int8, uint8, int16, uint16, float8_e4m3fn, float4_e2m1fn)."""
        if self.kind in FLOATS:
            return FLOATS[self.kind].dtype
        return np.dtype(f"{'int' if self.signed else 'uint'}{self.storage_bits}")

    def native_dtype(self, opset: int = BLOCKS_SINCE) -> np.dtype[Any]:
        """Return the smallest type of an opset that holds every code: of 2 bits from 25 on, of 4 bits from 21 on."""
        if self.bits > 4 or self.is_float:
            return self.dtype
        sign = "" if self.signed else "u"
        two, four = f"{sign}int2", f"{sign}int4"
        narrowest: np.dtype[Any] = np.dtype(
            getattr(ml_dtypes, two if self.bits == 2 and opset >= CODES_SINCE[two] else four)
        )
        return narrowest

    @property
    def fills_dtype(self) -> bool:
        """Whether saturation of `native_dtype` of opset 21 is exactly [qmin, qmax], so that no Clip is needed."""
        return self.bits in (4, 8, 16, BIAS_BITS) and not self.narrow

    def label(self) -> str:
        """Format for tables: ``int8``, ``uint4 axis 0``, ``int4 axis 0 blocks of 128``, ``fp8``, ``mxfp4``."""
        text = self.kind if self.is_float else f"{'int' if self.signed else 'uint'}{self.bits}"
        if self.symmetric and not self.signed:
            text += " sym"
        if not self.symmetric and self.signed:
            text += " affine"
        text += " pair-safe" if self.pairs else ""
        text = text if self.axis is None else f"{text} axis {self.axis}"
        return text if self.block_size is None else f"{text} blocks of {self.block_size}"


@dataclass(frozen=True)
class ScaleLimits:
    """Smallest and largest scale allowed.

    With the defaults the product of any two scales (of a bias or an accumulator) is a normal float32 too. Integer
    kernels multiply with such products and with their quotients by a third scale.

    Attributes:
        least, most: of each scale.
        quotient: smallest s_x s_w / s_y of a depthwise convolution. Qualcomm's emulator of the HTP computes wrong
            outputs from 2^-24 down (measured on 3x3, onnxruntime-qnn 2.7), and is right at 2^-23.6.
    """

    least: float = 2.0**-63
    most: float = 2.0**63
    quotient: float = 0.0

    def within(self, other: ScaleLimits) -> ScaleLimits:
        """Return the intersection of both limits."""
        quotient = max(self.quotient, other.quotient)
        return ScaleLimits(max(self.least, other.least), min(self.most, other.most), quotient)


ANY_SCALE: Final = ScaleLimits()
"""For scales stored in float32."""

HALF_LIMITS: Final = ScaleLimits(MIN_SCALE_FP16, MAX_SCALE_FP16)
"""For scales stored in float16."""


@dataclass(frozen=True)
class Bounds:
    """Range to represent: ``lo`` and ``hi``, float32, shape () or (C,), in units of the tensor."""

    lo: Array
    hi: Array

    def union(self, other: Bounds) -> Bounds:
        """Return the smallest range that covers both."""
        return Bounds(np.minimum(self.lo, other.lo), np.maximum(self.hi, other.hi))


def bounds_of(x: Array, axis: int | None = None) -> Bounds:
    """Compute the min and max of `x`, over everything or per channel of `axis`; (0, 0) for an empty array."""
    over = None if axis is None else tuple(i for i in range(x.ndim) if i != axis)
    shape = () if axis is None else (x.shape[axis],)
    if x.size == 0:
        zero = np.zeros(shape, np.float32)
        return Bounds(zero, zero)
    lo, hi = np.min(x, axis=over), np.max(x, axis=over)
    return Bounds(np.asarray(lo, np.float32).reshape(shape), np.asarray(hi, np.float32).reshape(shape))


@dataclass(frozen=True)
class QParams:
    """Scale and zero point of one tensor, and the arithmetic on them.

    Attributes:
        scale: float32, finite, > 0, shape () or (C,) along ``spec.axis``; units of the tensor per code.
        zero_point: code of 0.0, same shape as scale, dtype ``spec.dtype``.
        spec: format that they belong to.
    """

    scale: Array
    zero_point: Array
    spec: QuantSpec

    def __post_init__(self) -> None:
        if self.spec.block_size is None and self.scale.shape != self.zero_point.shape:
            raise ValueError(f"scale {self.scale.shape} and zero_point {self.zero_point.shape} differ in shape")
        if not (np.isfinite(self.scale).all() and (self.scale > 0).all()):
            raise NumericError("a scale is zero, negative, infinite or NaN")

    def along(self, values: Array, shape: tuple[int, ...]) -> Array:
        """Reshape `values` so that it broadcasts against a tensor of `shape` along the channel axis."""
        if values.ndim == 0 or self.spec.axis is None:
            return values.reshape(())
        if self.spec.block_size is not None:
            wide = np.repeat(values, self.spec.block_size, axis=self.spec.axis)
            return np.take(wide, np.arange(shape[self.spec.axis]), axis=self.spec.axis)
        return values.reshape([-1 if i == self.spec.axis else 1 for i in range(len(shape))])

    def quantize(self, x: Array) -> Array:
        """Quantize `x` (any shape, read as float32) to codes of dtype ``spec.dtype``.

        NaN becomes the code of 0.0, which ONNX leaves undefined; in 8-bit floats it stays NaN, as ONNX specifies.
        """
        x = np.asarray(x)
        if x.size <= AT_ONCE:
            return self._codes(x)
        codes = np.empty(x.shape, self.spec.dtype)
        for part, params in self.parts(x.shape):
            codes[part] = params._codes(x[part])
        return codes

    def _codes(self, x: Array) -> Array:
        """Quantize `x` at once."""
        x = np.asarray(x, np.float32)
        if self.spec.is_float:
            with np.errstate(over="ignore", invalid="ignore"):
                ratio = x / self.along(self.scale, x.shape)
                ratio = ratio if self.spec.bits == FP8_BITS else np.where(np.isnan(ratio), np.float32(0), ratio)
                return np.asarray(np.clip(ratio, self.spec.qmin, self.spec.qmax).astype(self.spec.dtype))
        return self._whole_codes(x).astype(self.spec.dtype)

    def parts(self, shape: tuple[int, ...]) -> Iterator[tuple[slice, QParams]]:
        """Yield slices along the leading axis of a tensor, of about `AT_ONCE` values each, with their parameters."""
        block = self.spec.block_size
        size = block if block is not None and self.spec.axis == 0 else 1 + (0 in self.spec.pairs)
        rows = max(size, AT_ONCE // max(prod(shape[1:]), 1) // size * size)
        for start in range(0, shape[0], rows):
            part = slice(start, min(start + rows, shape[0]))
            if self.scale.ndim == 0 or (block is None and self.spec.axis != 0):
                yield part, self
            else:
                own = slice(start // size, -(-part.stop // size))
                yield part, replace(self, scale=self.scale[own], zero_point=self.zero_point[own])

    def _whole_codes(self, x: Array) -> Array:
        """Quantize `x` (float32) and return the codes as float32, a new array; not for floats."""
        scale, zero = self.along(self.scale, x.shape), self.along(self.zero_point, x.shape).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            q = np.asarray(x / scale)
            np.rint(q, out=q)
            q += zero
        if q.size and np.isnan(q.min()):
            q = np.asarray(np.where(np.isnan(q), zero, q))
        return np.clip(q, *self.code_limits(x), out=q)

    def code_limits(self, x: Array) -> tuple[Array, Array]:
        """Return the lowest and the highest code of each value of `x`: of the type, or of its pairs (`pair_limits`)."""
        if not self.spec.pairs:
            return np.asarray(self.spec.qmin), np.asarray(self.spec.qmax)
        ratio, axes = np.nan_to_num(x / self.along(self.scale, x.shape)), self.spec.pairs
        rows = _kernel_rows(ratio, axes)
        low, high = pair_limits(rows.reshape(*rows.shape[: -len(axes)], -1), rows.shape[-1])
        back = range(-len(axes), 0)
        return np.moveaxis(low.reshape(rows.shape), back, axes), np.moveaxis(high.reshape(rows.shape), back, axes)

    def dequantize(self, codes: Array) -> Array:
        """Dequantize codes to float32: ``(q - zero_point) * scale``."""
        if codes.size <= AT_ONCE:
            return self._floats(codes)
        values = np.empty(codes.shape, np.float32)
        for part, params in self.parts(codes.shape):
            values[part] = params._floats(codes[part])
        return values

    def _floats(self, codes: Array) -> Array:
        """Dequantize codes at once."""
        if self.spec.is_float:
            return np.asarray(codes.astype(np.float32) * self.along(self.scale, codes.shape))
        scale, zero = self.along(self.scale, codes.shape), self.along(self.zero_point, codes.shape)
        return np.asarray((codes.astype(np.int32) - zero.astype(np.int32)).astype(np.float32) * scale)

    def fake_quant(self, x: Array) -> Array:
        """Quantize and dequantize `x`: ``dequantize(quantize(x))``."""
        if self.spec.is_float or self.spec.bits == BIAS_BITS:
            return self.dequantize(self.quantize(x))
        q = self._whole_codes(np.asarray(x, np.float32))  # without a cast to integers: codes are exact in float32
        q -= self.along(self.zero_point, q.shape).astype(np.float32)
        q *= self.along(self.scale, q.shape)
        return q

    @property
    def limits(self) -> Bounds:
        """Lowest and highest value that the codes can represent."""
        low = np.full(self.scale.shape, self.spec.qmin, np.int32)
        high = np.full(self.scale.shape, self.spec.qmax, np.int32)
        zero = self.zero_point.astype(np.int32)
        return Bounds((low - zero).astype(np.float32) * self.scale, (high - zero).astype(np.float32) * self.scale)


def _kernel_rows(values: Array, axes: tuple[int, ...]) -> Array:
    """Move the axes of the products' sum behind all others, in the order of the kernel."""
    return np.moveaxis(values, axes, range(-len(axes), 0))


def _pairings(count: int, channels: int) -> tuple[int, ...]:
    """Return lengths of runs whose values a kernel adds in pairs: the whole row, and each tap if channels may be added.

    An odd number of channels is padded by some rewrites (`sbonnx.backends.onnxruntime`), so both orders are possible.
    """
    return (count,) if channels % 2 == 0 or channels == count else (count, channels)


def pair_limits(rows: Any, channels: int) -> tuple[Any, Any]:
    """Compute the lowest and the highest code of each weight so that no two neighbours exceed `PAIR_SUM` in one sign.

    x86 CPUs without 8-bit dot products add the products of inputs 2j and 2j + 1 in 16 bits, which saturate. Codes
    within these limits cannot: the highest codes of two neighbours sum to `PAIR_SUM`, and so do the lowest ones. What
    the positive parts p, q of two weights leave is divided equally:

        highest of p = round((PAIR_SUM + p - q) / 2), within [1, PAIR_SUM - 1];   highest of q = PAIR_SUM - that

    Each weight has at least the codes -1, 0 and 1, and its nearest code if those of both neighbours are safe.

    Args:
        rows: weights in units of codes, in the order of the kernel along the last axis: taps, then input channels;
            an array, or a tensor of torch.
        channels: number of input channels.

    Returns:
        Of the type of `rows`.
    """
    return -_shares((-rows).clip(0, PAIR_LIMIT), channels), _shares(rows.clip(0, PAIR_LIMIT), channels)


def _shares(sizes: Any, channels: int) -> Any:
    """Divide `PAIR_SUM` between neighbours of one sign, see `pair_limits`."""
    limits = sizes.clip(PAIR_SUM - 1, PAIR_SUM - 1)
    for length in _pairings(sizes.shape[-1], channels):
        split = (*sizes.shape[:-1], sizes.shape[-1] // length, length)
        first, second = slice(0, length // 2 * 2, 2), slice(1, length // 2 * 2, 2)
        run, own = sizes.reshape(split), limits.reshape(split)  # `own` shares the memory of `found`
        share = ((PAIR_SUM + run[..., first] - run[..., second]) / 2).round().clip(1, PAIR_SUM - 1)
        own[..., first] = own[..., first].clip(None, share)
        own[..., second] = own[..., second].clip(None, PAIR_SUM - share)
    return limits


def pair_sums(rows: Array, channels: int) -> Array:
    """Return the largest sum of the sizes of two neighbours of one sign, `rows` and `channels` as for `pair_limits`."""
    most = np.zeros(rows.shape[:-1], rows.dtype)
    for length in _pairings(rows.shape[-1], channels):
        run = rows.reshape(*rows.shape[:-1], rows.shape[-1] // length, length)
        pairs = np.pad(run, [(0, 0)] * (run.ndim - 1) + [(0, length % 2)])
        for part in (np.maximum(pairs, 0), np.maximum(-pairs, 0)):
            most = np.maximum(most, (part[..., 0::2] + part[..., 1::2]).max(axis=(-1, -2), initial=0))
    return most


def pair_scale(weight: Array, spec: QuantSpec) -> Array:
    """Compute the smallest scale at which no two neighbours exceed `PAIR_SUM`, float64, () or (C,) along the axis."""
    rows = _kernel_rows(np.asarray(weight, np.float32), spec.pairs)
    sums = pair_sums(rows.reshape(*rows.shape[: -len(spec.pairs)], -1), rows.shape[-1]).astype(np.float64)
    left = [axis for axis in range(weight.ndim) if axis not in spec.pairs]
    over = tuple(place for place, axis in enumerate(left) if axis != spec.axis)
    return np.asarray(sums.max(axis=over, initial=0.0) / PAIR_SUM)


def _round_scale(scale: Array, scale_dtype: Any, floor: float) -> Array:
    """Round `scale` to `scale_dtype`, never below `floor`, and return it as float32.

    Half precision is rounded up. Rounding down by 2^-11 would clip 16 codes of a 16-bit range, by bfloat16's 2^-8 128.
    """
    wide = np.maximum(scale, floor)
    with np.errstate(over="ignore"):
        rounded = np.asarray(wide.astype(scale_dtype))
        if rounded.dtype.itemsize == 2:
            above = np.nextafter(rounded, rounded.dtype.type(np.inf))
            rounded = np.where(rounded.astype(np.float64) < wide, above, rounded)
    return np.asarray(rounded, np.float32)


def exact_scale(bounds: Bounds, spec: QuantSpec, rule: ScaleRule = "exact") -> Array:
    """Compute the scale that covers `bounds`, unrounded, float64; 0 for a range that contains only 0."""
    lo = np.minimum(np.asarray(bounds.lo, np.float64), 0.0)
    hi = np.maximum(np.asarray(bounds.hi, np.float64), 0.0)
    steps = spec.qmax - spec.qmin
    if not spec.symmetric:
        return np.asarray((hi - lo) / steps)
    if rule == "sparsebit":
        return np.asarray(2 * np.maximum(-lo, hi) / steps)
    return np.maximum(-lo / (spec.centre - spec.qmin), hi / (spec.qmax - spec.centre))


def pair_bounds(weight: Array, spec: QuantSpec, bounds: Bounds, rule: ScaleRule = "exact") -> Bounds:
    """Widen bounds of a weight so that its pairs fit at the scale of these bounds; by the share that bounds clip."""
    scale, whole = (exact_scale(ends, spec, rule) for ends in (bounds, bounds_of(weight, spec.axis)))
    wanted = pair_scale(weight, spec) * np.minimum(scale / np.where(whole > 0, whole, 1.0), 1.0)
    factor = np.maximum(wanted / np.where(scale > 0, scale, 1.0), 1.0)
    return Bounds(np.asarray(bounds.lo * factor, np.float32), np.asarray(bounds.hi * factor, np.float32))


def params_from_bounds(
    bounds: Bounds,
    spec: QuantSpec,
    *,
    rule: ScaleRule = "exact",
    scale_dtype: Any = np.float32,
    least: float = MIN_SCALE,
) -> QParams:
    """Compute scale and zero point from bounds.

        symmetric:  scale = max(|lo| / (centre - qmin), |hi| / (qmax - centre))   zero_point = centre
        affine:     scale = (hi - lo) / (qmax - qmin)      zero_point = round(qmin - lo / scale), in range

    0 is always representable: bounds are widened to contain it. A range that contains only 0 gets
    scale 1. A scale below `least`, or below the smallest normal number of its type, is raised to it.
    Codes of fp8 range from -448 to 448, so that the formula gives scale absmax / 448. Scales of floats in blocks are
    those of `SmallFloat.block_scales`.
    ``rule="sparsebit"`` gives Sparsebit's numbers instead: symmetric scale 2 absmax / (qmax - qmin),
    every scale at least 1e-6.

    Args:
        bounds: lo and hi, float32, shape (C,) for a per-channel spec, else ().
        spec: format of the quantized tensor.
        rule: "exact" (no value within the bounds is clipped) or "sparsebit" (parity with Sparsebit).
        scale_dtype: type in which the file stores the scale (float16 models store it in half precision).
        least: smallest scale allowed.

    Returns:
        scale > 0 in units of the tensor; zero_point within [qmin, qmax].

    Raises:
        NumericError: a bound is NaN or infinite, or the scale does not fit `scale_dtype`.

    Source: ONNX QuantizeLinear; the minimum scales are not part of it.
    """
    lo = np.minimum(np.asarray(bounds.lo, np.float64), 0.0)
    hi = np.maximum(np.asarray(bounds.hi, np.float64), 0.0)
    if not (np.isfinite(lo).all() and np.isfinite(hi).all()):
        raise NumericError(f"the range {float(np.min(lo))} .. {float(np.max(hi))} is not finite")
    floor = max(least, MIN_SCALE_FP16 if np.dtype(scale_dtype) == np.float16 else MIN_SCALE)
    scale = exact_scale(bounds, spec, rule)
    if rule == "sparsebit":
        floor = max(floor, SPARSEBIT_MIN_SCALE)
    else:
        scale = np.where(scale == 0, UNUSED_SCALE, scale)
    float_kind = spec.float_kind
    if float_kind is not None and float_kind.scales is not None:
        rounded = float_kind.block_scales(np.maximum(np.maximum(-lo, hi), np.where(hi > lo, floor * spec.qmax, 0.0)))
    else:
        rounded = _round_scale(scale, scale_dtype, floor)
    if not np.isfinite(rounded).all():
        raise NumericError(f"a scale of {float(np.max(scale))} does not fit {np.dtype(scale_dtype)}")
    if spec.symmetric:
        zero = np.full(rounded.shape, spec.centre, spec.dtype)
    else:
        exact = np.rint(spec.qmin - lo / rounded.astype(np.float64))
        zero = np.asarray(np.clip(exact, spec.qmin, spec.qmax), spec.dtype)
    return QParams(rounded, zero, spec)

"""Resize: nearest, linear and cubic with all coordinate transformations, separately for each axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, ints, numbers

CROP: Final = "tf_crop_and_resize"
RADIUS: Final = {"linear": 1, "cubic": 2}
"""Radius of the interpolation kernel, in pixels."""


def resize(call: Call, x: Tensor, roi: Any = None, scales: Any = None, sizes: Any = None) -> Tensor:
    """ONNX Resize; that of opset 10, with two inputs, is computed as Upsample.

    Raises:
        Unfit: neither scales nor sizes, or an unknown mode.
    """
    if call.opset < 11:
        return upsample(call, x, roi)
    mode, coordinates = call.text("mode", "nearest"), call.text("coordinate_transformation_mode", "half_pixel")
    axes = [axis_of(axis, x.dim()) for axis in call.integers("axes") or range(x.dim())]
    region = numbers(roi) if coordinates == CROP else []
    lengths, factors = _lengths(call, x, axes, scales, sizes)
    for place, (axis, length, scale) in enumerate(zip(axes, lengths, factors, strict=True)):
        size = x.shape[axis]
        part = (region[place], region[place + len(axes)]) if coordinates == CROP else (0.0, 1.0)
        if length != size or scale != 1.0 or part != (0.0, 1.0):
            at = call.torch.arange(length, dtype=call.torch.float64, device=x.device)
            at = _positions(call, coordinates, at, size, length, scale, part)
            x = _along(call, x, axis, at, mode, scale, outside=coordinates == CROP)
    return x


def upsample(call: Call, x: Tensor, scales: Any = None) -> Tensor:
    """ONNX Upsample: positions are divided by the scale."""
    given = call.attributes["scales"] if scales is None else numbers(scales)
    mode = "linear" if "linear" in call.text("mode", "nearest") else "nearest"
    nearest = Call(call.torch, call.name, call.op, {"nearest_mode": "floor"}, call.opset)
    for axis, scale in enumerate(given):
        if scale != 1.0:
            length = math.floor(x.shape[axis] * scale)
            at = call.torch.arange(length, dtype=call.torch.float64, device=x.device) / scale
            x = _along(nearest, x, axis, at, mode, scale)
    return x


def _lengths(call: Call, x: Tensor, axes: Sequence[int], scales: Any, sizes: Any) -> tuple[list[int], list[float]]:
    """Return (output lengths, scales) of the axes. Source: ONNX Resize, keep_aspect_ratio_policy."""
    lengths = [] if sizes is None else ints(sizes)
    if lengths:
        factors = [length / x.shape[axis] for axis, length in zip(axes, lengths, strict=True)]
        policy = call.text("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factor = min(factors) if policy == "not_larger" else max(factors)
            return [math.floor(x.shape[axis] * factor + 0.5) for axis in axes], [factor] * len(axes)
        return lengths, factors
    factors = [] if scales is None else numbers(scales)
    if not factors:
        raise Unfit("Resize has neither scales nor sizes")
    return [math.floor(x.shape[axis] * factor) for axis, factor in zip(axes, factors, strict=True)], factors


def _positions(
    call: Call, coordinates: str, at: Tensor, size: int, length: int, scale: float, region: tuple[float, float]
) -> Tensor:
    """Map output positions to input coordinates, float64 (length,). Source: ONNX Resize."""
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return at * (size - 1) / (length - 1) if length > 1 else at
    if coordinates == "pytorch_half_pixel" and length == 1:
        return at
    if coordinates == "half_pixel_symmetric":
        adjust = length / (scale * size)
        return size / 2 * (1 - adjust) + (at + 0.5) / scale - 0.5
    if coordinates == CROP:
        begin, end = region
        if length > 1:
            return begin * (size - 1) + at * (end - begin) * (size - 1) / (length - 1)
        return at + 0.5 * (begin + end) * (size - 1)
    return (at + 0.5) / scale - 0.5


def _along(call: Call, x: Tensor, axis: int, at: Tensor, mode: str, scale: float, outside: bool = False) -> Tensor:
    """Resample one axis at positions `at`; with `outside`, positions out of range get the extrapolation value."""
    size = x.shape[axis]
    if mode == "nearest":
        places = _nearest(call.text("nearest_mode", "round_prefer_floor"), at)
        made = x.index_select(axis, places.clamp(0, size - 1).to(call.torch.int64))
    elif mode not in RADIUS:
        raise Unfit(f"Resize has mode '{mode}'")
    elif call.integer("antialias", 0) and scale < 1.0:
        made = _smoothed(call, x, axis, at, mode, scale)
    else:
        made = _between(call, x, axis, at, mode)
    if not outside:
        return made
    inside = ((at >= 0) & (at <= size - 1)).reshape(_line(x, axis))
    return call.torch.where(inside, made, call.number("extrapolation_value", 0.0))


def _between(call: Call, x: Tensor, axis: int, at: Tensor, mode: str) -> Tensor:
    """Interpolate from the two (linear) or four (cubic) nearest values."""
    low, size, radius = at.floor(), x.shape[axis], RADIUS[mode]
    taps = [low + step for step in range(1 - radius, radius + 1)]
    weights = [_weight(call, tap - at, mode) for tap in taps]
    if call.integer("exclude_outside", 0):
        weights = [weight * ((tap >= 0) & (tap < size)) for tap, weight in zip(taps, weights, strict=True)]
        total = sum(weights)
        weights = [weight / total for weight in weights]
    result = None
    for tap, weight in zip(taps, weights, strict=True):
        picked = x.index_select(axis, tap.clamp(0, size - 1).to(call.torch.int64))
        share = picked * weight.to(x.dtype).reshape(_line(x, axis))
        result = share if result is None else result + share
    return result


def _smoothed(call: Call, x: Tensor, axis: int, at: Tensor, mode: str, scale: float) -> Tensor:
    """Resample with a filter that is widened by 1 / scale (antialiasing). Source: ONNX Resize, antialias."""
    torch, size, low = call.torch, x.shape[axis], at.floor()
    first = math.floor(-RADIUS[mode] / scale) + 1
    steps = torch.arange(first, 2 - first, dtype=at.dtype, device=at.device)
    taps = low[:, None] + steps
    weights = _weight(call, (taps - at[:, None]) * scale, mode)
    if call.integer("exclude_outside", 0):
        weights = weights * ((taps >= 0) & (taps < size))
    weights = weights / weights.sum(dim=1, keepdim=True)
    spread = torch.zeros(at.shape[0], size, dtype=at.dtype, device=at.device)
    spread = spread.scatter_add(1, taps.clamp(0, size - 1).to(torch.int64), weights).to(x.dtype)
    return (x.movedim(axis, -1) @ spread.transpose(0, 1)).movedim(-1, axis)


def _weight(call: Call, distance: Tensor, mode: str) -> Tensor:
    """Compute the kernel weight at a distance.

    Source: ONNX Resize; Keys, "Cubic convolution interpolation", 1981, eq. 4.
    """
    d = distance.abs()
    if mode == "linear":
        return (1 - d).clamp(min=0)
    a = call.number("cubic_coeff_a", -0.75)
    near = ((a + 2) * d - (a + 3)) * d * d + 1
    far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
    return call.torch.where(d <= 1, near, call.torch.where(d < 2, far, call.torch.zeros_like(d)))


def _nearest(mode: str, at: Tensor) -> Tensor:
    """Round positions to integers by the nearest mode of ONNX Resize."""
    if mode == "floor":
        return at.floor()
    if mode == "ceil":
        return at.ceil()
    return (at - 0.5).ceil() if mode == "round_prefer_floor" else (at + 0.5).floor()


def _line(x: Tensor, axis: int) -> list[int]:
    """Return the shape that broadcasts a vector along one axis of x."""
    return [-1 if dim == axis else 1 for dim in range(x.dim())]

"""Resize: nearest and linear, every coordinate transformation, axis by axis."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from sbonnx.spec import Array
from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, ints

CUBIC: Final = "cubic"


def resize(
    call: Call, x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None
) -> Tensor:
    """ONNX Resize from opset 11 on.

    Raises:
        Unfit: cubic, antialiased, by a region of interest, or keeping the aspect ratio.
    """
    mode, coordinates = call.text("mode", "nearest"), call.text("coordinate_transformation_mode", "half_pixel")
    if mode == CUBIC or call.integer("antialias", 0) or coordinates == "tf_crop_and_resize":
        raise Unfit(f"Resize is {mode}, antialiased or of a region of interest")
    if call.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise Unfit("Resize keeps the aspect ratio")
    axes = [axis_of(axis, x.dim()) for axis in call.integers("axes") or range(x.dim())]
    for axis, length, scale in zip(axes, *_lengths(x, axes, scales, sizes), strict=True):
        if length != x.shape[axis] or scale != 1.0:
            x = _along(call, x, axis, _positions(coordinates, x.shape[axis], length, scale), mode)
    return x


def upsample(call: Call, x: Tensor, scales: Tensor | None = None) -> Tensor:
    """ONNX Upsample: positions are divided by the scale."""
    given = call.attributes["scales"] if scales is None else scales.reshape(-1).tolist()
    mode = call.text("mode", "nearest")
    nearest = Call(call.torch, call.name, call.op, {"nearest_mode": "floor"}, call.opset)
    for axis, scale in enumerate(given):
        if scale != 1.0:
            length = int(np.floor(np.float32(x.shape[axis]) * np.float32(scale)))
            at = np.arange(length, dtype=np.float64) / scale
            x = _along(nearest, x, axis, at, "linear" if "linear" in mode else mode)
    return x


def _lengths(x: Tensor, axes: list[int], scales: Tensor | None, sizes: Tensor | None) -> tuple[list[int], list[float]]:
    """(new length, scale) of each axis."""
    if sizes is not None and sizes.numel():
        lengths = ints(sizes)
        return lengths, [length / x.shape[axis] for axis, length in zip(axes, lengths, strict=True)]
    if scales is None or not scales.numel():
        raise Unfit("Resize has neither scales nor sizes")
    factors = [float(scale) for scale in scales.reshape(-1).tolist()]
    return [int(np.floor(x.shape[axis] * factor)) for axis, factor in zip(axes, factors, strict=True)], factors


def _positions(coordinates: str, size: int, length: int, scale: float) -> Array:
    """Where each new position lies in the input, float64 (length,). Source: ONNX Resize."""
    at = np.arange(length, dtype=np.float64)
    if coordinates == "asymmetric":
        return at / scale
    if coordinates == "align_corners":
        return at * (size - 1) / (length - 1) if length > 1 else np.zeros(1)
    if coordinates == "pytorch_half_pixel" and length == 1:
        return np.zeros(1)
    if coordinates == "half_pixel_symmetric":
        adjust = length / (scale * size)
        return size / 2 * (1 - adjust) + (at + 0.5) / scale - 0.5
    return (at + 0.5) / scale - 0.5


def _along(call: Call, x: Tensor, axis: int, at: Array, mode: str) -> Tensor:
    """One axis read at other positions."""
    size = x.shape[axis]
    if mode == "nearest":
        return _pick(call, x, axis, np.clip(_nearest(call.text("nearest_mode", "round_prefer_floor"), at), 0, size - 1))
    low = np.floor(at)
    share = at - low
    shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
    part = call.torch.from_numpy(share.astype(np.float32)).to(device=x.device, dtype=x.dtype).reshape(shape)
    before = _pick(call, x, axis, np.clip(low, 0, size - 1))
    after = _pick(call, x, axis, np.clip(low + 1, 0, size - 1))
    return before * (1 - part) + after * part


def _nearest(mode: str, at: Array) -> Array:
    """Whole positions."""
    if mode == "floor":
        return np.floor(at)
    if mode == "ceil":
        return np.ceil(at)
    return np.ceil(at - 0.5) if mode == "round_prefer_floor" else np.floor(at + 0.5)


def _pick(call: Call, x: Tensor, axis: int, at: Any) -> Tensor:
    """Positions `at` of an axis."""
    return x.index_select(axis, call.torch.from_numpy(at.astype(np.int64)).to(x.device))

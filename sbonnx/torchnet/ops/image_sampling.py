"""Resize, sampling of images at grids and regions, and non-maximum suppression."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, number, numbers

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
    lengths = [] if sizes is None else numbers(sizes)
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
        rounding = call.text("nearest_mode", "round_prefer_floor")
        if rounding in ("floor", "ceil"):
            places = getattr(at, rounding)()
        else:
            places = (at - 0.5).ceil() if rounding == "round_prefer_floor" else (at + 0.5).floor()
        y = x.index_select(axis, places.clamp(0, size - 1).to(call.torch.int64))
    elif mode not in RADIUS:
        raise Unfit(f"Resize mode '{mode}' is not supported")
    elif call.integer("antialias", 0) and scale < 1.0:
        y = _smoothed(call, x, axis, at, mode, scale)
    else:
        y = _between(call, x, axis, at, mode)
    if not outside:
        return y
    inside = ((at >= 0) & (at <= size - 1)).reshape(_line(x, axis))
    return call.torch.where(inside, y, call.number("extrapolation_value", 0.0))


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


def _line(x: Tensor, axis: int) -> list[int]:
    return [-1 if dim == axis else 1 for dim in range(x.dim())]


def grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    """ONNX GridSample.

    Raises:
        Unfit: cubic interpolation over three axes.
    """
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(name := call.text("mode", "linear"), name)
    if mode == "bicubic" and x.dim() != 4:
        raise Unfit("GridSample is cubic and of a rank other than 4")
    padding, corners = call.text("padding_mode", "zeros"), bool(call.integer("align_corners", 0))
    return call.torch.nn.functional.grid_sample(x, grid, mode, padding, corners)


def affine_grid(call: Call, theta: Tensor, size: Tensor) -> Tensor:
    corners = bool(call.integer("align_corners", 0))
    return call.torch.nn.functional.affine_grid(theta, numbers(size), align_corners=corners)


def col2im(call: Call, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    """ONNX Col2Im over two spatial axes.

    Raises:
        Unfit: another number of spatial axes.
    """
    size, kernel = numbers(image), numbers(block)
    if len(size) != 2:
        raise Unfit(f"Col2Im has {len(size)} spatial axes")
    pads = call.integers("pads") or [0] * 4
    before, after = pads[:2], pads[2:]
    wide = [length + low + high for length, low, high in zip(size, before, after, strict=True)]
    dilations, strides = call.integers("dilations") or [1, 1], call.integers("strides") or [1, 1]
    y = call.torch.nn.functional.fold(x, wide, kernel, dilations, 0, strides)
    return y[:, :, before[0] : before[0] + size[0], before[1] : before[1] + size[1]]


def center_crop_pad(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    """ONNX CenterCropPad: crop to the center, or pad with zeros on both sides."""
    axes = [axis_of(axis, x.dim()) for axis in call.integers("axes") or range(x.dim())]
    for axis, wanted in zip(axes, numbers(shape), strict=True):
        size = x.shape[axis]
        if wanted < size:
            x = x.narrow(axis, (size - wanted) // 2, wanted)
        elif wanted > size:
            before = (wanted - size) // 2
            flat = [0, 0] * (x.dim() - 1 - axis) + [before, wanted - size - before]
            x = call.torch.nn.functional.pad(x, flat)
    return x


def roi_align(call: Call, x: Tensor, rois: Tensor, batch: Tensor) -> Tensor:
    """ONNX RoiAlign → (regions, C, height, width), the mean or maximum of the samples in each cell.

    Raises:
        Unfit: sampling ratio 0 (adaptive), and a region needs different numbers of samples along its two axes.
    """
    torch = call.torch
    height, width = call.integer("output_height", 1), call.integer("output_width", 1)
    count, scale = call.integer("sampling_ratio", 0), call.number("spatial_scale", 1.0)
    half = call.opset >= 16 and call.text("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    if count <= 0:
        return torch.cat([_region(call, x, roi, at, half) for roi, at in zip(rois, batch, strict=True)])
    left, top, right, bottom = (rois * scale - (0.5 if half else 0.0)).unbind(1)
    high, wide = bottom - top, right - left
    if not half:
        high, wide = high.clamp(min=1.0), wide.clamp(min=1.0)
    ys = _samples(call, top, high / height, height, count)
    xs = _samples(call, left, wide / width, width, count)
    values = _bilinear(
        call, x[batch.to(x.device).to(torch.int64)], ys, xs, reduce_max=call.text("mode", "avg") == "max"
    )
    cells = values.reshape(*values.shape[:2], height, count, width, count)
    return cells.amax(dim=(3, 5)) if call.text("mode", "avg") == "max" else cells.mean(dim=(3, 5))


def _region(call: Call, x: Tensor, roi: Tensor, at: Tensor, half: bool) -> Tensor:
    """Compute one region with sampling ratio 0: as many samples per cell as the cell has pixels."""
    scale = call.number("spatial_scale", 1.0)
    left, top, right, bottom = (roi * scale).tolist()
    high, wide = bottom - top, right - left
    if not half:
        high, wide = max(high, 1.0), max(wide, 1.0)
    counts = [math.ceil(high / call.integer("output_height", 1)), math.ceil(wide / call.integer("output_width", 1))]
    if counts[0] != counts[1]:
        raise Unfit("RoiAlign has sampling ratio 0, and a region needs other sample counts in height and width")
    again = Call(call.torch, call.name, call.op, {**call.attributes, "sampling_ratio": max(counts[0], 1)}, call.opset)
    return roi_align(again, x, roi[None], at.reshape(1))


def _samples(call: Call, begin: Tensor, step: Tensor, cells: int, count: int) -> Tensor:
    """Compute the positions of the samples, (regions, cells * count)."""
    at = (call.torch.arange(cells * count, device=begin.device, dtype=begin.dtype) + 0.5) / count
    return begin[:, None] + step[:, None] * at


def _bilinear(call: Call, x: Tensor, ys: Tensor, xs: Tensor, *, reduce_max: bool) -> Tensor:
    """Interpolate x (R, C, H, W) at rows (R, P) and columns (R, Q) → (R, C, P, Q); 0 if more than one pixel outside."""
    torch = call.torch

    def taps(at: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
        inside = (at >= -1) & (at <= size)
        at = at.clamp(0, size - 1)
        low = at.floor().clamp(max=size - 1)
        share = at - low
        places = torch.arange(size, device=x.device)
        lower = (places == low[..., None]).to(x.dtype)
        upper = (places == (low + 1).clamp(max=size - 1)[..., None]).to(x.dtype)
        return lower * ((1 - share) * inside)[..., None], upper * (share * inside)[..., None], inside

    y0, y1, _ = taps(ys, x.shape[2])
    x0, x1, _ = taps(xs, x.shape[3])
    if not reduce_max:
        return (y0 + y1)[:, None] @ x @ (x0 + x1)[:, None].transpose(-1, -2)
    parts = [a[:, None] @ x @ b[:, None].transpose(-1, -2) for a in (y0, y1) for b in (x0, x1)]
    return torch.stack(parts).amax(dim=0)  # onnxruntime takes the largest of the four weighted pixels


def non_max_suppression(
    call: Call,
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    overlap: Tensor | None = None,
    least: Tensor | None = None,
) -> Tensor:
    """ONNX NonMaxSuppression → (selected, 3) with sample, class and box index, without gradient."""
    torch = call.torch
    count = 0 if most is None else int(number(most))
    limit = 0.0 if overlap is None else float(number(overlap))
    floor = None if least is None else float(number(least))
    if call.integer("center_point_box", 0):
        x, y, w, h = boxes.unbind(-1)
        edges = torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], dim=-1)
    else:  # any two opposite corners
        first, second = boxes[..., :2], boxes[..., 2:]
        edges = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], dim=-1)
    picked: list[list[int]] = []
    for sample in range(scores.shape[0]):
        for label in range(scores.shape[1]):
            values = scores[sample, label]
            order = torch.argsort(values, descending=True, stable=True)
            order = order if floor is None else order[values[order] > floor]
            kept: list[int] = []
            while order.numel() and len(kept) < count:
                best, order = order[0], order[1:]
                kept.append(int(best))
                order = order[_overlaps(call, edges[sample, best], edges[sample, order]) <= limit]
            picked += [[sample, label, box] for box in kept]
    return torch.tensor(picked, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _overlaps(call: Call, box: Tensor, others: Tensor) -> Tensor:
    low = call.torch.maximum(box[:2], others[:, :2])
    high = call.torch.minimum(box[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=-1)
    area = (box[2:] - box[:2]).prod()
    union = area + (others[:, 2:] - others[:, :2]).prod(dim=-1) - common
    return call.torch.where(union > 0, common / union, call.torch.zeros_like(union))

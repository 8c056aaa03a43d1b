"""Sampling of images at grids and regions, and non-maximum suppression."""

from __future__ import annotations

import math

from sbonnx.torchnet.call import Call, Tensor, Unfit, axis_of, ints, number


def grid_sample(call: Call, x: Tensor, grid: Tensor) -> Tensor:
    """ONNX GridSample.

    Raises:
        Unfit: cubic interpolation over three axes.
    """
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(name := call.text("mode", "linear"), name)
    if mode == "bicubic" and x.dim() != 4:
        raise Unfit("GridSample is cubic and not of rank 4")
    padding, corners = call.text("padding_mode", "zeros"), bool(call.integer("align_corners", 0))
    return call.torch.nn.functional.grid_sample(x, grid, mode, padding, corners)


def affine_grid(call: Call, theta: Tensor, size: Tensor) -> Tensor:
    """ONNX AffineGrid."""
    corners = bool(call.integer("align_corners", 0))
    return call.torch.nn.functional.affine_grid(theta, ints(size), align_corners=corners)


def col2im(call: Call, x: Tensor, image: Tensor, block: Tensor) -> Tensor:
    """ONNX Col2Im over two spatial axes.

    Raises:
        Unfit: another number of spatial axes.
    """
    size, kernel = ints(image), ints(block)
    if len(size) != 2:
        raise Unfit(f"Col2Im has {len(size)} axes of positions")
    pads = call.integers("pads") or [0] * 4
    before, after = pads[:2], pads[2:]
    wide = [length + one + other for length, one, other in zip(size, before, after, strict=True)]
    dilations, strides = call.integers("dilations") or [1, 1], call.integers("strides") or [1, 1]
    made = call.torch.nn.functional.fold(x, wide, kernel, dilations, 0, strides)
    return made[:, :, before[0] : before[0] + size[0], before[1] : before[1] + size[1]]


def center_crop_pad(call: Call, x: Tensor, shape: Tensor) -> Tensor:
    """ONNX CenterCropPad: crop to the center, or pad with zeros on both sides."""
    axes = [axis_of(axis, x.dim()) for axis in call.integers("axes") or range(x.dim())]
    for axis, wanted in zip(axes, ints(shape), strict=True):
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
        raise Unfit("RoiAlign has a sampling ratio of 0 and a region of another shape than its cells")
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
        one = (places == low[..., None]).to(x.dtype)
        two = (places == (low + 1).clamp(max=size - 1)[..., None]).to(x.dtype)
        return one * ((1 - share) * inside)[..., None], two * (share * inside)[..., None], inside

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
    edges = _corners(call, boxes)
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


def _corners(call: Call, boxes: Tensor) -> Tensor:
    """Convert boxes to (y1, x1, y2, x2), with the lower coordinates first."""
    if call.integer("center_point_box", 0):
        x, y, w, h = boxes.unbind(-1)
        return call.torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], dim=-1)
    one, two = boxes[..., :2], boxes[..., 2:]
    return call.torch.cat([call.torch.minimum(one, two), call.torch.maximum(one, two)], dim=-1)


def _overlaps(call: Call, box: Tensor, others: Tensor) -> Tensor:
    """Compute the intersection over union (IoU) of one box with others."""
    low = call.torch.maximum(box[:2], others[:, :2])
    high = call.torch.minimum(box[2:], others[:, 2:])
    common = (high - low).clamp(min=0).prod(dim=-1)
    area = (box[2:] - box[:2]).prod()
    union = area + (others[:, 2:] - others[:, :2]).prod(dim=-1) - common
    return call.torch.where(union > 0, common / union, call.torch.zeros_like(union))

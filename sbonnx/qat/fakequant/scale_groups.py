"""Groups of values that share one scale: broadcasting of scales, and statistics of each group."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sbonnx.spec import QuantSpec


def spread(values: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> Tensor:
    """Reshape `values`, one for each scale, so that they broadcast against a tensor of `shape`.

    The layouts are those of `sbonnx.spec.QParams.along`. Differentiable and deterministic: gradients of a scale are
    summed without atomic additions.

    Args:
        values: shape (), (C,) along ``spec.axis``, or the shape of the tensor with blocks instead of ``spec.axis``.
        spec: granularity of the scales.
        shape: shape of the tensor.
    """
    if values.ndim == 0 or spec.axis is None:
        return values
    if spec.block_size is not None:
        return values.repeat_interleave(spec.block_size, dim=spec.axis).narrow(spec.axis, 0, shape[spec.axis])
    return values.reshape([-1 if index == spec.axis else 1 for index in range(len(shape))])


def shape_of_scale(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scale of a tensor of `shape`.

    Raises:
        IndexError: the tensor has no such axis.
    """
    if spec.axis is None:
        return ()
    length = shape[spec.axis]
    if spec.block_size is None:
        return (length,)
    return (*shape[: spec.axis], -(-length // spec.block_size), *shape[spec.axis + 1 :])


def _apart(x: Tensor, spec: QuantSpec) -> tuple[Tensor, list[int]]:
    """Split `x` into groups, with the last block padded with 0; returns the reshaped tensor and the axes of a group."""
    if spec.axis is None:
        return x.reshape(-1), [0]
    if spec.block_size is None:
        return x.movedim(spec.axis, 0).unsqueeze(-1).flatten(1), [1]
    missing = -x.shape[spec.axis] % spec.block_size
    full = pad(x, [0, 0] * (x.ndim - 1 - spec.axis) + [0, missing])
    return full.unflatten(spec.axis, (-1, spec.block_size)), [spec.axis + 1]


def totals(x: Tensor, spec: QuantSpec) -> Tensor:
    """Compute the sum of each group, in the shape of the scale."""
    parted, over = _apart(x, spec)
    return parted.sum(over)


def extremes(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Compute the minimum and maximum of each group, extended to include 0, in the shape of the scale."""
    parted, over = _apart(x, spec)
    wide = pad(parted, [0, 1]) if over[0] == parted.ndim - 1 else parted  # amin and amax fail on empty groups
    low, high = wide.amin(over), wide.amax(over)
    return low.clamp(max=0.0), high.clamp(min=0.0)


def mean_magnitude(x: Tensor, spec: QuantSpec) -> Tensor:
    """Compute the mean of ``|x|`` of each group, float64; 0 for an empty group."""
    wide = x.double()
    return totals(wide.abs(), spec) / totals(torch.ones_like(wide), spec).clamp(min=1.0)


def mean_and_deviation(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Compute mean and standard deviation (with n - 1) of each group, float64; 0 for too few values."""
    wide = x.double()
    count = totals(torch.ones_like(wide), spec)
    mean = totals(wide, spec) / count.clamp(min=1.0)
    squares = totals((wide - spread(mean, spec, tuple(x.shape))).square(), spec)
    return mean, (squares / (count - 1.0).clamp(min=1.0)).sqrt()

"""Arithmetic of folding a per-channel affine map into an adjacent layer. Works on arrays; edits no graph.

A linear layer is ``y = W x + b``. With one ``s`` and ``t`` per channel,

    after:   s * (W x + b) + t   =  (s W) x + (s b + t)        s, t over output channels
    before:  W (s * x + t) + b   =  (W s) x + (W t + b)        s, t over input channels

All products are computed in float64 and rounded once, to the type of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Affine:
    """``x -> scale * x + shift`` along the channel axis.

    Attributes:
        scale, shift: float64, shape (C,), or () for a scalar.
    """

    scale: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True)
class Folded:
    """Constants of a linear layer after folding.

    Attributes:
        weight: shape and type of the old weight; the same array object if unchanged.
        bias: None if the layer had no bias and needs none; shape (out channels,), or that of a wider Gemm bias.
    """

    weight: np.ndarray
    bias: np.ndarray | None

    def problem(self) -> str | None:
        """Return why these constants cannot be used, or None."""
        if not np.isfinite(self.weight).all():
            return "the folded weight would hold values that are not finite"
        if self.bias is not None and not np.isfinite(self.bias).all():
            return "the folded bias would hold values that are not finite"
        return None


def of_batchnorm(gamma: np.ndarray, beta: np.ndarray, mean: np.ndarray, variance: np.ndarray, epsilon: float) -> Affine:
    """Return BatchNormalization at inference as an affine map.

    ``scale = gamma / sqrt(variance + epsilon)``, ``shift = beta - mean * scale``.

    Args:
        gamma, beta, mean, variance: shape (C,).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + epsilon)
        return Affine(scale, beta.astype(np.float64) - mean.astype(np.float64) * scale)


def of_constant(op: str, values: np.ndarray, constant_first: bool) -> Affine | None:
    """Return Mul, Div, Add or Sub with a constant as an affine map of the other input; None for ``constant / x``."""
    c = values.astype(np.float64)
    one, zero = np.ones_like(c), np.zeros_like(c)
    if op == "Mul":
        return Affine(c, zero)
    if op == "Add":
        return Affine(one, c)
    if op == "Sub":
        return Affine(-one, c) if constant_first else Affine(one, -c)
    if op == "Div" and not constant_first:
        with np.errstate(divide="ignore", invalid="ignore"):
            return Affine(1.0 / c, zero)
    return None


def along_channel(values: np.ndarray, rank: int, axis: int, channels: int) -> np.ndarray | None:
    """Return a broadcast constant as one number per channel.

    Args:
        values: the constant operand.
        rank: rank of the other operand; `axis` its channel axis, of length `channels`.

    Returns:
        shape (channels,) or (); None if the constant varies along another axis or would broadcast the result.
    """
    if values.size == 1 and values.ndim <= rank:
        return values.reshape(())
    if values.ndim > rank:
        return None
    shape = (1,) * (rank - values.ndim) + values.shape
    if shape[axis] != channels or prod(shape) != channels:
        return None
    return values.reshape(channels)


@dataclass(frozen=True)
class Layout:
    """View of a weight by groups, in which vectors over input and output channels broadcast.

    Attributes:
        shape: the weight's shape with a separate group axis, ``(group, ..., *kernel)`` for convolutions.
        outputs, inputs: the shape in which such a vector broadcasts.
        summed: axes of `shape` that run over input channels and kernel.
    """

    shape: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    summed: tuple[int, ...]

    @property
    def out_channels(self) -> int:
        """Length of a vector over output channels."""
        return prod(self.outputs)

    @property
    def in_channels(self) -> int:
        """Length of a vector over input channels."""
        return prod(self.inputs)


def layout(op: str, attrs: Mapping[str, Any], shape: tuple[int, ...]) -> Layout | str:
    """Return the layout of a weight of `shape` of a linear `op`, or the reason why it has no such channels.

    Conv ``(out, in / group, *kernel)``, ConvTranspose ``(in, out / group, *kernel)``, Gemm ``(in, out)`` or its
    transpose, MatMul ``(..., in, out)``.
    """
    if op in ("Conv", "ConvTranspose"):
        group = int(attrs.get("group", 1))
        if len(shape) < 3 or group < 1 or shape[0] % group:
            return f"a weight of shape {shape} does not fit group {group}"
        ones = (1,) * (len(shape) - 2)
        first, second = shape[0] // group, shape[1]
        kernel_axes = tuple(range(3, len(shape) + 1))
        along_first, along_second = (group, first, 1, *ones), (group, 1, second, *ones)
        if op == "Conv":
            return Layout((group, first, *shape[1:]), along_first, along_second, (2, *kernel_axes))
        return Layout((group, first, *shape[1:]), along_second, along_first, (1, *kernel_axes))
    if len(shape) < 2:
        return "a weight of rank 1 has no output channels"
    if op == "Gemm" and attrs.get("transB", 0):
        return Layout(shape, (shape[0], 1), (1, shape[1]), (1,))
    return Layout(shape, (1, shape[-1]), (shape[-2], 1), (len(shape) - 2,))


def fold_after(op: str, attrs: Mapping[str, Any], weight: np.ndarray, bias: np.ndarray | None, map_: Affine) -> Folded:
    """Fold `map_` after the layer into it. Gemm's alpha and beta are folded into the constants: set both to 1."""
    view = layout(op, attrs, weight.shape)
    assert isinstance(view, Layout)
    alpha, beta = _factors(op, attrs)
    new_weight = _scaled(weight, view, alpha * map_.scale, view.outputs)
    if bias is None and not map_.shift.any():
        return Folded(new_weight, None)
    old = np.zeros(view.out_channels) if bias is None else beta * bias.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # checked by `Folded.problem`
        return Folded(new_weight, _bias(map_.scale * old + map_.shift, view, weight.dtype))


def fold_before(op: str, attrs: Mapping[str, Any], weight: np.ndarray, bias: np.ndarray | None, map_: Affine) -> Folded:
    """Fold `map_` before the layer into it. Gemm's alpha and beta are folded into the constants.

    Exact only if every output depends on the whole kernel (no zero padding) or the shift is zero: see
    `padded_with_zeros`.
    """
    view = layout(op, attrs, weight.shape)
    assert isinstance(view, Layout)
    alpha, beta = _factors(op, attrs)
    new_weight = _scaled(weight, view, alpha * map_.scale, view.inputs)
    if bias is None and not map_.shift.any():
        return Folded(new_weight, None)
    shift = np.broadcast_to(map_.shift, (view.in_channels,)).reshape(view.inputs)
    with np.errstate(over="ignore", invalid="ignore"):
        through = alpha * (weight.astype(np.float64).reshape(view.shape) * shift).sum(axis=view.summed).reshape(-1)
        old = 0.0 if bias is None else beta * bias.astype(np.float64)
        return Folded(new_weight, _bias(through + old, view, weight.dtype))


def padded_with_zeros(op: str, attrs: Mapping[str, Any], kernel: tuple[int, ...]) -> bool:
    """Return whether some output of this layer depends on less than the whole kernel.

    In this case a constant added to the input is not equivalent to a constant added to the output.
    """
    if op not in ("Conv", "ConvTranspose"):
        return False
    pointwise = prod(kernel) == 1 and all(stride == 1 for stride in attrs.get("strides", ()))
    pads = attrs.get("auto_pad", "NOTSET") == "NOTSET" and any(attrs.get("pads", ()))
    if op == "ConvTranspose":
        return pads or not pointwise or any(attrs.get("output_padding", ())) or "output_shape" in attrs
    return pads or (attrs.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER") and prod(kernel) != 1)


def _factors(op: str, attrs: Mapping[str, Any]) -> tuple[float, float]:
    """Return alpha and beta of Gemm; 1 and 1 for other ops."""
    if op != "Gemm":
        return 1.0, 1.0
    return float(attrs.get("alpha", 1.0)), float(attrs.get("beta", 1.0))


def _scaled(weight: np.ndarray, view: Layout, scale: np.ndarray, along: tuple[int, ...]) -> np.ndarray:
    """Return `weight * scale`, computed in float64 and rounded to the weight's type, without a full float64 copy."""
    if (scale == 1.0).all():
        return weight
    factor = np.broadcast_to(scale, (prod(along),)).reshape(along)
    out = np.empty_like(weight, order="C", subok=False)
    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(weight.reshape(view.shape), factor, out=out.reshape(view.shape), dtype=np.float64, casting="unsafe")
    return out


def _bias(values: np.ndarray, view: Layout, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `values` as a bias with at least one number per output channel."""
    wide = np.broadcast_to(values, np.broadcast_shapes(values.shape, (view.out_channels,)))
    if wide.size == view.out_channels:
        wide = wide.reshape(view.out_channels)
    with np.errstate(over="ignore"):
        return wide.astype(dtype)

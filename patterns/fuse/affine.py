"""Arithmetic of folding a per-channel affine map into an adjacent layer. Works on arrays; edits no graph.

A linear layer is ``y = W x + b``. With one ``s`` and ``t`` per channel,

    after:   s * (W x + b) + t   =  (s W) x + (s b + t)        s, t over output channels
    before:  W (s * x + t) + b   =  (W s) x + (W t + b)        s, t over input channels

All products are computed in float64 and rounded once, to the type of the weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from sbonnx.linear.layer import LinearLayer


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


def fold_after(layer: LinearLayer, weight: np.ndarray, bias: np.ndarray | None, map_: Affine) -> Folded:
    """Fold `map_` after the layer into it. Gemm's alpha and beta are folded into the constants: set both to 1."""
    new_weight = layer.scale_outputs(weight, layer.alpha * map_.scale)
    if bias is None and not map_.shift.any():
        return Folded(new_weight, None)
    old = np.zeros(layer.out_channels) if bias is None else layer.beta * bias.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):  # checked by `Folded.problem`
        return Folded(new_weight, _bias(map_.scale * old + map_.shift, layer, weight.dtype))


def fold_before(layer: LinearLayer, weight: np.ndarray, bias: np.ndarray | None, map_: Affine) -> Folded:
    """Fold `map_` before the layer into it. Gemm's alpha and beta are folded into the constants.

    Exact only if every output depends on the whole kernel (no zero padding) or the shift is zero: see
    `sbonnx.linear.im2col.reads_padding`.
    """
    new_weight = layer.scale_inputs(weight, layer.alpha * map_.scale)
    if bias is None and not map_.shift.any():
        return Folded(new_weight, None)
    with np.errstate(over="ignore", invalid="ignore"):
        through = layer.alpha * layer.through(weight, map_.shift)
        old = 0.0 if bias is None else layer.beta * bias.astype(np.float64)
        return Folded(new_weight, _bias(through + old, layer, weight.dtype))


def _bias(values: np.ndarray, layer: LinearLayer, dtype: np.dtype[Any]) -> np.ndarray:
    """Return `values` as a bias with at least one number per output channel."""
    wide = np.broadcast_to(values, np.broadcast_shapes(values.shape, (layer.out_channels,)))
    if wide.size == layer.out_channels:
        wide = wide.reshape(layer.out_channels)
    with np.errstate(over="ignore"):
        return wide.astype(dtype)

"""Folding of a per-channel affine map into an adjacent linear layer: arithmetic, tree, conditions, fused node.

A linear layer is ``y = W x + b``. With one ``s`` and ``t`` per channel,

    after:   s * (W x + b) + t   =  (s W) x + (s b + t)        s, t over output channels
    before:  W (s * x + t) + b   =  (W s) x + (W t + b)        s, t over input channels

All products are computed in float64 and rounded once, to the type of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.report.codes import Reason

from ..match import Match
from ..rewriting import Edit
from ..tree import Maybe, Op, Var, Want


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

    def problem(self) -> Reason | None:
        """Return why these constants cannot be used, or None."""
        if not np.isfinite(self.weight).all():
            return Reason("folded-weight-not-finite", "the folded weight would not be finite")
        if self.bias is not None and not np.isfinite(self.bias).all():
            return Reason("folded-bias-not-finite", "the folded bias would not be finite")
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
    ones, zero = np.ones_like(c), np.zeros_like(c)
    if op == "Mul":
        return Affine(c, zero)
    if op == "Add":
        return Affine(ones, c)
    if op == "Sub":
        return Affine(-ones, c) if constant_first else Affine(ones, -c)
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


Fold = Callable[..., Folded]


def linear(data: Want, ops: tuple[str, ...] = tuple(LINEAR)) -> Op:
    """Tree for a linear node that reads `data`; captures "linear", "w" and "b". Weights need not be constant."""
    return Op(ops, data, Var("w"), Maybe(Var("b")), name="linear")


def is_float(values: np.ndarray) -> bool:
    """Return whether the type is float16, bfloat16, float32 or float64."""
    return values.dtype.kind == "f" or values.dtype.name == "bfloat16"


def float_weight(match: Match) -> np.ndarray | None:
    """Return the weight if it is a floating-point constant."""
    values = constant(match["w"])
    return values if values is not None and is_float(values) else None


def why_not_constant(match: Match) -> Reason | None:
    """Return why weight or bias cannot be changed, or None."""
    if float_weight(match) is None:
        return Reason(
            "weight-not-float-constant",
            f"weight '{match['w'].name}' of '{match['linear'].name}' is not a floating-point constant",
        )
    if "b" in match and constant(match["b"]) is None:
        return Reason("bias-not-constant", f"bias '{match['b'].name}' of '{match['linear'].name}' is not a constant")
    return misfit(match)


def misfit(match: Match) -> Reason | None:
    """Return why weight and bias do not fit each other (an invalid model), or None."""
    layer = layer_or_why(match)
    if isinstance(layer, Reason):
        return layer
    bias = constant(match["b"]) if "b" in match else None
    if bias is not None and bias.ndim and bias.shape[-1] not in (1, layer.out_channels):
        return Reason(
            "bias-does-not-fit",
            f"bias '{match['b'].name}' of shape {tuple(bias.shape)} does not fit {layer.out_channels} channels",
        )
    return None


def layer_or_why(match: Match) -> LinearLayer | Reason:
    """Return the layer of the matched node, with the second input as weight, or the reason why there is none."""
    return LinearLayer.of_shape(match["linear"].op, match["linear"].attrs, tuple(match["w"].shape))


def layer_of(match: Match) -> LinearLayer:
    """Return the layer of a matched node that `why_not_constant` or `misfit` has checked."""
    layer = layer_or_why(match)
    assert isinstance(layer, LinearLayer)
    return layer


def fold(how: Fold, match: Match, map_: Affine) -> Folded:
    """Apply `fold_after` or `fold_before` to the matched node."""
    return how(layer_of(match), match.array("w"), match.array("b") if "b" in match else None, map_)


def why_not_fold(how: Fold, match: Match, map_: Affine) -> Reason | None:
    """Return why the fused node cannot be created, or None: values out of range, or no input for a bias."""
    folded = fold(how, match, map_)
    if match["linear"].op == "MatMul" and folded.bias is not None and not makes_gemm(match):
        return Reason("matmul-without-bias", "MatMul has no bias, and becomes a Gemm only for inputs of rank 2")
    return folded.problem()


def makes_gemm(match: Match) -> bool:
    """Return whether the matched MatMul multiplies matrices, not batches of them."""
    return rank(match["linear"].inputs[0]) == 2 and rank(match["w"]) == 2


def rebuild(match: Match, edit: Edit, data: Tensor, folded: Folded) -> None:
    """Replace the whole match by the linear node with its new constants, under its old name."""
    node: Node = match["linear"]
    attrs = dict(node.attrs)
    op = node.op
    if op == "MatMul" and folded.bias is not None:
        op = "Gemm"
    elif op == "Gemm":
        attrs.pop("alpha", None)
        attrs.pop("beta", None)
    inputs = [data, heir(edit, match["w"], folded.weight)]
    if folded.bias is not None:
        bias = match["b"]
        if bias is None:
            inputs.append(edit.constant(f"{node.name}.bias", folded.bias))
        else:
            inputs.append(heir(edit, bias, folded.bias))
    edit.replace(match.root.outputs[0], edit.node(op, inputs, attrs, name=node.name))


def heir(edit: Edit, old: Tensor, values: np.ndarray) -> Tensor:
    """Create a constant with new values for `old`; return `old` itself if they are the same array."""
    return old if values is constant(old) else edit.constant(old.name, values, instead=old)


def channel_constant(match: Match, name: str, rank_: int | None, axis: int, channels: int) -> np.ndarray | Reason:
    """Return a captured operand as one number per channel, or the reason why it is not.

    Args:
        name: the capture.
        rank_: rank of the other operand, None if unknown.
        axis: the channel axis, counted from the end if negative; `channels` its length.
    """
    values = match.array(name)
    if rank_ is None and values.ndim <= 1 and axis == -1:
        rank_ = 1
    if rank_ is None:
        return Reason("rank-not-known", f"the rank of the other operand of '{match[name].name}' is not known")
    per_channel = along_channel(values, rank_, axis, channels)
    if per_channel is None:
        shape = tuple(values.shape)
        return Reason(
            "not-one-number-per-channel",
            f"constant '{match[name].name}' of shape {shape} is not one number for each of {channels} channels",
        )
    return per_channel

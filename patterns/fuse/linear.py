"""Shared parts of the fusions into Conv, ConvTranspose, Gemm and MatMul: tree, conditions, fused node."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sbonnx.graph import Node, Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR

from ..edit import Edit
from ..match import Match
from ..tree import Maybe, Op, Var, Want
from .affine import Affine, Folded, along_channel

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


def why_not_constant(match: Match) -> str | None:
    """Return why weight or bias cannot be changed, or None."""
    if float_weight(match) is None:
        return f"weight '{match['w'].name}' of '{match['linear'].name}' is not a floating-point constant"
    if "b" in match and constant(match["b"]) is None:
        return f"bias '{match['b'].name}' of '{match['linear'].name}' is not a constant"
    return misfit(match)


def misfit(match: Match) -> str | None:
    """Return why weight and bias do not fit each other (an invalid model), or None."""
    layer = layer_or_why(match)
    if isinstance(layer, str):
        return layer
    bias = constant(match["b"]) if "b" in match else None
    if bias is not None and bias.ndim and bias.shape[-1] not in (1, layer.out_channels):
        return f"bias '{match['b'].name}' of shape {tuple(bias.shape)} does not fit {layer.out_channels} channels"
    return None


def layer_or_why(match: Match) -> LinearLayer | str:
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


def why_not_fold(how: Fold, match: Match, map_: Affine) -> str | None:
    """Return why the fused node cannot be created, or None: values out of range, or no input for a bias."""
    folded = fold(how, match, map_)
    if match["linear"].op == "MatMul" and folded.bias is not None and not makes_gemm(match):
        return "MatMul has no bias, and becomes a Gemm only for inputs of rank 2"
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


def channel_constant(match: Match, name: str, rank_: int | None, axis: int, channels: int) -> np.ndarray | str:
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
        return f"the rank of the tensor that '{match[name].name}' meets is not known"
    per_channel = along_channel(values, rank_, axis, channels)
    if per_channel is None:
        shape = tuple(values.shape)
        return f"constant '{match[name].name}' of shape {shape} is not one number for each of {channels} channels"
    return per_channel

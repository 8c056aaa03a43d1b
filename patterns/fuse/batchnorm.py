"""BatchNormalization folding: at inference it is one scale and shift per channel of an adjacent linear layer.

Supported: BatchNormalization after or before Conv, ConvTranspose and Gemm, and MatMul of matrices, with constants.
Refused: training_mode; parameters or weights that are computed; other numbers of channels; before a layer with zero
padding if the shift is not 0; before a Gemm that transposes its input; values out of range of the weight's type.
Equations: s = gamma / sqrt(variance + epsilon), t = beta - mean s; s (W x + b) + t = (s W) x + (s b + t);
W (s x + t) + b = (W s) x + (W t + b).
"""

from __future__ import annotations

import onnx

from sbonnx.graph import Node
from sbonnx.graph.query import constant
from sbonnx.linear.im2col import reads_padding
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..tree import Op, Var, Want, X
from .linear import (
    Affine,
    fold,
    fold_after,
    fold_before,
    layer_of,
    linear,
    makes_gemm,
    of_batchnorm,
    rebuild,
    why_not_constant,
    why_not_fold,
)

PARAMETERS = ("gamma", "beta", "mean", "variance")


def batchnorm(data: Want) -> Op:
    """Tree for a BatchNormalization of `data`; captures "bn" and its four parameters."""
    return Op("BatchNormalization", data, *(Var(name) for name in PARAMETERS), name="bn")


def _affine(match: Match) -> Affine:
    gamma, beta, mean, variance = (match.array(name) for name in PARAMETERS)
    return of_batchnorm(gamma, beta, mean, variance, float(match.attribute("bn", "epsilon")))


def _why_not_affine(match: Match) -> Reason | None:
    """Return why the BatchNormalization is not a constant affine map, or None."""
    if match.attribute("bn", "training_mode"):
        return Reason("training-mode-on", "training_mode is on: mean and variance come from the batch")
    for name in PARAMETERS:
        if constant(match[name]) is None:
            return Reason("not-constant", f"'{match[name].name}' is not a constant")
    return None


def _why_not_channels(match: Match, channels: int, side: str) -> Reason | None:
    gamma, node = match["gamma"], match["linear"]
    if tuple(gamma.shape) != (channels,):
        return Reason(
            "shape-does-not-fit",
            f"'{gamma.name}' has shape {tuple(gamma.shape)}, and '{node.name}' {channels} {side} channels",
        )
    return None


def _check_after(match: Match) -> Reason | None:
    why = _why_not_affine(match) or why_not_constant(match)
    if why is not None:
        return why
    if match["linear"].op == "MatMul" and not makes_gemm(match):
        return Reason(
            "batch-norm-needs-rank-2",
            "the channels of a BatchNormalization after MatMul are its outputs only for tensors of rank 2",
        )
    return _why_not_channels(match, layer_of(match).out_channels, "output") or why_not_fold(
        fold_after, match, _affine(match)
    )


def _check_before(match: Match) -> Reason | None:
    why = _why_not_affine(match) or why_not_constant(match)
    if why is not None:
        return why
    node: Node = match["linear"]
    layer = layer_of(match)
    if node.op == "MatMul" and not makes_gemm(match):
        return Reason(
            "batch-norm-needs-rank-2",
            "the channels of a BatchNormalization before MatMul are its inputs only for tensors of rank 2",
        )
    if layer.trans_a:
        return Reason("gemm-transposes-input", "Gemm transposes the normalised tensor")
    map_ = _affine(match)
    if map_.shift.any() and reads_padding(layer, node.attrs):
        return Reason(
            "kernel-crosses-edge",
            f"'{node.name}' applies less than its whole kernel at some outputs, where a shift before it differs",
        )
    return _why_not_channels(match, layer.in_channels, "input") or why_not_fold(fold_before, match, map_)


def _sample(nodes: str, extra_output: str = "") -> onnx.ModelProto:
    """Create a model with a Conv and a BatchNormalization of four channels each."""
    return sample(
        f"g (float[1,4,6,6] x) => (float[1,4,h,v] y{extra_output}) {{ {nodes} }}",
        w=(4, 4, 3, 3),
        gamma=(4,),
        beta=(4,),
        mean=(4,),
        variance=(4,),
    )


def _after(extra_output: str = "") -> onnx.ModelProto:
    return _sample(
        """c = Conv <kernel_shape = [3,3]> (x, w)
        y = BatchNormalization (c, gamma, beta, mean, variance)""",
        extra_output,
    )


def _before(pad: int) -> onnx.ModelProto:
    return _sample(
        f"""n = BatchNormalization (x, gamma, beta, mean, variance)
        y = Conv <kernel_shape = [3,3], pads = [{pad},{pad},{pad},{pad}]> (n, w)"""
    )


FUSE_BN = Pattern(
    name="fuse_bn",
    tree=batchnorm(linear(X)),
    check=_check_after,
    rewrite=lambda match, edit: rebuild(
        match, edit, match["linear"].inputs[0], fold(fold_after, match, _affine(match))
    ),
    source="BatchNormalization at inference: gamma * (x - mean) / sqrt(var + eps) + beta, affine in each channel",
    example=_after,
    counter_example=lambda: _after(extra_output=", float[1,4,4,4] c"),
)

FUSE_BN_BEFORE = Pattern(
    name="fuse_bn_before",
    tree=linear(batchnorm(X)),
    check=_check_before,
    rewrite=lambda match, edit: rebuild(match, edit, match["bn"].inputs[0], fold(fold_before, match, _affine(match))),
    source="a linear layer of an affine map is a linear layer, where no zero padding stands between",
    example=lambda: _before(pad=0),
    counter_example=lambda: _before(pad=1),
)

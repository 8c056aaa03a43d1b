"""onnxruntime: rules for scales, zero points, biases and types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.graph import Node, query
from sbonnx.linear.layer import LinearLayer
from sbonnx.linting.model_view import Quantizer, View
from sbonnx.linting.ort import read
from sbonnx.linting.ort.read import WeightedOp
from sbonnx.spec import MIN_SCALE, PAIR_SUM, Array, pair_sums

Found = Iterator[tuple[str, str, str]]

BIAS_TOLERANCE: Final = 1e-3
"""Maximum relative difference between a bias scale and the product of the other two: the precision of float16."""

EIGHT_BITS: Final = frozenset({"int8", "uint8"})


def bad_scale(view: View) -> Found:
    """Find scales that are zero, negative, infinite or NaN."""
    for pair in view.distinct:
        if pair.scale is not None:
            scale = pair.scale.astype(np.float64)
            count = int((~(np.isfinite(scale) & (scale > 0))).sum())
            if count:
                yield pair.name, pair.scale_name, f"{count} of {scale.size} scales are not finite numbers above 0"


def denormal_scale(view: View) -> Found:
    """Find scales below the smallest normal float32."""
    for pair in view.distinct:
        if pair.scale is not None:
            scale = pair.scale.astype(np.float64)
            count = int(((scale > 0) & (scale < MIN_SCALE)).sum())
            if count:
                yield pair.name, pair.scale_name, f"{count} of {scale.size} scales are below {MIN_SCALE:.3g}, denormal"


def scale_shape(view: View) -> Found:
    """Find vectors of scales that do not match the length of their axis."""
    for pair in view.quantizers:
        shape = query.shape(pair.data)
        if pair.scale is None or pair.scale.ndim != 1 or pair.scale.size <= 1 or pair.block or shape is None:
            continue
        axis = pair.channel_axis
        if not 0 <= axis < len(shape):
            yield pair.name, pair.scale_name, f"{pair.scale.size} scales along axis {axis} of {len(shape)} dimensions"
        elif isinstance(shape[axis], int) and shape[axis] != pair.scale.size:
            yield (
                pair.name,
                pair.scale_name,
                f"{pair.scale.size} scales along axis {axis}, which has length {shape[axis]}",
            )


def weight_axis(view: View) -> Found:
    """Find weights whose scales run along another axis than the output channels."""
    for linear in read.weighted(view):
        if linear.w is None or linear.node.inputs[1] is linear.node.inputs[0]:
            continue
        axis = read.axis_of(linear.w)
        if axis is not None and axis != linear.out_axis:
            why = f"scales run along axis {axis}; the output channels of {linear.node.op} are axis {linear.out_axis}"
            yield linear.node.name, linear.node.inputs[1].name, why


def computed_scale(view: View) -> Found:
    """Find scales and zero points that are computed at run time."""
    for pair in view.quantizers:
        if pair.scale is None or (pair.has_zero and pair.zero is None):
            name = pair.scale_name if pair.scale is None else pair.zero_name
            yield pair.name, name, "scale or zero point is computed, kernels take constants only"


def half_scale(view: View) -> Found:
    """Find pairs in half precision."""
    for pair in view.distinct:
        if pair.scale_type in ("float16", "bfloat16"):
            yield (
                pair.name,
                pair.scale_name,
                f"the pair gives {pair.scale_type}, which no integer kernel of the CPU takes",
            )


def _with_bias(view: View) -> Iterator[tuple[WeightedOp, Quantizer, Array]]:
    """Yield quantized ops with a constant int32 bias: op, the bias's DequantizeLinear, its codes."""
    for linear in read.weighted(view):
        bias = linear.bias
        if linear.quantized and bias is not None and bias.codes == "int32":
            codes = query.constant(bias.data)
            if codes is not None:
                yield linear, bias, codes.astype(np.int64)


def gemm_bias(view: View) -> Found:
    """Find biases of a Gemm with other parameters than QGemm assumes, which interprets the codes with its own."""
    yield from biases(view, "Gemm", "; the integer kernel reads the codes as if they were")


def conv_bias(view: View) -> Found:
    """Find biases of a convolution whose parameters prevent its fusion to a QLinearConv."""
    yield from biases(view, "Conv", "; the convolution stays float")


def biases(view: View, kind: str, effect: str = "") -> Found:
    """Find biases of an op with other parameters than those of input times weight; `effect` ends each sentence."""
    for linear, bias, codes in _with_bias(view):
        x, w = linear.x, linear.w
        if linear.node.op != kind or x is None or w is None or bias.scale is None:
            continue
        tensor = str(linear.node.inputs[2].name)
        if bias.zero is not None and bias.zero.any():
            yield linear.node.name, tensor, f"the zero point of the bias is not 0{effect}"
        if x.scale is None or w.scale is None or x.scale.size != 1:
            continue
        wanted = (x.scale.astype(np.float64).reshape(-1) * w.scale.astype(np.float64)).reshape(-1)
        given = bias.scale.astype(np.float64).reshape(-1)
        used = codes.reshape(-1) != 0
        if {wanted.size, given.size} <= {1, used.size}:
            off = used & (np.abs(given - wanted) > BIAS_TOLERANCE * np.abs(wanted))
            if off.any():
                at = int(np.argmax(off))
                given_scale, wanted_scale = (float(np.broadcast_to(scale, used.shape)[at]) for scale in (given, wanted))
                why = f"{int(off.sum())} of {used.size} bias scales are not x_scale * w_scale"
                yield linear.node.name, tensor, f"{why} (first: {given_scale:.4g}, not {wanted_scale:.4g}){effect}"


def bias_saturated(view: View) -> Found:
    """Find bias codes at the limits of int32."""
    ends = np.iinfo(np.int32)
    for linear, _, codes in _with_bias(view):
        count = int(((codes >= ends.max) | (codes <= ends.min)).sum())
        if count:
            why = f"{count} of {codes.size} bias codes are at a limit of int32: the bias did not fit its scale"
            yield linear.node.name, linear.node.inputs[2].name, why


def accumulator(view: View) -> Found:
    """Find channels whose bias and products can together overflow int32 for the worst-case input."""
    biases = {id(linear.node): codes for linear, _, codes in _with_bias(view)}
    for linear in read.weighted(view):
        x, w = linear.x, linear.w
        if x is None or w is None or w.codes not in EIGHT_BITS or x.codes not in EIGHT_BITS:
            continue
        weights = read.steps(view, w)
        if weights is None or weights.ndim < 2 or not np.isfinite(weights).all():
            continue
        low, high = read.limits(x.codes)
        zero = 0 if x.zero is None or x.zero.size != 1 else int(x.zero.reshape(-1)[0])
        over = tuple(at for at in range(weights.ndim) if at != linear.out_axis)
        if linear.node.op == "MatMul":
            over = (weights.ndim - 2,)
        worst = np.abs(weights).sum(axis=over) * max(high - zero, zero - low)
        codes = np.abs(biases.get(id(linear.node), np.zeros(1, np.int64))).reshape(-1)
        if codes.size not in (1, worst.shape[-1]):
            continue
        most = float((worst + codes).max(initial=0))
        if most > np.iinfo(np.int32).max and codes.max() <= np.iinfo(np.int32).max - 1:
            why = f"bias and products can reach {most:.3g}, int32 ends at {np.iinfo(np.int32).max:.3g}"
            yield linear.node.name, linear.node.inputs[1].name, why


def signed_activation(view: View) -> Found:
    """Find int8 activations of ops with a weight."""
    for linear in read.weighted(view):
        x = linear.x
        if linear.quantized and x is not None and x.codes == "int8" and not read.is_stored(view, x):
            yield linear.node.name, linear.node.inputs[0].name, f"{linear.node.op} reads int8 activations"


def unsigned_weight(view: View) -> Found:
    """Find uint8 weights."""
    for linear in read.weighted(view):
        w = linear.w
        if linear.x is not None and w is not None and w.codes == "uint8" and read.is_stored(view, w):
            yield (
                linear.node.name,
                linear.node.inputs[1].name,
                "uint8 weights bring no speed: the float kernel is as fast",
            )


def weight_zero_point(view: View) -> Found:
    """Find int8 weights with a nonzero zero point."""
    for linear in read.weighted(view):
        w = linear.w
        if w is None or w.codes != "int8" or w.zero is None or not read.is_stored(view, w):
            continue
        values = np.unique(w.zero)
        if values.any():
            why = f"int8 weights have the zero point {values[-1] or values[0]}, which every run has to correct for"
            yield linear.node.name, linear.node.inputs[1].name, why


def wide_activation(view: View) -> Found:
    """Find activations that are not 8 bits wide."""
    types = EIGHT_BITS | {"int32", None}
    for pair in view.quantizers:
        if not pair.quantizes and pair.codes not in types and view.is_activation_pair(pair):
            yield pair.name, pair.output.name, f"activation in {pair.codes}: no integer kernel reads it"


def largest_pair(node: Node, codes: Array) -> float:
    """Return the largest sum of two neighbouring codes of one sign whose products a kernel adds in 16 bits; 0: none.

    Depthwise kernels multiply in 16 bits and add in 32.
    """
    layer = LinearLayer.of_shape(node.op, node.attrs, codes.shape)
    if not codes.size or not isinstance(layer, LinearLayer) or layer.depthwise:
        return 0.0
    rows = layer.taps_first(layer.matrices(codes))
    return float(pair_sums(rows, rows.shape[-1]).max())


def _saturating(view: View) -> Found:
    """Find uint8 x int8 products with codes so large that the sum of two can overflow 16 bits."""
    for linear in read.weighted(view):
        x, w = linear.x, linear.w
        if x is None or w is None or x.codes != "uint8" or w.codes != "int8":
            continue
        codes = read.stored_codes(view, w)
        most = 0.0 if codes is None else largest_pair(linear.node, codes)
        if most > PAIR_SUM:
            why = f"two neighbours reach {most:.0f}; past {PAIR_SUM} uint8 x int8 saturates at 16 bits without VNNI"
            yield linear.node.name, linear.node.inputs[1].name, why


def saturates_here(view: View) -> Found:
    """Find ops that saturate on this machine."""
    if view.cpu is None and view.saturates:
        yield from _saturating(view)


def saturates_there(view: View) -> Found:
    """Find ops that saturate on the CPU that the file is for."""
    if view.cpu is not None and view.saturates:
        yield from _saturating(view)


def saturates_elsewhere(view: View) -> Found:
    """Report once that ops would saturate on other machines."""
    if view.cpu is None and not view.saturates:
        saturating = list(_saturating(view))
        if saturating:
            node, tensor, why = saturating[0]
            yield node, tensor, f"{why}; this CPU does not saturate, {len(saturating)} ops would elsewhere"

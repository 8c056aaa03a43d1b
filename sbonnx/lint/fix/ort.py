"""Fixes for onnxruntime other than types: biases at the scale that kernels assume, pairs without benefit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sbonnx.graph import edit, query
from sbonnx.lint import ort_numbers as numbers
from sbonnx.lint import ort_placement as placement
from sbonnx.lint import ort_read as read
from sbonnx.lint.fix.bench import Bench
from sbonnx.lint.fix.pairs import bypassed, removed
from sbonnx.lint.fix.types import Fixed
from sbonnx.lint.ort_read import Weighted
from sbonnx.lint.view import Quantizer
from sbonnx.ops import LINEAR
from sbonnx.qdq.values import Numbers
from sbonnx.spec import Array


def biases(bench: Bench) -> Iterator[Fixed]:
    """O05, O06: Round int32 biases to the scale x_scale * w_scale."""
    named = {name for check in (numbers.gemm_bias, numbers.conv_bias) for name, _, _ in check(bench.view)}
    for linear in read.weighted(bench.view):
        node, bias = linear.node, linear.bias
        if str(node.name) not in named or bias is None:
            continue
        rule = "O05" if node.op == "Gemm" else "O06"
        tensor = str(node.inputs[2].name)
        made = _on_product(bench, linear, bias)
        if isinstance(made, str):
            yield Fixed(rule, str(node.name), tensor, made, done=False)
            continue
        values, new = made
        back = bias.node if len(bench.view.readers(bias.output)) == 1 else None
        if back is None:
            yield Fixed(rule, str(node.name), tensor, "other ops read the same dequantized bias", done=False)
            continue
        bench.set_numbers(back, new, str(bias.data.name))
        edit.replace_input(back, 0, bench.constant(f"{bias.data.name}_rescaled", values))
        back.attrs.update({"axis": 0} if new.scale.ndim else {})
        yield Fixed(rule, str(node.name), tensor, "the bias rounded to the scale x_scale * w_scale")


def _on_product(bench: Bench, linear: Weighted, bias: Quantizer) -> tuple[Array, Numbers] | str:
    """Compute codes and parameters of a bias at the product of the other two scales, or return a reason against it."""
    x, w = linear.x, linear.w
    stored, old = query.constant(bias.data), bench.numbers(bias)
    if stored is None or old is None or x is None or w is None or x.scale is None or w.scale is None:
        return "its codes or the scales are computed"
    if x.scale.size != 1 or w.scale.ndim > 1:
        return "the scales of activation or weight are neither one nor one a channel"
    product = x.scale.astype(np.float64).reshape(()) * w.scale.astype(np.float64)
    product = product.reshape(()) if product.size == 1 else product.reshape(-1)
    floats = old.dequantized(stored)
    if floats is None or (product.ndim and product.size != stored.size):
        return "its scales do not fit it"
    codes = np.rint(floats.astype(np.float64) / product)
    ends = np.iinfo(np.int32)
    if not np.isfinite(codes).all() or (np.abs(codes) >= ends.max).any():
        return "on that scale it does not fit int32: raise the weight's scale for that channel"
    scale = np.asarray(product.astype(old.scale.dtype))
    return codes.astype(np.int32), Numbers(scale, np.zeros(scale.shape, np.int32), 0)


def weights_alone(bench: Bench) -> Iterator[Fixed]:
    """O15: Store weights as dequantized floats if their op reads float activations."""
    named = {name for name, _, _ in placement.weight_only(bench.view)}
    for linear in read.weighted(bench.view):
        if str(linear.node.name) in named:
            what = "the weight is stored as floats"
            yield bypassed(bench, "O15", linear.node, LINEAR[linear.node.op].weight, what, exact=True)


def activations_alone(bench: Bench) -> Iterator[Fixed]:
    """O16: Remove pairs before ops with a float weight."""
    named = {name for name, _, _ in placement.float_weight(bench.view)}
    for linear in read.weighted(bench.view):
        if str(linear.node.name) in named:
            yield bypassed(bench, "O16", linear.node, 0, "the pair before it is taken away")


def useless(bench: Bench) -> Iterator[Fixed]:
    """O23, O24: Remove pairs that serve no integer kernel."""
    for rule, check in (("O23", placement.useless_pair), ("O24", placement.output_pair)):
        named = {name for name, _, _ in check(bench.view)}
        for one in bench.view.quantizers:
            if not one.quantizes and one.name in named:
                yield removed(bench, rule, one, "the pair is taken away")


def rescaled(bench: Bench) -> Iterator[Fixed]:
    """O25: Report only."""
    for name, tensor, _ in placement.rescale(bench.view):
        why = "the halves of the pair have other numbers: which are right, calibration knows"
        yield Fixed("O25", name, tensor, why, done=False)

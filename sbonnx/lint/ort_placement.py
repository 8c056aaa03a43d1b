"""onnxruntime: rules for the placement of pairs. Outside integer kernels they cost time and accuracy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.graph import Constant, Node, query
from sbonnx.lint import ort_read as read
from sbonnx.lint.view import Quantizer, View
from sbonnx.ops import CONTROL_FLOW, MATRIX_PRODUCTS, PICKS_MAX, QDQ, RECTIFIERS, RESIZES, SOFTMAX

Found = Iterator[tuple[str, str, str]]

UNIT_RANGE: Final = (SOFTMAX & {"Softmax"}) | {"Sigmoid"}
"""Ops whose output is always between 0 and 1."""

SPARE: Final = 1.05
"""Largest upper end of a range above 1 for which codes do not count as wasted."""


def _interpolates(node: Node) -> bool:
    """Return whether a Resize interpolates, which is not possible on codes."""
    return node.op in RESIZES and query.attribute(node, "mode", "nearest") not in ("nearest", b"nearest")


def _has_kernel(node: Node) -> bool:
    """Return whether onnxruntime can run the op on codes, regardless of the surrounding nodes."""
    kinds = read.WEIGHTED | read.COMPUTES | read.ONE_SCALE | RECTIFIERS
    return node.op in kinds and not _interpolates(node)


def _name(node: Node) -> tuple[str, str]:
    return str(node.name), str(node.outputs[0].name)


def weight_only(view: View) -> Found:
    """Find quantized weights whose op reads float activations."""
    for linear in read.weighted(view):
        w = linear.w
        if w is None or linear.x is not None or not read.is_stored(view, w) or _blocked_product(linear.node, w):
            continue
        why = f"{linear.node.op} reads float activations: the weight is dequantized in every run, the op stays float"
        yield str(linear.node.name), str(linear.node.inputs[0].name), why


def _blocked_product(node: Node, w: Quantizer) -> bool:
    """Return whether onnxruntime multiplies the weight as stored: MatMulNBits."""
    return node.op in MATRIX_PRODUCTS and w.blocked


def float_weight(view: View) -> Found:
    """Find float weights whose op reads quantized activations."""
    for linear in read.weighted(view):
        weight = linear.node.inputs[1]
        if linear.x is not None and linear.w is None and isinstance(weight, Constant):
            why = f"{linear.node.op} reads a pair, but its weight is float: it stays float and the pair only costs"
            yield str(linear.node.name), str(weight.name), why


def conv_output(view: View) -> Found:
    """Find convolutions that read pairs but whose output is not quantized."""
    for linear in read.weighted(view):
        node = linear.node
        if node.op != "Conv" or not linear.quantized or read.written(view, node):
            continue
        rectifier = read.rectified(view, node)
        if rectifier is not None and read.only_quantized(view, rectifier.outputs[0]):
            continue  # the rule for Relu and Clip reports it
        if _pooled(view, node):
            continue
        readers = sorted({reader.op for reader, _ in view.readers(node.outputs[0])})
        where = ", ".join(readers) or "the graph's output"
        yield *_name(node), f"the output goes to {where} as float, so the convolution runs in float"


def _pooled(view: View, node: Node) -> bool:
    """Return whether the only reader of the output is a quantized MaxPool: onnxruntime moves the pair before it."""
    readers = [reader for reader, _ in view.readers(node.outputs[0])]
    if len(readers) != 1 or readers[0].op not in PICKS_MAX & read.ONE_SCALE or view.leaves(node.outputs[0]):
        return False
    return bool(read.only_quantized(view, readers[0].outputs[0]))


def rectifier_stays(view: View) -> Found:
    """Find Relu and Clip between integer ops that the following zero point does not replace."""
    for node in view.nodes:
        if node.op not in RECTIFIERS or not node.outputs:
            continue
        behind = read.only_quantized(view, node.outputs[0])
        maker = query.producer(node.inputs[0])
        fed = view.quantizer_of(node.inputs[0]) is not None or (maker is not None and read.reads_pairs(view, maker))
        if fed and behind and not all(read.folds(view, node, one) for one in behind):
            reach = read.reach(behind[0])
            spans = "codes that are not known" if reach is None else f"values from {reach[0]:.4g} to {reach[1]:.4g}"
            why = f"{behind[0].name} keeps {spans}, more than the {node.op} lets through: it stays, in float"
            yield *_name(node), why


def no_kernel(view: View) -> Found:
    """Find ops without an integer kernel between pairs."""
    for node in view.nodes:
        if _has_kernel(node) or node.op in QDQ | CONTROL_FLOW or not node.outputs or not node.inputs:
            continue
        if _reads_activation(view, node) and read.only_quantized(view, node.outputs[0]):
            what = "an interpolating Resize" if _interpolates(node) else node.op
            yield (
                *_name(node),
                f"{what} has no integer kernel: it stays between a DequantizeLinear and a QuantizeLinear",
            )


def _reads_activation(view: View, node: Node) -> bool:
    found = (read.dequantized(view, tensor) for tensor in node.inputs)
    return any(one is not None and view.is_activation_pair(one) for one in found)


def softmax(view: View) -> Found:
    """Find Softmax between pairs."""
    for node in view.nodes:
        if node.op in SOFTMAX and _has_kernel(node) and _reads_activation(view, node) and read.written(view, node):
            yield *_name(node), "the integer Softmax is several times slower than the float one, and less accurate"


def float_side(view: View) -> Found:
    """Find ops between pairs with both quantized and float inputs."""
    for node in view.nodes:
        if node.op not in read.JOINS or not read.written(view, node) or read.reads_pairs(view, node):
            continue
        if _reads_activation(view, node):
            floats = [tensor for tensor in read.data_inputs(node) if read.dequantized(view, tensor) is None]
            what = "constant" if isinstance(floats[0], Constant) else "tensor"
            why = f"{node.op} reads the float {what} '{floats[0].name}' beside pairs: it stays float"
            yield str(node.name), str(floats[0].name), why


def two_scales(view: View) -> Found:
    """Find ops that only move or pick codes, with different parameters before and after."""
    for node in view.nodes:
        if node.op not in read.ONE_SCALE or _interpolates(node) or not node.outputs:
            continue
        one = read.dequantized(view, node.inputs[0])
        if one is None or not view.is_activation_pair(one):
            continue
        if any(not one.same_numbers(other) for other in read.only_quantized(view, node.outputs[0])):
            why = f"the pairs before and behind the {node.op} have different numbers: it runs in float between them"
            yield *_name(node), why


def useless_pair(view: View) -> Found:
    """Find pairs between ops that all run in float."""
    for one in view.quantizers:
        quantize = None if one.quantizes else read.before(view, one)
        if quantize is None or not view.is_activation_pair(one) or view.leaves(one.output):
            continue
        readers = [node for node, _ in view.readers(one.output)]
        maker = query.producer(quantize.data)
        if maker is not None and maker.op in RECTIFIERS:
            maker = query.producer(maker.inputs[0])
        if not readers or any(_explained(view, node) for node in readers):
            continue
        if maker is None or not (maker.op == "Conv" or read.runs_in_integers(view, maker)):
            names = ", ".join(sorted({node.op for node in readers}))
            yield one.name, one.output.name, f"the pair is read by {names} in float, and nothing before needs it"


def _explained(view: View, node: Node) -> bool:
    """Return whether a reader of a pair runs in integers, or is reported by another rule."""
    if node.op in read.WEIGHTED | QDQ | CONTROL_FLOW or read.runs_in_integers(view, node):
        return True
    return bool(node.outputs) and bool(read.only_quantized(view, node.outputs[0]))


def output_pair(view: View) -> Found:
    """Find pairs at the graph's outputs that no kernel requires."""
    for one in view.quantizers:
        quantize = None if one.quantizes else read.before(view, one)
        if quantize is None or not view.leaves(one.output):
            continue
        maker = query.producer(quantize.data)
        chain = [] if maker is None else [maker, *filter(None, map(query.producer, read.data_inputs(maker)))]
        # Other producers need the pair to run in integers, or another rule reports why they do not.
        product = bool(chain) and (chain[0] if chain[0].op not in RECTIFIERS else chain[-1]).op in MATRIX_PRODUCTS
        if product or not any(_reads_activation(view, node) for node in chain):
            yield one.name, one.output.name, "the output is rounded to codes, and no integer kernel needs it"


def rescale(view: View) -> Found:
    """Find pairs whose two nodes have different parameters."""
    for one in view.quantizers:
        quantize = None if one.quantizes else read.before(view, one)
        if quantize is not None and not one.same_numbers(quantize):
            yield one.name, one.scale_name, f"it does not have the numbers of {quantize.name}: the values are changed"


def requantized(view: View) -> Found:
    """Find codes that are requantized without an op in between."""
    for one in view.quantizers:
        source = read.dequantized(view, one.data) if one.quantizes else None
        if source is not None and not source.same_numbers(one):
            yield one.name, one.data.name, f"the values of {source.name} are quantized again, with other numbers"


def grouped_conv(view: View) -> Found:
    """Find grouped convolutions in integers."""
    for linear in read.weighted(view):
        if linear.node.op == "Conv" and linear.quantized and linear.groups > 1 and not linear.depthwise:
            yield *_name(linear.node), f"{linear.groups} groups: the integer kernel took 1.3 times the float one's time"


def unit_range(view: View) -> Found:
    """Find outputs of Sigmoid and Softmax with codes for values outside their range."""
    for node in view.nodes:
        if node.op in UNIT_RANGE and node.outputs:
            for one in read.only_quantized(view, node.outputs[0]):
                reach = read.reach(one)
                if reach is not None and (reach[1] > SPARE or reach[0] < 1 - SPARE):
                    why = f"codes reach from {reach[0]:.4g} to {reach[1]:.4g}, the values of {node.op} from 0 to 1"
                    yield *_name(node), why

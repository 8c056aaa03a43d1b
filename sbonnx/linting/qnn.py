"""Rules of onnxruntime's QNN execution provider for Q/DQ models, in one table.

Source: the provider's operator builders, and onnxruntime's `get_qnn_qdq_config` (docs/qnn.md). Nothing is run on a
device: the rules say what the file must have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.backends.qnn.backend import PRESCRIBED, QNN
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.linting.findings import LintRule
from sbonnx.linting.model_view import COMMUTES, RENAMES, Quantizer, View
from sbonnx.linting.ort import numbers, read
from sbonnx.ops import CONVOLUTIONS, LINEAR, QDQ
from sbonnx.planning.survey import FLOATS

Found = Iterator[tuple[str, str, str]]

assert QNN.numbers.wide is not None
WIDE: Final = QNN.numbers.wide

ACTIVATION_TYPES: Final = frozenset({"uint8", "int8", "uint16", "int16"})
WEIGHT_TYPES: Final = frozenset({"uint8", "int8", "uint16", "int16", "uint4", "int4", "int32"})

COMPUTED_ON_LOAD: Final = frozenset({"BatchNormalization"})
"""Ops with a builder that reads their constants in any form; sbonnx folds them into other ops."""


def _supported(node: Node) -> bool:
    return node.op in QNN.placement.linear | COMPUTED_ON_LOAD or QNN.placement.rule_for(node.op) is not None


def _float_inputs(node: Node) -> list[Tensor]:
    """Return the float inputs of a node that the integer operation reads as integers."""
    rule = QNN.placement.rule_for(node.op)
    keeps = node.op not in LINEAR and (rule is None or rule.constants == "none")
    floats = [tensor for tensor in node.inputs if not tensor.is_empty() and query.dtype(tensor) in FLOATS]
    return [tensor for tensor in floats if not (keeps and isinstance(tensor, Constant))]


def _float_outputs(view: View, node: Node) -> list[Tensor]:
    used = (tensor for tensor in node.outputs if query.readers(tensor) or view.leaves(tensor))
    return [tensor for tensor in used if query.dtype(tensor) in FLOATS]


def _units(view: View) -> list[Node]:
    """Return the nodes with a DequantizeLinear before or a QuantizeLinear behind them, without replaced rectifiers."""
    nodes = [node for node in view.nodes if node.op not in QDQ]
    replaced = {id(read.rectified(view, node)) for node in nodes if read.written(view, node)}
    return [node for node in nodes if id(node) not in replaced and (_reads_pair(view, node) or _behind(view, node))]


def _reads_pair(view: View, node: Node) -> bool:
    return any(read.dequantized(view, tensor) is not None for tensor in node.inputs)


def _behind(view: View, node: Node) -> list[Quantizer]:
    """Return the QuantizeLinear nodes behind a node, those behind a rectifier that they replace included."""
    others = (pair for tensor in node.outputs[1:] for pair in read.only_quantized(view, tensor))
    return [*read.written(view, node), *others]


def no_builder(view: View) -> Found:
    """Find ops between pairs that the provider has no builder for."""
    for node in _units(view):
        if not _supported(node) and _float_outputs(view, node) and node.op not in RENAMES:
            yield str(node.name), str(node.outputs[0].name), f"the provider has no builder for {node.op}"


def float_input(view: View) -> Found:
    """Find units with a float input without a DequantizeLinear."""
    for node in _units(view):
        for tensor in _float_inputs(node) if _supported(node) else ():
            if read.dequantized(view, tensor) is None:
                what = "constant" if isinstance(tensor, Constant) else "input"
                yield str(node.name), str(tensor.name), f"{node.op} reads a float {what}: it is no node unit"


def float_output(view: View) -> Found:
    """Find units with a float output without a QuantizeLinear directly behind."""
    for node in _units(view):
        for at, tensor in enumerate(_float_outputs(view, node) if _supported(node) else ()):
            if not (read.written(view, node) if at == 0 else read.only_quantized(view, tensor)):
                yield str(node.name), str(tensor.name), f"{node.op} writes float: it is no node unit"


def channel_scales(view: View) -> Found:
    """Find scales per channel that the provider does not support: other ops or another axis."""
    for node in view.nodes:
        for index, tensor in enumerate(node.inputs):
            pair = read.dequantized(view, tensor)
            axis = None if pair is None else read.axis_of(pair)
            if axis is None or (node.op in LINEAR and index == LINEAR[node.op].bias):
                continue
            if node.op in WIDE.channels and index == 1 and axis == (0 if node.attrs.get("transB", 0) else 1):
                continue  # newer providers read it, and onnxruntime's quantizer writes it for Gemm
            if node.op not in CONVOLUTIONS or index != 1:
                yield str(node.name), str(tensor.name), f"{node.op} has scales per channel"
            elif axis != (0 if node.op == "Conv" else 1):
                yield str(node.name), str(tensor.name), f"scales of the weight of {node.op} run along axis {axis}"


def channel_zero_points(view: View) -> Found:
    """Find weights with scales per channel that are not signed, or have a zero point."""
    for node in view.weighted:
        weight_pair = read.dequantized(view, node.inputs[LINEAR[node.op].weight])
        if weight_pair is None or read.axis_of(weight_pair) is None or weight_pair.codes is None:
            continue
        if weight_pair.codes.startswith("u") or (weight_pair.zero is not None and np.any(weight_pair.zero)):
            kind = weight_pair.codes if weight_pair.codes.startswith("u") else f"{weight_pair.codes} with a zero point"
            yield str(node.name), str(weight_pair.output.name), f"weights with scales per channel are {kind}"


def types(view: View) -> Found:
    """Find quantized types that the provider does not have."""
    for quantizer in view.distinct:
        allowed = ACTIVATION_TYPES if view.is_activation_pair(quantizer) else WEIGHT_TYPES
        if quantizer.codes is not None and quantizer.codes not in allowed:
            yield quantizer.name, str(quantizer.data.name), f"the type {quantizer.codes}"


def mixed_widths(view: View) -> Found:
    """Find units whose inputs and outputs have different widths."""
    for node in _units(view):
        inputs = [read.dequantized(view, tensor) for tensor in _activations(view, node)]
        codes = {pair.codes for pair in (*inputs, *_behind(view, node)) if pair is not None}
        widths = {kind.lstrip("uint") for kind in codes if kind is not None and read.is_integer(kind)}
        if _supported(node) and node.op not in WIDE.mixed and len(widths) > 1:
            why = f"{node.op} reads and writes {' and '.join(sorted(widths, key=int))} bits"
            yield str(node.name), str(node.outputs[0].name), why


def _activations(view: View, node: Node) -> list[Tensor]:
    """Return the inputs of a node whose type is that of its output: all but weights, biases and parameters."""
    rule = QNN.placement.rule_for(node.op)
    if view.weight(node) is not None:
        return [node.inputs[1 - LINEAR[node.op].weight]]
    first = rule is None or rule.constants == "parameters"
    return list(node.inputs[:1]) if first else list(node.inputs)


def prescribed_scale(view: View) -> Found:
    """Find 16-bit outputs of Sigmoid and Tanh with other parameters than QNN prescribes."""
    for node in view.nodes:
        for pair in read.only_quantized(view, node.outputs[0]) if node.op in ("Sigmoid", "Tanh") else ():
            wanted = PRESCRIBED.get((node.op, str(pair.codes)))
            if wanted is None or pair.scale is None or pair.scale.size != 1:
                continue
            zero = 0 if pair.zero is None else int(pair.zero.reshape(()))
            if (float(pair.scale.reshape(())), zero) != wanted:
                why = f"the output of {node.op} has not the scale {wanted[0]:g} and zero point {wanted[1]}"
                yield str(node.name), str(node.outputs[0].name), why


def moved_scale(view: View) -> Found:
    """Find data movement and maximum pools with two scales."""
    for node in view.nodes:
        before = read.dequantized(view, node.inputs[0]) if node.op in COMMUTES else None
        for behind in [] if before is None else _behind(view, node):
            if before is not None and not (before.same_numbers(behind) and before.codes == behind.codes):
                yield str(node.name), str(behind.data.name), f"{node.op} has another scale behind it than before it"


def bias_scale(view: View) -> Found:
    """Find int32 biases with another scale than that of input times weight."""
    yield from numbers.biases(view, "Gemm")
    yield from numbers.biases(view, "Conv")


QNN_RULES: Final = (
    LintRule(
        "Q01",
        "every scale is a finite number above 0",
        "error",
        "calibrate the tensor again with finite data, or leave its pair out",
        numbers.bad_scale,
    ),
    LintRule(
        "Q02",
        "scales and zero points are constants",
        "warning",
        "store them as initializers",
        numbers.computed_scale,
    ),
    LintRule(
        "Q03",
        "every op between pairs has a builder in the provider",
        "warning",
        "replace the op by supported ones, or remove the pairs around it",
        no_builder,
    ),
    LintRule(
        "Q04",
        "where one input or the output of an op is quantized, every float input is",
        "warning",
        "put a pair on the input, and integers behind a DequantizeLinear in place of a constant",
        float_input,
    ),
    LintRule(
        "Q05",
        "an op with quantized inputs has a QuantizeLinear directly behind it, also at outputs of the graph",
        "warning",
        "put a pair on the output, before it leaves the graph",
        float_output,
    ),
    LintRule(
        "Q06",
        "only weights of Conv (axis 0), ConvTranspose (axis 1), MatMul and Gemm (columns) have scales per channel",
        "warning",
        "use one scale for the tensor",
        channel_scales,
    ),
    LintRule(
        "Q07",
        "weights with scales per channel are signed with the zero point 0",
        "warning",
        "quantize the weight symmetrically to int8",
        channel_zero_points,
    ),
    LintRule(
        "Q08",
        "activations have 8 or 16 bits, weights 4, 8 or 16",
        "warning",
        "quantize the tensor to one of these types",
        types,
    ),
    LintRule(
        "Q09",
        "activations of an op other than arithmetic and LayerNormalization have one width on all sides",
        "warning",
        "put a second pair of the wanted width behind the first one, or use one width",
        mixed_widths,
    ),
    LintRule(
        "Q10",
        "16-bit outputs of Sigmoid and Tanh have the scale that QNN prescribes",
        "warning",
        "set scale and zero point of the pair to the prescribed ones",
        prescribed_scale,
    ),
    LintRule(
        "Q11",
        "data movement and maximum pools have one scale on both sides",
        "warning",
        "give both pairs the same scale and zero point",
        moved_scale,
    ),
    LintRule(
        "Q12",
        "the bias of Conv and Gemm has the scale x_scale * w_scale and the zero point 0",
        "warning",
        "quantize the bias to int32 with the product of the scales",
        bias_scale,
    ),
)
"""Rules in the order of the report: numbers, node units, types, scales."""

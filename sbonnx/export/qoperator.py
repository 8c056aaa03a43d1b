"""Conversion of Q/DQ to integer operators (QOperator format): QLinearConv and similar, for runtimes without Q/DQ."""

from __future__ import annotations

from typing import Final

from sbonnx.export.integers import BUILDERS, Site
from sbonnx.export.read import Converted, dequantized, float_of, numbers_of
from sbonnx.export.sinks import Sinks
from sbonnx.export.writer import Writer
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, edit, query
from sbonnx.ops import DEQUANTIZE, INTEGER_OPS, LINEAR, QDQ, QUANTIZE, READS_SHAPE
from sbonnx.report import Refusal

STEP: Final = "write as an integer op"


def convert(graph: Graph) -> Converted:
    """Replace ops between Q/DQ pairs by integer operators, if one exists. In place.

    A Relu or Clip before a QuantizeLinear is removed if every value that it changes rounds to the same code without
    it. Ops without an integer form keep their pairs and are listed in the refusals. Inputs and outputs of the graph
    stay float: there a QuantizeLinear and a DequantizeLinear remain.

    Source: ONNX QLinearConv, QLinearMatMul, MatMulInteger; onnxruntime, contrib operators, QGemm, QLinearAdd,
    QLinearMul, QLinearConcat, QLinearSigmoid, QLinearLeakyRelu, QLinearSoftmax, QLinearAveragePool,
    QLinearGlobalAveragePool.
    """
    writer = Writer(graph)
    refusals: list[Refusal] = []
    for _, body in list(query.scopes(graph)):
        sinks = Sinks(body)
        for node in list(body.nodes):
            if node.op in READS_SHAPE:
                _read_codes(node)
            elif node.op not in QDQ | INTEGER_OPS and not node.domain and _is_quantized(node):
                builder = BUILDERS.get(node.op)
                why = (
                    f"{node.op} has none" if builder is None else builder(Site(node, body, graph.opset), sinks, writer)
                )
                if why is not None:
                    refusals.append(Refusal(STEP, node.name, why))
    edit.sweep(graph)
    for _, body in list(query.scopes(graph)):
        _fold_biases(body, writer)
        _drop_round_trips(body)
    edit.sweep(graph)
    edit.sort(graph)
    return Converted(writer.done, tuple(refusals))


def _is_quantized(node: Node) -> bool:
    """Return whether an op reads a dequantized activation, or has a dequantized weight."""
    if node.op in LINEAR and any(_is_stored(tensor) for tensor in node.inputs[: LINEAR[node.op].weight + 1]):
        return True
    return any(dequantized(tensor) is not None and not _is_stored(tensor) for tensor in node.inputs)


def _is_stored(tensor: Tensor) -> bool:
    codes = dequantized(tensor)
    return codes is not None and isinstance(codes.tensor, Constant)


def _read_codes(node: Node) -> None:
    """Let a node that reads a shape read the codes, which have the same shape as the floats. In place."""
    codes = dequantized(node.inputs[0])
    if codes is not None:
        edit.replace_input(node, 0, codes.tensor)


def _fold_biases(body: Body, writer: Writer) -> None:
    """Fold int32 biases whose readers stayed float into float constants: no runtime rounds them. In place."""
    for node in list(body.nodes):
        codes = dequantized(node.outputs[0]) if node.op in DEQUANTIZE else None
        if codes is None or str(codes.zero.dtype) != "int32":
            continue
        value = float_of(codes)
        if value is not None:
            constant = edit.add_constant(body, f"{codes.tensor.name}_float", value, writer.names)
            edit.replace_all_uses(node.outputs[0], constant, graph=body)


def _drop_round_trips(body: Body) -> None:
    """Remove DQ -> Q with equal scale and zero point, which restores every code. In place."""
    for node in body.nodes:
        codes = dequantized(node.inputs[0]) if node.op in QUANTIZE else None
        numbers = numbers_of(node) if codes is not None else None
        if codes is None or numbers is None or codes.axis is not None or codes.zero.dtype != numbers[1].dtype:
            continue
        if all(
            one.size == 1 and one.reshape(()) == other
            for one, other in zip(numbers, (codes.scale, codes.zero), strict=True)
        ):
            edit.replace_all_uses(node.outputs[0], codes.tensor, graph=body)

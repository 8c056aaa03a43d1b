"""Reasons why onnxruntime's CPU runs an op of a Q/DQ file in float, read from the file and its optimized graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from sbonnx.backends.onnxruntime.model_index import CODES, Body
from sbonnx.ops import (
    CONTROL_FLOW,
    INTEGER_ON_CPU,
    LINEAR,
    MATRIX_PRODUCTS,
    PICKS_MAX,
    QDQ,
    QUANTIZE,
    RECTIFIERS,
    RESIZES,
)
from sbonnx.report.codes import Reason

EIGHT_BITS: Final = frozenset({onnx.TensorProto.INT8, onnx.TensorProto.UINT8})


def reason(body: Body, node: onnx.NodeProto, kernel: onnx.NodeProto) -> Reason:
    """Return the reason, one clause, why an op of the quantized file runs in float, as the node `kernel`."""
    return next(
        _reasons(body, node, kernel),
        Reason("kept-in-float", f"onnxruntime keeps {kernel.op_type} in float between the pairs"),
    )


def _reasons(body: Body, node: onnx.NodeProto, kernel: onnx.NodeProto) -> Iterator[Reason]:
    op = node.op_type
    if op not in INTEGER_ON_CPU:
        yield Reason("no-integer-kernel", f"onnxruntime has no integer kernel for {op} on CPU")
    for name in node.input[:2] if op in LINEAR else data_inputs(body, node):
        pair = body.pair(name)
        if pair is None and name:
            yield Reason("input-float", f"its input '{name}' is float")
        elif pair is not None:
            yield from _bad_codes(body, node, name, pair)
    if op in MATRIX_PRODUCTS and kernel.op_type == "Gemm" and op != "Gemm":
        yield Reason("joined-with-add", "onnxruntime joins it with the Add after it into a Gemm, whose bias is float")
    if op in RESIZES and _text(node, "mode") not in ("", "nearest"):
        yield Reason("computes-new-values", f"a Resize of mode '{_text(node, 'mode')}' computes new values, in float")
    if op not in MATRIX_PRODUCTS:
        yield from _after(body, node)
    if op in PICKS_MAX | RESIZES:
        yield Reason("scales-differ", "the scales before and after it differ, and its integer kernel only copies codes")


def _bad_codes(body: Body, node: onnx.NodeProto, name: str, pair: onnx.NodeProto) -> Iterator[Reason]:
    """Yield the reasons why integer kernels cannot read the codes of one input."""
    zero = body.zero_point(pair)
    kind = onnx.TensorProto.UINT8 if zero is None else zero.data_type
    label = onnx.TensorProto.DataType.Name(kind).lower()
    if kind not in CODES:
        yield Reason("type-of-codes", f"its input '{name}' is stored as {label}, which no integer kernel reads")
    elif kind not in EIGHT_BITS:
        yield Reason("type-of-codes", f"its input '{name}' has codes of type {label}; the integer kernels read 8 bits")
    elif node.op_type in LINEAR and kind == onnx.TensorProto.INT8 and body.stored(pair) is None:
        yield Reason("activation-signed", f"its activation '{name}' has int8 codes; the integer kernels read uint8")


def _after(body: Body, node: onnx.NodeProto) -> Iterator[Reason]:
    """Yield the obstacle between an op and the QuantizeLinear that its integer kernel would absorb."""
    out = node.output[0]
    if out in body.outputs:
        yield Reason("is-output", f"its output '{out}' is an output of the model, and no integer kernel writes float")
        return
    readers = body.readers.get(out, ())
    if len(readers) > 1:
        float_ones = [reader for reader in readers if reader.op_type not in QUANTIZE]
        if float_ones:
            yield Reason(
                "read-in-float",
                f"its output is read in float by {float_ones[0].op_type} '{float_ones[0].name}' as well",
            )
        return
    for reader in readers:
        if reader.op_type in QUANTIZE:
            return
        behind = [later for later in body.readers.get(reader.output[0], ()) if later.op_type in QUANTIZE]
        if reader.op_type in RECTIFIERS and behind:
            yield _rectified(body, reader, behind[0])
        else:
            yield Reason("op-before-pair", f"{reader.op_type} '{reader.name}' is between it and the next pair")


def _rectified(body: Body, rectifier: onnx.NodeProto, quantize: onnx.NodeProto) -> Reason:
    zero = body.zero_point(quantize)
    value = "computed" if zero is None or zero.data_location else f"{int(np.ravel(numpy_helper.to_array(zero))[0])}"
    if rectifier.op_type == "Relu":
        return Reason(
            "rectifier-stays-float",
            f"the Relu after it stays in float: the zero point {value} of its codes is not the lowest code",
        )
    return Reason(
        "rectifier-stays-float",
        f"the {rectifier.op_type} after it stays in float: its codes (zero point {value}) reach past its limits",
    )


def data_inputs(body: Body, node: onnx.NodeProto) -> list[str]:
    """Return the inputs of the same type as the first output: data, but not shapes or indices."""
    inputs, outputs = body.kinds(node)
    if not outputs:
        return list(node.input[:1])
    pairs = ((name, inputs[min(at, len(inputs) - 1)]) for at, name in enumerate(node.input))
    return [name for name, kind in pairs if name and kind == outputs[0]]


def _text(node: onnx.NodeProto, name: str) -> str:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), "")


def weight_pair(body: Body, node: onnx.NodeProto) -> onnx.NodeProto | None:
    """Return the DequantizeLinear of a linear op's constant weight, or None."""
    linear = LINEAR.get(node.op_type)
    pair = None if linear is None or len(node.input) <= linear.weight else body.pair(node.input[linear.weight])
    return None if pair is None or body.stored(pair) is None else pair


def weight_of(body: Body, node: onnx.NodeProto) -> onnx.TensorProto | None:
    """Return the constant weight of a linear op, as floats or codes; of an integer op, its codes; or None."""
    pair = weight_pair(body, node)
    if pair is not None:
        return body.stored(pair)
    if node.op_type in LINEAR:
        names = list(node.input)[LINEAR[node.op_type].weight :][:1]
    else:
        names = [name for name in node.input if name in body.codes] if body.reads_codes(node) else []
    return next(
        (body.constants[name] for name in names if len(getattr(body.constants.get(name), "dims", ())) > 1), None
    )


def quantized_outputs(body: Body, node: onnx.NodeProto) -> list[str]:
    """Return the outputs of the QuantizeLinear nodes after a node, skipping a Relu or Clip."""
    tensors = []
    for out in node.output:
        for reader in body.readers.get(out, ()):
            behind = body.readers.get(reader.output[0], ()) if reader.op_type in RECTIFIERS else (reader,)
            tensors += [later.output[0] for later in behind if later.op_type in QUANTIZE]
    return tensors


def after_pairs(bodies: Iterable[Body]) -> Iterator[tuple[Body, onnx.NodeProto]]:
    """Yield the float ops of an optimized graph that read a dequantized activation."""
    for body in bodies:
        for node in body.nodes:
            left = node.op_type not in QDQ | CONTROL_FLOW and not body.reads_codes(node)
            if left and any(map(body.activation, node.input)):
                yield body, node


def before_quantize(body: Body, node: onnx.NodeProto) -> list[str]:
    """Return the outputs of a node that a QuantizeLinear reads."""
    return [name for name in node.output if any(reader.op_type in QUANTIZE for reader in body.readers.get(name, ()))]

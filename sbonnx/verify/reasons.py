"""Reasons why onnxruntime computes an op between pairs in float: the requirements of its CPU kernels.

Source: the graph transformers of onnxruntime 1.31 (qdq_selector_action_transformer), each tried on a separate model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import onnx
from onnx import numpy_helper

from sbonnx.ops import INTEGER_ON_CPU, LINEAR, MATRIX_PRODUCTS, PICKS_MAX, QUANTIZE, RECTIFIERS, RESIZES
from sbonnx.verify.reading import CODES, Body

EIGHT_BITS: Final = frozenset({onnx.TensorProto.INT8, onnx.TensorProto.UINT8})


def reason(body: Body, node: onnx.NodeProto, kernel: onnx.NodeProto) -> str:
    """Return the reason why an op runs in float, as one clause.

    Args:
        body, node: the op in the quantized file.
        kernel: the node that onnxruntime runs in its place.
    """
    return next(_reasons(body, node, kernel), f"onnxruntime keeps {kernel.op_type} in float between the pairs")


def _reasons(body: Body, node: onnx.NodeProto, kernel: onnx.NodeProto) -> Iterator[str]:
    op = node.op_type
    if op not in INTEGER_ON_CPU:
        yield f"onnxruntime has no integer kernel for {op} on CPU"
    for name in node.input[:2] if op in LINEAR else data_inputs(body, node):
        pair = body.pair(name)
        if pair is None and name:
            yield f"its input '{name}' is float"
        elif pair is not None:
            yield from _bad_codes(body, node, name, pair)
    if op in MATRIX_PRODUCTS and kernel.op_type == "Gemm" and op != "Gemm":
        yield "onnxruntime joins it with the Add behind it to a Gemm, whose bias is float"
    if op in RESIZES and _text(node, "mode") not in ("", "nearest"):
        yield f"a Resize of mode '{_text(node, 'mode')}' computes new values, in float"
    if op not in MATRIX_PRODUCTS:
        yield from _after(body, node)
    if op in PICKS_MAX | RESIZES:
        yield "the scales before and after it differ, and its integer kernel only copies codes"


def _bad_codes(body: Body, node: onnx.NodeProto, name: str, pair: onnx.NodeProto) -> Iterator[str]:
    """Yield the reasons why integer kernels cannot read the codes of one input."""
    zero = body.zero_point(pair)
    kind = onnx.TensorProto.UINT8 if zero is None else zero.data_type
    label = onnx.TensorProto.DataType.Name(kind).lower()
    if kind not in CODES:
        yield f"its input '{name}' is stored as {label}, which no integer kernel reads"
    elif kind not in EIGHT_BITS:
        yield f"its input '{name}' has codes of type {label}; the integer kernels read 8 bits"
    elif node.op_type in LINEAR and kind == onnx.TensorProto.INT8 and body.stored(pair) is None:
        yield f"its activation '{name}' has int8 codes; the integer kernels read uint8"


def _after(body: Body, node: onnx.NodeProto) -> Iterator[str]:
    """Yield the obstacle between an op and the QuantizeLinear that its integer kernel would absorb."""
    out = node.output[0]
    if out in body.outputs:
        yield f"its output '{out}' is an output of the model, and no integer kernel writes float"
        return
    readers = body.readers.get(out, ())
    if len(readers) > 1:
        float_ones = [one for one in readers if one.op_type not in QUANTIZE]
        if float_ones:
            yield f"its output is read in float by {float_ones[0].op_type} '{float_ones[0].name}' as well"
        return
    for one in readers:
        if one.op_type in QUANTIZE:
            return
        behind = [later for later in body.readers.get(one.output[0], ()) if later.op_type in QUANTIZE]
        if one.op_type in RECTIFIERS and behind:
            yield _rectified(body, one, behind[0])
        else:
            yield f"{one.op_type} '{one.name}' stands between it and the next pair"


def _rectified(body: Body, rectifier: onnx.NodeProto, quantize: onnx.NodeProto) -> str:
    """Return the reason why a Relu or Clip is not replaced by the zero point after it."""
    zero = body.zero_point(quantize)
    value = "computed" if zero is None or zero.data_location else f"{int(np.ravel(numpy_helper.to_array(zero))[0])}"
    if rectifier.op_type == "Relu":
        return f"the Relu behind it stays in float: the zero point {value} of its codes is not the lowest code"
    return f"the {rectifier.op_type} behind it stays in float: its codes (zero point {value}) reach past its limits"


def data_inputs(body: Body, node: onnx.NodeProto) -> list[str]:
    """Return the inputs of the same type as the first output: data, but not shapes or indices."""
    inputs, outputs = body.kinds(node)
    if not outputs:
        return list(node.input[:1])
    pairs = ((name, inputs[min(at, len(inputs) - 1)]) for at, name in enumerate(node.input))
    return [name for name, kind in pairs if name and kind == outputs[0]]


def _text(node: onnx.NodeProto, name: str) -> str:
    return next((attribute.s.decode() for attribute in node.attribute if attribute.name == name), "")

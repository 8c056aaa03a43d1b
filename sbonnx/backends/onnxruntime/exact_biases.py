"""Bias encoding that onnxruntime computes exactly: int32 mantissas with a power of two as scale.

From optimization level "basic" on, onnxruntime's transformer WeightBiasQuantization quantizes the float bias of a Conv,
ConvTranspose or Gemm between pairs to int32 with the scale ``s_input * s_weight``. With 16-bit codes that overflows:
the bias saturates and the output is wrong. With few bits the step is coarse. Float weights between pairs become int8
with one scale, whatever the recipe says. The transformer skips ops whose bias is computed, and constant folding does
not fold a DequantizeLinear. A float32 is ``mantissa * 2^e`` with a 24-bit mantissa, so this encoding stores the bias
bit for bit. A float16 bias, for which that scale is often too small, is stored as float32 followed by a Cast.

A computed bias costs time: a float convolution with one does not run on blocks of channels (NCHWc), and a depthwise one
takes up to ten times as long. Therefore the backend onnxruntime rewrites only ops whose output leads to a
QuantizeLinear and nowhere else, as the transformer does (`keep_rounded_biases`); and after a float32 convolution with
float weights, it writes a LeakyRelu of slope 1 instead (`shield_convolutions`). It changes no value, is fused into the
convolution, and keeps the transformer away.

An integer kernel would interpret the codes with the scale ``s_input * s_weight``. Therefore only ops are rewritten for
which onnxruntime has no integer kernel: in float16, with float weights, with codes on either side that are not 8 bits
wide, or with a Clip before the QuantizeLinear that narrows it to fewer than 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np
import onnx

from sbonnx.backends.base import in_every_scope
from sbonnx.graph import Body, Node, Tensor, Variable, edit, query
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import BITS, CONVOLUTIONS, DEQUANTIZE, LINEAR, MOVES_DATA, PICKS_MAX, QUANTIZE, RECTIFIERS
from sbonnx.spec import Array

MANTISSA: Final = 24
"""Mantissa bits of a float32."""

LEAST: Final = -126
"""Exponent of the smallest normal float32."""

BYTE: Final = 8

NOT_BYTES: Final = frozenset({"int16", "uint16", "int4", "uint4", "int2", "uint2"})
"""Quantized types for which onnxruntime's CPU has no integer convolution or matrix product."""

PASSED: Final = RECTIFIERS | MOVES_DATA | PICKS_MAX
"""Ops allowed before the QuantizeLinear: it is moved before moves of data."""

FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16))

ROUNDED_OPS: Final = CONVOLUTIONS | {"Gemm"}
"""Ops that WeightBiasQuantization rewrites."""


@in_every_scope(sweep=False)
def keep_biases(body: Body, names: edit.Names) -> Iterator[str]:
    """Write the biases of all ops behind a DequantizeLinear that may be affected as a DequantizeLinear of int32."""
    yield from _kept(body, names, list(body.nodes))


@in_every_scope(sweep=False)
def keep_rounded_biases(body: Body, names: edit.Names) -> Iterator[str]:
    """As `keep_biases`, only of ops whose output leads to a QuantizeLinear and nowhere else."""
    yield from _kept(body, names, [node for node in body.nodes if node.outputs and _leads_to_codes(node.outputs[0])])


def _kept(body: Body, names: edit.Names, nodes: Iterable[Node]) -> Iterator[str]:
    for node in nodes:
        bias = _rounded_bias(node)
        if bias is not None:
            _write(node, bias, body, names)
            yield f"{node.name}: its bias as int32 with a power of two as scale"


@in_every_scope(sweep=False)
def shield_convolutions(body: Body, names: edit.Names) -> Iterator[str]:
    """Write a LeakyRelu of slope 1 after float convolutions whose weights onnxruntime would quantize."""
    for node in list(body.nodes):
        weight = query.constant(node.inputs[1]) if node.op == "Conv" else None
        if weight is None or weight.dtype != np.float32 or _rounded_bias(node) is None:
            continue
        output = node.outputs[0]
        if not _leads_to_codes(output):
            continue
        inner = Variable(names.fresh(f"{output.name}_float"), dtype=output.dtype, shape=output.shape)
        node.outputs[0] = inner
        body.nodes.append(Node("LeakyRelu", names.fresh(f"{node.name}_same"), {"alpha": 1.0}, [inner], [output]))
        yield f"{node.name}: its float weights protected from quantization by a LeakyRelu of slope 1"


def exact_codes(bias: Array) -> tuple[Array, Array]:
    """Compute int32 codes and float32 scales of a finite float32 bias, in its shape, with ``codes * scales == bias``.

    Below ``2^-102`` scales stay normal numbers, and the error of the product is at most ``2^-127``.
    """
    exponent = np.maximum(np.frexp(bias)[1] - MANTISSA, LEAST)
    codes = np.rint(np.ldexp(bias.astype(np.float64), -exponent)).astype(np.int32)
    return codes, np.ldexp(np.float32(1), exponent).astype(np.float32)


def _rounded_bias(node: Node) -> Array | None:
    """Return the bias of a node that onnxruntime would wrongly quantize, float (out channels,); None for other nodes.

    Return zeros for a node with float weights and no bias: only a computed bias prevents onnxruntime from quantizing
    those weights.
    """
    if node.op not in ROUNDED_OPS:
        return None
    linear = LINEAR[node.op]
    data, weight = (query.producer(node.inputs[index]) for index in (0, linear.weight))
    scale = query.constant(data.inputs[1]) if data is not None and data.op in DEQUANTIZE else None
    if data is None or scale is None or scale.size != 1:
        return None
    values = query.constant(node.inputs[linear.weight])
    half = query.dtype(node.inputs[0]) == np.float16
    if values is None and not half and _in_bytes(data) and _in_bytes(weight) and not _narrowed(node):
        return None
    at = linear.bias
    if at is not None and at < len(node.inputs) and not node.inputs[at].is_empty():
        bias = query.constant(node.inputs[at])
        fits = bias is not None and bias.dtype in FLOATS and bias.ndim == 1 and bool(np.isfinite(bias).all())
        return bias if fits else None
    if values is None or values.dtype != np.float32:
        return None
    layer = LinearLayer.of(node)
    return None if isinstance(layer, str) else np.zeros(layer.out_channels, np.float32)


def _leads_to_codes(tensor: Tensor) -> bool:
    """Return whether a tensor goes to a QuantizeLinear and nowhere else, through rectifiers and moves of data."""
    uses = query.readers(tensor)
    return bool(uses) and all(
        node.op in QUANTIZE or (node.op in PASSED and bool(node.outputs) and _leads_to_codes(node.outputs[0]))
        for node, _ in uses
    )


def _in_bytes(node: Node | None) -> bool:
    """Return whether a tensor may be read as 8 bits: False if a node dequantizes integers of another width."""
    return node is None or node.op not in DEQUANTIZE or str(query.dtype(node.inputs[0])) not in NOT_BYTES


def _narrowed(node: Node) -> bool:
    """Return whether the output goes through a Clip into a QuantizeLinear of fewer than 8 bits, and nowhere else."""
    while len(uses := query.readers(node.outputs[0])) == 1:
        node = uses[0][0]
        if node.op not in RECTIFIERS:
            return node.op in QUANTIZE and int(node.attrs.get(BITS, BYTE)) < BYTE
    return False


def _write(node: Node, bias: Array, body: Body, names: edit.Names) -> None:
    """Replace the node's bias with the output of a DequantizeLinear. In place."""
    at = LINEAR[node.op].bias
    assert at is not None
    codes, scales = exact_codes(bias.astype(np.float32))
    stem = f"{node.name}_bias"
    inputs: list[Tensor] = [
        edit.add_constant(body, f"{stem}_mantissa", codes, names),
        edit.add_constant(body, f"{stem}_power", scales, names),
    ]
    dequantize = edit.add_node(body, "DequantizeLinear", inputs, names=names, stem=f"{stem}_exact", attrs={"axis": 0})
    output = dequantize.outputs[0]
    output.dtype, output.shape = np.dtype(np.float32), [bias.size]
    if bias.dtype != np.float32:
        kind = {"to": int(onnx.helper.np_dtype_to_tensor_dtype(bias.dtype))}
        output = edit.add_node(body, "Cast", [output], names=names, stem=f"{stem}_half", attrs=kind).outputs[0]
        output.dtype, output.shape = bias.dtype, [bias.size]
    if at < len(node.inputs):
        edit.replace_input(node, at, output)
    else:
        node.inputs.append(output)

"""OpenVINO's rules for Q/DQ models on CPU, in one table.

Source: executed graphs of tiny models in OpenVINO 2026.4 on x86-64 (docs/openvino.md): where a pair leads to no integer
kernel, the op runs in float and the pair only costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from sbonnx import graph as graphs
from sbonnx.backends.openvino.runtime import OPENVINO_RUNTIME
from sbonnx.backends.runtime_types import layers_by_name
from sbonnx.errors import SbonnxError
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.linting.findings import LintRule
from sbonnx.linting.model_view import COMMUTES, Quantizer, View
from sbonnx.linting.ort import numbers, read
from sbonnx.ops import (
    CONCATS,
    CONVOLUTIONS,
    LINEAR,
    MATRIX_PRODUCTS,
    PADS,
    PICKS_MAX,
    POOLS,
    RECURRENT,
    RESIZES,
    SOFTMAX,
)

Found = Iterator[tuple[str, str, str]]

BYTES: Final = frozenset({"int8", "uint8"})
NARROW: Final = frozenset({"int4", "uint4", "int2", "uint2"})


KEEPS_CODES: Final = CONCATS | POOLS | RESIZES | PADS
"""Ops through which OpenVINO moves a dequantization, besides those that move data."""


def _reads_codes(view: View, tensor: Tensor) -> bool:
    """Return whether a tensor is dequantized, directly or before ops that a dequantization moves through."""
    waiting, seen = [tensor], set()
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or view.dequantizer(tensor) is not None:
            continue
        seen.add(id(tensor))
        node = query.producer(tensor)
        if node is None or node.op not in KEEPS_CODES | COMMUTES:
            return False
        waiting += node.inputs if node.op in CONCATS else node.inputs[:1]
    return True


def _pairs_of(view: View, node: Node) -> tuple[bool, Quantizer | None]:
    """Return whether a linear op reads quantized activations, and the DequantizeLinear of its constant weight."""
    weight = view.weight(node)
    index = LINEAR[node.op].weight
    if weight is None or len(node.inputs) < 2:
        return False, None
    return _reads_codes(view, node.inputs[1 - index]), read.dequantized(view, node.inputs[index])


def _has_zero(quantizer: Quantizer) -> bool:
    return quantizer.zero is not None and bool(np.any(quantizer.zero.astype(np.float32)))


def weight_zero_point(view: View) -> Found:
    """Find 8-bit weights with a zero point, whose op reads quantized activations."""
    for node in view.weighted:
        data, weight = _pairs_of(view, node)
        if data and weight is not None and weight.codes in BYTES and _has_zero(weight):
            why = f"{weight.codes} weights have a zero point: {node.op} runs in float"
            yield str(node.name), str(weight.output.name), why


def narrow_weight(view: View) -> Found:
    """Find weights of fewer than 8 bits whose op reads quantized activations, without a Cast to int8."""
    for node in view.weighted:
        data, weight = _pairs_of(view, node)
        if data and weight is not None and weight.codes in NARROW and read.is_stored(view, weight):
            why = f"{weight.codes} weights behind quantized activations: {node.op} runs in float"
            yield str(node.name), str(weight.output.name), why


def transposed_zero_point(view: View) -> Found:
    """Find inputs of ConvTranspose with a zero point."""
    for node in view.weighted:
        data = view.dequantizer(node.inputs[0]) if node.op == "ConvTranspose" else None
        if data is not None and _has_zero(data):
            yield str(node.name), str(data.output.name), "its input has a zero point: ConvTranspose runs in float"


def product_types(view: View) -> Found:
    """Find products of two quantized activations that are not int8 with the zero point 0."""
    for node in view.nodes:
        if node.op not in MATRIX_PRODUCTS or len(node.inputs) < 2 or view.weight(node) is not None:
            continue
        pairs = [view.dequantizer(tensor) for tensor in node.inputs[:2]]
        left, right = pairs
        if left is None or right is None:
            continue
        bad = next((pair for pair in (left, right) if pair.codes != "int8" or _has_zero(pair)), None)
        # the second factor may be int8 with any unsigned first one whose zero point is 0
        if (
            bad is left
            and left.codes == "uint8"
            and not _has_zero(left)
            and right.codes == "int8"
            and not _has_zero(right)
        ):
            continue
        if bad is not None:
            kind = f"{bad.codes}{' with a zero point' if _has_zero(bad) else ''}"
            yield str(node.name), str(bad.output.name), f"a product of activations reads {kind}: it runs in float"


def recurrent_weights(view: View) -> Found:
    """Find recurrent ops whose weights are dequantized, or cast and scaled, in a graph that quantizes activations."""
    quantizes = any(quantizer.quantizes and view.is_activation_pair(quantizer) for quantizer in view.quantizers)
    for node in view.nodes:
        if not quantizes or node.op not in RECURRENT:
            continue
        for tensor in node.inputs[1:3]:
            if read.dequantized(view, tensor) is not None or _is_cast(tensor):
                data = view.dequantizer(node.inputs[0])
                integer = data is not None and not _has_zero(data)
                effect = "runs in integers, with wrong states" if integer else "does not compile"
                why = f"{node.op} with a dequantized weight {effect} where activations are quantized"
                yield str(node.name), str(tensor.name), why
                break


def _is_cast(tensor: Tensor) -> bool:
    """Return whether codes become a tensor through Cast and Mul, as the backend onnxruntime writes them."""
    product = query.producer(tensor)
    if product is None or product.op != "Mul":
        return False
    makers = [query.producer(factor) for factor in product.inputs]
    return any(maker is not None and maker.op == "Cast" for maker in makers)


def convolution_weights_alone(view: View) -> Found:
    """Find convolutions with a quantized weight and float activations."""
    for node in view.weighted:
        data, weight = _pairs_of(view, node)
        if node.op in CONVOLUTIONS and not data and weight is not None:
            yield str(node.name), str(weight.output.name), f"{node.op} reads float activations: it runs in float"


def float_weight(view: View) -> Found:
    """Find float weights whose op reads quantized activations."""
    for node in view.weighted:
        data, weight = _pairs_of(view, node)
        if data and weight is None and isinstance(node.inputs[LINEAR[node.op].weight], Constant):
            why = f"the weight of {node.op} is float: it runs in float, although its input is quantized"
            yield str(node.name), str(node.inputs[1 - LINEAR[node.op].weight].name), why


def concat_scales(view: View) -> Found:
    """Find Concat nodes with inputs of different scales whose output goes to convolutions without a pair between."""
    for node in view.nodes:
        if node.op not in CONCATS:
            continue
        pairs = [read.dequantized(view, tensor) for tensor in node.inputs]
        quantized = [pair for pair in pairs if pair is not None]
        if len(quantized) < len(pairs) or all(pair.same_numbers(quantized[0]) for pair in quantized):
            continue
        readers = [reader for reader, _ in query.readers(node.outputs[0])]
        # depthwise convolutions and matrix products with one scale a channel are not concerned
        into = [reader for reader in readers if reader.op == "Conv" and int(reader.attrs.get("group", 1)) == 1]
        if into:
            why = f"its inputs have different scales: {into[0].op} '{into[0].name}' behind it runs in float"
            yield str(node.name), str(node.outputs[0].name), why


def picks_before_pair(view: View) -> Found:
    """Find MaxPool, averaging pools and nearest Resize with a pair behind, and float before."""
    for node in view.nodes:
        if node.op not in (PICKS_MAX & {"MaxPool"}) | POOLS and not _is_nearest(node):
            continue
        if read.dequantized(view, node.inputs[0]) is None and read.only_quantized(view, node.outputs[0]):
            maker = query.producer(node.inputs[0])
            if maker is not None and maker.op in LINEAR:
                why = f"the pair is behind the {node.op}, which runs in float, and so is written by {maker.op}"
                yield str(node.name), str(node.outputs[0].name), why


def _is_nearest(node: Node) -> bool:
    return node.op in RESIZES and query.attribute(node, "mode", "nearest") in ("nearest", b"nearest")


def average_without_pair(view: View) -> Found:
    """Find averaging pools behind a pair whose output is not quantized but goes to a convolution."""
    for node in view.nodes:
        if node.op not in POOLS or read.dequantized(view, node.inputs[0]) is None:
            continue
        readers = [reader for reader, _ in query.readers(node.outputs[0])]
        if any(reader.op in LINEAR for reader in readers):
            why = f"{node.op} reads a pair and none is behind it: what it computes is rounded to the scale before it"
            yield str(node.name), str(node.outputs[0].name), why


def float_normalization(view: View) -> Found:
    """Find pairs whose only readers are Softmax or LayerNormalization."""
    for quantizer in view.quantizers:
        if quantizer.quantizes or not view.is_activation_pair(quantizer):
            continue
        readers = [reader for reader, _ in query.readers(quantizer.output)]
        if readers and all(reader.op in SOFTMAX | {"LayerNormalization"} for reader in readers):
            yield quantizer.name, str(quantizer.output.name), f"only {readers[0].op} reads the pair, in float"


_COMPILED: Final[WeakKeyDictionary[View, tuple[tuple[str, str, str, str], ...]]] = WeakKeyDictionary()


def _session_findings(view: View) -> tuple[tuple[str, str, str, str], ...]:
    """Return the findings in the compiled model, which is compiled once for all rules; none without OpenVINO."""
    if view not in _COMPILED:
        _COMPILED[view] = tuple(_compiled(view)) if OPENVINO_RUNTIME.absent() is None else ()
    return _COMPILED[view]


def _compiled(view: View) -> Iterator[tuple[str, str, str, str]]:
    """Yield the kind of a finding in the compiled model, "refused" or "float", with node, tensor and reason."""
    with temporary_folder() as folder:
        path = folder / "linted.onnx"
        graphs.save(view.graph, path)
        try:
            layers = layers_by_name(OPENVINO_RUNTIME.open(path, None).layers())
        except SbonnxError as error:
            yield "refused", "", "", str(error).replace(str(path), "the model")
            return
    for node in view.weighted:
        data, weight = _pairs_of(view, node)
        layer = layers.get(str(node.name)) or layers.get(str(node.outputs[0].name))
        if data and weight is not None and layer is not None and not layer.integer:
            yield "float", str(node.name), str(node.outputs[0].name), f"{node.op} is executed as {layer.kind} in float"


def refused(view: View) -> Found:
    """Find the reason why OpenVINO does not compile the model, if it is installed."""
    for kind, node, tensor, why in _session_findings(view):
        if kind == "refused":
            yield node, tensor, why


_STATIC_CAUSES: Final = (
    narrow_weight,
    weight_zero_point,
    transposed_zero_point,
    concat_scales,
    numbers.wide_activation,
)


def stays_float(view: View) -> Found:
    """Find linear ops between pairs that OpenVINO executes in float for a reason that no other rule names."""
    explained = {node for check in _STATIC_CAUSES for node, _, _ in check(view)}
    behind_concat = {
        str(reader.name)
        for node in view.nodes
        if str(node.name) in explained and node.op in CONCATS
        for reader, _ in query.readers(node.outputs[0])
    }
    wide = {
        str(reader.name)
        for quantizer in view.quantizers
        if quantizer.name in explained
        for reader, _ in query.readers(quantizer.output)
    }
    for kind, node, tensor, why in _session_findings(view):
        if kind == "float" and node not in explained | behind_concat | wide:
            yield node, tensor, why


OPENVINO_RULES: Final = (
    LintRule(
        "V01",
        "every scale is a finite number above 0",
        "error",
        "calibrate the tensor again with finite data, or leave its pair out",
        numbers.bad_scale,
    ),
    LintRule(
        "V02",
        "scales and zero points are constants",
        "warning",
        "store them as initializers",
        numbers.computed_scale,
    ),
    LintRule(
        "V03",
        "weights have the zero point 0",
        "warning",
        "quantize weights to int8, symmetric",
        weight_zero_point,
    ),
    LintRule(
        "V04",
        "activations have 8 bits",
        "warning",
        "quantize the activation to uint8 or int8, or leave it float",
        numbers.wide_activation,
    ),
    LintRule(
        "V05",
        "the input of a ConvTranspose has the zero point 0",
        "warning",
        "quantize the input symmetrically, or leave the op float",
        transposed_zero_point,
    ),
    LintRule(
        "V06",
        "products of two activations read int8 with the zero point 0",
        "warning",
        "quantize both factors to int8, symmetric, or leave the product float",
        product_types,
    ),
    LintRule(
        "V07",
        "weights of LSTM, GRU and RNN are constants",
        "error",
        "leave the weights of recurrent ops float",
        recurrent_weights,
    ),
    LintRule(
        "V08",
        "where the weight of a convolution is quantized, so is the activation",
        "warning",
        "put a pair on the convolution's input, or keep the weight float",
        convolution_weights_alone,
    ),
    LintRule(
        "V09",
        "where the activation is quantized, so is the weight",
        "warning",
        "quantize the weight, or remove the pair if nothing else reads it",
        float_weight,
    ),
    LintRule(
        "V10",
        "inputs of a Concat have one scale, or a pair is behind it",
        "warning",
        "give the inputs one scale and zero point, or put a pair behind the Concat",
        concat_scales,
    ),
    LintRule(
        "V11",
        "a pool or nearest Resize with a pair behind it has one before it",
        "warning",
        "put the pair before the op",
        picks_before_pair,
    ),
    LintRule(
        "V12",
        "an averaging pool behind a pair has a pair behind it",
        "info",
        "put a pair on the pool's output, or remove the one before it",
        average_without_pair,
    ),
    LintRule(
        "V13",
        "Softmax and LayerNormalization stay float",
        "warning",
        "remove the pair",
        float_normalization,
    ),
    LintRule(
        "V14",
        "weights behind quantized activations are int8 for the kernel",
        "warning",
        "put a Cast to int8 between the stored weight and its DequantizeLinear",
        narrow_weight,
    ),
    LintRule(
        "V15",
        "OpenVINO compiles the model",
        "error",
        "fix what its message names",
        refused,
    ),
    LintRule(
        "V16",
        "no linear op between pairs runs in float",
        "warning",
        "remove the pairs around the op",
        stays_float,
    ),
)
"""Rules in the order of the report: numbers, types, placement, the compiled model if OpenVINO is installed."""

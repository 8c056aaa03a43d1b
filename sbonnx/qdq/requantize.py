"""Models that are already quantized: find their Q/DQ pairs; refuse the models, or convert them back to float."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, node_metadata, query
from sbonnx.graph.protos import node_protos
from sbonnx.ops import DEQUANTIZE, QDQ, QUANTIZE
from sbonnx.planning import BITS
from sbonnx.qdq.arithmetic import numbers
from sbonnx.qdq.from_qoperator import is_quantized_op, unfold
from sbonnx.qdq.strip import source_of, strip
from sbonnx.report import Note, Reason, Refusal
from sbonnx.small_floats import E8M0, FLOATS, FP4, FP8, Kind
from sbonnx.spec import Array, QParams, QuantSpec


@dataclass(frozen=True)
class Pair:
    """One DequantizeLinear with constant parameters, its source and its output.

    Attributes:
        node: name of the DequantizeLinear.
        source: the float tensor that is quantized, or the constant that holds codes.
        output: the dequantized tensor.
        qparams: scale, zero point and bit width.
        constant: the source is a constant: codes (`codes` True) or floats followed by a QuantizeLinear.
        codes: there is no QuantizeLinear; the source holds integers.
    """

    node: str
    source: str
    output: str
    qparams: QParams
    constant: bool
    codes: bool


def read(graph: Graph) -> tuple[Pair, ...]:
    """Find every pair of the graph, including branches, in node order.

    int32 biases are left out, and nodes whose scale or zero point is computed.
    """
    pairs = []
    for _, body in query.scopes(graph):
        for node in body.nodes:
            if node.op in DEQUANTIZE:
                pair = _read_one(node, node_metadata(graph, node.name).get("sbonnx.scheme"))
                if pair is not None:
                    pairs.append(pair)
    return tuple(pairs)


def _spec(zero: Array, scale: Array, node: Node, axis: int | None, scheme: str | None) -> QuantSpec:
    """Derive the spec from the zero point's type and value, ``__bits``, and the scheme in the metadata.

    Only the metadata distinguishes an affine type with a central zero point from a symmetric one.
    """
    kind = str(zero.dtype)
    block = int(node.attrs["block_size"]) if axis is not None and node.attrs.get("block_size") else None
    if kind in (FP8, FP4):
        kind_of_floats = _kind(kind, str(scale.dtype))
        return QuantSpec(bits=FLOATS[kind_of_floats].bits, axis=axis, block_size=block, kind=kind_of_floats)
    signed = not kind.startswith("u")
    width = int("".join(c for c in kind if c.isdigit()))
    bits = int(node.attrs.get(BITS, width))
    centre = 0 if signed else 1 << (bits - 1)
    symmetric = scheme != "affine" and bool((zero.astype(np.int32) == centre).all())
    return QuantSpec(bits=bits, signed=signed, symmetric=symmetric, axis=axis, block_size=block)


def _kind(codes: str, scales: str) -> Kind:
    """Return the kind of small floats of codes and scales of these types."""
    if scales == E8M0:
        return "mxfp8" if codes == FP8 else "mxfp4"
    return "nvfp4" if codes == FP4 else "fp8"


def _untaken(codes: Array | None, zero: Array, spec: QuantSpec) -> Array:
    """Recover zero points that were subtracted from stored codes, else return `zero`.

    `sbonnx.backends.onnxruntime.rewrites` subtracts them. Any zero points with which the codes fit the bit width
    are equivalent: this chooses those with which each channel begins at the lowest code.
    """
    if codes is None or spec.block_size or not codes.size:
        return zero
    others = tuple(axis for axis in range(codes.ndim) if axis != spec.axis)
    low, high = (np.asarray(end(codes, axis=others), np.int64).reshape(zero.shape) for end in (np.min, np.max))
    beyond = (low < spec.qmin) | (high > spec.qmax)
    if not beyond.any() or (high - low > spec.qmax - spec.qmin).any():
        return zero
    return np.where(beyond, spec.qmin - low, 0).astype(spec.dtype)


def _read_one(node: Node, scheme: str | None) -> Pair | None:
    given = numbers(node)
    kind = "" if given is None else str(given.zero.dtype)
    readers = query.readers(node.outputs[0])
    if readers and all(reader.op in DEQUANTIZE and index == 1 for reader, index in readers):
        return None  # it dequantizes scales
    if given is None or kind == "int32" or not (kind in (FP8, FP4) or kind.lstrip("u").startswith("int")):
        return None
    scale, zero = given.scale, given.zero
    per_tensor = scale.ndim == 0 or (scale.size == 1 and not node.attrs.get("block_size"))
    axis = None if per_tensor else int(node.attrs.get("axis", 1))
    if axis is not None and axis < 0:
        axis += query.rank(node.inputs[0]) or 0
    scale = scale.astype(np.float32).reshape(() if axis is None else scale.shape)
    spec = _spec(zero, given.scale, node, axis, scheme)
    zero_point = zero.astype(spec.dtype).reshape(scale.shape)
    tensor, codes = source_of(node)
    if codes and not spec.symmetric and not zero.any():
        zero_point = _untaken(query.unpacked(node.inputs[0]), zero_point, spec)
    return Pair(
        node=node.name,
        source=tensor.name,
        output=node.outputs[0].name,
        qparams=QParams(scale, zero_point, spec),
        constant=isinstance(tensor, Constant),
        codes=codes,
    )


WHAT = "remove an earlier quantization"


def _quantized(graph: Graph) -> Iterator[Node]:
    """Iterate over the nodes that only a quantized model has, in order."""
    return (node for node in query.all_nodes(graph) if is_quantized_op(node.op, node.domain or ""))


def is_quantized(graph: Graph) -> bool:
    """Return whether a graph has Q/DQ nodes or integer operators."""
    return next(_quantized(graph), None) is not None


def has_quantized_ops(model: ModelProto) -> bool:
    """Return whether a model, its bodies and functions included, has Q/DQ nodes or integer operators."""
    nodes = (node for part in (model.graph, *model.functions) for node in node_protos(part))
    return any(is_quantized_op(node.op_type, node.domain) for node in nodes)


def make_float(graph: Graph, *, requantize: bool) -> tuple[Refusal, ...]:
    """Ensure that a graph is float. In place.

    Quantizing a quantized model would round values twice and leave two pairs where one belongs. With `requantize`, its
    pairs are removed first and integer operators become float operators; a note gives their numbers.

    Returns:
        Refusals for nodes that could not be converted and stay unchanged.

    Raises:
        ModelError: the model is already quantized, and `requantize` is False.
    """
    first = next(_quantized(graph), None)
    if first is None:
        return ()
    where = f"'{graph.info.path}'" if graph.info.path is not None else "the model"
    if not requantize:
        tensor = next((str(operand.name) for operand in first.inputs if not operand.is_empty()), "")
        raise ModelError(
            f"{where} is quantized already, first at '{first.name}' ({first.op} of '{tensor}'): give its float model, "
            "or --requantize (requantize=True) to remove its pairs first"
        )
    fired, refusals = unfold(graph)
    pairs = strip(graph)
    written = f"; integer operators written as float ones: {len(fired)}" if fired else ""
    graph.info.notes.append(Note("pairs-removed", f"pairs of an earlier quantization removed: {pairs}{written}"))
    left, explained = [], {refusal.where for refusal in refusals}
    for node in _quantized(graph):
        why = (
            Reason("codes-computed", "its codes or numbers are computed")
            if node.op in QDQ
            else Reason("no-float-operator", "it has no float operator")
        )
        if node.op in QUANTIZE:
            why = Reason("codes-read-elsewhere", "its codes are read by other ops than a DequantizeLinear")
        if node.name not in explained:
            left.append(Refusal(WHAT, str(node.name), why))
    return (*refusals, *left)

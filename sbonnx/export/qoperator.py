"""Conversion of Q/DQ to integer operators (QOperator format): QLinearConv and similar, for runtimes without Q/DQ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto

from sbonnx.export.conversion import (
    Codes,
    Converted,
    NodeSite,
    Sink,
    Sinks,
    Writer,
    changes_no_code,
    dequantized,
    float_of,
    numbers_of,
)
from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable, edit, query
from sbonnx.ops import (
    CONTRIB,
    DEQUANTIZE,
    INTEGER_OPS,
    LINEAR,
    MOVES_DATA,
    PICKS_MAX,
    QDQ,
    QUANTIZE,
    READS_SHAPE,
    RECTIFIERS,
    RESIZES,
)
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array

STEP: Final = "write as an integer op"

BYTES: Final = ("uint8", "int8")
INT32: Final = np.iinfo(np.int32)
SEPARATE_AXIS_SINCE: Final = 13
"""First opset whose Softmax sums over one axis, by default the last; before, it sums over all axes from axis 1 on."""


Builder = Callable[[NodeSite, Sinks, Writer], Reason | None]
"""Writes the integer form of a node; returns the reason if it did not."""


def _bytes(tensor: Tensor) -> Codes | Reason:
    """Return the 8-bit codes of an input with one scale, or the reason why there are none."""
    codes = dequantized(tensor)
    if codes is None:
        return Reason("input-float", f"its input '{tensor.name}' is float")
    if codes.axis is not None:
        return Reason("input-per-channel", f"its input '{tensor.name}' has one scale per channel")
    return (
        codes
        if str(codes.zero.dtype) in BYTES
        else Reason("type-of-codes", f"its input '{tensor.name}' has codes of {codes.zero.dtype}")
    )


def _matrix(tensor: Tensor, axis: int | None) -> Codes | Reason:
    """Return the 8-bit codes of a weight with one scale or one per slice of `axis`, or the reason against it."""
    codes = dequantized(tensor)
    if codes is None:
        return Reason("weight-float", f"its weight '{tensor.name}' is float")
    if codes.block is not None or codes.axis not in (None, axis):
        return Reason(
            "scales-along-another-axis",
            f"the scales of its weight '{tensor.name}' run along another axis than its output channels",
        )
    return (
        codes
        if str(codes.zero.dtype) in BYTES
        else Reason("type-of-codes", f"its weight '{tensor.name}' has codes of {codes.zero.dtype}")
    )


def _bias(tensor: Tensor, scale: Array, width: int) -> Array | Reason:
    """Return the int32 codes of a bias at `scale`, (width,), or the reason why there are none.

    Codes of the file are reused if they already have that scale.
    """
    codes = dequantized(tensor)
    value = query.constant(tensor) if codes is None else float_of(codes)
    if value is None or value.size not in (1, width) or value.shape[-1:] not in ((), (1,), (width,)):
        return Reason("bias-not-constant", f"its bias '{tensor.name}' is not a constant vector")
    stored = None if codes is None else codes.values
    if codes is not None and stored is not None and stored.size == width:
        ours, wanted = np.broadcast_to(codes.scale.astype(np.float32), width), np.broadcast_to(scale, width)
        if (ours == wanted).all():
            return stored.reshape(width).astype(np.int32)
    wide = np.broadcast_to(value.reshape(-1), (width,)).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.rint(wide / scale.astype(np.float64))
    if not np.isfinite(exact).all() or np.abs(exact).max(initial=0.0) > INT32.max:
        return Reason(
            "bias-not-int32", f"its bias '{tensor.name}' does not fit int32 at the scale of its input and weight"
        )
    return np.asarray(exact, np.int32)


def _conv(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write QLinearConv(x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero [, int32 bias])."""
    node, body = site.node, site.body
    data, weight, sink = _bytes(node.inputs[0]), _matrix(node.inputs[1], 0), sinks.of(node.outputs[0])
    if isinstance(data, str):
        return data
    if isinstance(weight, str):
        return weight
    if isinstance(sink, str):
        return sink
    if (weight.zero != weight.zero.flat[0]).any():
        return Reason("zero-points-differ", "QLinearConv has one zero point for all channels of a weight")
    inputs = [data.tensor, *writer.numbers(body, data), weight.tensor, *writer.numbers(body, weight)]
    inputs += writer.numbers(body, sink)
    if query.optional_input(node, 2) is not None:
        width = int(node.inputs[1].shape[0])
        bias = _bias(node.inputs[2], (data.scale * weight.scale).astype(np.float32), width)
        if isinstance(bias, str):
            return bias
        inputs.append(writer.constant(body, f"{node.inputs[2].name}_int32", bias))
    writer.add(site, "QLinearConv", inputs, attrs=node.attrs, outputs=[writer.written(body, sink)])
    return None


def _matmul(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write QLinearMatMul if integers follow, else MatMulInteger, scaled to float by the product of both scales."""
    node, body = site.node, site.body
    rank = query.rank(node.inputs[1])
    left, right = _bytes(node.inputs[0]), _matrix(node.inputs[1], None if rank is None else rank - 1)
    if isinstance(left, str):
        return left
    if isinstance(right, str):
        return right
    sink = sinks.of(node.outputs[0])
    a, b = writer.numbers(body, left), writer.numbers(body, right)
    if isinstance(sink, Sink):
        inputs = [left.tensor, *a, right.tensor, *b, *writer.numbers(body, sink)]
        writer.add(site, "QLinearMatMul", inputs, outputs=[writer.written(body, sink)])
        return None
    summed = writer.add(site, "MatMulInteger", [left.tensor, right.tensor, a[1], b[1]], kind=np.int32)
    cast = writer.add(site, "Cast", [summed], attrs={"to": TensorProto.FLOAT})
    scale = writer.constant(body, f"{node.name}_scale", (left.scale * right.scale).astype(np.float32))
    writer.add(site, "Mul", [cast, scale], outputs=[writer.given(node, np.float32)])
    return None


def _gemm(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write QGemm(a, a_scale, a_zero, b, b_scale, b_zero, int32 bias [, y_scale, y_zero]).

    Without the last two inputs the output is float.
    """
    node, body = site.node, site.body
    factors = [float(node.attrs.get(name, 1.0)) for name in ("alpha", "beta")]
    if factors != [1.0, 1.0]:
        return Reason("gemm-beta", f"QGemm has no alpha and beta for its bias, here {factors[0]:g} and {factors[1]:g}")
    axis = 0 if node.attrs.get("transB", 0) else 1
    left, right = _bytes(node.inputs[0]), _matrix(node.inputs[1], axis)
    if isinstance(left, str):
        return left
    if isinstance(right, str):
        return right
    weight = right.values
    bias: Array | None = None
    if query.optional_input(node, 2) is not None:
        if weight is None:
            return Reason("weight-computed", "its weight is computed, and its bias has no constant width")
        bias_codes = _bias(node.inputs[2], (left.scale * right.scale).astype(np.float32), weight.shape[axis])
        if isinstance(bias_codes, str):
            return bias_codes
        bias = bias_codes
    sink = sinks.of(node.outputs[0])
    inputs = [left.tensor, *writer.numbers(body, left), right.tensor, *writer.numbers(body, right)]
    if bias is not None:
        inputs.append(writer.constant(body, f"{node.inputs[2].name}_int32", bias))
    if isinstance(sink, Sink):
        inputs += [Variable.empty()] * (bias is None) + writer.numbers(body, sink)
    output = writer.written(body, sink) if isinstance(sink, Sink) else writer.given(node, np.float32)
    attrs = {name: node.attrs[name] for name in ("transA", "transB") if name in node.attrs}
    writer.add(site, "QGemm", inputs, attrs=attrs, outputs=[output], domain=CONTRIB)
    return None


@dataclass(frozen=True)
class Form:
    """Integer form of an op that takes scale and zero point after each input, and those of the output last.

    Attributes:
        op: operator of onnxruntime's domain.
        inputs: number of data inputs.
        keeps: attributes that both ops have; an attribute of the float op that is not listed must be 1.
        adds: attributes that only the integer op has.
    """

    op: str
    inputs: int = 1
    keeps: tuple[str, ...] = ()
    adds: dict[str, Any] = field(default_factory=dict)

    def __call__(self, site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
        """Write op(x, x_scale, x_zero [, z, z_scale, z_zero], y_scale, y_zero)."""
        node, body = site.node, site.body
        odd = sorted(name for name in node.attrs if name not in self.keeps and not name.startswith("__"))
        if any(np.any(np.asarray(node.attrs[name]) != 1) for name in odd):
            return Reason("attributes-not-supported", f"{self.op} has no {', '.join(odd)}")
        inputs: list[Tensor] = []
        for tensor in node.inputs[: self.inputs]:
            codes = _bytes(tensor)
            if isinstance(codes, str):
                return codes
            inputs += [codes.tensor, *writer.numbers(body, codes)]
        sink = sinks.of(node.outputs[0])
        if isinstance(sink, str):
            return sink
        inputs += writer.numbers(body, sink)
        attrs = {name: value for name, value in node.attrs.items() if name in self.keeps} | self.adds
        writer.add(site, self.op, inputs, attrs=attrs, outputs=[writer.written(body, sink)], domain=CONTRIB)
        return None


def _concat(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write QLinearConcat(y_scale, y_zero, x1, x1_scale, x1_zero, ...), or Concat if all share one scale."""
    node, body = site.node, site.body
    sources: list[Codes] = []
    for tensor in node.inputs:
        codes = _bytes(tensor)
        if isinstance(codes, str):
            return codes
        sources.append(codes)
    sink = sinks.of(node.outputs[0])
    if all(_alike(codes, sources[0]) for codes in sources) and (isinstance(sink, str) or _alike(sink, sources[0])):
        _on_codes(site, sinks, writer, sources[0], [codes.tensor for codes in sources])
        return None
    if isinstance(sink, str):
        return sink
    inputs = list(writer.numbers(body, sink))
    for codes in sources:
        inputs += [codes.tensor, *writer.numbers(body, codes)]
    output = writer.written(body, sink)
    writer.add(site, "QLinearConcat", inputs, attrs=node.attrs, outputs=[output], domain=CONTRIB)
    return None


def _softmax(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write QLinearSoftmax, with the axis and the opset that defines its semantics as attributes."""
    axis = int(site.node.attrs.get("axis", -1 if site.opset >= SEPARATE_AXIS_SINCE else 1))
    form = Form("QLinearSoftmax", keeps=("axis",), adds={"axis": axis, "opset": site.opset})
    return form(site, sinks, writer)


def _alike(one: Codes | Sink, other: Codes | Sink) -> bool:
    same = (one.scale, one.zero) == (other.scale, other.zero)
    return bool(same) and one.zero.dtype == other.zero.dtype


def _on_codes(site: NodeSite, sinks: Sinks, writer: Writer, codes: Codes, inputs: Sequence[Tensor]) -> None:
    """Write the same op on codes; its outputs share the scale of the input.

    Dequantization commutes with moving values, so a reader that needs floats gets a DequantizeLinear after the op.
    """
    node, body = site.node, site.body
    outputs: list[Tensor] = []
    for index, output in enumerate(node.outputs):
        sink = sinks.of(output)
        if isinstance(sink, Sink) and _alike(sink, codes):
            outputs.append(writer.written(body, sink))
        else:
            outputs.append(writer.with_dequantize(body, node, index, codes))
    writer.add(site, node.op, inputs, attrs=node.attrs, outputs=outputs)


def _moved(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write the same op on codes, for ops that only move or pick values."""
    node = site.node
    codes = _bytes(node.inputs[0])
    if isinstance(codes, str):
        return codes
    if not _takes(node.op, site.opset, str(codes.zero.dtype)):
        return Reason("not-in-opset", f"opset {site.opset} has no {node.op} of {codes.zero.dtype}")
    if node.op in RESIZES and node.attrs.get("mode", "nearest") != "nearest":
        return Reason("computes-new-values", f"mode '{node.attrs['mode']}' computes new values")
    if len(node.outputs) > 1 and node.op in PICKS_MAX:
        return Reason(
            "positions-of-ties", "its second output, the positions, is not that of the float op where values tie"
        )
    _on_codes(site, sinks, writer, codes, [codes.tensor, *node.inputs[1:]])
    return None


def _padded(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Write a Pad on codes, whose fill value is the zero point."""
    node, body = site.node, site.body
    codes = _bytes(node.inputs[0])
    if isinstance(codes, str):
        return codes
    if not _takes(node.op, site.opset, str(codes.zero.dtype)):
        return Reason("not-in-opset", f"opset {site.opset} has no Pad of {codes.zero.dtype}")
    inputs = [codes.tensor, *node.inputs[1:]]
    if node.attrs.get("mode", "constant") == "constant":
        given = query.optional_input(node, 2)
        value = np.zeros((), np.float32) if given is None else query.constant(given)
        if value is None or value.any():
            return Reason("pads-with-another-value", "it fills with another value than 0")
        inputs[2:3] = [writer.constant(body, f"{node.name}_fill", codes.zero)]
    _on_codes(site, sinks, writer, codes, inputs)
    return None


def _takes(op: str, opset: int, kind: str) -> bool:
    """Return whether an op of this opset supports a tensor type as its first input."""
    schema = onnx.defs.get_schema(op, opset)
    typed = schema.inputs[0].type_str
    allowed = next(
        (list(entry.allowed_type_strs) for entry in schema.type_constraints if entry.type_param_str == typed), [typed]
    )
    return f"tensor({kind})" in allowed


def _rectified(site: NodeSite, sinks: Sinks, writer: Writer) -> Reason | None:
    """Remove a Relu or Clip between Q/DQ if the zero point on both sides has the same effect."""
    node, body = site.node, site.body
    codes, sink = _bytes(node.inputs[0]), sinks.of(node.outputs[0])
    if isinstance(codes, str):
        return codes
    if isinstance(sink, str):
        return sink
    if not _alike(sink, codes) or not changes_no_code(node, codes.scale, codes.zero):
        return Reason(
            "rectifier-has-effect", f"{node.op} has none, and has an effect that its zero point does not have"
        )
    for quantizer in sink.quantizers:
        edit.replace_all_uses(quantizer.outputs[0], codes.tensor, graph=body)
    return None


_POOL: Final = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")

BUILDERS: Final[dict[str, Builder]] = {
    "Conv": _conv,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Add": Form("QLinearAdd", inputs=2),
    "Mul": Form("QLinearMul", inputs=2),
    "Sigmoid": Form("QLinearSigmoid"),
    "LeakyRelu": Form("QLinearLeakyRelu", keeps=("alpha",)),
    "Softmax": _softmax,
    "AveragePool": Form("QLinearAveragePool", keeps=_POOL, adds={"channels_last": 0}),
    "GlobalAveragePool": Form("QLinearGlobalAveragePool", adds={"channels_last": 0}),
    "Concat": _concat,
    "Pad": _padded,
    **dict.fromkeys(sorted(RECTIFIERS), _rectified),
    **dict.fromkeys(sorted(MOVES_DATA | PICKS_MAX | RESIZES), _moved),
}
"""Builders by op type."""


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
            if node.op in READS_SHAPE:  # the codes have the same shape as the floats
                codes = dequantized(node.inputs[0])
                if codes is not None:
                    edit.replace_input(node, 0, codes.tensor)
            elif node.op not in QDQ | INTEGER_OPS and not node.domain and _is_quantized(node):
                builder = BUILDERS.get(node.op)
                why = (
                    Reason("no-integer-operator", f"{node.op} has none")
                    if builder is None
                    else builder(NodeSite(node, body, graph.opset), sinks, writer)
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
            value.size == 1 and value.reshape(()) == expected
            for value, expected in zip(numbers, (codes.scale, codes.zero), strict=True)
        ):
            edit.replace_all_uses(node.outputs[0], codes.tensor, graph=body)

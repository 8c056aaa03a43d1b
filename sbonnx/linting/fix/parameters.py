"""Fixes of operator forms and single parameters: opset, integer operators, zero points, axes, biases, scales."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx import graph as graphs
from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.errors import ModelError
from sbonnx.graph import Graph, Node, edit, query
from sbonnx.linting.fix.edit_context import Bench, Fixed
from sbonnx.linting.fix.pair_removal import bypassed
from sbonnx.linting.fix.recentre import pair_of, renumber
from sbonnx.linting.model_view import Quantizer, View
from sbonnx.linting.ort import kernel_choice
from sbonnx.linting.ort import numbers as ort_numbers
from sbonnx.linting.ort import read as ort_read
from sbonnx.linting.ort.read import WeightedOp
from sbonnx.linting.tensorrt import pair_parameters
from sbonnx.linting.tensorrt.pair_parameters import HALVES, opset_wanted
from sbonnx.ops import LINEAR
from sbonnx.qdq import unfold
from sbonnx.qdq.arithmetic import QDQParams, is_integer, limits
from sbonnx.spec import MIN_SCALE_FP16, UNUSED_SCALE, Array


def lifted(graph: Graph, target: str) -> tuple[Graph, tuple[Fixed, ...]]:
    """Convert the graph to the opset that its Q/DQ need, and report it; return the same graph if not needed."""
    view = View(graph, target)
    if view.family != "tensorrt":
        return graph, ()
    needed, newest = opset_wanted(view), PROFILES[view.release].newest_opset
    if needed <= view.opset:
        return graph, ()
    if needed > newest:
        why = f"opset {needed} is newer than {target} reads: use other types or another version"
        return graph, (Fixed("T14", "", "", why, done=False),)
    try:
        converted = graphs.at_opset(graph, needed)
    except ModelError as error:
        return graph, (Fixed("T14", "", "", f"cannot be converted to opset {needed}: {error}", done=False),)
    what = f"converted from opset {view.opset} to {converted.opset}"
    return converted, (Fixed("T14", "", "", what, exact=True),)


def before(bench: Bench) -> Iterable[Fixed]:
    """T14: Do nothing; `lifted` creates a new graph, and runs before all other fixes."""
    return ()


def unfolded(bench: Bench) -> Iterator[Fixed]:
    """T01: Convert the QOperator format, dynamic quantization and MatMulNBits to float operators between pairs.

    The last two lose what no pair can express.
    """
    fired, refusals = unfold(bench.graph)
    for rewrite in fired:
        op = rewrite.pattern.rpartition(" ")[2]
        yield Fixed("T01", rewrite.node, "", f"{op} written as float operator between pairs")
    for refusal in refusals:
        yield Fixed("T01", refusal.where, "", refusal.why, done=False)


DEFAULT_AXIS: Final = 1
"""Default axis of Q and DQ in ONNX."""


def explicit_zero(bench: Bench) -> Iterator[Fixed]:
    """T04: Set an explicit uint8 zero point on a QuantizeLinear without a type, as ONNX defines the default."""
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes or quantizer.codes is not None or quantizer.has_zero:
            continue
        shape = quantizer.scale_shape
        if shape is None or not all(isinstance(dim, int) for dim in shape):
            yield Fixed("T04", quantizer.name, quantizer.scale_name, "the shape of its scale is not known", done=False)
            continue
        zero = bench.constant(f"{quantizer.data.name}_zero_point", np.zeros([int(dim or 0) for dim in shape], np.uint8))
        for member in (quantizer, *bench.view.dequantizers_of(quantizer)):
            if not member.has_zero:
                bench.set_zero(member.node, zero)
        yield Fixed(
            "T04", quantizer.name, str(quantizer.output.name), "a zero point of uint8, as ONNX reads it", exact=True
        )


def explicit_axis(bench: Bench) -> Iterator[Fixed]:
    """T09: Write out ONNX's default axis."""
    for quantizer in bench.view.quantizers:
        if quantizer.many and len(quantizer.scale_shape or ()) == 1 and quantizer.axis is None:
            quantizer.node.attrs["axis"] = DEFAULT_AXIS
            yield Fixed("T09", quantizer.name, quantizer.scale_name, f"axis {DEFAULT_AXIS} written out", exact=True)


def float_biases(bench: Bench) -> Iterator[Fixed]:
    """T17: Store a quantized bias as its dequantized floats."""
    for node in bench.view.nodes:
        linear = LINEAR.get(node.op)
        if linear is None or linear.bias is None or len(node.inputs) <= linear.bias:
            continue
        quantizer = bench.view.dequantizer(node.inputs[linear.bias])
        if quantizer is not None:
            stored = bench.view.is_constant(quantizer.data)
            what = f"the {quantizer.codes} bias stored as floats" if stored else "the bias read without its pair"
            yield bypassed(bench, "T17", node, linear.bias, what, exact=stored)


def float_constants(bench: Bench) -> Iterator[Fixed]:
    """T03: Store other dequantized int32 constants, such as the shift of a norm, as floats."""
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes and quantizer.codes == "int32" and bench.view.is_constant(quantizer.data):
            why = bench.remove(quantizer)
            what = why or "the int32 codes stored as floats"
            yield Fixed("T03", quantizer.name, str(quantizer.data.name), what, done=why is None, exact=why is None)


def typed_scales(bench: Bench) -> Iterator[Fixed]:
    """T15: Convert the scale of a QuantizeLinear to the type of its input; its DequantizeLinear gets the same value.

    Scales of the DequantizeLinear nodes that return half precision by ``output_dtype`` follow, of weights too: an op
    between scales of two types has no kernel.
    """
    named = {name for name, _, _ in pair_parameters.mixed_types(bench.view)}
    yield from _typed_inputs(bench, named)
    for quantizer in bench.view.quantizers if named else ():
        kind, old = query.dtype(quantizer.output), bench.numbers(quantizer)
        if quantizer.quantizes or kind is None or old is None or not quantizer.node.attrs.get("output_dtype"):
            continue
        scale = np.asarray(old.scale.astype(kind))
        if quantizer.scale_type != str(kind) and _good(scale).all():
            exact = bool((scale.astype(np.float64) == old.scale.astype(np.float64)).all())
            edit.replace_input(quantizer.node, 1, bench.constant(quantizer.scale_name, scale))
            del quantizer.node.attrs["output_dtype"]  # the type of the scale is the default
            yield Fixed("T15", quantizer.name, quantizer.scale_name, f"the scale stored as {kind}", exact=exact)


def _typed_inputs(bench: Bench, named: set[str]) -> Iterator[Fixed]:
    for quantizer in bench.view.quantizers:
        if not quantizer.quantizes or quantizer.name not in named:
            continue
        kind, old = query.dtype(quantizer.data), bench.numbers(quantizer)
        if kind is None or old is None:
            yield Fixed("T15", quantizer.name, quantizer.scale_name, "the scale is computed", done=False)
            continue
        scale = np.asarray(old.scale.astype(kind))
        if not _good(scale).all():
            why = f"a scale of {float(old.scale.reshape(-1)[0]):g} is not a number of {kind}"
            yield Fixed("T15", quantizer.name, quantizer.scale_name, why, done=False)
            continue
        backs = bench.view.dequantizers_of(quantizer)
        same = [back for back in backs if back.same_scale(quantizer)]
        exact = bool((scale.astype(np.float64) == old.scale.astype(np.float64)).all())
        edit.replace_input(quantizer.node, 1, bench.constant(f"{quantizer.data.name}_scale", scale))
        for back in () if exact else same:
            theirs = query.dtype(back.node.inputs[1])
            edit.replace_input(back.node, 1, bench.constant(f"{quantizer.data.name}_scale", scale.astype(theirs)))
        yield Fixed("T15", quantizer.name, quantizer.scale_name, f"the scale stored as {kind}", exact=exact)


def float_islands(bench: Bench) -> Iterator[Fixed]:
    """T19: Let a DequantizeLinear return half precision itself if all readers cast its float32 output to it."""
    named = {name for name, _, _ in pair_parameters.float_islands(bench.view)}
    for quantizer in bench.view.quantizers:
        if quantizer.quantizes or quantizer.name not in named:
            continue
        kind, casts = _cast_to(bench, quantizer)
        old = bench.numbers(quantizer)
        if kind is None or old is None or not _good(old.scale.astype(kind)).all():
            why = "what reads it computes in float32: quantize with the high precision fp16 to have it converted"
            yield Fixed("T19", quantizer.name, str(quantizer.output.name), why, done=False)
            continue
        scale = np.asarray(old.scale.astype(kind))
        before = bench.view.quantizer_of(quantizer.data)
        for member in (quantizer, *(() if before is None else (before, *bench.view.dequantizers_of(before)))):
            kept = scale.dtype if member is quantizer else query.dtype(member.node.inputs[1])
            if member.same_scale(quantizer):  # the rounded value for both nodes of the pair
                edit.replace_input(member.node, 1, bench.constant(f"{quantizer.data.name}_scale", scale.astype(kept)))
        quantizer.output.dtype = scale.dtype
        for cast in casts:
            edit.replace_all_uses(cast.outputs[0], quantizer.output, graph=bench.scope_of(cast))
        what = f"the scale stored as {kind}, and {len(casts)} Cast nodes after it removed"
        yield Fixed("T19", quantizer.name, quantizer.scale_name, what)


def _cast_to(bench: Bench, quantizer: Quantizer) -> tuple[str | None, list[Node]]:
    """Return the half type to which all readers cast a tensor, and the readers; None if some do not."""
    readers = [node for node, _ in query.readers(quantizer.output)]
    if bench.view.leaves(quantizer.output) or not readers or any(node.op != "Cast" for node in readers):
        return None, []
    kinds = {str(query.dtype(node.outputs[0])) for node in readers}
    kind = kinds.pop()
    leave = any(bench.view.leaves(node.outputs[0]) for node in readers)
    return (None, []) if kinds or kind not in HALVES or leave else (kind, readers)


def _good(scale: Array) -> Array:
    with np.errstate(over="ignore"):
        values = scale.astype(np.float32)
    return np.asarray(np.isfinite(values) & (values > 0))


def report_mismatch(bench: Bench) -> Iterator[Fixed]:
    """T18: Report only."""
    for quantizer in bench.view.quantizers:
        before = None if quantizer.quantizes else bench.view.quantizer_of(quantizer.data)
        if before is not None and before.quantizes and not quantizer.same_numbers(before):
            why = f"'{before.name}' has other numbers: calibrate again to determine which are right"
            yield Fixed("T18", quantizer.name, str(quantizer.data.name), why, done=False)


def scale_floors(bench: Bench) -> Iterator[Fixed]:
    """T05: Raise scales of stored tensors that are 0, or 0 in float16, to float16's smallest normal number."""
    named = {name for name, _, _ in pair_parameters.bad_scales(bench.view)}
    for quantizer in bench.view.quantizers:
        if quantizer.name not in named:
            continue
        old, stored = bench.numbers(quantizer), query.constant(quantizer.data)
        if old is None or stored is None or not is_integer(old.zero.dtype):
            why = "the scale of a computed tensor requires calibration"
            yield Fixed("T05", quantizer.name, quantizer.scale_name, why, done=False)
            continue
        raised = _raised(old, stored, quantizes=quantizer.quantizes)
        if isinstance(raised, str):
            yield Fixed("T05", quantizer.name, quantizer.scale_name, raised, done=False)
            continue
        new, values = raised
        changed = int((new.scale != old.scale).sum())
        why_not = _store(bench, quantizer, new, values)
        what = f"{changed} of {new.scale.size} scales raised to {MIN_SCALE_FP16:g}, or 1 where all is 0"
        yield Fixed("T05", quantizer.name, quantizer.scale_name, why_not or what, done=why_not is None)


def _store(bench: Bench, quantizer: Quantizer, new: QDQParams, values: Array) -> str | None:
    """Write raised scales to the pair of stored floats, or to a DequantizeLinear together with its codes."""
    stem = str(quantizer.data.name)
    if not quantizer.quantizes:
        bench.set_numbers(quantizer.node, new, stem)
        edit.replace_input(quantizer.node, 0, bench.constant(f"{stem}_raised", values))
        return None
    pair = pair_of(bench, quantizer)
    if isinstance(pair, str):
        return pair
    for member in pair.nodes:
        renumber(bench, member, new, stem)
    return None


def _raised(old: QDQParams, stored: Array, *, quantizes: bool) -> tuple[QDQParams, Array] | str:
    """Compute parameters with scales that float16 can represent, and codes of the same values (floats are kept)."""
    scale = old.scale.astype(np.float64)
    if not np.isfinite(scale).all() or (scale > float(np.finfo(np.float16).max)).any() or (scale < 0).any():
        return "a scale that is negative, infinite or NaN represents no value that could be kept"
    floor = np.where(scale == 0, UNUSED_SCALE, MIN_SCALE_FP16)
    with np.errstate(over="ignore"):
        lost = scale.astype(np.float16) == 0
    new = replace(old, scale=np.asarray(np.where(lost, floor, scale).astype(old.scale.dtype)))
    if quantizes:
        return new, stored
    try:
        ratio = old.spread(scale / new.scale.astype(np.float64), stored.shape)
        steps = old.steps(stored) * ratio
        low, high = limits(old.zero.dtype)
        zero = old.spread(old.zero, stored.shape).astype(np.int64)
    except ValueError as error:  # scales that do not match
        return str(error)
    kept = np.broadcast_to(ratio, stored.shape) == 1
    values = np.where(kept, stored.astype(np.int64), np.clip(np.rint(steps) + zero, low, high))
    return new, np.asarray(values.astype(np.int64).astype(stored.dtype))


# --- onnxruntime ------------------------------------------------------------------------------------------------------


def biases(bench: Bench) -> Iterator[Fixed]:
    """O05, O06: Round int32 biases to the scale x_scale * w_scale."""
    named = {name for check in (ort_numbers.gemm_bias, ort_numbers.conv_bias) for name, _, _ in check(bench.view)}
    for linear in ort_read.weighted(bench.view):
        node, bias = linear.node, linear.bias
        if str(node.name) not in named or bias is None:
            continue
        rule = "O05" if node.op == "Gemm" else "O06"
        tensor = str(node.inputs[2].name)
        rounded = _on_product(bench, linear, bias)
        if isinstance(rounded, str):
            yield Fixed(rule, str(node.name), tensor, rounded, done=False)
            continue
        values, new = rounded
        back = bias.node if len(query.readers(bias.output)) == 1 else None
        if back is None:
            yield Fixed(rule, str(node.name), tensor, "other ops read the same dequantized bias", done=False)
            continue
        bench.set_numbers(back, new, str(bias.data.name))
        edit.replace_input(back, 0, bench.constant(f"{bias.data.name}_rescaled", values))
        back.attrs.update({"axis": 0} if new.scale.ndim else {})
        yield Fixed(rule, str(node.name), tensor, "the bias rounded to the scale x_scale * w_scale")


def _on_product(bench: Bench, linear: WeightedOp, bias: Quantizer) -> tuple[Array, QDQParams] | str:
    """Compute codes and parameters of a bias at the product of the other two scales, or return a reason against it."""
    x, w = linear.x, linear.w
    stored, old = query.constant(bias.data), bench.numbers(bias)
    if stored is None or old is None or x is None or w is None or x.scale is None or w.scale is None:
        return "its codes or the scales are computed"
    if x.scale.size != 1 or w.scale.ndim > 1:
        return "the scales of activation or weight are neither per tensor nor per channel"
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
    return codes.astype(np.int32), QDQParams(scale, np.zeros(scale.shape, np.int32), 0)


def report_rescaling(bench: Bench) -> Iterator[Fixed]:
    """O25: Report only."""
    for name, tensor, _ in kernel_choice.rescale(bench.view):
        why = "the halves of the pair have other numbers: calibrate again to determine which are right"
        yield Fixed("O25", name, tensor, why, done=False)

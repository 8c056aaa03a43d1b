"""TensorRT's rules for types and parameters of Q/DQ nodes: T01 to T07, T13 to T15, T19."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import ml_dtypes
import numpy as np

from sbonnx.backends.tensorrt.profiles import E8M0, PROFILES
from sbonnx.graph import query
from sbonnx.lint.view import Quantizer, View
from sbonnx.ops import STANDARD_DOMAINS
from sbonnx.qdq import is_integer_op
from sbonnx.spec import BLOCKS_SINCE, CHANNELS_SINCE, CODES_SINCE, HALF_SCALES_SINCE, Array

Site = tuple[str, str, str]

SCALES: Final = frozenset({"float32", "float16", "bfloat16", E8M0})
HALVES: Final = frozenset({"float16", "bfloat16"})


def integer_ops(view: View) -> Iterator[Site]:
    """T01: Find ops that compute in integers themselves."""
    for node in view.nodes:
        if is_integer_op(node):
            yield node.name, node.outputs[0].name if node.outputs else "", f"the parser has no {node.op}"


def asymmetric(view: View) -> Iterator[Site]:
    """T02: Find zero points that are not all zeros, or not known at build time."""
    for one in view.distinct:
        if not one.has_zero:
            continue
        if one.zero is None:
            yield one.name, one.zero_name, f"the zero point '{one.zero_name}' is computed, not a constant"
        elif np.any(values := one.zero.astype(np.float32)):
            first = values.ravel()[np.flatnonzero(values)[0]]
            yield one.name, one.zero_name, f"the zero point '{one.zero_name}' is {first:g}, not 0"


def refused_codes(view: View) -> Iterator[Site]:
    """T03: Find quantized types that the version does not support."""
    taken = PROFILES[view.release].codes
    for one in view.distinct:
        if one.codes is not None and one.codes not in taken:
            yield (
                one.name,
                one.data.name,
                f"codes of type {one.codes}; {view.target} takes {', '.join(sorted(taken))}",
            )


def unsigned_for_dla(view: View) -> Iterator[Site]:
    """T02-dla: Report once the uint8 codes that a DLA supports with a parser flag.

    Source: TensorRT's page on parser flags for DLA (Orin, float32 scales); the flag was added in 10.11.
    """
    taken = [one for one in view.distinct if one.codes == "uint8" and one.scale_type == "float32" and not one.many]
    if taken:
        why = f"{len(taken)} tensors of uint8 codes with one float32 scale: what a DLA takes, and a GPU does not"
        yield taken[0].name, taken[0].data.name, why


def untyped_codes(view: View) -> Iterator[Site]:
    """T04: Find quantizers with neither zero point nor output_dtype: ONNX defaults to uint8 and the parser to int8."""
    for one in view.quantizers:
        if one.quantizes and one.codes is None and not one.has_zero:
            yield one.name, one.output.name, "neither a zero point nor output_dtype: ONNX reads uint8, TensorRT int8"


def bad_scales(view: View) -> Iterator[Site]:
    """T05: Find scales that are 0, negative or not finite, or become 0 or infinite in half precision."""
    for one in view.distinct:
        if one.scale is None or one.scale.size == 0:
            continue
        values = one.scale.astype(np.float32).ravel()
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            yield one.name, one.scale_name, _bad(values, wrong, "not a finite number above 0")
            continue
        if one.codes == "int32" or one.scale_type == E8M0:
            continue  # T03 reports int32; powers of two are never rounded to half precision
        with np.errstate(over="ignore"):
            half = values.astype(np.float16).astype(np.float32)
        wrong = ~(np.isfinite(half) & (half > 0))
        if one.scale_type == "bfloat16":
            wrong = ~(values.astype(ml_dtypes.bfloat16).astype(np.float32) > 0)
        if wrong.any():
            yield one.name, one.scale_name, _bad(values, wrong, "0 or infinite in float16")


def _bad(values: Array, wrong: Array, what: str) -> str:
    at = int(np.flatnonzero(wrong)[0])
    of = f" ({int(wrong.sum())} of {values.size} are, the first at {at})" if values.size > 1 else ""
    return f"a scale of {values[at]:g} is {what}{of}"


def computed_scales(view: View) -> Iterator[Site]:
    """T06: Find scales that are not known at build time, or of an unsupported type."""
    for one in view.distinct:
        node = view.producer(one.node.inputs[1])
        if node is not None and node.op.startswith("TRT_"):
            continue  # of a dynamic-quantize op: computed by design
        if one.scale is None and not view.is_constant(one.node.inputs[1]):
            yield one.name, one.scale_name, f"the scale '{one.scale_name}' is computed, not a constant"
        elif one.scale_type is not None and one.scale_type not in SCALES:
            yield one.name, one.scale_name, f"a scale of type {one.scale_type}"


def misshapen_scales(view: View) -> Iterator[Site]:
    """T07: Find scales that are neither per-tensor, per-channel nor block-wise."""
    for one in view.distinct:
        why = _misshapen(one)
        if why:
            yield one.name, one.scale_name, why


def _misshapen(one: Quantizer) -> str | None:
    shape, data = one.scale_shape, query.shape(one.data)
    if shape is None or any(not isinstance(dim, int) for dim in shape):
        return None
    volume = int(np.prod([dim for dim in shape if isinstance(dim, int)], dtype=np.int64))
    if one.zero is not None and one.zero.size != volume:
        return f"{volume} scales and {one.zero.size} zero points"
    if volume == 1 or data is None:
        return None
    if len(shape) == 1 and not one.block:
        axis = one.channel_axis
        if not 0 <= axis < len(data):
            return f"{volume} scales along axis {axis} of a tensor of rank {len(data)}"
        known = isinstance(data[axis], int)
        return f"{volume} scales for {data[axis]} channels of axis {axis}" if known and data[axis] != volume else None
    if len(shape) != len(data):
        return f"scales of shape {list(shape)} for a tensor of shape {list(data)}"
    if any(not isinstance(dim, int) for dim in data):
        return None
    axis_ = one.blocked_axis
    if axis_ is None:
        return f"scales of shape {list(shape)} differ from the tensor's {list(data)} in more or less than one dimension"
    whole, parts = data[axis_], shape[axis_]
    divides = isinstance(whole, int) and isinstance(parts, int) and parts and whole % parts == 0
    return None if divides else f"{whole} values along axis {axis_} do not divide into {parts} blocks"


def scalars(view: View) -> Iterator[Site]:
    """T13: Find Q/DQ of tensors without dimensions."""
    for one in view.distinct:
        if query.rank(one.data) == 0:
            yield one.name, one.data.name, f"'{one.data.name}' has no dimensions"


def old_opset(view: View) -> Iterator[Site]:
    """T14: Find Q/DQ forms that the file's opset does not have, or an opset below the parser's oldest."""
    for one in view.distinct:
        if (one.node.domain or "") not in STANDARD_DOMAINS:
            continue  # of a domain with its own versions
        needed, what = max(_needs(one), default=(10, "Q/DQ"))
        if view.opset < needed:
            yield one.name, one.output.name, f"{what} since opset {needed}, the model has {view.opset}"


def opset_wanted(view: View) -> int:
    """Return the oldest opset that has all Q/DQ forms in use."""
    ours = [one for one in view.distinct if (one.node.domain or "") in STANDARD_DOMAINS]
    return max((opset for one in ours for opset, _ in _needs(one)), default=0)


def _needs(one: Quantizer) -> Iterator[tuple[int, str]]:
    if one.many or one.axis is not None:
        yield CHANNELS_SINCE, "per-channel scales exist"
    if one.codes in CODES_SINCE:
        yield CODES_SINCE[one.codes], f"{one.codes} codes exist"
    if one.scale_type in HALVES:
        yield HALF_SCALES_SINCE, f"{one.scale_type} scales exist"
    if one.block:
        yield BLOCKS_SINCE, "blocks exist"


def new_opset(view: View) -> Iterator[Site]:
    """T14-newest: Report an opset newer than the parser is documented for. Parsers often read it nevertheless."""
    newest = PROFILES[view.release].newest_opset
    if view.quantizers and view.opset > newest:
        yield "", "", f"the model has opset {view.opset}; the parser of {view.target} is documented up to {newest}"


def mixed_types(view: View) -> Iterator[Site]:
    """T15: Find QuantizeLinear nodes whose input has another float type than the scale."""
    for one in view.quantizers:
        data = query.dtype(one.data)
        if not one.quantizes or data is None or one.scale_type is None or one.scale_type == E8M0:
            continue
        if str(data) != one.scale_type and {str(data), one.scale_type} & HALVES:
            yield one.name, one.data.name, f"'{one.data.name}' is {data}, the scale {one.scale_type}"


def float_islands(view: View) -> Iterator[Site]:
    """T19: Find DequantizeLinear nodes that return float32 in a half-precision model."""
    if not _meant_for_half(view):
        return
    for one in view.quantizers:
        if not one.quantizes and one.scale_type == "float32" and not one.node.attrs.get("output_dtype"):
            yield one.name, one.output.name, "a float32 scale: what follows computes in float32"


def _meant_for_half(view: View) -> bool:
    """Return whether any tensor, apart from scales, is in half precision."""
    for node in view.nodes:
        for tensor in (*node.inputs[:1], *node.outputs):
            kind = query.dtype(tensor)
            if kind is not None and str(kind) in HALVES:
                return True
    return False

"""Activations absorbed by saturation: a Relu or Clip that another tool deleted because the zero point replaces it.

With the zero point at the lowest code, a QuantizeLinear maps all negative values to 0. onnxruntime's quantizer then
deletes the Relu (or Clip) before it. To remove such a pair, or to change its zero point, the Relu has to be restored:
without it the model computes something else.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.graph import Body, Node, Tensor, edit, query
from sbonnx.ops import ADDS, BOUNDS, CONCATS, MOVES_DATA, MULTIPLIES, NOT_NEGATIVE, PICKS_MAX, POOLS, QDQ, RESIZES
from sbonnx.plan import BITS
from sbonnx.qdq.values import is_integer, limits, numbers

SIX: Final = 6.0
"""Upper bound of the Clip in mobile networks (ReLU6): a range that ends here is attributed to one, others to a Relu."""

CLOSE: Final = 1e-3
"""Relative tolerance around 6 for the end of a range: scales are single precision, calibrated on saturated data."""

DEPTH: Final = 64
"""Maximum number of preceding ops to search for a sign."""

_PASSES: Final = MOVES_DATA | PICKS_MAX | POOLS | QDQ
"""Ops whose output has the sign of their first input."""

_JOINS: Final = ADDS | MULTIPLIES | CONCATS
"""Ops whose output is not negative if no input is."""


def never_negative(tensor: Tensor, depth: int = DEPTH) -> bool:
    """Return whether the ops before a tensor provably keep it at 0 or above."""
    node = query.producer(tensor)
    if node is None or depth == 0:
        value = query.constant(tensor)
        return value is not None and value.size > 0 and bool((value >= 0).all())
    if node.op in NOT_NEGATIVE:
        return True
    if node.op in BOUNDS and node.op != "Min":
        others = node.inputs[1:2] if node.op == "Clip" else node.inputs
        written = float(node.attrs.get("min", -1.0))  # of a Clip before opset 11
        return written >= 0 or any(not one.is_empty() and _at_least_0(one) for one in others)
    if node.op in _PASSES or (node.op in RESIZES and node.attrs.get("mode", "nearest") != "cubic"):
        return never_negative(node.inputs[0], depth - 1)
    return node.op in _JOINS and all(never_negative(one, depth - 1) for one in node.inputs)


def _at_least_0(tensor: Tensor) -> bool:
    value = query.constant(tensor)
    return value is not None and value.size > 0 and bool((value >= 0).all())


def lost(quantize: Node) -> tuple[float, float | None] | None:
    """Return the bounds of the Relu (0, None) or Clip that a QuantizeLinear replaces, or None.

    Pairs written by sbonnx come after the activations of the model, so none is lost there; graph inputs have none.
    """
    found = numbers(quantize)
    if BITS in quantize.attrs or found is None or found.scale.size != 1 or not is_integer(found.zero.dtype):
        return None
    low, high = limits(found.zero.dtype)
    zero = int(found.zero.reshape(-1)[0])
    source = quantize.inputs[0]
    if zero != low or query.producer(source) is None or never_negative(source):
        return None
    top = float((high - low) * found.scale.astype(np.float64).reshape(-1)[0])
    return 0.0, SIX if abs(top - SIX) <= CLOSE * SIX else None


def restore(quantize: Node, scope: Body, names: edit.Names) -> Tensor:
    """Restore the Relu or Clip that a QuantizeLinear replaces, and return its output: the float tensor to quantize.

    In place. The new node is appended to `scope`, which has to be sorted afterwards.
    """
    source: Tensor = quantize.inputs[0]
    bounds = lost(quantize)
    if bounds is None:
        return source
    low, high = bounds
    if high is None:
        node = edit.add_node(scope, "Relu", [source], names=names, stem=f"{source.name}/Relu")
    else:
        kind = query.dtype(source) or np.dtype(np.float32)
        ends = [edit.add_constant(scope, f"{source.name}/{which}", np.array(end, kind), names)
                for which, end in (("low", low), ("high", high))]  # fmt: skip
        node = edit.add_node(scope, "Clip", [source, *ends], names=names, stem=f"{source.name}/Clip")
    out: Tensor = node.outputs[0]
    shape = query.shape(source)
    out.dtype, out.shape = query.dtype(source), None if shape is None else list(shape)
    return out

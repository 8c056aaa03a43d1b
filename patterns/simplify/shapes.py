"""Replaces shape computations by constants, if all or all but one of their numbers are known."""

from __future__ import annotations

from math import prod

import numpy as np

from sbonnx.graph import Constant

from ..edit import Edit
from ..engine import Pattern
from ..match import Match
from ..sample import sample
from ..tree import Maybe, Op, Var, X
from .axes import Axis, Number, evaluate, origin
from .drop import rank, sizes, static

INT64 = np.int64


def _numbers(match: Match) -> np.ndarray | None:
    """Return the value of the root in its shape, if it is known."""
    out = match.root.outputs[0]
    if match.root.op == "Size":
        known = static(match.root.inputs[0])
        return None if known is None else np.array(prod(known), INT64)
    value = evaluate(out)
    if value is None or not all(isinstance(number, int) for number in value):
        return None
    flat = np.array(value, INT64)
    if match.root.op == "Shape":
        return flat
    known_rank = rank(out)
    return None if known_rank is None or known_rank > 1 else flat.reshape(() if known_rank == 0 else (-1,))


def _why_not_constant(match: Match) -> str | None:
    out = match.root.outputs[0]
    return f"'{out.name}' is an output" if match.is_output(out) else None


def _make_constant(match: Match, edit: Edit) -> None:
    value, out = _numbers(match), match.root.outputs[0]
    assert value is not None
    edit.replace(out, edit.constant(f"{out.name}_known", value))


SHAPE = Pattern(
    "known_shape",
    tree=Op(("Shape", "Size"), X),
    where=lambda match: _numbers(match) is not None,
    check=_why_not_constant,
    rewrite=_make_constant,
    source="every dimension is a number",
    example=lambda: sample("g (float[2,3] x) => (int64[2] y) { a = Relu(x) s = Shape(a) y = Add(s, s) }"),
    counter_example=lambda: sample("g (float[N,3] x) => (int64[2] y) { a = Relu(x) s = Shape(a) y = Add(s, s) }"),
)

DIMENSION = Pattern(
    "known_dimension",
    tree=Op(("Gather", "Slice"), Op("Shape", X, shared=True), X, Maybe(X), Maybe(X), Maybe(X)),
    where=lambda match: _numbers(match) is not None,
    check=_why_not_constant,
    rewrite=_make_constant,
    source="the dimensions that are picked are numbers, though others are not",
    example=lambda: sample(
        "g (float[N,3] x) => (int64[1] y) { s = Shape(x) d = Gather(s, i) y = Add(d, d) }", i=np.array([1], INT64)
    ),
    counter_example=lambda: sample(
        "g (float[N,3] x) => (int64[1] y) { s = Shape(x) d = Gather(s, i) y = Add(d, d) }", i=np.array([0], INT64)
    ),
)


def _settled(match: Match) -> list[int] | None:
    """Return the Reshape target as constants: 0 for an axis equal to that of the input, -1 for one unknown.

    -1 is only used if all others are positive numbers: next to a 0 (copied dimension) it would divide by zero for an
    empty batch, which the computed shape does not.
    """
    x, target = match["x"], evaluate(match["shape"])
    own = sizes(x)
    if target is None or match.attribute("reshape", "allowzero"):
        return None

    def settle(position: int, number: Number) -> int | None:
        if isinstance(number, Axis):
            return 0 if own is not None and position < len(own) and origin(x, position) == number else None
        return number

    settled = [settle(position, number) for position, number in enumerate(target)]
    unknown = settled.count(None)
    if unknown == 0:
        result = [number for number in settled if number is not None]
        return result if result.count(-1) < 2 else None
    if unknown == 1 and all(number is None or number > 0 for number in settled):
        return [-1 if number is None else number for number in settled]
    return None


def _settle_reshape(match: Match, edit: Edit) -> None:
    reshape, target = match["reshape"], _settled(match)
    shape = edit.constant(f"{match['shape'].name}_known", np.array(target, INT64))
    edit.replace(reshape.outputs[0], edit.node("Reshape", [match["x"], shape], reshape.attrs, name=reshape.name))


RESHAPE_TARGET = Pattern(
    "known_reshape",
    tree=Op("Reshape", Var("x"), Var("shape", where=lambda tensor: not isinstance(tensor, Constant)), name="reshape"),
    where=lambda match: _settled(match) is not None,
    rewrite=_settle_reshape,
    source="a dimension of the input is a 0 in the target; one number that all others determine is -1",
    example=lambda: sample(
        """g (float[N,T,12] x) => (float[N,T,3,4] y) {
            s = Shape(x) n = Gather(s, zero) t = Gather(s, one) n1 = Unsqueeze(n, zeros) t1 = Unsqueeze(t, zeros)
            target = Concat<axis=0>(n1, t1, heads) a = Relu(x) y = Reshape(a, target)
        }""",
        zero=np.array(0, INT64),
        one=np.array(1, INT64),
        zeros=np.array([0], INT64),
        heads=np.array([3, 4], INT64),
    ),
    counter_example=lambda: sample(
        """g (float[N,T,12] x) => (float[T,N,12] y) {
            s = Shape(x) n = Gather(s, zero) t = Gather(s, one) target = Concat<axis=0>(t, n, last)
            y = Reshape(x, target)
        }""",
        zero=np.array([0], INT64),
        one=np.array([1], INT64),
        last=np.array([12], INT64),
    ),
)

SHAPES = (SHAPE, DIMENSION, RESHAPE_TARGET)

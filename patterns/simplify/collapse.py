"""Merges two consecutive nodes that move data into one, or removes both.

Supported: Reshape after Reshape, Flatten, Squeeze or Unsqueeze; Transpose after Transpose; Squeeze and Unsqueeze along
the same axes.
Refused: two nodes that cancel, if their output is one that no other node can provide under its name.
Equations: reshape(reshape(x, s), t) = reshape(x, t); permutations compose; squeeze(unsqueeze(x, a), a) = x.
"""

from __future__ import annotations

import numpy as np

from sbonnx.graph.query import constant, rank

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import Match
from ..rewriting import Edit
from ..tree import Const, Maybe, Op, Or, Var, X
from .infer import integers
from .no_ops import drop, why_not_drop

INT64 = np.int64


def _joined_shape(match: Match) -> list[int] | None:
    """Return the target of a single Reshape from "x" to the outer shape, or None if unknown.

    A 0 in the outer target means the dimension of the inner tensor, which the inner target may specify.
    """
    outer = integers(match.array("outer_shape"))
    if match.attribute("outer", "allowzero") or 0 not in outer:
        return outer
    if match["inner"] is None or match.attribute("inner", "allowzero"):
        return None
    inner = integers(match.array("inner_shape"))
    joined = list(outer)
    for position, want in enumerate(outer):
        if want == 0 and position < len(inner):
            joined[position] = inner[position]  # a 0 there remains a 0: the same axis of x
    return joined if joined.count(-1) < 2 else None


def _join_reshapes(match: Match, edit: Edit) -> None:
    outer, joined = match["outer"], _joined_shape(match)
    assert joined is not None
    shape = match["outer_shape"]
    if joined != integers(match.array("outer_shape")):
        shape = edit.constant(shape.name, np.array(joined, INT64))
    edit.replace(outer.outputs[0], edit.node("Reshape", [match["x"], shape], outer.attrs, name=outer.name))


RESHAPES = Pattern(
    "reshape_of_reshape",
    tree=Op(
        "Reshape",
        Or(
            Op("Reshape", Var("x"), Const("inner_shape"), name="inner", shared=True),
            Op("Flatten", Var("x"), shared=True),
            Op(("Squeeze", "Unsqueeze"), Var("x"), Maybe(X), shared=True),
        ),
        Const("outer_shape"),
        name="outer",
    ),
    where=lambda match: _joined_shape(match) is not None,
    rewrite=_join_reshapes,
    source="only the last shape counts; a 0 in it is looked up in the shape before",
    example=lambda: sample(
        "g (float[N,12] x) => (float[N,2,6] y) { a = Reshape(x, s) b = Reshape(a, t) y = Relu(b) }",
        s=np.array([0, 3, 4], INT64),
        t=np.array([0, 2, 6], INT64),
    ),
    counter_example=lambda: sample(
        "g (float[3,N,4] x) => (float[A,B,C] y) { a = Transpose(x) b = Reshape(a, s) c = Reshape(b, t) y = Relu(c) }",
        s=np.array([-1, 0, 3], INT64),
        t=np.array([0, -1, 1], INT64),
    ),
)


def _perm(match: Match, name: str) -> list[int] | None:
    """Return the permutation of a captured Transpose; the default reverses the axes."""
    given = match.attribute(name, "perm")
    if given:
        return list(given)
    dims = rank(match[name].inputs[0])
    return None if dims is None else list(reversed(range(dims)))


def _joined_perm(match: Match) -> list[int] | None:
    inner, outer = _perm(match, "inner"), _perm(match, "outer")
    if inner is None or outer is None or sorted(inner) != sorted(outer):
        return None
    return [inner[axis] for axis in outer]


def _join_transposes(match: Match, edit: Edit) -> None:
    outer, perm = match["outer"], _joined_perm(match)
    assert perm is not None
    if perm == sorted(perm) and why_not_drop(match) is None:
        drop(match, edit)
        return
    edit.replace(outer.outputs[0], edit.node("Transpose", [match["x"]], {"perm": perm}, name=outer.name))


TRANSPOSES = Pattern(
    "transpose_of_transpose",
    tree=Op("Transpose", Op("Transpose", Var("x"), name="inner", shared=True), name="outer"),
    where=lambda match: _joined_perm(match) is not None,
    rewrite=_join_transposes,
    source="permutations compose",
    example=lambda: sample(
        "g (float[2,3,4] x) => (float[2,3,4] y)"
        "{ a = Relu(x) b = Transpose<perm=[2,0,1]>(a) c = Transpose<perm=[1,2,0]>(b) y = Sigmoid(c) }"
    ),
    counter_example=lambda: sample(
        "g (float[2,3,4] x) => (float[3,4,2] y) { a = Transpose<perm=[2,0,1]>(x) b = Relu(a)"
        "y = Transpose<perm=[2,0,1]>(b) }"
    ),
)


def _same_axes(match: Match) -> bool:
    """Return whether the outer op reverts the inner one: both use the same axes of the same larger shape."""
    inner, outer = constant(match["inner_axes"]), constant(match["outer_axes"])
    if inner is None or outer is None:
        return False
    inner_axes, outer_axes = integers(inner), integers(outer)
    if sorted(inner_axes) == sorted(outer_axes):
        return True
    middle = match["outer"].inputs[0]
    if rank(match["x"]) is None or rank(middle) is None:
        return False
    longer = max(len(match["x"].shape), len(middle.shape))
    return sorted(axis % longer for axis in inner_axes) == sorted(axis % longer for axis in outer_axes)


SQUEEZES = Pattern(
    "squeeze_and_unsqueeze",
    tree=Op(
        ("Squeeze", "Unsqueeze"),
        Op(("Squeeze", "Unsqueeze"), Var("x"), Var("inner_axes"), name="inner", shared=True),
        Var("outer_axes"),
        name="outer",
    ),
    where=lambda match: match["inner"].op != match["outer"].op and _same_axes(match),
    check=why_not_drop,
    rewrite=drop,
    source="axes of size 1 taken out where they were put in, or put in where they were taken out",
    example=lambda: sample(
        "g (float[N,3] x) => (float[N,3] y) { a = Relu(x) b = Unsqueeze(a, i) c = Squeeze(b, j) y = Sigmoid(c) }",
        i=np.array([1], INT64),
        j=np.array([-2], INT64),
    ),
    counter_example=lambda: sample(
        "g (float[1,3] x) => (float[3,1] y) { a = Relu(x) b = Unsqueeze(a, i) c = Squeeze(b, j) y = Sigmoid(c) }",
        i=np.array([2], INT64),
        j=np.array([0], INT64),
    ),
)

COLLAPSE = (RESHAPES, TRANSPOSES, SQUEEZES)

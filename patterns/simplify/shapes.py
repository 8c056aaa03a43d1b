"""Replaces shape computations by constants, if all or all but one of their numbers are known.

An exporter with dynamic batch size writes ``Reshape(x, Concat(Shape(x)[0], 12, 64))``. `evaluate` reads such a
computation as a list of numbers and axes, ``[axis 0 of x, 12, 64]``. `origin` follows an axis upwards through nodes
that preserve it; axes with the same origin have the same size for any input.

Supported: Shape and Size of known dimensions; Gather and Slice of a Shape that pick known ones; targets of Reshape from
constants, dimensions of its input, and at most one unknown number.
Refused: a result that is an output of the graph.
Equations: 0 in the target of a Reshape is the dimension of its input, -1 the number that all others determine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from sbonnx.graph import Constant, Node, Tensor
from sbonnx.graph.query import constant, rank
from sbonnx.ops import ACTIVATIONS, NORMS, QDQ, SOFTMAX
from sbonnx.report.codes import Reason

from ..example_model import sample
from ..fixed_point import Pattern
from ..match import STANDARD, Match, attribute_of
from ..rewriting import Edit
from ..tree import Maybe, Op, Var, X
from .infer import integers, sizes, static

REACH = 24
"""Maximum number of nodes that are followed upwards."""

LONGEST = 32
"""Maximum length of shape vectors; longer integer tensors are data."""

KEEPS_SHAPE = (
    (ACTIVATIONS - {"PRelu"})
    | QDQ
    | SOFTMAX
    | NORMS
    | {
        *("Abs", "Cast", "Ceil", "Cos", "Dropout", "Erf", "Exp", "Floor", "Identity", "IsNaN", "Log", "Neg", "Not"),
        *("Reciprocal", "Round", "Sign", "Sin", "Sqrt"),
    }
)
"""Ops whose first output has the shape of the first input."""

BROADCASTS = frozenset({"Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Where", "Max", "Min"})

KEEPS_BATCH = frozenset(
    {
        "Conv",
        "ConvTranspose",
        "MaxPool",
        "AveragePool",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "DepthToSpace",
        "SpaceToDepth",
    }
)
"""Ops that preserve the first dimension of their first input."""


@dataclass(frozen=True)
class Axis:
    """The size of one axis of a tensor at run time."""

    tensor: Tensor
    axis: int

    def __hash__(self) -> int:
        return hash((id(self.tensor), self.axis))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and other.tensor is self.tensor and other.axis == self.axis


Number = int | Axis | None
"""One element of a shape vector: a number, the size of an axis, or None if unknown."""


def origin(tensor: Tensor, axis: int, reach: int = REACH) -> Axis:
    """Return the topmost axis that is known to have the same size as this one (`axis` counts from 0)."""
    for _ in range(reach):
        node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
        if node is None or node.domain not in STANDARD or node.outputs[0] is not tensor:
            break
        above = _above(node, axis, reach)
        if above is None:
            break
        tensor, axis = above.tensor, above.axis
    return Axis(tensor, axis)


def _above(node: Node, axis: int, reach: int) -> Axis | None:
    """Return the axis of an input of `node` with the same size as this axis of its output, or None."""
    first = node.inputs[0] if node.inputs else None
    if first is None:
        return None
    if node.op in KEEPS_SHAPE or (node.op in KEEPS_BATCH and axis == 0):
        return Axis(first, axis)
    if node.op in BROADCASTS:
        return _same_of(_broadcast(node.inputs, axis, rank(node.outputs[0])), reach)
    if len(node.inputs) < 2 and node.op in ("MatMul", "Gather", "Reshape"):
        return None  # invalid model, reported elsewhere
    if node.op == "MatMul":
        return _above_matmul(node, axis, reach)
    if node.op == "Transpose":
        perm = node.attrs.get("perm") or []
        return Axis(first, perm[axis]) if axis < len(perm) else None
    if node.op == "Gather" and attribute_of(node, "axis", 13) == 0:
        indices = rank(node.inputs[1])
        return Axis(node.inputs[1], axis) if indices is not None and axis < indices else None
    if node.op == "Reshape" and not node.attrs.get("allowzero"):
        value = constant(node.inputs[1])
        target = [] if value is None else integers(value)
        return Axis(first, axis) if axis < len(target) and target[axis] == 0 else None
    if node.op == "Concat":
        along, own = node.attrs.get("axis"), rank(node.outputs[0])
        return Axis(first, axis) if own and along is not None and along % own != axis else None
    return None


def _broadcast(tensors: Sequence[Tensor], axis: int, out: int | None) -> list[Axis] | None:
    """Return the axes that broadcast to `axis` of an output of rank `out`, except those of size 1; None if unknown."""
    axes: list[Axis] = []
    for tensor in tensors:
        dims = sizes(tensor)
        if dims is None or out is None:
            return None
        own = axis - (out - len(dims))
        if own >= 0 and dims[own] != 1:
            axes.append(Axis(tensor, own))
    return axes


def _same_of(axes: list[Axis] | None, reach: int) -> Axis | None:
    """Return the first of several axes if all have one origin. Halves the reach, which limits nested calls."""
    if not axes:
        return None
    if len(axes) > 1 and (reach < 2 or len({origin(source.tensor, source.axis, reach // 2) for source in axes}) > 1):
        return None
    return axes[0]


def _above_matmul(node: Node, axis: int, reach: int) -> Axis | None:
    """Rows come from the first factor; the axes before them broadcast."""
    first, second = node.inputs[:2]
    ranks = rank(first), rank(second)
    if ranks[0] is None or ranks[1] is None or min(ranks[0], ranks[1]) < 2:
        return None
    out = max(ranks[0], ranks[1])
    if axis < out - 2:
        return _same_of(_broadcast((first, second), axis, out), reach)
    return Axis(first, ranks[0] - 2) if axis == out - 2 else None


def evaluate(tensor: Tensor) -> list[Number] | None:
    """Evaluate an integer vector (or scalar: one element) as far as known; None if its length is unknown."""
    return _Evaluation().of(tensor)


class _Evaluation:
    """One evaluation with memoization, limited to `REACH` nodes."""

    def __init__(self) -> None:
        self.seen: dict[int, list[Number] | None] = {}

    def of(self, tensor: Tensor) -> list[Number] | None:
        if id(tensor) not in self.seen:
            self.seen[id(tensor)] = None  # cycles are unknown
            if len(self.seen) <= REACH:
                self.seen[id(tensor)] = self._of(tensor)
        return self.seen[id(tensor)]

    def _of(self, tensor: Tensor) -> list[Number] | None:
        if isinstance(tensor, Constant):
            if tensor.dtype not in (np.int64, np.int32) or len(tensor.shape) > 1 or prod(tensor.shape) > LONGEST:
                return None
            value = constant(tensor)
            return None if value is None else list(integers(value))
        node = tensor.inputs[0] if len(tensor.inputs) == 1 else None
        if node is not None and node.domain in STANDARD and node.outputs[0] is tensor:
            rule = _RULES.get(node.op)
            if rule is not None and len(node.inputs) >= (2 if node.op == "Gather" else 1):
                return rule(self, node)
        dims = sizes(tensor)
        if dims is None or len(dims) > 1 or (dims and (dims[0] is None or dims[0] > LONGEST)):
            return None
        return [None] * (1 if not dims else dims[0] or 0)

    def same(self, node: Node) -> list[Number] | None:
        """Identity, and Squeeze or Unsqueeze between a scalar and a vector of length 1."""
        out = rank(node.outputs[0])
        return self.of(node.inputs[0]) if node.op == "Identity" or (out is not None and out < 2) else None

    def cast(self, node: Node) -> list[Number] | None:
        return self.of(node.inputs[0]) if node.attrs.get("to") in (6, 7) else None

    def shape(self, node: Node) -> list[Number] | None:
        dims = sizes(node.inputs[0])
        if dims is None or len(dims) > LONGEST:
            return None
        whole: list[Number] = [origin(node.inputs[0], axis) if size is None else size for axis, size in enumerate(dims)]
        return whole[slice(node.attrs.get("start", 0), node.attrs.get("end"))]

    def gather(self, node: Node) -> list[Number] | None:
        data, indices = self.of(node.inputs[0]), constant(node.inputs[1])
        if data is None or indices is None or indices.ndim > 1 or node.attrs.get("axis", 0) not in (0, -1):
            return None
        picked = integers(indices)
        return [data[index] for index in picked] if all(-len(data) <= i < len(data) for i in picked) else None

    def slice(self, node: Node) -> list[Number] | None:
        data = self.of(node.inputs[0])
        parts = [constant(part) for part in node.inputs[1:]]
        if data is None or any(part is None or part.size != 1 for part in parts) or len(parts) < 2:
            return None
        start, end, *rest = [int(part.reshape(-1)[0]) for part in parts if part is not None]
        return (
            data[slice(start, end, rest[1])]
            if len(rest) == 2 and rest[1] > 0
            else data[start:end]
            if len(rest) < 2
            else None
        )

    def concat(self, node: Node) -> list[Number] | None:
        whole: list[Number] = []
        for tensor in node.inputs:
            part = self.of(tensor)
            if part is None:
                return None
            whole += part
        return whole if len(whole) <= LONGEST else None


_RULES: dict[str, Callable[[_Evaluation, Node], list[Number] | None]] = {
    "Identity": _Evaluation.same,
    "Squeeze": _Evaluation.same,
    "Unsqueeze": _Evaluation.same,
    "Cast": _Evaluation.cast,
    "Shape": _Evaluation.shape,
    "Gather": _Evaluation.gather,
    "Slice": _Evaluation.slice,
    "Concat": _Evaluation.concat,
}


INT64 = np.int64


def _numbers(match: Match) -> np.ndarray | None:
    """Return the value of the root in its shape, if it is known."""
    out = match.root.outputs[0]
    if match.root.op == "Size":
        dims = static(match.root.inputs[0])
        return None if dims is None else np.array(prod(dims), INT64)
    value = evaluate(out)
    if value is None or not all(isinstance(number, int) for number in value):
        return None
    flat = np.array(value, INT64)
    if match.root.op == "Shape":
        return flat
    known_rank = rank(out)
    return None if known_rank is None or known_rank > 1 else flat.reshape(() if known_rank == 0 else (-1,))


def _why_not_constant(match: Match) -> Reason | None:
    out = match.root.outputs[0]
    return Reason("is-output", f"'{out.name}' is an output") if match.is_output(out) else None


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

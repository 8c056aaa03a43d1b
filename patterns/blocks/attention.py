"""What stands between the two matrix products of softmax attention: scale, mask, softmax."""

from __future__ import annotations

from sbonnx.graph import Constant

from ..match import Match
from ..tree import Const, Op, Or, Want, X
from .shape import Shape, near

LENGTH = 6
"""How many nodes may stand between the scores and the softmax; Swin has four, soft-capped models five."""

PRODUCT = ("MatMul", "Einsum")


def _step(scores: Want) -> tuple[Op, ...]:
    """One node on the way from the scores to the softmax: scale, bias or mask, cap, and what only moves or casts.

    Any order of inputs is tried, of Div and Reshape as well: it takes fewer trees, and no harm is in it.
    """
    return (
        Op(("Add", "Mul", "Div", "Sub", "Max", "Min", "Reshape"), scores, X, commutative=True),
        Op("Where", scores, X, X, commutative=True),
        Op(("Tanh", "Cast"), scores),
    )


def _from_scores() -> Want:
    scores = Op(PRODUCT, X, X, name="scores", shared=True)
    reached: Want = scores
    for _ in range(LENGTH):
        reached = Or(scores, *_step(reached))
    return reached


def _probabilities() -> Want:
    """The softmax, its cast, or what replaces the NaN of fully masked rows; only the last may be read elsewhere."""
    reached = _from_scores()
    softmax = Op("Softmax", reached, name="softmax")
    return Or(
        Op("Softmax", reached, shared=True),
        Op("Cast", softmax, shared=True),
        Op("Cast", Op("Cast", softmax), shared=True),
        Op("Where", Op("IsNaN", softmax), Const("zero", near(0.0)), softmax, shared=True),
    )


def _computed(match: Match) -> bool:
    """Whether both products multiply two computed tensors: a product with a weight is a layer."""
    return not any(isinstance(tensor, Constant) for name in ("scores", "values") for tensor in match[name].inputs)


ATTENTION = (
    Shape(
        "attention_softmax",
        Op(PRODUCT, _probabilities(), X, name="values", commutative=True),
        data="scores",
        outside=("scores", "values"),
        where=_computed,
    ),
)

"""Nodes between the two matrix products of softmax attention: scale, mask, softmax."""

from __future__ import annotations

from sbonnx.graph import Constant

from ..match import Match
from ..tree import Const, Op, Or, Want, X
from .shape import Shape, near

LENGTH = 6
"""Maximum number of nodes between the scores and the softmax; Swin has four, soft-capped models five."""

PRODUCT = ("MatMul", "Einsum")


def _step(scores: Want) -> tuple[Op, ...]:
    """One node between the scores and the softmax: scale, bias or mask, cap, data movement or cast.

    Any order of inputs is tried, also for Div and Reshape: it needs fewer trees and is harmless.
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
    """Tree for the softmax, its cast, or the replacement of NaN in masked rows; only the last has other readers."""
    reached = _from_scores()
    softmax = Op("Softmax", reached, name="softmax")
    return Or(
        Op("Softmax", reached, shared=True),
        Op("Cast", softmax, shared=True),
        Op("Cast", Op("Cast", softmax), shared=True),
        Op("Where", Op("IsNaN", softmax), Const("zero", near(0.0)), softmax, shared=True),
    )


def _computed(match: Match) -> bool:
    """Return whether both products multiply two computed tensors: a product with a weight is a layer."""
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

"""Description of a kind of block, and helpers to build its trees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..match import Match
from ..tree import Const, Op, Or, Want

TOLERANCE = 4e-3
"""Relative tolerance: constants of a bfloat16 model are off by up to 2**-8."""


@dataclass(frozen=True)
class Shape:
    """One way to write a block.

    Attributes:
        kind: the kind of block.
        tree: its nodes, from the last one upwards.
        data: the capture of its data input, or of the node that computes it.
        outside: captures of nodes that the tree matches but that are not part of the block.
        where: a further condition.
    """

    kind: str
    tree: Op
    data: str = "x"
    outside: tuple[str, ...] = ()
    where: Callable[[Match], bool] | None = None


def near(value: float) -> Callable[[np.ndarray], bool]:
    """Return a predicate for one number (of any shape) within the tolerance of `value`; exactly 0 for 0."""

    def holds(found: np.ndarray) -> bool:
        if found.size != 1 or found.dtype.kind in "bOSU":
            return False
        return abs(float(found.reshape(-1)[0]) - value) <= TOLERANCE * abs(value)

    return holds


def any_order(op: str, *inputs: Want) -> Op:
    """Tree for a commutative op with two inputs."""
    return Op(op, *inputs, commutative=True)


def times(want: Want, factor: float, name: str) -> Or:
    """Tree for `want * factor`, as Mul or as Div; the constant is captured as `name`."""
    return Or(
        any_order("Mul", want, Const(name, near(factor))),
        Op("Div", want, Const(name, near(1.0 / factor))),
    )


def roots(want: Or) -> tuple[Op, ...]:
    """Return the alternatives of an `Or` of ops as separate trees."""
    return tuple(choice for choice in want.choices if isinstance(choice, Op))


def square(want: Want, name: str) -> Or:
    """Tree for `want` squared: Pow by 2 (captured as `name`), or Mul with itself (`want` must match one node twice)."""
    return Or(Op("Pow", want, Const(name, near(2.0))), Op("Mul", want, want))

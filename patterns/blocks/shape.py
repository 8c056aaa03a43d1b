"""What a kind of block looks like, and the words its trees are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..match import Match
from ..tree import Const, Op, Or, Want

TOLERANCE = 4e-3
"""Relative: constants of a model in bfloat16 are off by up to 2**-8."""


@dataclass(frozen=True)
class Shape:
    """One way in which a block is written.

    Attributes:
        kind: the kind of block.
        tree: its nodes, from the last one upwards.
        data: the capture of the tensor it works on, or of the node that makes it.
        outside: captures of nodes that the tree needs to see, and that are no part of the block.
        where: a further condition.
    """

    kind: str
    tree: Op
    data: str = "x"
    outside: tuple[str, ...] = ()
    where: Callable[[Match], bool] | None = None


def near(value: float) -> Callable[[np.ndarray], bool]:
    """A predicate: one number (whatever its shape), within the tolerance of `value`; exactly 0 for 0."""

    def holds(found: np.ndarray) -> bool:
        if found.size != 1 or found.dtype.kind in "bOSU":
            return False
        return abs(float(found.reshape(-1)[0]) - value) <= TOLERANCE * abs(value)

    return holds


def any_order(op: str, *inputs: Want) -> Op:
    """A commutative op of two inputs."""
    return Op(op, *inputs, commutative=True)


def times(want: Want, factor: float, name: str) -> Or:
    """`want * factor`, as Mul or as Div; the constant is captured as `name`."""
    return Or(
        any_order("Mul", want, Const(name, near(factor))),
        Op("Div", want, Const(name, near(1.0 / factor))),
    )


def roots(want: Or) -> tuple[Op, ...]:
    """The alternatives of an `Or` of ops, each as a tree of its own."""
    return tuple(choice for choice in want.choices if isinstance(choice, Op))


def square(want: Want, name: str) -> Or:
    """`want` squared: Pow by 2 (captured as `name`), or Mul with itself (`want` must then match one node twice)."""
    return Or(Op("Pow", want, Const(name, near(2.0))), Op("Mul", want, want))

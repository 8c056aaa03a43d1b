"""Normalizations that exporters write as several nodes: LayerNorm, RMSNorm, GroupNorm.

A norm over other axes than the last (channels first) has the same nodes and counts as a LayerNorm. The affine part
belongs to the block only if it is constant: a computed scale is not part of the norm.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..tree import Const, Maybe, Op, Or, Var, Want, X
from .shape import Shape, any_order, near, square

x = Var("x")
GAMMA, BETA = Const("gamma"), Const("beta")


def _is_epsilon(values: np.ndarray) -> bool:
    return values.size == 1 and 0.0 <= float(values.reshape(-1)[0]) <= 0.1


def _mean(want: Want) -> Op:
    """Tree for ReduceMean, with axes as attribute or input."""
    return Op("ReduceMean", want, Maybe(X))


def _over_root(top: Want, mean_square: Want) -> tuple[Op, ...]:
    """Trees for `top / sqrt(mean_square + epsilon)`; the original LayerNorm adds epsilon to the root."""
    shifted = any_order("Add", mean_square, Const("epsilon", _is_epsilon))
    root = Or(Op("Sqrt", shifted), any_order("Add", Op("Sqrt", mean_square), Const("epsilon", _is_epsilon)))
    inverse = Or(
        Op("Reciprocal", root),
        Op("Div", Const("one", near(1.0)), root),
        Op("Pow", shifted, Const("power", near(-0.5))),
    )
    return (Op("Div", top, root), any_order("Mul", top, inverse))


def _with_tail(kind: str, cores: tuple[Op, ...]) -> Iterator[Shape]:
    """Yield a norm with constant scale and shift, with one of them, with none; widest first. Casts may be between."""
    cast = Or(*cores, *(Op("Cast", core) for core in cores))
    scaled = any_order("Mul", cast, GAMMA)
    yield Shape(kind, any_order("Add", scaled, BETA))
    yield Shape(kind, scaled)
    yield Shape(kind, any_order("Add", cast, BETA))
    for core in cores:
        yield Shape(kind, core)


def _variance() -> Or:
    """Tree for mean squared deviation, or E[x^2] - E[x]^2; optionally with correction to n - 1, and restored axis."""
    plain = Or(_mean(square(DEVIATION, "two")), Op("Sub", _mean(square(x, "two")), square(_mean(x), "two_of_mean")))
    corrected = Op("Div", any_order("Mul", plain, Const("n")), Const("n_minus_1"))
    return Or(plain, corrected, Op("Reshape", Or(plain, corrected), X))


DEVIATION = Op("Sub", x, _mean(x))
VARIANCE = _variance()

SCALED_EARLY = _over_root(any_order("Mul", DEVIATION, GAMMA), VARIANCE)
LAYERNORM = (
    *_with_tail("layernorm", _over_root(DEVIATION, VARIANCE)),
    *(Shape("layernorm", any_order("Add", core, BETA)) for core in SCALED_EARLY),
)

RMSNORM = tuple(_with_tail("rmsnorm", _over_root(x, _mean(square(x, "two")))))

_INSTANCE = Op("Reshape", Op("InstanceNormalization", Op("Reshape", x, X), Const("ones"), Const("zeros")), X)

GROUPNORM = tuple(_with_tail("groupnorm", (_INSTANCE,)))

NORMS = (*LAYERNORM, *RMSNORM, *GROUPNORM)

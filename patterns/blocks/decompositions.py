"""Ways in which exporters write activations, norms and attention as several nodes.

Activations are GELU, SiLU, HardSwish and Mish, norms are LayerNorm, RMSNorm and GroupNorm.

A norm over other axes than the last (channels first) has the same nodes and counts as a LayerNorm. The affine part
belongs to the block only if it is constant: a computed scale is not part of the norm. Attention has the nodes between
its two matrix products: scale, mask, softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Constant

from ..match import Match
from ..tree import Const, Maybe, Op, Or, Var, Want, X

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


x = Var("x")


def _product(kind: str, value: Want, factor: float) -> tuple[Shape, ...]:
    """Trees for `x * value * factor` in any order of multiplication."""
    trees = (
        any_order("Mul", times(x, factor, "factor"), value),
        any_order("Mul", x, times(value, factor, "factor")),
        *roots(times(any_order("Mul", x, value), factor, "factor")),
    )
    return tuple(Shape(kind, tree) for tree in trees)


def _plus_one(want: Want) -> Op:
    return any_order("Add", want, Const("one", near(1.0)))


def _tanh_argument() -> Or:
    """Tree for sqrt(2 / pi) * (x + 0.044715 x^3), also as (sqrt(2 / pi) * x) * (1 + 0.044715 x^2)."""
    small = Const("cubic", near(0.044715))
    squared = square(x, "two")
    cube = Or(
        Op("Pow", x, Const("three", near(3.0))),
        any_order("Mul", x, squared),
    )
    cubic = Or(
        any_order("Mul", small, cube),
        any_order("Mul", any_order("Mul", any_order("Mul", small, x), x), x),
        any_order("Mul", any_order("Mul", small, squared), x),
        any_order("Mul", any_order("Mul", small, x), squared),
    )
    quadratic = Or(any_order("Mul", small, squared), any_order("Mul", any_order("Mul", small, x), x))
    root = 0.7978845608028654  # sqrt(2 / pi)
    grown = any_order("Add", Const("one_inside", near(1.0)), quadratic)
    return Or(
        times(any_order("Add", x, cubic), root, "root"),
        any_order("Mul", times(x, root, "root"), grown),
        times(any_order("Mul", x, grown), root, "root"),
    )


ERF = _plus_one(Op("Erf", times(x, 0.7071067811865476, "root")))
TANH = _plus_one(Op("Tanh", _tanh_argument()))

GELU = (
    *_product("gelu", ERF, 0.5),
    *_product("gelu", TANH, 0.5),
    Shape("gelu", any_order("Mul", x, Op("Sigmoid", times(x, 1.702, "root")))),  # the "quick" approximation
)

SILU = (
    Shape("silu", any_order("Mul", x, Op("Sigmoid", x))),
    Shape("silu", any_order("Mul", x, Op("Sigmoid", any_order("Mul", x, Const("slope"))))),  # Swish
)

ZERO, SIX = Const("zero", near(0.0)), Const("six", near(6.0))
RELU6 = Op("Clip", any_order("Add", x, Const("three", near(3.0))), ZERO, SIX)
HARD_SIGMOID = Or(
    Op("HardSigmoid", x),
    Op(
        "Clip",
        any_order("Add", times(x, 1.0 / 6.0, "sixth"), Const("half", near(0.5))),
        ZERO,
        Const("unit", near(1.0)),
    ),
)

HARDSWISH = (
    *_product("hardswish", RELU6, 1.0 / 6.0),
    Shape("hardswish", any_order("Mul", x, HARD_SIGMOID)),
)

SOFTPLUS = Or(
    Op("Softplus", x),
    Op("Log", any_order("Add", Op("Exp", x), Const("one", near(1.0)))),
    Op("Where", Op("Greater", x, Const("threshold")), x, Op("Softplus", x)),  # torch is linear above its threshold
)

MISH = (Shape("mish", any_order("Mul", x, Op("Tanh", SOFTPLUS))),)

ACTIVATIONS = (*GELU, *SILU, *HARDSWISH, *MISH)


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


def _probabilities() -> Want:
    """Tree for the softmax, its cast, or the replacement of NaN in masked rows; only the last has other readers."""
    scores = Op(PRODUCT, X, X, name="scores", shared=True)
    reached: Want = scores
    for _ in range(LENGTH):
        reached = Or(scores, *_step(reached))
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

SHAPES: Final = (
    *ATTENTION,
    *NORMS,  # the widest of each kind first; LayerNorm before RMSNorm, which is its second half
    *ACTIVATIONS,
)

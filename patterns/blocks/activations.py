"""Activation functions that exporters write as several nodes: GELU, SiLU, HardSwish, Mish."""

from __future__ import annotations

from ..tree import Const, Op, Or, Var, Want
from .shape import Shape, any_order, near, roots, square, times

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

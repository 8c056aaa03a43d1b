"""The language in which a pattern says what it looks for: a tree, read from its last op upwards.

    CONV = Op("Conv", X, Const("w"), Maybe(Const("b")), name="conv")
    BN = Op("BatchNormalization", CONV, Const("gamma"), Const("beta"), Const("mean"), Const("var"), name="bn")

An `Op` that stands as an input matches the producer of that input. Names are captures: `match["conv"]` is the node,
`match["w"]` the tensor. A name that stands twice must be the same tensor (or node) both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.graph import Tensor


@dataclass(frozen=True)
class Any_:
    """Any tensor, not captured. An input that is absent or left empty does not match: wrap it in `Maybe`."""


@dataclass(frozen=True)
class Var:
    """Any tensor (constant or not), captured as `name`; `where` may look at it (shape, dtype)."""

    name: str
    where: Callable[[Tensor], bool] | None = None


@dataclass(frozen=True)
class Const:
    """A constant tensor, captured as `name`; `where` is asked about its value (an array, not to be changed)."""

    name: str
    where: Callable[[np.ndarray], bool] | None = None


class Op:
    """A node: its op type and its inputs.

    Args:
        op: the op type, or several.
        inputs: what each input must be. None given: any inputs. Else every input of the node must be listed; those
            that may be missing are wrapped in `Maybe`.
        name: the capture of the node.
        attrs: attribute → value, or a predicate on the value. An attribute that the node leaves out has the default
            of the op's schema, or None where there is none.
        commutative: the inputs may stand in any order.
        domain: "" is the standard domain.
        outputs: how many outputs the pattern deals with; when a later one is used, the engine refuses.
        shared: by default the output of an inner op may be read only inside the match: not by other nodes, not as a
            graph output, not in a branch body; the engine refuses with the reason. True lifts that.
        output: which output of the node feeds the input where this op stands.
    """

    def __init__(
        self,
        op: str | tuple[str, ...],
        *inputs: Want,
        name: str | None = None,
        attrs: Mapping[str, Any] | None = None,
        commutative: bool = False,
        domain: str = "",
        outputs: int = 1,
        shared: bool = False,
        output: int = 0,
    ) -> None:
        self.ops = (op,) if isinstance(op, str) else op
        self.inputs = inputs
        self.name = name
        self.attrs = dict(attrs or {})
        self.commutative = commutative
        self.domain = domain
        self.outputs = max(outputs, output + 1)
        self.shared = shared
        self.output = output

    def __repr__(self) -> str:
        return f"Op({'|'.join(self.ops)}{', ' if self.inputs else ''}{', '.join(map(repr, self.inputs))})"


@dataclass(frozen=True)
class Maybe:
    """An input that may be absent (or left empty): what is captured inside is then None."""

    want: Want


@dataclass(frozen=True)
class Or:
    """The first of several that matches. Captures of the others are None."""

    choices: tuple[Want, ...] = field(default=())

    def __init__(self, *choices: Want) -> None:
        object.__setattr__(self, "choices", choices)


Want = Any_ | Var | Const | Op | Maybe | Or
"""What one input must be."""

X = Any_()


def captures(want: Want) -> Iterator[str]:
    """The names captured anywhere in the tree, some maybe twice."""
    if isinstance(want, Var | Const):
        yield want.name
    elif isinstance(want, Maybe):
        yield from captures(want.want)
    elif isinstance(want, Or):
        for choice in want.choices:
            yield from captures(choice)
    elif isinstance(want, Op):
        if want.name:
            yield want.name
        for inner in want.inputs:
            yield from captures(inner)


def depth(want: Want) -> int:
    """How many ops stand above one another, the root included."""
    if isinstance(want, Maybe):
        return depth(want.want)
    if isinstance(want, Or):
        return max((depth(choice) for choice in want.choices), default=0)
    if isinstance(want, Op):
        return 1 + max((depth(inner) for inner in want.inputs), default=0)
    return 0

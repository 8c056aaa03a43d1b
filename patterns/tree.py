"""Pattern trees: the description of a subgraph to match, from its last op upwards.

    CONV = Op("Conv", X, Const("w"), Maybe(Const("b")), name="conv")
    BN = Op("BatchNormalization", CONV, Const("gamma"), Const("beta"), Const("mean"), Const("var"), name="bn")

An `Op` used as an input matches the producer of that input. Names are captures: `match["conv"]` is the node,
`match["w"]` the tensor. A name used twice must match the same tensor (or node) both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.graph import Tensor


@dataclass(frozen=True)
class Any_:
    """Any tensor, not captured. Does not match an absent or empty input: use `Maybe` for these."""


@dataclass(frozen=True)
class Var:
    """Any tensor (constant or not), captured as `name`; `where` is a condition on it (shape, dtype)."""

    name: str
    where: Callable[[Tensor], bool] | None = None


@dataclass(frozen=True)
class Const:
    """A constant tensor, captured as `name`; `where` is a condition on its value (a read-only array)."""

    name: str
    where: Callable[[np.ndarray], bool] | None = None


class Op:
    """A node with its op type and inputs.

    Args:
        op: the op type, or several.
        inputs: what each input must match. None given: any inputs. Otherwise every input of the node must be listed;
            optional ones are wrapped in `Maybe`.
        name: the capture of the node.
        attrs: attribute → value, or a predicate on the value. A missing attribute has the default of the op's schema,
            or None if there is no default.
        commutative: inputs match in any order.
        domain: "" is the standard domain.
        outputs: number of outputs that the pattern handles; if a later one is used, the engine refuses.
        shared: by default the output of an inner op may be read only inside the match: not by other nodes, not as a
            graph output, not in a branch body; otherwise the engine refuses with the reason. True disables this check.
        output: index of the output that feeds the input at which this op is used.
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
        self.producers = tuple(filter(None, map(_ops_of, inputs)))
        """Op types of inner ops: the inputs of a node must have a producer of each, which is checked first."""

    def may_read(self, ops: Set[str]) -> bool:
        """Return whether a node whose inputs are produced by `ops` may match."""
        return not any(ops.isdisjoint(wanted) for wanted in self.producers)

    def __repr__(self) -> str:
        return f"Op({'|'.join(self.ops)}{', ' if self.inputs else ''}{', '.join(map(repr, self.inputs))})"


@dataclass(frozen=True)
class Maybe:
    """An optional input: captures inside are None if it is absent or empty."""

    want: Want


@dataclass(frozen=True)
class Or:
    """The first alternative that matches. Captures of the others are None."""

    choices: tuple[Want, ...] = field(default=())

    def __init__(self, *choices: Want) -> None:
        object.__setattr__(self, "choices", choices)


Want = Any_ | Var | Const | Op | Maybe | Or
"""Pattern of one input."""

X = Any_()


def _ops_of(want: Want) -> frozenset[str]:
    """Return the op types that the producer of an input must have; empty if the input may be anything else."""
    if isinstance(want, Op):
        return frozenset(want.ops)
    choices = [_ops_of(choice) for choice in want.choices] if isinstance(want, Or) else []
    return frozenset().union(*choices) if all(choices) else frozenset()


def captures(want: Want) -> Iterator[str]:
    """Yield the names captured in the tree, possibly with duplicates."""
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
    """Return the number of op levels of the tree, including the root."""
    if isinstance(want, Maybe):
        return depth(want.want)
    if isinstance(want, Or):
        return max((depth(choice) for choice in want.choices), default=0)
    if isinstance(want, Op):
        return 1 + max((depth(inner) for inner in want.inputs), default=0)
    return 0

"""Types of a fix and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbonnx.lint.fix.bench import Bench


@dataclass(frozen=True)
class Fixed:
    """One place that was fixed, or could not be fixed.

    Attributes:
        rule: id of the rule, such as "T02".
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        what: description of the change, or the reason why it was not possible.
        done: the model was changed.
        exact: the model computes the same values as before, bit for bit.
    """

    rule: str
    node: str
    tensor: str
    what: str
    done: bool = True
    exact: bool = False

    def to_dict(self) -> dict[str, str | bool]:
        """Convert to plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Fix:
    """One automatic fix.

    Attributes:
        rules: ids of the rules whose findings it removes.
        title: what it does.
        apply: changes the graph of the bench and returns the results; called again until it changes nothing.
    """

    rules: tuple[str, ...]
    title: str
    apply: Callable[[Bench], Iterable[Fixed]]

"""What a mend is, and what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sbonnx.lint.fix.bench import Bench


@dataclass(frozen=True)
class Fixed:
    """One place that was mended, or could not be.

    Attributes:
        rule: id of the rule, such as "T02".
        node: name of the node, or "".
        tensor: name of the tensor, or "".
        what: what was done, or why it could not be.
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
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Fix:
    """One mechanical mend.

    Attributes:
        rules: ids of the rules whose findings it removes.
        title: what it does.
        apply: changes the graph of the bench and tells what it did; called again until it does nothing more.
    """

    rules: tuple[str, ...]
    title: str
    apply: Callable[[Bench], Iterable[Fixed]]

"""Measured figures beside what they are to reach, as rows of a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Measured = dict[str, list[float]]
"""Values of all repeats by name of the method. Values with the same index were measured in the same round."""


@dataclass(frozen=True)
class Target:
    """Target of a figure: at most, or at least, `limit`; None: the figure has no target."""

    limit: float | None = None
    sense: Literal["at most", "at least"] = "at most"

    def met(self, value: float) -> bool:
        """Return whether `value` meets the target; always true without a limit."""
        if self.limit is None:
            return True
        return value <= self.limit if self.sense == "at most" else value >= self.limit


@dataclass(frozen=True)
class Cell:
    """One figure of one model.

    Attributes:
        values: one value per repeat; their median is the figure.
        target: target of the figure.
        unit: "" for a ratio, or "MB".
        note: text after the figure.
    """

    values: tuple[float, ...]
    target: Target = Target()
    unit: str = ""
    note: str = ""

    @property
    def value(self) -> float:
        """Median of the values."""
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        """Whether the figure meets its target."""
        return self.target.met(self.value)

    def __str__(self) -> str:
        text = self._show(self.value) + (f" {self.unit}" if self.unit else "")
        if len(self.values) > 1:
            text += f" ({self._show(min(self.values))} to {self._show(max(self.values))})"
        if self.target.limit is not None:
            verdict = "met" if self.met else "**missed**"
            sign = "≤" if self.target.sense == "at most" else "≥"
            text += f" {sign} {self.target.limit:g}: {verdict}"
        return f"{text} {self.note}".rstrip()

    def _show(self, value: float) -> str:
        if self.unit or abs(value) >= 100:
            return str(round(value))
        return f"{value:.3f}" if abs(value) < 0.1 else f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def alternate(ways: Mapping[str, Callable[[], Mapping[str, float]]], repeats: int) -> Measured:
    """Run all methods alternately, `repeats` times, with a different order in each round to avoid an order bias.

    Args:
        ways: methods by any name; each returns one or several values by name.
        repeats: number of rounds.

    Returns:
        values by the names that the methods return, one per round.
    """
    order = list(ways)
    found: Measured = {}
    for repeat in range(repeats):
        turn = repeat % len(order)
        for name in order[turn:] + order[:turn]:
            for key, value in ways[name]().items():
                found.setdefault(key, []).append(value)
    return found


def ratio(found: Measured, over: str, under: str, target: Target = Target()) -> Cell | None:
    """Divide one measurement by another, repeat by repeat; None if one was not measured."""
    if over not in found or under not in found:
        return None
    return Cell(tuple(a / b for a, b in zip(found[over], found[under], strict=True)), target)


def difference(found: Measured, more: str, less: str, target: Target = Target()) -> Cell | None:
    """Subtract one memory measurement from another, in MB, repeat by repeat; None if one was not measured."""
    if more not in found or less not in found:
        return None
    return Cell(tuple(a - b for a, b in zip(found[more], found[less], strict=True)), target, "MB")


def rows(names: Sequence[str], columns: Sequence[Mapping[str, Cell | str]]) -> list[list[str]]:
    """Return table rows: name of the figure and the cell of each model, without figures that no model has.

    Args:
        names: names of the figures, in order.
        columns: cells by name of the figure, one mapping per model.
    """
    shown = [name for name in names if any(name in column for column in columns)]
    return [[name, *(str(column.get(name, "–")) for column in columns)] for name in shown]

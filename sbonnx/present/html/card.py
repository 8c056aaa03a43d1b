"""`Card`: a summary of a value, for notebooks and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from sbonnx.report.verdict import Tone

MOST_ROWS: Final = 8
"""Rows of the table; more are counted below it."""


@dataclass(frozen=True)
class Card:
    """Summary of a value.

    Attributes:
        title: its name.
        sentence: what it says; "" without one.
        tone: colour of the sentence.
        facts: (name, text).
        columns, rows: a table, of which the first `MOST_ROWS` rows are shown; empty without one.
        total: number of rows in all; None: those of `rows`.
        hint: how to see more.
    """

    title: str
    sentence: str = ""
    tone: Tone = "idle"
    facts: Sequence[tuple[str, str]] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = field(default_factory=tuple)
    total: int | None = None
    hint: str = ""

    @property
    def shown(self) -> Sequence[Sequence[str]]:
        """The rows of the table."""
        return self.rows[:MOST_ROWS]

    @property
    def further(self) -> int:
        """Number of rows that are not shown."""
        return (len(self.rows) if self.total is None else self.total) - len(self.shown)

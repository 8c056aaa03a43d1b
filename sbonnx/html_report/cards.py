"""Summaries for notebooks: a title, one sentence, figures and a table, as HTML that needs no style sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from sbonnx.html_report import formatting
from sbonnx.html_report.layer_views import layers_of
from sbonnx.html_report.network import network_of

Tone = Literal["good", "warn", "bad", "idle"]

TONE_OF: Final[Mapping[str, Tone]] = {"kept": "good", "lost": "bad", "uncertain": "warn", "unknown": "idle"}
"""Tone of a card by `sbonnx.report.verdict.Accuracy`."""

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


def report_card(report: Mapping[str, Any]) -> Card:
    """Summarize a report: the verdict, the figures of the headline, and the worst layers.

    Args:
        report: `sbonnx.report.Report.to_dict`.
    """
    network = network_of(report, rows=MOST_ROWS)
    layers = layers_of(report, MOST_ROWS)
    measured = [row for row in layers.rows if row.accumulated is not None or row.isolated is not None]
    rows = [
        (row.node, row.tensor, row.activation, formatting.decibel(row.isolated), formatting.decibel(row.accumulated))
        for row in measured
    ]
    return Card(
        title=f"{network.model.rpartition('/')[2]} for {network.backend}",
        sentence=network.verdict.text,
        tone=TONE_OF[network.verdict.accuracy] if network.ok else "bad",
        facts=[(figure.name, f"{figure.value} ({figure.more})") for figure in network.headline],
        columns=("worst layers", "input", "type", "isolated, dB", "accumulated, dB"),
        rows=rows,
        total=layers.total,
        hint="all: .layers_frame(), .plot(), .to_html()",
    )

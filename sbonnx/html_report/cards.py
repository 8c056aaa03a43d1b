"""Summaries for notebooks: a title, one sentence, figures and a table, as HTML that needs no style sheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sbonnx.html_report import formatting
from sbonnx.html_report.formatting import text
from sbonnx.html_report.layer_views import layers_of
from sbonnx.html_report.network import decoder_figures, network_of
from sbonnx.html_report.overview import overview_of
from sbonnx.report.verdict import Tone, figure_text, runtime_of, state_text, verdict_of

TONE_OF: Final[Mapping[str, Tone]] = {
    "kept": "good",
    "lost": "bad",
    "uncertain": "warn",
    "doubtful": "warn",
    "unknown": "idle",
}
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
        tone=network.verdict.tone,
        facts=[(figure.name, f"{figure.value} ({figure.more})") for figure in network.headline],
        columns=("worst layers", "input", "type", "isolated, dB", "accumulated, dB"),
        rows=rows,
        total=layers.total,
        hint="all: .layers_frame(), .plot(), .to_html()",
    )


def comparison_card(metrics: Mapping[str, Any]) -> Card:
    """Summarize a comparison with float: the verdict, and the figures of each output.

    Args:
        metrics: `sbonnx.verify.Comparison.to_dict`.
    """
    verdict = verdict_of(metrics, backend=runtime_of(metrics))
    rows = [
        (
            text(row["name"]),
            *("; ".join(map(figure_text, part)) for part in (row["figures"][:1], row["figures"][1:])),
            state_text(row.get("state"), row.get("decided_by")),
        )
        for row in metrics.get("quality") or ()
    ]
    return Card(
        title=f"Quantized against float on {formatting.count(metrics['feeds'])} feeds",
        sentence=verdict.text,
        tone=verdict.tone,
        columns=("output", "SQNR", "other figures", "accuracy"),
        rows=rows,
        hint="all: .outputs, .quality, .kernels",
    )


def evaluation_card(evaluation: Mapping[str, Any]) -> Card:
    """Summarize a metric on labelled data: a row for each model.

    Args:
        evaluation: `sbonnx.verify.Evaluation.to_dict`.
    """
    several = len(evaluation["rows"]) > 1
    verdict = verdict_of({"evaluation": evaluation}) if several else None
    columns = ("model", text(evaluation["metric"]), *(("difference from the first",) if several else ()))
    return Card(
        title=f"{evaluation['metric']} on {formatting.count(evaluation['samples'])} labelled samples",
        sentence=verdict.text if verdict is not None else "",
        tone="idle" if verdict is None else verdict.tone,
        columns=columns,
        rows=[
            (text(row["model"]), _with_interval(row["metric"]), _with_interval(row.get("difference")))[: len(columns)]
            for row in evaluation["rows"]
        ],
        hint="all: .rows",
    )


def _with_interval(value: Mapping[str, Any] | None) -> str:
    if value is None:
        return ""
    known = all(map(math.isfinite, (float(value["low"]), float(value["high"]))))
    ends = f" ({formatting.plain(value['low'])} to {formatting.plain(value['high'])})" if known else ""
    return f"{formatting.plain(value['value'])}{ends}"


def pruning_card(report: Mapping[str, Any]) -> Card:
    """Summarize a pruning: the verdict, what remains, and the dimensions that lost channels.

    Args:
        report: `sbonnx.PruningReport.to_dict`.
    """
    verdict = report["verdict"]
    shares = (("multiplications", "macs"), ("bytes of constants", "size"), ("estimated time", "latency"))
    cut = [row for row in report["dimensions"] if row["after"] < row["before"]]
    return Card(
        title=f"{text(report['model']).rpartition('/')[2]}, pruned",
        sentence=text(verdict["text"]),
        tone=TONE_OF[verdict["accuracy"]] if report["ok"] else "bad",
        facts=[(name, f"{formatting.percent(report[key])} remain") for name, key in shares if report[key] is not None],
        columns=("channels of", "before", "after"),
        rows=[
            (text(next(iter(row["writers"]), "")), formatting.count(row["before"]), formatting.count(row["after"]))
            for row in cut
        ],
        hint="all: .dimensions, .layers, .refusals",
    )


def decoder_card(figures: Mapping[str, Any], name: str = "") -> Card:
    """Summarize the evaluation of a decoder: the verdict if it was compared with float, and its figures.

    Args:
        figures: `sbonnx.llm.DecoderEvaluation.to_dict`.
        name: title; "": that of the model.
    """
    verdict = verdict_of({"llm": figures}, problems=figures["problems"]) if figures["against"] else None
    tone: Tone = "bad" if figures["problems"] else "idle" if verdict is None else verdict.tone
    return Card(
        title=name or text(figures["model"]),
        sentence="" if verdict is None else verdict.text,
        tone=tone,
        facts=[(figure.name, f"{figure.value} ({figure.more})") for figure in decoder_figures(figures)],
        columns=("threads", "prompt", "first token, ms", "tokens/s"),
        rows=[
            (
                *(formatting.count(row[key]) for key in ("threads", "prompt")),
                *(formatting.plain(row[key], 3) for key in ("first_token", "tokens_per_second")),
            )
            for row in figures["speed"]
        ],
        hint="all: .to_dict()",
    )


def batch_card(report: Mapping[str, Any]) -> Card:
    """Summarize a batch: a row for each job, failures first.

    Args:
        report: `dataclasses.asdict` of a `sbonnx.batch.jobs.job.BatchReport`.
    """
    batch = overview_of(report)
    done = ", ".join(f"{formatting.count(count)} {status}" for status, _, count in batch.counts)
    return Card(
        title=f"Batch {batch.title}: {formatting.count(len(batch.jobs))} job{'s' * (len(batch.jobs) != 1)}",
        sentence=f"{done}; took {batch.took}." if batch.took else f"{done}.",
        tone="good" if batch.ok else "bad",
        columns=("job", "status", "SQNR, dB", "reason"),
        rows=[(job.name, job.status, job.cells[0].text, job.reason) for job in batch.jobs],
        hint="all: .rows; page: report.html in the output folder",
    )

"""Summaries for notebooks: a title, one sentence, figures and a table, as HTML that needs no style sheet."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sbonnx.present.html import file_cards, formatting
from sbonnx.present.html.card import MOST_ROWS, Card
from sbonnx.present.html.formatting import text
from sbonnx.present.html.layer_views import layers_of
from sbonnx.present.html.network import decoder_figures, network_of
from sbonnx.present.html.overview import COLUMNS, JobRow, overview_of
from sbonnx.present.html.templates import environment
from sbonnx.present.text.tables import runtime_rows
from sbonnx.report.comparison import Comparison, DecoderFigures, Portability
from sbonnx.report.reading import read
from sbonnx.report.verdict import Tone, figure_text, state_text, verdict_of
from sbonnx.system.terminal import map_strings, relative_paths
from sbonnx.values import plain

if TYPE_CHECKING:
    from sbonnx.batch.jobs.job import BatchReport
    from sbonnx.planning.types import Plan
    from sbonnx.quant_model.life_cycle import QuantModel
    from sbonnx.report import Report
    from sbonnx.report.comparison import FileComparison
    from sbonnx.report.decoder import DecoderEvaluation
    from sbonnx.report.figures import Evaluation, MetricValue
    from sbonnx.report.outcome import QuantizedFolder
    from sbonnx.report.pruned import PruningReport

TONE_OF: Final[Mapping[str, Tone]] = {
    "kept": "good",
    "lost": "bad",
    "uncertain": "warn",
    "doubtful": "warn",
    "unknown": "idle",
}
"""Tone of a card by `sbonnx.report.verdict.Accuracy`."""


def report_card(report: Report) -> Card:
    """Summarize a report: the verdict, the figures of the headline, and the worst layers."""
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
        facts=[
            *((figure.name, _joined(figure.value, figure.more)) for figure in network.headline),
            *(("To do", ": ".join(filter(None, (step.text, step.command)))) for step in network.steps),
        ],
        columns=("worst layers", "input", "type", "isolated, dB", "accumulated, dB"),
        rows=rows,
        total=layers.total,
        hint="all: .layers_frame(), .plot(), .to_html()",
    )


def _joined(value: str, more: str) -> str:
    """Join a figure and its details, which may begin with an interval in parentheses."""
    return value if not more else f"{value} {more}" if more.startswith("(") else f"{value}, {more}"


def folder_card(folder: QuantizedFolder) -> Card:
    """Summarize the reports of a folder: the verdict of each model."""
    good = sum(row.ok for row in folder.rows)
    return Card(
        title=f"{len(folder.rows)} quantized models",
        sentence=f"{good} of them without problems",
        tone="good" if folder.ok else "bad",
        columns=("model", "verdict"),
        rows=[(text(row.file), text(row.verdict)) for row in folder.rows],
        hint="all: .files, .frame()",
    )


def comparison_card(metrics: Comparison) -> Card:
    """Summarize a comparison with float: the verdict, and the figures of each output."""
    verdict = verdict_of(metrics, backend=metrics.runtime)
    rows = [
        (
            text(row.name),
            *("; ".join(map(figure_text, part)) for part in (row.figures[:1], row.figures[1:])),
            state_text(row.state, row.decided_by),
        )
        for row in metrics.quality
    ]
    return Card(
        title=f"Quantized against float on {formatting.count(metrics.feeds)} feeds",
        sentence=verdict.text,
        tone=verdict.tone,
        columns=("output", "SQNR", "other figures", "accuracy"),
        rows=rows,
        hint="all: .outputs, .quality, .kernels",
    )


def file_comparison_card(result: FileComparison) -> Card:
    """Summarize a comparison of two files: their verdict, with the limits that were set."""
    verdict = result.verdict
    card = comparison_card(result.comparison)
    title = f"{text(result.quantized)} against {text(result.float)}"
    return replace(card, title=title, sentence=verdict.text, tone="bad" if result.problems else verdict.tone)


def file_comparison_cards(result: FileComparison) -> list[Card]:
    """Summarize a comparison of two files, and the runtimes in which the quantized one ran, if there are any."""
    others = () if result.portability is None else (portability_card(result.portability),)
    return [file_comparison_card(result), *others]


def portability_card(result: Portability) -> Card:
    """Summarize the outputs of a file in several runtimes: a row for each."""
    columns, rows = runtime_rows(result)
    return Card(
        title=f"Runtimes beside {text(result.reference)} on {formatting.count(result.feeds)} feeds",
        sentence=result.text,
        tone="good" if result.portable else "bad" if result.problems() else "idle",
        columns=columns,
        rows=[[text(cell) for cell in row] for row in rows],
        hint="all: .portability.rows, .portability.frame()",
    )


def evaluation_card(evaluation: Evaluation) -> Card:
    """Summarize a metric on labelled data: a row for each model."""
    several = len(evaluation.rows) > 1
    verdict = verdict_of(Comparison(evaluation=evaluation)) if several else None
    columns = ("model", text(evaluation.metric), *(("difference from the first",) if several else ()))
    return Card(
        title=f"{evaluation.metric} on {formatting.count(evaluation.samples)} labelled samples",
        sentence=verdict.text if verdict is not None else "",
        tone="idle" if verdict is None else verdict.tone,
        columns=columns,
        rows=[
            (text(row.model), _with_interval(row.metric), _with_interval(row.difference))[: len(columns)]
            for row in evaluation.rows
        ],
        hint="all: .rows",
    )


def _with_interval(value: MetricValue | None) -> str:
    if value is None:
        return ""
    has_interval = math.isfinite(value.low) and math.isfinite(value.high)
    ends = f" ({formatting.plain(value.low)} to {formatting.plain(value.high)})" if has_interval else ""
    return f"{formatting.plain(value.value)}{ends}"


def pruning_card(report: PruningReport) -> Card:
    """Summarize a pruning: the verdict, what remains, and the dimensions that lost channels."""
    verdict = report.verdict
    return Card(
        title=f"{text(report.model).rpartition('/')[2]}, pruned",
        sentence=text(verdict.text),
        tone=TONE_OF[verdict.accuracy] if report.ok else "bad",
        facts=[(name, f"{formatting.percent(share)} remain") for name, share in report.remaining.items()],
        columns=("channels of", "before", "after"),
        rows=[
            (text(next(iter(row.writers), "")), formatting.count(row.before), formatting.count(row.after))
            for row in report.dimensions
            if row.after < row.before
        ],
        hint="all: .dimensions, .layers, .refusals",
    )


def decoder_card(figures: DecoderEvaluation, name: str = "") -> Card:
    """Summarize the evaluation of a decoder: the verdict if it was compared with float, and its figures.

    Args:
        name: title; "": that of the model.
    """
    verdict = verdict_of(DecoderFigures(llm=figures), problems=figures.problems) if figures.against else None
    tone: Tone = "bad" if figures.problems else "idle" if verdict is None else verdict.tone
    return Card(
        title=name or text(figures.model),
        sentence="" if verdict is None else verdict.text,
        tone=tone,
        facts=[(figure.name, f"{figure.value} ({figure.more})") for figure in decoder_figures(figures)],
        columns=("threads", "prompt", "first token, ms", "tokens/s"),
        rows=[
            (
                *(formatting.count(value) for value in (row.threads, row.prompt)),
                *(formatting.plain(value, 3) for value in (row.first_token, row.tokens_per_second)),
            )
            for row in figures.speed
        ],
        hint="all: .to_dict()",
    )


def batch_card(report: BatchReport) -> Card:
    """Summarize a batch: a row for each job, failures first, with relative paths, and the metric if there is one."""
    batch = overview_of(read(type(report), map_strings(relative_paths, plain(report))))
    done = ", ".join(f"{formatting.count(count)} {status}" for status, _, count in batch.counts)
    place = COLUMNS.index("metric")
    has_metric = any(job.cells[place].value is not None for job in batch.jobs)
    figures = ((batch.columns[place],) if has_metric else ()) + batch.columns[:1]
    return Card(
        title=f"Batch {batch.title}: {formatting.count(len(batch.jobs))} job{'s' * (len(batch.jobs) != 1)}",
        sentence=f"{done}; took {batch.took}." if batch.took else f"{done}.",
        tone="good" if batch.ok else "bad",
        columns=("job", "status", *figures, "reason"),
        rows=[
            (
                job.name,
                job.status,
                *((_metric(job, batch.metric),) if has_metric else ()),
                job.cells[0].text,
                job.reason,
            )
            for job in batch.jobs
        ],
        hint="all: .rows; page: report.html in the output folder",
    )


def _metric(job: JobRow, named: str) -> str:
    """Format the metric of a job, with the value of the run before, and its name unless the column has it."""
    name = f"{job.metric} " if job.metric not in ("", named) else ""
    before = f" (before {job.before})" if job.before else ""
    return f"{name}{job.cells[COLUMNS.index('metric')].text}{before}"


def plan_card(plan: Plan) -> Card:
    """Summarize a plan: sites by role, and the reasons of what is not quantized."""
    counts = Counter(refusal.code for refusal in plan.refusals)
    first = {refusal.code: refusal.why for refusal in reversed(plan.refusals)}
    return Card(
        title=f"Plan for {plan.backend}: {len(plan.sites)} quantized tensors, {len(plan.refusals)} refusals",
        facts=_sites_by_role(plan),
        columns=("not quantized because", "times"),
        rows=[(first[code], str(count)) for code, count in counts.most_common()],
        hint="all: .sites, .refusals",
    )


def _sites_by_role(plan: Plan) -> list[tuple[str, str]]:
    from sbonnx.planning.types import ROLES

    return [(f"{role} sites", str(len(plan.of_role(role)))) for role in ROLES]


def model_card(model: QuantModel) -> Card:
    """Summarize a QuantModel: its plan, and which steps were taken."""
    prepared = model.prepared
    plan, nodes = prepared.plan, len(prepared.graph.nodes)
    title = f"QuantModel for {plan.backend}: {nodes} nodes, {len(plan.sites)} quantized tensors"
    return Card(title, facts=[*model.step_states.items(), *_sites_by_role(plan)], hint="plan: .prepared.plan")


def adaptation_cards(adapted: Any) -> list[Card]:
    """Summarize a decoder with trained adapters: its evaluation before and after.

    Args:
        adapted: `sbonnx.llm.AdaptedDecoder`.
    """
    return [
        decoder_card(figures, f"{adapted.output}, {when} training of {adapted.weights} weights")
        for figures, when in ((adapted.before, "before"), (adapted.after, "after"))
    ]


CARDS: Final[Mapping[str, Callable[[Any], Card | list[Card]]]] = {
    **file_cards.CARDS,
    "AdaptedDecoder": adaptation_cards,
    "BatchReport": batch_card,
    "Comparison": comparison_card,
    "DecoderEvaluation": decoder_card,
    "Evaluation": evaluation_card,
    "FileComparison": file_comparison_cards,
    "Plan": plan_card,
    "Portability": portability_card,
    "PruningReport": pruning_card,
    "QuantModel": model_card,
    "QuantizedFolder": folder_card,
    "Report": report_card,
}
"""Summaries by class name."""


def cards_of(result: object) -> list[Card]:
    """Return the cards of a result."""
    name = next(kind.__name__ for kind in type(result).__mro__ if kind.__name__ in CARDS)
    cards = CARDS[name](result)
    return [cards] if isinstance(cards, Card) else cards


def summary(result: object) -> str:
    """Render the summary of a result for a notebook."""
    return "".join(map(render_card, cards_of(result)))


def render_card(card: Card) -> str:
    """Render a card: HTML that is part of another page."""
    return environment().get_template("card.html.j2").render(card=card)

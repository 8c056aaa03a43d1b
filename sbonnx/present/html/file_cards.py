"""Summaries of what verbs find in files: contents, findings, differences, losses, times, outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from sbonnx.present.html import formatting
from sbonnx.present.html.card import Card
from sbonnx.present.html.formatting import text
from sbonnx.present.text.tables import metric_text
from sbonnx.report.verdict import interval_text, speed_parts

if TYPE_CHECKING:
    from sbonnx.linting.report import LintReport
    from sbonnx.metrics.output_statistics import RunOutput
    from sbonnx.profiling.checkers import Profile
    from sbonnx.profiling.metric_losses import EvaluatedProfile
    from sbonnx.qdq.difference import FileDifference, ModelDifference
    from sbonnx.report.contents import ModelContents
    from sbonnx.report.simplified import SimplifyReport
    from sbonnx.tuning.tuned_costs import KernelTuning
    from sbonnx.verify.benchmark import Benchmark, Speed


def contents_card(contents: ModelContents) -> Card:
    """Summarize the contents of a model: its size, interface and operators."""
    pairs = [f"{row.pairs} of {row.of} in {row.type}" for row in contents.qdq]
    tensors = {"inputs": contents.inputs, "outputs": contents.outputs}
    interface = [
        (side, ", ".join(f"{row.name} {row.type} {_shape(row.shape)}" for row in rows))
        for side, rows in tensors.items()
    ]
    return Card(
        title=f"{contents.file}: {formatting.count(contents.nodes)} nodes, opset {contents.opset}, "
        f"{formatting.size(contents.bytes)}",
        sentence=f"Q/DQ pairs: {', '.join(pairs)}." if pairs else "",
        facts=[*interface, ("parameters", formatting.count(contents.parameters))],
        columns=("op", "nodes"),
        rows=[(text(op), formatting.count(count)) for op, count in contents.ops.items()],
        hint="all: .to_dict()",
    )


def _shape(shape: tuple[int | str, ...] | None) -> str:
    return "unknown" if shape is None else f"({', '.join(map(str, shape))})"


def lint_card(report: LintReport) -> Card:
    """Summarize the findings of a model, most severe first."""
    counts = report.counts
    return Card(
        title=f"{report.checked} for {report.target}: {report.rules} rules, {counts.text}",
        tone="bad" if counts.error else "warn" if counts.warning else "good",
        columns=("rule", "severity", "node", "why"),
        rows=[(row.rule, row.severity, text(row.node or row.tensor), text(row.why)) for row in report.findings],
        hint="all: .findings",
    )


def outputs_card(output: RunOutput) -> Card:
    """Summarize the outputs of a model: shape and range of each."""
    return Card(
        title=f"{output.model} on {formatting.count(output.feeds)} feed{'s' * (output.feeds != 1)}",
        sentence=f"Outputs are in {output.output}." if output.output else "",
        columns=("output", "type", "shape", "min", "mean", "max"),
        rows=[
            (
                text(row.name),
                text(row.type),
                "varies" if row.shape is None else _shape(row.shape),
                *map(formatting.plain, (row.min, row.mean, row.max)),
            )
            for row in output.outputs
        ],
        hint="all: .outputs",
    )


def page_card(written: Any) -> Card:
    """Summarize a page: where it is.

    Args:
        written: `sbonnx.WrittenPage`.
    """
    return Card(title=f"Page {written.page}{', opened in a browser' if written.opened else ''}")


def simplify_card(report: SimplifyReport) -> Card:
    """Summarize a simplification: numbers of nodes, whether outputs are equal, and the applied patterns."""
    return Card(
        title=f"{report.model}: {report.nodes_before} to {report.nodes_after} nodes",
        sentence="equal outputs" if report.ok else report.problems[0],
        tone="good" if report.ok else "bad",
        columns=("pattern", "node"),
        rows=[(text(row.pattern), text(row.node)) for row in report.applied],
        hint="all: .applied, .refusals",
    )


def difference_card(difference: ModelDifference) -> Card:
    """Summarize the difference of two quantized models."""
    facts = [
        ("quantized in the first only", str(len(difference.first_pairs))),
        ("in the second only", str(len(difference.second_pairs))),
        ("differently", str(len(difference.pairs))),
        ("equally", str(difference.equal_pairs)),
        ("constants with other values", str(len(difference.constants))),
    ]
    return Card(
        title="Two quantized models: " + ("equal" if difference.equal else "different"),
        tone="good" if difference.equal else "warn",
        facts=facts,
        columns=("quantized differently", "type in the first", "in the second"),
        rows=[(row.tensor, *row.types) for row in difference.pairs],
        hint="all: .to_dict()",
    )


def profile_card(profile: Profile) -> Card:
    """Summarize losses by layer: those with the largest isolated loss."""
    from sbonnx.profiling.checkers import COLUMNS, TITLES, kind_of, name_of

    name, unit = name_of(profile.checker), kind_of(profile.checker).unit
    shown = formatting.decibel if unit == "dB" else formatting.plain
    rows = [
        (row.node, row.op, row.label, *("" if value is None else shown(value) for value in map(row.value, COLUMNS)))
        for row in profile.worst_first()
    ]
    outputs = [(f"output {output}", f"{shown(value)} {unit}") for output, value in profile.outputs.items()]
    feeds = f"{formatting.count(profile.feeds)} feed{'s' if profile.feeds != 1 else ''}"
    layers = f"{len(profile.layers)} layer{'s' if len(profile.layers) != 1 else ''}"
    return Card(
        title=f"Losses of {layers} on {feeds}: {name}{f' in {unit}' if unit else ''}",
        sentence=_worst_text(profile, f"{name} {{}}{f' {unit}' if unit else ''}".format, shown),
        facts=outputs,
        columns=("layer", "op", "reads", *(TITLES[name] for name in COLUMNS)),
        rows=rows,
        hint="all: .layers, .plot()",
    )


def _worst_text(profile: Profile, form: Callable[[str], str], shown: Callable[[object], str]) -> str:
    """Return the layer with the largest isolated loss; "" if none was measured."""
    worst = next(iter(profile.worst_first()), None)
    if worst is None or worst.alone is None:
        return ""
    return f"the largest loss of a layer alone is that of {text(worst.node)}, {form(shown(worst.alone))}"


def speed_card(speed: Speed) -> Card:
    """Summarize the times of a model."""
    facts = [
        ("median", f"{speed.median_ms:.3g} ms{interval_text(*speed.interval_ms)}"),
        ("best", f"{speed.best_ms:.3g} ms"),
        ("95th percentile", f"{speed.p95_ms:.3g} ms"),
        ("samples/s", _rate(speed.samples_per_second)),
        ("time relative to the first model", f"{speed.ratio:.3g} of it"),
    ]
    return Card(f"{speed.model}, {speed.threads} threads, {speed.batch} samples a run", facts=facts)


def file_difference_card(found: FileDifference) -> Card:
    """Summarize the difference of two files."""
    card = difference_card(found.difference)
    return replace(card, title=f"{found.first} and {found.second}: {'equal' if found.equal else 'different'}")


def evaluated_profile_cards(result: EvaluatedProfile) -> list[Card]:
    """Summarize losses by layer; those in a task metric, if they were measured, first."""
    losses = result.evaluation
    if losses is None:
        return [profile_card(result.profile)]
    rows = [
        (text(row.node), row.op, metric_text(row.alone.metric, losses), metric_text(row.kept_float.metric, losses))
        for row in losses.layers
    ]
    card = Card(
        title=f"{losses.metric} of {formatting.count(losses.samples)} labelled samples",
        facts=[
            (name, metric_text(row.metric, losses))
            for name, row in (("float", losses.float), ("quantized", losses.quantized))
        ],
        columns=("layer", "op", "quantized alone", "all but this quantized"),
        rows=rows,
        hint="all: .evaluation",
    )
    card_of_layers = profile_card(result.profile)
    figures = [metric_text(row.metric, losses) for row in (losses.quantized, losses.float)]
    parts = [f"{losses.metric} {figures[0]}, float {figures[1]}", card_of_layers.sentence]
    return [card, replace(card_of_layers, sentence="; ".join(filter(None, parts)))]


def benchmark_card(found: Benchmark) -> Card:
    """Summarize the times of several models."""
    rows = [
        (
            text(row.model),
            str(row.threads),
            str(row.batch),
            f"{row.median_ms:.3g}{interval_text(*row.interval_ms)}",
            _rate(row.samples_per_second),
            f"{row.ratio:.3g}",
        )
        for row in found.rows
    ]
    return Card(
        title=f"{' and '.join(found.models)} in {found.runtime}",
        sentence="; ".join(map(_speed_text, found.rows[: len(found.models)])),
        columns=("model", "threads", "batch", "median, ms", "samples/s", "time relative to the first"),
        rows=rows,
        hint="all: .rows",
    )


def tuning_card(tuning: KernelTuning) -> Card:
    """Summarize the measured kernels of a machine: those whose price is not that of its kind of CPU."""
    changed = tuning.changed
    return Card(
        title=f"{len(tuning.kernels)} kernels of {text(tuning.model) or tuning.cpu}",
        sentence="the machine was busy: measure again" if tuning.busy else f"table {tuning.digest}",
        tone="warn" if tuning.busy else "good",
        facts=[("time relative to the table of such CPUs", f"{tuning.speed:.2f}"), ("other prices", str(len(changed)))],
        columns=("kernel", "variant", "type", "price relative to that table"),
        rows=[(row.kernel, row.variant, row.type, f"{row.factor:.3g}") for row in changed],
        hint="all: .kernels, .frame()",
    )


def _rate(value: float) -> str:
    """Format a number of samples a second with three significant digits, or all before the point."""
    return formatting.count(value) if value >= 100 else formatting.plain(value, 3)


def _speed_text(speed: Speed) -> str:
    """Return the time of a run, and how it compares with that of the first model."""
    _, text, ends = speed_parts(speed.ratio, *speed.ratio_interval, busy=speed.busy)
    relative = f", {text}{ends}" if speed.ratio != 1 else ""
    return f"{speed.model.rpartition('/')[2]} {speed.median_ms:.3g} ms a run{relative}"


CARDS: Final[Mapping[str, Callable[[Any], Card | list[Card]]]] = {
    "Benchmark": benchmark_card,
    "EvaluatedProfile": evaluated_profile_cards,
    "FileDifference": file_difference_card,
    "KernelTuning": tuning_card,
    "LintReport": lint_card,
    "ModelContents": contents_card,
    "ModelDifference": difference_card,
    "Profile": profile_card,
    "RunOutput": outputs_card,
    "SimplifyReport": simplify_card,
    "Speed": speed_card,
    "WrittenPage": page_card,
}
"""Summaries by class name."""

"""Rows and columns of tables: comparisons with float, search results, text bars."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from sbonnx.present.text.printer import Printer
from sbonnx.system.terminal import number_text

if TYPE_CHECKING:
    from sbonnx.profiling.metric_losses import MetricLosses
    from sbonnx.report import Refusal
    from sbonnx.report.comparison import Comparison, Portability
    from sbonnx.report.figures import Evaluation, Kernels, MetricValue
    from sbonnx.report.pruned import PruningReport
    from sbonnx.report.searched import LatencyTuning, ScoreFigures, SearchFigures

NAMED: Final = 0.01
"""Least share of the weights of a kind of op that is named."""

MOST_KERNELS: Final = 4
"""Kinds of integer kernels in the table; the JSON has all of them."""

MOST_FLOAT_KERNELS: Final = 6
"""Kinds of float kernels in the table; the JSON has all of them."""

MOST_OUTPUTS: Final = 4
"""Outputs whose SQNR on calibration samples is shown; the JSON has all of them."""

FRONT_POINTS: Final = 8
"""Rows of the Pareto front in the table; the JSON has all of them."""

BAR_WIDTH: Final = 8
"""Width of the longest bar in characters."""

EIGHTHS: Final = " ▏▎▍▌▋▊▉█"
"""Block characters, filled from the left by 0 to 8 eighths."""

OUTPUT_COLUMNS: Final = ("output", "accuracy", "SQNR", "other figures", "max error")

SHOWN_OUTPUTS: Final = 5
"""Outputs in the table; the JSON and HTML reports have all of them."""


def show_outputs(printer: Printer, title: str, metrics: Comparison | None) -> None:
    """Show one line per output, those that are lost first: what figures prove, figures and 95 % intervals."""
    from sbonnx.report.verdict import figure_text, state_text

    if metrics is None:
        return
    errors = {row.name: row.max_abs for row in metrics.outputs}
    outputs = sorted(metrics.quality, key=lambda row: not row.problem)
    rows = [
        (
            row.name,
            state_text(row.state, row.decided_by),
            next((figure.text() for figure in row.figures if figure.name == "SQNR"), None),
            ", ".join(figure_text(figure) for figure in row.figures if figure.name != "SQNR"),
            errors.get(row.name),
        )
        for row in outputs[:SHOWN_OUTPUTS]
    ]
    printer.table(title, OUTPUT_COLUMNS, rows)
    if len(outputs) > SHOWN_OUTPUTS:
        printer.note(f"{len(outputs) - SHOWN_OUTPUTS} more outputs are in the report (--report, --json)")


def metric_text(value: MetricValue, evaluation: Evaluation | MetricLosses, *, sign: bool = False) -> str:
    """Format a value of a task metric with its interval: ``0.9125 (0.9012 to 0.9229)``."""
    digits = ".4f" if evaluation.share else ".5g"
    unit = f" {evaluation.unit}" if evaluation.unit else ""
    figure, low, high = (
        number_text(number, f"{'+' * sign}{digits}") for number in (value.value, value.low, value.high)
    )
    has_interval = math.isfinite(value.low) and math.isfinite(value.high) and low != high
    return f"{figure}{unit} ({low} to {high})" if has_interval else f"{figure}{unit}"


def evaluation_rows(evaluation: Evaluation) -> tuple[str, tuple[str, ...], list[Sequence[object]]]:
    """Return title, columns and rows of the table of an evaluation."""
    rows: list[Sequence[object]] = [
        (
            row.model,
            metric_text(row.metric, evaluation),
            None if row.difference is None else metric_text(row.difference, evaluation, sign=True),
        )
        for row in evaluation.rows
    ]
    title = f"{evaluation.metric} of {evaluation.samples} labelled samples, 95 % intervals"
    if len(rows) == 1:
        return title, ("model", evaluation.metric), [row[:2] for row in rows]
    return title, ("model", evaluation.metric, "difference"), rows


def show_evaluation(printer: Printer, metrics: Comparison | None) -> None:
    """Show the task metric of both models, if one was computed."""
    if metrics is not None and metrics.evaluation is not None:
        printer.table(*evaluation_rows(metrics.evaluation))


RUNTIME_COLUMNS: Final = ("runtime", "against float", "against reference", "not accelerated", "result")


def runtime_rows(result: Portability) -> tuple[tuple[str, ...], list[Sequence[object]]]:
    """Return columns and rows of the table of runtimes."""
    states = {
        "same": "same outputs",
        "rounding": "same up to rounding",
        "built": "built, not run",
        "differs": "differs",
        "refused": "refused",
        "absent": "absent",
    }
    metric = {} if result.evaluation is None else {row.model: row.metric for row in result.evaluation.rows}
    rows: list[Sequence[object]] = []
    for row in result.rows:
        values = [None if value is None else decibels(value) for value in (row.sqnr_db, row.reference_db)]
        verdict = f"differs at {row.differs}" if row.differs else f"{states[row.state]}"
        fallback = f"{len(row.fallback)} nodes" if row.fallback else None
        text = f"{verdict}: {row.why}" if row.why else verdict
        measured = (
            [metric_text(metric[row.runtime], result.evaluation)]
            if row.runtime in metric and result.evaluation
            else [None]
        )
        rows.append((row.runtime, *values, *(measured if metric else ()), fallback, text))
    named = () if result.evaluation is None else (result.evaluation.metric,)
    return (*RUNTIME_COLUMNS[:3], *named, *RUNTIME_COLUMNS[3:]), rows


def decibels(value: float) -> str:
    """Format an SQNR; that of equal outputs is "equal"."""
    return "equal" if value == math.inf else f"{value:.1f} dB"


def show_portability(printer: Printer, result: Portability | None) -> None:
    """Show the outputs of a file in several runtimes, and whether it is portable."""
    if result is not None:
        printer.table(result.text, *runtime_rows(result))


def percent(share: float | None) -> str | None:
    """Format a share as a percentage; None stays None."""
    return None if share is None else f"{100 * share:.2f} %"


def remaining(report: PruningReport) -> dict[str, str]:
    """Return what remains after pruning, by name."""
    return {name: f"{percent(share)} remain" for name, share in report.remaining.items()}


def pruned_text(report: PruningReport | None) -> str | None:
    """Format what remains after pruning; None without pruning."""
    if report is None:
        return None
    return ", ".join(text.replace(" remain", f" of the {name} remain") for name, text in remaining(report).items())


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Draw a bar of `share` (0 to 1; NaN: full) of `width` characters, with a resolution of 1/8 character.

    A share above 0 is never drawn empty.
    """
    share = 1.0 if share != share else min(max(share, 0.0), 1.0)
    eighths = round(share * width * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, part = divmod(eighths, 8)
    return "█" * whole + (EIGHTHS[part] if part else "")


def show_refusals(
    printer: Printer,
    refusals: Iterable[Refusal],
    *,
    title: str = "not done",
    most: int | None = None,
    verbose: bool = False,
) -> None:
    """Show one line per reason, the most frequent first: how often, what was not done, why, the first place.

    Reasons of one code are one; the first is shown.

    Args:
        most: number of reasons; None: all.
        verbose: show each place.
    """
    every = list(refusals)
    if verbose:
        printer.table(
            title,
            ("what", "why", "code", "at"),
            [(refusal.what, refusal.why, refusal.code, refusal.where) for refusal in every],
        )
        return
    counts = reasons_of(every)
    first = {(refusal.what, refusal.code): refusal for refusal in reversed(every)}
    further = most is not None and len(counts) > most
    printer.table(
        f"{title} (the first {most} of {len(counts)} reasons; each: -v)" if further else title,
        ("times", "what", "why", "code", "first at"),
        [
            (count, first[kind].what, first[kind].why, first[kind].code, first[kind].where)
            for kind, count in counts.most_common(most)
        ],
    )


def reasons_of(refusals: Iterable[Refusal]) -> Counter[tuple[str, str]]:
    """Count refusals by what was not done, and the code of the reason."""
    return Counter((refusal.what, refusal.code) for refusal in refusals)


def comparison_facts(
    metrics: Comparison | None, *, calibrated: bool = False, backend: str = "onnxruntime"
) -> dict[str, object]:
    """Format size, latency, kernels and samples of a comparison as table rows.

    Args:
        calibrated: the model was calibrated on the compared feeds, unless samples were held out.
        backend: runtime of the file. Latency and kernels are shown if it executed the file.
    """
    from sbonnx.report.verdict import interval_text
    from sbonnx.system.sizes import size_text

    if metrics is None:
        return {}
    facts: dict[str, object] = {}
    if metrics.size_ratio is not None:
        before, after = size_text(metrics.bytes_float), size_text(metrics.bytes_quantized)
        facts["size"] = f"{before} -> {after} ({metrics.size_ratio:.2f} of float)"
    own = backend == metrics.runtime
    if metrics.latency_ratio is not None and own:
        times = f"{metrics.median_ms_float:.3g} ms -> {metrics.median_ms_quantized:.3g} ms"
        low, high = metrics.latency_interval or (-math.inf, math.inf)
        facts["latency"] = f"{times} (ratio of pairs of runs {metrics.latency_ratio:.3g}{interval_text(low, high)})"
    facts["integer kernels"] = _kernels(metrics.kernels) if own else None
    facts["float kernels"] = _float_kernels(metrics.kernels) if own else None
    if metrics.saturating:
        facts["saturating sums"] = f"{len(metrics.saturating)} ops, computed as {metrics.cpu} CPUs compute them"
    facts["optimisation levels"] = _levels(metrics)
    facts["compared on"] = _compared(metrics, calibrated)
    return facts


def _compared(metrics: Comparison, calibrated: bool) -> str:
    """Describe the samples that outputs were compared on, with the SQNR on calibration samples if known."""
    feeds = f"{metrics.feeds} feed{'s' * (metrics.feeds != 1)}"
    if not metrics.held_out:
        return f"{feeds} of the calibration data: none was held out" if calibrated and metrics.feeds else feeds
    figures = ", ".join(f"{row.sqnr_db:.1f}" for row in metrics.calibration[:MOST_OUTPUTS])
    more = ", ..." if len(metrics.calibration) > MOST_OUTPUTS else ""
    return (
        f"{metrics.held_out} samples held out of calibration, in {feeds} "
        f"(on as many calibration samples: {figures}{more} dB)"
    )


def _kernels(kernels: Kernels | None) -> str | None:
    """Describe how many planned ops run in integer kernels; None if none were planned or counted."""
    if kernels is None or not (kernels.planned or kernels.skipped):
        return None
    if kernels.skipped:
        return f"not counted: {kernels.skipped}"
    folded = f", {kernels.folded} more folded away" if kernels.folded else ""
    text = f"{kernels.in_integers} of {kernels.with_kernel} planned ops{folded}"
    left = f" (float: {named})" if (named := float_weights(kernels)) else ""
    text += f"; {percent(kernels.weights_in_integers)} of the weights{left}"
    most = ", ".join(f"{name} {count}" for name, count in list(kernels.integer.items())[:MOST_KERNELS])
    return f"{text}; {most}" if most else text


def _float_kernels(kernels: Kernels | None) -> str | None:
    """Describe the operators that compute in float, by type; None if nothing was planned or counted."""
    if kernels is None or kernels.skipped or not kernels.planned:
        return None
    counts = kernels.floating
    named = [f"{op} {count}" for op, count in list(counts.items())[:MOST_FLOAT_KERNELS]]
    others = len(counts) - len(named)
    return ", ".join(named) + (f", {others} more types" if others else "") if named else "none"


def float_weights(kernels: Kernels) -> str:
    """Return the float ops that read weights, if they are at least `NAMED` of all weights: ``LSTM 96 %``."""
    left = kernels.float_weights
    total = sum(left.values()) / (1 - kernels.weights_in_integers) if left else 0.0
    named = [f"{op} {percent(count / total)}" for op, count in left.items() if count >= NAMED * total]
    return ", ".join(named[:MOST_KERNELS])


def _levels(metrics: Comparison) -> str | None:
    """Describe the agreement of onnxruntime's optimization levels, and the CPU's 8-bit products."""
    rows = metrics.levels
    if not rows:
        return None
    least = min(row.off_db for row in rows)
    agree = "agree" if least == math.inf else f"agree to {least:.1f} dB"
    products = "exact" if metrics.dot_product else "saturating"
    feeds = rows[0].feeds
    return f"{agree} ({feeds} feed{'s' * (feeds != 1)}, {products} 8-bit products)"


def show_tuning(printer: Printer, tuning: LatencyTuning | None) -> None:
    """Show the files that TUNE measured; nothing without."""
    if tuning is None:
        return
    printer.table(
        f"tuning: times over the best file before, in {tuning.runtime}",
        ("trial", "time", "interval", ""),
        [
            (
                trial.what,
                "–" if trial.ratio is None else f"{trial.ratio:.3f}",
                "–" if trial.interval is None else "{:.3f} to {:.3f}".format(*trial.interval),
                "kept" if trial.kept else trial.why,
            )
            for trial in tuning.trials
        ],
    )


def show_search(printer: Printer, search: SearchFigures | None) -> None:
    """Show the steps, the measured choices of widths and the Pareto front; nothing without a search."""
    if search is None:
        return
    rows: list[tuple[str, ScoreFigures | None, float | None, str]] = []
    if search.plain is not None:
        rows.append(("plain recipe", search.plain, None, ""))
    rows += [(step.what, step.score, step.gain_db, "kept" if step.kept else step.why or "off") for step in search.steps]
    printer.table(
        f"search steps, evaluated on {search.judged_on} feeds{' held out' if search.held_out else ''}",
        ("step", "SQNR dB", "classes changed", "gain dB", ""),
        [
            (what, score and score.sqnr_db, percent(None if score is None else score.changed), gain, result)
            for what, score, gain, result in rows
        ],
    )
    mixed = search.mixed
    if mixed is None:
        return
    printer.table(
        f"widths, cost in {mixed.unit} for {mixed.target}",
        ("choice", "cost", "widths", "SQNR dB", "loss", ""),
        [
            (
                choice.what,
                choice.cost,
                ", ".join(f"{count} x {name}" for name, count in choice.widths.items()),
                choice.score.sqnr_db,
                choice.score.loss,
                "kept" if choice.kept else "",
            )
            for choice in mixed.tried
        ],
    )
    stride = max(1, -(-len(mixed.front) // FRONT_POINTS))
    printer.table(
        "Pareto front: cost, and the sum of the isolated errors of the layers (energy)",
        (mixed.unit, "predicted loss"),
        mixed.front[::stride],
    )

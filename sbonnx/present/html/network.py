"""View model of one quantized network, built from its report."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sbonnx.present.html import formatting
from sbonnx.present.html.formatting import text
from sbonnx.present.html.graph_view import GraphView, graph_view, kind_of
from sbonnx.present.html.layer_views import Layers, layers_of
from sbonnx.present.html.pruning import PruningView, pruning_view
from sbonnx.present.text.tables import runtime_rows
from sbonnx.report.codes import Note, Refusal, by_code
from sbonnx.report.comparison import Comparison, Portability
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.report.details import Details
from sbonnx.report.figures import Evaluation, FigureName, Kernels, LevelDifference, OutputDifference, QualityFigure
from sbonnx.report.outcome import QuantizedTensor, Report
from sbonnx.report.searched import Cause, SearchFigures, python_call
from sbonnx.report.verdict import (
    AS_LARGE,
    ON_CPU,
    Tone,
    Verdict,
    figure_text,
    interval_text,
    kept_text,
    loss_text,
    lost_text,
    speed_parts,
    state_text,
)

PLACES: Final = 1500
"""Maximum number of node names listed for all refusals, and for all patterns; the rest are counted."""

ALL_ROWS: Final = 4000
"""Maximum number of layer rows on a page of one network, for speed; the JSON has all layers."""

FP8: Final = "fp8"

ROLE_NAMES: Final = {"activation": "activations", "weight": "weights", "bias": "biases"}


@dataclass(frozen=True)
class Figure:
    """A headline figure: name, value as text, and one more line."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True)
class NextStep:
    """Something to do: in words, and the command or options; "" without."""

    text: str
    command: str = ""


@dataclass(frozen=True)
class PlaceGroup:
    """Occurrences of one action or refusal with reasons of the same code: count, and the first places.

    Attributes:
        what, code: of all.
        why: the first reason.
        reasons: number of different ones.
    """

    what: str
    why: str
    code: str
    reasons: int
    count: int
    where: tuple[str, ...]

    @property
    def further(self) -> int:
        return self.count - len(self.where)


@dataclass(frozen=True)
class PlaceGroups:
    """The most frequent groups, the total number of groups, and the total number of occurrences."""

    rows: tuple[PlaceGroup, ...]
    total: int
    times: int


@dataclass(frozen=True)
class NoteKind:
    """A note, and the others of its code."""

    text: str
    others: tuple[str, ...]


@dataclass(frozen=True)
class OutputRow:
    """Errors of an output; its state, and its figures with their limits, as texts."""

    error: OutputDifference
    state: str
    figures: str


@dataclass(frozen=True)
class RuntimeTable:
    """Outputs of the file in several runtimes.

    Attributes:
        tone, text: verdict in one sentence.
        reference: runtime that the others are compared with.
        columns, rows: display texts.
    """

    tone: Tone
    text: str
    reference: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def _runtime_table(result: Portability | None) -> RuntimeTable | None:
    if result is None:
        return None
    columns, rows = runtime_rows(result)
    tone: Tone = "good" if result.portable else "bad" if result.problems() else "idle"
    texts = tuple(tuple(text("" if cell is None else cell) for cell in row) for row in rows)
    return RuntimeTable(tone, result.text, result.reference, columns, texts)


@dataclass(frozen=True)
class Network:
    """View model of one quantized network, for the template.

    Attributes:
        model, output, backend, bits: display texts.
        ok, problems: see `sbonnx.report.Report`.
        verdict: accuracy, speed and size in one sentence.
        steps: what to do next.
        causes: why the worst layers lose what they lose.
        notes: kinds of notes, each with its notes.
        headline: figures at the top of the page.
        outputs: errors of the outputs, and what they prove.
        pruning: None without pruning.
        levels: errors by optimization level.
        runtimes: outputs in several runtimes; None if the file ran in none but its own.
        kernels: (name, text) of the integer kernels.
        layers: see `Layers`.
        graph: None if the report has no details.
        refused, applied: grouped refusals and patterns.
        settings: (key, value), flat.
        search: results of the recipe search; None without a search.
        counts: (name, text).
    """

    model: str
    output: str
    backend: str
    bits: str
    ok: bool
    problems: tuple[str, ...]
    verdict: Verdict
    steps: tuple[NextStep, ...]
    causes: tuple[Cause, ...]
    notes: tuple[NoteKind, ...]
    headline: tuple[Figure, ...]
    outputs: tuple[OutputRow, ...]
    pruning: PruningView | None
    levels: tuple[LevelDifference, ...]
    runtimes: RuntimeTable | None
    kernels: tuple[tuple[str, str], ...]
    layers: Layers
    graph: GraphView | None
    refused: PlaceGroups
    applied: PlaceGroups
    settings: tuple[tuple[str, str], ...]
    search: SearchFigures | None
    counts: tuple[tuple[str, str], ...]


def network_of(
    report: Report,
    *,
    rows: int = ALL_ROWS,
    places: int = PLACES,
    without: frozenset[tuple[str, str]] = frozenset(),
) -> Network:
    """Build the view of one report.

    Args:
        rows, places: maximum number of listed layers, and of listed places of refusals and of patterns.
        without: settings that are shown elsewhere.
    """
    applied = [(text(row.pattern), "", "", text(row.node)) for row in report.applied]
    notes = [*report.notes, *(report.details.notes if report.details else ())]
    metrics = report.metrics or Comparison()
    return Network(
        model=formatting.address(report.model),
        output=formatting.address(report.output),
        backend=text(report.backend),
        bits=bits_of(report),
        ok=report.ok,
        problems=tuple(map(text, report.problems)),
        verdict=report.verdict,
        steps=tuple(_steps(report)),
        causes=tuple(
            replace(row, command=formatting.address(row.command or python_call(row.overrides))) for row in report.causes
        ),
        notes=_note_kinds(notes),
        headline=tuple(_headline(report)),
        outputs=tuple(_output_rows(metrics)),
        pruning=pruning_view(report.pruning),
        levels=metrics.levels,
        runtimes=_runtime_table(report.portability),
        kernels=tuple(_kernels(metrics.kernels)) if is_own_runtime(report) else (),
        layers=layers_of(report, rows),
        graph=None if report.details is None else graph_view(report.details),
        refused=_grouped([_place(row) for row in report.refusals], places),
        applied=_grouped(applied, places),
        settings=tuple(pair for pair in formatting.flat(report.settings) if pair not in without),
        search=report.search,
        counts=tuple((name, formatting.count(value)) for name, value in vars(report.counts).items() if value),
    )


@dataclass(frozen=True)
class GraphPage:
    """View model of the page of a graph; see `Network` for its fields."""

    headline: tuple[Figure, ...]
    graph: GraphView | None
    layers: Layers
    refused: PlaceGroups
    notes: tuple[NoteKind, ...]


def graph_page_of(details: Details, notes: Sequence[Note], refusals: Iterable[Refusal]) -> GraphPage:
    """Build the view of details, of more notes and of what was not done."""
    sites: dict[tuple[str, str], QuantizedTensor] = {}
    for node in details.nodes:
        for row in node.reads:
            site = QuantizedTensor(row.tensor, row.role, row.label, row.bits, node.name)
            sites.setdefault((row.role, row.tensor), site)
    graph = graph_view(details)
    counts = Counter(role for role, _ in sites)
    named = ", ".join(f"{formatting.count(counts[role])} {name}" for role, name in ROLE_NAMES.items() if counts[role])
    operators = {node.op for node in details.nodes}
    headline = [Figure("Nodes", formatting.count(len(details.nodes)), f"{len(operators)} operators")]
    if graph is not None:
        headline.append(Figure("In integers", formatting.count(graph.quantized), named))
        headline.append(Figure("Stay float", formatting.count(graph.floats), _float_reasons(details)))
    return GraphPage(
        headline=tuple(headline),
        graph=graph,
        layers=layers_of(Report("", None, "", sites=tuple(sites.values()), details=details), ALL_ROWS),
        refused=_grouped([_place(row) for row in refusals], PLACES),
        notes=_note_kinds([*details.notes, *notes]),
    )


def _float_reasons(details: Details) -> str:
    """Return the two most frequent reasons, by their codes."""
    codes = Counter(code for node in details.nodes if kind_of(node) == "float" for code in node.codes)
    return ", ".join(f"{formatting.count(times)} {code}" for code, times in codes.most_common(2)) or "none"


def _note_kinds(notes: Iterable[Note]) -> tuple[NoteKind, ...]:
    return tuple(NoteKind(text(first), tuple(map(text, others))) for first, *others in by_code(notes))


def _place(refusal: Refusal) -> _Row:
    return text(refusal.what), text(refusal.code), text(refusal.why), text(refusal.where)


def bits_of(report: Report) -> str:
    """Format weight and activation widths: ``w8a8``, ``w3-8a8`` if layers differ, ``fp8``; "" if unknown."""
    if not report.settings:
        return ""
    weights, activations = _width(report, "W", "weight"), _width(report, "A", "activation")
    if weights == activations == FP8:
        return FP8
    if report.settings.get("MODE") == "weight_only" or not activations:
        return f"w{weights}" if weights else ""
    return f"w{weights}a{activations}"


def _width(report: Report, side: str, role: str) -> str:
    """Return the width of one side: the range of the chosen widths, or the one of the recipe."""
    values = dict(formatting.flat(report.settings))
    if values.get(f"{side}.QUANTIZER.DTYPE") == FP8:
        return FP8
    chosen = {site.bits for site in report.sites if site.role == role}
    if not chosen and report.search is not None and report.search.mixed is not None:
        mixed = report.search.mixed
        chosen = {*(mixed.weights if role == "weight" else mixed.activations).values()}
    if len(chosen) > 1:
        return f"{min(chosen)}-{max(chosen)}"
    return values.get(f"{side}.QUANTIZER.BIT", "")


def least(values: Iterable[float | None]) -> float | None:
    """Return the lowest value; None if there is none."""
    return min((value for value in values if value is not None), default=None)


def _steps(report: Report) -> Iterable[NextStep]:
    """Yield what to do: a change that was tried, else the one for the worst layer; then how the file is used."""
    advice, verdict = report.advice, report.verdict
    if advice is not None:
        yield NextStep(text(advice.text), formatting.address(advice.command or python_call(advice.overrides)))
    elif verdict.too_few:
        yield NextStep("compare on more samples: the figures are near float, and too few samples to prove it")
    elif verdict.repairable:
        if report.pruning is not None:
            yield NextStep(
                "prune less, or train the remaining weights", "" if report.pruning.tuned else "--finetune 40"
            )
        cause = next((cause for cause in report.causes if cause.gain_db is None), None)  # others gain too little
        if cause is not None:
            node = text(cause.node)
            place = f"layer '{node}'" if cause.role == "weight" else f"'{text(cause.tensor)}', input of '{node}'"
            what = f"try, {cause.measured}: {text(cause.remedy)} ({place})"
            yield NextStep(what, formatting.address(cause.command or python_call(cause.overrides)))
    if report.engine_command:
        yield NextStep("build the engine", formatting.address(report.engine_command))


def _output_rows(metrics: Comparison) -> Iterable[OutputRow]:
    quality, several = {row.name: row for row in metrics.quality}, len(metrics.outputs) > 1
    for error in metrics.outputs:
        if error.name not in quality:
            yield OutputRow(error, "", "")
        else:
            row = quality[error.name]
            figures = [figure for figure in row.figures if several or figure.name not in ("SQNR", "agreement")]
            yield OutputRow(error, state_text(row.state, row.decided_by), "; ".join(map(_figure_text, figures)))


def _figure_text(figure: QualityFigure) -> str:
    """Format a figure with its interval and its limits."""
    limits = kept_text(figure.name, figure.kept), lost_text(figure.name, figure.line)
    return ", ".join(filter(None, (figure_text(figure), *limits)))


def _lowest(metrics: Comparison, name: FigureName) -> str:
    """Return the interval of the lowest figure of that name, its limits and the number of samples; "" if unknown."""
    rows = [(figure, row.samples) for row in metrics.quality if (figure := row.figure(name)) is not None]
    if not rows:
        return ""
    figure, samples = min(rows, key=lambda pair: pair[0].value)
    scale = 100 if name == "agreement" else 1
    ends = interval_text(scale * figure.low, scale * figure.high)
    limits = kept_text(name, figure.kept), lost_text(name, figure.line)
    return ", ".join(filter(None, (ends.strip(), *limits, f"{formatting.count(samples)} samples")))


def _evaluation(evaluation: Evaluation | None) -> Iterable[Figure]:
    """Yield the metric of the file on labelled data, beside that of the float model."""
    if evaluation is None or len(evaluation.rows) < 2:
        return
    first, second = evaluation.rows[:2]
    value, before = (formatting.plain(row.metric.value, 4) for row in (second, first))
    samples = formatting.count(evaluation.samples)
    yield Figure(text(evaluation.metric), value, f"float {before}, {loss_text(evaluation)}, {samples} samples")


def decoder_figures(figures: DecoderEvaluation | None) -> Iterable[Figure]:
    """Yield the figures of a decoder beside those of float."""
    if figures is None:
        return
    before = f"float {formatting.plain(figures.float_perplexity)}, " if figures.float_perplexity else ""
    tokens = f"{before}{formatting.count(figures.tokens)} tokens"
    yield Figure("Perplexity", formatting.plain(figures.perplexity), tokens)
    if figures.agreement is not None:
        more = f"as float, KL {formatting.plain(figures.kl, 3)} nats"
        yield Figure("Same top token", formatting.percent(figures.agreement), more)
    yield from _size(*figures.bytes)
    for row in figures.speed[:1]:
        threads = f"{formatting.count(row.threads)} thread{'s' * (row.threads != 1)}"
        where = f"{threads}, prompt of {formatting.count(row.prompt)} tokens"
        if row.float_tokens_per_second:
            where = f"float {formatting.count(row.float_tokens_per_second)}, {where}"
        if row.ratio is not None:
            low, high = row.ratio_interval or (math.nan, math.nan)
            _, value, ends = speed_parts(row.ratio, low, high, busy=row.busy)
            where = f"{where}; {value}{ends}"
        yield Figure("Tokens a second", formatting.count(row.tokens_per_second), where)


def _headline(report: Report) -> Iterable[Figure]:
    """Yield the figures of the headline, the metric that was asked for first."""
    metrics = report.metrics or Comparison()
    for own in metrics.own or ():
        yield Figure(text(own.name), formatting.plain(own.quantized), f"float {formatting.plain(own.float)}")
    yield from _evaluation(metrics.evaluation)
    sqnr, agreement = (
        least(row.sqnr_db for row in metrics.outputs),
        least(row.agreement for row in metrics.outputs),
    )
    count = len(metrics.outputs)
    several = f"worst of {count} outputs" if count > 1 else ""
    if sqnr is not None:
        more = ", ".join(filter(None, (several, _lowest(metrics, "SQNR"))))
        yield Figure("SQNR", f"{formatting.decibel(sqnr)} dB", more or "signal to noise of the output")
    if agreement is not None:
        more = ", ".join(filter(None, ("same class as float", several, _lowest(metrics, "agreement"))))
        yield Figure("Agreement", formatting.percent(agreement), more)
    yield from decoder_figures(metrics.llm)
    yield from _size(metrics.bytes_float, metrics.bytes_quantized)
    if metrics.latency_ratio is not None and is_own_runtime(report):
        low, high = metrics.latency_interval or (math.nan, math.nan)
        _, value, ends = speed_parts(metrics.latency_ratio, low, high, busy=metrics.busy)
        after, before = (formatting.plain(time, 3) for time in (metrics.median_ms_quantized, metrics.median_ms_float))
        yield Figure("Time of a run", value, f"{after} ms, float {before} ms{ends}")
    counts = report.counts
    if counts.nodes_before:
        tensors = counts.activations + counts.weights + counts.biases
        named = f"{formatting.count(counts.activations)} activations, {formatting.count(counts.weights)} weights"
        yield Figure("Quantized", f"{formatting.count(tensors)} tensors", named)


def _size(before: float | None, after: float | None) -> Iterable[Figure]:
    """Yield the size of the file as a factor: ``2.44 times smaller``."""
    if before and after:
        ratio = after / before
        factor = f"{1 / ratio if ratio < 1 else ratio:.3g} times {'smaller' if ratio < 1 else 'larger'}"
        same = AS_LARGE[0] <= ratio <= AS_LARGE[1]
        sizes = f"{formatting.size(after)}, float {formatting.size(before)}"
        yield Figure("Size", "as large as float" if same else factor, sizes)


def is_own_runtime(report: Report) -> bool:
    """Whether latency and kernels are those of the runtime of the file."""
    return report.backend in ("", ON_CPU if report.metrics is None else report.metrics.runtime)


def _kernels(kernels: Kernels | None) -> Iterable[tuple[str, str]]:
    if kernels is None:
        return
    if kernels.skipped:
        yield "not counted", text(kernels.skipped)
        return
    in_integers, planned = formatting.count(kernels.in_integers), formatting.count(kernels.with_kernel)
    yield "planned ops in integers", f"{in_integers} of {planned}"
    yield "weights in integers", formatting.percent(kernels.weights_in_integers)
    for name, counts in (("integer kernels", kernels.integer), ("float kernels", kernels.floating)):
        most = sorted(counts.items(), key=lambda pair: -pair[1])
        if most:
            yield name, ", ".join(f"{text(op)} {times}" for op, times in most)


_Row = tuple[str, str, str, str]
"""Action, code and text of the reason why it was not done, and place."""


def _grouped(rows: Sequence[_Row], places: int) -> PlaceGroups:
    """Group rows by what and code, most frequent first, with at most `places` places in total.

    Each group lists at least one place.
    """
    counts = Counter((what, code) for what, code, _, _ in rows)
    whys: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for what, code, why, _ in rows:
        whys[what, code].setdefault(why)
    most = counts.most_common(places)
    places_a_reason = max(1, places // max(len(most), 1))
    where: dict[tuple[str, str], list[str]] = {key: [] for key, _ in most}
    for what, code, _, place in rows:
        if len(where.get((what, code), range(places_a_reason))) < places_a_reason:
            where[what, code].append(place)
    groups = (
        PlaceGroup(what, next(iter(whys[key])), code, len(whys[key]), times, tuple(where[key]))
        for key, times in most
        for what, code in [key]
    )
    return PlaceGroups(tuple(groups), len(counts), len(rows))

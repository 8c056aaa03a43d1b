"""View model of one quantized network, built from the plain values of its report."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Final

from sbonnx.present.html import formatting
from sbonnx.present.html.formatting import number, text
from sbonnx.present.html.graph_view import GraphView, graph_view
from sbonnx.present.html.layer_views import Layers, layers_of
from sbonnx.report.codes import Note, Refusal, by_code
from sbonnx.report.verdict import (
    Verdict,
    allowed_loss,
    figure_text,
    interval_text,
    kept_text,
    latency_text,
    lost_text,
    runtime_of,
    state_text,
    verdict_of,
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
class PropertyRow:
    """One property of the float and the quantized model, as texts."""

    name: str
    float_: str
    quantized: str
    ratio: str


@dataclass(frozen=True)
class PlaceGroup:
    """Occurrences of one action or refusal with the same reason: count, and the first places."""

    what: str
    why: str
    code: str
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
class Network:
    """View model of one quantized network, for the template.

    Attributes:
        model, output, backend, bits: display texts.
        ok, problems: see `sbonnx.report.Report`.
        verdict: accuracy, speed and size in one sentence.
        following: the next command; "" without one.
        notes: kinds of notes, each with its notes.
        headline: figures at the top of the page.
        pairs: properties of float and quantized model.
        outputs, levels: rows of the comparison, as in the report.
        kernels: (name, text) of the integer kernels.
        layers: see `Layers`.
        graph: None if the report has no details.
        refused, applied: grouped refusals and patterns.
        settings: (key, value), flat.
        search: results of the recipe search, as in the report; {} without a search.
        counts: (name, text).
    """

    model: str
    output: str
    backend: str
    bits: str
    ok: bool
    problems: tuple[str, ...]
    verdict: Verdict
    following: str
    notes: tuple[NoteKind, ...]
    headline: tuple[Figure, ...]
    pairs: tuple[PropertyRow, ...]
    outputs: tuple[Mapping[str, Any], ...]
    levels: tuple[Mapping[str, Any], ...]
    kernels: tuple[tuple[str, str], ...]
    layers: Layers
    graph: GraphView | None
    refused: PlaceGroups
    applied: PlaceGroups
    settings: tuple[tuple[str, str], ...]
    search: Mapping[str, Any]
    counts: tuple[tuple[str, str], ...]


def network_of(
    report: Mapping[str, Any],
    *,
    rows: int = ALL_ROWS,
    places: int = PLACES,
    without: frozenset[tuple[str, str]] = frozenset(),
) -> Network:
    """Build the view of one report.

    Args:
        report: `sbonnx.report.Report.to_dict`, also after a round trip through JSON.
        rows, places: maximum number of listed layers, and of listed places of refusals and of patterns.
        without: settings that are shown elsewhere.
    """
    metrics = report.get("metrics") or {}
    refusals = [_place(one) for one in _all(report, "refusals")]
    applied = [(text(one.get("pattern")), "", "", text(one.get("node"))) for one in _all(report, "applied")]
    return Network(
        model=formatting.address(report.get("model")),
        output=formatting.address(report.get("output")),
        backend=text(report.get("backend")),
        bits=bits_of(report),
        ok=bool(report.get("ok", not report.get("problems"))),
        problems=tuple(map(text, _all(report, "problems"))),
        verdict=verdict_of(
            metrics,
            problems=[text(one) for one in _all(report, "problems")],
            backend=text(report.get("backend")),
            max_loss=allowed_loss(report.get("settings") or {}),
        ),
        following=formatting.address((report.get("advice") or {}).get("command") or report.get("engine_command")),
        notes=_note_kinds([*_advice(report), *_notes(report), *_notes(report.get("details") or {})]),
        headline=tuple(_headline(report, metrics)),
        pairs=tuple(_pairs(report, metrics)),
        outputs=tuple(_with_quality(metrics)),
        levels=tuple(metrics.get("levels") or ()),
        kernels=tuple(_kernels(metrics.get("kernels"))) if _on_cpu(report) else (),
        layers=layers_of(report, rows),
        graph=graph_view(report.get("details") or {}),
        refused=_grouped(refusals, places),
        applied=_grouped(applied, places),
        settings=tuple(pair for pair in formatting.flat(report.get("settings") or {}) if pair not in without),
        search=report.get("search") or {},
        counts=tuple((text(name), formatting.count(value)) for name, value in (report.get("counts") or {}).items()),
    )


@dataclass(frozen=True)
class GraphPage:
    """View model of the page of a graph; see `Network` for its fields."""

    headline: tuple[Figure, ...]
    graph: GraphView | None
    layers: Layers
    refused: PlaceGroups
    notes: tuple[NoteKind, ...]


def graph_page_of(details: Mapping[str, Any], notes: Sequence[Note], refusals: Iterable[Refusal]) -> GraphPage:
    """Build the view of `sbonnx.profile.Details.to_dict`, of more notes and of what was not done."""
    nodes = details.get("nodes") or ()
    sites: dict[tuple[str, str], Mapping[str, Any]] = {}
    for node in nodes:
        for read in node.get("reads") or ():
            sites.setdefault((text(read.get("role")), text(read.get("tensor"))), {**read, "node": node.get("name")})
    graph = graph_view(details)
    counts = Counter(role for role, _ in sites)
    named = ", ".join(f"{formatting.count(counts[role])} {name}" for role, name in ROLE_NAMES.items() if counts[role])
    headline = [Figure("Nodes", formatting.count(len(nodes)), f"{len({node.get('op') for node in nodes})} operators")]
    if graph is not None:
        headline.append(Figure("With quantized inputs", formatting.count(graph.quantized), named))
        headline.append(Figure("With something not done", formatting.count(graph.refused), _see(graph)))
    return GraphPage(
        headline=tuple(headline),
        graph=graph,
        layers=layers_of({"details": details, "sites": tuple(sites.values())}, ALL_ROWS),
        refused=_grouped([(row.what, row.code, row.why, row.where) for row in refusals], PLACES),
        notes=_note_kinds([*_notes(details), *notes]),
    )


def _see(graph: GraphView) -> str:
    return "see the reasons below" if graph.refused else "nothing was refused"


def _note_kinds(notes: Iterable[Note]) -> tuple[NoteKind, ...]:
    return tuple(NoteKind(text(first), tuple(map(text, others))) for first, *others in by_code(notes))


def _notes(values: Mapping[str, Any]) -> Iterator[Note]:
    """Yield the notes of a report or its details; without a code, each is of its own kind."""
    notes = _all(values, "notes")
    for note, code in zip_longest(notes, _all(values, "note_codes")[: len(notes)]):
        yield Note(text(code or note), text(note))


def _place(refusal: Mapping[str, Any]) -> _Row:
    what, why, where = (text(refusal.get(key)) for key in ("what", "why", "where"))
    return what, text(refusal.get("code") or why), why, where


def _all(report: Mapping[str, Any], key: str) -> Sequence[Any]:
    return report.get(key) or ()


def bits_of(report: Mapping[str, Any]) -> str:
    """Format weight and activation widths: ``w8a8``, ``w3-8a8`` if layers differ, ``fp8``; "" if unknown."""
    settings = report.get("settings") or {}
    if not settings:
        return ""
    weights, activations = _width(report, "W", "weight"), _width(report, "A", "activation")
    if weights == activations == FP8:
        return FP8
    if settings.get("MODE") == "weight_only" or not activations:
        return f"w{weights}" if weights else ""
    return f"w{weights}a{activations}"


def _width(report: Mapping[str, Any], side: str, role: str) -> str:
    """Return the width of one side: the range of the chosen widths, or the one of the recipe."""
    quantizer = (report["settings"].get(side) or {}).get("QUANTIZER") or {}
    if quantizer.get("DTYPE") == FP8:
        return FP8
    sites = [number(site.get("bits")) for site in report.get("sites") or () if site.get("role") == role]
    mixed = (report.get("search") or {}).get("mixed") or {}
    chosen = sites or [number(width) for width in (mixed.get(f"{role}s") or {}).values()]
    widths = sorted({int(width) for width in chosen if width is not None and math.isfinite(width)})
    if len(widths) > 1:
        return f"{widths[0]}-{widths[-1]}"
    return text(quantizer.get("BIT"))


def least(outputs: Iterable[Mapping[str, Any]], key: str) -> float | None:
    """Return the lowest value over all outputs; None if no output has it."""
    found = [value for value in (number(row.get(key)) for row in outputs) if value is not None]
    return min(found) if found else None


def _advice(report: Mapping[str, Any]) -> Iterable[Note]:
    advice = report.get("advice") or {}
    if advice:
        change = advice.get("command") or " ".join(advice["overrides"])
        yield Note(
            "advice", text(f"advice: {advice.get('text')}: {change}" if change else f"advice: {advice.get('text')}")
        )


def _with_quality(metrics: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    """Yield the rows of the outputs with their "state" and "figures", a text with the limits."""
    quality = {row.get("name"): row for row in metrics.get("quality") or ()}
    for output in metrics.get("outputs") or ():
        row = quality.get(output.get("name")) or {}
        figures = "; ".join(map(_figure_text, row.get("figures") or ()))
        yield {**output, "state": state_text(row.get("state"), row.get("decided_by")), "figures": figures}


def _figure_text(figure: Mapping[str, Any]) -> str:
    """Format a figure of `sbonnx.verify.quality` with its interval and its limits."""
    name, text_ = text(figure.get("name")), figure_text(figure)
    limits = kept_text(name, number(figure.get("kept"))), lost_text(name, number(figure.get("line")))
    return ", ".join(filter(None, (text_, *limits)))


def _agreement_range(metrics: Mapping[str, Any]) -> str:
    """Return the 95 % interval of the lowest agreement, and the number of samples; "" if they are unknown."""
    rows = [
        (figure, row.get("samples"))
        for row in metrics.get("quality") or ()
        for figure in row.get("figures") or ()
        if figure.get("name") == "agreement"
    ]
    if not rows:
        return ""
    figure, samples = min(rows, key=lambda pair: number(pair[0].get("value")) or 0.0)
    low, high = (number(figure.get(key)) for key in ("low", "high"))
    ends = "" if low is None or high is None else interval_text(100 * low, 100 * high)
    return f"{ends}, {formatting.count(samples)} samples"


def _evaluation(evaluation: Mapping[str, Any]) -> Iterable[Figure]:
    """Yield the metric of the file on labelled data, beside that of the float model."""
    rows: Sequence[Any] = evaluation.get("rows") or ()
    if len(rows) < 2:
        return
    value, before = (formatting.plain(row["metric"]["value"], 4) for row in (rows[1], rows[0]))
    difference = rows[1].get("difference") or {}
    change, low, high = (number(difference.get(key)) for key in ("value", "low", "high"))
    known = low is not None and high is not None and interval_text(low, high)
    ends = f" ({formatting.plain(low, 3)} to {formatting.plain(high, 3)})" if known else ""
    samples = formatting.count(evaluation["samples"])
    where = f"float {before}, difference {formatting.plain(change, 3)}{ends}, {samples} samples"
    yield Figure(text(evaluation["metric"]), value, where)


def decoder_figures(figures: Mapping[str, Any]) -> Iterable[Figure]:
    """Yield the figures of a decoder beside those of float."""
    if not figures:
        return
    before = f"float {formatting.plain(figures['float_perplexity'])}, " if figures.get("float_perplexity") else ""
    yield Figure(
        "Perplexity",
        formatting.plain(figures["perplexity"]),
        f"{before}{formatting.count(figures.get('tokens'))} tokens",
    )
    if figures.get("agreement") is not None:
        more = f"as float, KL {formatting.plain(figures.get('kl'), 3)} nats"
        yield Figure("Same top token", formatting.percent(figures["agreement"]), more)
    size_float, size = figures.get("bytes") or (None, None)
    if size_float and size:
        sizes = f"{formatting.size(size_float)} → {formatting.size(size)}"
        yield Figure("Size", _factor(size / size_float, "smaller", "larger"), sizes)
    for row in tuple(figures.get("speed") or ())[:1]:
        where = f"{formatting.count(row['threads'])} threads, prompt of {formatting.count(row['prompt'])}"
        if row.get("float_tokens_per_second"):
            where = f"float {formatting.plain(row['float_tokens_per_second'], 3)}, {where}"
        if row.get("ratio") is not None:
            low, high = row.get("ratio_interval") or (math.nan, math.nan)
            text_ = latency_text(float(row["ratio"]), float(low), float(high), busy=bool(row.get("busy")))
            where = f"{where}, {text_} of its time a token"
        yield Figure("Tokens a second", formatting.plain(row["tokens_per_second"], 3), where)


def _headline(report: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterable[Figure]:
    outputs = metrics.get("outputs") or ()
    sqnr, agreement = least(outputs, "sqnr_db"), least(outputs, "agreement")
    several = f"worst of {len(outputs)} outputs" if len(outputs) > 1 else "signal to noise of the output"
    if sqnr is not None:
        yield Figure("SQNR", f"{formatting.decibel(sqnr)} dB", several)
    if agreement is not None:
        yield Figure("Agreement", formatting.percent(agreement), f"same class as float{_agreement_range(metrics)}")
    yield from _evaluation(metrics.get("evaluation") or {})
    yield from decoder_figures(metrics.get("llm") or {})
    if metrics.get("size_ratio") is not None:
        sizes = f"{formatting.size(metrics.get('bytes_float'))} → {formatting.size(metrics.get('bytes_quantized'))}"
        yield Figure("Size", _factor(metrics["size_ratio"], "smaller", "larger"), sizes)
    if metrics.get("latency_ratio") is not None and _on_cpu(report):
        times = " → ".join(formatting.plain(metrics.get(f"median_ms_{side}"), 3) for side in ("float", "quantized"))
        low, high = (number(end) or math.nan for end in metrics.get("latency_interval") or (None, None))
        share = latency_text(float(metrics["latency_ratio"]), low, high, busy=bool(metrics.get("busy")))
        yield Figure("Time of a run", f"{share} of float", f"{times} ms")
    counts = report.get("counts") or {}
    if "weights" in counts:
        tensors = sum(int(counts.get(role, 0)) for role in ("activations", "weights", "biases"))
        named = ", ".join(f"{formatting.count(counts.get(role, 0))} {role}" for role in ("activations", "weights"))
        yield Figure("Quantized", f"{formatting.count(tensors)} tensors", named)


def _factor(ratio: Any, less: str, more: str) -> str:
    """Format a ratio to float as a factor: ``2.44 × smaller``."""
    value = number(ratio)
    if value is None or not value > 0:
        return ""
    return f"{formatting.ratio(1 / value)} × {less}" if value < 1 else f"{formatting.ratio(value)} × {more}"


def _on_cpu(report: Mapping[str, Any]) -> bool:
    """Whether latency and kernels are those of the runtime of the file."""
    return text(report.get("backend")) in (runtime_of(report.get("metrics") or {}), "")


def _pairs(report: Mapping[str, Any], metrics: Mapping[str, Any]) -> Iterable[PropertyRow]:
    counts = report.get("counts") or {}
    if counts.get("nodes_before") is not None:
        before, after = counts["nodes_before"], counts.get("nodes_quantized")
        yield PropertyRow("nodes", formatting.count(before), formatting.count(after), "")
    if metrics.get("bytes_float") is not None:
        sizes = (formatting.size(metrics.get(f"bytes_{side}")) for side in ("float", "quantized"))
        yield PropertyRow("size of the file", next(sizes), next(sizes), formatting.ratio(metrics.get("size_ratio")))
    for name, key in (("time of a run, median", "median_ms"), ("time of a run, best", "ms")) if _on_cpu(report) else ():
        pair = [number(metrics.get(f"{key}_{side}")) for side in ("float", "quantized")]
        if pair[0] is not None and pair[1] is not None:
            share = metrics.get("latency_ratio") if key == "median_ms" else pair[1] / pair[0] if pair[0] else None
            texts = [f"{formatting.plain(value, 3)} ms" for value in pair]
            yield PropertyRow(name, texts[0], texts[1], formatting.ratio(share))
    for own in metrics.get("own") or ():
        float_, quantized = number(own.get("float")), number(own.get("quantized"))
        share = quantized / float_ if quantized is not None and float_ else None
        yield PropertyRow(
            f"metric {text(own.get('name'))}",
            formatting.plain(float_),
            formatting.plain(quantized),
            formatting.fixed(share, 3),
        )


def _kernels(kernels: Mapping[str, Any] | None) -> Iterable[tuple[str, str]]:
    if not kernels:
        return
    if kernels.get("skipped"):
        yield "not counted", text(kernels["skipped"])
        return
    planned = (number(kernels.get("planned")) or 0) - (number(kernels.get("folded")) or 0)
    yield "planned ops in integers", f"{formatting.count(kernels.get('in_integers'))} of {formatting.count(planned)}"
    if kernels.get("weights_in_integers") is not None:
        yield "weights in integers", formatting.percent(kernels["weights_in_integers"])
    for name, key in (("integer kernels", "integer"), ("float kernels", "floating")):
        most = sorted((kernels.get(key) or {}).items(), key=lambda pair: -pair[1])
        if most:
            yield name, ", ".join(f"{text(op)} {times}" for op, times in most)


_Row = tuple[str, str, str, str]
"""Action, code and text of the reason why it was not done, and place."""


def _grouped(rows: Sequence[_Row], places: int) -> PlaceGroups:
    """Group rows by what and code, most frequent first, with at most `places` places in total.

    Each group lists at least one place.
    """
    counts = Counter((what, code) for what, code, _, _ in rows)
    first = {(what, code): why for what, code, why, _ in reversed(rows)}
    most = counts.most_common(places)
    each = max(1, places // max(len(most), 1))
    where: dict[tuple[str, str], list[str]] = {key: [] for key, _ in most}
    for what, code, _, place in rows:
        if len(where.get((what, code), range(each))) < each:
            where[what, code].append(place)
    groups = (
        PlaceGroup(what, first[what, code], code, times, tuple(where[what, code])) for (what, code), times in most
    )
    return PlaceGroups(tuple(groups), len(counts), len(rows))

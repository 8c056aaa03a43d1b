"""One sentence about a result: accuracy, speed and size against float. Built from the figures of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal, NamedTuple

from sbonnx.system.terminal import number_text

if TYPE_CHECKING:
    from sbonnx.report.codes import Problem
    from sbonnx.report.comparison import Comparison
    from sbonnx.report.decoder import DecoderEvaluation
    from sbonnx.report.figures import Evaluation, MetricValue, OutputQuality, QualityFigure

Accuracy = Literal["kept", "lost", "uncertain", "doubtful", "unknown"]

OutputState = Literal["kept", "lost", "uncertain", "unjudged"]
"""State that the figures of one output prove, see `sbonnx.verify.quality.judge`."""

Tone = Literal["good", "warn", "bad", "idle"]

Mark = Literal["ok", "=", "??", "!!", "XX"]
"""Good, no difference, unclear, not wanted, bad."""

LOWER_IS_BETTER: Final = frozenset({"KL", "relative error"})
"""Figures of `sbonnx.verify.quality` of which less is better."""

SHARES: Final = frozenset({"agreement", "equal values", "detection overlap", "same shape", "relative error"})
"""Figures that are printed in percent."""

AS_FAST: Final = (0.95, 1.05)
"""Latency ratios of a model that is as fast as float."""

WIDE: Final = 2.0
"""Factor between the ends of an interval of times from which on those of a busy machine say nothing."""

AS_LARGE: Final = (0.95, 1.05)
"""Size ratios of a file that has about the size of the float one, and is no gain in size."""

CLOSE_LOSS: Final = 0.01
"""Loss in a metric on labelled data up to which accuracy is kept: the 99 % of float that MLPerf inference requires."""

LOST_LOSS: Final = 0.1
"""Increase of the perplexity, relative to float, from which accuracy is lost."""

ENOUGH_LABELS: Final = 6
"""Number of labelled samples from which the interval of a loss proves something."""

COLLAPSED_DB: Final = 3.0
"""Signal-to-noise ratio in dB below which an output is considered lost."""

BUSY: Final = "the machine is busy"

ON_CPU: Final = "onnxruntime"
"""Backend whose runtime executes files if no other does."""

WITHOUT_ERROR: Final = frozenset({"state", "detections", "labels"})
"""Natures of outputs whose values cannot be compared by their error: nobody reads them, their rows cannot be matched,
or they are numbers of something."""

MARKS: Final[Mapping[str, Mark]] = {"kept": "ok", "lost": "XX", "uncertain": "??", "unknown": "??"}
"""Mark of the accuracy by its state."""

NOT_COMPARED: Final = "nothing was compared with float"

MEASURE: Final = "measure it on labelled data (--eval)"


@dataclass(frozen=True)
class VerdictRow:
    """One clause of a verdict, and its mark."""

    mark: Mark
    text: str


@dataclass(frozen=True)
class Verdict:
    """Summary of a result.

    Attributes:
        accuracy: "kept": the metric on labelled data, or without one each output, is close to float, with its 95 %
            interval; "lost": it is not, with its interval, or an output is unusable; "uncertain": in between, or
            measured on too few samples; "doubtful": the data does not look like that of the model, so figures say
            little; "unknown": nothing was compared.
        rows: data in doubt, accuracy, limits that are missed, speed, size; one clause each.
        ok: whether accuracy is not lost and no limit is missed.
        gained: whether the file is smaller or faster than float, or it is not known.
        too_few: whether the accuracy is uncertain for too few samples alone: the figures themselves are near float.
    """

    json_keys: ClassVar = ("accuracy", "text")
    accuracy: Accuracy
    rows: tuple[VerdictRow, ...]
    ok: bool
    gained: bool = True
    too_few: bool = False

    @property
    def repairable(self) -> bool:
        """Whether accuracy is, or may be, lost by the quantization, so that a change of it may help."""
        return self.accuracy in ("lost", "uncertain") and not self.too_few

    @property
    def clauses(self) -> tuple[str, ...]:
        """The texts of the rows."""
        return tuple(row.text for row in self.rows)

    @property
    def text(self) -> str:
        """The sentence."""
        text = "; ".join(self.clauses)
        return f"{text[:1].upper()}{text[1:]}."

    @property
    def tone(self) -> Tone:
        """Colour of the sentence."""
        if self.accuracy == "doubtful":
            return "warn"
        if not self.ok:
            return "bad"
        if self.accuracy == "unknown":
            return "idle"
        return "good" if self.accuracy == "kept" and self.gained else "warn"


def verdict_of(
    metrics: Comparison | None,
    *,
    problems: Sequence[Problem] = (),
    backend: str = ON_CPU,
) -> Verdict:
    """Summarize a comparison with float.

    Accuracy is that of the task metric if labelled data was evaluated, or the perplexity of a decoder; else of the
    output that is furthest from float.

    Args:
        metrics: the comparison; None: nothing was compared.
        problems: those of the report.
        backend: runtime of the file. The latency in another one is left out.
    """
    missed = [VerdictRow("XX", _first(problems))] if problems else []
    if metrics is None:
        unknown = VerdictRow(MARKS["unknown"], f"accuracy unknown: {NOT_COMPARED}")
        return Verdict("unknown", (unknown, *missed), not problems)
    state, evidence, hint, too_few = _accuracy(metrics, missed=bool(problems))
    doubts = doubts_of(metrics)
    rows: list[VerdictRow] = []
    if doubts:
        rows.append(VerdictRow("??", f"data in doubt: {_first(doubts)}"))
        if state not in ("unknown", "lost"):
            rows.append(VerdictRow("??", f"on this data, {evidence}"))
        state = "doubtful"
    else:
        where = " on the calibration data" if _calibrated(metrics) else ""
        where += f", computed as {metrics.cpu} CPUs compute it" if metrics.saturating else ""
        rows.append(VerdictRow(MARKS[state], f"accuracy {state}{where}: {evidence}{hint}"))
    if state != "lost":
        rows += missed
    gains = [row for row in (_speed(metrics, backend), _size(metrics)) if row is not None]
    gained = not _nothing_gained(metrics, backend)
    if gained:
        rows += gains
    else:
        place = len(rows) if problems or state in ("lost", "doubtful") else 0
        rows.insert(place, VerdictRow("!!", f"nothing gained: {', '.join(row.text for row in reversed(gains))}"))
    return Verdict(state, tuple(rows), not problems and state != "lost", gained, too_few and state == "uncertain")


def _first(sentences: Sequence[str]) -> str:
    """Return the first sentence, and how many more there are."""
    more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
    return f"{sentences[0].rstrip('.')}{more}"


def doubts_of(metrics: Comparison) -> list[str]:
    """Return the sentences about data that does not look like that of the model, or labels that do not fit it."""
    doubts: list[str] = [*metrics.doubts]
    evaluation = metrics.evaluation
    if evaluation is None or not evaluation.rows or evaluation.chance is None:
        return doubts
    metric = evaluation.rows[0].metric
    if metric.low <= evaluation.chance:
        ends = interval_text(metric.low, metric.high)
        doubts.append(
            f"the float model has {evaluation.metric} {_metric_text(metric, evaluation)}{ends}, which guessing may "
            f"have too ({evaluation.chance:.3g}): "
            "check the labels and the preprocessing"
        )
    return doubts


def _calibrated(metrics: Comparison) -> bool:
    """Whether the outputs were compared on the samples of the calibration, and nothing better is known."""
    evaluated = metrics.evaluation is not None and len(metrics.evaluation.rows) > 1
    return metrics.calibrated and not evaluated and metrics.llm is None and metrics.feeds > 0


class _Judged(NamedTuple):
    """State of the accuracy, what was measured, and what it means: a limit, and what to do."""

    state: Accuracy
    evidence: str
    hint: str = ""
    too_few: bool = False


def _accuracy(metrics: Comparison, *, missed: bool) -> _Judged:
    lost = _unusable(metrics)
    if lost:
        return _Judged("lost", lost)
    evaluation = metrics.evaluation
    if evaluation is not None and len(evaluation.rows) > 1:
        max_loss = CLOSE_LOSS if evaluation.max_loss is None else evaluation.max_loss
        state = state_of_metric(evaluation, max_loss)
        hint = f", {kept_loss_text(evaluation, max_loss)}"
        more = ": evaluate more samples" if state == "uncertain" else ""
        return _Judged(state, _evaluated(evaluation), f"{hint}{more}", too_few=evaluation.samples < ENOUGH_LABELS)
    if metrics.llm is not None and metrics.llm.float_perplexity:
        return _of_decoder(metrics.llm, metrics.llm.float_perplexity)
    return _of_outputs(metrics, missed=missed)


def state_of_metric(evaluation: Evaluation, max_loss: float) -> Accuracy:
    """Return the state of a task metric: the interval of the loss is below the limit, above it, or contains it."""
    loss, low, high = _loss(evaluation)
    if math.isnan(loss):
        return "lost"
    if not math.isfinite(low) or not math.isfinite(high) or evaluation.samples < ENOUGH_LABELS:
        return "uncertain"
    return "kept" if high <= max_loss else "lost" if low > max_loss else "uncertain"


def _loss(evaluation: Evaluation) -> tuple[float, float, float]:
    """Return the loss in a task metric and its interval: of shares absolute, else relative to float."""
    first, row = evaluation.rows[:2]
    loss, difference = row.loss, row.difference
    scale = 1.0 if evaluation.share else abs(first.metric.value)
    sign = -1.0 if evaluation.higher_is_better else 1.0
    if difference is None or not scale:
        return loss, math.nan, math.nan
    ends = sorted(sign * end / scale for end in (difference.low, difference.high))
    return loss, min(ends[0], loss), max(ends[1], loss)


def loss_text(evaluation: Evaluation) -> str:
    """Format the change of a task metric with its interval: ``a loss of 2.5 points (1.9 to 3.1)``, or a gain."""
    loss, low, high = (100 * value for value in _loss(evaluation))
    if not math.isfinite(loss):
        return "no loss that is a number"
    word, change, ends = ("gain", -loss, (-high, -low)) if loss < 0 else ("loss", loss, (low, high))
    return f"a {word} of {change:.3g} {_loss_unit(evaluation, change / 100)}{interval_text(*ends)}"


def kept_loss_text(evaluation: Evaluation, limit: float = CLOSE_LOSS) -> str:
    """Format the loss in a task metric up to which accuracy is kept: ``kept up to 1 point``, ``kept up to 4 %``."""
    return f"kept up to {100 * limit:g} {_loss_unit(evaluation, limit)}"


def _loss_unit(evaluation: Evaluation, loss: float) -> str:
    return "%" if not evaluation.share else "point" if math.isclose(loss, 0.01) else "points"


def _of_decoder(figures: DecoderEvaluation, before: float) -> _Judged:
    after = figures.perplexity
    rise = after / before - 1
    state: Accuracy = "kept" if rise <= CLOSE_LOSS else "lost" if not rise < LOST_LOSS else "uncertain"
    limit = f"lost from +{100 * LOST_LOSS:g} % on" if state == "lost" else f"kept up to +{100 * CLOSE_LOSS:g} %"
    agreement = figures.agreement
    same = "" if agreement is None else f", the same top token at {100 * agreement:.1f} % of positions"
    more = ": measure the task that it is for" if state == "uncertain" else ""
    text = f"perplexity {after:.4g}, float {before:.4g} ({100 * rise:+.1f} %) on {figures.tokens:,} tokens"
    return _Judged(state, text, f", {limit}{same}{more}")


def _of_outputs(metrics: Comparison, *, missed: bool) -> _Judged:
    """Return the state of the outputs against float, without labels: that of the worst one."""
    every = [row for row in metrics.quality if row.figures]
    rows = [row for row in every if row.state != "unjudged"]
    if not rows:
        if not metrics.feeds:
            return _Judged("unknown", NOT_COMPARED)
        return _Judged("lost" if missed else "unknown", "there is no output that can be compared")
    states = [_state(row) for row in rows]
    state: Accuracy = "lost" if "lost" in states else "uncertain" if "uncertain" in states else "kept"
    row, figure = max(
        ((row, figure) for row in rows if _state(row) == state for figure in _deciding(row)),
        key=lambda pair: _used(pair[1], state),
    )
    named = f"'{row.name}'" if len(every) > 1 else ""
    if state == "uncertain" and row.nature == "detections" and not row.decided_by:
        return _Judged(state, f"{named or 'the output'} lists detections, which cannot be matched", f": {MEASURE}")
    of = figure.name == "same shape" or (figure.name == "agreement" and not _positions(row))
    text = f"{_described(row, figure, named)} {'of' if of else 'on'} {_samples(row, metrics)}"
    if _is_equal(figure):
        return _Judged(state, text)
    limit = lost_text(figure.name, figure.line) if state == "lost" else ""
    limit = limit or kept_text(figure.name, figure.kept)
    hint = f"{', ' if limit else ''}{limit}{_same_class(row, figure)}"
    if state == "uncertain":
        hint += ": too few samples to tell, compare on more" if figure.near else f": {MEASURE}"
    return _Judged(state, text, hint, too_few=figure.near)


def _state(row: OutputQuality) -> Accuracy:
    """Return what the figures of an output prove."""
    return row.state if row.state in ("kept", "lost") else "uncertain"


def _deciding(row: OutputQuality) -> Sequence[QualityFigure]:
    """Return the figure that decided the state of an output; all of them if none did."""
    return [figure for figure in row.figures if figure.name == row.decided_by] or row.figures


def _same_class(row: OutputQuality, deciding: QualityFigure) -> str:
    """Return how many classes are those of float, if another figure decided; "" without classes."""
    agreement = row.figure("agreement")
    if agreement is None or agreement is deciding:
        return ""
    return f", the same class as float for {agreement.text()}{_positions(row)}"


def _positions(row: OutputQuality) -> str:
    """Return whose classes agree, if a sample has several: " of the pixels"."""
    return f" of the {row.nature}" if row.nature in ("pixels", "tokens") else ""


def _described(row: OutputQuality, figure: QualityFigure, named: str) -> str:
    """Say in words how far an output is from float."""
    name, value = figure.name, figure.text()
    if _is_equal(figure):
        return f"{named or 'the output'} is equal to that of float"
    if name == "relative error":
        if figure.near:
            return f"{named + ' is' if named else 'outputs'} within {value} of float"
        return f"{named + ' differs' if named else 'outputs differ'} from float by {value}"
    if name == "agreement":
        return f"{named + ' has ' if named else ''}the same class as float for {value}{_positions(row)}"
    if name == "KL":
        return f"the KL divergence of the probabilities{f' of {named}' if named else ''} is {value}"
    if name == "equal values":
        return f"{value} of the values{f' of {named}' if named else ''} are those of float"
    if name == "centred cosine":
        return f"the centred cosine of {named or 'the vectors'} to those of float is {value}"
    if name == "detection overlap":
        return f"the detections{f' of {named}' if named else ''} overlap with those of float by {value}"
    if name == "same shape":
        return f"{named or 'the output'} has the shape of float for {value}"
    return f"{named + ' has' if named else 'the outputs have'} {value} SQNR"


def _is_equal(figure: QualityFigure) -> bool:
    return figure.name == "SQNR" and figure.value == math.inf


def _unusable(metrics: Comparison) -> str:
    """Return a clause about an output that is constant, not finite or of another shape; "" without any."""
    natures = {row.name: row.nature for row in metrics.quality}
    for row in metrics.outputs:
        name, nature = f"output '{row.name}'", natures.get(row.name)
        if not row.compared and nature != "detections":
            return f"{name} has another shape than in float"
        if row.not_finite:
            return f"{name} has NaN or infinite values where float has none"
        if nature in WITHOUT_ERROR:
            continue
        if row.constant or row.frozen:
            return f"{name} is the same for every sample"
        if row.sqnr_db < COLLAPSED_DB:
            return f"{name} is lost in error: {collapsed_text(row.sqnr_db)}"
    return ""


def collapsed_text(sqnr_db: float) -> str:
    """Format the SQNR of an output that is lost, with its limit: ``SQNR 1.0 dB, lost below 3 dB``."""
    return (
        f"SQNR {value_text('SQNR', sqnr_db, math.nan, math.nan, 'dB')}, lost below {limit_text('SQNR', COLLAPSED_DB)}"
    )


def value_text(name: str, value: float, low: float, high: float, unit: str) -> str:
    """Format a figure with its 95 % confidence interval: ``93.8 % (79.9 to 98.3)``."""
    factor, unit = (100, " %") if name in SHARES else (1, f" {unit}" if unit else "")
    digits = ".3g" if unit != " dB" else ".1f"
    return f"{number_text(factor * value, digits)}{unit}{interval_text(factor * low, factor * high, digits)}"


def interval_text(low: float, high: float, digits: str = ".3g", more: str = "") -> str:
    """Format an interval: `` (79.9 to 98.3)``; "" if it is unknown or narrower than the digits, except `more`."""
    ends = [f"{end:{digits}}" for end in (low, high)]
    shown = math.isfinite(low) and math.isfinite(high) and ends[0] != ends[1]
    parts = [f"{ends[0]} to {ends[1]}"] if shown else []
    parts += [more] if more else []
    return f" ({'; '.join(parts)})" if parts else ""


def limit_text(name: str, limit: float) -> str:
    """Format a limit of a figure: ``75 %``."""
    return f"{100 * limit:g} %" if name in SHARES else f"{limit:g} dB" if name == "SQNR" else f"{limit:g}"


def kept_text(name: str, limit: float | None) -> str:
    """Format the limit that accuracy is kept within: ``kept up to 10 %``; "" without one."""
    word = "up to" if name in LOWER_IS_BETTER else "from"
    return "" if limit is None else f"kept {word} {limit_text(name, limit)}"


def lost_text(name: str, limit: float | None) -> str:
    """Format the limit from which accuracy is lost: ``lost from 50 % on``; "" without one."""
    if limit is None:
        return ""
    text = limit_text(name, limit)
    return f"lost from {text} on" if name in LOWER_IS_BETTER else f"lost up to {text}"


def state_text(state: str | None, decided_by: str | None) -> str:
    """Format the state of an output with the figure that decided it: ``kept (relative error)``."""
    return f"{state or ''} ({decided_by})" if decided_by else state or ""


def used_share(name: str, value: float, limit: float | None) -> float:
    """Return how much of what may be lost is lost: 1 at the limit; -inf without a limit."""
    if limit is None or math.isnan(limit):
        return -math.inf
    if name == "SQNR":
        return 10 ** ((limit - value) / 20)
    if name in LOWER_IS_BETTER:
        return value / limit
    return (1 - value) / (1 - limit) if limit < 1 else math.inf if value < 1 else 0.0


def _used(figure: QualityFigure, state: Accuracy) -> float:
    """Return how much of what may be lost is lost by a figure, at the end of its interval that decides."""
    lower = figure.name in LOWER_IS_BETTER
    worse, better = (figure.high, figure.low) if lower else (figure.low, figure.high)
    end = worse if state == "kept" else better if state == "lost" else figure.value
    limit = figure.kept if state != "lost" or figure.line is None else figure.line
    return used_share(figure.name, end if math.isfinite(end) else figure.value, limit)


def _samples(row: OutputQuality, metrics: Comparison) -> str:
    held = " held-out" if metrics.held_out else ""
    return f"{row.samples}{held} sample{'s' * (row.samples != 1)}"


def figure_text(figure: QualityFigure) -> str:
    """Format a figure with its name: ``agreement 93.8 % (79.9 to 98.3)``."""
    return f"{figure.name} {figure.text()}"


def _metric_text(value: MetricValue, evaluation: Evaluation) -> str:
    unit = f" {evaluation.unit}" if evaluation.unit else ""
    return f"{number_text(value.value, '.4f' if evaluation.share else '.5g')}{unit}"


def _evaluated(evaluation: Evaluation) -> str:
    """Format the task metric of both models, and the loss with its interval."""
    before, after = (_metric_text(row.metric, evaluation) for row in evaluation.rows[:2])
    return (
        f"{evaluation.metric} {after}, float {before}, {loss_text(evaluation)} on {evaluation.samples} labelled samples"
    )


def _speed(metrics: Comparison, backend: str) -> VerdictRow | None:
    """Return a clause about the time of a run on this machine; None if it was not measured or is of another runtime."""
    latency = _latency(metrics, backend)
    return None if latency is None else speed_row(*latency[:3], busy=latency[3])


def _latency(metrics: Comparison, backend: str) -> tuple[float, float, float, bool] | None:
    """Return the latency ratio, its interval and whether the machine was busy.

    None if it was not measured or is of another runtime. That of decoders is of the time of a token, with the number of
    threads with which float is fastest.
    """
    ratio, interval, busy = metrics.latency_ratio, metrics.latency_interval, metrics.busy
    if metrics.llm is not None and metrics.llm.speed:
        fastest = max(metrics.llm.speed, key=lambda row: row.float_tokens_per_second or 0.0)
        ratio, interval, busy = fastest.ratio, fastest.ratio_interval, fastest.busy
    if backend != metrics.runtime or ratio is None or not 0 < ratio < math.inf:
        return None
    return (ratio, *(interval or (-math.inf, math.inf)), busy)


def latency_text(ratio: float, low: float, high: float, *, busy: bool) -> str:
    """Format a latency ratio: ``0.52 (0.5 to 0.55; the machine is busy)``."""
    return f"{ratio:.3g}{interval_text(low, high, more=BUSY if busy else '')}"


def speed_row(ratio: float, low: float, high: float, *, busy: bool) -> VerdictRow:
    """Say how fast a model is: ``1.5 times faster (1.4 to 1.6) on this CPU``.

    As fast as float: the whole interval is within `AS_FAST`, and the machine was not busy. An interval that contains 1
    says nothing else.

    Args:
        ratio: time of a run relative to float.
        low, high: its 95 % interval; not finite if there were too few runs.
        busy: whether other processes used the processor.
    """
    mark, text, ends = speed_parts(ratio, low, high, busy=busy)
    return VerdictRow(mark, f"{text}{ends}{'' if mark == '??' else ' on this CPU'}")


def speed_parts(ratio: float, low: float, high: float, *, busy: bool) -> tuple[Mark, str, str]:
    """Return mark, statement and interval of `speed_row`."""
    measured, load = math.isfinite(low) and math.isfinite(high), BUSY if busy else ""
    if not measured:
        return "??", "speed unclear", f" ({load or 'too few runs'})"
    if AS_FAST[0] <= low <= high <= AS_FAST[1] and not busy:
        return "=", "as fast as float", interval_text(low, high)
    if low <= 1 <= high or AS_FAST[0] <= low <= high <= AS_FAST[1] or (busy and high > WIDE * low):
        return "??", "speed unclear", f" ({low:.3g} to {high:.3g} of float{f'; {load}' if load else ''})"
    faster = ratio < 1
    times, ends = (1 / ratio, (1 / high, 1 / low)) if faster else (ratio, (low, high))
    text = f"{times:.3g} times {'faster' if faster else 'slower'}"
    return "ok" if faster else "!!", text, interval_text(*ends, more=load)


def _nothing_gained(metrics: Comparison, backend: str) -> bool:
    """Whether a file is neither smaller nor faster than float, as far as both were measured."""
    latency, size = _latency(metrics, backend), _size_ratio(metrics)
    if latency is None or not AS_LARGE[0] <= size < math.inf:
        return False
    _, low, high, _ = latency
    return bool(math.isfinite(high) and (low > 1 or AS_FAST[0] <= low <= high <= AS_FAST[1]))


def _size_ratio(metrics: Comparison) -> float:
    """Return the size of the file over that of float; NaN if it is unknown."""
    before, after = (None, 0) if metrics.llm is None else metrics.llm.bytes
    ratio = after / before if before else metrics.size_ratio
    return math.nan if ratio is None else ratio


def _size(metrics: Comparison) -> VerdictRow | None:
    ratio = _size_ratio(metrics)
    if not 0 < ratio < math.inf:
        return None
    if AS_LARGE[0] <= ratio <= AS_LARGE[1]:
        return VerdictRow("=", "about the same size")
    return (
        VerdictRow("ok", f"{1 / ratio:.3g} times smaller")
        if ratio < 1
        else VerdictRow("!!", f"{ratio:.3g} times larger")
    )

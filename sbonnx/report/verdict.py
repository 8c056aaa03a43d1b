"""One sentence about a result: accuracy, speed and size against float. Built from the plain values of a report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal

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
    """

    json_keys: ClassVar = ("accuracy", "text")

    accuracy: Accuracy
    rows: tuple[VerdictRow, ...]
    ok: bool
    gained: bool = True

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
    metrics: Mapping[str, Any],
    *,
    problems: Sequence[str] = (),
    backend: str = ON_CPU,
    max_loss: float | None = None,
) -> Verdict:
    """Summarize a comparison with float.

    Accuracy is that of the task metric if labelled data was evaluated, or the perplexity of a decoder; else of the
    output that is furthest from float.

    Args:
        metrics: `sbonnx.verify.Comparison.to_dict`, also after a round trip through JSON; empty: nothing was compared.
        problems: sentences of the report about what is unusable or misses a limit.
        backend: runtime of the file. The latency in another one (`runtime_of`) is left out.
        max_loss: loss in the task metric that the recipe allows; None: `CLOSE_LOSS`.
    """
    state, evidence, hint = _accuracy(metrics, problems, CLOSE_LOSS if max_loss is None else max_loss)
    doubts = doubts_of(metrics)
    rows: list[VerdictRow] = []
    if doubts:
        rows.append(VerdictRow("??", f"data in doubt: {_first(doubts)}"))
        if state not in ("unknown", "lost"):
            rows.append(VerdictRow("??", f"on this data, {evidence}"))
        state = "doubtful"
    else:
        where = " on the calibration data" if _calibrated(metrics) else ""
        where += f", computed as {metrics.get('cpu')} CPUs compute it" if metrics.get("saturating") else ""
        rows.append(VerdictRow(MARKS[state], f"accuracy {state}{where}: {evidence}{hint}"))
    if problems and state != "lost":
        rows.append(VerdictRow("XX", _first(problems)))
    gains = [row for row in (_speed(metrics, backend), _size(metrics)) if row is not None]
    gained = not _nothing_gained(metrics, backend)
    if gained:
        rows += gains
    else:
        place = len(rows) if problems or state in ("lost", "doubtful") else 0
        rows.insert(place, VerdictRow("!!", f"nothing gained: {', '.join(row.text for row in reversed(gains))}"))
    return Verdict(state, tuple(rows), not problems and state != "lost", gained)


def _first(sentences: Sequence[str]) -> str:
    """Return the first sentence, and how many more there are."""
    more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
    return f"{sentences[0].rstrip('.')}{more}"


def doubts_of(metrics: Mapping[str, Any]) -> list[str]:
    """Return the sentences about data that does not look like that of the model, or labels that do not fit it."""
    doubts = [str(one) for one in metrics.get("doubts") or ()]
    evaluation = metrics.get("evaluation") or {}
    rows, chance = evaluation.get("rows") or (), evaluation.get("chance")
    if rows and chance is not None and _float(rows[0]["metric"].get("low")) <= _float(chance):
        metric = rows[0]["metric"]
        ends = interval_text(_float(metric.get("low")), _float(metric.get("high")))
        doubts.append(
            f"the float model has {evaluation['metric']} {_metric_text(metric, evaluation)}{ends}, which guessing may "
            f"have too ({_float(chance):.3g}): "
            "check the labels and the preprocessing"
        )
    return doubts


def allowed_loss(settings: Mapping[str, Any]) -> float | None:
    """Return the loss in the task metric that a resolved recipe allows; None if it has no limit."""
    found = (settings.get("MIXED") or {}).get("MAX_LOSS")
    return None if found is None else _float(found)


def _calibrated(metrics: Mapping[str, Any]) -> bool:
    """Whether the outputs were compared on the samples of the calibration, and nothing better is known."""
    evaluated = len((metrics.get("evaluation") or {}).get("rows") or ()) > 1
    return bool(metrics.get("calibrated")) and not evaluated and not metrics.get("llm") and bool(metrics.get("feeds"))


Found = tuple[Accuracy, str, str]
"""State of the accuracy, what was measured, and what it means: a limit, and what to do."""


def _accuracy(metrics: Mapping[str, Any], problems: Sequence[str], max_loss: float) -> Found:
    unusable = _unusable(metrics)
    if unusable:
        return "lost", unusable, ""
    evaluation = metrics.get("evaluation")
    if evaluation and len(evaluation.get("rows") or ()) > 1:
        own = evaluation.get("max_loss")
        max_loss = max_loss if own is None else _float(own)
        state = state_of_metric(evaluation, max_loss)
        hint = f", {kept_loss_text(evaluation, max_loss)}"
        return state, _evaluated(evaluation), f"{hint}: evaluate more samples" if state == "uncertain" else hint
    decoder = metrics.get("llm") or {}
    if decoder.get("float_perplexity"):
        return _of_decoder(decoder)
    return _of_outputs(metrics, problems)


def state_of_metric(evaluation: Mapping[str, Any], max_loss: float) -> Accuracy:
    """Return the state of a task metric: the interval of the loss is below the limit, above it, or contains it."""
    loss, low, high = _loss(evaluation)
    if math.isnan(loss):
        return "lost"
    if not math.isfinite(low) or not math.isfinite(high) or int(evaluation.get("samples") or 0) < ENOUGH_LABELS:
        return "uncertain"
    return "kept" if high <= max_loss else "lost" if low > max_loss else "uncertain"


def _loss(evaluation: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the loss in a task metric and its interval: of shares absolute, else relative to float."""
    first, row = evaluation["rows"][:2]
    loss, difference = _float(row.get("loss")), row.get("difference") or {}
    scale = 1.0 if evaluation.get("share") else abs(_float(first["metric"].get("value")))
    sign = -1.0 if evaluation.get("higher_is_better", True) else 1.0
    ends = sorted(sign * _float(difference.get(end)) / scale for end in ("low", "high")) if scale else [math.nan] * 2
    return loss, min(ends[0], loss), max(ends[1], loss)


def loss_text(evaluation: Mapping[str, Any]) -> str:
    """Format the loss in a task metric with its interval: ``a loss of 2.5 points (1.9 to 3.1)``."""
    loss, low, high = _loss(evaluation)
    if not math.isfinite(loss):
        return "no loss that is a number"
    return f"a loss of {100 * loss:.3g} {_loss_unit(evaluation, loss)}{interval_text(100 * low, 100 * high)}"


def kept_loss_text(evaluation: Mapping[str, Any], limit: float = CLOSE_LOSS) -> str:
    """Format the loss in a task metric up to which accuracy is kept: ``kept up to 1 point``, ``kept up to 4 %``."""
    return f"kept up to {100 * limit:g} {_loss_unit(evaluation, limit)}"


def _loss_unit(evaluation: Mapping[str, Any], loss: float) -> str:
    return "%" if not evaluation.get("share") else "point" if math.isclose(loss, 0.01) else "points"


def _of_decoder(figures: Mapping[str, Any]) -> Found:
    before, after = _float(figures["float_perplexity"]), _float(figures.get("perplexity"))
    rise = after / before - 1
    state: Accuracy = "kept" if rise <= CLOSE_LOSS else "lost" if not rise < LOST_LOSS else "uncertain"
    limit = f"lost from +{100 * LOST_LOSS:g} % on" if state == "lost" else f"kept up to +{100 * CLOSE_LOSS:g} %"
    agreement = figures.get("agreement")
    same = "" if agreement is None else f", the same top token at {100 * _float(agreement):.1f} % of positions"
    more = ": measure the task that it is for" if state == "uncertain" else ""
    text = f"perplexity {before:.4g} -> {after:.4g} ({100 * rise:+.1f} %) on {figures.get('tokens'):,} tokens"
    return state, text, f", {limit}{same}{more}"


def _of_outputs(metrics: Mapping[str, Any], problems: Sequence[str]) -> Found:
    """Return the state of the outputs against float, without labels: that of the worst one."""
    every = [row for row in metrics.get("quality") or () if row.get("figures")]
    rows = [row for row in every if row.get("state") != "unjudged"]
    if not rows:
        if not metrics.get("feeds"):
            return "unknown", "nothing was compared with float", ""
        return ("lost" if problems else "unknown"), "there is no output that can be compared", ""
    states = [_state(row) for row in rows]
    state: Accuracy = "lost" if "lost" in states else "uncertain" if "uncertain" in states else "kept"
    row, figure = max(
        ((row, figure) for row in rows if _state(row) == state for figure in _deciding(row)),
        key=lambda pair: _used(pair[1], state),
    )
    named = f"'{row.get('name')}'" if len(every) > 1 else ""
    if state == "uncertain" and row.get("nature") == "detections" and not row.get("decided_by"):
        return state, f"{named or 'the output'} lists detections, which cannot be matched", f": {MEASURE}"
    of = figure["name"] == "same shape" or (figure["name"] == "agreement" and not _positions(row))
    text = f"{_described(row, figure, named)} {'of' if of else 'on'} {_samples(row, metrics)}"
    if _is_equal(figure):
        return state, text, ""
    limit = lost_text(figure["name"], figure.get("line")) if state == "lost" else ""
    limit = limit or kept_text(figure["name"], figure.get("kept"))
    hint = f"{', ' if limit else ''}{limit}{_same_class(row, figure)}"
    if state == "uncertain":
        hint += ": too few samples to tell, compare on more" if _is_near(figure) else f": {MEASURE}"
    return state, text, hint


def _state(row: Mapping[str, Any]) -> Accuracy:
    """Return what the figures of an output prove; older reports do not say it."""
    state = row.get("state")
    return "kept" if state == "kept" else "lost" if state == "lost" else "uncertain"


def _deciding(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the figure that decided the state of an output; all of them if the report does not say which one did."""
    return [figure for figure in row["figures"] if figure["name"] == row.get("decided_by")] or row["figures"]


def _same_class(row: Mapping[str, Any], deciding: Mapping[str, Any]) -> str:
    """Return how many classes are those of float, if another figure decided; "" without classes."""
    found = next((figure for figure in row["figures"] if figure["name"] == "agreement"), deciding)
    if found is deciding:
        return ""
    return f", the same class as float for {value_text('agreement', *_ends(found), '')}{_positions(row)}"


def _positions(row: Mapping[str, Any]) -> str:
    """Return whose classes agree, if a sample has several: " of the pixels"."""
    nature = row.get("nature")
    return f" of the {nature}" if nature in ("pixels", "tokens") else ""


def _described(row: Mapping[str, Any], figure: Mapping[str, Any], named: str) -> str:
    """Say in words how far an output is from float."""
    name = figure["name"]
    value = value_text(name, *_ends(figure), figure.get("unit") or "")
    if _is_equal(figure):
        return f"{named or 'the output'} is equal to that of float"
    if name == "relative error":
        if _is_near(figure):
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


def _is_near(figure: Mapping[str, Any]) -> bool:
    """Whether a figure has a value that accuracy is kept with."""
    kept, value = _float(figure.get("kept")), _float(figure.get("value"))
    if math.isnan(kept):
        return True
    return value <= kept if figure["name"] in LOWER_IS_BETTER else value >= kept


def _is_equal(figure: Mapping[str, Any]) -> bool:
    return figure["name"] == "SQNR" and _float(figure.get("value")) == math.inf


def _unusable(metrics: Mapping[str, Any]) -> str:
    """Return a clause about an output that is constant, not finite or of another shape; "" without any."""
    natures = {row.get("name"): row.get("nature") for row in metrics.get("quality") or ()}
    for row in metrics.get("outputs") or ():
        name, nature = f"output '{row.get('name')}'", natures.get(row.get("name"))
        if not row.get("compared", 1) and nature != "detections":
            return f"{name} has another shape than in float"
        if row.get("not_finite"):
            return f"{name} has NaN or infinite values where float has none"
        if nature in WITHOUT_ERROR:
            continue
        if row.get("constant") or row.get("frozen"):
            return f"{name} is the same for every sample"
        if _float(row.get("sqnr_db")) < COLLAPSED_DB:
            return f"{name} is lost in error: {collapsed_text(_float(row['sqnr_db']))}"
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
    return f"{factor * value:{digits}}{unit}{interval_text(factor * low, factor * high, digits)}"


def interval_text(low: float, high: float, digits: str = ".3g", more: str = "") -> str:
    """Format an interval: `` (79.9 to 98.3)``; "" if it is unknown or narrower than the digits, except `more`."""
    ends = [f"{end:{digits}}" for end in (low, high)]
    known = math.isfinite(low) and math.isfinite(high) and ends[0] != ends[1]
    parts = [f"{ends[0]} to {ends[1]}"] if known else []
    parts += [more] if more else []
    return f" ({'; '.join(parts)})" if parts else ""


def limit_text(name: str, limit: float | None) -> str:
    """Format a limit of a figure: ``75 %``."""
    value = _float(limit)
    return f"{100 * value:g} %" if name in SHARES else f"{value:g} dB" if name == "SQNR" else f"{value:g}"


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


def _ends(figure: Mapping[str, Any]) -> tuple[float, float, float]:
    return _float(figure.get("value")), _float(figure.get("low")), _float(figure.get("high"))


def used_share(name: str, value: float, limit: float | None) -> float:
    """Return how much of what may be lost is lost: 1 at the limit; -inf without a limit."""
    if limit is None or math.isnan(limit):
        return -math.inf
    if name == "SQNR":
        return 10 ** ((limit - value) / 20)
    if name in LOWER_IS_BETTER:
        return value / limit
    return (1 - value) / (1 - limit) if limit < 1 else math.inf if value < 1 else 0.0


def _used(figure: Mapping[str, Any], state: Accuracy) -> float:
    """Return how much of what may be lost is lost by a figure, at the end of its interval that decides."""
    name, (value, low, high) = figure["name"], _ends(figure)
    worse, better = (high, low) if name in LOWER_IS_BETTER else (low, high)
    end = worse if state == "kept" else better if state == "lost" else value
    limit = figure.get("kept") if state != "lost" or figure.get("line") is None else figure.get("line")
    return used_share(name, end if math.isfinite(end) else value, limit)


def _samples(row: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    count = row.get("samples")
    held = " held-out" if metrics.get("held_out") else ""
    return f"{count}{held} sample{'s' * (count != 1)}"


def figure_text(figure: Mapping[str, Any]) -> str:
    """Format a figure with its name: ``agreement 93.8 % (79.9 to 98.3)``."""
    return f"{figure['name']} {value_text(figure['name'], *_ends(figure), figure.get('unit') or '')}"


def _metric_text(value: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    unit = f" {evaluation['unit']}" if evaluation.get("unit") else ""
    return f"{_float(value.get('value')):{'.4f' if evaluation.get('share') else '.5g'}}{unit}"


def _evaluated(evaluation: Mapping[str, Any]) -> str:
    """Format the task metric of both models, and the loss with its interval."""
    before, after = (_metric_text(row["metric"], evaluation) for row in evaluation["rows"][:2])
    what, samples = evaluation["metric"], evaluation.get("samples")
    return f"{what} {after}, float {before}, {loss_text(evaluation)} on {samples} labelled samples"


def runtime_of(metrics: Mapping[str, Any]) -> str:
    """Return the backend whose runtime executed the compared file: latency and kernels are of that one."""
    return str(metrics.get("runtime") or ON_CPU)


def _speed(metrics: Mapping[str, Any], backend: str) -> VerdictRow | None:
    """Return a clause about the time of a run on this machine; None if it was not measured or is of another runtime."""
    found = _latency(metrics, backend)
    return None if found is None else speed_row(*found[:3], busy=found[3])


def _latency(metrics: Mapping[str, Any], backend: str) -> tuple[float, float, float, bool] | None:
    """Return the latency ratio, its interval and whether the machine was busy.

    None if it was not measured or is of another runtime. That of decoders is of the time of a token, with the number of
    threads with which float is fastest.
    """
    timed, names = metrics, ("latency_ratio", "latency_interval")
    if metrics.get("llm"):
        rows: Sequence[Mapping[str, Any]] = metrics["llm"].get("speed") or ({},)
        names = "ratio", "ratio_interval"
        timed = max(rows, key=lambda row: _float(row.get("float_tokens_per_second") or 0.0))
    ratio, interval = (timed.get(name) for name in names)
    if backend != runtime_of(metrics) or not 0 < _float(ratio) < math.inf:
        return None
    low, high = (_float(end) for end in interval or (-math.inf, math.inf))
    return _float(ratio), low, high, bool(timed.get("busy"))


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
    known, load = math.isfinite(low) and math.isfinite(high), BUSY if busy else ""
    if not known:
        return VerdictRow("??", f"speed unclear ({load or 'too few runs'})")
    if AS_FAST[0] <= low <= high <= AS_FAST[1] and not busy:
        return VerdictRow("=", f"as fast as float{interval_text(low, high)} on this CPU")
    if low <= 1 <= high or AS_FAST[0] <= low <= high <= AS_FAST[1] or (busy and high > WIDE * low):
        return VerdictRow("??", f"speed unclear ({low:.3g} to {high:.3g} of float{f'; {load}' if load else ''})")
    faster = ratio < 1
    times, ends = (1 / ratio, (1 / high, 1 / low)) if faster else (ratio, (low, high))
    text = f"{times:.3g} times {'faster' if faster else 'slower'}{interval_text(*ends, more=load)} on this CPU"
    return VerdictRow("ok" if faster else "!!", text)


def _nothing_gained(metrics: Mapping[str, Any], backend: str) -> bool:
    """Whether a file is neither smaller nor faster than float, as far as both were measured."""
    found, size = _latency(metrics, backend), _size_ratio(metrics)
    if found is None or not AS_LARGE[0] <= size < math.inf:
        return False
    _, low, high, _ = found
    return bool(math.isfinite(high) and (low > 1 or AS_FAST[0] <= low <= high <= AS_FAST[1]))


def _size_ratio(metrics: Mapping[str, Any]) -> float:
    """Return the size of the file over that of float; NaN if it is unknown."""
    before, after = (metrics.get("llm") or {}).get("bytes") or (None, None)
    return _float(after) / before if before else _float(metrics.get("size_ratio"))


def _size(metrics: Mapping[str, Any]) -> VerdictRow | None:
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


def _float(value: Any) -> float:
    """Convert a number of a report, which JSON may hold as "inf"; NaN for None."""
    return math.nan if value is None else float(value)

"""One sentence about a result: accuracy, speed and size against float. Built from the plain values of a report."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

Accuracy = Literal["kept", "lost", "uncertain", "unknown"]

LOWER_IS_BETTER: Final = frozenset({"KL", "relative error"})
"""Figures of `sbonnx.verify.quality` of which less is better."""

SHARES: Final = frozenset({"agreement", "equal values", "same shape"})
"""Figures that are printed in percent."""

HIDDEN: Final = frozenset({"KL", "SNR"})
"""Figures that the sentence leaves out where it has others: agreement says more than KL, and SQNR is near to SNR."""

AS_FAST: Final = 1.02
"""Latency ratio up to which (and down to whose inverse) a model is as fast as float."""

BEFORE_ANY_LINE: Final = -1e6
"""Rank of figures without a line, before those with one."""

CLOSE: Final[Mapping[str, Mapping[str, float]]] = {
    "classes": {"agreement": 0.95, "KL": 0.02, "relative error": 0.1},
    "embedding": {"cosine": 0.99},
    "regression": {"relative error": 0.1},
    "signal": {"SNR": 20.0},
    "sequence": {"relative error": 0.25},
    "features": {"relative error": 0.1},
    "labels": {"equal values": 0.95},
}
"""Values by nature and figure up to which outputs are close to float: accuracy is called kept without labelled data.

Stricter than the quality lines of `sbonnx.verify.quality`; docs/verification.md has the reason of each.
"""

CLOSE_DB: Final = 20.0
"""Signal-to-noise ratio from which an output without such a figure is close to float: an error of 1 % of the energy."""

DETECTIONS: Final = "detections"
"""Nature of outputs whose rows cannot be matched: unless they are equal, nothing is known without labels."""

UNJUDGED: Final = frozenset({"state"})
"""Natures whose errors are judged by the other outputs, which they influence."""

CLOSE_LOSS: Final = 0.01
"""Loss in a metric on labelled data up to which accuracy is kept: the 99 % of float that MLPerf inference requires."""

LOST_LOSS: Final = 0.1
"""Increase of the perplexity, relative to float, from which accuracy is lost."""

COLLAPSED_DB: Final = 3.0
"""Signal-to-noise ratio in dB below which an output is considered lost."""

ON_CPU: Final = "onnxruntime"
"""Backend whose runtime executes files if no other does."""

_NAMES: Final = re.compile(r"'[^']*'")
_NUMBERS: Final = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(?:e[-+]?\d+)?(?![\w])")


@dataclass(frozen=True)
class Verdict:
    """Summary of a result.

    Attributes:
        accuracy: "kept": the metric on labelled data, or without one each output, is close to float; "lost": it is not,
            with its whole 95 % interval, or an output is unusable; "uncertain": in between, or measured on too few
            samples; "unknown": nothing was compared.
        clauses: accuracy, limits that are missed, speed, size; one clause each.
        ok: whether accuracy is not lost and no limit is missed.
    """

    accuracy: Accuracy
    clauses: tuple[str, ...]
    ok: bool

    @property
    def text(self) -> str:
        """The sentence."""
        return f"{'; '.join(self.clauses)}."


def verdict_of(
    metrics: Mapping[str, Any],
    *,
    problems: Sequence[str] = (),
    backend: str = ON_CPU,
    max_loss: float | None = None,
) -> Verdict:
    """Summarize a comparison with float.

    Accuracy is that of the task metric if labelled data was evaluated, or the perplexity of a decoder; else of the
    figure that is closest to its quality line, and of the signal-to-noise ratio (SQNR) of the worst output.

    Args:
        metrics: `sbonnx.verify.Comparison.to_dict`, also after a round trip through JSON; empty: nothing was compared.
        problems: sentences of the report about what is unusable or misses a limit.
        backend: runtime of the file. The latency in another one (`runtime_of`) is left out.
        max_loss: loss in the task metric that the recipe allows; None: `CLOSE_LOSS`.
    """
    accuracy, text = _accuracy(metrics, problems, CLOSE_LOSS if max_loss is None else max_loss)
    clauses = [text]
    if problems and accuracy != "lost":
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        clauses.append(f"{problems[0].rstrip('.')}{more}")
    clauses += [clause for clause in (_speed(metrics, backend), _size(metrics)) if clause]
    return Verdict(accuracy, tuple(clauses), not problems and accuracy != "lost")


def allowed_loss(settings: Mapping[str, Any]) -> float | None:
    """Return the loss in the task metric that a resolved recipe allows; None if it has no limit."""
    found = (settings.get("MIXED") or {}).get("MAX_LOSS")
    return None if found is None else _float(found)


def _accuracy(metrics: Mapping[str, Any], problems: Sequence[str], max_loss: float) -> tuple[Accuracy, str]:
    unusable = _unusable(metrics)
    if unusable:
        return "lost", f"Accuracy lost: {unusable}"
    evaluation = metrics.get("evaluation")
    if evaluation and len(evaluation.get("rows") or ()) > 1:
        own = evaluation.get("max_loss")
        state = _state_of_metric(evaluation["rows"][1], max_loss if own is None else _float(own))
        more = ": evaluate more samples" if state == "uncertain" else ""
        return state, f"Accuracy {state}: {_evaluated(evaluation)}{more}"
    decoder = metrics.get("llm") or {}
    if decoder.get("float_perplexity"):
        return _of_decoder(decoder)
    return _of_outputs(metrics, problems)


def _state_of_metric(row: Mapping[str, Any], max_loss: float) -> Accuracy:
    """Return the state of a task metric: a loss above the limit is certain if the difference is significant."""
    if _float(row.get("loss")) <= max_loss:
        return "kept"
    difference = row.get("difference") or {}
    low, high = _float(difference.get("low")), _float(difference.get("high"))
    known = math.isfinite(low) and math.isfinite(high)
    return "uncertain" if known and low <= 0 <= high else "lost"


def _of_decoder(figures: Mapping[str, Any]) -> tuple[Accuracy, str]:
    before, after = _float(figures["float_perplexity"]), _float(figures.get("perplexity"))
    rise = after / before - 1
    state: Accuracy = "kept" if rise <= CLOSE_LOSS else "lost" if not rise < LOST_LOSS else "uncertain"
    agreement = figures.get("agreement")
    same = "" if agreement is None else f", the same top token at {100 * _float(agreement):.1f} % of positions"
    more = ": measure the task that it is for" if state == "uncertain" else ""
    text = f"perplexity {before:.4g} -> {after:.4g} ({100 * rise:+.1f} %) on {figures.get('tokens'):,} tokens{same}"
    return state, f"Accuracy {state}: {text}{more}"


def _of_outputs(metrics: Mapping[str, Any], problems: Sequence[str]) -> tuple[Accuracy, str]:
    """Return the state of the outputs against float, without labels."""
    rows = [row for row in metrics.get("quality") or () if row.get("figures")]
    rows = [row for row in rows if row.get("nature") not in UNJUDGED] or rows
    judged = [(row, figure) for row in rows for figure in row["figures"]]
    if not judged:
        if not metrics.get("feeds"):
            return "unknown", "Accuracy unknown: nothing was compared with float"
        return ("lost" if problems else "unknown"), "Outputs compared with float"
    outputs = len(metrics.get("outputs") or rows)
    below = [pair for pair in judged if _is_below(pair[1])]
    if below:
        row, figure = below[0]
        return "lost", f"Accuracy lost: {_named(row, outputs)}{figure_text(figure)}, the line is {_line(figure)}"
    row, figure = _least_margin(judged)
    where, samples = _named(row, outputs), _samples(row, metrics)
    if _is_close(judged):
        line = f"the line is {_line(figure)}: compare on more samples"
        return "uncertain", f"Accuracy uncertain: {where}{figure_text(figure)} on {samples}, {line}"
    away = [one for one in rows if not _is_near_float(one)]
    if away:
        row = away[0] if row not in away else row
        figure = _least_margin([(row, one) for one in row["figures"]])[1]
        text = f"{_named(row, outputs)}{figure_text(figure)} on {_samples(row, metrics)}"
        return "uncertain", f"Accuracy uncertain: {text}, {_near(row, figure)}: measure it on labelled data (--eval)"
    if not all(map(_is_proved, rows)):
        text = f"{where}{figure_text(figure)} on {samples}"
        return "uncertain", f"Accuracy uncertain: {text}: compare on more samples"
    ordered = sorted(row["figures"], key=lambda one: one["name"] == "SQNR")  # SQNR last
    known = [one for one in ordered if one["name"] not in HIDDEN] or ordered
    return "kept", f"Accuracy kept: {where}{', '.join(map(figure_text, known))} on {samples}"


def _limit_of(row: Mapping[str, Any], figure: Mapping[str, Any]) -> float | None:
    """Return the value from which a figure is close to float; None if it says nothing for this nature."""
    known = CLOSE.get(row.get("nature") or "", {})
    names = {one["name"] for one in row["figures"]} & known.keys()
    if names:
        return known.get(figure["name"])
    return CLOSE_DB if figure["name"] == "SQNR" else None


def _is_near_float(row: Mapping[str, Any]) -> bool:
    """Whether an output equals float, or all of its figures that have a limit are on the good side."""
    if _is_equal(row):
        return True
    if row.get("nature") == DETECTIONS:
        return False
    for figure in row["figures"]:
        limit, value = _limit_of(row, figure), _float(figure.get("value"))
        if limit is not None and not (value <= limit if figure["name"] in LOWER_IS_BETTER else value >= limit):
            return False
    return True


def _is_proved(row: Mapping[str, Any]) -> bool:
    """Whether the interval of a figure proves that the output is above its quality line; one sample has none."""
    if _is_equal(row):
        return True
    for figure in row["figures"]:
        _, low, high = _ends(figure)
        line = _limit_of(row, figure) if figure.get("line") is None else _float(figure["line"])
        if line is not None and math.isfinite(low) and math.isfinite(high):
            worst = high if figure["name"] in LOWER_IS_BETTER else low
            if worst <= line if figure["name"] in LOWER_IS_BETTER else worst >= line:
                return True
    return False


def _is_equal(row: Mapping[str, Any]) -> bool:
    return any(figure.get("unit") == "dB" and _float(figure.get("value")) == math.inf for figure in row["figures"])


def _near(row: Mapping[str, Any], figure: Mapping[str, Any]) -> str:
    """Describe the distance of a figure from float."""
    limit = _limit_of(row, figure)
    if row.get("nature") == DETECTIONS:
        return "whose rows cannot be matched"
    if limit is None:
        return "which is not close to float"
    shown = f"{100 * limit:g} %" if figure["name"] in SHARES else f"{limit:g}"
    return f"close to float is {shown}{f' {unit}' if (unit := figure.get('unit')) else ''}"


def _unusable(metrics: Mapping[str, Any]) -> str:
    """Return a clause about an output that is constant, not finite or of another shape; "" without any."""
    for row in metrics.get("outputs") or ():
        name = f"output '{row.get('name')}'"
        if not row.get("compared", 1):
            return f"{name} has another shape than in float"
        if row.get("not_finite"):
            return f"{name} has NaN or infinite values where float has none"
        if row.get("constant") or row.get("frozen"):
            return f"{name} is the same for every sample"
        if _float(row.get("sqnr_db")) < COLLAPSED_DB:
            return f"{name} is lost in error: {_float(row['sqnr_db']):.1f} dB signal to noise"
    return ""


def below_line(name: str, value: float, low: float, high: float, line: float | None) -> bool:
    """Whether a figure, with its whole interval, is on the wrong side of its line.

    Args:
        name: name of the figure, which says whether less is better.
        low, high: ends of the 95 % interval. Without one (-inf, inf: a single sample), the value decides.
        line: None: there is none.
    """
    if line is None or math.isnan(value):
        return False
    if name in LOWER_IS_BETTER:
        return value > line and (low > line or low == -math.inf)
    return value < line and (high < line or high == math.inf)


def value_text(name: str, value: float, low: float, high: float, unit: str) -> str:
    """Format a figure with its 95 % interval: ``93.8 % (79.9 to 98.3)``."""
    factor, unit = (100, " %") if name in SHARES else (1, f" {unit}" if unit else "")
    digits = ".4f" if name == "cosine" else ".3g" if unit != " dB" else ".1f"
    texts = [f"{factor * one:{digits}}" for one in (value, low, high)]
    known = math.isfinite(low) and math.isfinite(high)
    return f"{texts[0]}{unit} ({texts[1]} to {texts[2]})" if known else f"{texts[0]}{unit}"


def _is_below(figure: Mapping[str, Any]) -> bool:
    return below_line(figure["name"], *_ends(figure), figure.get("line"))


def _ends(figure: Mapping[str, Any]) -> tuple[float, float, float]:
    return _float(figure.get("value")), _float(figure.get("low")), _float(figure.get("high"))


def _is_close(judged: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> bool:
    """Whether the value of a figure is on the wrong side of its line and its interval contains the line."""
    for _, figure in judged:
        line, value = figure.get("line"), _float(figure.get("value"))
        if line is not None and (value > line if figure["name"] in LOWER_IS_BETTER else value < line):
            return True
    return False


def _least_margin(
    judged: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the figure nearest to its line, by the ratio of what is lost to what may be lost.

    Without lines, it is the lowest SQNR.
    """

    def used(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> float:
        figure, line = pair[1], _float(pair[1].get("line"))
        value, name = _float(figure.get("value")), figure["name"]
        if math.isnan(line) or math.isnan(value):
            return BEFORE_ANY_LINE - value if name == "SQNR" else -math.inf
        if name in LOWER_IS_BETTER:
            return value / line
        if figure.get("unit") == "dB":
            return line / value if value > 0 else math.inf
        return (1 - value) / (1 - line)

    return max(judged, key=used)


def _samples(row: Mapping[str, Any], metrics: Mapping[str, Any]) -> str:
    count = row.get("samples")
    held = " held-out" if metrics.get("held_out") else ""
    return f"{count}{held} sample{'s' * (count != 1)}"


def _named(row: Mapping[str, Any], outputs: int) -> str:
    return f"'{row.get('name')}' has " if outputs > 1 else ""


def figure_text(figure: Mapping[str, Any]) -> str:
    """Format a figure with its name: ``agreement 93.8 % (79.9 to 98.3)``."""
    return f"{figure['name']} {value_text(figure['name'], *_ends(figure), figure.get('unit') or '')}"


def _line(figure: Mapping[str, Any]) -> str:
    line = _float(figure.get("line"))
    return f"{100 * line:g} %" if figure["name"] in SHARES else f"{line:g}"


def _evaluated(evaluation: Mapping[str, Any]) -> str:
    """Format the task metric of both models, and the difference with its interval."""
    first, second = (row["metric"] for row in evaluation["rows"][:2])
    digits = ".4f" if evaluation.get("share") else ".5g"
    unit = f" {evaluation['unit']}" if evaluation.get("unit") else ""
    values = [_float(one.get("value")) for one in (first, second)]
    change = evaluation["rows"][1].get("difference") or {}
    ends = [_float(change.get(key)) for key in ("value", "low", "high")]
    apart = ""
    if all(map(math.isfinite, ends)):
        apart = f", difference {ends[0]:+{digits}} ({ends[1]:+{digits}} to {ends[2]:+{digits}})"
    return (
        f"{evaluation['metric']} {values[0]:{digits}} -> {values[1]:{digits}}{unit}{apart} "
        f"on {evaluation.get('samples')} labelled samples"
    )


def runtime_of(metrics: Mapping[str, Any]) -> str:
    """Return the backend whose runtime executed the compared file: latency and kernels are of that one."""
    return str(metrics.get("runtime") or ON_CPU)


def _speed(metrics: Mapping[str, Any], backend: str) -> str:
    """Return a clause about the time of a run on this machine; "" if it was not measured or is of another runtime."""
    decoder = metrics.get("llm") or {}
    if decoder:
        return _decoding_speed(decoder)
    ratio = _float(metrics.get("latency_ratio"))
    if backend != runtime_of(metrics) or not 0 < ratio < math.inf:
        return ""
    low, high = (_float(end) for end in metrics.get("latency_interval") or (math.nan, math.nan))
    if 1 / AS_FAST <= ratio <= AS_FAST or low <= 1 <= high:
        return "as fast as float on this CPU"
    faster = ratio < 1
    times, ends = (1 / ratio, (1 / high, 1 / low)) if faster else (ratio, (low, high))
    interval = f" ({ends[0]:.3g} to {ends[1]:.3g})" if all(map(math.isfinite, ends)) else ""
    return f"{times:.3g} times {'faster' if faster else 'slower'}{interval} on this CPU"


def _decoding_speed(figures: Mapping[str, Any]) -> str:
    """Return a clause about the tokens per second of a decoder, each model with its best number of threads."""
    rows = figures.get("speed") or ()
    own, before = (
        max((value for row in rows if (value := _float(row.get(key))) > 0), default=math.nan)
        for key in ("tokens_per_second", "float_tokens_per_second")
    )
    if not math.isfinite(own / before):
        return ""
    return f"{own / before:.3g} times the tokens/s of float on this CPU"


def _size(metrics: Mapping[str, Any]) -> str:
    before, after = (metrics.get("llm") or {}).get("bytes") or (None, None)
    ratio = _float(metrics.get("size_ratio")) if not before else _float(after) / before
    if not 0 < ratio < math.inf:
        return ""
    return f"{1 / ratio:.3g} times smaller" if ratio < 1 else f"{ratio:.3g} times the size"


def _float(value: Any) -> float:
    """Convert a number of a report, which JSON may hold as "inf"; NaN for None."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class NoteGroup:
    """Notes that differ only in names and numbers.

    Attributes:
        text: the first of them.
        notes: all of them.
    """

    text: str
    notes: tuple[str, ...]

    @property
    def line(self) -> str:
        """The first note, and how many more there are of its kind."""
        more = len(self.notes) - 1
        return f"{self.text} (and {more} more of this kind)" if more else self.text


def without_names(text: str) -> str:
    """Return a text with quoted names replaced by empty quotes: texts that differ in names alone become equal."""
    return _NAMES.sub("''", text)


def group_notes(notes: Iterable[str]) -> Iterator[NoteGroup]:
    """Yield the kinds of notes in order of their first note. Equal notes count once."""
    groups: dict[str, dict[str, None]] = {}
    for note in notes:
        kind = _NUMBERS.sub("0", without_names(note))
        groups.setdefault(kind, {})[note] = None
    for group in groups.values():
        yield NoteGroup(next(iter(group)), tuple(group))

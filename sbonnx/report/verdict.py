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
        accuracy: "kept": no figure is below its line; "lost": one is, with its whole 95 % interval, or an output is
            unusable; "uncertain": the interval of one contains its line; "unknown": nothing was compared.
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
) -> Verdict:
    """Summarize a comparison with float.

    Accuracy is that of the task metric if labelled data was evaluated; else of the figure that is closest to its
    quality line, and of the signal-to-noise ratio (SQNR) of the worst output.

    Args:
        metrics: `sbonnx.verify.Comparison.to_dict`, also after a round trip through JSON; empty: nothing was compared.
        problems: sentences of the report about what is unusable or misses a limit.
        backend: runtime of the file. The latency in another one (`runtime_of`) is left out.
    """
    accuracy, text = _accuracy(metrics, problems)
    clauses = [text]
    if problems and accuracy in ("kept", "unknown"):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        clauses.append(f"{problems[0].rstrip('.')}{more}")
    clauses += [clause for clause in (_speed(metrics, backend), _size(metrics)) if clause]
    return Verdict(accuracy, tuple(clauses), not problems and accuracy != "lost")


def _accuracy(metrics: Mapping[str, Any], problems: Sequence[str]) -> tuple[Accuracy, str]:
    rows = [row for row in metrics.get("quality") or () if row.get("figures")]
    judged = [(row, figure) for row in rows for figure in row["figures"]]
    below = [pair for pair in judged if _is_below(pair[1])]
    unusable = _unusable(metrics)
    evaluation = metrics.get("evaluation")
    if evaluation and len(evaluation.get("rows") or ()) > 1:
        state: Accuracy = "lost" if below or unusable else "uncertain" if _is_close(judged) else "kept"
        return state, f"Accuracy: {_evaluated(evaluation)}"
    if not judged and not unusable:
        if not metrics.get("feeds"):
            return "unknown", "Accuracy unknown: nothing was compared with float"
        return ("lost" if problems else "kept"), "Outputs compared with float"
    outputs = len(metrics.get("outputs") or rows)
    if unusable:
        return "lost", f"Accuracy lost: {unusable}"
    if below:
        row, figure = below[0]
        return "lost", f"Accuracy lost: {_named(row, outputs)}{figure_text(figure)}, the line is {_line(figure)}"
    row, figure = _least_margin(judged)
    where, samples = _named(row, outputs), _samples(row, metrics)
    if _is_close(judged):
        line = f"the line is {_line(figure)}: compare on more samples"
        return "uncertain", f"Accuracy uncertain: {where}{figure_text(figure)} on {samples}, {line}"
    ordered = sorted(row["figures"], key=lambda one: one["name"] == "SQNR")  # SQNR last
    known = [one for one in ordered if one["name"] not in HIDDEN] or ordered
    return "kept", f"Accuracy kept: {where}{', '.join(map(figure_text, known))} on {samples}"


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


def _size(metrics: Mapping[str, Any]) -> str:
    ratio = _float(metrics.get("size_ratio"))
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

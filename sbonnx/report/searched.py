"""Trials of a search, and the advice after a run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

from sbonnx.report.codes import Reason
from sbonnx.values import INLINE, OPTIONAL, JsonValue

LEAST_GAIN_DB: Final = 0.1
"""Least gain that is worth a number."""


@dataclass(frozen=True)
class ScoreFigures:
    """Error of a quantized network on the hold-out set.

    Attributes:
        error: energy of the error of the outputs divided by that of the outputs, mean over outputs. Trials are compared
            by it.
        loss: the loss that a limit refers to, of the kind `SearchFigures.loss`.
        sqnr_db: signal-to-noise ratio of the worst output in dB.
        changed: share of samples whose top-1 class differs from float; None unless the model has one output of classes.
    """

    error: float
    loss: float
    sqnr_db: float
    changed: float | None


@dataclass(frozen=True)
class SearchStep:
    """A trial of the recipe search.

    Attributes:
        what: name of the step.
        keys: values by key of the recipe.
        kept: whether the step was kept.
        gain_db: reduction of the error energy in dB; None if the step was not measured.
        why: if the step could not be tried, the reason.
        score: the score with this step; None if it could not be tried.
    """

    what: str
    keys: Mapping[str, Any]
    kept: bool
    gain_db: float | None = None
    why: str = ""
    score: ScoreFigures | None = field(default=None, metadata=INLINE)


@dataclass(frozen=True)
class WidthChoice:
    """A measured choice of widths.

    Attributes:
        what: its name.
        cost: its cost, in the unit of the budget.
        predicted: the predicted loss; None: unknown.
        widths: number of layers by weight width and of tensors by activation width, such as {"w4": 12}.
        kept: whether it was chosen.
        score: its score.
    """

    what: str
    cost: float
    predicted: float | None
    widths: Mapping[str, int]
    kept: bool
    score: ScoreFigures = field(metadata=INLINE)


@dataclass(frozen=True)
class WidthSearch:
    """Search for widths by layer.

    Attributes:
        unit: unit of costs: "bits", "size", "bit_operations" or "latency".
        target: the budget in that unit, or the text of the requested loss.
        met: whether the target was reached.
        tried: the measured choices.
        weights, activations: chosen bit width of weights by layer, and of activations by tensor.
        front: cost and predicted loss of the Pareto-optimal choices.
    """

    unit: str
    target: float | str
    met: bool
    tried: tuple[WidthChoice, ...]
    weights: Mapping[str, int]
    activations: Mapping[str, int]
    front: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class SearchFigures(JsonValue):
    """Search for a recipe.

    Attributes:
        trials: number of networks that were calibrated and evaluated.
        judged_on: number of feeds of the evaluation.
        held_out: whether these are disjoint from the calibration feeds.
        loss: kind of the loss.
        plain: score of the recipe as given; None if it was not measured.
        best: score of the chosen recipe.
        steps: the trials, in order.
        mixed: search for widths; None without.
    """

    trials: int
    judged_on: int
    held_out: bool
    loss: str
    plain: ScoreFigures | None
    best: ScoreFigures
    steps: tuple[SearchStep, ...] = ()
    mixed: WidthSearch | None = None


@dataclass(frozen=True)
class LatencyTrial:
    """A file that TUNE measured.

    Attributes:
        what: what differs from the best file before it, in words.
        ratio: its time over that of the best file before it; None: it was not measured.
        interval: 95 % confidence interval of `ratio`.
        rounds: number of measurements in turn.
        kept: whether it is the best file from then on.
        why: if not, the reason.
    """

    what: str
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    rounds: int = 0
    kept: bool = False
    why: str = ""


@dataclass(frozen=True)
class LatencyTuning(JsonValue):
    """Placement of integers by measured times.

    Attributes:
        runtime: where files were timed, with one thread, in CPU time.
        trials: in order; the last is the best file, made by its recipe alone, if any was kept.
        changes: what differs from the default, in words; empty: the default.
        in_float: whether nothing of the result is quantized.
        ratio, interval: time of the result over that of the default, with its 95 % confidence interval.
        over_float, over_float_interval: the same over the float model.
        ended: whether the time was used up before all candidates were tried.
        overrides: how the recipe of the result differs, as ``KEY=VALUE``, for ``--set``; empty: it is the default.
    """

    runtime: str
    trials: tuple[LatencyTrial, ...]
    changes: tuple[str, ...]
    in_float: bool
    ratio: float
    interval: tuple[float, float]
    over_float: float
    over_float_interval: tuple[float, float]
    ended: bool
    overrides: tuple[str, ...]

    @property
    def text(self) -> str:
        """The result in one clause."""
        count = f"{len(self.trials)} trials{', time used up' if self.ended else ''}"
        if self.changes:
            low, high = self.interval
            time = f"{self.ratio:.2f} of the default's time ({low:.2f} to {high:.2f})"
            if self.in_float:
                return f"the float model, simplified: no file of {count} is faster; {time}"
            return f"{time}, {count}: {'; '.join(self.changes)}"
        if any(trial.kept for trial in self.trials):
            return f"the default; the best file of {count}, made by its recipe alone: {self.trials[-1].why}"
        return f"the default is the fastest of {count}"


@dataclass(frozen=True)
class Advice(JsonValue):
    """The next thing to try.

    Attributes:
        what: the change in words.
        overrides: the change as ``KEY=VALUE``, for ``--set``.
        tested: whether it was measured; otherwise it was not tried, for the time.
        repaired: whether the measured result has no output below its line or limit.
        figure: the figure of the worst output.
        before, after: its value with the interval, and the measured one; "" if it was not tried.
        tried: all measured changes, with the values of that figure; of a search, the trials with the SQNR of the worst
            output on its hold-out set.
        search: after a search, what was tried and the best result; `what` is then the next thing, "" if there is none.
        gain_db: measured reduction of the error of the worst output, in dB; None: not measured.
        untried: the next change, which was not tried for the time; "" if there is none.
        command: the command line to run; None: it is known to the command line alone.
    """

    json_keys: ClassVar = (..., "text", "command")
    what: str
    overrides: tuple[str, ...]
    tested: bool
    repaired: bool
    figure: str
    before: str
    after: str = ""
    tried: tuple[tuple[str, str], ...] = ()
    search: str = ""
    gain_db: float | None = None
    untried: str = ""
    command: str | None = field(default=None, metadata=OPTIONAL)

    @property
    def keywords(self) -> dict[str, Any]:
        """The change as keywords of `sbonnx.quantize`."""
        return keywords_of(self.overrides)

    @property
    def text(self) -> str:
        """One clause with what was measured."""
        if self.search and not self.what:
            return f"{self.search}; in the file, {self.figure} is {self.before}"
        if self.search:
            return f"{self.search}; next: {self.what} (not tried; {self.figure} is {self.before})"
        if not self.tested:
            return f"{self.what} (not tried; {self.figure} is {self.before})"
        reached = "measured"
        if not self.repaired:
            reached += "" if self.gain_db is None else f", {gain_text(self.gain_db)}"
            reached += ", not enough"
        more = f"; not tried: {self.untried}" if self.untried else ""
        return f"{self.what} ({reached}: {self.figure} {self.after}, before {self.before}{more})"


def override_texts(keys: Mapping[str, Any]) -> tuple[str, ...]:
    """Return values of recipe keys as ``KEY=VALUE``, for ``--set``."""
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for key, value in keys.items()
    )


def keywords_of(overrides: Iterable[str]) -> dict[str, Any]:
    """Return changes of `override_texts` as keywords of `sbonnx.quantize`."""
    keywords: dict[str, Any] = {}
    for key, _, value in (change.partition("=") for change in overrides):
        try:
            keywords[key] = json.loads(value)
        except ValueError:
            keywords[key] = value
    return keywords


def python_call(overrides: Iterable[str]) -> str:
    """Return the call of `sbonnx.quantize` with changes of `override_texts`, as Python; "" without changes."""
    keywords = keywords_of(overrides)
    named = [f"{key}={value!r}" for key, value in keywords.items() if key.isidentifier()]
    dotted = {key: value for key, value in keywords.items() if not key.isidentifier()}
    changes = ", ".join([*named, *([f"**{dotted}"] if dotted else [])])
    return f"sbonnx.quantize(..., {changes})" if changes else ""


def gain_text(gain_db: float) -> str:
    """Format the gain of a change: ``1.6 dB gained``, ``nothing gained``."""
    return f"{gain_db:.1f} dB gained" if gain_db >= LEAST_GAIN_DB else "nothing gained"


@dataclass(frozen=True)
class Cause:
    """Why one of the worst layers loses accuracy, and a change of the recipe that reduces the loss.

    Attributes:
        node, op: the layer.
        sqnr_db: isolated error at its outputs: signal-to-noise ratio in dB if only this layer is quantized.
        tensor, role: its quantized tensor that costs most, "activation" or "weight".
        why: what is wrong with that tensor, one clause.
        code: kind of the cause, see `sbonnx explain`.
        remedy: the change in words.
        overrides: the change as ``KEY=VALUE``, for ``--set``; empty if it is not one of the recipe.
        gain_db: measured reduction of the error of the worst output with that change, in dB; None: not measured.
        together: whether that was measured with the changes of the other causes alone.
        command: the command line with that change; None: it is known to the command line alone.
    """

    node: str
    op: str
    sqnr_db: float
    tensor: str
    role: str
    why: Reason = field(metadata={"codes": "code"})
    remedy: str
    overrides: tuple[str, ...] = ()
    gain_db: float | None = None
    together: bool = False
    code: str = field(init=False, default="")
    command: str | None = field(default=None, metadata=OPTIONAL)

    def __post_init__(self) -> None:
        object.__setattr__(self, "code", self.why.code)

    @property
    def keywords(self) -> dict[str, Any]:
        """The change as keywords of `sbonnx.quantize`."""
        return keywords_of(self.overrides)

    @property
    def text(self) -> str:
        """The sentence."""
        part = "weights" if self.role == "weight" else f"input '{self.tensor}'"
        return f"'{self.node}' ({self.op}, {self.sqnr_db:.1f} dB): its {part} {self.why}"

    @property
    def measured(self) -> str:
        """Whether the remedy was measured, and what it gained."""
        others = " with those of the other layers" if self.together else ""
        return "not measured" if self.gain_db is None else f"measured{others}, {gain_text(self.gain_db)}"

    @property
    def options(self) -> str:
        """The options of the command line; "" without."""
        return " ".join(f"--set {shlex.quote(text)}" for text in self.overrides)

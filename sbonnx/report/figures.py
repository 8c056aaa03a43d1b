"""Figures of a result: errors and quality of outputs, integer kernels, metrics on labelled data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal

from sbonnx.report.codes import Problem, Reason, Refusal
from sbonnx.report.notebook import Result
from sbonnx.report.verdict import (
    CLOSE_LOSS,
    LOWER_IS_BETTER,
    OutputState,
    kept_loss_text,
    loss_text,
    lost_text,
    state_of_metric,
    value_text,
)
from sbonnx.values import JsonValue

Nature = Literal["values", "classes", "pixels", "tokens", "embedding", "labels", "detections", "state"]

FigureName = Literal[
    "SQNR",
    "relative error",
    "agreement",
    "KL",
    "centred cosine",
    "detection overlap",
    "equal values",
    "same shape",
]

STEP: Final = "integer kernel"
"""Name of the step in the report's refusals."""


@dataclass(frozen=True)
class OutputDifference:
    """Error metrics of one output of a quantized model.

    Attributes:
        name: name of the output.
        mse, max_abs: mean squared and largest absolute difference, units of the output.
        sqnr_db: signal-to-quantization-noise ratio, dB; -inf if a value is not finite although the float one is.
        cosine: cosine similarity of the flattened outputs.
        agreement: share of equal arg-max over classes (top-1 agreement), None if the output has fewer than two classes.
        not_finite: number of values that are NaN or infinite although the float ones are finite.
        compared: number of values compared.
        mismatched: number of feeds on which the quantized output has another shape, as detections may have.
        constant: the quantized output is a single number, the float one is not.
        frozen: the quantized output is the same for every sample, the float one is not.
        low, high: range of the quantized output.
        spread_db: standard error of `sqnr_db` over the samples (rows of the output), dB; inf for fewer than two.
    """

    name: str
    mse: float
    max_abs: float
    sqnr_db: float
    cosine: float
    agreement: float | None
    not_finite: int
    compared: int
    mismatched: int
    constant: bool
    frozen: bool
    low: float
    high: float
    spread_db: float = math.inf

    @property
    def relative(self) -> float:
        """Energy of the error over that of the output; inf after a total loss, see `sbonnx.metrics.ErrorSum`."""
        return math.inf if self.lost else 10 ** (-self.sqnr_db / 10)

    @property
    def lost(self) -> bool:
        """Whether a value is not finite although the float one is, or the output had another shape."""
        return bool(self.not_finite or self.mismatched)


@dataclass(frozen=True)
class LevelDifference:
    """Error of one output of the quantized file at one of onnxruntime's optimization levels.

    Attributes:
        level: one of `sbonnx.verify.LEVEL_NAMES`.
        output: its name.
        sqnr_db: signal-to-noise ratio in dB against the float model.
        off_db: signal-to-noise ratio in dB against the same file at level "off"; inf if they are equal.
        max_abs: largest absolute difference from level "off", in units of the output.
        feeds: number of feeds that were run.
    """

    level: str
    output: str
    sqnr_db: float
    off_db: float
    max_abs: float
    feeds: int


@dataclass(frozen=True)
class QualityFigure:
    """One figure of an output, with its 95 % confidence interval over the samples.

    Attributes:
        name: a name of `LIMITS`.
        value: in `unit`.
        low, high: ends of the interval; -inf, inf if the samples are too few.
        unit: "dB", "nats", or "" for shares and ratios.
        kept: value up to which accuracy is kept; None: the figure does not decide that.
        line: value from which accuracy is lost; None: the figure does not decide that.
    """

    name: FigureName
    value: float
    low: float
    high: float
    unit: str = ""
    kept: float | None = None
    line: float | None = None

    @property
    def below(self) -> bool:
        """Whether accuracy is lost by this figure: its whole interval is on the wrong side of `line`.

        Without an interval (one sample), only the ratio of an output to its error decides.
        """
        if self.line is None or math.isnan(self.value):
            return False
        if not self.known:
            return self.name == "SQNR" and self.value < self.line
        return self.low > self.line if self.name in LOWER_IS_BETTER else self.high < self.line

    @property
    def known(self) -> bool:
        """Whether it has an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def near(self) -> bool:
        """Whether its value is one of those that accuracy is kept with."""
        if self.kept is None:
            return True
        return self.value <= self.kept if self.name in LOWER_IS_BETTER else self.value >= self.kept

    @property
    def proved(self) -> bool:
        """Whether its whole interval is."""
        if self.kept is None or not self.known:
            return False
        return self.high <= self.kept if self.name in LOWER_IS_BETTER else self.low >= self.kept

    @property
    def may_be_lost(self) -> bool:
        """Whether its interval contains values from `line` on; True without an interval."""
        if self.line is None:
            return False
        return not self.known or (self.high >= self.line if self.name in LOWER_IS_BETTER else self.low <= self.line)

    def text(self) -> str:
        """Format value and interval: ``93.8 % (79.9 to 98.3)``."""
        return value_text(self.name, self.value, self.low, self.high, self.unit)


@dataclass(frozen=True)
class OutputQuality:
    """Quality of one output.

    Attributes:
        name: name of the output.
        nature: a key of `FIGURES`.
        why: the reason for the nature.
        samples: number of samples compared.
        figures: those of the nature.
        state: what they prove: "kept", "lost", "uncertain"; "unjudged" for states, whose effect is in other outputs,
            and for labels of few samples beside other outputs.
        decided_by: name of the figure that decided the state; None if none did.
    """

    name: str
    nature: Nature
    why: str
    samples: int
    figures: tuple[QualityFigure, ...]
    state: OutputState = "uncertain"
    decided_by: FigureName | None = None

    @property
    def problem(self) -> Problem | None:
        """The loss that the figures of an output prove; None if they do not prove one."""
        if self.state != "lost":
            return None
        parts = (
            f"{figure.name} {figure.text()}, {lost_text(figure.name, figure.line)}"
            for figure in proving_loss(self.figures)
        )
        text = f"output '{self.name}' is far from float on {self.samples} samples: {'; '.join(parts)}"
        return Problem("output-far-from-float", text)

    def figure(self, name: FigureName) -> QualityFigure | None:
        """Return a figure by name, or None."""
        return next((figure for figure in self.figures if figure.name == name), None)


def proving_loss(figures: Sequence[QualityFigure]) -> list[QualityFigure]:
    """Return the figures that prove a loss: an agreement does not while KL is within its limit."""
    sure = all(figure.name != "KL" or not figure.near for figure in figures)
    return [figure for figure in figures if figure.below and (sure or figure.name != "agreement")]


@dataclass(frozen=True)
class FloatOp:
    """An op after a DequantizeLinear that onnxruntime computes in float.

    Attributes:
        node: its name in the quantized file.
        op: its type in the quantized file.
        why: the reason, one clause.
    """

    node: str
    op: str
    why: Reason


@dataclass(frozen=True)
class Kernels(JsonValue):
    """Integer coverage of a quantized file on onnxruntime's CPU provider, or in the runtime that executed it.

    Planned ops are those between pairs that could have an integer kernel: ops with a quantized weight, ops of
    `INTEGER_ON_CPU` whose inputs all come from pairs and whose output goes into one, and ops that are already integer
    ops in the file.

    Attributes:
        integer: number of integer kernels by name, as executed.
        floating: number of other kernels by name, without Q and DQ.
        quantize, dequantize: number of remaining QuantizeLinear and DequantizeLinear kernels.
        planned: number of planned ops.
        folded: planned ops without their own kernel: fused into another, or removed.
        float_weighted: planned ops with a weight that run in float.
        float_planned: other planned ops that run in float.
        stranded: unplanned ops that run in float between a DQ and a Q.
        weights_in_integers: share of all weight values that integer kernels read; 1 without weights. Weights are the
            constants of linear, recurrent and integer ops, and all others of more than one axis.
        float_weights: number of the other weight values, by the op that reads them.
        skipped: reason why nothing was counted, or "".
    """

    json_keys: ClassVar = ("in_integers", "share", ...)
    integer: Mapping[str, int] = field(default_factory=dict)
    floating: Mapping[str, int] = field(default_factory=dict)
    quantize: int = 0
    dequantize: int = 0
    planned: int = 0
    folded: int = 0
    float_weighted: tuple[FloatOp, ...] = ()
    float_planned: tuple[FloatOp, ...] = ()
    stranded: tuple[FloatOp, ...] = ()
    weights_in_integers: float = 1.0
    float_weights: Mapping[str, int] = field(default_factory=dict)
    skipped: str = ""

    @property
    def with_kernel(self) -> int:
        """Number of planned ops that were not folded away."""
        return self.planned - self.folded

    @property
    def in_integers(self) -> int:
        """Number of planned ops that run in integers."""
        return self.with_kernel - len(self.float_weighted) - len(self.float_planned)

    @property
    def share(self) -> float | None:
        """Share of the planned ops with a kernel that run in integers; None if nothing was planned or counted."""
        return self.in_integers / self.with_kernel if self.with_kernel and not self.skipped else None

    @property
    def left_float(self) -> tuple[FloatOp, ...]:
        """All ops that run in float after a pair."""
        return (*self.float_weighted, *self.float_planned, *self.stranded)

    def refusals(self) -> tuple[Refusal, ...]:
        """Return the ops left in float as refusals, for the report."""
        return tuple(
            Refusal(STEP, kernel.node, Reason(kernel.why.code, f"{kernel.op} runs in float: {kernel.why}"))
            for kernel in self.left_float
        )

    def summary(self) -> str:
        """Return one line for people."""
        if self.skipped:
            return f"not counted: {self.skipped}"
        text = f"{self.in_integers} of {self.with_kernel} planned ops"
        if self.folded:
            text += f" ({self.folded} more folded away)"
        return text


@dataclass(frozen=True)
class MetricValue:
    """Value of a metric with its 95 % confidence interval; -inf, inf if it is unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class MetricRow:
    """Metric of one model.

    Attributes:
        model: path, or a name.
        metric: its value.
        difference: its value minus that of the first model, on the same samples; None for the first.
        loss: how much worse it is than the first model, see `TaskMetricKind.loss`; 0 for the first.
    """

    model: str
    metric: MetricValue
    difference: MetricValue | None = None
    loss: float = 0.0


@dataclass(frozen=True, repr=False)
class Evaluation(Result):
    """Metric of models on the same labelled samples.

    Attributes:
        metric: its name.
        unit: "dB" or "".
        higher_is_better: direction.
        share: differences are absolute; else `MetricRow.loss` is relative.
        samples: number of samples.
        interval: how the intervals were computed: "wilson" (differences: of paired shares) or "bootstrap".
        chance: value of the metric if classes are guessed; None if it is unknown.
        rows: one for each model, in order.
        max_loss: loss that was allowed; None: no limit was set.
    """

    frame_of: ClassVar = "rows"

    metric: str
    unit: str
    higher_is_better: bool
    share: bool
    samples: int
    interval: str
    rows: tuple[MetricRow, ...]
    max_loss: float | None = None
    chance: float | None = None

    def problems(self, name: str = "max_loss") -> tuple[Problem, ...]:
        """Return a problem if the second model's loss is unknown or above `max_loss`; without it, above `CLOSE_LOSS`.

        With `max_loss`, the loss itself is compared, else its whole interval.

        Args:
            name: of the limit.
        """
        first, second = self.rows[0], self.rows[1]
        change = f"{self.metric} goes from {first.metric.value:.5g} to {second.metric.value:.5g}"
        if self.max_loss is None:
            missed = state_of_metric(self, CLOSE_LOSS) == "lost"
            text = f"{change}, {loss_text(self)} on {self.samples} samples, {kept_loss_text(self)}"
        else:
            missed = not second.loss <= self.max_loss
            loss = f"{second.loss:.4g}{'' if self.share else ' (relative)'}"
            text = f"{change}, a loss of {loss} on {self.samples} samples; {name} allows {self.max_loss:g}"
        return (Problem("loss-above-limit", text),) if missed else ()


Float = float


@dataclass(frozen=True)
class OwnMetric:
    """Value of a job's own metric for both models.

    Attributes:
        name: its name.
        float, quantized: values of the models.
    """

    name: str
    float: Float
    quantized: Float

"""Quality of each output by its nature: figures with confidence intervals, and the lines below which it is too low."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import onnx

from sbonnx.metrics import ratio_db
from sbonnx.report.verdict import below_line, value_text
from sbonnx.spec import Array
from sbonnx.verify import intervals
from sbonnx.verify.intervals import Interval
from sbonnx.verify.natures import Nature, nature_of
from sbonnx.verify.output_forms import UNKNOWN_FORM, output_forms
from sbonnx.verify.output_samples import OutputSamples

FigureName = Literal["SQNR", "SNR", "agreement", "KL", "relative error", "cosine", "equal values", "same shape"]

UNITS: Final[Mapping[FigureName, str]] = {"SQNR": "dB", "SNR": "dB", "KL": "nats"}
"""Units of figures; the others are shares or ratios."""

LINES: Final[Mapping[Nature, Mapping[FigureName, float | None]]] = {
    "classes": {"agreement": 0.75, "KL": 0.1, "relative error": 0.2},
    "embedding": {"cosine": 0.98},
    "regression": {"relative error": 0.2},
    "signal": {"SNR": 15.0},
    "state": {"relative error": None},
    "sequence": {"relative error": 0.35},
    "features": {"relative error": 0.25},
    "labels": {"equal values": 0.75},
    "detections": {},
}
"""Figures of each nature with their lines, None without one. docs/verification.md has the reason of each.

Classes have a relative error only if all samples have one top class: their agreement says nothing then.
"""


@dataclass(frozen=True)
class QualityFigure:
    """One figure of an output, with its 95 % confidence interval over the samples.

    Attributes:
        name: a name of `LINES`, or "SQNR".
        value: in `unit`.
        low, high: ends of the interval; -inf, inf if the samples are too few.
        unit: "dB", "nats", or "" for shares and ratios.
        line: the quality line, None without one.
    """

    name: FigureName
    value: float
    low: float
    high: float
    unit: str = ""
    line: float | None = None

    @property
    def below(self) -> bool:
        """Whether the whole interval, and with it the value, is on the wrong side of the line.

        Without an interval (one sample), the value decides.
        """
        return below_line(self.name, self.value, self.low, self.high, self.line)

    def text(self) -> str:
        """Format value and interval: ``93.8 % (79.9 to 98.3)``."""
        return value_text(self.name, self.value, self.low, self.high, self.unit)


@dataclass(frozen=True)
class OutputQuality:
    """Quality of one output.

    Attributes:
        name: name of the output.
        nature: a key of `LINES`.
        why: the reason for the nature.
        samples: number of samples compared.
        figures: "SQNR", then those of the nature.
    """

    name: str
    nature: Nature
    why: str
    samples: int
    figures: tuple[QualityFigure, ...]

    @property
    def problem(self) -> str:
        """Sentence about the figures below their lines; "" without any."""
        bad = [figure for figure in self.figures if figure.below]
        if not bad:
            return ""
        parts = (f"{figure.name} {figure.text()}, line {_line_text(figure)}" for figure in bad)
        what = f"output '{self.name}' ({self.nature}, {self.samples} samples)"
        return f"{what} is below the quality line: {'; '.join(parts)}"

    def figure(self, name: FigureName) -> QualityFigure | None:
        """Return a figure by name, or None."""
        return next((figure for figure in self.figures if figure.name == name), None)


def _line_text(figure: QualityFigure) -> str:
    line = figure.line if figure.line is not None else math.nan
    return f"{100 * line:g} %" if figure.name in ("agreement", "equal values") else f"{line:g}"


class QualitySamples:
    """Accumulates the outputs of both models, feed by feed."""

    def __init__(self, names: Sequence[str], model: onnx.ModelProto | None) -> None:
        """Create it.

        Args:
            names: outputs, in order.
            model: the float model, whose structure helps to decide natures; None: values alone decide.
        """
        forms = {} if model is None else output_forms(model)
        self._outputs = [(name, OutputSamples(forms.get(name, UNKNOWN_FORM))) for name in names]
        self._inputs = [] if model is None else [value.name for value in model.graph.input]

    def add(self, reference: Sequence[Any], value: Sequence[Any], feeds: Mapping[str, Array]) -> None:
        """Add the outputs of one feed, in the order of the names."""
        ordered = [feeds[name] for name in self._inputs if name in feeds] or list(feeds.values())
        for (_, samples), ref, val in zip(self._outputs, reference, value, strict=True):
            samples.add(ref, val, ordered)

    def result(self) -> tuple[OutputQuality, ...]:
        """Return the quality of each output that was compared."""
        many = len(self._outputs)
        return tuple(_quality(name, samples, many) for name, samples in self._outputs if samples.same_shape)


def _quality(name: str, samples: OutputSamples, outputs: int) -> OutputQuality:
    nature, why = nature_of(samples, outputs)
    energies = np.asarray(samples.energies, np.float64).reshape(-1, 2)
    figures: list[QualityFigure] = []
    if len(energies):
        value = ratio_db(float(energies[:, 0].sum()), float(energies[:, 1].sum()))
        figures.append(_figure("SQNR", value, _in_db(intervals.of_ratio(energies[:, 1], energies[:, 0])), None))
    for kind, line in LINES[nature].items():
        if nature == "classes" and kind == "relative error" and not samples.one_class:
            continue
        figures.extend(_figure(kind, *found, line) for found in _measured(kind, samples, energies))
    if nature == "detections":
        same = sum(samples.same_shape)
        figures.append(
            _figure("same shape", same / len(samples.same_shape), intervals.wilson(same, len(samples.same_shape)), None)
        )
    return OutputQuality(name, nature, why, len(samples.same_shape), tuple(figures))


def _figure(name: FigureName, value: float, interval: Interval, line: float | None) -> QualityFigure:
    return QualityFigure(name, value, *interval, UNITS.get(name, ""), line)


def _in_db(interval: Interval) -> Interval:
    """Convert the interval of noise over signal to decibel of signal over noise."""
    low, high = interval
    return (-10 * math.log10(high), -10 * math.log10(low)) if 0 < low and math.isfinite(high) else intervals.UNKNOWN


def _measured(name: FigureName, samples: OutputSamples, energies: Array) -> Iterator[tuple[float, Interval]]:
    """Yield value and interval of a figure; nothing if it has no value."""
    if name == "agreement" and samples.agree:
        yield _share(samples.agree)
    elif name == "equal values" and samples.equal:
        yield _share(samples.equal)
    elif name == "KL" and samples.divergences:
        yield _mean(samples.divergences, least=0.0)
    elif name == "cosine" and samples.cosines:
        yield _mean(samples.cosines, least=-1.0, most=1.0)
    elif name == "SNR" and len(energies):
        value = ratio_db(float(energies[:, 0].sum()), float(energies[:, 1].sum()))
        yield value, _in_db(intervals.of_ratio(energies[:, 1], energies[:, 0]))
    elif name == "relative error" and len(energies):
        yield _relative_error(samples, energies)


def _share(values: Sequence[float]) -> tuple[float, Interval]:
    """Return the mean share: Wilson's interval if each sample is a hit or a miss, else Student's."""
    if set(values) <= {0.0, 1.0}:
        return float(np.mean(values)), intervals.wilson(int(sum(values)), len(values))
    return _mean(values, least=0.0, most=1.0)


def _mean(values: Sequence[float], least: float, most: float = math.inf) -> tuple[float, Interval]:
    low, high = intervals.of_mean(np.asarray(values, np.float64))
    return float(np.mean(values)), (max(low, least) if low > -math.inf else low, min(high, most))


def _relative_error(samples: OutputSamples, energies: Array) -> tuple[float, Interval]:
    """Return the root of the energy of the error over that of the variation between samples, and its interval.

    Anchors, background scores and other values that every sample has in common would hide the error of the rest. The
    denominator is the variation of all samples; with one sample, different shapes or no variation, it is the energy.
    """
    noise, signal = energies[:, 1], energies[:, 0]
    varied = samples.variation()
    below = np.full(len(noise), varied / len(noise)) if varied > 0 else signal
    if not below.sum():
        return (math.inf if noise.sum() else 0.0), intervals.UNKNOWN
    low, high = intervals.of_ratio(noise, below)
    root = (math.sqrt(low), math.sqrt(high)) if low > 0 and math.isfinite(high) else intervals.UNKNOWN
    return math.sqrt(float(noise.sum() / below.sum())), root

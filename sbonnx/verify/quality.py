"""Quality of each output: figures with confidence intervals, and whether they prove that accuracy is kept or lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.detectors import HeadDecoder
from sbonnx.graph import Graph
from sbonnx.metrics import ratio_db
from sbonnx.metrics.detection import compared_detections, overlap_share
from sbonnx.recipe.names import OutputTask
from sbonnx.report.figures import FigureName, Nature, OutputQuality, QualityFigure, proving_loss
from sbonnx.report.verdict import OutputState, used_share
from sbonnx.spec import Array
from sbonnx.verify import intervals
from sbonnx.verify.intervals import Interval
from sbonnx.verify.natures import (
    CLASSES,
    Tasks,
    check_task,
    decoder_of,
    given_nature,
    nature_of,
    read_detections,
    state_reason,
    tasks_of,
)
from sbonnx.verify.output_forms import UNKNOWN_FORM, output_forms
from sbonnx.verify.output_samples import OutputSamples, SampleSpread, rows_of

UNITS: Final[Mapping[FigureName, str]] = {"SQNR": "dB", "KL": "nats"}
"""Units of figures; the others are shares or ratios."""


@dataclass(frozen=True)
class FigureLimits:
    """Limits of one figure: up to `kept` accuracy is kept, from `lost` on it is lost; None: it does not decide that."""

    kept: float | None
    lost: float | None


LIMITS: Final[Mapping[FigureName, FigureLimits]] = {
    "SQNR": FigureLimits(None, 6.0),
    "relative error": FigureLimits(0.1, 0.5),
    "agreement": FigureLimits(0.95, 0.75),
    "KL": FigureLimits(0.02, 0.1),
    "centred cosine": FigureLimits(0.97, 0.7),
    "detection overlap": FigureLimits(0.95, 0.5),
    "equal values": FigureLimits(0.95, 0.75),
    "same shape": FigureLimits(1.0, None),
}
"""Limits of the figures, whatever the output. docs/verification.md has the reason of each."""

FIGURES: Final[Mapping[Nature, tuple[FigureName, ...]]] = {
    "values": ("SQNR", "relative error"),
    "classes": ("SQNR", "agreement", "KL", "relative error"),
    "pixels": ("SQNR", "agreement", "KL", "relative error"),
    "tokens": ("SQNR", "agreement", "KL", "relative error"),
    "embedding": ("SQNR", "centred cosine", "relative error"),
    "labels": ("equal values",),
    "detections": ("SQNR", "same shape"),
    "state": ("SQNR", "relative error"),
}
"""Figures of each nature. Of classes, agreement and KL are left out if all samples have one top class. Outputs of which
some samples have another shape than in float have "same shape" too.
"""

ENOUGH: Final = 6
"""Number of samples from which an interval may prove that accuracy is kept."""

ENOUGH_CLASSES: Final = 32
"""Number of samples from which classes may prove it without a small error: few samples hold no close decision."""

RESOLVED: Final = 1e-4
"""Least variation between samples, as a share of the energy of an output, whose loss is proved: 40 dB below, an 8-bit
code of the output has little left of it. Boxes of a detector, around their anchors, have 5e-4 (ultraface)."""

ALIKE: Final = 0.05
"""Share of the variation of the inputs between samples below which samples are too alike to prove that the variation of
an output is lost, such as frames of one recording. Photographs of different things have 0.9."""


Judgement = tuple[OutputState, FigureName | None]
"""State of an output, and the figure that decided it."""


def judge(nature: Nature, figures: Sequence[QualityFigure], samples: int) -> Judgement:
    """Decide what the figures of an output prove, and by which of them.

    Lost: a whole interval is on the wrong side of its limit. Kept: the interval of the relative error is within its
    limit as a whole, and there are `ENOUGH` samples; or all figures of classes are within their limits, an interval of
    them as a whole, none contains values that are lost, and there are `ENOUGH_CLASSES`. Decisions that change although
    the probabilities hardly do (agreement low, KL within its limit) prove no loss. Uncertain: the figure that is not
    within its limit, or whose interval is too wide.
    """
    by_name = {figure.name: figure for figure in figures}
    shape = by_name.pop("same shape", None)
    apart = shape is not None and not shape.near
    if nature == "state":
        return "unjudged", None
    if not apart and "SQNR" in by_name and by_name["SQNR"].value == math.inf:
        return "kept", "SQNR"
    if nature == "detections" and "detection overlap" not in by_name:
        return "uncertain", None
    losing = proving_loss(figures)
    if losing:
        return "lost", max(losing, key=lambda figure: used_share(figure.name, figure.value, figure.line)).name
    if apart:
        return "uncertain", "same shape"
    error = by_name.pop("relative error", None)
    by_name.pop("SQNR", None)
    close = error is not None and error.proved and samples >= ENOUGH
    if not by_name:  # values
        return "kept" if close else "uncertain", None if error is None else error.name
    far = [figure for figure in by_name.values() if not figure.near]
    if far:
        return "uncertain", max(far, key=lambda figure: used_share(figure.name, figure.value, figure.kept)).name
    if close:
        return "kept", "relative error"
    open_ = [figure for figure in by_name.values() if figure.may_be_lost]
    if open_:
        return "uncertain", open_[0].name
    ordered = sorted(by_name.values(), key=lambda figure: (not figure.proved, figure.name != "KL"))
    return "kept" if ordered[0].proved and samples >= ENOUGH_CLASSES else "uncertain", ordered[0].name


class QualitySamples:
    """Accumulates the outputs of both models, feed by feed."""

    def __init__(
        self,
        names: Sequence[str],
        model: onnx.ModelProto | None,
        tasks: Tasks = None,
        load: Callable[[], Graph] | None = None,
        head: str | None = None,
    ) -> None:
        """Create it.

        Args:
            names: outputs, in order.
            model: the float model, whose structure helps to decide natures; None: values alone decide.
            tasks: what outputs mean, as the user says.
            load: loads the graph of the float model, whose head says what boxes the outputs of a detector are; None:
                they are detections.
            head: that head, as the user states it; None: recognized.

        Raises:
            RecipeError: an output of `tasks` does not exist, or there is no such head.
        """
        forms, chosen = {} if model is None else output_forms(model), tasks_of(tasks, names)

        def choose(place: int) -> Callable[[OutputSamples], OutputTask | None]:
            return partial(self._task_of, chosen.get(names[place]), place, not isinstance(tasks, Mapping))

        self._outputs = [
            (name, OutputSamples(forms.get(name, UNKNOWN_FORM), choose(place))) for place, name in enumerate(names)
        ]
        self._detections = _DetectionSamples(None if load is None else decoder_of(load, head))
        self._differences = _InputDifferences()
        self._inputs = [] if model is None else [value.name for value in model.graph.input]

    def add(self, reference: Sequence[Any], value: Sequence[Any], feeds: Mapping[str, Array]) -> None:
        """Add the outputs of one feed, in the order of the names.

        Raises:
            RecipeError: an output cannot have the task that is given.
        """
        ordered = {name: feeds[name] for name in self._inputs if name in feeds} or dict(feeds)
        for (_, samples), ref, val in zip(self._outputs, reference, value, strict=True):
            samples.add(ref, val, ordered)
        self._detections.add(
            {
                name: (ref, val)
                for (name, samples), ref, val in zip(self._outputs, reference, value, strict=True)
                if samples.task == "detection"
            },
            ordered,
        )
        self._differences.add(ordered)

    def result(self) -> tuple[OutputQuality, ...]:
        """Return the quality of each output that was compared."""
        many, alike = len(self._outputs), self._differences.alike
        rows = tuple(
            self._detections.quality(name, samples)
            if samples.task == "detection"
            else _quality(name, samples, many, place, alike=alike)
            for place, (name, samples) in enumerate(self._outputs)
            if samples.same_shape
        )
        others = any(row.nature not in ("labels", "state") for row in rows)
        return tuple(_beside_others(row) if others else row for row in rows)

    def _task_of(
        self, task: OutputTask | None, place: int, everywhere: bool, samples: OutputSamples
    ) -> OutputTask | None:
        """Return the task of an output after its first feed: none of a state, unless it is named.

        Raises:
            RecipeError: the output cannot have it.
        """
        if task is None or (everywhere and state_reason(samples, len(self._outputs), place)):
            return None
        check_task(task, self._outputs[place][0], samples.array, real=samples.kind == "f")
        return task


class _DetectionSamples:
    """Accumulates detections of both models, which may be in several outputs: boxes, scores, classes."""

    def __init__(self, decoder: HeadDecoder | None) -> None:
        self._decoder = decoder
        self._names: list[str] = []
        self._shares: list[float] = []
        self._count = 0

    def add(self, outputs: Mapping[str, tuple[Array, Array]], feeds: Mapping[str, Array]) -> None:
        """Add the detections of one feed, (float, quantized) by output. Images without any say nothing."""
        if not outputs:
            return
        self._names = list(outputs)
        floats, others = (
            read_detections({name: pair[which] for name, pair in outputs.items()}, feeds, self._decoder)
            for which in (0, 1)
        )
        for boxes, quantized_boxes in zip(floats, others, strict=True):
            share = overlap_share(boxes, quantized_boxes)
            if share is not None:
                self._shares.append(share)
                self._count += len(compared_detections(boxes).scores)

    def quality(self, name: str, samples: OutputSamples) -> OutputQuality:
        """Return the quality of an output: the first one has the figure of all."""
        nature, why = given_nature("detection", samples)
        count = len(self._shares)
        figures: tuple[QualityFigure, ...] = ()
        if self._shares and name == self._names[0]:
            same = all(share == 1.0 for share in self._shares)
            value = (1.0, intervals.wilson(self._count, self._count)) if same else _mean(self._shares, 0.0, 1.0)
            figures = (_figure("detection overlap", *value),)
        state, by = judge(nature, figures, count)
        return OutputQuality(name, nature, why, count, figures, state if figures else "unjudged", by)


class _InputDifferences:
    """Accumulates whether the samples of the inputs differ, feed by feed."""

    def __init__(self) -> None:
        self._spreads: dict[str, SampleSpread] = {}
        self._sums: dict[str, tuple[float, int]] = {}
        self._differ = False

    def add(self, feeds: Mapping[str, Array]) -> None:
        """Add the samples of one feed."""
        rows = rows_of(feeds.values())
        for name, array in feeds.items():
            if array.dtype.kind not in "fiub" or not array.size:
                continue
            spread = self._spreads.setdefault(name, SampleSpread())
            for sample in array if array.ndim and len(array) == rows else [array]:
                spread.add(np.asarray(sample, np.float64))
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + float(array.sum(dtype=np.float64)), count + array.size
            self._differ |= array.dtype.kind != "f" and spread.variation() > 0

    @property
    def alike(self) -> bool:
        """Whether the samples of all inputs are nearly the same, by `ALIKE`."""
        if self._differ:
            return False
        for name, spread in self._spreads.items():
            total, count = self._sums[name]
            around = spread.energy - total * total / count
            if spread.several_shapes or spread.variation() > ALIKE * around:
                return False
        return True


def _beside_others(output: OutputQuality) -> OutputQuality:
    """Return an output of labels on too few samples as unjudged; other outputs decide the verdict."""
    few = output.nature == "labels" and output.state == "uncertain" and all(figure.near for figure in output.figures)
    return replace(output, state="unjudged") if few else output


def _quality(name: str, samples: OutputSamples, outputs: int, place: int, *, alike: bool) -> OutputQuality:
    if samples.task is None:
        nature, why = nature_of(samples, outputs, place)
    else:
        nature, why = given_nature(samples.task, samples)
    kinds = FIGURES[nature]
    if nature in CLASSES and samples.one_class:
        kinds = FIGURES["values"]
    if not all(samples.same_shape) and "same shape" not in kinds:
        kinds = (*kinds, "same shape")
    decides = not {"KL", "centred cosine"} & set(kinds)
    figures = tuple(figure for kind in kinds for figure in _measured(kind, samples, alike, decides=decides))
    count = len(samples.same_shape)
    return OutputQuality(name, nature, why, count, figures, *judge(nature, figures, count))


def _figure(name: FigureName, value: float, interval: Interval, *, decides: bool = True) -> QualityFigure:
    limits = LIMITS[name]
    return QualityFigure(name, value, *interval, UNITS.get(name, ""), limits.kept, limits.lost if decides else None)


def _in_db(interval: Interval) -> Interval:
    """Convert the interval of noise over signal to decibel of signal over noise."""
    low, high = interval
    return (-10 * math.log10(high), -10 * math.log10(low)) if 0 < low and math.isfinite(high) else intervals.UNKNOWN


def _measured(name: FigureName, samples: OutputSamples, alike: bool, *, decides: bool) -> Iterator[QualityFigure]:
    """Yield a figure; nothing if it has no value. `decides`: the relative error may prove a loss."""
    energies = np.asarray(samples.errors.parts, np.float64).reshape(-1, 2)
    if name == "agreement" and samples.decisions.agree:
        yield _figure(name, *_share(samples.decisions.agree))
    elif name == "centred cosine" and samples.vectors:
        yield _figure(name, *_mean(_centred_cosines(samples.vectors), -1.0, 1.0))
    elif name == "equal values" and samples.equal:
        yield _figure(name, *_share(samples.equal), decides=not samples.wide_integers or samples.form.end == "index")
    elif name == "same shape":
        yield _figure(name, *_share([float(same) for same in samples.same_shape]))
    elif name == "KL" and samples.decisions.divergences:
        yield _figure(name, *_mean(samples.decisions.divergences, least=0.0))
    elif name == "SQNR" and len(energies):
        value = ratio_db(float(energies[:, 0].sum()), float(energies[:, 1].sum()))
        interval = _in_db(intervals.of_ratio(energies[:, 1], energies[:, 0]))
        yield _figure(name, value, interval, decides=bool(energies[:, 0].any()))
    elif name == "relative error" and len(energies):
        yield _relative_error(samples, energies, decides=decides and not alike)


def _share(values: Sequence[float]) -> tuple[float, Interval]:
    """Return the mean share: Wilson's interval if each sample is a hit or a miss, else Student's."""
    if set(values) <= {0.0, 1.0}:
        return float(np.mean(values)), intervals.wilson(int(sum(values)), len(values))
    return _mean(values, least=0.0, most=1.0)


def _mean(values: Sequence[float], least: float, most: float = math.inf) -> tuple[float, Interval]:
    low, high = intervals.of_mean(np.asarray(values, np.float64))
    return float(np.mean(values)), (max(low, least) if low > -math.inf else low, min(high, most))


def _centred_cosines(vectors: Sequence[tuple[Array, Array]]) -> list[float]:
    """Return the cosine of the float and the quantized vector of each sample, less the mean of those of float.

    What all vectors have in common does not tell samples apart. A vector that is equal to the mean has 1 if both are.
    """
    middle = np.mean([ref for ref, _ in vectors], 0) if len(vectors) > 1 else 0.0
    cosines = []
    for ref, val in ((ref - middle, val - middle) for ref, val in vectors):
        norm = float(np.linalg.norm(ref) * np.linalg.norm(val))
        cosines.append(float(ref @ val) / norm if norm else float(np.array_equal(ref, val)))
    return cosines


def _relative_error(samples: OutputSamples, energies: Array, *, decides: bool) -> QualityFigure:
    """Return the root of the energy of the error over that of the variation between samples, and its interval.

    Anchors, background scores and other values that every sample has in common would hide the error of the rest. The
    denominator is the variation of all samples; with one sample, different shapes or no variation, it is the energy.
    It proves no loss where there is next to no variation to lose (`RESOLVED`), or samples are alike.
    """
    noise, signal = energies[:, 1], energies[:, 0]
    varied = samples.spread.variation()
    below = np.full(len(noise), varied / len(noise)) if varied > 0 else signal
    decides = bool(decides and varied >= RESOLVED * signal.sum())
    if not below.sum():
        return _figure("relative error", math.inf if noise.sum() else 0.0, intervals.UNKNOWN, decides=decides)
    low, high = intervals.of_ratio(noise, below)
    root = (math.sqrt(low), math.sqrt(high)) if low > 0 and math.isfinite(high) else intervals.UNKNOWN
    return _figure("relative error", math.sqrt(float(noise.sum() / below.sum())), root, decides=decides)

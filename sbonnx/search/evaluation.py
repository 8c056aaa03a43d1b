"""Evaluation of quantized networks on a hold-out set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import numpy as np

from sbonnx.calib.data import Source
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized.forward import Forward
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.metrics import LOSS_TEXT, LossKind, Metric, OutputDifferences, changed_share, loss_kind, loss_of
from sbonnx.plan import Solution
from sbonnx.report.figures import OutputDifference
from sbonnx.stages.state import Prepared
from sbonnx.verify import LabelledLoss

MOST_HELD: Final = 256
"""Maximum number of feeds in the hold-out set of trials."""

SURE: Final = 2.0
PAIRS: Final = 8
"""Minimum gain in standard errors (SURE), tested if there are at least PAIRS feeds."""

FEW: Final = 4
"""Minimum number of feeds for a hold-out set."""


@dataclass(frozen=True)
class Score:
    """Error of a quantized network on the hold-out set.

    Attributes:
        error: energy of the outputs' error divided by that of the outputs, mean over outputs. Trials are compared by
            it.
        loss: the loss that a limit refers to, see `Judge.kind`.
        sqnr_db: signal-to-noise ratio of the worst output, decibel.
        changed: share of samples whose top-1 class differs from float; None unless the model has one output of classes.
        by_feed: error of each feed. Its mean is `error`, unless an output has infinite error.
    """

    error: float
    loss: float
    sqnr_db: float
    changed: float | None
    by_feed: tuple[float, ...] = field(default=(), repr=False, compare=False)

    def beats(self, other: Score, least: float) -> bool:
        """Return whether the error is smaller by a share of at least `least`, and significantly smaller.

        Significance is a paired test: the mean difference over feeds is at least `SURE` standard errors.
        """
        if not self.error < other.error * (1 - least):
            return False
        if len(self.by_feed) < PAIRS or not math.isfinite(other.error):
            return True
        differences = np.subtract(other.by_feed, self.by_feed)
        return bool(differences.mean() >= SURE * differences.std(ddof=1) / math.sqrt(len(differences)))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"error": self.error, "loss": self.loss, "sqnr_db": self.sqnr_db, "changed": self.changed}


@dataclass(frozen=True)
class Goal:
    """Required quality of the outputs on the hold-out set; None: no requirement.

    Attributes:
        max_loss: maximum loss, see `Judge.kind`.
        min_sqnr_db: minimum signal-to-noise ratio of the worst output, decibel.
        kind: kind of the loss.
    """

    max_loss: float | None
    min_sqnr_db: float | None
    kind: LossKind

    @property
    def asked(self) -> bool:
        """Whether there is any requirement."""
        return self.max_loss is not None or self.min_sqnr_db is not None

    def reached(self, score: Score) -> bool:
        """Return whether a score meets the goal."""
        loss = self.max_loss is None or score.loss <= self.max_loss
        return loss and (self.min_sqnr_db is None or score.sqnr_db >= self.min_sqnr_db)

    @property
    def text(self) -> str:
        """Text of the goal, such as ``a loss (share of samples whose largest class changes) of at most 0.005``."""
        parts = [] if self.max_loss is None else [f"a loss ({LOSS_TEXT[self.kind]}) of at most {self.max_loss:.3g}"]
        parts += [] if self.min_sqnr_db is None else [f"at least {self.min_sqnr_db:g} dB"]
        return " and ".join(parts)

    def figures(self, score: Score) -> str:
        """Format the values of a score that the goal refers to."""
        parts = [] if self.max_loss is None else [f"loss {score.loss:.3g}"]
        parts += [] if self.min_sqnr_db is None else [f"{score.sqnr_db:.1f} dB"]
        return ", ".join(parts)


@dataclass(frozen=True)
class TrialFeeds:
    """The feeds, split into a calibration set and a hold-out set.

    Attributes:
        fit: calibration set of the trials.
        held: hold-out set for evaluation; equal to `fit` if there are too few feeds to split.
        divided: whether the two sets are disjoint.
    """

    fit: Dataset
    held: Dataset
    divided: bool


def divide(data: Dataset, graph: Graph, share: float, most: int) -> TrialFeeds:
    """Split feeds into a hold-out set, evenly spread over the data, and a calibration set of at most `most` feeds.

    If there are fewer than `FEW` feeds with several samples each, they are first split into single samples.

    Args:
        share: share of feeds that is held out, 0 to below 1; 0: none.
    """
    if len(data) < FEW and data.split is None and _has_samples(data):
        data = datasets.read(data, graph, split=1)
    total = len(data)
    count = min(MOST_HELD, max(1, round(share * total))) if share else 0
    if total < FEW or not count:
        everything = _part(data, graph, frozenset(range(min(total, most))))
        return TrialFeeds(everything, everything, divided=False)
    held = frozenset(_spread(total, count))
    rest = [place for place in range(total) if place not in held]
    chosen = frozenset(rest[place] for place in _spread(len(rest), min(most, len(rest))))
    return TrialFeeds(_part(data, graph, chosen), _part(data, graph, held), divided=True)


def _has_samples(data: Dataset) -> bool:
    """Return whether every feed holds several samples along a dynamic leading axis."""
    if any(not spec.shape or isinstance(spec.shape[0], int) for spec in data.inputs):
        return False
    lengths = {array.shape[0] for feed in data for array in feed.values() if array.ndim}
    return bool(lengths) and min(lengths) > 1


def _spread(total: int, count: int) -> list[int]:
    """Return `count` of `total` positions, evenly spaced: the middle of each interval."""
    return [(2 * number + 1) * total // (2 * count) for number in range(count)]


def _part(data: Dataset, graph: Graph, chosen: frozenset[int]) -> Dataset:
    def walk() -> Iterator[tuple[str, Any]]:
        return (item for place, item in enumerate(data.items()) if place in chosen)

    return datasets.read(Source(data.name, walk, len(chosen)), graph)


@final
@dataclass(frozen=True)
class Judge:
    """Evaluates quantized networks against the float model on the hold-out set.

    Attributes:
        graph: the float model, simplified and fused, without any changes that a recipe makes (such as equalization).
        held: the hold-out set.
        kind: meaning of `Score.loss`: "top1": share of samples whose top-1 class changes; "relative": norm of the
            error divided by that of the output, for the worst output; "metric": mean of `metric` over feeds, or the
            loss of `labelled`.
        labelled: loss in a task metric on labelled data, in place of `metric`.
    """

    graph: Graph
    held: Dataset
    kind: LossKind
    device: str = "cpu"
    metric: Metric | None = None
    labelled: LabelledLoss | None = None
    _names: tuple[str, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_names", tuple(tensor.name for tensor in self.graph.outputs))

    def score(self, prepared: Prepared, solution: Solution) -> Score:
        """Evaluate a solution.

        Raises:
            DataError: the loss is "top1" and no output has classes, or the metric returns a non-finite value.
        """
        sums, losses = OutputDifferences(self._names), []
        with (
            LayerRunner(self.graph, device=self.device, threads=1, name="the float model") as floats,
            Forward(prepared.graph, prepared.plan, solution, device=self.device) as quantized,
        ):
            for feed in self.held:
                plain, found = floats.run(feed, self._names), quantized(feed)
                sums.add([plain[name] for name in self._names], [found[name] for name in self._names])
                if self.metric is not None:
                    losses.append(float(self.metric({name: found[name] for name in self._names}, plain)))
            if self.labelled is not None:
                losses = [self.labelled.of(quantized, self.graph)]
        return replace(self._scored(sums.result(), losses), by_feed=sums.by_feed())

    def _scored(self, outputs: tuple[OutputDifference, ...], losses: list[float]) -> Score:
        if not outputs:
            raise DataError("no output of the model is numeric: trials cannot be evaluated")
        error = (
            math.inf if any(one.mismatched for one in outputs) else float(np.mean([one.relative for one in outputs]))
        )
        worst = min(one.sqnr_db for one in outputs)
        loss = loss_of(outputs, self.kind, losses) if self.labelled is None else losses[0]
        classes = loss_kind("auto", self.graph) == "top1"
        return Score(error, loss, worst, changed_share(outputs) if classes else None)

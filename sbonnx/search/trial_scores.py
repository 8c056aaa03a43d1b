"""Evaluation of quantized networks on a hold-out set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.calib.data import Source
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.quantized.forward import Forward
from sbonnx.graph import Graph
from sbonnx.metrics import LOSS_TEXT, LossKind, changed_share, loss_kind
from sbonnx.planning import Solution
from sbonnx.report.searched import ScoreFigures
from sbonnx.stages.state import Prepared
from sbonnx.values import INTERNAL
from sbonnx.verify.judge import Judge

MOST_HELD: Final = 256
"""Maximum number of feeds in the hold-out set of trials."""

SURE: Final = 2.0
PAIRS: Final = 8
"""Minimum gain in standard errors (SURE), tested if there are at least PAIRS feeds."""

FEW: Final = 4
"""Minimum number of feeds for a hold-out set."""


@dataclass(frozen=True)
class Score(ScoreFigures):
    """Error of a quantized network on the hold-out set.

    Attributes:
        by_feed: error of each feed. Its mean is `error`, unless an output has infinite error.
    """

    by_feed: tuple[float, ...] = field(default=(), repr=False, compare=False, metadata=INTERNAL)

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


@dataclass(frozen=True)
class Goal:
    """Required quality of the outputs on the hold-out set; None: no requirement.

    Attributes:
        max_loss: maximum loss, see `sbonnx.verify.judge.Judge`.
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


def score_of(judge: Judge, prepared: Prepared, solution: Solution) -> Score:
    """Evaluate a solution on the hold-out set, in simulated quantization.

    Raises:
        DataError: see `Judge.differences` and `Judge.loss`.
    """
    with Forward(prepared.graph, prepared.plan, solution, device=judge.device) as quantized:
        compared = judge.differences(quantized)
        loss = judge.loss(quantized, compared)
    outputs = compared.result()
    return Score(
        error=float(np.mean([output.relative for output in outputs])),
        loss=loss,
        sqnr_db=min(-math.inf if output.lost else output.sqnr_db for output in outputs),
        changed=changed_share(outputs) if loss_kind("auto", judge.graph) == "top1" else None,
        by_feed=compared.by_feed(),
    )

"""Top-k accuracy, F1 and area under the ROC curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import (
    class_numbers,
    class_scores,
    counts_of,
    joined,
    only_label,
    only_output,
    per_sample,
    probabilities,
    shown,
)
from sbonnx.metrics.boxes import CATEGORIES
from sbonnx.spec import Array

DECISION: Final = 0.5
"""Probability from which a single score is a positive decision."""


def class_labels(labels: Mapping[str, Any], wanted: str | None, samples: int, classes: int, metric: str) -> Array:
    """Return class numbers as int64, shape (samples,).

    Args:
        wanted: name of the labels, see `arrays.only_label`.
        classes: number of classes of the output.

    Raises:
        DataError: they are missing or out of range; or they are positions of sorted names, which are fewer than the
            classes, so that the numbers of the model are not known.
    """
    numbers = class_numbers(only_label(labels, wanted, metric), samples, classes, metric)
    categories = (labels.get(CATEGORIES) or [None])[0]
    if categories is not None and len(categories.names) < classes:
        raise DataError(
            f"{metric}: {categories.name} has {len(categories.names)} class{'es' * (len(categories.names) != 1)} "
            f"('{categories.names[0]}' is 0) and the output has {classes}: list all classes of the model, in its "
            "order, one a line, in a file classes.txt there"
        )
    return numbers


@dataclass
class TopK:
    """Share of samples whose class is among the k highest scores (scikit-learn: `top_k_accuracy_score`).

    Of equal scores the first counts as the higher, as with argmax. A sample with NaN is a miss.

    Attributes:
        k: number of classes; 1: accuracy of argmax.
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    k: int
    output: str | None = None
    labels: str | None = None
    _hits: list[Array] = field(default_factory=list)
    _classes: int = 0

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._hits))

    @property
    def chance(self) -> float | None:
        """Value if classes are guessed; None before the first samples."""
        return self.k / self._classes if self._classes else None

    @property
    def hits(self) -> Array:
        """Whether each sample is a hit, 0 or 1."""
        return joined(self._hits)

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        name = f"top{self.k}"
        scores = class_scores(only_output(outputs, self.output, name), name)
        if scores.shape[1] <= self.k and self.k > 1:
            raise DataError(f"{name}: the output has only {scores.shape[1]} classes: use top1")
        self._classes = scores.shape[1]
        truth = class_labels(labels, self.labels, scores.shape[0], scores.shape[1], name)
        own = scores[np.arange(len(truth)), truth][:, None]
        before = np.arange(scores.shape[1]) < truth[:, None]
        higher = ((scores > own) | ((scores == own) & before)).sum(1)
        self._hits.append(((higher < self.k) & ~np.isnan(scores).any(1)).astype(np.float64))

    def value(self, weights: Array | None = None) -> float:
        return float(np.average(self.hits, weights=weights))


@dataclass
class F1:
    """F1 score ``2 tp / (2 tp + fp + fn)`` (scikit-learn: `f1_score`).

    Class scores (samples, classes): the mean over the classes that occur in labels or decisions (average="macro").
    One probability for each sample: that of the positive class (average="binary"), decided at 0.5.

    Attributes:
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    output: str | None = None
    labels: str | None = None
    _pairs: list[Array] = field(default_factory=list)
    _classes: int = 0

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._pairs))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        output = only_output(outputs, self.output, "f1")
        if output.size == len(output):
            scores = output.reshape(-1).astype(np.float64)
            if scores.size and not (scores.min() >= 0 and scores.max() <= 1):
                raise DataError(
                    f"f1 of one score for each sample takes probabilities, and it is {scores.min():.4g} to "
                    f"{scores.max():.4g}: apply the sigmoid with --decode script.py:function"
                )
            decided, classes = (scores >= DECISION).astype(np.int64), 1
            truth = class_labels(labels, self.labels, len(scores), 2, "f1")
        else:
            rows = class_scores(output, "f1")
            decided, classes = rows.argmax(1), rows.shape[1]
            truth = class_labels(labels, self.labels, len(rows), rows.shape[1], "f1")
        self._classes = classes
        self._pairs.append(np.stack([truth, decided], 1))

    def value(self, weights: Array | None = None) -> float:
        pairs, counts = joined(self._pairs).astype(np.int64), counts_of(weights, self.count)
        size = max(self._classes, 2)
        both = [np.bincount(column, counts, size) for column in pairs.T]
        same = np.bincount(pairs[:, 0], counts * (pairs[:, 0] == pairs[:, 1]), size)
        if self._classes == 1:
            return float(2 * same[1] / (both[0] + both[1])[1]) if (both[0] + both[1])[1] else 0.0
        occurs = both[0] + both[1] > 0
        return float((2 * same[occurs] / (both[0] + both[1])[occurs]).mean())


@dataclass
class Auc:
    """Area under the ROC curve: the share of (positive, negative) pairs in the right order, ties count half.

    scikit-learn: `roc_auc_score`. One score for each sample, or two classes: binary. More classes: the mean over the
    classes of one class against the rest (multi_class="ovr", average="macro"), over probabilities: rows of logits go
    through softmax. Classes without a sample are left out.

    Attributes:
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    output: str | None = None
    labels: str | None = None
    _scores: list[Array] = field(default_factory=list)
    _truth: list[Array] = field(default_factory=list)
    _sorted: list[tuple[Array, Array, Array]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._truth))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        output = only_output(outputs, self.output, "auc")
        if output.dtype.kind != "f":
            raise DataError(f"auc takes scores and the output is {shown(output)}: choose another output")
        if output.size == len(output):
            scores = output.reshape(-1, 1).astype(np.float64)
            truth = class_labels(labels, self.labels, len(scores), 2, "auc")
        else:
            rows = class_scores(output, "auc")
            truth = class_labels(labels, self.labels, len(rows), rows.shape[1], "auc")
            scores = rows[:, 1:] - rows[:, :1] if rows.shape[1] == 2 else probabilities(rows)
        self._scores.append(scores)
        self._truth.append(truth)
        self._sorted.clear()

    def value(self, weights: Array | None = None) -> float:
        scores, truth, counts = joined(self._scores), joined(self._truth), counts_of(weights, self.count)
        if np.isnan(scores).any():
            return float("nan")
        if not self._sorted:
            self._sorted.extend(_sort(scores[:, place]) for place in range(scores.shape[1]))
        single_score = scores.shape[1] == 1
        areas = []
        for number, (order, groups, _) in enumerate(self._sorted):
            positive = (truth == (1 if single_score else number))[order]
            up = np.bincount(groups, counts[order] * positive)
            down = np.bincount(groups, counts[order] * ~positive)
            if up.sum() and down.sum():
                below = np.cumsum(down) - down / 2
                areas.append(float((up * below).sum() / (up.sum() * down.sum())))
        return float(np.mean(areas)) if areas else float("nan")


def _sort(scores: Array) -> tuple[Array, Array, Array]:
    """Return the ascending order, the group of equal scores of each place in it, and the sorted scores."""
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    return order, np.concatenate([[0], np.cumsum(np.diff(ranked) > 0)]).astype(np.int64), ranked


@dataclass
class Correlation:
    """Pearson's or Spearman's correlation of one value for each sample with float labels (scipy.stats).

    Spearman: Pearson's correlation of the ranks; equal values have the mean of their ranks.

    Attributes:
        ranks: correlate the ranks.
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    ranks: bool
    output: str | None = None
    labels: str | None = None
    _pairs: list[Array] = field(default_factory=list)
    _sorted: list[tuple[Array, Array, Array]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._pairs))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        name = "spearman" if self.ranks else "pearson"
        output, given = only_output(outputs, self.output, name), only_label(labels, self.labels, name)
        if output.ndim == 0 or output.size != len(output):
            raise DataError(
                f"{name} takes one value for each sample and the output is {shown(output)}: convert it with --decode "
                "script.py:function"
            )
        truth = per_sample(given, len(output), name)
        self._pairs.append(np.stack([output.reshape(-1), truth], 1).astype(np.float64))
        self._sorted.clear()

    def value(self, weights: Array | None = None) -> float:
        pairs, counts = joined(self._pairs), counts_of(weights, self.count)
        if np.isnan(pairs).any():
            return float("nan")
        columns = list(pairs.T)
        if self.ranks:
            if not self._sorted:
                self._sorted.extend(_sort(column) for column in columns)
            columns = [_ranks(order, groups, counts) for order, groups, _ in self._sorted]
        total = counts.sum()
        x, y = (column - (counts * column).sum() / total for column in columns)
        spread = float((counts * x * x).sum() * (counts * y * y).sum()) ** 0.5
        return float((counts * x * y).sum()) / spread if spread else float("nan")


def _ranks(order: Array, groups: Array, counts: Array) -> Array:
    """Return the mean rank of each sample, if each counts `counts` times."""
    sizes = np.bincount(groups, counts[order])
    means = np.cumsum(sizes) - (sizes - 1) / 2
    ranks = np.empty(len(order))
    ranks[order] = means[groups]
    return ranks

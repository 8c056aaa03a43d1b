"""A metric: the mean recall over classes (balanced accuracy).

A metric keeps figures of each sample, not the outputs: here the label, and whether the highest score has that class.
Then its interval can be computed by drawing samples (`weights`), without running the model again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np

from sbonnx.metrics import MetricDefinition
from sbonnx.metrics.arrays import class_numbers, class_scores, counts_of, joined, only_label, only_output
from sbonnx.spec import Array


@final
@dataclass
class BalancedAccuracy:
    """Mean over the classes with samples of the share of their samples that have the highest score in that class.

    Attributes:
        output: name of the output with class scores (samples, classes); None: the only one.
        labels: name of the labels (samples,); None: by their usual names.
    """

    output: str | None = None
    labels: str | None = None
    _rows: list[Array] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._rows))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        """Add the outputs and labels of one feed; see `sbonnx.metrics.TaskMetric`."""
        scores = class_scores(only_output(outputs, self.output, "balanced"), "balanced")
        known = class_numbers(only_label(labels, self.labels, "balanced"), scores.shape[0], scores.shape[1], "balanced")
        self._rows.append(np.stack([known, scores.argmax(1) == known], axis=1))

    def value(self, weights: Array | None = None) -> float:
        """Compute the metric; see `sbonnx.metrics.TaskMetric`."""
        if not self.count:
            return float("nan")
        known, right = joined(self._rows).T
        counts = counts_of(weights, self.count)
        samples = np.bincount(known, counts)
        hits = np.bincount(known, counts * right)
        present = samples > 0
        return float((hits[present] / samples[present]).mean()) if present.any() else float("nan")


BALANCED: Final = MetricDefinition(BalancedAccuracy)

"""Type, shape and range of the outputs of a model over all feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from sbonnx.report.notebook import Result


@dataclass(frozen=True)
class OutputStatistics:
    """Statistics of an output.

    Attributes:
        name, type: name and data type.
        shape: its shape; null if it varies.
        min, mean, max: of finite values; null without any.
        not_finite: number of other values.
    """

    name: str
    type: str | None = None
    shape: tuple[int, ...] | None = None
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    not_finite: int = 0


@dataclass(frozen=True, repr=False)
class RunOutput(Result):
    """Outputs of a model on data.

    Attributes:
        model: the model.
        feeds: number of feeds.
        output: the file or folder; null: none.
        outputs: statistics by output.
    """

    frame_of: ClassVar = "outputs"

    model: str
    feeds: int
    output: str | None
    outputs: tuple[OutputStatistics, ...]


class StatisticsOfOutputs:
    """Statistics of outputs that are added feed by feed.

    Attributes:
        feeds: number of feeds.
    """

    def __init__(self) -> None:
        self.feeds = 0
        self._rows: dict[str, OutputStatistics] = {}
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Add the outputs of a feed, by name."""
        self.feeds += 1
        for name, value in outputs.items():
            is_array = hasattr(value, "dtype")
            shape = tuple(value.shape) if hasattr(value, "shape") else None
            row = self._rows.get(name) or OutputStatistics(name, shape=shape)
            kind = str(value.dtype) if is_array else type(value).__name__
            row = replace(row, type=kind, shape=shape if row.shape == shape else None)
            self._rows[name] = self._with_values(row, value) if is_array and value.dtype.kind in "fiub" else row

    def _with_values(self, row: OutputStatistics, value: Any) -> OutputStatistics:
        numbers = value.astype(np.float64, copy=False)
        finite = numbers[np.isfinite(numbers)]
        row = replace(row, not_finite=row.not_finite + numbers.size - finite.size)
        if not finite.size:
            return row
        total, count = self._sums.get(row.name, (0.0, 0))
        total, count = total + float(finite.sum()), count + finite.size
        self._sums[row.name] = total, count
        least, most = float(finite.min()), float(finite.max())
        return replace(
            row,
            min=least if row.min is None else min(row.min, least),
            max=most if row.max is None else max(row.max, most),
            mean=total / count,
        )

    def rows(self) -> tuple[OutputStatistics, ...]:
        """Return one row per output."""
        return tuple(self._rows.values())

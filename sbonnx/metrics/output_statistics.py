"""Type, shape and range of the outputs of a model over all feeds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.report.codes import Note
from sbonnx.report.notebook import Result
from sbonnx.values import INTERNAL

KEPT_BYTES: Final = 256 << 20
"""Bytes of outputs that a `RunOutput` holds at most."""


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
        notes: one sentence each about the data.
        values: outputs of each feed by name, as onnxruntime returned them; None above `KEPT_BYTES`. Not in JSON.
    """

    frame_of: ClassVar = "outputs"

    model: str
    feeds: int
    output: str | None
    outputs: tuple[OutputStatistics, ...]
    notes: tuple[Note, ...] = ()
    values: tuple[Mapping[str, Any], ...] | None = field(default=None, compare=False, metadata=INTERNAL)

    def __getitem__(self, name: str) -> Any:
        """Return the array of an output; several feeds are joined along the leading axis.

        Raises:
            DataError: there is no such output, the outputs were too large to be kept, or their shapes cannot be joined.
        """
        names = [row.name for row in self.outputs]
        if name not in names:
            raise DataError(f"'{self.model}' has no output '{name}': its outputs are {', '.join(names)}")
        if self.values is None:
            size = f"{KEPT_BYTES >> 20} MiB"
            raise DataError(
                f"the outputs take more than {size} and are not kept: run with output=FILE.npz and load that"
            )
        arrays = [feed[name] for feed in self.values]
        try:
            return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        except ValueError as error:
            raise DataError(f"the shapes of '{name}' differ from feed to feed: read .values") from error


class KeptOutputs:
    """Outputs of feeds, up to `KEPT_BYTES`."""

    def __init__(self) -> None:
        self._feeds: list[Mapping[str, Any]] | None = []
        self._bytes = 0

    def add(self, outputs: Mapping[str, Any]) -> None:
        """Keep the outputs of a feed; drop all of them when they become too large."""
        if self._feeds is None:
            return
        self._bytes += sum(getattr(value, "nbytes", 0) for value in outputs.values())
        self._feeds.append(outputs)
        if self._bytes > KEPT_BYTES:
            self._feeds = None

    @property
    def values(self) -> tuple[Mapping[str, Any], ...] | None:
        """The outputs of each feed; None if they are too large."""
        return None if self._feeds is None else tuple(self._feeds)


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

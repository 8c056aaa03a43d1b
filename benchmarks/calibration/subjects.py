"""What calibration is measured on: models as files, and their samples. Imports little: children are weighed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Feed = dict[str, Any]


class Samples:
    """Sequence of `count` feeds of one sample each that repeats the given feeds, in constant memory.

    Args:
        feeds: feeds to repeat.
        count: number of feeds.
    """

    def __init__(self, feeds: Sequence[Feed], count: int) -> None:
        self._feeds = feeds
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Feed]:
        return (self._feeds[number % len(self._feeds)] for number in range(self._count))


@dataclass(frozen=True)
class Subject:
    """A model and its calibration data.

    Attributes:
        name: name in the tables.
        model: float ONNX file.
        data: .npz with one array per input: samples along a new first axis, each with its batch axis of 1 (if any).
    """

    name: str
    model: Path
    data: Path

    def samples(self, count: int) -> Samples:
        """Load `count` samples into memory."""
        with np.load(self.data) as held:
            arrays = {name: held[name] for name in held.files}
        total = len(next(iter(arrays.values())))
        return Samples([{name: x[row] for name, x in arrays.items()} for row in range(total)], count)


def save_feeds(path: Path, feeds: Sequence[Mapping[str, Any]]) -> None:
    """Write feeds of equal shapes in the format that `Subject.samples` reads."""
    arrays: dict[str, Any] = {name: np.stack([feed[name] for feed in feeds]) for name in feeds[0]}
    np.savez(path, **arrays)

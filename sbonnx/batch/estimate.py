"""How long steps will take: as long as the last time, or as long as their files are large."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Literal

from sbonnx.batch.jobs.job import Kind, Step
from sbonnx.batch.redaction import revealed
from sbonnx.batch.storage.urls import local_path
from sbonnx.errors import RecipeError

BASE: Final[Mapping[Kind, float]] = {"calibrate": 0.8, "quantize": 2.5}
"""Seconds of a step whose files weigh nothing. Like those below of one core of a server of 2023, within a factor of
three; where some steps of a batch were run before, they are scaled by what those took."""

A_MEGABYTE: Final[Mapping[Kind, float]] = {"calibrate": 0.05, "quantize": 0.35}
"""Seconds for each megabyte of the model."""

A_MEGABYTE_OF_DATA: Final = 0.05
"""Seconds for each megabyte of data."""

SEVERAL: Final[Mapping[Kind, float]] = {"calibrate": 0.4, "quantize": 0.0}
"""Seconds for each job that shares a step."""


@dataclass(frozen=True)
class Estimate:
    """How long a step will take.

    Attributes:
        seconds: of wall time.
        basis: "earlier": it took so long the last time; "size": reckoned from the sizes of its files.
    """

    seconds: float
    basis: Literal["earlier", "size"]


def estimates(steps: Iterable[Step], past: Mapping[tuple[str, str], float]) -> dict[str, Estimate]:
    """An estimate for every step, by key.

    Args:
        past: seconds by kind and title, see `sbonnx.batch.state.past`.
    """
    steps = list(steps)
    sizes: dict[str, int] = {}
    plain = {step.key: _by_size(step, sizes) for step in steps}
    earlier = {step.key: past[step.kind, step.title] for step in steps if (step.kind, step.title) in past}
    ratio = median(earlier[key] / plain[key] for key in earlier) if earlier else 1.0
    return {
        key: Estimate(earlier[key], "earlier") if key in earlier else Estimate(seconds * ratio, "size")
        for key, seconds in plain.items()
    }


def wall(steps: Iterable[Step], found: Mapping[str, Estimate], workers: int) -> float:
    """Seconds that all of the steps take on so many workers: the longest chain, or the sum over the workers."""
    ends: dict[str, float] = {}
    total = 0.0
    for step in steps:
        took = found[step.key].seconds
        total += took
        ends[step.key] = took + max((ends.get(need, 0.0) for need in step.after), default=0.0)
    return max([total / max(1, workers), *ends.values()])


def _by_size(step: Step, sizes: dict[str, int]) -> float:
    """Seconds by the sizes of the files."""
    job = step.jobs[0]
    model, data = (_size(name, sizes) / 1e6 for name in (job.model, job.data))
    more = SEVERAL[step.kind] * len(step.jobs)
    return BASE[step.kind] + A_MEGABYTE[step.kind] * model + A_MEGABYTE_OF_DATA * data + more


def _size(name: str | None, sizes: dict[str, int]) -> int:
    """Bytes of a file, or of all that is in a folder; 0 for a URL, which is not asked, and for what is not there."""
    if name is None:
        return 0
    if name not in sizes:
        try:
            path = local_path(revealed(name))
            sizes[name] = 0 if path is None else _bytes(path)
        except (OSError, RecipeError):  # its step says so
            sizes[name] = 0
    return sizes[name]


def _bytes(path: Path) -> int:
    if path.is_dir():
        return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    return path.stat().st_size if path.exists() else 0


__all__ = ["Estimate", "estimates", "wall"]

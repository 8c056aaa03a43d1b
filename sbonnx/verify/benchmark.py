"""Latency and throughput of models on the same feeds, measured alternately."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.report.notebook import Result
from sbonnx.report.verdict import ON_CPU
from sbonnx.verify.intervals import Interval, of_median
from sbonnx.verify.load import OtherLoad
from sbonnx.verify.runtimes import open_in
from sbonnx.verify.sessions import Feeds, alternately, run

WARM_UPS: Final = 3
"""Runs before the clock starts: memory is allocated and caches are filled."""

MAX_RUNS: Final = 100_000


@dataclass(frozen=True, repr=False)
class Speed(Result):
    """Speed of one model at one number of threads and one batch size.

    Attributes:
        model: the file.
        threads: threads inside operators.
        batch: samples of a run: size of the leading axis of the first input.
        runs: number of timed runs.
        median_ms, best_ms, p95_ms: median, shortest and 95th percentile of the runs, in milliseconds.
        interval_ms: 95 % confidence interval of the median.
        samples_per_second: `batch` over the median.
        ratio: median of the ratios of times to those of the first model, run by run; 1 for the first model.
        ratio_interval: 95 % confidence interval of `ratio`.
        busy: whether other processes used the processors meanwhile.
    """

    model: str
    threads: int
    batch: int
    runs: int
    median_ms: float
    best_ms: float
    p95_ms: float
    interval_ms: Interval
    samples_per_second: float
    ratio: float
    ratio_interval: Interval
    busy: bool = False


@dataclass(frozen=True, repr=False)
class Benchmark(Result):
    """Speed of several models.

    Attributes:
        models: the files.
        runtime: the runtime that executed them.
        rows: one for each model, number of threads and batch size.
    """

    frame_of: ClassVar = "rows"

    models: tuple[str, ...]
    runtime: str
    rows: tuple[Speed, ...]


def benchmark(
    models: Sequence[Path],
    feeds: Sequence[Feeds],
    *,
    threads: int,
    seconds: float,
    device: str,
    runtime: str = ON_CPU,
) -> list[Speed]:
    """Run models alternately on each feed in turn, each model first in turn: a busy machine affects all equally.

    Args:
        models: files; times are compared with those of the first.
        feeds: arrays by input name, batch axis included, of one batch size; each is run once at least.
        threads: threads inside operators.
        seconds: time limit of all models together; 5 runs of each at least.
        runtime: name of the runtime that executes them, see `sbonnx.verify.runtimes.chosen_runtime`.

    Raises:
        ModelError: the runtime refuses a model.
        DataError: a model cannot run on a feed, or the batch sizes differ.
    """
    batches = [next((value.shape[0] for value in feed.values() if value.ndim), 1) for feed in feeds]
    if len(set(batches)) > 1:
        where = next(number for number, size in enumerate(batches) if size != batches[0])
        raise DataError(
            f"feed {where} is a batch of {batches[where]}, the first of {batches[0]}: use --samples {where}"
        )
    sessions = [open_in(runtime, model, device=device, threads=threads, timed=True) for model in models]
    for model, opened in zip(models, sessions, strict=True):
        for number in range(max(WARM_UPS, len(feeds))):
            place = number % len(feeds)
            try:
                run(opened, feeds[place], place)
            except DataError as error:
                raise DataError(f"{model}: {error}") from error
    load = OtherLoad()
    times = np.array(alternately(sessions, feeds, seconds=seconds, most=MAX_RUNS))
    busy = load.busy
    return [
        _speed(model, threads, batches[0], row, times[0], busy=busy) for model, row in zip(models, times, strict=True)
    ]


def _speed(model: Path, threads: int, batch: int, times: Any, reference: Any, *, busy: bool) -> Speed:
    middle = median(times.tolist())
    ratios = times / reference
    return Speed(
        model=str(model),
        threads=threads,
        batch=batch,
        runs=len(times),
        median_ms=middle,
        best_ms=float(times.min()),
        p95_ms=float(np.percentile(times, 95)),
        interval_ms=of_median(times),
        samples_per_second=1000 * batch / middle,
        ratio=float(np.median(ratios)),
        ratio_interval=of_median(ratios),
        busy=busy,
    )


__all__ = ["Benchmark", "Speed", "benchmark"]

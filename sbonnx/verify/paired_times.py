"""Ratio of the times of two sessions, measured in turn until its confidence interval decides a question."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from sbonnx.verify.intervals import UNKNOWN, Interval, of_median
from sbonnx.verify.sessions import Feeds, in_turn, run

ROUNDS: Final = (8, 16, 32, 64)
"""Rounds after which the interval is looked at. The median of fewer than 6 has none."""

BATCH_SECONDS: Final = 0.008
"""Least duration of one measurement: runs are repeated until it is reached."""

RESOLUTION: Final = 1e-4
"""Resolution in seconds that a clock of CPU time needs; that of Windows has 16 ms."""


def cpu_seconds() -> float:
    """Return the CPU time of this process, which other processes hardly change; wall time if its clock is coarse."""
    exact = time.get_clock_info("process_time").resolution <= RESOLUTION
    return time.process_time() if exact else time.perf_counter()


@dataclass(frozen=True)
class TimeRatio:
    """Time of one model over that of another.

    Attributes:
        value: median of the ratios of all rounds.
        interval: its 95 % confidence interval.
        rounds: number of rounds.
    """

    value: float
    interval: Interval = UNKNOWN
    rounds: int = 0

    def below(self, limit: float) -> bool:
        """Return whether the ratio is below a limit beyond doubt."""
        return self.interval[1] < limit

    def above(self, limit: float) -> bool:
        """Return whether the ratio is above a limit beyond doubt."""
        return self.interval[0] > limit


def runner(session: Any, feeds: Sequence[Feeds]) -> Callable[[], None]:
    """Return a function that runs a session once on each feed."""

    def run_all() -> None:
        for number, feed in enumerate(feeds):
            run(session, feed, number)

    return run_all


def time_ratio(
    reference: Callable[[], Any],
    measured: Callable[[], Any],
    decided: Callable[[TimeRatio], bool],
    *,
    clock: Callable[[], float] = cpu_seconds,
    rounds: Sequence[int] = ROUNDS,
) -> TimeRatio:
    """Measure the time of `measured` over that of `reference`, in turn.

    Args:
        reference, measured: run each model once; both are called once before the clock starts.
        decided: whether the ratio so far answers the question; asked after each of `rounds`.
        clock: returns seconds.
    """
    repeats = [_repeats(run_once, clock) for run_once in (reference, measured)]
    batches = [partial(_repeated, run_once, max(repeats)) for run_once in (reference, measured)]
    taken: list[list[float]] = [[], []]
    ratio = TimeRatio(math.nan)
    for total in rounds:
        more = total - len(taken[0])
        for row, times in zip(
            taken, in_turn(batches, seconds=math.inf, most=more, least=more, clock=clock), strict=True
        ):
            row += times
        ratios = np.array(taken[1]) / np.array(taken[0])
        ratio = TimeRatio(float(np.median(ratios)), of_median(ratios), total)
        if decided(ratio):
            break
    return ratio


def _repeated(run_once: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        run_once()


def _repeats(run_once: Callable[[], Any], clock: Callable[[], float]) -> int:
    """Return how often a model must run for one measurement; the first run is not measured."""
    run_once()
    start = clock()
    run_once()
    return max(1, math.ceil(BATCH_SECONDS / max(clock() - start, BATCH_SECONDS / 1000)))

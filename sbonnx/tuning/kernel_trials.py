"""Times of kernels at a few sizes each, within a time limit and beside other programs.

All kernels are timed in turn at one size, then at the next one, so that a moment of load meets few sizes of a kernel.
Half of the sizes are timed twice, then all, and those whose shortest times differ again while time is left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat, zip_longest
from math import ceil
from typing import Final

from sbonnx.backends.kernel_costs import Fit
from sbonnx.progress import Progress
from sbonnx.tuning.kernel_timing import COPIES, KernelCase

Key = tuple[str, str, str]
"""Kernel, variant and type, as in tables of kernel costs."""

SIZES: Final = 6
"""Sizes of a kernel that are timed, from the fastest to the slowest one."""

LONGEST_NS: Final = 2e6
"""Expected time of a kernel above which a size is left out if there are shorter ones."""

RUN_NS: Final = 2e5
"""Expected time of a run that has copies enough of its kernel."""

SECONDS: Final = 0.01
"""Time of one measurement of a kernel at one size."""

QUANTILE: Final = 0.2
"""Quantile of the runs that is the time of a measurement: other programs make runs longer only."""

AGREE: Final = 0.05
"""Difference of the two shortest times of a size below which it is not timed again."""

FEWEST: Final = 2
"""Measurements of each size."""


@dataclass(eq=False)
class Trial:
    """One kernel at one size.

    Attributes:
        case: kernel and size.
        expected_ns: time by a table; None for a kernel that it does not have.
        times: measured times in ns.
        refused: onnxruntime has no such kernel on this machine.
    """

    case: KernelCase
    expected_ns: float | None
    times: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def key(self) -> Key:
        """Return the kernel in a table."""
        return self.case.kernel, self.case.variant, self.case.dtype

    @property
    def copies(self) -> int:
        """Return the number of nodes in a run: fewer of slow kernels."""
        return max(1, min(COPIES, ceil(RUN_NS / max(self.expected_ns or 1.0, 1.0))))

    @property
    def settled(self) -> bool:
        """Return whether the two shortest times agree."""
        return self.agrees(1 + AGREE)

    def agrees(self, ratio: float) -> bool:
        """Return whether there are two times, of which the shortest ones differ by a factor of `ratio` at most."""
        shortest = sorted(self.times)[:FEWEST]
        return len(shortest) == FEWEST and shortest[-1] <= ratio * shortest[0]


def choose(cases: Iterable[KernelCase], fits: Mapping[Key, Fit]) -> list[Trial]:
    """Select a few sizes of each kernel, in an order in which those of one kernel are far from each other.

    Args:
        fits: formulas of the expected times.
    """
    sizes: dict[Key, list[Trial]] = defaultdict(list)
    for case in cases:
        fit = fits.get((case.kernel, case.variant, case.dtype))
        trial = Trial(case, None if fit is None else fit.ns(case.amounts))
        sizes[trial.key].append(trial)
    rounds = zip_longest(*map(_spread, sizes.values()))
    return [trial for trials in rounds for trial in trials if trial is not None]


def _spread(trials: Sequence[Trial]) -> list[Trial]:
    """Return `SIZES` of the trials of a kernel, evenly spaced by time; the middle one first."""
    ordered = sorted(trials, key=lambda trial: trial.expected_ns or trial.case.macs + trial.case.writes)
    short = [trial for trial in ordered if (trial.expected_ns or 0.0) <= LONGEST_NS] or ordered[:1]
    count = min(len(short), SIZES)
    places = [round(number * (len(short) - 1) / max(count - 1, 1)) for number in range(count)]
    places = sorted(dict.fromkeys(places), key=lambda place: abs(place - len(short) / 2))
    return [short[place] for place in places]


def measure(
    trials: Sequence[Trial],
    time_of: Callable[[Trial], float | None],
    clock: Callable[[], float],
    end: float,
    progress: Progress,
) -> None:
    """Time trials until the times of all are settled, or no time is left.

    Args:
        trials: get their times.
        time_of: measures one in ns; None: onnxruntime has no such kernel.
        clock: seconds.
        end: time of the clock at which the measurement ends.
    """
    half = trials[: len(trials) // 2]
    parts = chain(((part, count) for part in (half, trials) for count in range(1, FEWEST + 1)), repeat((trials, 0)))
    for part, count in parts:
        waiting = [
            trial for trial in part if not trial.refused and (len(trial.times) < count or not (count or trial.settled))
        ]
        if not (waiting or count):
            return
        progress.start("kernels" if count else "kernels whose times differ", len(waiting))
        for trial in waiting:
            if clock() >= end:
                return
            ns = time_of(trial)
            if ns is None:
                trial.refused = True
            else:
                trial.times.append(ns)
            progress.advance()

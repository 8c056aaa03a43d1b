"""Load of the machine by other processes while times are measured."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Final

import psutil

BUSY: Final = 0.25
"""Share of the processors used by other processes from which on times are those of a busy machine."""

IDLE: Final = ("idle", "iowait", "guest", "guest_nice", "steal")
"""Times of `psutil.cpu_times` that are no work of this machine, or are contained in others."""


def _used() -> tuple[float, float]:
    """Return the processor seconds of all processes, and of this one."""
    times, own = psutil.cpu_times(), time.process_time()
    return sum(value for name, value in times._asdict().items() if name not in IDLE), own


@dataclass
class OtherLoad:
    """Measures the processor time of other processes since it was created."""

    _begin: tuple[float, float] = field(default_factory=_used)
    _clock: float = field(default_factory=time.perf_counter)

    @property
    def busy(self) -> bool:
        """Whether they used more than `BUSY` of the processors."""
        elapsed, (every, own) = time.perf_counter() - self._clock, _used()
        others = (every - self._begin[0]) - (own - self._begin[1])
        return others > BUSY * elapsed * (os.cpu_count() or 1)

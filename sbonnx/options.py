"""`RunOptions`: where and how calibration runs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Final, Literal

from sbonnx.errors import RecipeError
from sbonnx.progress import Progress, Silent

Granularity = Literal["auto", "whole", "budget", "layer"]
"""Pieces of the graph that run at a time; see `RunOptions`."""

UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


@dataclass(frozen=True)
class RunOptions:
    """Options of a run. Of these, only `device` can change a result, in the last bits.

    Attributes:
        device: "cpu", "cuda", "cuda:N" or "auto".
        threads: samples that run at a time, each on one thread; None: number of cores (1 on CUDA).
        memory: budget for activations, in bytes or as text such as "2 GiB".
        granularity: "whole": one session; "budget": sessions whose outputs fit `memory`, each sample run through all of
            them; "layer": all samples run through a layer, then the next; "auto": whole if it fits, else budget.
        cache: folder of the statistics cache, from which an interrupted run is resumed; None: no cache.
        progress: updated as samples complete. Whoever created it closes it.
    """

    device: str = "cpu"
    threads: int | None = None
    memory: int | str = "2 GiB"
    granularity: Granularity = "auto"
    cache: str | os.PathLike[str] | None = None
    progress: Progress = field(default_factory=Silent)

    @property
    def memory_bytes(self) -> int:
        """The budget for activations in bytes.

        Raises:
            RecipeError: see `parse_size`.
        """
        return parse_size(self.memory)


def without_cache(options: RunOptions | None) -> RunOptions:
    """Return the options of a separate pass over the data, which is neither cached nor run layer by layer."""
    return replace(options or RunOptions(), cache=None, granularity="auto")


def parse_size(size: str | int) -> int:
    """Parse "2 GiB", "512MB", "1.5g" or a plain number to bytes.

    Raises:
        RecipeError: not a size, or negative.
    """
    matched = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([kmgt]?i?)b?\s*", str(size).lower())
    count = float(matched[1]) * UNITS.get(matched[2], inf) if matched else inf
    if not isfinite(count):
        raise RecipeError(f"'{str(size)[:40]}' is no size of memory; write '2 GiB', '512 MB' or a number of bytes")
    return int(count)

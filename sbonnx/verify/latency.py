"""Latency of two models, measured alternately."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from sbonnx.verify.sessions import Feeds, run

SECONDS: Final = 0.5
RUNS: Final = (5, 200)
"""Time limit in seconds and (least, most) runs for a pair of models."""


@dataclass(frozen=True)
class Latency:
    """Latency of the float and of the quantized model, in milliseconds.

    Attributes:
        best: shortest run of each.
        middle: median run of each.
        runs: number of runs of each.
    """

    best: tuple[float, float] = (0.0, 0.0)
    middle: tuple[float, float] = (0.0, 0.0)
    runs: int = 0


def side_by_side(one: Any, other: Any, feeds: Feeds) -> Latency:
    """Run two models alternately, each first in every other round, so that a busy machine affects both equally.

    Args:
        one, other: onnxruntime sessions.

    Raises:
        DataError: a model cannot run on these feeds.
    """
    models, taken = (one, other), ([], [])  # type: tuple[Any, Any], tuple[list[float], list[float]]
    least, most = RUNS
    begin = time.perf_counter()
    for turn in range(most):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            start = time.perf_counter()
            run(models[which], feeds, 0)
            taken[which].append(1000 * (time.perf_counter() - start))
        if turn + 1 >= least and time.perf_counter() - begin > SECONDS:
            break
    return Latency((min(taken[0]), min(taken[1])), (median(taken[0]), median(taken[1])), len(taken[0]))

"""Counts the forward passes of the float model, to report how much a cache or shared calibration saves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Runs:
    """Number of forward passes.

    Attributes:
        samples: samples run through a float model to observe its activations, without those that an interrupted run had
            done already or whose statistics were cached.
    """

    samples: int = 0


_OPEN: ContextVar[tuple[Runs, ...]] = ContextVar("sbonnx_counted", default=())


@contextmanager
def counting() -> Iterator[Runs]:
    """Count the forward passes that this thread starts, whichever threads run them.

    with counting() as runs:
        quantize(model, data, cache=folder)
    assert runs.samples == 0
    """
    runs = Runs()
    token = _OPEN.set((*_OPEN.get(), runs))
    try:
        yield runs
    finally:
        _OPEN.reset(token)


def count(samples: int) -> None:
    """Add to every open count."""
    for runs in _OPEN.get():
        runs.samples += samples


__all__ = ["Runs", "count", "counting"]

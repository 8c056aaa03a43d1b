"""How many samples went through a float model to see its activations: what caches and shared work save is shown so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Runs:
    """What was counted.

    Attributes:
        samples: that went through a float model while its activations were observed. One that an interrupted run had
            seen already, or whose statistics a cache knew, is not among them.
    """

    samples: int = 0


_OPEN: ContextVar[tuple[Runs, ...]] = ContextVar("sbonnx_counted", default=())


@contextmanager
def counting() -> Iterator[Runs]:
    """Counts what this thread begins meanwhile, whichever threads then do it.

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
    """So many more samples went through."""
    for runs in _OPEN.get():
        runs.samples += samples


__all__ = ["Runs", "count", "counting"]

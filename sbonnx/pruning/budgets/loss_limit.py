"""Prune as much as a loss on hold-out samples allows: bisection over the budget, with refitted trial networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

TRIALS: Final = 6
"""Networks that are refitted and evaluated. The share that remains is then known to 1/64 of its range."""

T = TypeVar("T")


@dataclass(frozen=True)
class LossTrial(Generic[T]):
    """A network that was pruned to a budget.

    Attributes:
        share: the budget.
        loss: of the network.
        result: the network.
    """

    share: float
    loss: float
    result: T


def smallest_within(trial: Callable[[float], LossTrial[T]], least: float, max_loss: float) -> LossTrial[T]:
    """Return the smallest network whose loss is within a limit, of `TRIALS` by bisection over the budget.

    Args:
        trial: prunes to a budget; the loss is assumed to fall with the share that remains.
        least: smallest share that can remain.
        max_loss: the limit.

    Returns:
        If no trial is within the limit: the one with the least loss.
    """
    low, high = least, 1.0
    best: LossTrial[T] | None = None
    for _ in range(TRIALS):
        network = trial((low + high) / 2)
        fits = network.loss <= max_loss
        if fits:
            high = network.share
        else:
            low = network.share
        if best is None or (fits and network.share < best.share) or (best.loss > max_loss and network.loss < best.loss):
            best = network
    assert best is not None
    return best

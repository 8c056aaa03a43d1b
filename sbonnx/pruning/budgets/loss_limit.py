"""Prune as much as a loss on hold-out samples allows: bisection over the budget, with refitted trial networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.metrics import LossKind, Metric, OutputDifferences, loss_of
from sbonnx.verify import LabelledLoss

TRIALS: Final = 6
"""Networks that are refitted and evaluated. The share that remains is then known to 1/64 of its range."""

T = TypeVar("T")


@dataclass(frozen=True)
class LossJudge:
    """Computes the loss of variants of a network.

    Attributes:
        graph: the float network.
        data: hold-out samples.
        kind, metric: meaning of the loss, see `sbonnx.metrics.loss_of`.
        labelled: loss in a task metric on labelled data, in place of both.
        device: see `RunOptions`.
    """

    graph: Graph
    data: Dataset
    kind: LossKind
    metric: Metric | None = None
    device: str = "cpu"
    labelled: LabelledLoss | None = None

    def loss(self, variant: Graph) -> float:
        """Run both networks and return the loss of the variant.

        Raises:
            DataError: the outputs have no such loss.
        """
        names = tuple(tensor.name for tensor in self.graph.outputs)
        if self.labelled is not None:
            with LayerRunner(variant, device=self.device, threads=1, name="the pruned model") as pruned:
                return self.labelled.of(lambda feed: pruned.run(feed, names), self.graph)
        sums, losses = OutputDifferences(names), []
        with (
            LayerRunner(self.graph, device=self.device, threads=1, name="the float model") as floats,
            LayerRunner(variant, device=self.device, threads=1, name="the pruned model") as pruned,
        ):
            for where, feed in self.data.items():
                want = dict(floats.run(feed, names, where=where))
                got = pruned.run(feed, names, where=where)
                sums.add([want[name] for name in names], [got[name] for name in names])
                if self.metric is not None:
                    losses.append(float(self.metric({name: got[name] for name in names}, want)))
        if not (outputs := sums.result()):
            raise DataError("no output of the model is numeric: MAX_LOSS cannot be evaluated")
        return loss_of(outputs, self.kind, losses)


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
        found = trial((low + high) / 2)
        fits = found.loss <= max_loss
        if fits:
            high = found.share
        else:
            low = found.share
        if best is None or (fits and found.share < best.share) or (best.loss > max_loss and found.loss < best.loss):
            best = found
    assert best is not None
    return best

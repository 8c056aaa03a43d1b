"""Loss of variants of a network on hold-out samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.metrics import LossKind, Metric, OutputDifferences, loss_of
from sbonnx.metrics.pairs import RunsFeeds, run_pairs
from sbonnx.verify.labelled import LabelledLoss


@final
@dataclass(frozen=True)
class Judge:
    """Compares variants of a network with the network on hold-out samples.

    Attributes:
        graph: the float network, simplified and fused, without changes that a recipe makes (such as equalization).
        data: hold-out samples.
        kind, metric: meaning of the loss, see `sbonnx.metrics.loss_of`.
        labelled: loss in a task metric on labelled data, in place of both.
        device: see `RunOptions`.
    """

    graph: Graph
    data: Dataset
    kind: LossKind
    metric: Metric | None = None
    labelled: LabelledLoss | None = None
    device: str = "cpu"

    def differences(self, variant: RunsFeeds) -> OutputDifferences:
        """Run the network and a variant on all samples.

        Raises:
            DataError: no output is numeric, or one of them cannot run on a sample.
        """
        names = [tensor.name for tensor in self.graph.outputs]
        with LayerRunner(self.graph, device=self.device, threads=1, name="the float model") as floats:
            (compared,) = run_pairs(floats, (variant,), self.data.items(), names, self.metric)
        if not compared.result():
            raise DataError("no output of the model is numeric: its loss cannot be evaluated")
        return compared

    def loss(self, variant: RunsFeeds, compared: OutputDifferences | None = None) -> float:
        """Return the loss of a variant.

        Args:
            compared: `differences` of the variant, if they are known.

        Raises:
            DataError: see `differences`; or the outputs have no such loss.
        """
        if self.labelled is not None:
            return self.labelled.of(variant, self.graph)
        compared = self.differences(variant) if compared is None else compared
        return loss_of(compared.result(), self.kind, compared.losses)

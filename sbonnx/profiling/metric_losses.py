"""Loss of layers in a task metric on labelled data: only one of them quantized, and all but one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from sbonnx.calib.quantized.forward import Forward
from sbonnx.graph import Graph, query
from sbonnx.planning.types import Plan, Solution
from sbonnx.profiling.checkers import Profile
from sbonnx.report.details import Column
from sbonnx.report.figures import MetricRow
from sbonnx.report.notebook import Result
from sbonnx.report.plots import TOP
from sbonnx.values import INLINE, INTERNAL, JsonValue
from sbonnx.verify.labelled import EvaluationData, filled_metric, summarized

FLOAT, QUANTIZED = "float", "quantized"


@dataclass(frozen=True)
class LayerMetric:
    """Task metric of a network by the treatment of one layer. Differences and losses are against float.

    Attributes:
        node, op: name and type of the layer.
        alone: only this layer is quantized.
        kept_float: everything but this layer is quantized.
        gain: loss of the quantized network minus that of `kept_float`: what keeping the layer in float regains.
    """

    node: str
    op: str
    alone: MetricRow
    kept_float: MetricRow
    gain: float


@dataclass(frozen=True)
class MetricLosses(JsonValue):
    """Task metric of the float and the quantized network, and by layer.

    Attributes:
        metric: its name.
        unit: "dB" or "".
        higher_is_better: direction.
        share: losses are absolute; else relative to float.
        samples: number of labelled samples.
        float, quantized: the networks without and with all quantization.
        layers: those that were measured, the largest loss alone first; equal ones by what they regain.
    """

    metric: str
    unit: str
    higher_is_better: bool
    share: bool
    samples: int
    float: MetricRow
    quantized: MetricRow
    layers: tuple[LayerMetric, ...]


@dataclass(frozen=True, repr=False)
class EvaluatedProfile(Result):
    """Losses of all layers, and of some in a task metric.

    Attributes:
        profile: figures by layer.
        evaluation: loss of layers in a task metric; None without.
        whole: all layers in graph order, of which `profile` may have only the worst.
    """

    frame_of: ClassVar = "profile.layers"

    profile: Profile = field(metadata=INLINE)
    evaluation: MetricLosses | None
    whole: Profile | None = field(default=None, compare=False, metadata=INTERNAL)

    def plot(self, column: Column | None = None, top: int = TOP, ax: Any = None) -> Any:
        """Draw the figures of the layers with the largest isolated loss, see `Profile.plot`."""
        return self.profile.plot(column, top, ax)


def metric_losses(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    nodes: Sequence[str],
    evaluation: EvaluationData,
    *,
    device: str = "cpu",
    feeds_done: Callable[[], None] | None = None,
) -> MetricLosses:
    """Measure the loss of layers in a task metric. Each layer takes two passes over the labelled data.

    Args:
        graph: the prepared float graph.
        nodes: names of layers.
        feeds_done: called after each feed of each pass.

    Raises: see `sbonnx.verify.evaluate`.
    """
    kind, ops = evaluation.kind(), {node.name: node.op for node in query.all_nodes(graph)}
    variants: dict[str, tuple[Plan, Solution]] = {
        FLOAT: _restricted(graph, plan, solution, lambda node: False),
        QUANTIZED: (plan, solution),
    }
    for name in nodes:
        variants[f"alone {name}"] = _restricted(graph, plan, solution, name.__eq__)
        variants[f"kept {name}"] = _restricted(graph, plan, solution, name.__ne__)
    metrics = {}
    for label, (chosen, solved) in variants.items():
        with Forward(graph, chosen, solved, device=device) as run:
            metrics[label] = filled_metric(evaluation, run, graph, feeds_done)
    summary = summarized(kind, metrics)
    rows = {row.model: row for row in summary.rows}
    lost = rows[QUANTIZED].loss
    layers = [
        LayerMetric(
            name,
            ops[name],
            replace(rows[f"alone {name}"], model="only this layer quantized"),
            replace(rows[f"kept {name}"], model="only this layer in float"),
            lost - rows[f"kept {name}"].loss,
        )
        for name in nodes
    ]
    layers.sort(key=lambda row: (-row.alone.loss, -row.gain))
    facts = (summary.metric, summary.unit, summary.higher_is_better, summary.share, summary.samples)
    return MetricLosses(*facts, rows[FLOAT], rows[QUANTIZED], tuple(layers))


def _restricted(
    graph: Graph, plan: Plan, solution: Solution, quantized: Callable[[str], bool]
) -> tuple[Plan, Solution]:
    """Return plan and solution of the uses by some nodes, and of the constants that those nodes read."""
    sites = []
    for site in plan.sites:
        readers = tuple(reader for reader in site.readers if quantized(reader.node))
        if readers:
            sites.append(replace(site, readers=readers))
    read = {tensor.name for node in query.all_nodes(graph) if quantized(node.name) for tensor in node.inputs}
    constants = {name: values for name, values in solution.constants.items() if name in read}
    return replace(plan, sites=tuple(sites)), replace(solution, constants=constants)


__all__ = ["EvaluatedProfile", "LayerMetric", "MetricLosses", "metric_losses"]

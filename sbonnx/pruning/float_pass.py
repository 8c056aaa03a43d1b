"""One pass of the float network: second moments of the inputs of layers, and outputs on hold-out samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import run_float, sum_inputs
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import CanonicalSamples, micro_batches
from sbonnx.calib.engine.threads import in_order, within
from sbonnx.errors import DataError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype
from sbonnx.metrics import ErrorSum
from sbonnx.moments import bytes_for, is_held
from sbonnx.options import RunOptions
from sbonnx.pruning.fit_layers import FitLayer, MomentPair, input_sums
from sbonnx.pruning.groups.dimensions import WHAT, Dependencies
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array

MOST_JUDGED: Final = 64
"""Maximum number of hold-out samples on which trials run, and of samples on which sizes are measured."""

LEAST_SCORES: Final = 8
"""Outputs with one axis of at least this many values a sample are scores of classes, of which differences count."""


def float_moments(
    graph: Graph, layers: Sequence[FitLayer], units: CanonicalSamples
) -> tuple[dict[str, MomentPair], list[Refusal]]:
    """Return the moments of the inputs of each layer in the float network, by layer, in as few passes as fit memory.

    Layers whose inputs were never computed or are not finite are refused.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    pairs: dict[str, MomentPair] = {}
    refusals = []
    options = units.options
    passes = within(layers, lambda layer: 2 * bytes_for(layer.layout, two_streams=False), options.memory_bytes)
    for number, some in enumerate(passes):
        options.progress.start(f"moments of inputs, pass {number + 1}", units.feeds)
        sums = input_sums(some, two_streams=False, samples=units.samples)
        sum_inputs(graph, sums, units)
        for sum_of_moments in sums:
            for layer in sum_of_moments.layers:
                pair = sum_of_moments.pair(layer)
                if pair is None:
                    why = Reason(
                        "not-reached", "not refitted: its inputs were never computed, or hold NaN or infinite values"
                    )
                    refusals.append(Refusal(WHAT, layer.name, why))
                else:
                    pairs[layer.name] = pair
    return pairs, refusals


def measured_sizes(graph: Graph, found: Dependencies, units: CanonicalSamples) -> dict[str, float]:
    """Return sizes that can depend on the input, by node, on average over the samples that they are measured on.

    Returns:
        for a linear layer the output positions of a sample (rows of its matrix product), for a product of two
        activations its multiplications. Nodes whose outputs were never computed are left out.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    outputs = {linear.node.outputs[0].name: linear for linear in found.linears}
    factors = {product.node.outputs[0].name: product.node.inputs[0].name for product in found.products}
    nodes = {tensor.name: node.name for node in graph.nodes for tensor in node.outputs}

    def visit(unit: Sample, known: Mapping[str, Any]) -> dict[str, float]:
        sizes = {
            name: np.size(known[name]) / linear.layer.out_channels for name, linear in outputs.items() if name in known
        }
        products = {name: np.size(known[name]) * np.shape(known[a])[-1] for name, a in factors.items() if name in known}
        return {name: size / unit.samples for name, size in {**sizes, **products}.items()}

    total: dict[str, list[float]] = {}
    names = [*outputs, *factors, *factors.values()]
    for _, sizes in run_float(graph, names, units, visit, MOST_JUDGED):
        for name, size in sizes.items():
            total.setdefault(nodes[name], []).append(size)
    return {name: float(np.mean(sizes)) for name, sizes in total.items()}


@dataclass
class OutputErrors:
    """Runs variants of a network on hold-out samples and measures the error of their outputs.

    Attributes:
        units: micro-batches of hold-out samples; all samples if there are fewer than `sbonnx.moments.HELD`.
        options: of the runs.
        outputs: float outputs of the float network, one dict per unit. Those that have as many rows as the data yields,
            such as boxes, are left out.
    """

    units: Sequence[Sample]
    options: RunOptions
    outputs: list[Mapping[str, Array]] = field(default_factory=list)

    @classmethod
    def of(cls, graph: Graph, units: CanonicalSamples) -> OutputErrors:
        """Run the float network.

        Raises:
            DataError: no output holds floats.
        """
        held = [unit for unit in units if is_held(unit.rank)][:MOST_JUDGED] or list(units)[:MOST_JUDGED]
        names = [tensor.name for tensor in graph.outputs]
        judge = cls(list(micro_batches(graph, names, held, units.options)), units.options)
        judge.outputs = judge.run(graph)
        if not any(judge.outputs):
            raise DataError(
                "pruning compares outputs of floats, and the model has none: no sensitivity can be measured"
            )
        shapes: dict[tuple[str, tuple[tuple[int, ...], ...]], set[tuple[int, ...]]] = {}
        for unit, outputs in zip(judge.units, judge.outputs, strict=True):
            sizes = tuple(array.shape for array in unit.feed.values())
            for name, values in outputs.items():
                shapes.setdefault((name, sizes), set()).add(values.shape)
        varying = {name for (name, _), seen in shapes.items() if len(seen) > 1}
        judge.outputs = [
            {name: values for name, values in outputs.items() if name not in varying} for outputs in judge.outputs
        ]
        return judge

    def run(self, graph: Graph) -> list[Mapping[str, Array]]:
        """Return the float outputs of a variant for each unit."""
        names = [tensor.name for tensor in graph.outputs if getattr(dtype(tensor), "kind", "f") == "f"]
        with ExitStack() as stack:
            runner = stack.enter_context(LayerRunner(graph, device=self.options.device, threads=1))

            def work(unit: Sample) -> Mapping[str, Array]:
                values = runner.run(unit.feed, names, where=unit.where)
                arrays = {name: np.array(value) for name, value in values.items()}
                return {name: value for name, value in arrays.items() if value.dtype.kind == "f"}

            return [result for _, result in in_order(work, iter(self.units), self.options.threads or 1)]

    def error(self, graph: Graph) -> float:
        """Return the energy of the error of the outputs relative to that of the outputs, mean over outputs.

        The mean over the scores of a sample is subtracted from scores, see `LEAST_SCORES`: an error that all classes
        have in common changes neither softmax nor order.
        """
        sums = {name: ErrorSum() for name in self.outputs[0]}
        for floats, values in zip(self.outputs, self.run(graph), strict=True):
            for name, errors in sums.items():
                errors.add(_centred(floats[name]), _centred(values[name]))
        return float(np.mean([errors.relative for errors in sums.values()])) if sums else math.inf


def _centred(values: Array) -> Array:
    """Return float64 values, less the mean of the finite ones in each sample if they are scores."""
    wide = values.astype(np.float64)
    scores = int(np.prod(values.shape[1:]))
    if not (values.ndim > 1 and scores >= LEAST_SCORES and max(values.shape[1:]) == scores):
        return wide
    axes, finite = tuple(range(1, values.ndim)), np.isfinite(wide)
    total = np.where(finite, wide, 0.0).sum(axis=axes, keepdims=True)
    return np.asarray(wide - total / np.maximum(finite.sum(axis=axes, keepdims=True), 1))

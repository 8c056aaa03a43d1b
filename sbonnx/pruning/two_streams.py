"""Refit of all layers in order: a float and a pruned stream of activations advance together, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import LayerVisitor, run_two_streams
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import CanonicalSamples
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.calib.quantized.stream import staged
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning.types import Reader
from sbonnx.pruning.fit_layers import FitLayer, InputSums, MomentPair, input_sums
from sbonnx.pruning.groups.dimensions import WHAT
from sbonnx.pruning.ridge import KeptColumns, RefitWeight, WeightSolver, refit
from sbonnx.pruning.skips import SkipProducts, SkipSums, skips_of
from sbonnx.pruning.weight_editor import WeightEditor
from sbonnx.report import Reason, Refusal
from sbonnx.report.pruned import LayerRefit
from sbonnx.spec import Array

WORTH_THREADS: Final = 0.002
"""Time per sample in a stage, both streams, in seconds, from which threads gain more than the GIL costs."""


@dataclass(frozen=True)
class Remains:
    """Part of a weight that remains.

    Attributes:
        columns: bool (G, K).
        outputs: output channels, bool (out channels,).
        solver: finds the remaining values; None: `KeptColumns` of `columns`.
    """

    columns: Array
    outputs: Array
    solver: WeightSolver | None = None

    @staticmethod
    def all_of(layer: FitLayer, solver: WeightSolver | None = None) -> Remains:
        """Return all columns and outputs of a layer."""
        layout = layer.layout
        return Remains(np.ones((layout.groups, layout.inputs), bool), np.ones(layout.out_channels, bool), solver)


def refit_pruned(
    graph: Graph,
    masked: Graph,
    layers: Sequence[FitLayer],
    kept: Mapping[str, Remains],
    units: CanonicalSamples,
) -> tuple[list[LayerRefit], list[Refusal]]:
    """Refit the layers of a masked graph, in place, each on inputs from refitted layers.

    Args:
        graph: the float graph; not changed.
        masked: a copy in which the weights of removed columns are zero.
        layers: of `graph`; those that share a weight with another layer keep it.
        kept: columns and outputs that remain, by layer. Every layer has an entry.
        units: the samples.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    walk = _Walk(graph, masked, [layer for layer in layers if layer.can_refit], kept, units)
    with one_blas_thread():
        walk.run()
    return walk.rows, walk.refusals


class _Walk(LayerVisitor[list[dict[str, Array]]]):
    """Both streams, stage by stage: the layers that read the outputs of a stage are refitted when it ends."""

    least = WORTH_THREADS
    recompute = False

    def __init__(
        self,
        graph: Graph,
        masked: Graph,
        layers: Sequence[FitLayer],
        kept: Mapping[str, Remains],
        units: CanonicalSamples,
    ) -> None:
        self.floats, self.masked = graph, masked
        self.layers, self.kept, self.units = layers, kept, units
        self.editor = WeightEditor(masked, {layer.name: layer for layer in layers})
        self.tensors = {layer.name: layer.tensor for layer in layers}
        self.seen: set[str] = set()  # layers whose input was observed; a skip tensor is observed again later
        self.rows: list[LayerRefit] = []
        self.refusals: list[Refusal] = []
        self.sums: list[InputSums] = []
        self.index = tensors_by_name(self.floats)
        self.skips = skips_of(graph, layers)
        self.products: dict[str, SkipSums] = {}

    def run(self) -> None:
        """Run all samples through each stage in both streams, and refit the layers that read its outputs."""
        computed = {tensor.name for node in self.floats.nodes for tensor in node.outputs}
        # layers that read inputs of the model, which are equal in both streams, keep their weights
        observed = list(dict.fromkeys(layer.tensor for layer in self.layers if layer.tensor in computed))
        if not observed:
            return
        late = frozenset(Reader(layer.name, 0) for layer in self.layers)
        segments = _with_skips(self.floats, staged(self.floats, observed, late), self.layers, self.skips)
        self.units.options.progress.start("refit of the remaining weights", self.units.feeds)
        for _ in run_two_streams(self.floats, segments, observed, self.units, self):
            self._refit(self.sums)

    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        """Open the stage in the float and in the pruned network."""
        layers = [layer for layer in self.layers if layer.tensor in segment.observed and layer.name not in self.seen]
        self.seen.update(layer.name for layer in layers)
        self.sums = input_sums(layers, two_streams=True, samples=self.units.samples)
        here = {layer.name: layer for layer in layers if self.skips.get(layer.name) in segment.observed}
        self.products = {name: SkipSums(layer, self.units.samples) for name, layer in here.items()}
        pieces = (
            segment.model(self.floats, self.index),
            segment.model(self.masked, tensors_by_name(self.masked)),
        )
        device = self.units.options.device
        return [stack.enter_context(LayerRunner(piece, device=device, threads=1, name="a layer")) for piece in pieces]

    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> list[dict[str, Array]]:
        """Return the inputs of the layers in both streams."""
        wanted = {sum_of_moments.tensor for sum_of_moments in self.sums} | {self.skips[name] for name in self.products}
        return [{name: np.asarray(tensors[name]) for name in wanted if name in tensors} for tensors in streams]

    def take(self, number: int, unit: Sample, result: list[dict[str, Array]]) -> None:
        """Add a sample to the moments."""
        plain, pruned = result
        ranks = [part.rank for part in unit.members]
        for sum_of_moments in self.sums:
            if (
                sum_of_moments.tensor in plain
                and plain[sum_of_moments.tensor].shape == pruned[sum_of_moments.tensor].shape
            ):
                sum_of_moments.add(plain[sum_of_moments.tensor], pruned[sum_of_moments.tensor], ranks)
        for name, sums in self.products.items():
            tensor, skip = self.tensors[name], self.skips[name]
            if tensor in plain and skip in plain and plain[tensor].shape == pruned[tensor].shape:
                sums.add(plain[tensor], pruned[tensor], plain[skip] - pruned[skip], ranks)

    def _refit(self, sums: Sequence[InputSums]) -> None:
        for sum_of_moments in sums:
            for layer in sum_of_moments.layers:
                pair = sum_of_moments.pair(layer)
                if pair is None:
                    why = Reason(
                        "not-reached", "not refitted: its inputs were never computed, or hold NaN or infinite values"
                    )
                    self.refusals.append(Refusal(WHAT, layer.name, why))
                else:
                    self._take(layer, pair)

    def _take(self, layer: FitLayer, pair: MomentPair) -> None:
        remains, sums = self.kept[layer.name], self.products.get(layer.name)
        skip = None if sums is None else sums.products()
        refitted = _refit_remaining(layer, pair, remains, skip)
        self.editor.set(layer.name, refitted)
        columns = remains.columns
        removed = int((~columns).sum())
        zeros = int((refitted.weight == 0).sum())
        self.rows.append(
            LayerRefit(layer.name, columns.size, removed, refitted.strength, refitted.before, refitted.after, zeros)
        )


def _refit_remaining(
    layer: FitLayer,
    pair: MomentPair,
    remains: Remains,
    skip: tuple[SkipProducts, SkipProducts] | None,
) -> RefitWeight:
    """Refit the outputs that remain; the others, which nothing reads, keep their weights."""
    weight, centred = layer.weight(), layer.bias is not None
    outputs = remains.outputs
    solver = remains.solver or KeptColumns(remains.columns)
    if outputs.all() or layer.layout.groups > 1:
        return refit(weight, pair, solver, centred=centred, skip=skip)
    some = None if skip is None else (skip[0].of(outputs), skip[1].of(outputs))
    refitted = refit(weight[:, outputs], pair, solver, centred=centred, skip=some)
    whole, shift = weight * remains.columns[:, None, :], np.zeros(len(outputs))
    whole[:, outputs], shift[outputs] = refitted.weight, refitted.shift
    return replace(refitted, weight=whole, shift=shift)


def _with_skips(
    graph: Graph, segments: Sequence[Segment], layers: Sequence[FitLayer], skips: Mapping[str, str]
) -> list[Segment]:
    """Return the segments so that a skip tensor is observed with the input of its layer, if it is computed by then."""
    outputs = {node.name: [tensor.name for tensor in node.outputs] for node in graph.nodes}
    producers = {
        name: number for number, segment in enumerate(segments) for node in segment.nodes for name in outputs[node]
    }
    changed = list(segments)
    for layer in layers:
        skip = skips.get(layer.name)
        at = next((number for number, segment in enumerate(segments) if layer.tensor in segment.observed), None)
        if skip is None or at is None or producers.get(skip, at + 1) > at:
            continue
        maker, reader = changed[producers[skip]], changed[at]
        if skip not in maker.outputs:
            changed[producers[skip]] = maker = replace(maker, outputs=(*maker.outputs, skip))
        reader = maker if producers[skip] == at else reader
        if skip not in reader.observed:
            changed[at] = replace(reader, observed=(*reader.observed, skip))
    return changed

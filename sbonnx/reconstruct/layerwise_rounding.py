"""Layer-wise weight reconstruction: computes the second moments of each layer's inputs, then rounds its weight.

A float and a quantized stream of activations advance together. When they reach a layer, all layers before it are
quantized; its moments are accumulated over the samples, and its weight is rounded. A weight that several nodes read is
rounded before, by the inputs of all of them in the float network. The work is linear in the number of layers. Memory
holds two sets of activations of the samples at a time (in a `TensorStore` each) and the moments of the current layers,
independent of the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from sbonnx.calib.cache.rounded_weights import RoundedWeights
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import LayerVisitor, run_two_streams, sum_inputs
from sbonnx.calib.engine.observation import requests_of
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import MOST, CanonicalSamples
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import one_blas_thread, within
from sbonnx.calib.quantized.stream import QuantizedInputs, measured_sites, quantized, quantized_reads, staged, uses_of
from sbonnx.calib.quantized.stream_state import RoundSite, StreamResult
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import NumericError
from sbonnx.graph import Graph
from sbonnx.graph.storage.weights import release_pages
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.reconstruct.layer_fit import LayerFitter, Reconstruction
from sbonnx.reconstruct.layer_inputs import Layer, Seen, in_budget, layers_of
from sbonnx.reconstruct.routed_layers import routed
from sbonnx.spec import Array

WORTH_THREADS: Final = 0.002
"""Time per sample in a stage, both streams, in seconds, from which threads gain more than the GIL costs. Measured."""

STACK: Final = 1 << 20
"""Bytes of the largest tensor of samples that are added together."""

LEAST_MEMORY: Final = 256 << 20
"""Bytes that are always allowed for the moments of one layer."""


def walk_rounding(
    graph: Graph,
    plan: Plan,
    units: CanonicalSamples,
    ranges: MeasuredRanges,
    settings: Reconstruction,
    inputs: QuantizedInputs | None,
    stored: RoundedWeights | None = None,
) -> StreamResult:
    """Round the weights of `plan` whose rounding uses inputs.

    Args:
        graph, plan: as for `calibrate`; not changed.
        units: the data, sorted and numbered by content, iterated several times. The moments of a layer get as much
            memory as activations, at least `LEAST_MEMORY`.
        ranges: ranges in the float network; sites without a range get none.
        settings: see `Reconstruction`.
        inputs: measure activations on the way, see `walk_quantized`; None: use the ranges of the float network.
        stored: layers of an interrupted run, which are not rounded again; each further layer is added to them.

    Raises:
        NumericError: quantization caused NaN or Inf; the message names the sample.
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    layers, refusals = layers_of(graph, plan, correct=settings.correct)
    layers = routed(graph, layers)
    if settings.quantized:  # the inputs of the later uses depend on the weight: one stream
        layers = [replace(layer, alone=True) if layer.others else layer for layer in layers]
    layers, large = in_budget(
        layers,
        max(units.options.memory_bytes, LEAST_MEMORY),
        two_streams=settings.quantized,
        hold_out=settings.holds_out,
    )
    fit = LayerFitter(graph, plan, ranges.bounds, settings, units.samples, stored)
    walk = _LayerwiseRounding(fit, layers, units)
    with one_blas_thread():
        if settings.quantized:
            walk.through_stages(inputs)
        else:
            walk.in_float(layers, lambda _, value: value)
    numbers = fit.numbers
    declined = (*refusals, *large, *fit.refusals)
    return StreamResult(
        numbers.bounds, numbers.codes, numbers.scales, numbers.moved, numbers.constants, fit.gains, declined
    )


@dataclass
class _LayerwiseRounding:
    """State of one run of `walk_rounding`."""

    fit: LayerFitter
    layers: Sequence[Layer]
    units: CanonicalSamples

    @property
    def graph(self) -> Graph:
        """The float graph."""
        return self.fit.graph

    # --- two streams -------------------------------------------------------------------------------

    def through_stages(self, inputs: QuantizedInputs | None) -> None:
        """Run both streams stage by stage. The outputs of a stage are inputs of the layers in later stages."""
        tied = [layer for layer in self.layers if layer.others]
        if tied:
            self.in_float(tied, self.fit.fake_quant)
        self.layers = [layer for layer in self.layers if not layer.others]
        moves = inputs is not None and inputs.moves_ranges
        sites = measured_sites(self.graph, self.fit.plan, self.fit.floats) if moves else {}
        readers = frozenset(Reader(layer.node.name, layer.index) for layer in self.layers)
        late = readers | (quantized_reads(self.fit.plan) if moves else frozenset())
        observed = list(dict.fromkeys([*sites, *(name for layer in self.layers for name in layer.waits_for)]))
        computed = {tensor.name for node in self.graph.nodes for tensor in node.outputs}
        after = {layer.node.name: layer.waits_for for layer in self.layers if layer.gate is not None}
        segments = staged(self.graph, [name for name in observed if name in computed], late, after)
        self.units.options.progress.start("rounding by input activations", self.units.feeds)
        # layers that read model inputs, which are equal in both streams except for their quantization
        sums = self.fit.watch([layer for layer in self.layers if computed.isdisjoint(layer.waits_for)])
        for unit in self.units if sums else ():
            for watched in sums:
                (use,) = watched.uses
                value = np.asarray(unit.feed[use.tensor])
                watched.add(value, self.fit.fake_quant(use.reads, value), [unit.rank])
        self.fit.take(sums)
        place = {name: number for number, segment in enumerate(segments) for name in segment.outputs}
        summed: list[list[Layer]] = [[] for _ in segments]
        for layer in self.layers:
            if not computed.isdisjoint(layer.waits_for):
                summed[max(place.get(name, 0) for name in layer.waits_for)].append(layer)
        segments = [_reading(segment, some) for segment, some in zip(segments, summed, strict=True)]
        stages = _Stages(self, segments, summed, uses_of(self.fit.plan, inputs or QuantizedInputs()))
        stages.run(sites)

    # --- one stream --------------------------------------------------------------------------------

    def in_float(self, layers: Sequence[Layer], read: Callable[[Site | None, Array], Array]) -> None:
        """Round layers by inputs of the float network, in as many passes as their moments need memory.

        Args:
            layers: of the walk.
            read: converts an input to what a layer reads through its site.
        """
        memory = max(self.units.options.memory_bytes, LEAST_MEMORY)
        passes = within(layers, lambda layer: layer.bytes_of_moments(two_streams=False), memory)
        for number, some in enumerate(passes):
            self.units.options.progress.start(f"rounding by float inputs, pass {number + 1}", self.units.feeds)
            sums = self.fit.watch(some)
            sum_inputs(
                self.graph, sums, self.units, lambda watched, place, value: read(watched.uses[place].reads, value)
            )
            self.fit.take(sums)


def _reading(segment: Segment, layers: Sequence[Layer]) -> Segment:
    """Return a segment that also observes the earlier tensors whose values are summed when it has run."""
    names = [name for layer in layers for name in (layer.tensor, layer.gate) if name is not None]
    return replace(segment, observed=tuple(dict.fromkeys([*segment.observed, *names])))


Tensors = dict[str, Array]


class _Stages(LayerVisitor[tuple[Tensors, Tensors]]):
    """Both streams, stage by stage: the layers that read the outputs of a stage are rounded when it ends.

    Tensors of single samples are stacked before they are added, because the overhead of many small sums is larger than
    their time.
    """

    least = WORTH_THREADS
    recompute = False

    def __init__(
        self,
        walk: _LayerwiseRounding,
        segments: Sequence[Segment],
        summed: Sequence[Sequence[Layer]],
        uses: Mapping[Reader, Site],
    ) -> None:
        self.walk = walk
        self.segments = segments
        self.summed = summed  # layers whose inputs are summed, by the number of the segment
        self.uses = uses
        self.sums: Sequence[Seen] = ()
        self.tensors: dict[str, tuple[str, str | None]] = {}  # that the sums are of, and their gates, by name of sums
        self.sketches: dict[tuple[str, int | None], Sketch] = {}
        self.wanted: list[str] = []
        self.waiting: list[tuple[Sample, Tensors, Tensors]] = []
        self.stacks = False

    def run(self, sites: Mapping[str, Sequence[Site]]) -> None:
        """For each stage, run all samples in both streams, then round the layers that read its outputs."""
        self.sites = sites
        walk = self.walk
        looked_at = list(dict.fromkeys(name for segment in self.segments for name in segment.observed))
        for segment in run_two_streams(walk.graph, self.segments, looked_at, walk.units, self):
            for site in (site for name in segment.outputs for site in sites.get(name, ())):
                walk.fit.numbers.measure(site, self.sketches[site.tensor, site.spec.axis])
            walk.fit.take(self.sums)
            self.sums = ()
            release_pages()

    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        """Open the float and the quantized stage, and start the sums and sketches of its outputs."""
        walk, numbers = self.walk, self.walk.fit.numbers
        self.sums = walk.fit.watch(self.summed[number])
        requests = requests_of([site for name in segment.outputs for site in self.sites.get(name, ())], numbers.ways)
        self.sketches = {key: request.sketch(key[1]) for key, request in requests.items()}
        self.tensors = {
            watched_input.name: (watched_input.uses[0].tensor, watched_input.gates[0]) for watched_input in self.sums
        }
        read = [name for pair in self.tensors.values() for name in pair if name is not None]
        self.wanted = list(dict.fromkeys([*read, *(name for name, _ in self.sketches)]))
        self.stacks = all(use.geometry.stacks for watched_input in self.sums for use in watched_input.layers)
        pieces = (
            segment.model(walk.graph, numbers.tensors),
            quantized(segment, graph=walk.graph, numbers=numbers, uses=self.uses),
        )
        device = walk.units.options.device
        return [stack.enter_context(LayerRunner(piece, device=device, threads=1, name="a layer")) for piece in pieces]

    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> tuple[Tensors, Tensors]:
        """Return the wanted tensors of both streams."""
        plain, rounded = (
            {name: np.asarray(tensors[name]) for name in self.wanted if name in tensors} for tensors in streams
        )
        return plain, rounded

    def take(self, number: int, unit: Sample, result: tuple[Tensors, Tensors]) -> None:
        """Add a sample to the sums and sketches, or let it wait for others of the same shapes."""
        plain, rounded = result
        if self.waiting and _shapes(rounded) != _shapes(self.waiting[0][2]):
            self._flush()
        self.waiting.append((unit.bare, plain, rounded))
        single = self.stacks and not unit.parts and all(value.shape[:1] == (1,) for value in rounded.values())
        largest = max((value.nbytes for value in rounded.values()), default=0)
        if not single or len(self.waiting) >= min(MOST, STACK // max(largest, 1)):
            self._flush()

    def close(self, segment: Segment) -> None:
        """Add the samples that wait."""
        self._flush()

    def _flush(self) -> None:
        """Add the waiting samples to the sums and sketches, with inputs of layers as the file quantizes them."""
        if not self.waiting:
            return
        units, *streams = zip(*self.waiting, strict=True)
        self.waiting = []
        plain, rounded = (
            stream[0]
            if len(units) == 1
            else {name: np.concatenate([tensors[name] for tensors in stream]) for name in stream[0]}
            for stream in streams
        )
        unit = units[0] if len(units) == 1 else replace(units[0], parts=units)
        _check_finite(rounded, self.wanted, unit)
        for watched_input in self.sums:
            name, gate = self.tensors[watched_input.name]
            if name in rounded:
                fed = self.walk.fit.fake_quant(watched_input.uses[0].reads, rounded[name])
                factors = None if gate is None else rounded[gate]
                watched_input.add(plain[name], fed, [part.rank for part in unit.members], gates=factors)
        for key, sketch in self.sketches.items():
            for part, value in _by_sample(rounded[key[0]], unit):
                sketch.observe(value, part.index, part.samples)


def _shapes(tensors: Tensors) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, value.shape) for name, value in tensors.items()]


def _by_sample(value: Array, unit: Sample) -> Iterator[tuple[Sample, Array]]:
    if not unit.parts:
        yield unit, value
    for place, part in enumerate(unit.parts):
        yield part, value[place : place + 1]


def _check_finite(values: Mapping[str, Array], names: Sequence[str], unit: Sample) -> None:
    """Raise an error if quantization caused NaN or Inf."""
    for name in names:
        if name in values and values[name].dtype.kind == "f" and not np.isfinite(values[name]).all():
            where = next(part.where for part, value in _by_sample(values[name], unit) if not np.isfinite(value).all())
            raise NumericError(
                f"with everything before it quantized, '{name}' holds NaN or Inf on {where}: "
                "give the layers before it more bits, or round without inputs (W.ROUNDING: nearest)"
            )


__all__ = ["Reconstruction", "RoundSite", "walk_rounding"]

"""Block-wise weight reconstruction by soft rounding, with a float and a quantized stream of activations.

Both streams advance block by block. Each block is run once in float, optimized on batches of its input activations from
both streams, and run once quantized, so the work is linear in the number of blocks. Activations are stored in a
`TensorStore`, within its memory budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.cuda import place_on
from sbonnx.calib.engine.runner import LayerRunner, providers, samples_at_once
from sbonnx.calib.engine.segments import Segment, crossing, needed, reads_of, segments_of
from sbonnx.calib.engine.threads import in_order
from sbonnx.calib.quantized.state import QuantState, StreamResult
from sbonnx.calib.quantized.stream import plainly, quantized
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.correct.biases import biases_of
from sbonnx.errors import ModelError
from sbonnx.graph import Graph
from sbonnx.graph.query import dtype, tensors_by_name
from sbonnx.options import RunOptions
from sbonnx.plan.types import Gain, Plan, Reader, Site
from sbonnx.progress import Progress
from sbonnx.reconstruct.block_training import FLOAT, QUANTIZED, ActivationPairs, BlockBatches, BlockTrainer
from sbonnx.reconstruct.soft_block import SoftBlock
from sbonnx.report import Refusal
from sbonnx.rounding.adaround import BLOCKS, SoftBlocks
from sbonnx.spec import Array, QParams

Scope = Literal["block", "layer"]

MOST_LAYERS: Final = 12
"""Maximum number of layers in a block. Larger blocks (e.g. with skip connections across the net) are split by layer."""


def blocks(graph: Graph, layers: Collection[str], scope: Scope = "block", *, most: int = MOST_LAYERS) -> list[Segment]:
    """Partition the main graph, up to its last layer and the nodes after it, into pieces with at least one layer each.

    A cut is a position that only one of the tensors that depend on a layer crosses. Tensors that depend on no layer
    (model inputs, masks, shapes) may also cross it. Nodes without layers belong to the preceding block, or to the first
    block if none precedes.

    Args:
        layers: names of the nodes whose weights are rounded.
        scope: "block", or "layer": one piece for each layer with the nodes up to the next layer; several tensors may
            lead from one piece to the next.
        most: maximum number of layers in a block, see `MOST_LAYERS`.

    Returns:
        Pieces in execution order. The outputs of a piece are tensors that later pieces read, model outputs, and, for
        the last piece, unused tensors; `observed` are those that depend on a layer: the targets of reconstruction.
    """
    nodes = needed(graph, [tensor.name for tensor in graph.outputs])
    heavy: set[str] = set()  # tensors that depend on a layer
    for node in nodes:
        if node.name in layers or any(name in heavy for name in reads_of(node)):
            heavy.update(tensor.name for tensor in node.outputs if tensor.name)
    # a tensor of unknown type cannot be the input of a model
    without_type = {tensor.name for node in nodes for tensor in node.outputs if tensor.name and dtype(tensor) is None}
    widths, untyped = (crossing(nodes, dict.fromkeys(names, 1)) for names in (heavy, without_type))
    firsts = [at for at, node in enumerate(nodes) if node.name in layers]
    if not firsts:
        return []
    narrow = [at for at in range(1, len(nodes)) if widths[at] <= 1 and not untyped[at]]
    allowed = [at for at in range(1, len(nodes)) if not untyped[at]]
    starts: list[int] = []
    for begin, end in pairwise([0, *_merged(narrow, firsts), len(nodes)]):
        inside = [at for at in firsts if begin <= at < end]
        starts.append(begin)
        if scope == "layer" or len(inside) > most:
            starts.extend(_merged([at for at in allowed if begin < at < end and at in inside], inside))
    pieces = [nodes[begin:end] for begin, end in pairwise([*starts, len(nodes)])]
    outputs = [tensor.name for tensor in graph.outputs]
    return segments_of(pieces, outputs, lambda _, given: [name for name in given if name in heavy])


def _merged(cuts: Sequence[int], layers: Sequence[int]) -> list[int]:
    """Select one cut between each two layers, the last one, so that every piece has a layer. None before the first."""
    found: dict[int, int] = {}
    for cut in cuts:
        before = sum(at < cut for at in layers)
        if 0 < before < len(layers):
            found[before] = cut
    return [found[count] for count in sorted(found)]


WHAT: Final = "round in blocks"
SHARED: Final = "several blocks read this weight: its codes stay as they were"


def wants_blocks(plan: Plan) -> bool:
    """Return whether any weight is to be rounded by `walk_blocks`."""
    return any(site.rounding.name == BLOCKS for site in plan.of_role("weight"))


def walk_blocks(
    graph: Graph,
    plan: Plan,
    units: Iterable[Sample],
    walked: StreamResult,
    seed: int,
    options: RunOptions,
) -> StreamResult:
    """Round the weights of `plan` whose rounding is "blocks", in blocks between cuts at single tensors.

    Args:
        graph, plan: as for `calibrate`; not changed. A block uses the settings of its first weight.
        units: the samples, sorted by content, see `CanonicalSamples`; iterated once.
        walked: ranges, and the initial codes of all weights; weights without codes start with the nearest codes.
        seed: seed of random draws.
        options: see `RunOptions`.

    Returns:
        `walked` with updated codes, ranges of activations whose scales were learned, biases and gains, and a refusal
        for each block that torch cannot evaluate, whose codes are unchanged.

    Raises:
        DeviceError: torch is not installed.
        DataError, ModelError: see `LayerRunner`.
    """
    sites = {site.key: site for site in plan.of_role("weight") if site.rounding.name == BLOCKS and site.scope == ""}
    layers = {reader.node: key for key, site in sites.items() for reader in site.readers}
    if not layers:
        return walked
    settings = {key: _settings(site.rounding.arguments) for key, site in sites.items()}
    segments = blocks(graph, layers, next(iter(settings.values())).scope)
    with TensorStore(options.memory) as store:
        streams = ActivationPairs(segments, store)
        return _BlockwiseRounding(graph, plan, walked, settings, sites, segments, streams, seed, options).run(units)


def _settings(arguments: Mapping[str, Any]) -> SoftBlocks:
    return SoftBlocks(**arguments)


@dataclass
class _BlockwiseRounding:
    """State of one run of `walk_blocks`."""

    graph: Graph
    plan: Plan
    walked: StreamResult
    settings: Mapping[str, SoftBlocks]
    sites: Mapping[str, Site]
    segments: Sequence[Segment]
    streams: ActivationPairs
    seed: int
    options: RunOptions
    gains: dict[str, Gain] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    numbers: QuantState = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = QuantState(self.graph, self.plan, self.walked.bounds, plainly(None))
        self.numbers.codes.update(self.walked.codes)
        self.numbers.scales.update(self.walked.scales)
        self.numbers.moved.update(self.walked.qparams)
        self.numbers.constants.update(self.walked.constants)
        self._index = tensors_by_name(self.graph)
        self._uses = {reader: site for site in self.plan.sites for reader in site.readers}
        learned = any(settings.bias_lr > 0 for settings in self.settings.values())
        self._bias = biases_of(self.graph) if learned else {}
        self._torch_device = place_on(providers(self.options.device))

    def run(self, units: Iterable[Sample]) -> StreamResult:
        """Process all blocks and return the result."""
        places: list[Sample] = []
        names = [tensor.name for tensor in self.graph.inputs]
        wanted = {name for segment in self.segments for name in segment.inputs}
        for unit in units:
            self.streams.put(FLOAT, unit, unit.feed, [name for name in names if name in wanted])
            places.append(replace(unit, feed={}))
        progress = self.options.progress
        progress.start("rounding in blocks", sum(unit.closes for unit in places))
        for number, segment in enumerate(self.segments):
            progress.state(segment=(number + 1, len(self.segments)))
            self._through(FLOAT, number, places, segment.model(self.graph, self._index), None)
            self._learn(number, segment, places)
            if number + 1 < len(self.segments):
                piece = quantized(segment, self.graph, self.numbers, self._uses)
                self._through(QUANTIZED, number, places, piece, progress)
            self.streams.done(number, places)
        numbers = self.numbers
        return replace(
            self.walked,
            bounds=numbers.bounds,
            codes=numbers.codes,
            scales=numbers.scales,
            qparams=numbers.moved,
            constants=numbers.constants,
            gains={**self.walked.gains, **self.gains},
            refusals=(*self.walked.refusals, *self.refusals),
        )

    def _through(
        self, stream: bool, number: int, places: Iterable[Sample], piece: Graph, progress: Progress | None
    ) -> None:
        outputs = self.segments[number].outputs
        with LayerRunner(piece, device=self.options.device, threads=1, name="a block") as run:

            def work(unit: Sample) -> None:
                made = run.run(self.streams.reads(stream, number, unit), outputs, where=unit.where)
                self.streams.put(stream, unit, made, outputs)

            for unit, _ in in_order(work, iter(places), samples_at_once(self.options)):
                if progress is not None:
                    progress.advance(int(unit.closes))

    def _learn(self, number: int, segment: Segment, places: Sequence[Sample]) -> None:
        inside = set(segment.nodes)
        read = {key: site for key, site in self.sites.items() if any(one.node in inside for one in site.readers)}
        sites = {key: site for key, site in read.items() if all(one.node in inside for one in site.readers)}
        for site in (site for key, site in read.items() if key not in sites):
            refusal = Refusal(WHAT, site.tensor, SHARED)
            self.refusals += [] if refusal in self.refusals else [refusal]
        weights = self._weights(sites)
        if not weights:
            return
        settings = self.settings[next(iter(weights))]
        biases = self._biases(segment) if settings.bias_lr > 0 else {}
        try:
            block = SoftBlock(self.graph, self.numbers, self._uses, segment, sites, biases, self._torch_device)
            batches = BlockBatches(
                block.torch, self.streams, segment, [unit.index for unit in places], self._torch_device
            )
            constants, tensors = self.numbers.constants, self.numbers.tensors
            values = {
                name: np.asarray(constants[name] if name in constants else tensors[name].values)
                for name in biases.values()
            }
            scales = self._scales(block, segment)
            result = BlockTrainer(block, batches, weights, values, scales, settings, self.seed + number).learn()
        except ModelError as error:
            where = ", ".join(site.tensor for site in sites.values())
            self.refusals.append(Refusal(WHAT, where, f"{error}: the codes stay as they were"))
            return
        self.numbers.codes.update(result.codes)
        self.numbers.constants.update(result.biases)
        by_key = self.plan.by_key()
        for key, bounds in result.bounds.items():
            self.numbers.limit(by_key[key], bounds)
        self.gains.update(dict.fromkeys(sites, Gain(BLOCKS, result.error, result.nearest)))

    def _weights(self, sites: Mapping[str, Site]) -> dict[str, tuple[Array, Array, QParams]]:
        """Return float values, initial codes and scales of the weights that have codes and scales."""
        found = {}
        for key, site in sites.items():
            codes, qparams = self.numbers.codes_of(site), self.numbers.params(site)
            if codes is not None and qparams is not None and not site.spec.is_fp8:
                found[key] = (np.asarray(self.numbers.weight(site)), codes, qparams)
        return found

    def _biases(self, segment: Segment) -> dict[Reader, str]:
        """Return the biases of the layers of a block by their readers."""
        names = {self._bias[node].name for node in segment.nodes if node in self._bias}
        inside = set(segment.nodes)
        return {
            Reader(node.name, index): tensor.name
            for node in self.graph.nodes
            if node.name in inside
            for index, tensor in enumerate(node.inputs)
            if tensor.name in names
        }

    def _scales(self, block: SoftBlock, segment: Segment) -> list[str]:
        """Return activations of the block whose scale is read by no node outside."""
        inside = set(segment.nodes)
        by_key = self.plan.by_key()
        return [
            key
            for key in block.reads
            if self.numbers.params(by_key[key]) is not None
            and by_key[key].fixed is None
            and self.numbers.members(by_key[key]) == 1
            and all(reader.node in inside for reader in by_key[key].readers)
        ]

"""Layers that need input statistics, and the accumulation of these statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sbonnx.correct.biases import biases_of
from sbonnx.graph import Constant, Graph, Node
from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import HeldRows, Means, MeanSums, Moments, MomentSums, bytes_for, is_held, sample_weights
from sbonnx.moments.share import HELD_BYTES
from sbonnx.ops import LINEAR
from sbonnx.plan.types import Plan, Reader, Site
from sbonnx.report import Refusal
from sbonnx.rounding import ROUNDERS
from sbonnx.spec import Array

WHAT: Final = "round by inputs"


@dataclass(frozen=True)
class Layer:
    """A linear node whose weight is rounded, or whose bias is corrected, by statistics of its input activations.

    Attributes:
        node: of the main graph.
        site: of its weight.
        index: index of the data input.
        tensor: name of the data input.
        reads: the site through which the data input is read, or None if it stays float.
        geometry: input geometry of the node.
        rounds: whether the rounding uses input statistics; else only the bias is corrected.
        bias: the constant that can compensate a mean error, or None.
    """

    node: Node = field(compare=False)
    site: Site
    index: int
    tensor: str
    reads: Site | None
    geometry: Geometry
    rounds: bool = True
    bias: Constant | None = field(default=None, compare=False)

    @property
    def layout(self) -> LinearLayer:
        """Layout of the weight."""
        return self.geometry.layer

    def bytes_of_moments(self, *, two_streams: bool, hold_out: bool = False) -> int:
        """Return the memory of its moments during accumulation; 0 if only means are needed."""
        if not self.rounds:
            return 0
        return bytes_for(self.layout, two_streams) * (1 + hold_out) + hold_out * HELD_BYTES


def looks_at_inputs(site: Site) -> bool:
    """Return whether the rounding of a weight uses input statistics."""
    kind = ROUNDERS.get(site.rounding.name)
    return (kind is not None and kind.needs_moments) or site.rounding.scale == "search"


def layers_of(graph: Graph, plan: Plan, *, correct: bool) -> tuple[list[Layer], list[Refusal]]:
    """Return the layers of the main graph that need input statistics according to `plan`, in order.

    Args:
        correct: include layers that have a separate bias, whatever their rounding.

    Returns:
        The layers; and refusals for layers that are not supported: their weights are rounded to nearest. Those of
        branches: see `sbonnx.reconstruct.branch_models`.
    """
    read = {reader: site for site in plan.sites for reader in site.readers}
    biases = biases_of(graph) if correct else {}
    layers: list[Layer] = []
    refusals: list[Refusal] = []
    taken: set[str] = set()
    for node in graph.nodes:
        kind = LINEAR.get(node.op)
        site = None if kind is None else read.get(Reader(node.name, kind.weight))
        if kind is None or site is None or site.role != "weight" or site.key in taken:
            continue
        if not looks_at_inputs(site) and node.name not in biases:
            continue
        taken.add(site.key)
        layout = LinearLayer.of_rows(node)
        if layout is None:
            refusals.append(Refusal(WHAT, node.name, f"{node.op} of such a weight has no rows: to the nearest code"))
            continue
        index = 1 - kind.weight  # of the data input
        reads, geometry = read.get(Reader(node.name, index)), geometry_of(layout, node.attrs)
        tensor, bias = node.inputs[index].name, biases.get(node.name)
        layers.append(Layer(node, site, index, tensor, reads, geometry, looks_at_inputs(site), bias))
    return layers, refusals


def in_budget(
    layers: Iterable[Layer], memory: int, *, two_streams: bool, hold_out: bool = False
) -> tuple[list[Layer], list[Refusal]]:
    """Return the layers whose moments fit into `memory` each, and the others as refusals."""
    found, refusals = [], []
    for layer in layers:
        size = layer.bytes_of_moments(two_streams=two_streams, hold_out=hold_out)
        if size <= memory:
            found.append(layer)
            continue
        why = (
            f"the moments of its {layer.layout.inputs} inputs take {size / 2**30:.1f} GiB and CALIBRATION.MEMORY "
            f"allows {memory / 2**30:.1f}: to the nearest code"
        )
        refusals.append(Refusal(WHAT, layer.node.name, why))
    return found, refusals


@dataclass
class Watched:
    """Second-moment accumulator of one input, for all layers that read it the same way.

    Attributes:
        name: of these sums.
        tensor: the input.
        site: through which it is read.
        layers: that read it.
        sums: with the layout of the first layer.
        held: sums of every fifth sample, the hold-out set, if one is needed; see `shrinkage_of`. None after `moments`.
        rows: of the same samples; see `share_of`.
        resolution: of the input, for `sample_weights`; None: all samples have the same weight.
        joined: moments over all samples, after `moments`.
    """

    name: str
    tensor: str
    site: Site | None
    layers: list[Layer]
    sums: MomentSums
    held: MomentSums | None = None
    rows: HeldRows | None = None
    resolution: float | None = None
    joined: Moments | None = None

    def add(self, value: Array, quantized: Array | None, samples: Sequence[int]) -> None:
        """Accumulate one sample, or several stacked along the leading axis; `samples`: their ranks in content order."""
        weights = _weights(value, quantized, len(samples), self.resolution)
        if self.held is None:
            self.sums.add(value, quantized, sample=samples, weights=weights)
            return
        for sums, held in ((self.sums, False), (self.held, True)):
            at = [place for place, sample in enumerate(samples) if is_held(sample) is held]
            if at:
                some = [samples[place] for place in at]
                whole = len(some) == len(samples)
                sums.add(
                    value if whole else value[at],
                    quantized if whole or quantized is None else quantized[at],
                    sample=some,
                    weights=None if weights is None else weights[at],
                )
        _keep_held(self.rows, value, quantized, samples)

    def moments(self, layer: Layer) -> Moments:
        """Return the moments for one of the layers, over all samples. `parts` are joined in the memory of the first."""
        if self.joined is None:
            fit = self.sums.moments()
            self.joined = fit if self.held is None else fit.merged(self.held.moments(), in_place=True)
            self.held = None
        return replace(self.joined, layout=layer.layout)

    def parts(self, layer: Layer) -> tuple[Moments, Moments | None]:
        """Return the moments for one of the layers: over the fit samples, and over the hold-out set if there is one.

        Not after `moments`.
        """
        held = None if self.held is None else replace(self.held.moments(), layout=layer.layout)
        return replace(self.sums.moments(), layout=layer.layout), held


@dataclass
class WatchedMeans:
    """Mean accumulator of one input, for layers of which only biases are corrected. See `Watched`."""

    name: str
    tensor: str
    site: Site | None
    layers: list[Layer]
    sums: MeanSums
    rows: HeldRows | None = None
    resolution: float | None = None

    def add(self, value: Array, quantized: Array | None, samples: Sequence[int]) -> None:
        """Accumulate one sample, or several stacked along the leading axis."""
        self.sums.add(
            value, quantized, sample=samples, weights=_weights(value, quantized, len(samples), self.resolution)
        )
        _keep_held(self.rows, value, quantized, samples)

    def means(self, layer: Layer) -> Means:
        """Return the means for one of the layers."""
        return replace(self.sums.means(), layout=layer.layout)


Seen = Watched | WatchedMeans


def _weights(value: Array, quantized: Array | None, samples: int, resolution: float | None) -> Array | None:
    """Return the weights of samples, see `sample_weights`; None: all have the same."""
    if quantized is None or resolution is None:
        return None
    return sample_weights(value, quantized, samples, resolution)


def _keep_held(rows: HeldRows | None, value: Array, quantized: Array | None, samples: Sequence[int]) -> None:
    """Keep rows of those samples that belong to the hold-out set."""
    if rows is None or quantized is None:
        return
    each = len(value) // len(samples)
    for place, sample in enumerate(samples):
        if is_held(sample):
            part = slice(place * each, (place + 1) * each)
            rows.add(value[part], quantized[part], sample=sample)


def watched(
    layers: Sequence[Layer],
    *,
    two_streams: bool,
    rows: Callable[[Layer], int | None],
    seed: int,
    resolution: Callable[[Layer], float | None] = lambda _: None,
    hold_out: int = 0,
) -> list[Seen]:
    """Create one accumulator for all layers that read the same tensor through the same site with the same geometry.

    Args:
        rows: returns the number of rows per sample that a layer uses; None: all.
        resolution: returns the resolution of the input of a layer, see `Watched`.
        hold_out: number of samples of the hold-out set, which are accumulated separately; 0: there is none.
    """
    found: dict[object, Seen] = {}
    for layer in layers:
        reads = None if layer.reads is None else layer.reads.key
        key = (layer.tensor, reads, layer.rounds, replace(layer.geometry, layer=layer.layout.with_one_output()))
        name = f"{layer.tensor}/{len(found)}"
        if key not in found and not layer.rounds:
            means = MeanSums(layer.geometry, two_streams=two_streams)
            rows_held = HeldRows(layer.geometry, samples=hold_out, seed=seed) if hold_out else None
            found[key] = WatchedMeans(name, layer.tensor, layer.reads, [], means, rows_held, resolution(layer))
        elif key not in found:
            sums = [
                MomentSums(layer.geometry, two_streams=two_streams, rows_a_sample=rows(layer), seed=seed)
                for _ in range(1 + (hold_out > 0))
            ]
            seen = Watched(name, layer.tensor, layer.reads, [], sums[0], resolution=resolution(layer))
            if hold_out:
                seen.held, seen.rows = sums[1], HeldRows(layer.geometry, samples=hold_out, seed=seed)
            found[key] = seen
        found[key].layers.append(layer)
    return list(found.values())

"""The layers whose weights are rounded by what they meet, and the sums of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sbonnx.correct.biases import biases_of
from sbonnx.graph import Constant, Graph, Node
from sbonnx.graph.query import constant, scopes
from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.linear.layout import Layout, layout_of
from sbonnx.moments import Means, MeanSums, Moments, MomentSums, bytes_for
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.plan.types import Plan, Reader, Site
from sbonnx.report import Refusal
from sbonnx.rounding import ROUNDERS
from sbonnx.spec import Array

WHAT: Final = "round by inputs"

HELD: Final = 5
"""One of so many samples is held out."""


@dataclass(frozen=True)
class Layer:
    """A linear node whose weight is rounded by what it meets.

    Attributes:
        node: of the main graph.
        site: of its weight.
        index: which input is the data.
        tensor: the name of that.
        reads: the site through which it is read, or None where it stays float.
        layout, geometry: how the node multiplies.
        rounds: the rounding looks at what it meets; else only its bias is corrected by that.
        bias: the constant that can take up a mean error, or None.
    """

    node: Node = field(compare=False)
    site: Site
    index: int
    tensor: str
    reads: Site | None
    layout: Layout
    geometry: Geometry
    rounds: bool = True
    bias: Constant | None = field(default=None, compare=False)

    def bytes_of_moments(self, *, two_streams: bool, hold_out: bool = False) -> int:
        """What its moments take while they are summed; next to nothing where only means are."""
        if not self.rounds:
            return 0
        return bytes_for(self.layout, two_streams) * (1 + hold_out)


def looks_at_inputs(site: Site) -> bool:
    """Whether the rounding of a weight wants to see what its layer meets."""
    kind = ROUNDERS.get(site.rounding.name)
    return (kind is not None and kind.needs_moments) or site.rounding.scale == "search"


def layers_of(graph: Graph, plan: Plan, *, correct: bool) -> tuple[list[Layer], list[Refusal]]:
    """The layers of the main graph that the roundings of `plan` want to see, in order.

    Args:
        correct: layers with a bias of their own are wanted for that, whatever their rounding.

    Returns:
        The layers; those that cannot be seen, and why: their weights go to the nearest code.
    """
    read = {reader: site for site in plan.sites for reader in site.readers}
    biases = biases_of(graph) if correct else {}
    found: list[Layer] = []
    refusals: list[Refusal] = []
    taken: set[str] = set()
    for path, body in scopes(graph):
        for node in body.nodes:
            kind = LINEAR.get(node.op)
            site = None if kind is None else read.get(Reader(node.name, kind.weight))
            if kind is None or site is None or site.role != "weight" or site.key in taken:
                continue
            if not looks_at_inputs(site) and node.name not in biases:
                continue
            taken.add(site.key)
            layer = _layer(node, site, 1 - kind.weight, read, biases.get(node.name))
            if path:
                refusals.append(
                    Refusal(WHAT, node.name, "it lies in a branch, which has no stream: to the nearest code")
                )
            elif layer is None:
                refusals.append(
                    Refusal(WHAT, node.name, f"{node.op} of such a weight has no rows: to the nearest code")
                )
            else:
                found.append(layer)
    return found, refusals


def _layer(node: Node, site: Site, index: int, read: dict[Reader, Site], bias: Constant | None) -> Layer | None:
    """The layer at a node; None where it is no product of rows with a matrix."""
    weight = constant(node.inputs[1 - index])
    layout = None if weight is None else layout_of(node.op, node.attrs, tuple(weight.shape))
    geometry = None if layout is None else geometry_of(node.op, node.attrs, layout)
    if layout is None or geometry is None:
        return None
    reads = read.get(Reader(node.name, index))
    return Layer(node, site, index, node.inputs[index].name, reads, layout, geometry, looks_at_inputs(site), bias)


def in_budget(
    layers: Iterable[Layer], memory: int, *, two_streams: bool, hold_out: bool = False
) -> tuple[list[Layer], list[Refusal]]:
    """Those whose moments fit into `memory` each; the others as refusals."""
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
    """The sums of one input, for all layers that read it the same way.

    Attributes:
        name: of these sums.
        tensor: what is read.
        site: through which it is read.
        layers: by whom.
        sums: of the first of them.
        held: of every fifth sample, where the others are to be judged on them; see `share_of`.
    """

    name: str
    tensor: str
    site: Site | None
    layers: list[Layer]
    sums: MomentSums
    held: MomentSums | None = None

    def add(self, value: Array, quantized: Array | None, samples: Sequence[int]) -> None:
        """One sample, or several along the leading axis; `samples`: their ranks in the order of contents."""
        if self.held is None:
            self.sums.add(value, quantized, sample=samples)
            return
        for sums, held in ((self.sums, False), (self.held, True)):
            at = [place for place, sample in enumerate(samples) if (sample % HELD == HELD - 1) is held]
            if at:
                some = [samples[place] for place in at]
                whole = len(some) == len(samples)
                sums.add(
                    value if whole else value[at],
                    quantized if whole or quantized is None else quantized[at],
                    sample=some,
                )

    def moments(self, layer: Layer) -> Moments:
        """Of one of the layers, on all samples."""
        fit, held = self.parts(layer)
        return fit if held is None else fit.merged(held)

    def parts(self, layer: Layer) -> tuple[Moments, Moments | None]:
        """Of one of the layers: on most samples, and on those that are held out, where some are."""
        held = None if self.held is None else replace(self.held.moments(), layout=layer.layout)
        return replace(self.sums.moments(), layout=layer.layout), held


@dataclass
class WatchedMeans:
    """Likewise for layers whose biases alone are corrected by what they meet."""

    name: str
    tensor: str
    site: Site | None
    layers: list[Layer]
    sums: MeanSums

    def add(self, value: Array, quantized: Array | None, samples: Sequence[int]) -> None:
        """One sample, or several that lie along the leading axis."""
        self.sums.add(value, quantized, sample=samples)

    def means(self, layer: Layer) -> Means:
        """Of one of the layers."""
        return replace(self.sums.means(), layout=layer.layout)


Seen = Watched | WatchedMeans


def watched(
    layers: Sequence[Layer],
    *,
    two_streams: bool,
    rows: Callable[[Layer], int | None],
    seed: int,
    hold_out: bool = False,
) -> list[Seen]:
    """One sum for all layers that read the same tensor through the same site with the same geometry.

    Args:
        rows: how many rows of a sample a layer sees; None: all.
        hold_out: some samples are summed apart.
    """
    found: dict[object, Seen] = {}
    for layer in layers:
        reads = None if layer.reads is None else layer.reads.key
        key = (layer.tensor, reads, layer.rounds, replace(layer.geometry, layout=_same_for(layer.layout)))
        name = f"{layer.tensor}/{len(found)}"
        if key not in found and not layer.rounds:
            means = MeanSums(layer.layout, layer.geometry, two_streams=two_streams)
            found[key] = WatchedMeans(name, layer.tensor, layer.reads, [], means)
        elif key not in found:
            sums = [
                MomentSums(layer.layout, layer.geometry, two_streams=two_streams, rows_a_sample=rows(layer), seed=seed)
                for _ in range(1 + hold_out)
            ]
            found[key] = Watched(name, layer.tensor, layer.reads, [], *sums)
        found[key].layers.append(layer)
    return list(found.values())


def _same_for(layout: Layout) -> Layout:
    """The layout with one output a group: all of it that matters to how the input is read."""
    shape = (1, 1, *layout.shape[2:]) if layout.op in CONVOLUTIONS else (*layout.shape[:-2], 1, 1)
    return Layout(layout.op, shape, layout.groups, 1, layout.inputs, (), ())


__all__ = ["Layer", "Seen", "Watched", "WatchedMeans", "in_budget", "layers_of", "looks_at_inputs", "watched"]

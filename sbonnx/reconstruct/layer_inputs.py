"""Layers that need input statistics, and the accumulation of these statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from sbonnx.correct.biases import biases_of, common_bias
from sbonnx.graph import Constant, Graph, Node
from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import HeldRows, Means, MeanSums, Moments, MomentSums, bytes_for, is_held, sample_weights
from sbonnx.moments.share import HELD_BYTES
from sbonnx.ops import CONVOLUTIONS, LINEAR
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.report import Reason, Refusal
from sbonnx.rounding import ROUNDERS
from sbonnx.spec import Array
from sbonnx.system.sizes import size_text

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
        alone: fitted to one stream of inputs: those of the quantized network, as their errors need too much memory, or
            those of the float network if `others` read the same weight.
        others: further nodes that multiply rows with the same weight, which is fitted to the inputs of all.
        gate: name of the tensor with one factor for each row, by which later nodes multiply what follows from that row
            of the output, such as the router's weight of an expert; None: rows count alike. Rows of factor 0 are left
            out, others have its square as weight.
        after: names of tensors that must be computed before the inputs are summed, so that one expert is in memory.
    """

    node: Node = field(compare=False)
    site: Site
    index: int
    tensor: str
    reads: Site | None
    geometry: Geometry
    rounds: bool = True
    bias: Constant | None = field(default=None, compare=False)
    alone: bool = False
    others: tuple[Layer, ...] = ()
    gate: str | None = None
    after: tuple[str, ...] = ()

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Names of the tensors that must be computed before the inputs are summed."""
        return (self.tensor, *(() if self.gate is None else (self.gate,)), *self.after)

    @property
    def uses(self) -> tuple[Layer, ...]:
        """The layer and all others that read its weight."""
        return (self, *self.others)

    @property
    def key(self) -> str:
        """Name of what is computed for it: the weight and its bias, or a bias alone."""
        return self.site.key if self.rounds else f"{self.site.key} at {self.node.name}"

    @property
    def layout(self) -> LinearLayer:
        """Layout of the weight."""
        return self.geometry.layer

    def bytes_of_moments(self, *, two_streams: bool, hold_out: bool = False) -> int:
        """Return the memory of its moments until its weight is rounded; 0 if only means are needed."""
        if not self.rounds:
            return 0
        both = two_streams and not self.alone
        return bytes_for(self.layout, both, compact=True, hold_out=hold_out) + (hold_out and both) * HELD_BYTES


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
    by_weight: dict[str, list[Layer]] = {}
    refusals: list[Refusal] = []
    for node in graph.nodes:
        kind = LINEAR.get(node.op)
        site = None if kind is None else read.get(Reader(node.name, kind.weight))
        if kind is None or site is None or site.role != "weight":
            continue
        if not looks_at_inputs(site) and node.name not in biases:
            continue
        layout = LinearLayer.of_rows(node)
        same = by_weight.setdefault(site.key, [])
        if layout is None:
            refusals.append(
                Refusal(
                    WHAT,
                    node.name,
                    Reason("weight-without-rows", f"{node.op} of such a weight has no rows: to the nearest code"),
                )
            )
        elif same and _matrix_of(same[0].layout) != _matrix_of(layout):
            why = Reason(
                "weight-in-another-layout",
                f"reads the weight of '{same[0].node.name}' in another layout: fitted to the inputs of that alone",
            )
            refusals.append(Refusal(WHAT, node.name, why))
        else:
            index = 1 - kind.weight  # of the data input
            reads, geometry = read.get(Reader(node.name, index)), geometry_of(layout, node.attrs)
            tensor, bias = node.inputs[index].name, biases.get(node.name)
            same.append(Layer(node, site, index, tensor, reads, geometry, looks_at_inputs(site), bias))
    order = {id(node): number for number, node in enumerate(graph.nodes)}
    layers = [layer for same in by_weight.values() if same for layer in _fitted_together(graph, same, correct=correct)]
    return sorted(layers, key=lambda layer: (order[id(layer.node)], not layer.rounds)), refusals


def _matrix_of(layout: LinearLayer) -> object:
    """Return how a layer reads the matrices of its weight: equal for layers whose moments can be added."""
    return layout.shape, layout.out_axis, layout.in_axis, layout.group, layout.op in CONVOLUTIONS and layout.op


def _fitted_together(graph: Graph, same: Sequence[Layer], *, correct: bool) -> list[Layer]:
    """Return the layers for the nodes that read one weight: one that rounds it, and one for each separate bias."""
    first = same[0]
    if len(same) == 1 or not first.rounds:
        return list(same)
    bias = common_bias(graph, [layer.node for layer in same]) if correct else None
    alone = [replace(layer, rounds=False) for layer in same if layer.bias is not None]
    return [replace(first, bias=bias, others=tuple(same[1:])), *alone]


def in_budget(
    layers: Iterable[Layer], memory: int, *, two_streams: bool, hold_out: bool = False
) -> tuple[list[Layer], list[Refusal]]:
    """Return the layers whose moments fit into `memory` each, and what the others do instead, as refusals.

    If the errors of the inputs do not fit, a layer is fitted to its quantized inputs alone (`Layer.alone`). If these do
    not fit either, it is rounded to nearest.
    """
    fitting, refusals = [], []
    for layer in layers:
        sizes = []
        for variant in (layer, replace(layer, alone=True)) if two_streams else (layer,):
            sizes.append(variant.bytes_of_moments(two_streams=two_streams, hold_out=hold_out))
            if sizes[-1] <= memory:
                fitting.append(variant)
                break
        if sizes[0] <= memory:
            continue
        fits = sizes[-1] <= memory
        what = "moments and errors" if two_streams else "moments"
        why = Reason(
            "moments-too-large",
            f"the {what} of its {layer.layout.inputs} inputs take {size_text(sizes[0])} and CALIBRATION.MEMORY "
            f"allows {size_text(memory)}: "
            + (
                "fitted to its quantized inputs, without compensation of their errors"
                if fits
                else f"to the nearest code; {size_text(sizes[-1])} are needed"
            ),
        )
        refusals.append(Refusal(WHAT, layer.node.name, why))
    return fitting, refusals


@dataclass
class Watched:
    """Second-moment accumulator of one input, for all layers that read it the same way.

    Attributes:
        name: of these sums.
        layers: that read it; the first says which tensors are summed, see `uses`.
        sums: with the layout of the first layer.
        held: sums of every fifth sample, the hold-out set, if one is needed; see `shrinkage_of`. None after `moments`.
        rows: of the same samples; see `share_of`.
        resolution: of the input, for `sample_weights`; None: all samples have the same weight.
        alone: only the quantized inputs are summed, see `Layer`.
        alike: all layers want moments centred and shrunk alike, which is then done in the memory of the sums.
        joined: moments over all samples, after `moments`.
        fitted: of those in the form that layers are fitted to, by whether they are centred and how much shrunk.
    """

    name: str
    layers: list[Layer]
    sums: MomentSums
    held: MomentSums | None = None
    rows: HeldRows | None = None
    resolution: float | None = None
    alone: bool = False
    alike: bool = False
    joined: Moments | None = None
    fitted: dict[tuple[bool, float], Moments] = field(default_factory=dict)

    @property
    def uses(self) -> tuple[Layer, ...]:
        """The layers whose inputs are summed."""
        return self.layers[0].uses

    @property
    def tensors(self) -> tuple[str, ...]:
        """The inputs."""
        return tuple(use.tensor for use in self.uses)

    @property
    def gates(self) -> tuple[str | None, ...]:
        """Gates of the inputs, see `Layer`."""
        return tuple(use.gate for use in self.uses)

    def add(
        self,
        value: Array,
        quantized: Array | None,
        samples: Sequence[int],
        use: int = 0,
        gates: Array | None = None,
    ) -> None:
        """Accumulate one sample, or several stacked along the leading axis.

        Args:
            value, quantized: an input in the float and in the quantized network. If they have different rows, because
                a router chose others, those of the quantized network are used for both.
            samples: their ranks in the order of contents.
            use: index of the layer among `uses` that reads them.
            gates: factors of the rows, see `Layer`; None: all rows count alike.
        """
        if quantized is not None and value.shape != quantized.shape:
            value = quantized
        if gates is None:
            self._add(value, quantized, samples, use)
            return
        count = len(value) // len(samples)
        for place, sample in enumerate(samples):
            part = slice(place * count, (place + 1) * count)
            factors = gates[part].reshape(-1).astype(np.float64)
            rows = np.flatnonzero(factors)
            if rows.size:
                streams = [
                    None if stream is None else stream[part].reshape(-1, stream.shape[-1])[rows]
                    for stream in (value, quantized)
                ]
                assert streams[0] is not None
                self._add(streams[0], streams[1], [sample], use, np.square(factors[rows]))

    def _add(
        self,
        value: Array,
        quantized: Array | None,
        samples: Sequence[int],
        use: int,
        row_weights: Array | None = None,
    ) -> None:
        weights = _weights(value, quantized, len(samples), self.resolution)
        if row_weights is not None:
            weights = row_weights if weights is None else row_weights * weights
        _keep_held(self.rows, value, quantized, samples)
        if self.alone and quantized is not None:
            value, quantized = quantized, None
        geometry = self.uses[use].geometry
        numbers = [(use << 32) + sample for sample in samples]  # each use selects different rows
        if self.held is None:
            self.sums.add(value, quantized, sample=numbers, weights=weights, geometry=geometry)
            return
        for sums, held in ((self.sums, False), (self.held, True)):
            at = [place for place, sample in enumerate(samples) if is_held(sample) is held]
            if at:
                some = [numbers[place] for place in at]
                whole = len(some) == len(samples)
                sums.add(
                    value if whole else value[at],
                    quantized if whole or quantized is None else quantized[at],
                    sample=some,
                    weights=weights if whole or weights is None else weights[at],
                    geometry=geometry,
                )

    def means(self, layer: Layer) -> Means:
        """Return the means for one of the layers, over all samples. `parts` are joined in the memory of the first."""
        return replace(self._join().means, layout=layer.layout)

    def moments(self, layer: Layer, *, centred: bool = False, share: float = 1.0, shrunk: float = 0.0) -> Moments:
        """Return the moments for one of the layers, over all samples.

        Args:
            centred, share, shrunk: see `Moments`.
        """
        joined = self._join()
        if not (joined.of_errors or joined.is_one_stream):
            about = joined.centred() if centred else joined
            return about.towards(share).shrunk(shrunk).with_layout(layer.layout)
        if (centred, shrunk) not in self.fitted:
            about = joined.centred(in_place=self.alike) if centred else joined
            self.fitted[centred, shrunk] = about.shrunk(shrunk, in_place=self.alike or centred)
        return self.fitted[centred, shrunk].with_layout(layer.layout).towards(share)

    def parts(self, layer: Layer) -> tuple[Moments, Moments | None]:
        """Return the moments for one of the layers: over the fit samples, and over the hold-out set if there is one.

        Products of errors are over both. Not after `means` and `moments`.
        """
        held = None if self.held is None else self.held.moments().with_layout(layer.layout)
        return self.sums.moments().with_layout(layer.layout), held

    def release(self) -> None:
        """Release all matrices."""
        self.sums.release()
        self.held, self.joined = None, None
        self.fitted.clear()

    def _join(self) -> Moments:
        if self.joined is None:
            fit = self.sums.moments()
            self.joined = fit if self.held is None else fit.merged(self.held.moments(), in_place=True)
            self.held = None
        return self.joined


@dataclass
class WatchedMeans:
    """Mean accumulator of one input, for layers of which only biases are corrected. See `Watched`."""

    name: str
    layers: list[Layer]
    sums: MeanSums
    rows: HeldRows | None = None
    resolution: float | None = None

    @property
    def uses(self) -> tuple[Layer, ...]:
        """The layer whose inputs are summed."""
        return (self.layers[0],)

    @property
    def tensors(self) -> tuple[str, ...]:
        """The input."""
        return (self.layers[0].tensor,)

    @property
    def gates(self) -> tuple[None]:
        """All rows count alike."""
        return (None,)

    def add(
        self,
        value: Array,
        quantized: Array | None,
        samples: Sequence[int],
        use: int = 0,
        gates: Array | None = None,
    ) -> None:
        """Accumulate samples, see `Watched.add`; there is one use, and no gate."""
        del use, gates
        if quantized is not None and value.shape != quantized.shape:
            value = quantized
        self.sums.add(
            value, quantized, sample=samples, weights=_weights(value, quantized, len(samples), self.resolution)
        )
        _keep_held(self.rows, value, quantized, samples)

    def means(self, layer: Layer) -> Means:
        """Return the means for one of the layers."""
        return replace(self.sums.means(), layout=layer.layout)

    def release(self) -> None:
        """Means need little memory: nothing is done."""


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
    rows_a_sample = len(value) // len(samples)
    for place, sample in enumerate(samples):
        if is_held(sample):
            part = slice(place * rows_a_sample, (place + 1) * rows_a_sample)
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
    by_input: dict[object, Seen] = {}
    for layer in layers:
        inputs = [
            (use.tensor, None if use.reads is None else use.reads.key, _one_output(use.geometry), use.gate)
            for use in layer.uses
        ]
        key = (*inputs, layer.rounds, layer.alone)
        name = f"{layer.tensor}/{len(by_input)}"
        if key in by_input:
            by_input[key].layers.append(layer)
        elif not layer.rounds:
            means = MeanSums(layer.geometry, two_streams=two_streams)
            rows_held = HeldRows(layer.geometry, samples=hold_out, seed=seed) if hold_out else None
            by_input[key] = WatchedMeans(name, [layer], means, rows_held, resolution(layer))
        else:
            sums = [
                MomentSums(
                    layer.geometry,
                    two_streams=two_streams and not layer.alone,
                    rows_a_sample=rows(layer),
                    seed=seed,
                    compact=True,
                )
                for _ in range(1 + (hold_out > 0))
            ]
            seen = Watched(name, [layer], sums[0], resolution=resolution(layer), alone=layer.alone)
            if hold_out:
                seen.held = sums[1]
            if hold_out and not layer.alone:
                sums[1].share_errors(sums[0])
                seen.rows = HeldRows(layer.geometry, samples=hold_out, seed=seed)
            by_input[key] = seen
    return list(by_input.values())


def _one_output(geometry: Geometry) -> Geometry:
    """Return the geometry without the outputs of its layer: equal for layers that read their input in the same way."""
    return replace(geometry, layer=geometry.layer.with_one_output())

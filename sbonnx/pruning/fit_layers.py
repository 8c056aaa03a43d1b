"""Linear layers that can be refitted, and the second moments of their inputs on fit and hold-out samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from sbonnx.calib.engine.samples import CanonicalSamples, Samples
from sbonnx.correct.biases import biases_of
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import constant
from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments, MomentSums, bytes_for, is_held, rows_a_sample
from sbonnx.ops import LINEAR
from sbonnx.options import RunOptions
from sbonnx.pruning.groups.dimensions import WHAT, Dependencies
from sbonnx.pruning.groups.removal_trace import LinearSides
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array
from sbonnx.system.sizes import size_text

ROWS: Final = 32
"""Input rows that a layer uses, for each weight of an output."""


@dataclass(frozen=True)
class FitLayer:
    """A linear layer of the main graph whose weight can be replaced.

    Attributes:
        sides: the layer and its channels.
        geometry: of its input.
        tensor: name of its data input.
        bias: name of the constant that is added to its outputs alone, or None.
    """

    sides: LinearSides = field(compare=False)
    geometry: Geometry
    tensor: str
    bias: str | None

    @property
    def node(self) -> Node:
        """The node."""
        return self.sides.node

    @property
    def name(self) -> str:
        """Name of the node."""
        return str(self.sides.node.name)

    @property
    def can_refit(self) -> bool:
        """Whether its weight can be refitted: no other layer reads it."""
        return not self.sides.shared

    @property
    def layout(self) -> LinearLayer:
        """Layout of the weight."""
        return self.geometry.layer

    def weight(self) -> Array:
        """Return the current weight as matrices (G, O, K), float64."""
        values = constant(self.node.inputs[LINEAR[self.node.op].weight])
        assert values is not None
        return self.layout.matrices(values).astype(np.float64)

    def columns(self, channels: Array) -> Array:
        """Return the columns that read each group of input channels, int64 (groups, G, columns).

        Args:
            channels: (groups, channels per group). For a convolution with G > 1, the same positions in each of its
                groups.
        """
        layer, taps = self.layout, int(np.prod(self.layout.kernel, dtype=np.int64))
        group_channels = layer.in_channels // layer.group
        count = len(channels)
        if layer.group == 1:
            local = np.repeat(channels[:, None], layer.groups, axis=1)
        else:
            local = np.sort(channels, axis=1).reshape(count, layer.group, -1) % group_channels
        wide = local[..., None] * taps + np.arange(taps)
        return np.asarray(wide.reshape(count, layer.groups, -1))


def fit_layers(
    graph: Graph, found: Dependencies, samples: Samples | CanonicalSamples | None, *, two_streams: bool
) -> tuple[list[FitLayer], list[Refusal]]:
    """Return the layers whose weight can be replaced, and refusals for those that are not refitted.

    Layers whose moments do not fit into the memory for runs of the samples are left out.
    """
    memory = (RunOptions() if samples is None else samples.options).memory_bytes
    biases = biases_of(graph)
    layers, refusals = [], []
    for sides in found.linears:
        node, layer = sides.node, LinearLayer.of_rows(sides.node)
        if layer is None:
            refusals.append(
                Refusal(
                    WHAT,
                    node.name,
                    Reason("weight-empty-or-left", "its weight cannot be refitted: it is empty or on the left"),
                )
            )
            continue
        if sides.shared:
            refusals.append(
                Refusal(
                    WHAT, node.name, Reason("weight-is-shared", "not refitted: another layer reads the same weight")
                )
            )
        size = 0 if sides.shared else 2 * bytes_for(layer, two_streams)
        if size > memory:
            why = Reason(
                "moments-too-large",
                f"not refitted: the moments of its {layer.inputs} inputs take {size_text(size)}",
            )
            refusals.append(
                Refusal(WHAT, node.name, Reason(why.code, f"{why}; CALIBRATION.MEMORY allows {size_text(memory)}"))
            )
            continue
        bias = biases.get(node.name)
        name = None if bias is None else bias.name
        layers.append(FitLayer(sides, geometry_of(layer, node.attrs, name=node.name), node.inputs[0].name, name))
    return layers, refusals


@dataclass(frozen=True)
class MomentPair:
    """Second moments of the inputs of a layer on two sets of samples.

    Attributes:
        fit: samples that weights are fitted to.
        held: hold-out samples; no rows if there are too few samples.
        rows_a_sample: input rows of one sample on average, whether used or not.
    """

    fit: Moments
    held: Moments
    rows_a_sample: float


class InputSums:
    """Accumulates `MomentPair`, for all layers that read one tensor in the same way.

    Args:
        layers: that read it.
        two_streams: each sample has an input in the float and in the pruned network.
        samples: number of samples.
        seed: of the picks of rows.
    """

    def __init__(self, layers: Sequence[FitLayer], *, two_streams: bool, samples: int, seed: int = 0) -> None:
        self.layers = layers
        self.tensors = (layers[0].tensor,)
        self.gates = (None,)
        rows = rows_a_sample(layers[0].layout.inputs, samples, ROWS)
        self._geometry = layers[0].geometry
        self._sums = [
            MomentSums(self._geometry, two_streams=two_streams, rows_a_sample=rows, seed=seed) for _ in range(2)
        ]
        self._rows = self._samples = 0

    @property
    def tensor(self) -> str:
        """The input."""
        return self.tensors[0]

    def add(
        self, value: Array, pruned: Array | None, samples: Sequence[int], _: int = 0, __: Array | None = None
    ) -> None:
        """Add one sample, or several stacked along the leading axis; `samples`: their ranks in content order."""
        self._rows += self._geometry.count(value.shape)
        self._samples += len(samples)
        for held, sums in enumerate(self._sums):
            at = [place for place, sample in enumerate(samples) if is_held(sample) == bool(held)]
            if len(at) == len(samples):
                sums.add(value, pruned, sample=samples)
            elif at:
                some = [samples[place] for place in at]
                sums.add(value[at], None if pruned is None else pruned[at], sample=some)

    def pair(self, layer: FitLayer) -> MomentPair | None:
        """Return the moments for one of the layers; None if its inputs were never computed or are not finite."""
        fit, held = (replace(sums.moments(), layout=layer.layout) for sums in self._sums)
        if not fit.rows or not all(
            np.isfinite(moments.a).all() and np.isfinite(moments.c).all() for moments in (fit, held)
        ):
            return None
        return MomentPair(fit, held, self._rows / max(self._samples, 1))


def input_sums(layers: Iterable[FitLayer], *, two_streams: bool, samples: int, seed: int = 0) -> list[InputSums]:
    """Create one accumulator for all layers that read the same tensor with the same geometry."""
    kinds: dict[tuple[str, Geometry], list[FitLayer]] = {}
    for layer in layers:
        key = (layer.tensor, replace(layer.geometry, layer=layer.layout.with_one_output()))
        kinds.setdefault(key, []).append(layer)
    return [InputSums(some, two_streams=two_streams, samples=samples, seed=seed) for some in kinds.values()]

"""Histograms of tensors whose quantization loses most, with the range that the quantized values cover."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.sketches.sketch import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.extract import extract
from sbonnx.graph.query import constant, tensors_by_name
from sbonnx.planning.types import Site, Solution
from sbonnx.profiling.walk import Values
from sbonnx.report.details import TensorHistogram, Unit
from sbonnx.spec import Array, QParams

BINS: Final = 64
"""Bins of a histogram, equally wide."""


def histograms(
    graph: Graph,
    solution: Solution,
    sites: Sequence[Site],
    data: Iterable[Mapping[str, Array]],
    *,
    device: str = "cpu",
) -> tuple[TensorHistogram, ...]:
    """Compute the histograms of sites, in the given order; those without finite values are left out.

    The float network runs once on the data, in one session. Values are counted in a sketch, whose bins are at most
    1/128 of their value wide, so nothing is stored for each feed.

    Args:
        graph: the prepared float graph.
        solution: scales and zero points of the sites, each of which must have them. Weights are constants of `graph`.
        sites: activations and weights of the main graph.
        data: feeds, iterated once.
    """
    index = tensors_by_name(graph)
    counters = {site.key: _Counter(solution.qparams[site.key]) for site in sites}
    activations = [site for site in sites if site.role == "activation"]
    for values in _floats(graph, activations, data, device):
        for site in activations:
            counters[site.key].add(values[site.tensor])
    for site in sites:
        value = constant(index[site.tensor]) if site.role == "weight" else None
        if value is not None:
            counters[site.key].add(value)
    return tuple(counters[site.key].result(site) for site in sites if counters[site.key].sketch.finite)


def _floats(graph: Graph, sites: Sequence[Site], data: Iterable[Mapping[str, Array]], device: str) -> Iterator[Values]:
    """Yield the tensors of `sites` in the float network, feed by feed."""
    index = tensors_by_name(graph)
    names = list(dict.fromkeys(site.tensor for site in sites if index[site.tensor].inputs))
    if not names:
        yield from (dict(feeds) for feeds in data if sites)
        return
    part = extract(graph, [graph_input.name for graph_input in graph.inputs], names, index=index)
    with LayerRunner(part, device=device, threads=1, optimisation="off", name="the float network") as runner:
        for feeds in data:
            yield {**feeds, **runner.run(feeds, names)}


@dataclass
class _Counter:
    """Values of one tensor: their sketch, and how many are clipped."""

    params: QParams
    sketch: Sketch = field(default_factory=Sketch)
    outside: int = 0

    @property
    def unit(self) -> Unit:
        return "value" if self.params.scale.ndim == 0 else "step"

    @property
    def step(self) -> float:
        return float(self.params.scale) if self.unit == "value" else 1.0

    @property
    def covered(self) -> tuple[float, float]:
        if self.unit == "value":
            return float(self.params.limits.lo), float(self.params.limits.hi)
        return float(self.params.spec.qmin), float(self.params.spec.qmax)

    def add(self, x: Array) -> None:
        """Count the values of one array."""
        values = np.asarray(x, np.float32)
        if self.unit == "step":
            scale, zero = (
                self.params.along(parameter, values.shape) for parameter in (self.params.scale, self.params.zero_point)
            )
            values = np.asarray(values / scale + zero.astype(np.float32), np.float32)
        self.sketch.observe(values)
        low, high = self.covered
        self.outside += int(np.count_nonzero((values < low - self.step / 2) | (values > high + self.step / 2)))

    def result(self, site: Site) -> TensorHistogram:
        """Return the histogram of what was counted."""
        low, high = float(self.sketch.lo), float(self.sketch.hi)
        spread = self.sketch.distribution()
        middles = (spread.left[0].astype(np.float64) + spread.right[0]) / 2
        ends = (low, high) if high > low else (low - self.step, high + self.step)
        bins, _ = np.histogram(middles, BINS, ends, weights=spread.counts[0])
        return TensorHistogram(
            tensor=site.tensor,
            role=site.role,
            label=site.spec.label(),
            unit=self.unit,
            low=ends[0],
            high=ends[1],
            counts=tuple(int(count) for count in bins),
            covered=self.covered,
            step=self.step,
            clipped=self.outside / self.sketch.finite,
        )

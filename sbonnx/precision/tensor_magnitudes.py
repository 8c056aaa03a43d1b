"""Measures the magnitudes of all float tensors, to decide what half precision can represent."""

from __future__ import annotations

from typing import Final

import numpy as np

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph, Variable
from sbonnx.graph.query import dtype, scopes
from sbonnx.planning.magnitudes import LOWEST, OCTAVES, Magnitudes
from sbonnx.planning.types import ObserverChoice, Plan, Site
from sbonnx.spec import QuantSpec

BY_HISTOGRAM: Final = ObserverChoice("mse")
"""Observer that needs the distribution, because magnitudes are computed from its histogram."""


def magnitudes(graph: Graph, samples: Samples) -> dict[str, Magnitudes]:
    """Run the float graph over the data and observe every float32 tensor.

    Returns:
        Magnitudes by tensor, without tensors that no sample reached (a branch that never ran, bodies of Loop and
        Scan).

    Raises:
        DataError: no data, or data that does not fit the model.
        ModelError, DeviceError: see `LayerRunner`.
    """
    with float_observer(graph, samples) as observer:
        observer.observe_all(samples.uncached)
        return measured_magnitudes(observer)


def float_observer(graph: Graph, samples: Samples) -> Calibrator:
    """Return an observer of every float32 tensor of a graph; see `measured_magnitudes`.

    It has its own sessions: with every tensor as an output, onnxruntime fuses nothing, but ranges for scales must be
    those of the model as deployed, independent of the float type. NaN and Inf are counted, not refused, because masks
    are often infinite.

    Args:
        graph: simplified and fused; not changed.
        samples: of the graph.
    """
    sites = tuple(
        Site(name, name, "activation", QuantSpec(), (), "how large it is", name, BY_HISTOGRAM, scope=scope)
        for scope, name in _floats(graph)
    )
    return Calibrator(graph, Plan(sites), samples.uncached.options, tolerant=True)


def measured_magnitudes(observer: Calibrator) -> dict[str, Magnitudes]:
    """Return the magnitudes that a `float_observer` has seen, by tensor, without tensors that no sample reached."""
    sketches = observer.sketches()
    return {name: magnitudes_of(sketch) for (name, _), sketch in sketches.items() if sketch.samples and sketch.elements}


def _floats(graph: Graph) -> list[tuple[str, str]]:
    """Return (scope, tensor) of every float32 variable that a node of the graph reads or writes, without duplicates."""
    scope_of: dict[str, str] = {}
    for scope, body in scopes(graph):
        computed = [tensor for node in body.nodes for tensor in node.outputs]
        for tensor in [*body.inputs, *computed]:
            if tensor.name and isinstance(tensor, Variable) and dtype(tensor) == np.dtype(np.float32):
                scope_of.setdefault(tensor.name, scope)
    return [(scope, name) for name, scope in scope_of.items()]


def magnitudes_of(sketch: Sketch) -> Magnitudes:
    """Convert a histogram of one range to magnitudes: every bin is within one octave."""
    bins = sketch.distribution()
    counts = np.broadcast_to(bins.counts, (1, bins.left.shape[1]))[0]
    middle = (bins.left[0].astype(np.float64) + bins.right[0].astype(np.float64)) / 2
    place = np.clip(np.frexp(middle)[1] - 1 - LOWEST, 0, OCTAVES - 1)
    sides = [np.bincount(place[side], counts[side], OCTAVES).astype(np.int64) for side in (middle < 0, middle > 0)]
    return Magnitudes(
        lo=float(sketch.lo),
        hi=float(sketch.hi),
        negative=sides[0],
        positive=sides[1],
        zeros=int(counts[middle == 0].sum()),
        nan=sketch.nan,
        inf=sketch.inf,
        samples=sketch.samples,
    )

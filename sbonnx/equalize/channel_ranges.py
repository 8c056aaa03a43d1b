"""Measures the range of every channel of some tensors in the float graph."""

from __future__ import annotations

from collections.abc import Mapping

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset
from sbonnx.graph import Graph
from sbonnx.graph.query import scopes
from sbonnx.options import RunOptions, without_cache
from sbonnx.plan.types import Plan, Site
from sbonnx.spec import Bounds, QuantSpec


def channel_ranges(
    graph: Graph,
    wanted: Mapping[str, int],
    data: Dataset,
    options: RunOptions | None = None,
) -> dict[str, Bounds]:
    """Run the float graph over the data once and return the exact minimum and maximum of every channel.

    Args:
        graph: simplified and fused; not changed.
        wanted: channel axis by tensor name.
        options: see `RunOptions`.

    Returns:
        bounds of shape (channels,) by tensor. Tensors that no sample reached (a branch that never ran, bodies of Loop
        and Scan) are left out.

    Raises:
        DataError: no data, or data that does not fit the model.
        NumericError: NaN or Inf in one of the tensors.
        ModelError, DeviceError: see `LayerRunner`.
    """
    sites = tuple(
        Site(name, name, "activation", QuantSpec(axis=wanted[name]), (), "ranges a channel", name, scope=scope)
        for scope, body in scopes(graph)
        for name in dict.fromkeys(tensor.name for node in body.nodes for tensor in node.outputs)
        if name in wanted
    )
    if not sites:
        return {}
    with Calibrator(graph, Plan(sites), without_cache(options)) as calibrator:
        calibrator.observe_all(data)
        found = calibrator.sketches()
    return {
        name: Bounds(sketch.lo, sketch.hi) for (name, _), sketch in found.items() if sketch.samples and sketch.finite
    }

"""Ranges after quantization by a plain loop: one whole run of the model for each site; and plans and data to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from sbonnx.calib.observers import make_observer
from sbonnx.calib.qparams.solve import solution_of
from sbonnx.calib.quantized.forward import Forward
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning.types import ObserverChoice, Plan, Reader, Site
from sbonnx.spec import Array, Bounds, QuantSpec, bounds_of
from tests.support.calibration import calibrate
from tests.support.naive import plan_linear

RNG = np.random.default_rng(11)
IMAGES = RNG.standard_normal((6, 3, 8, 8)).astype(np.float32)
FEEDS = [{"x": IMAGES[i : i + 1]} for i in range(len(IMAGES))]
A4, W4 = QuantSpec(bits=4, signed=False, symmetric=False), QuantSpec(bits=4, axis=0)
MATRIX = QuantSpec(bits=4, axis=1)
Feeds = list[dict[str, Array]]


def floats_of(graph: Graph, plan: Plan, feeds: Feeds) -> dict[str, Bounds]:
    """Ranges in float."""
    return dict(calibrate(graph, plan, feeds).bounds)


def loop(
    graph: Graph, plan: Plan, feeds: Feeds, *, weights: bool = True, activations: bool = True
) -> dict[str, Bounds]:
    """Ranges by site key: one whole run of the model for each site, quantized with what was found before it."""
    alone = plan if plan.weights_alone else replace(plan, weights_alone=True)
    ungrouped = replace(alone, sites=tuple(replace(site, group=site.key) for site in plan.sites))
    bounds = floats_of(graph, ungrouped, feeds)
    computed = [tensor.name for node in graph.nodes for tensor in node.outputs]
    sites = [site for site in plan.of_role("activation") if site.scope == "" and site.tensor in computed]
    for site in sorted(sites, key=lambda site: computed.index(site.tensor)):
        if site.fixed is None and site.key in bounds:
            solution = solution_of(plan, tensors_by_name(graph), bounds)
            tensors = [site.tensor]
            with Forward(graph, plan, solution, w_quant=weights, a_quant=activations, tensors=tensors) as run:
                bounds[site.key] = measured(site, [run(feed)[site.tensor] for feed in feeds], plan)
    return dict(solution_of(plan, tensors_by_name(graph), bounds).bounds)


def measured(site: Site, values: list[Array], plan: Plan) -> Bounds:
    """What the site's observer says of some samples; numpy where it is min-max."""
    if site.observer.name == "minmax":
        axis = site.spec.axis
        return bounds_of(np.concatenate([value if axis is not None else value.reshape(-1) for value in values]), axis)
    observer = make_observer(site.observer.name, site.observer.arguments)
    sketch = Sketch(axis=site.spec.axis, detail="histogram", track=True)
    for index, value in enumerate(values):
        sketch.observe(value, index)
    return observer.bounds(sketch, site.spec, plan.scale_rule)


def residual_plan(graph: Graph, observer: str = "minmax", **more: Any) -> Plan:
    return plan_linear(graph, activation=A4, weight=W4, observer=ObserverChoice(observer), **more)


def pairs_of(count: int = 5) -> Feeds:
    rng = np.random.default_rng(3)
    return [{name: rng.standard_normal((1, 4)).astype(np.float32) for name in "xz"} for _ in range(count)]


def site_at(key: str, tensor: str, readers: list[tuple[str, int]], **more: Any) -> Site:
    more.setdefault("spec", A4)
    more.setdefault("group", key)
    return Site(key, tensor, "activation", readers=tuple(Reader(*r) for r in readers), why="test", **more)

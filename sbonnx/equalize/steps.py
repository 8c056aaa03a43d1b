"""Equalization in two steps: one that needs only weights, and one that needs measured ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from sbonnx.equalize import smooth
from sbonnx.equalize.absorb import absorb, before_relus
from sbonnx.equalize.channel_flow.trace import Traced, trace
from sbonnx.equalize.cross_layer import cross_layer_scales
from sbonnx.equalize.rules import RULES
from sbonnx.equalize.scales import apply
from sbonnx.equalize.settings import Equalization
from sbonnx.equalize.split import split_channels
from sbonnx.graph import Graph
from sbonnx.graph.edit import Names, sort
from sbonnx.graph.query import producer
from sbonnx.report import Fired, Refusal
from sbonnx.spec import Array, Bounds

CROSS_LAYER: Final = "equalize_cross_layer"
ABSORB: Final = "absorb_bias"
SMOOTH: Final = "smooth_quant"
SMOOTH_MUL: Final = "smooth_quant_mul"
SPLIT: Final = "split_channels"


@dataclass
class Equalized:
    """Result of equalization.

    Attributes:
        fired: one row per transformed layer.
        refusals: one row per layer that was considered but not transformed.
    """

    fired: list[Fired] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)


def equalize(graph: Graph, settings: Equalization) -> Equalized:
    """Apply the transformations that need no data, in place: cross-layer scales and channel splitting.

    The function of the graph is unchanged up to rounding.
    """
    done = Equalized()
    if settings.cross_layer:
        traced = trace(graph, RULES, settings.clips)
        _scale(graph, traced, cross_layer_scales(traced, graph.info.normals), settings, CROSS_LAYER, done)
    if settings.split > 0:
        fired, refusals = split_channels(graph, trace(graph, RULES, "keep"), settings)
        done.fired += [Fired(SPLIT, name) for name in fired]
        done.refusals += refusals
    return done


def wanted_ranges(graph: Graph, settings: Equalization) -> dict[str, int]:
    """Return the tensors whose range per channel `equalize_measured` needs, each with its channel axis."""
    found: dict[str, int] = {}
    if not settings.needs_ranges:
        return found
    traced = trace(graph, RULES, settings.clips)
    if settings.smooth is not None:
        found.update(smooth.wanted(traced))
    if settings.absorb_bias:
        found.update(before_relus(traced))
    return found


def equalize_measured(graph: Graph, settings: Equalization, ranges: Mapping[str, Bounds]) -> Equalized:
    """Apply the transformations that need ranges on data, in place: bias absorption and SmoothQuant.

    Args:
        graph: unchanged since the measurement.
        ranges: of `wanted_ranges`, (channels,) each; tensors that no sample reached may be missing.
    """
    done = Equalized()
    if settings.absorb_bias:
        lows = {name: bounds.lo.astype(np.float64) for name, bounds in ranges.items()}
        _absorb(graph, lows, done)
    if settings.smooth is not None:
        _smooth(graph, settings, smooth.largest(ranges), done)
    return done


def _absorb(graph: Graph, lows: Mapping[str, Array], done: Equalized) -> None:
    names, refusals = absorb(graph, trace(graph, RULES, "keep"), lows)
    done.fired += [Fired(ABSORB, name) for name in names]
    done.refusals += refusals


def _smooth(graph: Graph, settings: Equalization, maxima: Mapping[str, Array], done: Equalized) -> None:
    assert settings.smooth is not None
    _, product = settings.smooth
    names = Names(graph)
    traced = trace(graph, RULES, settings.clips)
    fed = smooth.pinned_products(traced)
    for one in fed:
        found = maxima.get(one.tensor.name)
        why = "its inputs were not measured: no sample reached it"
        if found is not None:
            why = "its channels are alike: a Mul in front of it would gain too little"
            if smooth.put_mul(graph, one, found, product, per_channel=settings.per_channel, names=names) is not None:
                done.fired += [Fired(SMOOTH_MUL, weight.node.name) for weight in one.weights]
                continue
        done.refusals += [Refusal(SMOOTH, weight.node.name, why) for weight in one.weights]
    if fed:
        sort(graph)
        traced = trace(graph, RULES, settings.clips)
    scales = smooth.smooth_scales(traced, maxima, settings.smooth, per_channel=settings.per_channel)
    _scale(graph, traced, scales, settings, SMOOTH, done)


def _scale(graph: Graph, traced: Traced, scales: Array, settings: Equalization, what: str, done: Equalized) -> None:
    """Apply scales to the constants in place, and report which layers read scaled inputs and why others do not."""
    why = apply(graph, traced, scales, clips=settings.clips)
    if why is not None:
        done.refusals.append(Refusal(what, "the graph", why))
        return
    for weight in traced.weights:
        name = weight.node.name
        if (scales[traced.groups.of[weight.inputs]] != 1).any():
            done.fired.append(Fired(what, name))
            continue
        maker = producer(weight.node.inputs[0])
        if maker is not None and maker.op == "Mul" and any(row.node == name for row in done.fired):
            continue  # scaled by its own Mul
        reason = traced.groups.reason(weight.inputs) or weight.why or "nothing before it can take up a scale"
        done.refusals.append(Refusal(what, name, reason))

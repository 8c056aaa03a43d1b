"""Equalization in two steps, one that needs only weights and one that needs measured ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.engine.samples import Samples
from sbonnx.equalize import absorb, smooth
from sbonnx.equalize.channel_scales import apply
from sbonnx.equalize.cross_layer import cross_layer_scales
from sbonnx.equalize.rules import RULES
from sbonnx.equalize.scale_trace import ConstantEditor, Traced, trace
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort
from sbonnx.graph.query import producer, scopes
from sbonnx.planning.types import Plan, Site
from sbonnx.recipe.sections.base import parameter
from sbonnx.recipe.sections.stages import Equalize
from sbonnx.report import Fired, Reason, Refusal
from sbonnx.spec import Array, Bounds, QuantSpec


class Equalization(Equalize):
    """Settings of the transformations of a float graph before planning; none is enabled by default.

    Attributes:
        smooth: SmoothQuant strength for convolutions and for matrix products, as SMOOTH_QUANT says for the network.
            None: off, for all or for convolutions.
        per_channel: whether weights get one scale per output channel.
        bits: bit width of the quantized weights.
    """

    smooth_quant: float | bool | Literal["auto"] = parameter(False)
    smooth: tuple[float | None, float] | None = parameter(None)
    per_channel: bool = parameter(True)
    bits: int = parameter(8)

    @property
    def only_after_norms(self) -> bool:
        """Smooth only networks in which a product reads a normalization; other layers are no refusals then."""
        return self.smooth_quant == "auto"

    @property
    def any(self) -> bool:
        """Whether any transformation is enabled."""
        return self.cross_layer or self.absorb_bias or self.smooth is not None

    @property
    def needs_ranges(self) -> bool:
        """Whether calibration data are needed."""
        return self.smooth is not None or self.absorb_bias


def channel_ranges(
    graph: Graph,
    wanted: Mapping[str, int],
    samples: Samples,
) -> dict[str, Bounds]:
    """Run the float graph over the data once and return the exact minimum and maximum of every channel.

    Args:
        graph: simplified and fused; not changed.
        wanted: channel axis by tensor name.
        samples: of the graph.

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
    samples = samples.uncached
    with Calibrator(graph, Plan(sites), samples.options) as calibrator:
        calibrator.observe_all(samples)
        sketches = calibrator.sketches()
    return {
        name: Bounds(sketch.lo, sketch.hi) for (name, _), sketch in sketches.items() if sketch.samples and sketch.finite
    }


CROSS_LAYER: Final = "equalize_cross_layer"
ABSORB: Final = "absorb_bias"
SMOOTH: Final = "smooth_quant"
SMOOTH_MUL: Final = "smooth_quant_mul"


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
    """Apply the transformations that need no data, in place: cross-layer scales.

    The function of the graph is unchanged up to rounding.
    """
    done = Equalized()
    if settings.cross_layer:
        traced = trace(graph, RULES, settings.clip)
        _scale(graph, traced, cross_layer_scales(traced, graph.info.normals), settings, CROSS_LAYER, done)
    return done


def wanted_ranges(graph: Graph, settings: Equalization) -> dict[str, int]:
    """Return the tensors whose range per channel `equalize_measured` needs, each with its channel axis."""
    axes: dict[str, int] = {}
    if not settings.needs_ranges:
        return axes
    traced = trace(graph, RULES, settings.clip)
    if settings.smooth is not None:
        axes.update(smooth.wanted(traced, settings.smooth, only_after_norms=settings.only_after_norms))
    if settings.absorb_bias:
        axes.update(absorb.wanted(traced))
    return axes


def equalize_measured(graph: Graph, settings: Equalization, ranges: Mapping[str, Bounds]) -> Equalized:
    """Apply the transformations that need ranges on data, in place: bias absorption and SmoothQuant.

    Args:
        graph: unchanged since the measurement.
        ranges: of `wanted_ranges`, (channels,) each; tensors that no sample reached may be missing.
    """
    done = Equalized()
    if settings.absorb_bias:
        shifts, nodes, refusals = absorb.absorb(graph, trace(graph, RULES, "keep"), ranges)
        done.fired += [Fired(ABSORB, name) for name in nodes]
        done.refusals += refusals
        moved = {name: (ranges[name], c) for name, c in shifts.items() if name in ranges}
        ranges = {**ranges, **{name: Bounds(bounds.lo - c, bounds.hi - c) for name, (bounds, c) in moved.items()}}
    if settings.smooth is not None:
        _smooth(graph, settings, smooth.largest(ranges), done)
    return done


def _smooth(graph: Graph, settings: Equalization, maxima: Mapping[str, Array], done: Equalized) -> None:
    assert settings.smooth is not None
    _, product = settings.smooth
    editor = ConstantEditor(graph)
    if settings.only_after_norms:
        done = Equalized(done.fired)  # nobody asked for the layers that it does not suit
    traced = trace(graph, RULES, settings.clip)
    fed = smooth.pinned_products(traced)
    for fed_products in fed:
        channel_maxima = maxima.get(fed_products.tensor.name)
        why = Reason("not-reached", "its inputs were not measured: no sample reached it")
        if channel_maxima is not None:
            why = Reason(
                "channels-have-similar-ranges",
                "its channels have similar ranges: a Mul before it would gain too little",
            )
            if (
                smooth.put_mul(
                    graph, fed_products, channel_maxima, product, per_channel=settings.per_channel, editor=editor
                )
                is not None
            ):
                done.fired += [Fired(SMOOTH_MUL, weight.node.name) for weight in fed_products.weights]
                continue
        done.refusals += [Refusal(SMOOTH, weight.node.name, why) for weight in fed_products.weights]
    if fed:
        sort(graph)
        traced = trace(graph, RULES, settings.clip)
    scales = smooth.smooth_scales(traced, maxima, settings.smooth, per_channel=settings.per_channel)
    _scale(graph, traced, scales, settings, SMOOTH, done)


def _scale(graph: Graph, traced: Traced, scales: Array, settings: Equalization, what: str, done: Equalized) -> None:
    """Apply scales to the constants in place, and report which layers read scaled inputs and why others do not."""
    why = apply(graph, traced, scales, clips=settings.clip)
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
        reason = (
            traced.groups.reason(weight.inputs)
            or weight.why
            or Reason("no-constant-absorbs-scale", "no constant before it can absorb a scale")
        )
        done.refusals.append(Refusal(what, name, reason))

"""Scales and quantized constants of a quantized stream, up to the current piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.calib.observers import make_observer
from sbonnx.calib.qparams.mask_ranges import without_masks
from sbonnx.calib.qparams.safe_scales import limits_for, unfit
from sbonnx.calib.qparams.solve import (
    Solve,
    bias_codes,
    fixed_bounds,
    left_alone,
    qparams_of,
    united,
    weight_bounds,
    weight_of,
)
from sbonnx.calib.sketches import Sketch
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.graph.storage.weights import release_pages, spill_large
from sbonnx.patterns.blocks.masks import mask_ways
from sbonnx.planning.types import Gain, Plan, Site
from sbonnx.report import Refusal
from sbonnx.spec import Array, Bounds, QParams


@dataclass(frozen=True)
class StreamResult:
    """Result of a quantized stream, the input of `solution_of`.

    Attributes:
        bounds: by site key: ranges of activations, measured in the stream if it reached them, else the given ones; and
            ranges of the weights that it rounded.
        codes: quantized values of those weights.
        scales: the scales that they were rounded with.
        qparams: of weights whose rounding chose them, instead of those that follow from `bounds`.
        constants: new values of float constants by tensor name: corrected biases.
        gains: by site key.
        refusals: weights without observed input activations, and why.
    """

    bounds: Mapping[str, Bounds]
    codes: Mapping[str, Array]
    scales: Mapping[str, Array]
    qparams: Mapping[str, QParams] = field(default_factory=dict)
    constants: Mapping[str, Array] = field(default_factory=dict)
    gains: Mapping[str, Gain] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()

    def solve(self, otherwise: Solve | None) -> Solve:
        """Return a rounding function that returns the known quantized values, and rounds other weights by `otherwise`.

        Channels whose scales were raised for their int32 biases since are rounded to nearest: what their weights lose
        is below the resolution of the bias. The other channels of the weight keep their values, on which the bias
        correction and the rounding of later layers depend.

        Args:
            otherwise: None: round to nearest.
        """

        def codes_of(site: Site, weight: Array, qparams: QParams) -> Array:
            if site.key not in self.codes:
                return qparams.quantize(weight) if otherwise is None else otherwise(site, weight, qparams)
            codes, same = self.codes[site.key], self.scales[site.key] == qparams.scale
            if np.all(same):
                return codes
            return np.where(qparams.along(same, weight.shape), codes, qparams.quantize(weight))

        return codes_of


RoundSite = Callable[[Site, Array, QParams], tuple[Array, QParams]]
"""Rounds a weight: site, float weight, scales → quantized values of its shape, and their scales and zero points."""


@dataclass
class QuantState:
    """Scales and quantized constants, up to the current piece of the stream.

    Attributes:
        graph, plan: the quantized graph and its plan.
        floats: ranges in the float stream by site key.
        round: rounds a weight when it is first requested; see `RoundSite`.
        bounds: by site key: measured in the stream, or in float if it has not reached the site yet.
        codes: quantized values of the weights rounded so far.
        scales: the scales that they were rounded with.
        moved: scales and zero points that a rounding chose.
        constants: new values of float constants so far.
    """

    graph: Graph
    plan: Plan
    floats: Mapping[str, Bounds]
    round: RoundSite
    bounds: dict[str, Bounds] = field(init=False)
    codes: dict[str, Array] = field(init=False, default_factory=dict)
    scales: dict[str, Array] = field(init=False, default_factory=dict)
    moved: dict[str, QParams] = field(init=False, default_factory=dict)
    constants: dict[str, Array] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.bounds = dict(self.floats)
        self.tensors = tensors_by_name(self.graph)
        self.ways = mask_ways(self.graph)
        self._sites = self.plan.by_key()
        self._alone = {site.key for site in left_alone(self.plan, self.floats)}
        self._params: dict[str, QParams | None] = {}
        self._groups: dict[str, list[Site]] = {}
        for site in self.plan.sites:
            if site.role != "bias" and site.key not in self._alone:
                self._groups.setdefault(site.group, []).append(site)
        self._fixed = {
            site.key: fixed_bounds(site, self.tensors[site.tensor])
            for site in self.plan.sites
            if site.fixed is not None and site.role != "bias"
        }

    def measure(self, site: Site, sketch: Sketch) -> None:
        """Set the range of an activation from its sketch in the stream."""
        observer = make_observer(site.observer.name, site.observer.arguments)
        sketch, _ = without_masks(site, sketch, self.ways)
        self.limit(site, observer.bounds(sketch, site.spec, self.plan.scale_rule))

    def limit(self, site: Site, bounds: Bounds) -> None:
        """Set the range of a site, and recompute the scales of its group when needed."""
        self.bounds[site.key] = bounds
        for member in self._groups[site.group]:
            self._params.pop(member.key, None)

    def members(self, site: Site) -> int:
        """Return the number of sites that share the scale of this one, itself included."""
        return len(self._groups.get(site.group, ()))

    def round_all(self) -> None:
        """Round every weight."""
        for site in self.plan.of_role("weight"):
            self.codes_of(site)

    def weight(self, site: Site) -> Array:
        """Return the float values of a weight or bias, corrected if a correction exists."""
        constant = self.constants.get(site.tensor)
        return weight_of(site, self.tensors[site.tensor]) if constant is None else constant

    def params(self, site: Site) -> QParams | None:
        """Return scale and zero point, from the ranges of the whole group; None if there is no range."""
        if site.key in self.moved:
            return self.moved[site.key]
        if site.key not in self._params:
            self._params[site.key] = self._solved(site)
        return self._params[site.key]

    def _solved(self, site: Site) -> QParams | None:
        """Compute `params` without the cache."""
        members = self._groups.get(site.group, ()) if site.key not in self._alone else ()
        for member in members:
            if member.role == "weight" and member.fixed is None and member.key not in self.bounds:
                self.bounds[member.key] = weight_bounds(member, self.weight(member), self.plan.scale_rule)
        ranges = united(members, self.bounds, self._fixed)
        if site.key not in ranges:
            return None
        limits = limits_for(self.plan, self.tensors[site.tensor])
        if unfit(site, ranges[site.key], limits, self.plan.scale_rule) is not None:
            return None
        return qparams_of(site, ranges[site.key], self.tensors[site.tensor], self.plan)

    def dequantized(self, site: Site, kind: Any) -> Array | None:
        """Return the dequantized weight or bias as dtype `kind`; None if it stays float."""
        if site.role == "bias":
            followed = {key: self.params(self._sites[key]) for key in site.follows or ()}
            qparams_known = {key: qparams for key, qparams in followed.items() if qparams is not None}
            bias = bias_codes(site, self.weight(site), qparams_known)
            return None if isinstance(bias, Refusal) else (bias[0].astype(np.float32) * bias[1]).astype(kind)
        codes = self.codes_of(site)
        qparams = self.params(site)
        return None if qparams is None or codes is None else qparams.dequantize(codes).astype(kind)

    def codes_of(self, site: Site) -> Array | None:
        """Return the quantized values of a weight, rounded when first requested; None if it stays float."""
        if site.key not in self.codes:
            qparams = self.params(site)
            if qparams is None:
                return None
            codes, used = self.round(site, self.weight(site), qparams)
            if used is not qparams:
                self.moved[site.key] = used
            self.codes[site.key], self.scales[site.key] = spill_large(codes), used.scale
            release_pages()
        return self.codes[site.key]

"""Causes of the error of the worst layers: which tensor, what is wrong with it, and a change of the recipe for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from sbonnx import recipe as recipes
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.planning.types import Plan, Role, Site, Solution
from sbonnx.profiling.checkers import Profile
from sbonnx.profiling.layer_losses import losses, losses_alone
from sbonnx.profiling.variants import sites_by_layer
from sbonnx.profiling.walk import DEFAULTS, WalkOptions
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FULL_BITS
from sbonnx.recipe.node_patterns import pattern_of
from sbonnx.report import Reason
from sbonnx.report.details import Column, Details, LayerLoss, TensorHistogram
from sbonnx.report.searched import Cause, override_texts
from sbonnx.spec import Array, Bounds, params_from_bounds

PARTS_ALONE: Final[tuple[Column, ...]] = ("alone", "weights", "activations")
"""Figures of a layer by which it is explained."""

EXPLAINED: Final = 3
"""Number of layers whose cause is looked for."""

VISIBLE_DB: Final = 40.0
"""SQNR of a layer's outputs above which its loss needs no explanation."""

AMONG_WORST_DB: Final = 8.0
"""Distance from the worst layer within which others are explained too."""

SHARED: Final = 1.5
"""Factor between a shared scale and the own one from which sharing is the cause: 3.5 dB."""

CLIPPED: Final = 1e-3
"""Share of the values outside the calibrated range from which the calibration saw too few samples."""

CENTRE: Final = 0.99
"""Share of the values that outliers are not part of."""

OUTLYING: Final = 0.5
"""Share of the range, or less, that `CENTRE` of the values take if there are outliers."""

FOLLOWS_EXTREMES: Final = ("minmax", "moving_average")
"""Observers whose range is that of the values seen: it clips nothing but what calibration has not seen."""


@dataclass(frozen=True)
class Remedy:
    """Change of a recipe against a cause: in words, and by key."""

    what: str
    keys: Mapping[str, Any]


Explained = tuple[Reason, list[Remedy]]
"""A reason, and changes against it, the best first."""


def causes_of(
    plan: Plan,
    solution: Solution,
    details: Details,
    recipe: Recipe,
    *,
    ranges: Mapping[str, Bounds] = MappingProxyType({}),
    groups: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Cause, ...]:
    """Explain the layers that lose most on their own, worst first.

    Args:
        plan, solution: the quantized sites and their parameters.
        details: losses of layers, and histograms of the worst tensors.
        recipe: of the run; remedies extend it.
        ranges: measured range of each activation by site key, before those of shared scales are united.
        groups: group of each of these sites; those of one group share a scale.
    """
    if details.profile is None:
        return ()
    sites = sites_by_layer(plan, solution)
    histograms = {row.tensor: row for row in details.histograms}
    explainer = _Explainer(plan, solution, recipe, ranges, groups, histograms)
    causes = (explainer.cause(layer, sites) for layer in explained(details.profile.layers))
    return tuple(cause for cause in causes if cause is not None)


def explained(layers: Iterable[LayerLoss]) -> list[LayerLoss]:
    """Return the layers that `causes_of` explains: those that lose most on their own, worst first."""
    lossy = [(layer.alone, layer) for layer in layers if layer.alone is not None]
    worst = min((loss for loss, _ in lossy), default=math.inf)
    limit = min(VISIBLE_DB, worst + AMONG_WORST_DB)
    return [layer for loss, layer in sorted(lossy, key=lambda pair: pair[0]) if loss < limit][:EXPLAINED]


def losses_to_explain(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Sequence[Mapping[str, Array]],
    *,
    options: WalkOptions = DEFAULTS,
) -> Profile:
    """Measure the losses that `causes_of` needs: those by weights and by inputs of the layers that it explains alone.

    Takes a tenth of the time of `losses`, whose arguments these are; the feeds are read twice.
    """
    profile = losses_alone(graph, plan, solution, data, options=options)
    names = frozenset(layer.node for layer in explained(profile.layers))
    if not names:
        return profile
    rows = losses(graph, plan, solution, data, columns=PARTS_ALONE, options=replace(options, nodes=names)).layers
    parts = {row.node: row for row in rows}
    return replace(profile, layers=tuple(parts.get(layer.node, layer) for layer in profile.layers))


@dataclass(frozen=True)
class _Explainer:
    plan: Plan
    solution: Solution
    recipe: Recipe
    ranges: Mapping[str, Bounds]
    groups: Mapping[str, str]
    histograms: Mapping[str, TensorHistogram]

    def cause(self, layer: LayerLoss, sites: Mapping[tuple[str, Role], Sequence[Site]]) -> Cause | None:
        """Explain a layer by the side that loses more; None if neither was measured."""
        figures: dict[Role, float | None] = {"weight": layer.weights, "activation": layer.activations}
        sides = [
            (value, role)
            for role, value in figures.items()
            if value is not None and not math.isnan(value) and sites.get((layer.node, role))
        ]
        if not sides or layer.alone is None:
            return None
        role = min(sides)[1]
        read = sites[layer.node, role]
        rows = [(site, self._explained(site, read)) for site in read]
        site, (why, remedies) = max(rows, key=lambda row: row[1][0].code != "wide-range")
        remedy = self._first_valid([*remedies, self._excluded(layer.node)])
        return Cause(
            layer.node, layer.op, layer.alone, site.tensor, role, why, remedy.what, override_texts(remedy.keys)
        )

    def _explained(self, site: Site, read: Sequence[Site]) -> Explained:
        """Return what is wrong with one of the tensors `read` by a layer."""
        if site.role == "weight":
            return self._weight(site)
        return self._sharing(site) or self._activation(site, read)

    def _sharing(self, site: Site) -> Explained | None:
        """Return the cause if the range of another tensor decides the scale; None if it does not."""
        needed, used = self._scale(site), self.solution.qparams[site.key].scale
        if needed is None or used.ndim or site.fixed is not None or float(used) < SHARED * needed:
            return None
        others = [key for key, group in self.groups.items() if key != site.key and group == self.groups.get(site.key)]
        scales = [(scale, key) for key in others if (scale := self._scale(site, key)) is not None]
        if not scales:
            return None
        widest, other = max(scales)
        why = Reason(
            "shared-scale",
            f"shares its scale with '{other}', which is {widest / needed:.2g} times wider",
        )
        return why, [
            Remedy(
                "give it a scale of its own",
                {"OWN_SCALES": [*self.recipe.own_scales, pattern_of(site.tensor, "tensor")]},
            )
        ]

    def _scale(self, site: Site, key: str = "") -> float | None:
        """Return the scale that a site has with its own range, or with that of another; None if it was not measured."""
        bounds = self.ranges.get(key or site.key)
        if bounds is None or np.ndim(bounds.lo):
            return None
        return float(params_from_bounds(bounds, site.spec, rule=self.plan.scale_rule).scale)

    def _activation(self, site: Site, read: Sequence[Site]) -> Explained:
        row, label, bits = self.histograms.get(site.tensor), site.spec.label(), site.spec.bits
        if row is not None and site.observer.name in FOLLOWS_EXTREMES and row.clipped > CLIPPED:
            share = f"{100 * row.clipped:.2g} % are outside its range"
            why = Reason("range-exceeded", f"takes values that calibration has not seen: {share}")
            limit = self.recipe.samples
            return why, [Remedy("calibrate on more samples", {} if limit is None else {"SAMPLES": 4 * limit})]
        if bits < FULL_BITS:
            narrow = [beside.tensor for beside in read if beside.spec.bits < FULL_BITS]
            return Reason("few-bits", f"has {bits} bits ({label})"), [self._wider(narrow, FULL_BITS)]
        if row is not None and _share(row, *_centre(row)) < OUTLYING:
            share = f"take {100 * _share(row, *_centre(row)):.2g} % of the range of {label}"
            if _share(row, row.low, row.high) < OUTLYING:
                why = Reason("rare-outliers", f"has outliers in few samples: the values of others {share}")
                percentile = {"OBSERVER": {"TYPE": "percentile"}}
                return why, [self._specific("A", "tensor", [site.tensor], percentile, "another observer for the input")]
            why = Reason("outliers", f"has outliers: {100 * CENTRE:g} % of its values {share}")
            return why, [self._wider([site.tensor], 2 * FULL_BITS)]
        why = Reason("wide-range", f"has a wide range for {bits} bits ({label})")
        return why, [self._wider([site.tensor], 2 * FULL_BITS)]

    def _wider(self, tensors: Sequence[str], bits: int) -> Remedy:
        what = f"{bits} bits for {'the input' if len(tensors) == 1 else f'its {len(tensors)} inputs'}"
        return self._specific("A", "tensor", tensors, {"QUANTIZER": {"BIT": bits}}, what)

    def _weight(self, site: Site) -> Explained:
        node, bits, label = site.readers[0].node, site.spec.bits, site.spec.label()
        if bits < FULL_BITS - 1:
            wider = self._specific("W", "node", [node], {"QUANTIZER": {"BIT": FULL_BITS}}, "8 bits for the weights")
            return Reason("few-bits", f"have {bits} bits ({label})"), [wider]
        if site.spec.axis is None:
            change = {"QSCHEME": "per-channel-symmetric"}
            channels = self._specific("W", "node", [node], change, "a scale for each channel")
            return Reason("one-weight-scale", f"have one scale for all channels ({label})"), [channels]
        return Reason("wide-range", f"have a wide range for {bits} bits ({label})"), []

    def _specific(self, side: str, kind: str, names: Sequence[str], change: Mapping[str, Any], what: str) -> Remedy:
        """Return a change of some tensors or nodes, before the entries that the recipe has."""
        entries = self.recipe.to_dict()[side]["SPECIFIC"]
        return Remedy(what, {f"{side}.SPECIFIC": [*({pattern_of(name, kind): change} for name in names), *entries]})

    def _excluded(self, node: str) -> Remedy:
        return Remedy("leave the layer in float", {"EXCLUDE": [*self.recipe.exclude, pattern_of(node, "node")]})

    def _first_valid(self, remedies: Iterable[Remedy]) -> Remedy:
        """Return the first change that the backend can run."""
        return next(remedy for remedy in remedies if self._is_valid(remedy))

    def _is_valid(self, remedy: Remedy) -> bool:
        try:
            recipes.load(self.recipe, overrides=list(override_texts(remedy.keys)))
        except RecipeError:
            return False
        return True


def _centre(row: TensorHistogram) -> tuple[float, float]:
    """Return the ends of the shortest interval with `CENTRE` of the values."""
    counts = np.cumsum([0, *row.counts])
    ends = np.searchsorted(counts, counts + CENTRE * counts[-1])
    bins = min((end - begin, begin) for begin, end in enumerate(ends) if end < len(counts))
    step = (row.high - row.low) / len(row.counts)
    return row.low + bins[1] * step, row.low + (bins[0] + bins[1]) * step


def _share(row: TensorHistogram, low: float, high: float) -> float:
    """Return the share of the range that an interval takes, without the half of a symmetric one that has no values."""
    first = max(row.covered[0], 0.0) if row.low >= 0 else row.covered[0]
    last = min(row.covered[1], 0.0) if row.high <= 0 else row.covered[1]
    return (min(high, last) - max(low, first)) / (last - first)

"""Planning entry point: build the plan of one graph for one backend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Final

from sbonnx.backends import Backend
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning.cost_partition import slower_in_integers
from sbonnx.planning.drafts import Drafts, feed_bodies, tie
from sbonnx.planning.modes import ModePlacer
from sbonnx.planning.override_file import TensorOverride, read_overrides
from sbonnx.planning.placement import Placer
from sbonnx.planning.survey import Survey
from sbonnx.planning.tensor_overrides import overridden, share_given
from sbonnx.planning.times import GraphTimes
from sbonnx.planning.types import Plan, Site
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import LEARNED, UNIFORM
from sbonnx.recipe.problem import Wrong
from sbonnx.recipe.resolve import tensor_hit
from sbonnx.recipe.sections.quantizers import AUTO
from sbonnx.report import Reason, Refusal
from sbonnx.rounding import ROUNDERS
from sbonnx.system.cpu import THIS, target_cpu

FASTER: Final = Reason("slower-in-integers", "it is faster in float: FLOAT_NODES names it")
"""Reason of the nodes that the recipe places in float."""

CONTINUES: Final = frozenset({"input_written", "between_linear"})
"""Conditions of rules (`Rule.when`) that only apply behind integer kernels."""


def make(
    graph: Graph,
    recipe: Recipe,
    backend: Backend,
    *,
    observers: frozenset[str],
    declined: Mapping[str, Reason] = MappingProxyType({}),
    overrides: Mapping[str, TensorOverride] = MappingProxyType({}),
) -> Plan:
    """Plan which tensors get a Q/DQ pair, of which type, for which readers, and why. Pure: the graph is not changed.

    Args:
        graph: simplified, fused and topologically sorted, with unique node and tensor names.
        recipe: the user's settings.
        backend: the runtime's rules.
        observers: names of the available observers.
        declined: names of nodes that stay float, each with the reason. They read what integer kernels write
            dequantized. For the mode static.
        overrides: types of single tensors, in place of TENSOR_OVERRIDES.

    Raises:
        RecipeError: a pattern matches nothing, or an observer or rounding is not available.
    """
    return Planner(graph, recipe, backend, observers=observers, overrides=overrides).plan(declined)


class Planner:
    """Plans of one graph with different nodes left float. What they share is computed once.

    Args: as for `make`. The graph must not change between plans.

    Raises:
        RecipeError: see `make`.
    """

    def __init__(
        self,
        graph: Graph,
        recipe: Recipe,
        backend: Backend,
        *,
        observers: frozenset[str],
        overrides: Mapping[str, TensorOverride] = MappingProxyType({}),
    ) -> None:
        recipe.check_types(observers=observers, quantizers={UNIFORM, *LEARNED, *ROUNDERS}, roundings={AUTO, *ROUNDERS})
        self._recipe, self._backend, self._survey = recipe, backend, Survey(graph)
        self._short, self._overrides = _short_weights(recipe, backend), overrides
        unknown = sorted(set(recipe.float_nodes or ()) - self._survey.nodes.keys())
        if unknown:
            raise recipe.origin.error(
                Wrong(
                    f"names '{unknown[0]}', which is no node of the simplified graph"
                    f"{f', and {len(unknown) - 1} more' if unknown[1:] else ''}",
                    "The list is of another model or version: write it again with TUNE: latency (--tune latency)",
                    path=("FLOAT_NODES",),
                )
            )

    @cached_property
    def _costs(self) -> KernelCosts | None:
        return costs_of(self._recipe, self._backend)

    @cached_property
    def _times(self) -> GraphTimes | None:
        """Terms of the time by which ops are placed; None without a table of kernel costs, and with FLOAT_NODES."""
        costs, survey = self._costs, self._survey
        if costs is None or self._recipe.float_nodes is not None:
            return None
        return GraphTimes.of((at.node for at in survey.places), survey.outputs, costs.slowed(costs.margin))

    def plan(self, declined: Mapping[str, Reason] = MappingProxyType({})) -> Plan:
        """Return the plan with the named nodes left float, see `make`."""
        survey, recipe, backend = self._survey, self._recipe, self._backend
        if recipe.mode == "static":
            drafts = self._placed({**survey.spectra, **dict.fromkeys(recipe.float_nodes or (), FASTER), **declined})
            tie(survey, recipe, backend, drafts)
        else:
            drafts = Drafts()
            ModePlacer(survey, recipe, backend, drafts, short_weights=self._short).run()
            for name, why in feed_bodies(survey, recipe, drafts).items():
                drafts.refuse("quantize", name, why)
        sites = tuple(
            site if site.role == "bias" else _with_range(site, recipe)
            for site in drafts.sites()
            if site.readers or site.role == "activation"
        )
        overrides = self._overrides
        if recipe.tensor_overrides is not None and not overrides:
            overrides = read_overrides(recipe.tensor_overrides)
        if overrides:
            sites, without = overridden(sites, overrides, tensors_by_name(survey.graph), backend)
            for refusal in without:
                drafts.refuse(refusal.what, refusal.where, refusal.why)
        sites = share_given(sites)
        return Plan(
            sites=sites,
            refusals=(*drafts.refusals, *_idle(sites, recipe, backend)),
            backend=backend.name,
            scale_rule=recipe.scale_rule,
            weights=recipe.weights,
            weights_alone=backend.numbers.any_bits or recipe.mode != "static",
            float_type=recipe.high_precision,
            scales=backend.numbers.scales,
            cpu=target_cpu(recipe.cpu).name if backend.numbers.saturates else "",
            kernel_costs="" if recipe.mode != "static" or self._costs is None else self._costs.source,
        )

    def _placed(self, declined: Mapping[str, Reason]) -> Drafts:
        """Place the sites that the rules ask for, except at `declined` nodes and where integers are slower than float.

        The costs of the backend's kernels decide which are slower.
        """
        drafts, placer = self._walked(declined)
        twice = feed_bodies(self._survey, self._recipe, drafts)
        if twice:
            return self._placed({**twice, **declined})
        if self._times is None:
            return drafts
        backend, nodes = self._backend, self._survey.nodes
        first = {rule.name for rule in backend.placement.rules if rule.inputs == "first" and rule.when in CONTINUES}
        rules = {name: backend.placement.rule_for(nodes[name].op) for name in placer.ruled}
        continues = frozenset(name for name, rule in rules.items() if rule is not None and rule.name in first)
        able = placer.integer | placer.ruled
        slower = slower_in_integers(self._survey, able, backend.placement.folds, self._times, continues)
        if slower:
            drafts, _ = self._walked({**slower, **declined})
            feed_bodies(self._survey, self._recipe, drafts)
        return drafts

    def _walked(self, declined: Mapping[str, Reason]) -> tuple[Drafts, Placer]:
        """Place the sites that the rules ask for, except at `declined` nodes."""
        drafts = Drafts()
        placer = Placer(self._survey, self._recipe, self._backend, drafts, declined=declined, short_weights=self._short)
        placer.run()
        return drafts, placer


def costs_of(recipe: Recipe, backend: Backend) -> KernelCosts | None:
    """Return the backend's table of kernel costs that the recipe selects, or None.

    8-bit weights without limits, for a CPU whose products saturate, are meant for sessions with exact products.

    Raises:
        RecipeError: the file that it names is not such a table.
    """
    costs = backend.kernel_costs(recipe.kernel_costs, recipe.cpu)
    unlimited = recipe.reduce_range is False and backend.numbers.saturates and not target_cpu(recipe.cpu).exact
    return costs.with_unsigned_weights() if costs is not None and unlimited else costs


def _with_range(site: Site, recipe: Recipe) -> Site:
    """Return a site with the range that the recipe fixes for its tensor."""
    fixed = recipe.fixed_range(site.tensor)
    return site if fixed is None else replace(site, spec=site.spec.unpaired(), fixed=fixed, given=None)


def _short_weights(recipe: Recipe, backend: Backend) -> bool:
    """Return whether 8-bit weights must suit int16 sums of two products: on CPUs that need it, or by the recipe."""
    if not backend.numbers.saturates:
        return False
    return not target_cpu(recipe.cpu).exact if recipe.reduce_range is None else recipe.reduce_range


def _idle(sites: Sequence[Site], recipe: Recipe, backend: Backend) -> Iterator[Refusal]:
    """Yield refusals for recipe requests without effect: due to the backend, or because no quantized tensor matches."""
    separates = any(rule.when == "not_after_producer" for rule in backend.placement.rules)
    if not recipe.schedule.disable_unnecessary_quant and not separates:
        why = Reason(
            "activations-are-folded", f"{backend.name} folds activations into the op before: no pair stands between"
        )
        yield Refusal("quantize before activations", "SCHEDULE.DISABLE_UNNECESSARY_QUANT", why)
    if recipe.cpu != THIS and not backend.numbers.saturates:
        yield Refusal(
            "choose weights for a CPU",
            "CPU",
            Reason("same-on-every-cpu", f"files for {backend.name} compute the same on every CPU"),
        )
    for key, kind in recipe.learned_types():
        why = Reason(
            "needs-training",
            f"{kind} needs training: ranges are those of the observer; to train, use sbonnx qat or init_QAT()",
        )
        yield Refusal("learn scales", key, why)
    for pattern in recipe.ranges:
        if not any(tensor_hit((pattern,), site.tensor) for site in sites if site.role != "bias"):
            yield Refusal("fix range", pattern, Reason("range-not-used", "it is not quantized, or was fused away"))
    for pattern in recipe.own_scales:
        if not any(tensor_hit((pattern,), site.tensor) for site in sites if site.role == "activation"):
            yield Refusal("give own scale", pattern, Reason("range-not-used", "it is not quantized, or was fused away"))
    for group in recipe.shared_scales:
        tensors = {site.tensor for site in sites if site.role == "activation" and tensor_hit(group, site.tensor)}
        if len(tensors) < 2:
            yield Refusal(
                "share scale",
                ", ".join(group),
                Reason("too-few-to-share", "fewer than two of them are quantized activations"),
            )

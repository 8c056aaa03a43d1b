"""What each layer loses at each width that it can have, measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.graph import query
from sbonnx.plan import Plan, Solution
from sbonnx.prepare import Prepared, prepare
from sbonnx.profile import Candidate, Sensitivities, sensitivity
from sbonnx.recipe import Recipe
from sbonnx.recipe.limits import FLOAT, sides
from sbonnx.report import Refusal
from sbonnx.search.bit_groups import (
    ACTIVATION,
    WEIGHT,
    Choice,
    Group,
    Layer,
    candidates_of,
    front_of,
    groups_of,
    with_choices,
)
from sbonnx.search.costs import Costs, Weighted
from sbonnx.search.pareto import Front
from sbonnx.search.trials import Trials, changed, settled

WEIGHTS: Final = (2, 3, 4, 8)
"""Widths of weights to choose from where the recipe names none: those of the backend."""

SHORT: Final = {8: 7}
"""What a width may become on CPUs whose products of 8 bits saturate (REDUCE_RANGE)."""

NETWORK_MULTIPLIES: Final = 3e12
"""Multiplications for losses at the network's outputs, some ten minutes on one core; past them on fewer feeds."""

LEAST_FEEDS: Final = 4
"""With fewer a loss at the network's outputs says little: it is taken at the layer's outputs then."""


@dataclass(frozen=True)
class Survey:
    """What can be chosen, and what it loses.

    Attributes:
        recipe: what every choice is made upon.
        groups: what is chosen for together.
        kept: other layers with weights: their bits and those of their inputs, which the recipe fixes.
        base: the prepared graph.
        activation: bits of inputs where there is no choice.
        feeds: that losses were measured on.
        network: whether at the network's outputs.
    """

    recipe: Recipe
    groups: tuple[Group, ...]
    kept: Mapping[str, tuple[Weighted, int, int]]
    base: Prepared
    activation: int
    feeds: int
    network: bool
    refusals: tuple[Refusal, ...]

    @property
    def layers(self) -> list[Weighted]:
        """The layers that are chosen for."""
        return [layer.counts for group in self.groups for layer in group.layers]

    @property
    def free(self) -> list[Layer]:
        """Those of them whose weights have a choice."""
        return [layer for group in self.groups for layer in group.layers if not layer.fixed]

    def fronts(self, costs: Costs) -> list[Front]:
        """What there is to choose, group by group."""
        alone = self.base.plan.weights_alone
        return [front_of(group, costs.of, self.activation, alone=alone) for group in self.groups]

    def predicted(self, choices: Iterable[Choice]) -> float:
        """The sum of what the layers lose."""
        known: dict[tuple[str, ...], Mapping[int, float]] = {group.tensors: group.losses for group in self.groups}
        known |= {layer.names: layer.losses for group in self.groups for layer in group.layers}
        return sum(known[names].get(bits, 0.0) for _, names, bits in choices)  # a fixed layer may have become float

    def uniform(self, bits: int) -> list[Choice] | None:
        """All weights at one width; None where some layer does not have it."""
        if any(bits not in layer.losses for layer in self.free):
            return None
        return [(WEIGHT, layer.names, bits) for layer in self.free]


def survey(trials: Trials, recipe: Recipe, weights: Sequence[int] = (), activations: Sequence[int] = ()) -> Survey:
    """Measure what each layer loses at each width.

    The network is solved once at each width of weights, each layer's moments taken in the float network: those are
    the codes that a layer would have, not the nearest ones. Then each layer runs alone in the float network.

    Args:
        weights, activations: widths to choose from; none: those of MIXED.

    Raises:
        RecipeError: there is nothing to choose between.
    """
    plain = settled(recipe)
    weights, activations = _widths(recipe, weights, activations)
    names = _Names.of(trials.model)
    plans = {bits: prepare(trials.model, _at(plain, bits, None), trials.rules).plan for bits in weights if bits}
    choosable, unnamed = _choosable(plans, weights, names)
    if not choosable and len(activations) < 2:
        raise RecipeError(
            f"MIXED has nothing to choose: no weight of the plan can have two of the widths {list(weights)}. "
            "Name others in MIXED.WEIGHTS, or lift what fixes them (W.SPECIFIC, FIRST_BITS, LAST_BITS, EXCLUDE)"
        )
    solved, refusals = _solved(trials, plain, [bits for bits in weights if bits], choosable)
    if not solved:
        raise RecipeError(f"MIXED has no width that the model can be solved at: {refusals[0]}")
    top = max(solved)
    choosable = {name: [b for b in widths if b == FLOAT or b in solved] for name, widths in choosable.items()}
    base, solution = solved[top]
    found, feeds, network = _sensitivities(trials, recipe, base, solution, solved, activations)
    movable = len(activations) > 1
    fixed = {name: bits for name, bits in _widths_in(base.plan).items() if movable and name not in choosable}
    groups = groups_of(found, base.plan, choosable, fixed, inputs=movable)
    if movable:
        groups = [_named(group, names, activations) for group in groups]
    groups = [group for group in groups if group.layers or group.tensors]
    return Survey(
        recipe=plain,
        groups=tuple(groups),
        kept=_kept(base.plan, found, {**choosable, **fixed}),
        base=base,
        activation=plain.a.quantizer.bit,
        feeds=feeds,
        network=network,
        refusals=(*unnamed, *refusals, *found.refusals),
    )


def _widths(recipe: Recipe, weights: Sequence[int], activations: Sequence[int]) -> tuple[list[int], list[int]]:
    """The candidates of both sides, ascending, float last; those of the recipe that the backend does not take raise.

    Raises:
        RecipeError: see `sbonnx.recipe.load`.
    """
    limits = sides(recipe.backend, recipe.mode)
    wishes = recipe.mixed
    both = []
    for side, given, asked, default in (
        (WEIGHT, weights, wishes.weights, (*WEIGHTS, recipe.w.quantizer.bit)),
        (ACTIVATION, activations, wishes.activations, (recipe.a.quantizer.bit,)),
    ):
        allowed = {FLOAT, *limits[side].bits}
        if asked and not given:
            for bits in asked:
                recipes.load(settled(recipe), overrides={f"{side}.QUANTIZER.BIT": bits})  # says what is wrong with it
        some = given or asked or default
        both.append(sorted({b for b in some if b in allowed}, key=lambda b: b or 32))
    if recipe.w.quantizer.dtype != "int" or recipe.a.quantizer.dtype != "int":
        raise RecipeError("MIXED chooses between widths of integers: drop DTYPE: fp8, or MIXED")
    return both[0], both[1]


def _at(recipe: Recipe, weight: int | None, activation: int | None) -> Recipe:
    """A recipe with another width for a whole side."""
    wanted = {"W.QUANTIZER.BIT": weight, "A.QUANTIZER.BIT": activation}
    return changed(recipe, {key: bits for key, bits in wanted.items() if bits is not None})


@dataclass(frozen=True)
class _Names:
    """What a recipe can name: nodes and tensors of the file, before anything was fused."""

    nodes: frozenset[str]
    tensors: frozenset[str]

    @staticmethod
    def of(model: Any) -> _Names:
        """Those of a model."""
        graph = graphs.load(model)
        nodes = frozenset(node.name for _, body in query.scopes(graph) for node in body.nodes)
        return _Names(nodes, frozenset(query.tensors_by_name(graph)))


def _widths_in(plan: Plan) -> dict[str, int]:
    """Bits of the weight of each node."""
    return {reader.node: site.spec.bits for site in plan.of_role("weight") for reader in site.readers}


def _choosable(
    plans: Mapping[int, Plan], weights: Sequence[int], names: _Names
) -> tuple[dict[str, list[int]], list[Refusal]]:
    """Widths that the weight of a node can have, for the nodes that have two at least.

    A node whose width does not follow that of the whole side is one for which the recipe says another.
    """
    found: dict[str, list[int]] = {}
    widths = {bits: _widths_in(plan) for bits, plan in plans.items()}
    for bits, here in widths.items():
        for name, real in here.items():
            if real in (bits, SHORT.get(bits)):
                found.setdefault(name, []).append(bits)
    found = {name: [*some, *([FLOAT] if FLOAT in weights else [])] for name, some in found.items()}
    many = {name: some for name, some in found.items() if len(some) > 1}
    moved = {name: some for name, some in many.items() if len([b for b in some if b]) > 1 or len(plans) == 1}
    why = "the file has no node of this name for a recipe to name: it was made by fusing others"
    refusals = [Refusal("choose a width", name, why) for name in moved if name not in names.nodes]
    return {name: some for name, some in moved.items() if name in names.nodes}, refusals


def _solved(
    trials: Trials, recipe: Recipe, widths: Sequence[int], choosable: Mapping[str, Sequence[int]]
) -> tuple[dict[int, tuple[Prepared, Solution]], list[Refusal]]:
    """The network solved at each width of weights, and widths at which it cannot be."""
    solved: dict[int, tuple[Prepared, Solution]] = {}
    refusals = []
    for bits in widths:
        able = [(WEIGHT, (name,), bits) for name, some in choosable.items() if bits in some]
        # what tunes or scales the graph for one width would make another graph of it at each
        keys = {"CALIBRATION.MOMENTS.INPUTS": "float", "SCHEDULE.BN_TUNING": False, "EQUALIZE.AWQ": False}
        wishes = changed(recipes.load(with_choices(recipe, able)), {**keys, "CALIBRATION.ASYM.ENABLE": False})
        try:
            solved[bits] = trials.solve(wishes, f"weights of {bits} bits")
        except SbonnxError as error:
            refusals.append(Refusal(f"weights of {bits} bits", "the model", str(error)))
    return solved, refusals


def _sensitivities(
    trials: Trials,
    recipe: Recipe,
    base: Prepared,
    solution: Solution,
    solved: Mapping[int, tuple[Prepared, Solution]],
    activations: Sequence[int],
) -> tuple[Sensitivities, int, bool]:
    """The losses, on how many feeds they were measured, and whether at the network's outputs."""
    candidates = candidates_of(solved, activations)
    known = {Candidate(bits, None): (prepared.plan, one) for bits, (prepared, one) in solved.items()}
    trials.told.what = "sensitivity"
    trials.told.start("each layer at each width", None)

    def measure(feeds: int, network: bool, some: Sequence[Candidate]) -> Sensitivities:
        return sensitivity(
            base.graph,
            base.plan,
            solution,
            some,
            trials.samples.held,  # on those that codes were fitted to, layers with few rows would seem to lose nothing
            network=network,
            solved={one: numbers for one, numbers in known.items() if one in some},
            limit=feeds,
            device=base.recipe.device,
            memory=base.recipe.calibration.memory,
            threads=base.recipe.calibration.threads,
        )

    first = measure(1, False, candidates[:1])
    once = sum(row.multiplies for row in first.rows) * len(first.rows) * len(candidates) / 2
    feeds = min(recipe.mixed.feeds, len(trials.samples.held))
    if once * feeds > NETWORK_MULTIPLIES:
        feeds = max(LEAST_FEEDS, int(NETWORK_MULTIPLIES / once))
    network = once * min(feeds, LEAST_FEEDS) <= NETWORK_MULTIPLIES
    return measure(feeds, network, candidates), feeds, network


def _named(group: Group, names: _Names, activations: Sequence[int]) -> Group:
    """A group without a choice for its inputs where some of their tensors cannot be named."""
    if any(tensor not in names.tensors for tensor in group.tensors):
        return replace(group, tensors=())
    losses = {bits: loss for bits, loss in group.losses.items() if bits in activations}
    return replace(group, losses=losses)


def _kept(plan: Plan, found: Sensitivities, chosen: Mapping[str, object]) -> dict[str, tuple[Weighted, int, int]]:
    """Layers with weights that the recipe fixes, and their widths."""
    sites = plan.by_key()
    kept = {}
    for row in found.rows:
        mine = [sites[key] for key in row.sites]
        weights = [site for site in mine if site.role == "weight"]
        inputs = [site for site in mine if site.role == "activation"]
        if weights and row.layer not in chosen:
            counts = Weighted(row.layer, row.weights, row.multiplies)
            kept[row.layer] = (counts, weights[0].spec.bits, inputs[0].spec.bits if inputs else FLOAT)
    return kept


__all__ = ["Survey", "survey"]

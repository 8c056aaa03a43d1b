"""Sensitivity survey: the measured loss of each layer at each candidate bit width."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx.backends import Backend
from sbonnx.backends.onnxruntime.ort_nbits import WIDTHS as KERNEL_WIDTHS
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.graph import query
from sbonnx.planning import Plan, Solution
from sbonnx.profiling import Candidate, Sensitivities, WalkOptions, sensitivity
from sbonnx.recipe import Recipe
from sbonnx.recipe.backend_limits import sides
from sbonnx.recipe.names import FLOAT
from sbonnx.report import Reason, Refusal
from sbonnx.search.bit_costs import Costs, LayerCounts
from sbonnx.search.bit_groups import (
    ACTIVATION,
    WEIGHT,
    Choice,
    WidthGroup,
    WidthLayer,
    candidates_of,
    front_of,
    groups_of,
    with_choices,
)
from sbonnx.search.pareto import Front
from sbonnx.search.trials import Trials, changed, settled
from sbonnx.stages.state import Prepared, Source

WEIGHTS: Final = (2, 3, 4, 8)
"""Default candidate widths of weights if the recipe names none, limited to those of the backend."""

SHORT: Final = {8: 7}
"""Widths that may be reduced on CPUs whose 8-bit products saturate (REDUCE_RANGE)."""

NETWORK_MULTIPLIES: Final = 3e12
"""Limit of multiplications for losses at the network's outputs, about ten minutes on one core; beyond it fewer feeds
are used."""

LEAST_FEEDS: Final = 4
"""With fewer feeds, a loss at the network's outputs is unreliable, and is measured at the layer's outputs instead."""


@dataclass(frozen=True)
class SensitivitySurvey:
    """Candidate widths of all layers and their losses.

    Attributes:
        recipe: base recipe of all choices.
        groups: layers and tensors with a common width.
        kept: other layers with weights, with their bits (weight, input), which the recipe fixes.
        base: the prepared graph.
        activation: bits of inputs if there is no choice.
        feeds: number of feeds that losses were measured on.
        network: whether losses were measured at the network's outputs, else at the layers' outputs.
    """

    recipe: Recipe
    groups: tuple[WidthGroup, ...]
    kept: Mapping[str, tuple[LayerCounts, int, int]]
    base: Prepared
    activation: int
    feeds: int
    network: bool
    refusals: tuple[Refusal, ...]

    @property
    def layers(self) -> list[LayerCounts]:
        """All layers in the groups."""
        return [layer.counts for group in self.groups for layer in group.layers]

    @property
    def free(self) -> list[WidthLayer]:
        """The layers in the groups whose weight width can be chosen."""
        return [layer for group in self.groups for layer in group.layers if not layer.fixed]

    def fronts(self, costs: Costs) -> list[Front]:
        """Build the Pareto front of each group."""
        alone = self.base.plan.weights_alone
        return [front_of(group, costs.of, self.activation, alone=alone) for group in self.groups]

    def predicted(self, choices: Iterable[Choice]) -> float:
        """Return the sum of the layers' losses for a choice."""
        losses: dict[tuple[str, ...], Mapping[int, float]] = {group.tensors: group.losses for group in self.groups}
        losses |= {layer.names: layer.losses for group in self.groups for layer in group.layers}
        return sum(losses[names].get(bits, 0.0) for _, names, bits in choices)  # a fixed layer may have become float

    def uniform(self, bits: int) -> list[Choice] | None:
        """Return the choice with all weights at one width, or None if some layer does not have it."""
        if any(bits not in layer.losses for layer in self.free):
            return None
        return [(WEIGHT, layer.names, bits) for layer in self.free]


def survey(
    trials: Trials, recipe: Recipe, weights: Sequence[int] = (), activations: Sequence[int] = ()
) -> SensitivitySurvey:
    """Measure the loss of each layer at each width.

    The network is solved once for each weight width, with the second moments of each layer from the float network, so
    that layers have the weights that rounding would give them, not the nearest ones. Then each layer is quantized
    alone in the float network.

    Args:
        weights, activations: candidate widths; empty: those of MIXED.

    Raises:
        RecipeError: there is nothing to choose.
    """
    plain = settled(recipe)
    weights, activations = _widths(recipe, trials.rules, weights, activations)
    names = _Names.of(trials.request.model)
    at_widths = {bits: changed(plain, {"W.QUANTIZER.BIT": bits}) for bits in weights if bits}
    plans = {bits: trials.prepare(wider).plan for bits, wider in at_widths.items()}
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
    sensitivities, feeds, network = _sensitivities(trials, recipe, base, solution, solved, activations)
    movable = len(activations) > 1
    fixed = {name: bits for name, bits in _widths_in(base.plan).items() if movable and name not in choosable}
    groups = groups_of(sensitivities, base.plan, choosable, fixed, inputs=movable)
    if movable:
        for at, group in enumerate(groups):
            if any(tensor not in names.tensors for tensor in group.tensors):  # a recipe cannot name all of them
                groups[at] = replace(group, tensors=())
            else:
                losses = {bits: loss for bits, loss in group.losses.items() if bits in activations}
                groups[at] = replace(group, losses=losses)
    groups = [group for group in groups if group.layers or group.tensors]
    return SensitivitySurvey(
        recipe=plain,
        groups=tuple(groups),
        kept=_kept(base.plan, sensitivities, {**choosable, **fixed}),
        base=base,
        activation=plain.a.quantizer.bit,
        feeds=feeds,
        network=network,
        refusals=(*unnamed, *refusals, *sensitivities.refusals),
    )


def _widths(
    recipe: Recipe, rules: Backend, weights: Sequence[int], activations: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the candidate widths of both sides, ascending, float last."""
    stored = recipe.mode == "weight_only" and rules.files.integer_operators  # 3 bits would take the bytes of 4
    limits = sides(rules, recipe.mode)
    mixed = recipe.mixed
    both = []
    for side, given, asked, default in (
        (WEIGHT, weights, mixed.weights, (*(KERNEL_WIDTHS if stored else WEIGHTS), recipe.w.quantizer.bit)),
        (ACTIVATION, activations, mixed.activations, (recipe.a.quantizer.bit,)),
    ):
        allowed = {FLOAT, *limits[side].bits}
        if asked and not given:
            for bits in asked:
                recipes.load(settled(recipe), overrides={f"{side}.QUANTIZER.BIT": bits})  # raises if not supported
        some = given or asked or default
        both.append(sorted({b for b in some if b in allowed}, key=lambda b: b or 32))
    if recipe.w.quantizer.dtype != "int" or recipe.a.quantizer.dtype != "int":
        raise RecipeError("MIXED chooses between widths of integers: drop DTYPE: fp8, or MIXED")
    return both[0], both[1]


@dataclass(frozen=True)
class _Names:
    """Nodes and tensors that a recipe can refer to: those of the file, before fusion."""

    nodes: frozenset[str]
    tensors: frozenset[str]

    @staticmethod
    def of(model: Source) -> _Names:
        """Collect the names of a model, before pruning."""
        graph = graphs.load(model)
        nodes = frozenset(node.name for _, body in query.scopes(graph) for node in body.nodes)
        return _Names(nodes, frozenset(query.tensors_by_name(graph)))


def _widths_in(plan: Plan) -> dict[str, int]:
    return {reader.node: site.spec.bits for site in plan.of_role("weight") for reader in site.readers}


def _choosable(
    plans: Mapping[int, Plan], weights: Sequence[int], names: _Names
) -> tuple[dict[str, list[int]], list[Refusal]]:
    """Return the candidate weight widths of each node that has at least two.

    If a node's width does not follow the width of the whole side, the recipe sets it separately, and it is left out.
    """
    by_layer: dict[str, list[int]] = {}
    widths = {bits: _widths_in(plan) for bits, plan in plans.items()}
    for bits, here in widths.items():
        for name, real in here.items():
            if real in (bits, SHORT.get(bits)):
                by_layer.setdefault(name, []).append(bits)
    by_layer = {name: [*some, *([FLOAT] if FLOAT in weights else [])] for name, some in by_layer.items()}
    many = {name: some for name, some in by_layer.items() if len(some) > 1}
    moved = {name: some for name, some in many.items() if len([b for b in some if b]) > 1 or len(plans) == 1}
    why = Reason(
        "node-not-in-file", "the file has no node of this name for a recipe to name: it was made by fusing others"
    )
    refusals = [Refusal("choose a width", name, why) for name in moved if name not in names.nodes]
    return {name: some for name, some in moved.items() if name in names.nodes}, refusals


def _solved(
    trials: Trials, recipe: Recipe, widths: Sequence[int], choosable: Mapping[str, Sequence[int]]
) -> tuple[dict[int, tuple[Prepared, Solution]], list[Refusal]]:
    """Solve the network at each weight width; widths at which that fails are refusals."""
    solved: dict[int, tuple[Prepared, Solution]] = {}
    refusals = []
    for bits in widths:
        able = [(WEIGHT, (name,), bits) for name, some in choosable.items() if bits in some]
        # tuning or scaling the graph for one width would give a different graph for each
        keys = {"CALIBRATION.MOMENTS.INPUTS": "float", "SCHEDULE.BN_TUNING": False, "EQUALIZE.AWQ": False}
        own_width = changed(recipes.load(with_choices(recipe, able)), {**keys, "CALIBRATION.ASYM.ENABLE": False})
        try:
            solved[bits] = trials.solve(own_width, f"weights of {bits} bits")
        except SbonnxError as error:
            refusals.append(Refusal(f"weights of {bits} bits", "the model", Reason("not-tried", str(error))))
    return solved, refusals


def _sensitivities(
    trials: Trials,
    recipe: Recipe,
    base: Prepared,
    solution: Solution,
    solved: Mapping[int, tuple[Prepared, Solution]],
    activations: Sequence[int],
) -> tuple[Sensitivities, int, bool]:
    """Measure the losses. Also return the number of feeds, and whether they are at the network's outputs."""
    candidates = candidates_of(solved, activations)
    calibration = base.recipe.calibration
    solutions = {
        Candidate(bits, None): (prepared.plan, solution_of_width)
        for bits, (prepared, solution_of_width) in solved.items()
    }
    trials.progress.what = "sensitivity"
    trials.progress.start("each layer at each width", None)

    def measure(feeds: int, network: bool, some: Sequence[Candidate]) -> Sensitivities:
        return sensitivity(
            base.graph,
            base.plan,
            solution,
            some,
            trials.samples.held,  # on the calibration feeds, layers with few rows would seem lossless
            network=network,
            solved={candidate: numbers for candidate, numbers in solutions.items() if candidate in some},
            options=WalkOptions(feeds, base.recipe.device, calibration.memory, calibration.threads),
        )

    first = measure(1, False, candidates[:1])
    once = sum(row.multiplies for row in first.rows) * len(first.rows) * len(candidates) / 2
    feeds = min(recipe.mixed.feeds, len(trials.samples.held))
    if once * feeds > NETWORK_MULTIPLIES:
        feeds = max(LEAST_FEEDS, int(NETWORK_MULTIPLIES / once))
    network = once * min(feeds, LEAST_FEEDS) <= NETWORK_MULTIPLIES
    return measure(feeds, network, candidates), feeds, network


def _kept(plan: Plan, found: Sensitivities, chosen: Mapping[str, object]) -> dict[str, tuple[LayerCounts, int, int]]:
    """Return the layers with weights that the recipe fixes, and their widths."""
    sites = plan.by_key()
    kept: dict[str, tuple[LayerCounts, int, int]] = {}
    counted: set[str] = set()
    for row in found.rows:
        mine = [sites[key] for key in row.sites]
        weights = [site for site in mine if site.role == "weight"]
        inputs = [site for site in mine if site.role == "activation"]
        if weights and row.layer not in chosen and row.layer not in kept:
            shared = weights[0].key in counted  # such as the table of embedding and head, which is stored once
            counts = LayerCounts(row.layer, 0 if shared else row.weights, row.multiplies)
            counted.add(weights[0].key)
            kept[row.layer] = (counts, weights[0].spec.bits, inputs[0].spec.bits if inputs else FLOAT)
    return kept

"""Search space of mixed precision: groups of layers and tensors with a common width, and the loss at each width."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.planning import Plan, Site
from sbonnx.profiling import Candidate, Sensitivities, Sensitivity
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT
from sbonnx.recipe.node_patterns import pattern_of
from sbonnx.recipe.sections.quantizers import AUTO
from sbonnx.search.bit_costs import Cost, LayerCounts
from sbonnx.search.pareto import Front, Option, either, join, join_all, leaf

SEARCHED_BELOW: Final = 4
"""Weights below this width get the scale of least output error, because min-max over three or seven steps is far from
it. Measured on cifar_resnet20 at 2 bits, energy of the error of the layers: 0.195 with min-max, 0.102 with search."""

WEIGHT: Final = "W"
ACTIVATION: Final = "A"
FIXED: Final = "W, fixed"
"""Side of a weight whose width is fixed by the recipe, and therefore not written."""


@dataclass(frozen=True)
class WidthLayer:
    """Weights with one common width: those of one node, or of several nodes that share the weight tensor.

    Attributes:
        names: names of the nodes.
        losses: energy of the error at the network's outputs relative to that of the outputs, by bits (0: float).
        counts: size of the first node, with the multiplications of all nodes.
        fixed: whether the recipe fixes the width, so that only the width of the inputs is chosen.
    """

    names: tuple[str, ...]
    losses: Mapping[int, float]
    counts: LayerCounts
    fixed: bool = False


@dataclass(frozen=True)
class WidthGroup:
    """Layers whose inputs have one common width, because they read one tensor or tensors with a shared scale.

    Attributes:
        layers: layers with a weight to choose for; empty if only inputs are quantized.
        tensors: activations with one common width.
        losses: loss by bits, summed over all nodes that read these tensors; one entry if there is no choice.
    """

    layers: tuple[WidthLayer, ...]
    tensors: tuple[str, ...]
    losses: Mapping[int, float]


Choice = tuple[str, tuple[str, ...], int]
"""(side, names of nodes or tensors, bits)."""


def groups_of(
    found: Sensitivities, plan: Plan, choosable: Mapping[str, Sequence[int]], fixed: Mapping[str, int], *, inputs: bool
) -> list[WidthGroup]:
    """Group the layers and tensors that must have a common width.

    Args:
        found: rows with `Candidate(bits, None)` for weights and `Candidate(None, bits)` for inputs.
        plan: defines which sites are shared and which have one scale.
        choosable: candidate widths by node, for weights with a choice.
        fixed: width by node, for all other weights.
        inputs: whether widths of activations are chosen as well.
    """
    sites = plan.by_key()
    rows: dict[str, list[Sensitivity]] = {}
    for row in found.rows:
        rows.setdefault(row.layer, []).append(row)
    names = [name for name in rows if name in choosable or inputs]
    if not inputs:
        layers = _layers(names, rows, sites, choosable, {})
        return [WidthGroup((layer,), (), {FLOAT: 0.0}) for layer in layers]
    groups = []
    for members in _tied(names, {name: _labels(rows[name], sites, ACTIVATION) for name in names}):
        keys = {key for name in members for key in rows[name][0].sites if sites[key].role == "activation"}
        scales = {sites[key].group for key in keys}
        tensors = {site.tensor: None for site in plan.of_role("activation") if site.group in scales or site.key in keys}
        losses = {FLOAT: 0.0}
        for name in members:
            for row in rows[name]:
                bits = row.candidate.activation
                if row.candidate.weight is None and bits is not None:
                    losses[bits] = losses.get(bits, 0.0) + energy(row)
        weighted = [name for name in members if name in choosable or name in fixed]
        groups.append(WidthGroup(tuple(_layers(weighted, rows, sites, choosable, fixed)), tuple(tensors), losses))
    return groups


def energy(row: Sensitivity) -> float:
    """Return the loss of a row as energy. Energies of uncorrelated errors are additive."""
    loss = row.loss if row.network_loss is None else row.network_loss
    return loss**2 if math.isfinite(loss) else math.inf


def _labels(rows: Sequence[Sensitivity], sites: Mapping[str, Site], side: str) -> list[str]:
    """Return the labels that tie a node to others: keys of weights, or groups and tensors of activations."""
    read = [sites[key] for key in rows[0].sites]
    if side == WEIGHT:
        return [site.key for site in read if site.role == "weight"]
    return [name for site in read if site.role == "activation" for name in (site.group, f"tensor {site.tensor}")]


def _tied(names: Sequence[str], labels: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Partition the names into sets that share a label, directly or transitively (union-find); order is kept."""
    root: dict[str, str] = {}

    def find(name: str) -> str:
        while root.setdefault(name, name) != name:
            root[name] = root[root[name]]
            name = root[name]
        return name

    for name in names:
        for label in labels[name]:
            root[find(f"label {label}")] = find(f"node {name}")
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(find(f"node {name}"), []).append(name)
    return list(sets.values())


def _layers(
    names: Sequence[str],
    rows: Mapping[str, Sequence[Sensitivity]],
    sites: Mapping[str, Site],
    choosable: Mapping[str, Sequence[int]],
    fixed: Mapping[str, int],
) -> Iterator[WidthLayer]:
    """Yield the weights of some nodes; nodes that share a weight tensor form one layer."""
    for members in _tied(names, {name: _labels(rows[name], sites, WEIGHT) for name in names}):
        first = rows[members[0]][0]
        counts = LayerCounts(members[0], first.weights, sum(rows[name][0].multiplies for name in members))
        said = [fixed[name] for name in members if name in fixed]
        if said:
            yield WidthLayer(tuple(members), {said[0]: 0.0}, counts, fixed=True)
            continue
        widths = set.intersection(*(set(choosable[name]) for name in members))
        losses: dict[int, float] = {FLOAT: 0.0} if FLOAT in widths else {}
        for name in members:
            for row in rows[name]:
                bits = row.candidate.weight
                if bits in widths and row.candidate.activation is None:
                    losses[bits] = losses.get(bits, 0.0) + energy(row)
        yield WidthLayer(tuple(members), losses, counts)


def front_of(group: WidthGroup, cost: Cost, activation: int, *, alone: bool) -> Front:
    """Build the Pareto front of a group.

    Args:
        activation: bits of the inputs if there is no choice.
        alone: whether the backend supports integer weights with a float input.
    """
    if not group.tensors:
        return join_all([_weights(layer, cost, activation) for layer in group.layers])
    fronts = []
    for bits, loss in sorted(group.losses.items()):
        here = leaf([Option(0.0, loss, (ACTIVATION, group.tensors, bits))])
        for layer in group.layers:
            here = join(here, _weights(layer, cost, bits, only_float=bits == FLOAT and not alone))
        fronts.append(here)
    return either(fronts)


def _weights(layer: WidthLayer, cost: Cost, activation: int, *, only_float: bool = False) -> Front:
    """Build the front of a layer's weight widths, for a fixed width of its inputs."""
    widths: Mapping[int, float] = {FLOAT: 0.0} if only_float else layer.losses
    side = FIXED if layer.fixed else WEIGHT
    return leaf(
        [Option(cost(layer.counts, bits, activation), loss, (side, layer.names, bits)) for bits, loss in widths.items()]
    )


def with_choices(recipe: Recipe, choices: Iterable[Choice]) -> dict[str, Any]:
    """Return the keys of a recipe with these widths: W.SPECIFIC by node, A.SPECIFIC by tensor, before its own entries.

    A width equal to that of the whole side is not written. Weights below `SEARCHED_BELOW` bits also get SCALE: search
    if the recipe leaves it on auto.
    """
    keys = recipe.to_dict()
    entries: dict[str, list[dict[str, Any]]] = {WEIGHT: [], ACTIVATION: []}
    for side, names, bits in choices:
        whole = recipe.a.quantizer if side == ACTIVATION else recipe.w.quantizer
        if bits == whole.bit or side == FIXED:
            continue
        kind = "node" if side == WEIGHT else "tensor"
        change: dict[str, Any] = {"QUANTIZER": {"BIT": bits}}
        if side == WEIGHT and FLOAT < bits < SEARCHED_BELOW and recipe.w.rounding.scale == AUTO:
            change["ROUNDING"] = {"SCALE": "search"}
        entries[side].extend({pattern_of(name, kind): change} for name in names)
    for side, some in entries.items():
        keys[side]["SPECIFIC"] = [*some, *keys[side]["SPECIFIC"]]
    return keys


def candidates_of(weights: Iterable[int], activations: Sequence[int]) -> list[Candidate]:
    """List the candidates to measure: each weight width with float inputs, and input widths if there is a choice."""
    candidates = [Candidate(bits, None) for bits in weights if bits != FLOAT]
    if len(activations) > 1:
        candidates += [Candidate(None, bits) for bits in activations if bits != FLOAT]
    return candidates

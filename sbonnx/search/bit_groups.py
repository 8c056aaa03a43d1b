"""What there is to choose: layers, the tensors that tie them, and what each width loses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.plan import Plan, Site
from sbonnx.profile import Candidate, Sensitivities, Sensitivity
from sbonnx.recipe import Recipe
from sbonnx.recipe.limits import FLOAT
from sbonnx.recipe.sections.rounding import AUTO
from sbonnx.search.costs import Cost, Weighted
from sbonnx.search.pareto import Front, Option, either, join, join_all, leaf

SPECIAL: Final = re.compile(r"[*?\[\]]")
"""Characters that mean more than themselves in a pattern."""

SEARCHED_BELOW: Final = 4
"""Weights of fewer bits get the scale of least output error: the whole range in three or seven steps is far from it.
Measured on cifar_resnet20 at 2 bits, energy of the error of the layers: 0.195 with min-max, 0.102 with the search."""

WEIGHT: Final = "W"
ACTIVATION: Final = "A"
FIXED: Final = "W, fixed"
"""Side of a weight whose width is not chosen, and not written."""


@dataclass(frozen=True)
class Layer:
    """Weights that have one width: those of one node, or of several nodes that read one tensor.

    Attributes:
        names: of the nodes.
        losses: energy of the error at the network's outputs over that of the outputs, by bits (0: float).
        counts: of the first node, with the multiplications of all.
        fixed: whether the recipe says the width, so that only those of the inputs are chosen.
    """

    names: tuple[str, ...]
    losses: Mapping[int, float]
    counts: Weighted
    fixed: bool = False


@dataclass(frozen=True)
class Group:
    """Layers whose inputs have one width, because they read one tensor or tensors with one scale.

    Attributes:
        layers: those whose weights can be chosen for; none where only inputs are quantized.
        tensors: activations that have one width.
        losses: as for weights, of the inputs of all nodes that read these tensors; one entry where there is no choice.
    """

    layers: tuple[Layer, ...]
    tensors: tuple[str, ...]
    losses: Mapping[int, float]


Choice = tuple[str, tuple[str, ...], int]
"""(side, names of nodes or tensors, bits)."""


def groups_of(
    found: Sensitivities, plan: Plan, choosable: Mapping[str, Sequence[int]], fixed: Mapping[str, int], *, inputs: bool
) -> list[Group]:
    """What is chosen together.

    Args:
        found: rows with `Candidate(bits, None)` for weights and `Candidate(None, bits)` for inputs.
        plan: which sites are shared, and which have one scale.
        choosable: widths by node for whose weight there is a choice.
        fixed: width by node of the other weights.
        inputs: whether widths of activations are chosen as well.
    """
    sites = plan.by_key()
    rows: dict[str, list[Sensitivity]] = {}
    for row in found.rows:
        rows.setdefault(row.layer, []).append(row)
    names = [name for name in rows if name in choosable or inputs]
    if not inputs:
        layers = _layers(names, rows, sites, choosable, {})
        return [Group((layer,), (), {FLOAT: 0.0}) for layer in layers]
    made = []
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
        made.append(Group(tuple(_layers(weighted, rows, sites, choosable, fixed)), tuple(tensors), losses))
    return made


def energy(row: Sensitivity) -> float:
    """The loss of a row as energy: errors of layers that know nothing of each other add up so."""
    loss = row.loss if row.network_loss is None else row.network_loss
    return loss**2 if math.isfinite(loss) else math.inf


def _labels(rows: Sequence[Sensitivity], sites: Mapping[str, Site], side: str) -> list[str]:
    """What ties a node to others, on one side: keys of weights, or groups of activations (one scale, one width)."""
    read = [sites[key] for key in rows[0].sites]
    if side == WEIGHT:
        return [site.key for site in read if site.role == "weight"]
    return [name for site in read if site.role == "activation" for name in (site.group, f"tensor {site.tensor}")]


def _tied(names: Sequence[str], labels: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The names in sets that share a label, directly or through others; in order."""
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
) -> Iterator[Layer]:
    """The weights of some nodes; nodes that read one tensor as one."""
    for members in _tied(names, {name: _labels(rows[name], sites, WEIGHT) for name in names}):
        first = rows[members[0]][0]
        counts = Weighted(members[0], first.weights, sum(rows[name][0].multiplies for name in members))
        said = [fixed[name] for name in members if name in fixed]
        if said:
            yield Layer(tuple(members), {said[0]: 0.0}, counts, fixed=True)
            continue
        widths = set.intersection(*(set(choosable[name]) for name in members))
        losses: dict[int, float] = {FLOAT: 0.0} if FLOAT in widths else {}
        for name in members:
            for row in rows[name]:
                bits = row.candidate.weight
                if bits in widths and row.candidate.activation is None:
                    losses[bits] = losses.get(bits, 0.0) + energy(row)
        yield Layer(tuple(members), losses, counts)


def front_of(group: Group, cost: Cost, activation: int, *, alone: bool) -> Front:
    """All that can be chosen for a group.

    Args:
        activation: bits of the inputs where there is no choice.
        alone: whether the backend takes integer weights beside a float input.
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


def _weights(layer: Layer, cost: Cost, activation: int, *, only_float: bool = False) -> Front:
    """The widths of a layer's weights, with its inputs at one width."""
    widths: Mapping[int, float] = {FLOAT: 0.0} if only_float else layer.losses
    side = FIXED if layer.fixed else WEIGHT
    return leaf(
        [Option(cost(layer.counts, bits, activation), loss, (side, layer.names, bits)) for bits, loss in widths.items()]
    )


def pattern_of(name: str, kind: str) -> str:
    """The pattern that means one node or tensor and no other."""
    if SPECIAL.search(name):
        return f"re:{re.escape(name)}" if kind == "node" else f"tensor:{_escaped(name)}"
    return f"{kind}:{name}"


def _escaped(name: str) -> str:
    """A name in which wildcards stand for themselves (`fnmatch`)."""
    return SPECIAL.sub(lambda match: f"[{match[0]}]", name)


def with_choices(recipe: Recipe, choices: Iterable[Choice]) -> dict[str, Any]:
    """The keys of a recipe with these widths, before the entries that it has: W.SPECIFIC by node, A.SPECIFIC by tensor.

    Widths that the whole side has are not written. Narrow weights whose range an observer would say get it by search.
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
    """What is measured: each width of weights with float inputs, and of inputs where there is a choice."""
    found = [Candidate(bits, None) for bits in weights if bits != FLOAT]
    if len(activations) > 1:
        found += [Candidate(None, bits) for bits in activations if bits != FLOAT]
    return found

"""Fake quantization of a changed recipe on a finished run: only activations that the change concerns are measured.

All other activations keep their ranges, and weights their codes. In layers that read a changed activation, codes may
compensate the error of the old one: a second form has these layers rounded to nearest. That takes one pass of the float
network up to the changed activations, instead of a run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from sbonnx.calib import calibrator
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.observers import OBSERVERS
from sbonnx.calib.quantized.stream_state import StreamResult
from sbonnx.correct.biases import biases_of
from sbonnx.heads import Quantized
from sbonnx.heads.protect import HEAD
from sbonnx.planning import Plan, Site, Solution, make
from sbonnx.planning.types import Role
from sbonnx.recipe import Recipe
from sbonnx.reconstruct.solution import solution_from
from sbonnx.spec import Bounds
from sbonnx.stages.state import PipelineState, run_options

SAMPLES: Final = 32
"""Calibration samples on which changed activations are measured: a change that gains is run on all of them."""


def simulated(state: PipelineState, recipe: Recipe) -> Iterator[Quantized]:
    """Yield the network of a finished run with the quantization of a changed recipe, in up to two forms.

    Args:
        state: of a finished run with data.
        recipe: the changed recipe. A run with it rounds the weights again, to the changed inputs.

    Yields:
        The network with the codes of the run, then with the nearest ones in layers that read a changed activation.
        Nothing if only a run shows the change: it quantizes other weights, or the model is not static and in float32.

    Raises:
        RecipeError: a pattern of the recipe matches nothing.
    """
    prepared, data = state.prepared, state.data
    if recipe.mode != "static" or prepared.plan.float_type != "fp32" or state.original is None or data is None:
        return
    resolved, _ = recipe.for_model(state.original.nodes, state.original.tensors)
    heads = {refusal.where: refusal.why for refusal in prepared.plan.refusals if refusal.code == HEAD}
    plan = make(prepared.graph, resolved, prepared.backend, observers=frozenset(OBSERVERS), declined=heads)
    weights = _same_sites(prepared.plan, plan, "weight")
    if not all(weights.values()):
        return
    shared, own = _known_ranges(state, plan)
    unknown = tuple(site for site in plan.of_role("activation") if site.key not in shared and site.key not in own)
    if unknown:
        feeds = [unit.feed for unit in islice(data.fit.units(), SAMPLES)]
        samples = Samples.of(feeds, prepared.graph, run_options(resolved)).uncached
        own |= calibrator.calibrate(prepared.graph, replace(plan, sites=unknown), samples).bounds
    moved = frozenset(reader.node for site in plan.of_role("activation") if site.key in own for reader in site.readers)
    for nearest in (frozenset[str](), moved) if moved else (moved,):
        yield Quantized(plan, _solution(state, plan, {**shared, **own}, weights, nearest))


def _same_sites(before: Plan, after: Plan, role: Role) -> dict[str, Site | None]:
    """Return the site of a plan before with the same range, or the same codes, of each site; None if there is none."""
    known = {(site.tensor, site.scope, site.spec): site for site in before.of_role(role)}
    pairs = {site.key: (site, known.get((site.tensor, site.scope, site.spec))) for site in after.of_role(role)}
    return {
        key: old if old is not None and _is_measured_alike(site, old) else None for key, (site, old) in pairs.items()
    }


def _is_measured_alike(site: Site, old: Site) -> bool:
    return (site.observer, site.rounding, site.fixed, site.given) == (old.observer, old.rounding, old.fixed, old.given)


def _known_ranges(state: PipelineState, plan: Plan) -> tuple[dict[str, Bounds], dict[str, Bounds]]:
    """Return the ranges of the activations whose scale stays, and those of the others that the run measured, by key."""
    before, measured = state.prepared.plan, {} if state.ranges is None else state.ranges.bounds
    known = _same_sites(before, plan, "activation")
    groups, old_groups = _groups(plan), _groups(before)
    shared, own = dict[str, Bounds](), dict[str, Bounds]()
    for site in plan.of_role("activation"):
        same = known[site.key]
        if same is None:
            continue
        if same.key in state.solution.bounds and groups[site.group] == old_groups[same.group]:
            shared[site.key] = state.solution.bounds[same.key]
        elif same.key in measured:
            own[site.key] = measured[same.key]
    return shared, own


def _groups(plan: Plan) -> Mapping[str, frozenset[str]]:
    """Return the tensors of each group."""
    groups: defaultdict[str, set[str]] = defaultdict(set)
    for site in plan.of_role("activation"):
        groups[site.group].add(site.tensor)
    return {group: frozenset(tensors) for group, tensors in groups.items()}


def _solution(
    state: PipelineState,
    plan: Plan,
    ranges: Mapping[str, Bounds],
    weights: Mapping[str, Site | None],
    nearest: frozenset[str],
) -> Solution:
    """Solve a plan with the codes and corrected biases of the run.

    Args:
        ranges: of the activations.
        weights: the site of each weight in the plan of the run.
        nearest: nodes whose weights are rounded to nearest, and whose biases are their own.
    """
    graph, solution = state.prepared.graph, state.solution
    sites = [site for site in plan.of_role("weight") if not nearest & {reader.node for reader in site.readers}]
    stays = {reader.node for site in sites for reader in site.readers}
    changed = {bias.name for node, bias in biases_of(graph).items() if node not in stays}
    before = {key: site.key for key, site in weights.items() if site is not None and site.key in solution.codes}
    codes = {site.key: solution.codes[before[site.key]] for site in sites if site.key in before}
    qparams = {key: solution.qparams[old] for key, old in before.items()}
    walked = StreamResult(
        ranges,
        codes,
        {key: qparams[key].scale for key in codes},
        qparams,
        {name: values for name, values in solution.constants.items() if name not in changed},
    )
    return solution_from(graph, plan, state.ranges or MeasuredRanges({}), walked)

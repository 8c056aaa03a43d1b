"""Branches of If as separate models: their weights are rounded on the samples that select them.

A merged decoder is one If on ``use_cache_branch``; both branches read the same weights, one without and one with cached
keys and values. A weight that several branches read is rounded once: in the branch that most samples select. The bias
that compensates its error there is that of its other readers too, if their float biases are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import run_float
from sbonnx.calib.engine.samples import CanonicalSamples, canonical_samples
from sbonnx.calib.engine.schedule import Branch, branches
from sbonnx.calib.quantized.stream_state import StreamResult
from sbonnx.correct import biases_of
from sbonnx.errors import ModelError
from sbonnx.graph import Graph
from sbonnx.graph.extract import extract
from sbonnx.graph.query import scopes
from sbonnx.ops import LINEAR
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.reconstruct.layer_inputs import WHAT, looks_at_inputs
from sbonnx.report import Reason, Refusal
from sbonnx.spec import Array

Walk = Callable[[Graph, Plan, CanonicalSamples], StreamResult]
"""Rounds the weights of a model and plan by the inputs of their layers."""

LOOP: Final = Reason(
    "branch-in-loop", "it is in a body that runs step by step, or in a branch inside a branch: rounded to nearest"
)
STATIC: Final = Reason(
    "branch-without-stream", "it is in a branch, which has no stream of quantized activations: rounded to nearest"
)
IDLE: Final = Reason("branch-never-ran", "its branch never ran on the calibration data: rounded to nearest")


@dataclass(frozen=True)
class BranchModel:
    """One branch as a model.

    Attributes:
        branch: where it is.
        graph: its nodes; the outer variables that they read are its inputs.
        plan: the sites that its nodes read.
    """

    branch: Branch
    graph: Graph
    plan: Plan

    @property
    def reads(self) -> list[str]:
        """Names of the outer variables that a sample needs: the inputs."""
        return [tensor.name for tensor in self.graph.inputs]

    def selected(self, known: Mapping[str, Any]) -> bool:
        """Whether a sample with these outer variables runs the branch."""
        return bool(np.asarray(known[self.branch.condition]).item()) == self.branch.picks


def walk_branches(graph: Graph, plan: Plan, units: CanonicalSamples, walked: StreamResult, walk: Walk) -> StreamResult:
    """Round the weights that branches of the main graph read, each weight once.

    The outer variables that a branch reads are those of the float network, so this is for plans without activations.

    Args:
        graph, plan: as for `calibrate`; not changed.
        units: the data, iterated several times.
        walked: result for the main graph, whose weights are not rounded again.
        walk: rounds the weights of one branch.

    Returns:
        `walked` with the weights of the branches, and a refusal for each layer of a scope that cannot run apart.

    Raises:
        NumericError, DataError, ModelError, DeviceError: as `walk` does.
    """
    waiting = _sites_of_scopes(graph, plan)
    if not waiting:
        return walked
    if plan.of_role("activation"):
        refused = tuple(Refusal(WHAT, name, STATIC) for nodes in waiting.values() for name in nodes)
        return replace(walked, refusals=(*walked.refusals, *refused))
    models, refusals = _models(graph, plan, waiting)
    counts = _counts(graph, models, units)
    for model in sorted(models, key=lambda one: -counts[one.branch.scope]):
        keys = {site.key for site in waiting[model.branch.scope].values()} - walked.codes.keys()
        if not keys:
            continue
        if not counts[model.branch.scope]:
            nodes = [name for name, site in waiting[model.branch.scope].items() if site.key in keys]
            refusals += [Refusal(WHAT, name, IDLE) for name in nodes]
            continue
        with canonical_samples(_samples(graph, model, units), units.options) as selected:
            walked_branch = walk(model.graph, model.plan, selected)
        shared = _shared_biases(graph, plan, walked_branch, keys)
        walked = _merged(walked, replace(walked_branch, constants={**walked_branch.constants, **shared}), keys)
    return replace(walked, refusals=(*walked.refusals, *refusals))


def _sites_of_scopes(graph: Graph, plan: Plan) -> dict[str, dict[str, Site]]:
    """Return the weight sites whose rounding looks at inputs by name of the node that reads them, by scope."""
    read = {reader: site for site in plan.of_role("weight") if looks_at_inputs(site) for reader in site.readers}
    by_scope: dict[str, dict[str, Site]] = {}
    for path, body in scopes(graph):
        for node in body.nodes if path and read else ():
            site = read.get(Reader(node.name, LINEAR[node.op].weight)) if node.op in LINEAR else None
            if site is not None:
                by_scope.setdefault(path, {})[node.name] = site
    return by_scope


def _models(
    graph: Graph, plan: Plan, waiting: Mapping[str, Mapping[str, Site]]
) -> tuple[list[BranchModel], list[Refusal]]:
    """Return the branches of the main graph as models, and refusals for the layers of all other scopes."""
    by_path = {branch.scope: branch for branch in branches(graph) if not branch.outer}
    models, refusals = [], []
    for scope, nodes in waiting.items():
        why = LOOP
        branch = by_path.get(scope)
        if branch is not None and branch.never:
            why = IDLE
        elif branch is not None:
            try:
                piece = extract(graph, [], [tensor.name for tensor in branch.body.outputs], scope=scope)
                models.append(BranchModel(branch, piece, _plan_of(plan, {node.name for node in piece.nodes})))
                continue
            except ModelError as error:
                why = Reason("branch-not-alone", f"its branch cannot run apart: {error}: rounded to nearest")
        refusals += [Refusal(WHAT, name, why) for name in nodes]
    return models, refusals


def _plan_of(plan: Plan, nodes: Collection[str]) -> Plan:
    """Return the sites that some nodes read, as sites of a main graph."""
    sites = []
    for site in plan.sites:
        readers = tuple(reader for reader in site.readers if reader.node in nodes)
        if readers:
            sites.append(replace(site, readers=readers, scope=""))
    return replace(plan, sites=tuple(sites), refusals=())


def _counts(graph: Graph, models: list[BranchModel], units: CanonicalSamples) -> dict[str, int]:
    """Return the number of samples that select each branch, by scope."""
    counts = {model.branch.scope: 0 for model in models}
    conditions = [model.branch.condition for model in models]
    for unit, values in run_float(graph, conditions, units, lambda _, values: values):
        for model in models:
            counts[model.branch.scope] += unit.samples * model.selected(values)
    return counts


def _samples(graph: Graph, model: BranchModel, units: CanonicalSamples) -> Iterator[Sample]:
    """Yield the samples that select a branch, with its outer variables as feeds."""
    names = [model.branch.condition, *model.reads]
    for unit, values in run_float(graph, names, units, lambda _, values: values):
        if model.selected(values):
            yield replace(unit, feed={name: np.asarray(values[name]) for name in model.reads})


def _shared_biases(graph: Graph, plan: Plan, found: StreamResult, keys: Collection[str]) -> dict[str, Array]:
    """Return corrected biases for the readers in other branches of the weights `keys`, by name of the constant."""
    biases = biases_of(graph)
    shared: dict[str, Array] = {}
    for site in plan.of_role("weight"):
        own = [biases[reader.node] for reader in site.readers if reader.node in biases] if site.key in keys else []
        for corrected in [bias for bias in own if bias.name in found.constants][:1]:
            others = (bias for bias in own if bias.name not in found.constants)
            alike = (bias for bias in others if np.array_equal(bias.values, corrected.values))
            shared |= {bias.name: found.constants[corrected.name] for bias in alike}
    return shared


def _merged(walked: StreamResult, branch: StreamResult, keys: Collection[str]) -> StreamResult:
    """Return a result with the weights `keys`, corrected biases and refusals of a branch added."""

    def added(before: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        return {**before, **{key: value for key, value in more.items() if key in keys}}

    return replace(
        walked,
        bounds=added(walked.bounds, branch.bounds),
        codes=added(walked.codes, branch.codes),
        scales=added(walked.scales, branch.scales),
        qparams=added(walked.qparams, branch.qparams),
        constants={**branch.constants, **walked.constants},
        gains=added(walked.gains, branch.gains),
        refusals=(*walked.refusals, *branch.refusals),
    )

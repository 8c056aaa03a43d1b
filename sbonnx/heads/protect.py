"""Decision which regions stay float because quantizing them costs more at the outputs than it saves in time.

Every candidate of `HeadLayout` is planned as float, and its error at the judged tensors is measured on a few samples in
simulated quantization, with the scales and codes that were solved: nothing is calibrated or rounded again. A region at
the outputs runs alone, on the stored tensors that enter it. The candidate with the highest gain beyond what its time is
worth is taken, and the others are measured again on top of it, until none pays.

In a network without a head, if the outputs are lost, `costly_layers` chooses the layers that cause most of their error.
The layers after them are rounded again, to their better inputs, and the result is measured.

A region pays if the SQNR of the judged tensors rises by at least `LEAST_GAIN_DB`, and by `GAIN_PER_TIME_DB` times the
share of the estimated time that it adds, if the error falls on most of the samples, and if the network stays faster
than in float (`MOST_OF_FLOAT`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import Any, Final

import numpy as np

from sbonnx.calib.engine.samples import Samples
from sbonnx.graph import Graph, query
from sbonnx.heads.costly_layers import costly_layers
from sbonnx.heads.losses import EndError, Quantized, RegionTrials, Values
from sbonnx.heads.recognition import HeadLayout, HeadRegion, float_outputs, head_layout
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.report.codes import Note, Reason

MOST_OF_FLOAT: Final = 0.9
"""Largest estimated time of the network with a region in float, as a share of that in float: the estimate is within a
tenth of measured times."""

SAMPLES: Final = 8
"""Samples on which errors are measured."""

PROBES: Final = 4
"""Samples on which the errors of layers alone are measured."""

MUCH_DB: Final = 6.0
"""Gain that outputs without a head must need for layers to stay float: their error is twice what accuracy is kept with.

ppocr3_rec_en needs 11, silero_sequence 13. Of less, no model of `benchmarks.zoo` was seen to lose its metric."""

NAMED: Final = 3
"""Maximum number of layers that a note lists."""

LEAST_GAIN_DB: Final = 1.0
"""Smallest gain for which a region stays float. Measured on fastestdet: gains below it do not change detections."""

GAIN_PER_TIME_DB: Final = 8.0
"""Gain in dB that doubling the time of the network must bring; a region that adds 12.5 % must bring 1 dB."""

CLEAN_DB: Final = 40.0
"""SQNR from which nothing is tried: errors of 1 % of the outputs. Above it more dB do not change the detections of
ultraface."""

MOST_OF_SAMPLES: Final = 0.75
"""Share of the samples on which the error must fall."""

HEAD: Final = "head-worth-float"
"""Code of the refusals at nodes that stay float."""

REASON: Final = "quantizing the {} costs more at the outputs than it saves"
"""Reason of the refusals at nodes that stay float, with the name of the region."""

Replan = Callable[[Mapping[str, Reason]], Plan]
"""Makes the plan with some nodes in float: reasons by name of the node → plan."""


@dataclass(frozen=True)
class Protected:
    """A plan with the regions that pay in float, and its solution.

    Attributes:
        plan, solution: unchanged if no region pays.
        note: one line for the report.
    """

    plan: Plan
    solution: Solution
    note: Note


@dataclass(frozen=True)
class _Trial:
    """A region in float on top of what was taken before."""

    region: HeadRegion
    network: Quantized
    error: EndError
    gain_db: float
    added: float
    helped: float

    @property
    def excess_db(self) -> float:
        """Gain beyond what the added time must bring; negative if the region does not pay."""
        pays = self.gain_db >= LEAST_GAIN_DB and self.helped >= MOST_OF_SAMPLES
        return self.gain_db - GAIN_PER_TIME_DB * max(self.added, 0.0) if pays else -1.0


def protect(
    graph: Graph,
    network: Quantized,
    samples: Samples,
    replan: Replan,
    time_of: Callable[[Plan], float],
) -> Protected | None:
    """Leave the regions in float that pay. Return None if the network has no head.

    Args:
        graph: simplified and fused; not changed.
        network: the plan of the graph and its solution.
        samples: of the graph, of which `SAMPLES` are run, chosen by their contents.
        replan: see `Replan`.
        time_of: estimated time of a plan, in any unit.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    layout = head_layout(graph)
    if layout is None or not network.plan.of_role("activation"):
        return None
    feeds = [dict(unit.feed) for unit in samples.first(SAMPLES)]
    options = samples.options
    search = _RegionSearch(graph, layout, RegionTrials(graph, layout.ends, feeds, options.device), replan, time_of)
    options.progress.start("outputs by region", None)
    taken, best, before, after = search.run(network)
    return Protected(best.plan, best.solution, _note(layout, taken, before, after, len(feeds)))


def protect_layers(
    graph: Graph,
    network: Quantized,
    samples: Samples,
    replan: Replan,
    times_of: Callable[[Values], Callable[[Plan], Sequence[float]]],
    solve: Callable[[Plan], Solution],
    missing_db: Callable[[Sequence[Values], Sequence[Values]], float],
) -> Protected | None:
    """Leave the layers in float that lose the outputs of a network without a head. Return None if nothing is gained.

    Args:
        graph, network, samples, replan: see `protect`.
        times_of: estimates of the time of a plan for a sample, relative to float; the least favourable one counts.
        solve: rounds the weights of a plan with the ranges that were measured.
        missing_db: gain that outputs need, by those in float and quantized, by sample; 0: they are good.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    ends = float_outputs(graph)
    if not ends or not network.plan.of_role("activation") or head_layout(graph) is not None:
        return None
    feeds, options = [dict(unit.feed) for unit in samples.first(SAMPLES)], samples.options
    trials = RegionTrials(graph, ends, feeds, options.device)
    outputs = trials.run(network)
    missing = missing_db(trials.floats, outputs)
    if missing < MUCH_DB:
        return None
    options.progress.start("outputs by layer", None)
    times = times_of(feeds[0])
    old = times(network.plan)

    @cache
    def in_float(nodes: frozenset[str]) -> Plan:
        return replan(dict.fromkeys(nodes, Reason("head-worth-float", REASON.format("layer"))))

    def whole(nodes: frozenset[str]) -> frozenset[str]:
        """Add nodes in integers whose output nodes in float read: only in float they write it as it is."""
        plan = in_float(nodes)
        read = {site.tensor for site in plan.of_role("activation") for reader in site.readers if reader.node in nodes}
        writers = {node.name for node in graph.nodes if read & {tensor.name for tensor in node.outputs}} - nodes
        return whole(nodes | writers) if writers else nodes

    def added(plan: Plan) -> float:
        """Return the share of time that a plan adds; inf if it gives up the gain over float."""
        pairs = list(zip(old, times(plan), strict=True))
        if any(new > max(before, MOST_OF_FLOAT) for before, new in pairs):
            return inf
        return max(((new - before) / before for before, new in pairs), default=0.0)

    def excess_db(nodes: frozenset[str], before: float, after: float) -> float:
        gain = min(after - before, missing)
        return gain - GAIN_PER_TIME_DB * max(added(in_float(nodes)), 0.0) if gain >= LEAST_GAIN_DB else -1.0

    nodes = costly_layers(graph, network, ends, feeds[:PROBES], options.device, whole, excess_db)
    if not nodes:
        return None
    region, plan = HeadRegion(_named(graph, nodes), nodes), in_float(nodes)
    protected = Quantized(plan, solve(plan))
    before, after = trials.error(outputs), trials.error(trials.run(protected))
    trial = _Trial(region, protected, after, before.gain_db(after), added(plan), _helped(before, after))
    if trial.excess_db <= 0:
        return None
    note = Note("head-left-float", _gained(region.name, trial.added, before, after))
    return Protected(plan, protected.solution, note)


def _named(graph: Graph, nodes: Collection[str]) -> str:
    """Return the name of the layers for the report, in the order of the graph."""
    names = [node.name for node in graph.nodes if node.name in nodes]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{'layer' if len(names) == 1 else 'layers'} {', '.join(map(repr, names[:NAMED]))}{more}"


@dataclass
class _RegionSearch:
    """Greedy choice of regions."""

    graph: Graph
    layout: HeadLayout
    trials: RegionTrials
    replan: Replan
    time_of: Callable[[Plan], float]

    def run(self, network: Quantized) -> tuple[list[_Trial], Quantized, EndError, EndError]:
        """Return the regions taken, the network with them in float, and the errors before and after."""
        taken: list[_Trial] = []
        entries = {name for region in self.layout.regions for name in self.trials.entries(self._changed(region.nodes))}
        tensors = self.trials.run(network, sorted(entries))
        first = last = self.trials.error(tensors)
        while last.sqnr_db < CLEAN_DB:
            trials = [
                self._trial(region, [taken_region.region for taken_region in taken], network, tensors, last)
                for region in self._open(taken)
            ]
            paying = [trial for trial in trials if trial is not None and trial.excess_db > 0]
            if not paying:
                break
            best = max(paying, key=lambda trial: trial.excess_db)
            taken.append(best)
            network, last = best.network, best.error
            if not self._open(taken):
                break
            tensors = self.trials.run(network, sorted(entries))
        return taken, network, first, last

    def _open(self, taken: Sequence[_Trial]) -> list[HeadRegion]:
        done = frozenset().union(*(trial.region.nodes for trial in taken))
        return [region for region in self.layout.regions if not region.nodes <= done]

    def _changed(self, nodes: frozenset[str]) -> frozenset[str]:
        """Return the nodes whose results can differ if `nodes` read other values: these, and all nodes after them."""
        return (self.layout.flow.after(nodes) | nodes) & self.trials.nodes

    def _trial(
        self,
        region: HeadRegion,
        taken: Sequence[HeadRegion],
        network: Quantized,
        known: Sequence[Values],
        before: EndError,
    ) -> _Trial | None:
        """Measure a region in float.

        Return None if that changes nothing, needs scales that were not solved, or gives up the gain over float.
        """
        plan = self.replan(
            {
                name: Reason("head-worth-float", REASON.format(float_region.name))
                for float_region in (*taken, region)
                for name in float_region.nodes
            }
        )
        solution = restricted(network, plan, self.graph)
        moved = frozenset(reader.node for reader in _reads(network.plan) ^ _reads(plan))
        if solution is None or not moved:
            return None
        old, new = self.time_of(network.plan), self.time_of(plan)
        if new > max(old, MOST_OF_FLOAT * self.time_of(Plan(()))):
            return None
        changed, nodes = Quantized(plan, solution), self._changed(moved)
        whole = any(name not in known[0] for name in self.trials.entries(nodes)) or not self.trials.can_enter(nodes)
        error = self.trials.error(self.trials.run(changed) if whole else self.trials.run_after(changed, nodes, known))
        added = (new - old) / old if old else 0.0
        return _Trial(region, changed, error, before.gain_db(error), added, _helped(before, error))


def _helped(before: EndError, after: EndError) -> float:
    """Return the share of the samples on which the error falls."""
    return float(np.mean(after.by_sample < before.by_sample))


def restricted(network: Quantized, plan: Plan, graph: Graph) -> Solution | None:
    """Return the part of a solution that a plan with fewer sites needs, under the keys of that plan.

    Scales stay, also of groups that lost members. Layers whose weight is float again get their own biases back.
    Return None if the plan has a site that the known plan does not have.
    """
    keys = {_identity(site, network.plan): site.key for site in network.plan.sites}
    identities = {site.key: _identity(site, plan) for site in plan.sites}
    if not keys.keys() >= set(identities.values()):
        return None
    old = {key: keys[identity] for key, identity in identities.items()}
    solution = network.solution

    def kept(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: values[before] for key, before in old.items() if before in values}

    weighted = {reader.node for site in plan.of_role("weight") for reader in site.readers}
    lost = {reader.node for site in network.plan.of_role("weight") for reader in site.readers} - weighted
    own = _inputs_of(graph, lost) - _inputs_of(graph, weighted)
    return replace(
        solution,
        qparams=kept(solution.qparams),
        codes=kept(solution.codes),
        bounds=kept(solution.bounds),
        bias_scales=kept(solution.bias_scales),
        gains=kept(solution.gains),
        unread=solution.unread & _reads(plan),
        constants={name: values for name, values in solution.constants.items() if name not in own},
    )


def _inputs_of(graph: Graph, nodes: Collection[str]) -> set[str]:
    return {tensor.name for node in query.all_nodes(graph) if node.name in nodes for tensor in node.inputs}


def _identity(site: Site, plan: Plan) -> tuple[object, ...]:
    """Return what makes a site the same in two plans: everything but its key, group and readers."""
    sites = plan.by_key()
    follows = tuple(sites[key].tensor for key in site.follows or ())
    return site.tensor, site.role, site.scope, site.spec, follows


def _reads(plan: Plan) -> frozenset[Reader]:
    return frozenset(reader for site in plan.sites for reader in site.readers)


def _note(layout: HeadLayout, taken: Sequence[_Trial], before: EndError, after: EndError, samples: int) -> Note:
    """Return the line of the report."""
    head = f"head ({layout.kind})"
    if not taken:
        why = "needs to stay float" if before.sqnr_db >= CLEAN_DB else "pays in float"
        return Note(
            "head-quantized", f"{head}: no part of it {why}; outputs at {before.sqnr_db:.1f} dB on {samples} samples"
        )
    names = " and ".join(trial.region.name for trial in taken)
    return Note("head-left-float", f"{head}: {_gained(names, sum(trial.added for trial in taken), before, after)}")


def _gained(names: str, added: float, before: EndError, after: EndError) -> str:
    """Say what regions in float change."""
    change = f"{before.sqnr_db:.1f} → {after.sqnr_db:.1f} dB on {len(after.by_sample)} samples"
    return (
        f"{names} left in float: outputs {change}, for about {max(added, 0.0):.0%} more time; "
        "HEADS: none quantizes everything"
    )

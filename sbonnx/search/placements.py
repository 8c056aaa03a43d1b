"""Regions of a network whose placement in float or in integers may be faster than the estimate of `plan_times` says.

A placement is the set of nodes that compute in float though they have integer kernels (FLOAT_NODES). Regions are what a
wrong price of a kernel or of a conversion moves: the partition for other prices, blocks between conversions, stem and
branches of the head, all operators of one kind, and single operators at a conversion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from sbonnx import pipeline
from sbonnx.backends import Backend
from sbonnx.calib.observers import OBSERVERS
from sbonnx.graph import Graph, Node, query
from sbonnx.heads.losses import Quantized
from sbonnx.heads.protect import HEAD, restricted
from sbonnx.ops import LINEAR, MOVES_DATA, RECTIFIERS
from sbonnx.options import RunOptions
from sbonnx.planning import Plan, Planner, costs_of
from sbonnx.planning.make import FASTER
from sbonnx.planning.node_infos import node_infos
from sbonnx.planning.times import GraphTimes, integer_nodes
from sbonnx.recipe import Recipe
from sbonnx.recipe.regions import Flow
from sbonnx.search.latency_advice import slowed
from sbonnx.stages.state import PipelineState, Prepared

SLOWER: Final = (0.5, 0.7, 0.85, 1.15, 1.3, 1.6, 2.0)
"""Factors on the prices of integer kernels, for which the partition is computed again."""

MOST_REGIONS: Final = 200
"""Regions around a placement whose times are estimated."""

HOPELESS: Final = 1.25
"""Estimated time over that of the best placement from which a placement is not tried; estimates are off by less."""

Placement = frozenset[str]
"""Names of the nodes in float."""


@dataclass(frozen=True)
class PlacementChange:
    """Nodes to place otherwise.

    Attributes:
        name: what they are, in words.
        floats, integers: nodes to place in float, and in integers.
    """

    name: str
    floats: Placement = frozenset()
    integers: Placement = frozenset()

    def applied(self, placement: Placement) -> Placement:
        """Return a placement with the region placed otherwise."""
        return (placement - self.integers) | self.floats


@dataclass(frozen=True)
class PlacementRegions:
    """Regions of one graph.

    Attributes:
        graph: simplified and fused.
        able: names of the nodes that have integer kernels.
    """

    graph: Graph
    able: frozenset[str]

    def around(self, integers: frozenset[str]) -> Iterator[PlacementChange]:
        """Yield the regions whose kind of kernel can be exchanged.

        Args:
            integers: names of the nodes that compute in integers.
        """
        floats = self.able - integers
        if floats:
            yield PlacementChange("all operators that have integer kernels in integers", integers=self.able)
        yield PlacementChange("all operators in float", floats=self.able)
        for block in self._blocks(integers):
            if block != integers:
                yield PlacementChange(f"{_named('block', block, self.graph)} in float", floats=block)
        for block in self._blocks(floats):
            yield PlacementChange(f"{_named('block', block, self.graph)} in integers", integers=block)
        for name, names in self._parts():
            if names & integers and not integers <= names:
                yield PlacementChange(f"{name} in float", floats=names & self.able)
            if names & floats:
                yield PlacementChange(f"{name} in integers", integers=names & self.able)
        for node in self._nodes():
            if node.name in integers and self._neighbours(node) - integers:
                yield PlacementChange(f"{node.op} '{node.name}' in float", floats=frozenset({node.name}))
            elif node.name in floats and self._neighbours(node) & integers:
                yield PlacementChange(f"{node.op} '{node.name}' in integers", integers=frozenset({node.name}))

    def _nodes(self) -> list[Node]:
        return [node for node in query.all_nodes(self.graph) if node.name in self.able]

    def _parts(self) -> Iterator[tuple[str, frozenset[str]]]:
        """Yield stem, branches of the head, and operators of one kind."""
        flow = Flow(node_infos(self.graph))
        yield "stem", flow.stem
        yield "head", flow.head
        yield from ((f"branch '{layer}' of the head", branch) for layer, branch in flow.branches.items())
        depthwise = frozenset(node.name for node in self._nodes() if query.is_depthwise(node))
        yield "depthwise convolutions", depthwise
        for op in sorted({node.op for node in self._nodes()}):
            yield f"{op} operators", frozenset(node.name for node in self._nodes() if node.op == op) - depthwise

    def _blocks(self, names: frozenset[str]) -> list[frozenset[str]]:
        """Return the connected parts of `names`; moves of data and rectifiers connect their neighbours."""
        open_names, blocks = {node.name for node in self._nodes() if node.name in names}, []
        for node in self._nodes():
            if node.name not in open_names:
                continue
            block, waiting = set[str](), [node]
            while waiting:
                member = waiting.pop()
                if member.name not in block:
                    block.add(member.name)
                    passes = member.op in MOVES_DATA | RECTIFIERS
                    waiting += [
                        other
                        for other in _adjacent(member)
                        if other.name in names or (other.op in MOVES_DATA | RECTIFIERS and not passes)
                    ]
            open_names -= block
            blocks.append(frozenset(block & names))
        return blocks

    def _neighbours(self, node: Node) -> frozenset[str]:
        return frozenset(other.name for other in _adjacent(node))


def _adjacent(node: Node) -> Iterable[Node]:
    """Return the nodes that write the inputs of a node, or read its outputs."""
    writers = [query.producer(tensor) for tensor in node.inputs]
    readers = [reader for tensor in node.outputs for reader, _ in query.readers(tensor)]
    return [writer for writer in writers if writer is not None] + readers


def _named(kind: str, names: frozenset[str], graph: Graph) -> str:
    """Name a set of nodes by its number, and its first layer."""
    nodes = [node for node in query.all_nodes(graph) if node.name in names]
    first = next((node for node in nodes if node.op in LINEAR), nodes[0])
    return f"{kind} of {len(nodes)} from '{first.name}'"


@dataclass(frozen=True)
class PlacementSpace:
    """Placements of one graph: their plans, estimated times and files.

    Attributes:
        full: solved with integers wherever the runtime has kernels.
        planner, regions: of its graph.
        times: estimated; None: unknown.
        options: of runs.
    """

    full: PipelineState
    planner: Planner
    regions: PlacementRegions
    times: GraphTimes | None
    options: RunOptions

    @classmethod
    def of(cls, full: PipelineState, recipe: Recipe, backend: Backend, options: RunOptions) -> PlacementSpace:
        """Return the placements of a graph that was solved with a recipe whose FLOAT_NODES is empty."""
        graph, costs = full.prepared.graph, costs_of(recipe, backend)
        able = frozenset(integer_nodes(graph.nodes, full.prepared.plan))
        planner = Planner(graph, recipe, backend, observers=frozenset(OBSERVERS))
        times = None if costs is None else GraphTimes.of(graph.nodes, query.output_names(graph), costs)
        return cls(full, planner, PlacementRegions(graph, able), times, options)

    def ordered(self, best: Placement, cuts: Sequence[PlacementChange], seen: Set[Placement]) -> list[PlacementChange]:
        """Return the regions that were not tried and may pay, those with the least estimated time first."""
        regions = [*cuts, *islice(self.regions.around(self.regions.able - best), MOST_REGIONS)]
        now = self._time(best)
        estimates: dict[Placement, tuple[float, PlacementChange]] = {}
        for region in regions:
            placement = region.applied(best)
            if placement not in seen and placement not in estimates:
                estimates[placement] = (self._time(placement) / now if now else 1.0, region)
        rows = sorted(estimates.values(), key=lambda row: row[0])
        return [region for estimate, region in rows if estimate < HOPELESS]

    def _time(self, placement: Placement) -> float:
        return 0.0 if self.times is None else self.times.of_division(self.regions.able - placement)

    def written(self, placement: Placement) -> PipelineState | None:
        """Return the state of a placement, with the scales and codes of `full`; None if it needs others."""
        state, plan = self.full, self.planner.plan(dict.fromkeys(placement, FASTER))
        solution = restricted(Quantized(state.prepared.plan, state.solution), plan, state.prepared.graph)
        if solution is None:
            return None
        state = replace(state, prepared=replace(state.prepared, plan=plan), solution=solution)
        return pipeline.run(pipeline.INSERT, state, self.options)


def placement_of(plan: Plan) -> Placement:
    """Return the nodes that a plan leaves in float because integers would be slower, or not worth the loss."""
    codes = ("slower-in-integers", HEAD)
    return frozenset(refusal.where for refusal in plan.refusals if refusal.code in codes)


def partitions(prepared: Prepared, recipe: Recipe, able: Placement) -> Iterator[PlacementChange]:
    """Yield the partitions for other prices of integer kernels, with and without regions of heads in float."""
    heads = frozenset(refusal.where for refusal in prepared.plan.refusals if refusal.code == HEAD)
    for factor in SLOWER:
        backend = slowed(prepared.backend, factor)
        plan = Planner(prepared.graph, recipe, backend, observers=frozenset(OBSERVERS)).plan()
        for protected in (frozenset[str](), heads) if heads else (frozenset[str](),):
            floats = (placement_of(plan) | protected) & able
            head = ", protected regions of the head in float" if protected else ""
            yield PlacementChange(
                f"partition with integers at {factor:g} times their price{head}", floats, able - floats
            )

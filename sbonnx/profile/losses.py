"""What each layer loses: alone, by its weights, by its activations, and with all that was lost before it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sbonnx.graph import Graph, Tensor
from sbonnx.graph.query import dtype, scopes
from sbonnx.plan.types import Plan, Reader, Role, Site, Solution
from sbonnx.profile.checkers import Checker, Measure, kind_of, make_measure
from sbonnx.profile.numbers import PARTS, Part, Solved, uses_of
from sbonnx.profile.pieces import Known, Piece
from sbonnx.profile.rows import COLUMNS, Column, LayerLoss, Profile
from sbonnx.profile.walk import MEMORY, Sample, Values, Walk
from sbonnx.spec import Array

PART_OF: Final[dict[Column, Part]] = {"alone": "both", "weights": "weights", "activations": "activations"}
"""What is quantized of a layer for each figure; for "gathered" it is the whole network."""


UNTYPED: Final = "it gives, or its branch reads, a tensor of unknown type, which cannot wait for a later layer"


@dataclass(frozen=True)
class _Seen:
    """The outputs of a layer on one feed: in float, and by figure; whether the quantized network did not come by."""

    reference: Values
    found: Mapping[Column, Values]
    strayed: bool = False


@dataclass
class _Sums:
    """The measures of one layer."""

    checker: Checker
    measures: dict[Column, Measure] = field(default_factory=dict)
    feeds: int = 0
    strayed: int = 0
    apart: int = 0

    def all_of(self, feeds: Iterable[_Seen]) -> _Sums:
        """Itself, with every feed counted."""
        for seen in feeds:
            self.feeds += 1
            self.strayed += seen.strayed
            for column, values in seen.found.items():
                measure = self.measures.setdefault(column, make_measure(self.checker))
                self.apart += compare(measure, values, seen.reference)
        return self

    def filled(self, row: LayerLoss) -> LayerLoss:
        """The row with its figures."""
        values = {column: measure.result() for column, measure in self.measures.items()}
        return replace(
            row,
            alone=values.get("alone"),
            weights=values.get("weights"),
            activations=values.get("activations"),
            gathered=values.get("gathered"),
            feeds=self.feeds,
        )


def losses(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    checker: Checker = "sqnr",
    columns: Sequence[Column] = COLUMNS,
    limit: int | None = None,
    device: str = "cpu",
    memory: str | int = MEMORY,
    threads: int | None = None,
) -> Profile:
    """The loss of each node that reads something quantized, branches of If included, measured at its outputs.

    Each layer runs on the float activations that it reads, which wait from the layer before: the network runs once in
    float, once quantized where "gathered" is asked for, and each layer once more for each other column. Time is linear
    in layers and feeds; memory is `memory` and the values of one layer.

    Args:
        graph: the prepared float graph; not changed.
        plan, solution: what is quantized, and how.
        data: feeds, walked once; the first `limit` are used.
        checker: a name of `sbonnx.profile.MEASURES`, or a function of (quantized, float) outputs, which is called
            once a layer, output, column and feed, and averaged.
        columns: what to measure.
        memory: bytes for activations that wait; past it they go to disk.
        threads: feeds that run at a time, each on one thread; None: as many as cores.

    Raises:
        RecipeError: there is no such measure.
        DataError: there are no feeds, or the model cannot run on one.
    """
    kind_of(checker)
    uses = uses_of(plan, solution)
    rows = rows_of(graph, uses)
    everything = Solved(plan, solution) if "gathered" in columns else None
    ends = _Ends(checker, [] if everything is None else graph.outputs)
    walk: Walk[_Seen] = Walk(
        graph,
        rows,
        reads=uses,
        replaced=solution.constants,
        quantized=everything,
        wanted=tuple(ends.measures),
        device=device,
        memory=memory,
        threads=threads,
    )
    parts = {column: Solved(plan, solution, PART_OF[column]) for column in columns if column in PART_OF}
    layers: list[LayerLoss] = []
    notes: list[str] = []
    for piece, seen in walk(data, _looking(parts, uses), limit=limit, end=ends.add):
        sums = _Sums(checker).all_of(seen)
        row = sums.filled(rows[piece.step.layer])
        layers.append(row)
        notes.extend(_notes(row, sums, walk.feeds))
    seen_layers = {row.node for row in layers}
    notes.extend(f"'{name}' was not measured: {UNTYPED}" for name in rows if name not in seen_layers)
    return Profile(checker, tuple(layers), ends.values(), walk.feeds, (*notes, *ends.notes()))


def _looking(parts: Mapping[Column, Solved], uses: Mapping[Reader, Site]) -> Callable[[Piece, Sample], _Seen]:
    """Runs a layer on one feed for each figure that it can have."""
    needs: dict[Column, Role] = {"weights": "weight", "activations": "activation"}
    has = {role: {reader.node for reader, site in uses.items() if site.role == role} for role in needs.values()}

    def look(piece: Piece, sample: Sample) -> _Seen:
        layer = piece.step.layer
        known: Known = {}
        found: dict[Column, Values] = {
            column: piece.run(sample.inputs, numbers, known=known)
            for column, numbers in parts.items()
            if column not in needs or layer in has[needs[column]]
        }
        if sample.gathered is not None:
            found["gathered"] = sample.gathered
        return _Seen(sample.outputs, found, strayed=sample.strayed)

    return look


class _Ends:
    """The measures of the network's outputs."""

    def __init__(self, checker: Checker, outputs: Sequence[Tensor]) -> None:
        self.measures = {tensor.name: make_measure(checker) for tensor in outputs if dtype(tensor) is not None}
        self._missed = 0

    def add(self, floats: Values, quantized: Values) -> None:
        """One feed."""
        for name, measure in self.measures.items():
            reference = {name: floats[name]} if name in floats else {}
            self._missed += compare(measure, quantized, reference)

    def values(self) -> dict[str, float]:
        """By output; those that hold no numbers are left out."""
        found = {name: measure.result() for name, measure in self.measures.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def notes(self) -> list[str]:
        """What could not be compared."""
        why = "outputs have another shape than in float, or are missing, and were not compared"
        return [f"{self._missed} {why}"] if self._missed else []


def rows_of(graph: Graph, uses: Mapping[Reader, Site]) -> dict[str, LayerLoss]:
    """A row without figures for each node with a quantized input, by name."""
    reads: dict[str, dict[int, Site]] = {}
    for reader, site in uses.items():
        reads.setdefault(reader.node, {})[reader.index] = site
    rows = {}
    for scope, body in scopes(graph):
        for node in body.nodes:
            if node.name in reads:
                sites = [site for _, site in sorted(reads[node.name].items()) if site.role != "bias"]
                label = ", ".join(dict.fromkeys(site.spec.label() for site in sites))
                rows[node.name] = LayerLoss(node.name, node.op, node.outputs[0].name, scope, label)
    return rows


def _notes(row: LayerLoss, sums: _Sums, feeds: int) -> Iterator[str]:
    """What is to be known of a layer's figures."""
    if sums.feeds < feeds and not row.scope:
        yield f"'{row.node}' ran on {sums.feeds} of {feeds} feeds"
    elif sums.feeds < feeds:
        yield f"'{row.node}' lies in a branch that was taken on {sums.feeds} of {feeds} feeds"
    if sums.strayed:
        yield f"'{row.node}': the quantized network takes another branch on {sums.strayed} feeds"
    if sums.apart:
        yield f"'{row.node}': {sums.apart} outputs have another shape than in float and were not compared"


def node_errors(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    checker: Checker,
    alone: bool,
    part: Part = "both",
    device: str = "cpu",
) -> dict[str, float]:
    """Error of each node with a quantized input, by its name, as the ancestor's profiler reports it.

    Args:
        checker: see `losses`.
        alone: only this node's inputs and weight are quantized (async); else all before it too (sync).
        part: of those what is quantized. With all before it, of the whole network.
    """
    column: Column = next(name for name, one in PART_OF.items() if one == part)
    if not alone and part != "both":
        plan = replace(plan, sites=tuple(site for site in plan.sites if site.role in PARTS[part]))
        solution = replace(solution, constants={} if part == "activations" else solution.constants)
    wanted: Column = column if alone else "gathered"
    found = losses(graph, plan, solution, data, checker=checker, columns=(wanted,), device=device)
    values = {row.node: row.value(wanted) for row in found.layers}
    return {name: value for name, value in values.items() if value is not None}


def compare(measure: Measure, quantized: Values, reference: Values) -> int:
    """Add the outputs that are numbers to a measure; how many could not be compared, for their shape."""
    apart = 0
    for name, ref in reference.items():
        if getattr(ref, "dtype", None) is None or ref.dtype.kind not in "fiuV":  # V: bfloat16
            continue
        if name not in quantized or quantized[name].shape != ref.shape:
            apart += 1
        else:
            measure.add(quantized[name], ref)
    return apart

"""Losses per layer (isolated in total, by weights, by activations; accumulated) and errors of quantized activations."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Final

from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.quantized.fake_quant import quantize_reads
from sbonnx.graph import Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.edit import Names
from sbonnx.graph.extract import extract
from sbonnx.graph.query import bodies, dtype, scopes, shape, tensors_by_name
from sbonnx.metrics import ErrorSum
from sbonnx.planning.types import Plan, Reader, Role, Site, Solution
from sbonnx.profiling.checkers import COLUMNS, Checker, Measure, Profile, kind_of, make_measure
from sbonnx.profiling.pieces import StepSession
from sbonnx.profiling.variants import PARTS, Part, Variant, solved, uses_of
from sbonnx.profiling.walk import DEFAULTS, LayerSample, Values, Walk, WalkOptions
from sbonnx.report import LayerError, Note
from sbonnx.report.details import Column, LayerLoss
from sbonnx.spec import Array

PART_OF: Final[dict[Column, Part]] = {"alone": "both", "weights": "weights", "activations": "activations"}
"""Quantized part of a layer for each figure; for "gathered" the whole network is quantized."""

UNTYPED: Final = "it gives, or its branch reads, a tensor of unknown type, which cannot be stored for a later layer"


@dataclass(frozen=True)
class _LayerOutputs:
    """Outputs of a layer on one feed: in float, and by figure; `strayed`: the quantized network took another branch."""

    reference: Values
    found: Mapping[Column, Values]
    strayed: bool = False


@dataclass
class _LayerMeasures:
    checker: Checker
    measures: dict[Column, Measure] = field(default_factory=dict)
    feeds: int = 0
    strayed: int = 0
    apart: int = 0

    def add(self, outputs: _LayerOutputs) -> None:
        """Add a feed."""
        self.feeds += 1
        self.strayed += outputs.strayed
        for column, values in outputs.found.items():
            measure = self.measures.setdefault(column, make_measure(self.checker))
            self.apart += compare(measure, values, outputs.reference)

    def filled(self, row: LayerLoss) -> LayerLoss:
        """Return the row with its figures."""
        values: dict[str, Any] = {column: measure.result() for column, measure in self.measures.items()}
        return LayerLoss(**{**vars(row), **values, "feeds": self.feeds})


def losses(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    checker: Checker = "sqnr",
    columns: Sequence[Column] = COLUMNS,
    options: WalkOptions = DEFAULTS,
    end: Callable[[Values, Values], None] | None = None,
) -> Profile:
    """Measure the loss of each node with a quantized input at its outputs, including branches of If.

    Each layer runs on stored float input activations: the network runs once in float, once quantized if "gathered" is
    requested, and each layer once more for each other column. Time is linear in layers and feeds; memory is
    `options.memory` plus the values of one layer.

    Args:
        graph: the prepared float graph; not changed.
        plan, solution: the quantized sites and their parameters.
        data: feeds, iterated once; the first `options.limit` are used.
        checker: a name in `sbonnx.profiling.MEASURES`, or a function of (quantized, float) outputs, which is called
            once per layer, output, column and feed, and averaged.
        columns: figures to measure.
        options: number of feeds, device, memory for stored activations, threads, layers.
        end: called with the outputs of each feed, in float and quantized, in order; for this, "gathered" is required.

    Raises:
        RecipeError: there is no such measure.
        DataError: there are no feeds, or the model cannot run on one.
    """
    kind_of(checker)
    uses = uses_of(plan, solution)
    rows = {name: row for name, row in rows_of(graph, uses).items() if options.nodes is None or name in options.nodes}
    everything = solved(plan, solution) if "gathered" in columns else None
    ends = _Ends(checker, [] if everything is None else graph.outputs)
    walk: Walk[_LayerOutputs] = Walk(
        graph,
        rows,
        quantized=everything,
        wanted=tuple(ends.measures),
        options=options,
    )
    parts = {column: solved(plan, solution, PART_OF[column]) for column in columns if column in PART_OF}
    layers: list[LayerLoss] = []
    notes: list[Note] = []

    def add(floats: Values, quantized: Values) -> None:
        ends.add(floats, quantized)
        if end is not None:
            end(floats, quantized)

    measures: defaultdict[str, _LayerMeasures] = defaultdict(lambda: _LayerMeasures(checker))

    def take(piece: StepSession, outputs: _LayerOutputs) -> None:
        measures[piece.step.layer].add(outputs)

    for piece in walk(data, _looking(parts, uses), take, end=add):
        sums = measures[piece.step.layer]
        row = sums.filled(rows[piece.step.layer])
        layers.append(row)
        notes.extend(_notes(row, sums, walk.feeds))
    seen_layers = {row.node for row in layers}
    notes.extend(
        Note("layer-not-measured", f"'{name}' was not measured: {UNTYPED}") for name in rows if name not in seen_layers
    )
    return Profile(checker, tuple(layers), ends.values(), walk.feeds, (*notes, *ends.notes()))


def losses_alone(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Sequence[Mapping[str, Array]],
    *,
    options: WalkOptions = DEFAULTS,
) -> Profile:
    """Measure the isolated loss of each layer, as the column "alone" of `losses`, with fewer sessions.

    One session runs the float network with a quantized copy of each layer beside it. Layers in branches are measured by
    `losses`, whose arguments these are.
    """
    uses = uses_of(plan, solution)
    rows = rows_of(graph, uses)
    feeds = list(islice(iter(data), options.limit))
    nodes = {node.name: node for node in graph.nodes}
    beside = {
        name: tuple(tensor.name for tensor in nodes[name].outputs if tensor.name and dtype(tensor) is not None)
        for name, row in rows.items()
        if not row.scope and not list(bodies(nodes[name]))
    }
    wanted = [name for names in beside.values() for name in names]
    measures = {name: _LayerMeasures("sqnr") for name in beside}
    with LayerRunner(
        _with_copies(graph, wanted, beside, uses, solution), device=options.device, threads=1, optimisation="off"
    ) as run:
        for feed in feeds if beside else ():
            values = run.run(feed)
            for name, outputs in beside.items():
                floats = {output: values[output] for output in outputs}
                copies = {output: values[_copy_of(output)] for output in outputs}
                measures[name].add(_LayerOutputs(floats, {"alone": copies}))
    layers = [measures[name].filled(rows[name]) for name in beside]
    others = rows.keys() - beside.keys()
    if others:
        nodes_left = replace(options, nodes=others)
        layers += losses(graph, plan, solution, feeds, columns=("alone",), options=nodes_left).layers
    return Profile("sqnr", tuple(layers), {}, len(feeds))


def _with_copies(
    graph: Graph, wanted: Sequence[str], layers: Collection[str], uses: Mapping[Reader, Site], solution: Solution
) -> Graph:
    """Return the network up to the tensors `wanted`, with a quantized copy of each of these layers."""
    piece = extract(graph, [tensor.name for tensor in graph.inputs], wanted)
    names = Names(piece)
    copies: dict[Reader, Site] = {}
    for place, node in reversed(list(enumerate(piece.nodes))):
        if node.name not in layers:
            continue
        name = names.fresh(_copy_of(node.name))
        inputs = list(node.inputs)
        for index, tensor in enumerate(inputs):
            site = uses.get(Reader(node.name, index))
            if site is not None:
                copies[Reader(name, index)] = site
            elif isinstance(tensor, Constant) and tensor.name in solution.constants:
                inputs[index] = Constant(names.fresh(_copy_of(tensor.name)), solution.constants[tensor.name])
        outputs = [
            Variable(_copy_of(tensor.name) if tensor.name else "", dtype(tensor), shape(tensor))
            for tensor in node.outputs
        ]
        piece.nodes.insert(place + 1, Node(node.op, name, dict(node.attrs), inputs, outputs, domain=node.domain))
        piece.outputs.extend(tensor for tensor in outputs if tensor.name)
    quantize_reads(piece, copies, replace(solution, constants={}))
    return piece


def _copy_of(name: str) -> str:
    return f"{name}/alone"


def _looking(
    parts: Mapping[Column, Variant], uses: Mapping[Reader, Site]
) -> Callable[[StepSession, LayerSample], _LayerOutputs]:
    """Return a function that runs a layer on one feed for each figure that applies to it."""
    needs: dict[Column, Role] = {"weights": "weight", "activations": "activation"}
    has = {role: {reader.node for reader, site in uses.items() if site.role == role} for role in needs.values()}

    def look(piece: StepSession, sample: LayerSample) -> _LayerOutputs:
        layer = piece.step.layer
        values: dict[Column, Values] = {
            column: piece.run(sample.inputs, variant)
            for column, variant in parts.items()
            if column not in needs or layer in has[needs[column]]
        }
        if sample.gathered is not None:
            values["gathered"] = sample.gathered
        return _LayerOutputs(sample.outputs, values, strayed=sample.strayed)

    return look


class _Ends:
    def __init__(self, checker: Checker, outputs: Sequence[Tensor]) -> None:
        self.measures = {tensor.name: make_measure(checker) for tensor in outputs if dtype(tensor) is not None}
        self._missed = 0

    def add(self, floats: Values, quantized: Values) -> None:
        """Add one feed."""
        for name, measure in self.measures.items():
            reference = {name: floats[name]} if name in floats else {}
            self._missed += compare(measure, quantized, reference)

    def values(self) -> dict[str, float]:
        """Return the values by output, without outputs that are not numeric."""
        results = {name: measure.result() for name, measure in self.measures.items()}
        return {name: value for name, value in results.items() if not math.isnan(value)}

    def notes(self) -> list[Note]:
        """Return a message about outputs that could not be compared."""
        why = "outputs have another shape than in float, or are missing, and were not compared"
        return [Note("outputs-not-compared", f"{self._missed} {why}")] if self._missed else []


def rows_of(graph: Graph, uses: Mapping[Reader, Site]) -> dict[str, LayerLoss]:
    """Create a row without figures for each node with a quantized input, by name."""
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


def _notes(row: LayerLoss, sums: _LayerMeasures, feeds: int) -> Iterator[Note]:
    if sums.feeds < feeds and not row.scope:
        yield Note("layer-not-always-run", f"'{row.node}' ran on {sums.feeds} of {feeds} feeds")
    elif sums.feeds < feeds:
        yield Note(
            "branch-not-always-taken", f"'{row.node}' is in a branch that was taken on {sums.feeds} of {feeds} feeds"
        )
    if sums.strayed:
        yield Note("other-branch", f"'{row.node}': the quantized network takes another branch on {sums.strayed} feeds")
    if sums.apart:
        yield Note(
            "outputs-not-compared",
            f"'{row.node}': {sums.apart} outputs have another shape than in float and were not compared",
        )


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
    """Measure the error of each node with a quantized input, by its name, as Sparsebit's profiler reports it.

    Args:
        checker: see `losses`.
        alone: only this node's inputs and weight are quantized (async); else everything before it as well (sync).
        part: the part that is quantized; without `alone`, in the whole network.
    """
    column: Column = next(name for name, part_name in PART_OF.items() if part_name == part)
    if not alone and part != "both":
        plan = replace(plan, sites=tuple(site for site in plan.sites if site.role in PARTS[part]))
        solution = replace(solution, constants={} if part == "activations" else solution.constants)
    wanted: Column = column if alone else "gathered"
    profile = losses(
        graph, plan, solution, data, checker=checker, columns=(wanted,), options=WalkOptions(device=device)
    )
    values = {row.node: row.value(wanted) for row in profile.layers}
    return {name: value for name, value in values.items() if value is not None}


def compare(measure: Measure, quantized: Values, reference: Values) -> int:
    """Add the numeric outputs to a measure; return the number of outputs that were skipped for their shape."""
    apart = 0
    for name, ref in reference.items():
        if getattr(ref, "dtype", None) is None or ref.dtype.kind not in "fiuV":  # V: bfloat16
            continue
        if name not in quantized or quantized[name].shape != ref.shape:
            apart += 1
        else:
            measure.add(quantized[name], ref)
    return apart


LOST_DB = 3.0
"""Signal-to-noise ratio in dB below which a tensor is considered lost."""


def errors(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    *,
    limit: int | None = None,
    device: str = "cpu",
) -> tuple[LayerError, ...]:
    """Measure the error of every quantized activation, in topological order.

    Args:
        graph: the prepared float graph.
        data: feeds; the first `limit` are used.
    """
    sites = [site for site in plan.sites if site.role == "activation" and site.key in solution.qparams]
    sites = [site for site in sites if not site.scope]  # tensors of branches exist only if the branch runs
    sums = {site.key: (ErrorSum(), ErrorSum()) for site in sites}  # isolated, accumulated
    for reference, rounded, value in _inner_tensors(graph, plan, solution, islice(iter(data), limit), sites, device):
        for site in sites:
            floats, (alone, gathered) = reference[site.tensor], sums[site.key]
            alone.add(floats, rounded[site.key])
            gathered.add(floats, value[site.tensor])
    return tuple(
        LayerError(
            node=site.readers[0].node if site.readers else "",
            tensor=site.tensor,
            label=site.spec.label(),
            alone_db=sums[site.key][0].sqnr_db,
            sqnr_db=sums[site.key][1].sqnr_db,
            scale=float(solution.qparams[site.key].scale.flat[0]),
        )
        for site in sites
    )


def _inner_tensors(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    data: Iterable[Mapping[str, Array]],
    sites: Sequence[Site],
    device: str,
) -> Iterator[tuple[Values, Values, Values]]:
    """Yield the tensors of `sites` in the float network, each quantized by key, and in the quantized network, by feed.

    Each network is one session, whose activations pass Q/DQ pairs: a session for each layer would cost far more.
    """
    if not sites:
        return
    index = tensors_by_name(graph)
    names = list(dict.fromkeys(site.tensor for site in sites if index[site.tensor].inputs))
    floats, quantized = (
        extract(graph, [graph_input.name for graph_input in graph.inputs], names, index=index) for _ in range(2)
    )
    keys = _add_rounded(floats, sites, solution)
    quantize_reads(quantized, uses_of(plan, solution), solution)
    with ExitStack() as stack:
        runs = [
            stack.enter_context(LayerRunner(piece, device=device, threads=1, optimisation="off", name=f"the {what}"))
            for piece, what in ((floats, "float network"), (quantized, "quantized network"))
            if piece.outputs  # none if graph inputs alone are quantized
        ]
        for feeds in data:
            plain, *rest = (run.run(feeds) for run in runs)
            rounded = {key: plain[name] for key, name in keys.items()}
            yield {**feeds, **plain}, rounded, {**feeds, **(rest[0] if rest else {})}


def _add_rounded(graph: Graph, sites: Sequence[Site], solution: Solution) -> dict[str, str]:
    """Add the tensors of `sites`, quantized, to the outputs of the float network; return their names by site key."""
    index, names, outputs = tensors_by_name(graph), Names(graph), dict[str, str]()
    copies: dict[Reader, Site] = {}
    for site in sites:
        tensor = index[site.tensor]
        name = names.fresh(_copy_of(site.key))
        output = Variable(name, dtype(tensor), shape(tensor))
        graph.nodes.append(Node("Identity", name, {}, [tensor], [output]))
        graph.outputs.append(output)
        copies[Reader(name, 0)] = site
        outputs[site.key] = name
    quantize_reads(graph, copies, replace(solution, constants={}))
    return outputs


def worst_first(rows: Sequence[LayerError]) -> tuple[LayerError, ...]:
    """Sort rows by accumulated error, worst first."""
    return tuple(sorted(rows, key=lambda row: (row.sqnr_db, row.alone_db)))


def first_lost(rows: Sequence[LayerError]) -> LayerError | None:
    """Return the first row, in topological order, whose tensor is lost, or None."""
    return next((row for row in rows if min(row.sqnr_db, row.alone_db) < LOST_DB), None)

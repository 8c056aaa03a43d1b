"""Quantized stream: a second pass that measures every range on inputs from quantized layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import MappingProxyType

from sbonnx.calib.engine.observation import Observation, requests_of
from sbonnx.calib.engine.runner import samples_at_once
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.engine.segments import Segment, inputs_of, needed, produced, reads_of
from sbonnx.calib.qparams.solve import Solve
from sbonnx.calib.quantized.fake_quant import Uses, quantize_reads
from sbonnx.calib.quantized.stream_state import QuantState, RoundSite, StreamResult
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.errors import NumericError
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import bodies, dtype, ordered, scopes
from sbonnx.planning.types import Plan, Reader, Site
from sbonnx.spec import Array, Bounds, QParams


@dataclass(frozen=True)
class QuantizedInputs:
    """Settings of the quantized stream: what is quantized, and what is measured in it.

    Attributes:
        weights: quantize upstream weights.
        activations: fake-quantize upstream activations. Biases are quantized if both are on.
        ranges: measure activation ranges in it; else use the ranges of the float stream.
        rounding: round a weight when the stream reaches its layer, after everything upstream; else round all weights
            before it starts. No rounding used here depends on input activations, so the quantized values are the same.
    """

    weights: bool = True
    activations: bool = True
    ranges: bool = True
    rounding: bool = True

    @property
    def moves_ranges(self) -> bool:
        """Whether any range can differ from that of the float stream."""
        return self.ranges and (self.weights or self.activations)


def walk_quantized(
    graph: Graph,
    plan: Plan,
    samples: Samples,
    floats: Mapping[str, Bounds],
    inputs: QuantizedInputs,
    solve: Solve | None,
) -> StreamResult:
    """Measure the activations of `plan` again, each on inputs from quantized layers.

    The main graph runs in stages, all samples through one before the next: a stage ends where a reader needs a
    quantized tensor whose range is not known yet. Between stages the float values are held in a `TensorStore`; each
    stage fake-quantizes its inputs where its nodes read them quantized.

    Sites inside branches of If keep the float ranges; the branches run quantized with those. If several sites share one
    scale, a stage that runs before some of them are measured uses their float ranges; at the end all are measured. The
    results equal those of `Forward`, except for the last bits of float sums, for any batch size and any number of
    threads.

    Args:
        graph, plan: as for `calibrate`; not changed.
        samples: run once.
        floats: ranges in the float stream by site key; sites without one get none.
        inputs: what is quantized and measured.
        solve: rounds a weight; None: round to nearest.

    Raises:
        NumericError: NaN or Inf caused by quantization; the message names the sample.
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    numbers = QuantState(graph, plan, floats, plainly(solve))
    sites = measured_sites(graph, plan, floats)
    stages = staged(graph, list(sites), quantized_reads(plan))
    if stages:
        if not inputs.rounding:
            numbers.round_all()
        requests = requests_of(chain.from_iterable(sites.values()), numbers.ways)
        options = samples.options
        observation = Observation(graph, stages, requests, device=options.device, threads=samples_at_once(options))
        options.progress.start("quantized stream", samples.data.count)
        with TensorStore(options.memory) as store:
            model = partial(quantized, graph=graph, numbers=numbers, uses=uses_of(plan, inputs))
            try:
                for names in observation.layerwise(samples.units(), store, options.progress, model):
                    sketches = observation.found()
                    for site in chain.from_iterable(sites[name] for name in names):
                        numbers.measure(site, sketches[site.tensor, site.spec.axis])
            except NumericError as error:
                raise NumericError(
                    f"with everything before it quantized, {error}; or calibrate without asym"
                ) from error
    return StreamResult(numbers.bounds, numbers.codes, numbers.scales)


def plainly(solve: Solve | None) -> RoundSite:
    """Wrap `solve` (None: round to nearest) as a rounding that keeps the given scales."""

    def rounded(site: Site, weight: Array, qparams: QParams) -> tuple[Array, QParams]:
        return qparams.quantize(weight) if solve is None else solve(site, weight, qparams), qparams

    return rounded


def quantized(stage: Segment, graph: Graph, numbers: QuantState, uses: Uses) -> Graph:
    """Build the model of a stage, quantized with the current scales."""
    piece = stage.model(graph, numbers.tensors)
    quantize_reads(piece, uses, numbers)
    return piece


def measured_sites(graph: Graph, plan: Plan, floats: Mapping[str, Bounds]) -> dict[str, list[Site]]:
    """Return the sites that the stream measures, by tensor: those whose tensor the main graph computes."""
    makers = produced(graph)
    by_tensor: dict[str, list[Site]] = {}
    for site in plan.of_role("activation"):
        if site.fixed is None and site.key in floats and site.scope == "" and site.tensor in makers:
            by_tensor.setdefault(site.tensor, []).append(site)
    return by_tensor


def quantized_reads(plan: Plan) -> frozenset[Reader]:
    """Return every use that reads an activation of the main graph quantized."""
    return frozenset(reader for site in plan.of_role("activation") if site.scope == "" for reader in site.readers)


def uses_of(plan: Plan, inputs: QuantizedInputs) -> dict[Reader, Site]:
    """Map each use to the site that quantizes it in the stream."""
    on = {"weight": inputs.weights, "activation": inputs.activations, "bias": inputs.weights and inputs.activations}
    return {reader: site for site in plan.sites if on[site.role] for reader in site.readers}


def staged(
    graph: Graph,
    observed: Sequence[str],
    quantized: Collection[Reader],
    after: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> list[Segment]:
    """Cut the main graph into the fewest pieces such that no node reads a quantized tensor of the same piece.

    A node runs in the first piece in which all its inputs are known. A tensor without a known type (a sequence) cannot
    be stored: every piece that reads it recomputes it.

    Args:
        observed: tensors to measure, each computed by a node; nodes that lead to none of them are left out.
        quantized: uses, in branches too, that need the range of the tensor that they read.
        after: by node name, further tensors that an earlier piece must compute before the node runs.
    """
    measured = set(observed)
    nodes = needed(graph, observed)
    makers = {tensor.name: node for node in nodes for tensor in node.outputs if tensor.name}
    untyped = {name for node in nodes for name in (t.name for t in node.outputs if dtype(t) is None)}
    ready: dict[str, int] = {}
    pieces: list[list[Node]] = []
    waits = {node.name: [name for name in after.get(node.name, ()) if name in makers] for node in nodes}
    earlier = [(makers[name], waiting) for waiting in nodes for name in waits[waiting.name]]
    for node in ordered(nodes, earlier):
        awaited = waits[node.name]
        late = {name for name in (*_names_read(node, quantized), *awaited) if name in makers}
        at = max((ready[name] + (name in late) for name in (*reads_of(node), *awaited) if name in makers), default=0)
        ready.update((tensor.name, at) for tensor in node.outputs)
        pieces.extend([] for _ in range(at + 1 - len(pieces)))
        pieces[at].append(node)
    inputs = [inputs_of(piece, makers, untyped) for piece in pieces]
    last = {name: number for number, names in enumerate(inputs) for name in names}
    segments = []
    for number, piece in enumerate(pieces):
        computed = [tensor.name for node in piece for tensor in node.outputs if tensor.name]
        here = tuple(name for name in computed if name in measured)
        outputs = tuple(name for name in computed if name in here or last.get(name, -1) > number)
        segments.append(Segment(inputs[number], outputs, here, tuple(node.name for node in piece)))
    return segments


def _names_read(node: Node, uses: Collection[Reader]) -> set[str]:
    """Return the names of the tensors that a node, or a body inside it, reads by one of `uses`."""
    inside: list[Node] = [node]
    inside.extend(inner for _, body in bodies(node) for _, scope in scopes(body) for inner in scope.nodes)
    return {
        tensor.name
        for inner in inside
        for index, tensor in enumerate(inner.inputs)
        if Reader(inner.name, index) in uses
    }

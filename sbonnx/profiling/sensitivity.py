"""Sensitivity of each layer to other bit widths: the measurements for a mixed-precision search."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, final

from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.qparams.solve import Solve
from sbonnx.graph import Graph
from sbonnx.graph.extract import extract
from sbonnx.graph.query import dtype
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import LINEAR
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.profiling.checkers import Checker, kind_of, make_measure
from sbonnx.profiling.layer_losses import compare
from sbonnx.profiling.pieces import LayerStep, StepSession
from sbonnx.profiling.variants import Candidate, Variant, at_bits, by_candidate, uses_of
from sbonnx.profiling.walk import DEFAULTS, LayerSample, Values, Walk, WalkOptions
from sbonnx.report import Reason, Refusal


@dataclass(frozen=True)
class Sensitivity:
    """Sensitivity of one layer at one candidate, with everything else in float.

    Attributes:
        layer, op: the node's name and type.
        candidate: the bit widths.
        error: value of the requested measure at the layer's outputs.
        network: value of the measure at all outputs of the network together; None if not requested.
        loss: `error` as a loss: 0 is no loss, larger is worse. Comparable between candidates of one layer.
        network_loss: `network` as a loss; comparable between layers.
        sites: keys of the plan's sites that the layer reads; layers that share a site or group have one width there.
        weights: number of values of its quantized weights.
        multiplies: multiplications of a linear op on one feed, mean over feeds; 0 for other ops.
    """

    layer: str
    op: str
    candidate: Candidate
    error: float
    network: float | None
    loss: float
    network_loss: float | None
    sites: tuple[str, ...]
    weights: int
    multiplies: float

    @property
    def bit_operations(self) -> float:
        """Multiplications times the bits of both factors; float counts as 32."""
        return self.multiplies * (self.candidate.weight or 32) * (self.candidate.activation or 32)

    @property
    def weight_bits(self) -> int:
        """Total bits of its quantized weights; float counts as 32. Scales are not counted."""
        return self.weights * (self.candidate.weight or 32)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        figures = {"bit_operations": self.bit_operations, "weight_bits": self.weight_bits}
        return {**asdict(self), "candidate": self.candidate.label, **figures}


@dataclass(frozen=True)
class Sensitivities:
    """Sensitivity rows, by layer in execution order and candidate in the given order, and refusals."""

    rows: tuple[Sensitivity, ...]
    refusals: tuple[Refusal, ...] = ()


def sensitivity(  # noqa: PLR0913 - public entry point
    graph: Graph,
    plan: Plan,
    solution: Solution,
    candidates: Sequence[Candidate],
    data: Any,
    *,
    checker: Checker = "sqnr",
    network: bool = False,
    solve: Solve | None = None,
    solved: Mapping[Candidate, tuple[Plan, Solution]] | None = None,
    options: WalkOptions = DEFAULTS,
) -> Sensitivities:
    """Measure the loss of quantizing each layer alone at each candidate.

    The network runs once in float, and each layer once per candidate on its float input activations. With `network`,
    all ops after each layer run as well: half the network per layer and candidate on average, so time is quadratic in
    layers.

    Args:
        graph: the prepared float graph; not changed.
        plan, solution: quantized uses, and ranges of activations. Layers are the nodes with such uses.
        candidates: bit widths; candidates that are equal for a layer (for example without weights) run only once.
        data: feeds, any reader.
        checker: measure at the outputs of the layers and of the network.
        network: also measure at the network's outputs.
        solve: rounds a weight at a candidate's width (None: to nearest), unless it is the plan's width.
        solved: plan and solution of the whole network at a candidate, used with their ranges, codes and constants.
        options: see `sbonnx.profiling.losses`.

    Returns:
        The rows, and refusals for layers inside branches, which have no figure at the network's outputs.

    Raises:
        RecipeError: no such measure.
        DataError: there are no feeds, or the model cannot run on one.
    """
    kind_of(checker)
    data = data if isinstance(data, Dataset) else read(data, graph)
    uses, networks = uses_of(plan, solution), dict(solved or {})
    variants = {
        candidate: by_candidate(*networks[candidate], candidate)
        if candidate in networks
        else at_bits(graph, plan, solution, candidate, solve)
        for candidate in candidates
    }
    outputs = [tensor.name for tensor in graph.outputs if dtype(tensor) is not None] if network else []
    walk: Walk[_Seen] = Walk(
        graph,
        dict.fromkeys(reader.node for reader in uses),
        wanted=outputs,
        options=options,
    )
    rows: list[Sensitivity] = []
    refusals: list[Refusal] = []
    with closing(_Rest(walk, outputs, options.device)) as rest:
        figures: defaultdict[str, _Figures] = defaultdict(lambda: _Figures(checker, variants))

        def take(piece: StepSession, seen: _Seen) -> None:
            figures[piece.step.layer].add(seen)

        for piece in walk(data, _Look(variants, uses, rest if network else None), take):
            mine = {reader.index: site for reader, site in uses.items() if reader.node == piece.step.layer}
            sites = [mine[index] for index in sorted(mine)]
            rows.extend(figures[piece.step.layer].rows(piece, sites, network))
            if network and piece.step.scope:
                why = Reason("in-branch", "it is in a branch: its loss at the network's outputs was not measured")
                refusals.append(Refusal("sensitivity at the outputs", piece.step.layer, why))
    return Sensitivities(tuple(rows), tuple(refusals))


@dataclass(frozen=True)
class _Seen:
    """One feed at one layer: outputs of the layer and of the network, in float and by candidate."""

    reference: Values
    found: Mapping[Candidate, Values]
    last_reference: Values
    last: Mapping[Candidate, Values]
    multiplies: int


@final
class _Rest:
    """Session for the part of the network after a layer, kept open until the next layer.

    Its inputs are the outputs of the layer and the stored float tensors that are read later.
    """

    def __init__(self, walk: Walk[Any], outputs: Sequence[str], device: str) -> None:
        self._walk, self._outputs, self._device = walk, outputs, device
        self._made = {name: number for number, step in enumerate(walk.steps) for name in step.outputs}
        self._number = {id(step): number for number, step in enumerate(walk.steps)}
        self._lock = threading.Lock()
        self._open: tuple[LayerStep, LayerRunner | None] | None = None

    def run(self, step: LayerStep, sample: LayerSample, outputs: Values) -> Values:
        """Compute the network's outputs that depend on the layer, from its outputs."""
        later = self._walk.read_after(step)
        own = {name: outputs[name] for name in self._outputs if name in outputs}
        with self._lock:
            session = self._session(step, later)
        if session is None:
            return own
        feeds = {name: outputs[name] if name in outputs else sample.read(name) for name in later}
        return {**own, **session.run(feeds)}

    def _session(self, step: LayerStep, later: Sequence[str]) -> LayerRunner | None:
        if self._open is None or self._open[0] is not step:
            self.close()
            here = self._number[id(step)]
            ends = [name for name in self._outputs if self._made.get(name, -1) > here]
            piece = extract(self._walk.graph, later, ends, index=self._walk.index) if ends else None
            name = f"what follows '{step.layer}'"
            runner = None if piece is None else LayerRunner(piece, device=self._device, threads=1, name=name)
            self._open = (step, runner)
        return self._open[1]

    def close(self) -> None:
        """Free the session. A second call is a no-op."""
        if self._open is not None and self._open[1] is not None:
            self._open[1].close()
        self._open = None


@final
class _Look:
    """Run of a layer, and the part after it, at every candidate; candidates equal for the layer run only once."""

    def __init__(self, variants: Mapping[Candidate, Variant], uses: Mapping[Reader, Site], rest: _Rest | None) -> None:
        self._variants, self._rest = variants, rest
        self._weighted = {reader.node for reader, site in uses.items() if site.role == "weight"}
        self._fed = {reader.node for reader, site in uses.items() if site.role == "activation"}

    def __call__(self, piece: StepSession, sample: LayerSample) -> _Seen:
        step = piece.step
        rest = None if step.scope else self._rest  # what follows a branch cannot run as one piece
        runs: dict[tuple[int | None, int | None], tuple[Values, Values]] = {}
        keys = {}
        for candidate, variant in self._variants.items():
            key = (
                candidate.weight if step.layer in self._weighted else None,
                candidate.activation if step.layer in self._fed else None,
            )
            keys[candidate] = key
            if key not in runs:
                outputs = piece.run(sample.inputs, variant)
                runs[key] = (outputs, {} if rest is None else rest.run(step, sample, outputs))
        return _Seen(
            sample.outputs,
            {candidate: runs[key][0] for candidate, key in keys.items()},
            {} if rest is None else rest.run(step, sample, sample.outputs),
            {candidate: runs[key][1] for candidate, key in keys.items()},
            _multiplies(piece, sample) if step.layer in self._weighted else 0,
        )


def _multiplies(piece: StepSession, sample: LayerSample) -> int:
    node = piece.node
    linear = None if node is None else LINEAR.get(node.op)
    weight = None if linear is None else piece.constants().get(linear.weight)
    if node is None or weight is None:
        return 0
    (out,) = list(sample.outputs.values())[:1]
    layer = LinearLayer.of_shape(node.op, node.attrs, weight.shape)
    if isinstance(layer, str):
        return 0
    if layer.op == "ConvTranspose":  # multiplies every input with the outputs of its group
        return int(sample.inputs[node.inputs[0].name].size * math.prod(weight.shape[1:]))
    return int(out.size * layer.inputs)


@final
class _Figures:
    def __init__(self, checker: Checker, candidates: Iterable[Candidate]) -> None:
        self._loss = kind_of(checker).loss
        self._layer = {candidate: make_measure(checker) for candidate in candidates}
        self._network = {candidate: make_measure(checker) for candidate in self._layer}
        self._multiplies, self._feeds = 0, 0

    def add(self, seen: _Seen) -> None:
        self._feeds += 1
        self._multiplies += seen.multiplies
        for candidate, measure in self._layer.items():
            compare(measure, seen.found[candidate], seen.reference)
            compare(self._network[candidate], seen.last[candidate], seen.last_reference)

    def rows(self, piece: StepSession, sites: Sequence[Site], network: bool) -> Iterator[Sensitivity]:
        read = {r.index for site in sites if site.role == "weight" for r in site.readers if r.node == piece.step.layer}
        weights = sum(value.size for index, value in piece.constants().items() if index in read)
        for candidate, measure in self._layer.items():
            error, last = measure.result(), self._network[candidate].result()
            is_measured = network and not math.isnan(last)
            yield Sensitivity(
                layer=piece.step.layer,
                op="" if piece.node is None else piece.node.op,
                candidate=candidate,
                error=error,
                network=last if is_measured else None,
                loss=self._loss(error),
                network_loss=self._loss(last) if is_measured else None,
                sites=tuple(site.key for site in sites),
                weights=weights,
                multiplies=self._multiplies / max(self._feeds, 1),
            )

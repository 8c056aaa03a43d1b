"""Batch-norm tuning: re-estimates batch-norm statistics in the quantized network.

A batch norm computes ``gamma (x - mean) / sqrt(variance + eps) + beta``. After folding, with ``g = gamma /
sqrt(variance + eps)``, its output is ``z = g (x - mean) + beta``. With the statistics of x in the quantized network
instead of those of training it would be

    r (z - E z) + beta,    r = sqrt((Var_float + e) / (Var z + e)),    e = g^2 eps,  Var_float = g^2 variance,

so tuning is a factor and a shift for each channel of z, independent of the layer: the factor is applied to the scales
of its weight (the codes are unchanged), the shift to its bias. Channels with gamma 0 are unchanged.

Source: Hubara et al., Improving post training neural quantization, arXiv 2006.10518, section 4.3 (batch-norm tuning).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import LayerVisitor, run_float, run_layerwise
from sbonnx.calib.engine.runner import LayerRunner, samples_at_once
from sbonnx.calib.engine.samples import CanonicalSamples, Samples
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.quantized.fake_quant import quantize_reads
from sbonnx.calib.quantized.stream import staged
from sbonnx.calib.storage.tensor_store import TensorStore
from sbonnx.correct.biases import with_corrections
from sbonnx.correct.foldable_batchnorms import CHANNELS, Tunable, tunables
from sbonnx.errors import NumericError
from sbonnx.graph import Graph, Node, Variable
from sbonnx.graph.edit import Names, add_constant, replace_input
from sbonnx.graph.query import dtype, readers, tensors_by_name
from sbonnx.options import RunOptions
from sbonnx.planning.types import Plan, Reader, Solution
from sbonnx.report import Note, Reason, Refusal
from sbonnx.spec import Array, QParams


@dataclass(frozen=True)
class RunningVariance:
    """Mean and variance of each channel. Size and merging cost do not depend on the number of values.

    Attributes:
        count: number of values of each channel.
        mean: float64 (C,).
        squares: sum of squared distances to the mean, float64 (C,).
    """

    count: int
    mean: Array
    squares: Array

    @staticmethod
    def of(x: Array, axis: int) -> RunningVariance:
        """Compute the statistics of one array with its channels along `axis`; sums in float64.

        Deviations are taken from the channel means of this array, which avoids cancellation.
        """
        if axis == 1 and x.ndim > 1:
            rows = x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))
        else:
            rows = np.moveaxis(x, axis, 0).reshape(1, x.shape[axis], x.size // max(x.shape[axis], 1))
        count = rows.shape[0] * rows.shape[2]
        if not count:
            return RunningVariance(0, np.zeros(rows.shape[1]), np.zeros(rows.shape[1]))
        mean = rows.mean(axis=(0, 2), dtype=np.float64)
        away = rows - mean[:, None]  # float64
        return RunningVariance(count, mean, np.einsum("ncs,ncs->c", away, away))

    def merge(self, other: RunningVariance) -> RunningVariance:
        """Return the statistics over the values of both.

        Source: Chan, Golub, LeVeque, Algorithms for computing the sample variance, 1983, formula 2.1.
        """
        count = self.count + other.count
        if not count:
            return self
        away = other.mean - self.mean
        share = other.count / count
        return RunningVariance(
            count, self.mean + away * share, self.squares + other.squares + away**2 * (self.count * share)
        )

    @property
    def variance(self) -> Array:
        """Population variance, float64 (C,), as in batch normalization; 0 without values."""
        return self.squares / max(self.count, 1)


Reference = Literal["norm", "float"]


@dataclass(frozen=True)
class Tuned:
    """Affine correction of one tensor: ``factor * tensor + shift``, float64 (C,) each."""

    factor: Array
    shift: Array


def tune_norms(
    graph: Graph,
    plan: Plan,
    solution: Solution,
    samples: Samples,
    *,
    reference: Reference = "float",
) -> Solution:
    """Return `solution` with tuned batch norms: new weight scales, biases, and parameters of unfolded batch norms.

    The main graph runs in stages, all samples through one stage before the next. A stage ends at a normalized tensor
    whose statistics are not known yet, so the work is one pass over the data for any number of layers. Everything
    upstream is quantized and tuned. Activations between stages are stored in a `TensorStore`; other memory does not
    grow with the data. The results are identical for any order of the samples, batch size and number of threads.

    Args:
        graph: prepared; `record_normals` was called before its batch norms were folded.
        plan, solution: as given to and by `calibrate`.
        samples: calibration samples, on which statistics are measured.
        reference: target statistics of the tuned tensors: "norm", mean and variance according to gamma and beta (as the
            ancestor); "float", those of the float network on the same data, which takes one more pass.

    Raises:
        NumericError: quantization caused NaN or Inf; the message names the sample.
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    why: Reason | None = None
    if not graph.info.normals:
        why = Reason(
            "no-batch-norm",
            "it has no batch norm with known parameters: they were folded before the export, or there were none",
        )
    elif not solution.qparams:
        why = Reason(
            "nothing-quantized", "nothing is quantized: batch norms have the statistics that they were trained with"
        )
    if why is not None:
        return replace(solution, refusals=(*solution.refusals, Refusal("tune batch norms", "the model", why)))
    tunable_norms, refusals = tunables(graph, plan, solution)
    if not tunable_norms:
        return replace(solution, refusals=(*solution.refusals, *refusals))
    walk = _BatchNormTuning(
        graph, plan, solution, {tunable.tensor: tunable for tunable in tunable_norms}, samples.options
    )
    with samples.canonical() as units:
        float_ = walk.float_spreads(units) if reference == "float" else {}
        with TensorStore(units.memory) as store:
            tuned = walk.run(units, float_, store)
    constants: dict[str, Array] = {}
    qparams: dict[str, QParams] = {}
    for name, tunable in walk.tunables.items():
        change = tunable.change(tuned[name].factor, tuned[name].shift, solution)
        constants.update(change.constants)
        qparams.update(change.qparams)
    tuned_solution = with_corrections(plan, tensors_by_name(graph), solution, constants, qparams)
    note = Note(
        "norms-tuned", f"{len(tunable_norms)} batch norms were tuned to the statistics of the quantized network"
    )
    return replace(tuned_solution, refusals=(*tuned_solution.refusals, *refusals), notes=(*tuned_solution.notes, note))


def tuned_to(one: Tunable, seen: RunningVariance, float_: RunningVariance | None, solution: Solution) -> Tuned:
    """Compute factor and shift from the measured statistics; `float_`: target, None for those of the batch norm."""
    normal = one.normal
    mean, variance = (normal.mean, normal.std**2) if float_ is None else (float_.mean, float_.variance)
    below = seen.variance + normal.epsilon
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.sqrt((variance + normal.epsilon) / below)
    factor = np.where((below > 0) & (factor > 0) & np.isfinite(factor), factor, 1.0)
    factor = one.allowed(factor, solution)
    return Tuned(factor, mean - factor * seen.mean)


class _BatchNormTuning(LayerVisitor[dict[str, RunningVariance]]):
    """State of one run of `tune_norms`.

    Attributes:
        tunables: by tensor, in the order of the graph.
        tuned: corrections so far.
        seen: statistics of the samples so far.
    """

    def __init__(
        self, graph: Graph, plan: Plan, solution: Solution, tunables: Mapping[str, Tunable], options: RunOptions
    ) -> None:
        self.graph, self.plan, self.solution = graph, plan, solution
        self.tunables, self.options = tunables, options
        self.tuned: dict[str, Tuned] = {}
        self.seen: dict[str, RunningVariance] = {}
        self.index = tensors_by_name(self.graph)
        self.uses = {
            reader: site
            for site in self.plan.sites
            if site.key in solution.codes or site.key in solution.qparams
            for reader in site.readers
            if reader not in solution.unread
        }

    def float_spreads(self, units: CanonicalSamples) -> dict[str, RunningVariance]:
        """Measure the statistics in the float network, in one pass."""
        self.options.progress.start("batch norms, float", units.feeds)
        names = list(self.tunables)

        def spreads(unit: Sample, known: Mapping[str, Any]) -> dict[str, RunningVariance]:
            return self._spreads(known, names, unit, "")

        for _, variances in run_float(self.graph, names, units, spreads):
            self._merge(variances)
        return self._merged()

    def run(
        self, units: CanonicalSamples, float_: Mapping[str, RunningVariance], store: TensorStore
    ) -> dict[str, Tuned]:
        """Run all stages and return the correction of each tensor."""
        names = list(self.tunables)
        reads = frozenset(Reader(node.name, i) for name in names for node, i in readers(self.index[name]))
        stages = staged(self.graph, names, reads)
        self.options.progress.start("batch norms, quantized", units.feeds)
        self.stages = stages
        threads = samples_at_once(self.options)
        for stage in run_layerwise(stages, units, [store], self, threads, self.options.progress):
            seen = self._merged()
            for name in stage.observed:
                self.tuned[name] = tuned_to(self.tunables[name], seen[name], float_.get(name), self.solution)
        return self.tuned

    def open(self, stack: ExitStack, number: int, segment: Segment) -> Sequence[LayerRunner | None]:
        """Open the session of a stage, with everything before it quantized and tuned."""
        piece, device = self._quantized(segment, self.tuned), self.options.device
        return [stack.enter_context(LayerRunner(piece, device=device, threads=1, name="the quantized model"))]

    def visit(self, number: int, unit: Sample, streams: Sequence[dict[str, Any]]) -> dict[str, RunningVariance]:
        """Compute the statistics of one sample."""
        return self._spreads(streams[0], self.stages[number].observed, unit, " with everything before it quantized")

    def take(self, number: int, unit: Sample, result: dict[str, RunningVariance]) -> None:
        """Merge the statistics of a sample."""
        self._merge(result)

    def _merge(self, spreads: Mapping[str, RunningVariance]) -> None:
        for name, spread in spreads.items():
            self.seen[name] = self.seen[name].merge(spread) if name in self.seen else spread

    def _merged(self) -> dict[str, RunningVariance]:
        """Return the merged statistics, and start again."""
        seen, self.seen = self.seen, {}
        return seen

    def _spreads(
        self, known: Mapping[str, Any], names: Sequence[str], unit: Sample, how: str
    ) -> dict[str, RunningVariance]:
        """Compute the statistics of one sample."""
        variances = {name: RunningVariance.of(known[name], CHANNELS) for name in names}
        for name, spread in variances.items():
            if not np.isfinite(spread.squares).all():
                raise NumericError(f"'{name}' holds NaN or infinite values at {unit.where}{how}: fix the model or data")
        return variances

    def _quantized(self, stage: Segment, tuned: Mapping[str, Tuned]) -> Graph:
        """Create the model of a stage: inputs that are tuned tensors are corrected, and everything is quantized."""
        piece = stage.model(self.graph, self.index)
        names = Names(piece)
        for tensor in list(piece.inputs):
            if tensor.name in tuned:
                _tune(piece, tensor, tuned[tensor.name], self.tunables[tensor.name].rank, names)
        quantize_reads(piece, self.uses, self.solution)
        return piece


def _tune(piece: Graph, tensor: Variable, tuned: Tuned, rank: int, names: Names) -> None:
    """Insert ``factor * input + shift`` between an input of a piece and all its readers, in place."""
    uses = readers(tensor)
    kind: Any = dtype(tensor)
    nodes: list[Node] = []
    for op, values in zip(("Mul", "Add"), (tuned.factor, tuned.shift), strict=True):
        along = values.astype(kind).reshape([-1 if axis == CHANNELS else 1 for axis in range(rank)])
        name = names.fresh(f"{tensor.name}/tuned_{op}")
        source = nodes[-1].outputs[0] if nodes else tensor
        out = Variable(names.fresh(f"{name}_out"), kind, tensor.shape)
        nodes.append(Node(op, name, {}, [source, add_constant(piece, f"{name}_number", along, names)], [out]))
    for node, place in uses:
        replace_input(node, place, nodes[-1].outputs[0])
    piece.nodes[:0] = nodes

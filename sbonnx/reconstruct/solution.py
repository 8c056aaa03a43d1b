"""`reconstruct`: computes scales, zero points and quantized weights from measured ranges."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.engine.samples import CanonicalSamples, Samples
from sbonnx.calib.qparams.solve import Solve, solution_of
from sbonnx.calib.quantized.stream import QuantizedInputs, walk_quantized
from sbonnx.calib.quantized.stream_state import StreamResult
from sbonnx.graph import Graph
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning.types import Plan, Solution
from sbonnx.reconstruct.branch_models import walk_branches
from sbonnx.reconstruct.layer_fit import Reconstruction, gain_notes
from sbonnx.reconstruct.layerwise_rounding import walk_rounding
from sbonnx.reconstruct.stored_layers import rounded_weights
from sbonnx.reconstruct.unrolled_experts import unroll
from sbonnx.report.codes import Note


@dataclass(frozen=True)
class WeightRounding:
    """Settings of weight rounding: the method, and the inputs that it sees.

    Attributes:
        solve: rounds a weight given its scales; None: round to nearest.
        inputs: measure a second time, on inputs from quantized layers; None: only in the float network.
        reconstruction: round weights using the input activations of their layers; None: by `solve` alone.
    """

    solve: Solve | None = None
    inputs: QuantizedInputs | None = None
    reconstruction: Reconstruction | None = None


def reconstruct(
    graph: Graph,
    plan: Plan,
    samples: Samples,
    ranges: MeasuredRanges,
    rounding: WeightRounding,
) -> Solution:
    """Compute the solution of `plan`: round all weights and derive every scale and zero point.

    Args:
        graph, plan: as for `calibrate`; not changed.
        samples: run again if rounding or `rounding.inputs` requires it. With a cache, a run that was killed continues
            after the last layer that it rounded by inputs.
        ranges: result of `calibrate`.
        rounding: how weights are rounded.

    Raises:
        NumericError, DataError, ModelError, DeviceError: see `walk_quantized` and `walk_rounding`.
        DataError, OutputError: the folder of the cache cannot be used, see `SketchCache`.
    """
    walked = StreamResult(ranges.bounds, {}, {})
    notes: tuple[Note, ...] = ()
    if rounding.reconstruction is not None:
        settings = rounding.reconstruction
        stored = rounded_weights(graph, plan, samples, ranges, (rounding.inputs, settings))
        with samples.canonical(settings.samples) as sorted_units:

            def walk(model: Graph, sites: Plan, units: CanonicalSamples) -> StreamResult:
                mine = stored if stored is None or model is graph else stored.part(model.nodes[0].name)
                loops = unroll(model, sites)
                result = walk_rounding(loops.graph, loops.plan, units, ranges, settings, rounding.inputs, mine)
                return loops.joined(result, sites)

            walked = walk(graph, plan, sorted_units)
            walked = walk_branches(graph, plan, sorted_units, walked, walk)
        notes = () if stored is None else tuple(note for note in stored.notes if note not in ranges.notes)
    elif rounding.inputs is not None and rounding.inputs.moves_ranges:
        walked = walk_quantized(graph, plan, samples, ranges.bounds, rounding.inputs, rounding.solve)
    solution = solution_from(graph, plan, ranges, walked, rounding.solve)
    return replace(solution, notes=(*solution.notes, *notes))


def solution_from(
    graph: Graph, plan: Plan, ranges: MeasuredRanges, walked: StreamResult, solve: Solve | None = None
) -> Solution:
    """Compute the solution of the ranges and quantized values of a stream; `solve` rounds the other weights."""
    solution = solution_of(
        plan,
        tensors_by_name(graph),
        walked.bounds,
        walked.solve(solve),
        chosen=walked.qparams,
        constants=walked.constants,
    )
    gains = {key: gain for key, gain in walked.gains.items() if key in solution.codes}
    return replace(
        solution,
        samples=ranges.samples,
        refusals=(*ranges.refusals, *walked.refusals, *solution.refusals),
        notes=(*ranges.notes, *solution.notes, *gain_notes(gains)),
        gains=gains,
    )


__all__ = ["QuantizedInputs", "Reconstruction", "WeightRounding", "reconstruct"]

"""Calibration of a graph and its plan in one call: ranges, then the solution."""

from __future__ import annotations

from typing import Any

from sbonnx.calib import calibrator
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.qparams.solve import Solve
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.planning import Plan, Solution
from sbonnx.reconstruct.solution import QuantizedInputs, Reconstruction, WeightRounding, reconstruct


def calibrate(
    graph: Graph,
    plan: Plan,
    data: Any,
    *,
    solve: Solve | None = None,
    asym: QuantizedInputs | None = None,
    rounding: Reconstruction | None = None,
    **options: Any,
) -> Solution:
    """Run both stages as the pipeline does. `options`: those of `RunOptions`."""
    samples = Samples.of(data, graph, RunOptions(**options))
    ranges = MeasuredRanges({})
    if plan.of_role("activation") or rounding is None:
        ranges = calibrator.calibrate(graph, plan, samples)
    return reconstruct(graph, plan, samples, ranges, WeightRounding(solve, asym, rounding))

"""`calibrate`: derives a solution from a plan and data."""

from __future__ import annotations

import os
from typing import Any

from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.engine.segments import Granularity
from sbonnx.calib.qparams.solve import Solve
from sbonnx.calib.quantized.forward import Forward, forward
from sbonnx.calib.quantized.stream import Asym
from sbonnx.graph import Graph
from sbonnx.plan.types import Plan, Solution
from sbonnx.progress import Progress, Silent
from sbonnx.reconstruct.layerwise import Reconstruction


def calibrate(
    graph: Graph,
    plan: Plan,
    data: Any,
    *,
    device: str = "cpu",
    solve: Solve | None = None,
    progress: Progress | None = None,
    granularity: Granularity = "auto",
    memory: str | int = "2 GiB",
    threads: int | None = None,
    workers: int = 1,
    cache: str | os.PathLike[str] | None = None,
    asym: Asym | None = None,
    rounding: Reconstruction | None = None,
) -> Solution:
    """Compute scales, zero points and quantized constants for every site of `plan` from `data`.

    Activations are observed in float onnxruntime sessions over `graph`, and samples are streamed through them. The
    result is bit-identical for any batch size (see `Rows`), number of threads and workers, and, except for the moving
    average, any order of the data.

    Args:
        graph: simplified and fused; not changed.
        plan: the sites to solve.
        data: a `Dataset`, or any input that `read` accepts.
        device: "cpu", "cuda" or "auto".
        solve: rounds a weight given its scales; None: round to nearest.
        progress: updated as feeds complete, and closed at the end.
        granularity: "whole": one session; "budget": sessions whose outputs fit `memory`, each sample run through all of
            them; "layer": all samples run through a layer, then the next; "auto": whole if it fits, else budget.
        memory: bytes for activations.
        threads: samples run at a time, each on one thread; None: number of cores (1 on CUDA).
        workers: processes that share the samples and the threads if there is enough work; see `Shards`.
        cache: folder of the calibration cache, from which an interrupted run is resumed; see `Recall`.
        asym: measure ranges a second time on inputs from quantized layers; see `walk_quantized`. None: float only.
        rounding: round weights using the input activations of their layers; see `walk_rounding`. None: round by
            `solve`.

    Raises:
        DataError: no data, or data that does not fit the model.
        NumericError: NaN or Inf in an activation or weight; the message names the sample and the first layer.
        ModelError, DeviceError: see `LayerRunner`.
    """
    progress = progress or Silent()
    dataset = data if isinstance(data, Dataset) else read(data, graph)
    try:
        with Calibrator(
            graph,
            plan,
            device=device,
            granularity=granularity,
            memory=memory,
            threads=threads,
            workers=workers,
            cache=cache,
        ) as calibrator:
            if plan.of_role("activation") or rounding is None:
                calibrator.observe_all(dataset, progress)
            return _finished(calibrator, dataset, asym, rounding, solve, progress)
    finally:
        progress.close()


def _finished(
    calibrator: Calibrator,
    data: Dataset,
    asym: Asym | None,
    rounding: Reconstruction | None,
    solve: Solve | None,
    progress: Progress,
) -> Solution:
    """Compute the solution; rounding and `asym` run the data again."""
    if rounding is not None:
        return calibrator.finish_rounding(rounding, asym, data, solve, progress)
    if asym is not None:
        return calibrator.finish_asym(asym, data, solve, progress)
    return calibrator.finish(solve)


__all__ = ["Asym", "Calibrator", "Forward", "Reconstruction", "calibrate", "forward"]

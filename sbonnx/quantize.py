"""The pipeline: load, simplify, fuse, plan, calibrate, insert, legalise, save, verify. One function an arrow."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import profile
from sbonnx import verify as proof
from sbonnx.calib import data as datasets
from sbonnx.calib import trt_cache as trt
from sbonnx.calib import walk
from sbonnx.calib.asym import Asym
from sbonnx.calib.feedback import unroll
from sbonnx.calib.progress import Progress
from sbonnx.graph import Graph, query
from sbonnx.graph.staging import staged
from sbonnx.plan import Plan, Solution
from sbonnx.prepare import Prepared, Source, prepare, read_recipe, source_of
from sbonnx.report import Report
from sbonnx.spec import Bounds

OLDEST_OPSET = 7
"""onnxruntime has no kernels for older versions of the operators."""

VERIFY_FEEDS = 64
"""Feeds of the calibration data on which the result is compared with float."""

PROFILE_FEEDS = 8
"""Feeds on which the error of each layer is measured for the report."""


def quantize(
    model: Source,
    data: Any,
    *,
    backend: str | None = None,
    recipe: Any = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    verify: bool = True,
    split: int | None = None,
    progress: Progress | None = None,
    trt_cache: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> Report:
    """Quantize a float ONNX model and prove the result.

    Args:
        model: path or ModelProto, any float ONNX model. Never written to.
        data: calibration data: path or any reader, see `sbonnx.calib.data.read`.
        backend: "onnxruntime" (default), "tensorrt" or "virtual".
        recipe: None (the backend's 8-bit defaults), "auto", a path, or a nested dict in the YAML's keys.
        output: where to write; None keeps the result in memory (``Report.quantized``).
        force: overwrite an existing output.
        verify: check the file and compare it with the float model on the calibration data.
        split: cut arrays with a long leading axis into batches of this many samples.
        progress: told of the calibration's progress.
        trt_cache: where to write TensorRT's calibration-cache file with the ranges of the activations.
        overrides: recipe keys by keyword, such as ``bits="w8a8"`` or ``device="cuda"``.

    Returns:
        The report; ``report.ok`` is False when the result is worse than useful, and says where it begins.

    Raises:
        SbonnxError: one of its kinds, for anything the user can mend. Nothing is left half-written.
    """
    wishes, rules = read_recipe(recipe, backend, overrides)
    target = None if output is None else Path(output)
    if target is not None:
        graphs.check_target(target, inputs=_files(model, data), force=force)
    if trt_cache is not None:
        graphs.check_target(Path(trt_cache), inputs=[*_files(model, data), *_files(output)], force=force)
    prepared = prepare(model, wishes, rules)
    samples = _samples(data, prepared, split)
    solution = _calibrated(prepared, samples, progress)
    if trt_cache is not None:
        trt.write_calibration_cache(trt_cache, _ranges(prepared.plan, solution), force=force)
    quantized = prepared.quantized(solution)
    report = _report(model, target, prepared, solution, quantized)
    with _place(target, prepared.graph.info.files, force) as path:
        graphs.save(quantized, path)
        if target is None:
            report = replace(report, quantized=onnx.load(str(path)))
        if verify:
            with _reference(model, prepared) as source:
                report = _verified(report, source, path, samples, prepared, solution)
    return report


def _samples(data: Any, prepared: Prepared, split: int | None) -> datasets.Dataset:
    """The feeds that the recipe asks for, complete: with the states of a recurrent model."""
    recipe, wishes = prepared.recipe, prepared.recipe.calibration
    if not wishes.feedback:
        return datasets.read(
            data, prepared.graph, split=split, limit=recipe.samples, pick=wishes.pick, seed=wishes.seed
        )
    return unroll(
        data,
        prepared.graph,
        wishes.feedback,
        device=recipe.device,
        split=split,
        limit=recipe.samples,
        pick=wishes.pick,
        seed=wishes.seed,
    )


def _calibrated(prepared: Prepared, samples: datasets.Dataset, progress: Progress | None) -> Solution:
    """The solution, measured as the recipe asks for."""
    wishes = prepared.recipe.calibration
    return walk.calibrate(
        prepared.graph,
        prepared.plan,
        samples,
        device=prepared.recipe.device,
        solve=prepared.round,
        granularity=wishes.granularity,
        memory=wishes.memory,
        threads=wishes.threads,
        workers=wishes.workers,
        cache=wishes.cache,
        asym=Asym(ranges=wishes.asym.ranges, rounding=wishes.asym.rounding) if wishes.asym.enable else None,
        progress=progress,
    )


def _ranges(plan: Plan, solution: Solution) -> dict[str, Bounds]:
    """The range of each quantized activation of the main graph, by tensor: what any of its readers represents."""
    found: dict[str, Bounds] = {}
    for site in plan.of_role("activation"):
        bounds = solution.bounds.get(site.key)
        if site.fixed is not None:
            bounds = Bounds(*(np.asarray(end, np.float32) for end in site.fixed))
        if bounds is not None and not site.scope:
            found[site.tensor] = found[site.tensor].union(bounds) if site.tensor in found else bounds
    return found


@contextmanager
def _place(target: Path | None, inputs: Sequence[Path], force: bool) -> Iterator[Path]:
    """Where the model lies while it is proved: beside its target, or for a while where temporary files lie."""
    if target is not None:
        with staged(target, inputs, force=force) as path:
            yield path
        return
    with tempfile.TemporaryDirectory(prefix="sbonnx-") as folder:
        yield Path(folder) / "quantized.onnx"


@contextmanager
def _reference(model: Source, prepared: Prepared) -> Iterator[Path | bytes]:
    """What the result is held against: the model itself, or lifted where onnxruntime does not run its opset."""
    if prepared.graph.info.original_opset >= OLDEST_OPSET:
        yield source_of(model)
        return
    with tempfile.TemporaryDirectory(prefix="sbonnx-") as folder:
        lifted = Path(folder) / "lifted.onnx"
        graphs.save(graphs.load(model), lifted)
        yield lifted


def _files(*sources: Any) -> list[Path]:
    """Those of the sources that are paths."""
    return [Path(source) for source in sources if isinstance(source, (str, os.PathLike))]


def _report(model: Source, target: Path | None, prepared: Prepared, solution: Solution, quantized: Graph) -> Report:
    plan = prepared.plan
    solved = [site for site in plan.sites if site.key in solution.qparams or site.key in solution.codes]
    counts = {
        "nodes before": prepared.nodes_before,
        "nodes float": sum(len(body.nodes) for _, body in query.scopes(prepared.graph)),
        "nodes quantized": sum(len(body.nodes) for _, body in query.scopes(quantized)),
        "activations": sum(site.role == "activation" for site in solved),
        "weights": sum(site.role == "weight" for site in solved),
        "biases": sum(site.role == "bias" for site in solved),
        "samples": solution.samples,
    }
    if not solved:
        refusals = [*prepared.refusals, *solution.refusals]
        why = f"; first reason: {refusals[0]}" if refusals else ""
        problems: tuple[str, ...] = (f"nothing was quantized{why}",)
    else:
        problems = ()
    return Report(
        model="model in memory" if isinstance(model, onnx.ModelProto) else os.fspath(model),
        output=None if target is None else os.fspath(target),
        backend=prepared.backend.name,
        counts=counts,
        applied=prepared.applied,
        refusals=(*prepared.refusals, *solution.refusals),
        settings=prepared.recipe.to_dict(),
        notes=(*prepared.graph.info.notes, *solution.notes),
        problems=problems,
    )


def _verified(
    report: Report, source: Path | bytes, path: Path, samples: Any, prepared: Prepared, solution: Solution
) -> Report:
    device = prepared.recipe.device
    without = prepared.backend.judged_without
    comparison = proof.check(source, path, samples, device=device, limit=VERIFY_FEEDS, without=without)
    layers = profile.errors(prepared.graph, prepared.plan, solution, samples, limit=PROFILE_FEEDS, device=device)
    problems = [*report.problems, *comparison.problems()]
    if comparison.problems():
        begin = profile.first_lost(layers)
        if begin is not None:
            problems.append(f"it begins at '{begin.tensor}', input of '{begin.node}' ({begin.sqnr_db:.1f} dB)")
    return replace(
        report,
        metrics=comparison.to_dict(),
        layers=tuple(row.to_dict() for row in profile.worst_first(layers)),
        problems=tuple(problems),
    )

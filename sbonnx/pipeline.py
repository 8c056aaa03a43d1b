"""The pipeline: load, simplify, fuse, plan, calibrate, insert, legalise, save, verify."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from sbonnx import graph as graphs
from sbonnx import native as loops
from sbonnx import precision, profile
from sbonnx import verify as proof
from sbonnx.backends import Backend
from sbonnx.backends.tensorrt import calibration_cache as trt
from sbonnx.calib import calibrate as walk
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.held_out import HeldOutSplit, divide, divide_sequences
from sbonnx.calib.recurrent import read_steps, unroll
from sbonnx.correct.batchnorm_tuning import tune_norms
from sbonnx.errors import DataError
from sbonnx.graph import Graph, query
from sbonnx.graph.storage.staging import staged
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.plan import Plan, Site, Solution
from sbonnx.precision.measure import with_magnitudes
from sbonnx.prepare import Prepared, Source, prepare, source_of
from sbonnx.progress import Progress
from sbonnx.recipe import Recipe
from sbonnx.recipe.limits import FLOAT
from sbonnx.report import Refusal, Report
from sbonnx.spec import Bounds
from sbonnx.verify.ort_options import Judged

OLDEST_OPSET = 7
"""Oldest opset that onnxruntime has kernels for."""

COUNTED = "onnxruntime"
"""Backend for which ops without an integer kernel become refusals. For others the count of kernels is only a figure."""

UNCOMPARED = "no data was given: the file was checked and opened at every level, and not compared with float"
"""Note in the report of a mode that needs no data and got none."""

PROFILE_FEEDS = 8
"""Feeds on which the error of each layer is measured for the report."""


def run(
    model: Source,
    data: Any,
    wishes: Recipe,
    rules: Backend,
    *,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    verify: bool = True,
    split: int | None = None,
    progress: Progress | None = None,
    trt_cache: str | os.PathLike[str] | None = None,
) -> Report:
    """Quantize a model with a fixed recipe (no search) and verify the result. Args: as in `sbonnx.quantize`.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    target = None if output is None else Path(output)
    if target is not None:
        graphs.check_target(target, inputs=_files(model, data), force=force)
    if trt_cache is not None:
        graphs.check_target(Path(trt_cache), inputs=[*_files(model, data), *_files(output)], force=force)
    prepared, samples, solution = solve(model, data, wishes, rules, split=split, progress=progress)
    if trt_cache is not None:
        trt.write_calibration_cache(trt_cache, _ranges(prepared.plan, solution), force=force)
    return write(model, prepared, samples, solution, target, force=force, verify=verify)


def write(
    model: Source,
    prepared: Prepared,
    samples: HeldOutSplit | None,
    solution: Solution,
    target: Path | None,
    *,
    force: bool = False,
    verify: bool = True,
) -> Report:
    """Write and verify a calibrated model: insert Q/DQ, legalise, save, and compare the file with `model`.

    Args:
        model: the float model to compare with.
        prepared, solution: of one calibration.
        samples: feeds to compare on, the hold-out set if there is one; None: the file is only checked and opened.
        target: output path; None: the result is returned in the report.
        force, verify: as in `sbonnx.quantize`.

    Raises:
        SbonnxError: a subclass. No partial file is left.
    """
    quantized, unwritten = prepared.written(solution)
    report = _report(model, target, prepared, solution, quantized)
    report = replace(report, refusals=(*report.refusals, *unwritten))
    if verify and samples is None:
        report = replace(report, notes=(*report.notes, UNCOMPARED))
    with _place(target, prepared.graph.info.files, force) as path:
        graphs.save(quantized, path)
        if target is None:
            report = replace(report, quantized=onnx.load(str(path)))
        if verify:
            with _reference(model, prepared) as source:
                report = _proved(report, source, path, samples, prepared, solution, quantized)
    return report


def solve(
    model: Source, data: Any, wishes: Recipe, rules: Backend, *, split: int | None, progress: Progress | None
) -> tuple[Prepared, HeldOutSplit | None, Solution]:
    """Run the pipeline up to calibration: the prepared graph, its feeds (None: none needed), and the solution."""
    prepared = prepare(model, wishes, rules)
    _limits(wishes).check_outputs([output.name for output in prepared.graph.outputs])
    division = divided(data, prepared, split)
    samples = None if division is None else division.fit
    prepared = prepared.equalized(samples, progress)
    solution = prepared.corrected(_calibrated(prepared, samples, progress))
    return prepared, division, _tuned(prepared, samples, solution, progress)


def divided(data: Any, prepared: Prepared, split: int | None) -> HeldOutSplit | None:
    """Read the calibration feeds and split off the hold-out set; a recurrent model is unrolled. None if not needed.

    Raises:
        DataError: there is no data and the recipe measures something.
    """
    recipe, wishes, graph = prepared.recipe, prepared.recipe.calibration, prepared.graph
    if data is None:
        if prepared.needs_data:
            why = "HIGH_PRECISION wants ranges" if recipe.mode != "static" else "MODE: static measures activations"
            raise DataError(f"calibration data is missing: {why}. Give some; MODE: weight_only at fp32 needs none")
        return None
    measures = prepared.needs_data or prepared.reconstruction is not None or recipe.equalize.awq
    share = recipe.verify.held_out if measures else 0.0
    limit, pick, seed = recipe.samples, wishes.pick, wishes.seed
    if not wishes.feedback:
        samples = datasets.read(data, graph, split=split, limit=limit, pick=pick, seed=seed)
        return divide(samples, graph, share, device=recipe.device)
    first = limit if pick == "first" else None
    steps = read_steps(data, graph, wishes.feedback, split=split, limit=first)

    def unrolled(some: Any, part: float) -> datasets.Dataset:
        # random picking comes after the states were computed through all steps
        count = first if limit is None or first is not None else max(1, round(limit * part))
        return unroll(some, graph, wishes.feedback, device=recipe.device, limit=count, pick=pick, seed=seed)

    return divide_sequences(steps, wishes.feedback.values(), share, unrolled)


def _calibrated(prepared: Prepared, samples: datasets.Dataset | None, progress: Progress | None) -> Solution:
    """Calibrate according to the recipe."""
    rounding = prepared.reconstruction
    if samples is None or not (prepared.needs_data or rounding is not None):
        return prepared.without_data()
    wishes = prepared.recipe.calibration
    solution = walk.calibrate(
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
        asym=prepared.asym,
        rounding=rounding,
        progress=progress,
    )
    return with_magnitudes(
        solution,
        prepared.graph,
        prepared.plan,
        samples,
        device=prepared.recipe.device,
        memory=wishes.memory,
        threads=wishes.threads,
        progress=progress,
    )


def _tuned(
    prepared: Prepared, samples: datasets.Dataset | None, solution: Solution, progress: Progress | None
) -> Solution:
    """Tune the batch norms of `solution` if the recipe asks for it."""
    recipe = prepared.recipe
    if not recipe.schedule.bn_tuning:
        return solution
    if samples is None:
        refusal = Refusal("tune batch norms", "SCHEDULE.BN_TUNING", "there are no data to measure their inputs on")
        return replace(solution, refusals=(*solution.refusals, refusal))
    return tune_norms(
        prepared.graph,
        prepared.plan,
        solution,
        samples,
        device=recipe.device,
        threads=recipe.calibration.threads,
        memory=recipe.calibration.memory,
        progress=progress,
    )


def _ranges(plan: Plan, solution: Solution) -> dict[str, Bounds]:
    """Return the range of each quantized activation of the main graph, by tensor: the union over its readers."""
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
    """Yield the path where the model is verified: staged next to its target, or in a temporary folder."""
    if target is not None:
        with staged(target, inputs, force=force) as path:
            yield path
        return
    with temporary_folder() as folder:
        yield folder / "quantized.onnx"


@contextmanager
def _reference(model: Source, prepared: Prepared) -> Iterator[Path | bytes]:
    """Yield the reference model: the model itself, or with a newer opset if onnxruntime cannot run its own."""
    if prepared.graph.info.original_opset >= OLDEST_OPSET:
        yield source_of(model)
        return
    with temporary_folder() as folder:
        lifted = folder / "lifted.onnx"
        graphs.save(graphs.load(model), lifted)
        yield lifted


def _files(*sources: Any) -> list[Path]:
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
    recipe = prepared.recipe
    only_converted = recipe.high_precision != "fp32" and recipe.w.quantizer.bit == recipe.a.quantizer.bit == FLOAT
    if not solved and not only_converted:
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
        sites=tuple(map(_said, solved)),
        applied=prepared.applied,
        refusals=(*prepared.refusals, *solution.refusals),
        settings=prepared.recipe.to_dict(),
        notes=(*quantized.info.notes, *solution.notes, *loops.notes()),
        problems=problems,
    )


def _said(site: Site) -> dict[str, Any]:
    """Return a site as plain values for the report."""
    node = site.readers[0].node if site.readers else ""
    return {
        "tensor": site.tensor,
        "role": site.role,
        "label": site.spec.label(),
        "bits": site.spec.bits,
        "node": node,
    }


def _proved(
    report: Report,
    source: Path | bytes,
    path: Path,
    samples: HeldOutSplit | None,
    prepared: Prepared,
    solution: Solution,
    quantized: Graph,
) -> Report:
    """Run `_verified`. bfloat16 has no onnxruntime kernels: it is compared as float32 rounded to bfloat16."""
    if prepared.plan.float_type != "bf16":
        return _verified(report, source, path, samples, prepared, solution)
    graphs.check_file(path)
    with temporary_folder() as folder:
        stand_in = folder / "emulated.onnx"
        graphs.save(precision.emulated(quantized), stand_in)
        report = _verified(report, source, stand_in, samples, prepared, solution, size=proof.file_bytes(path))
    note = (
        "onnxruntime's CPU has no kernels for bfloat16: the file was checked and not run; figures are of a copy in "
        "float32 whose tensors are rounded to bfloat16"
    )
    return replace(report, notes=(*report.notes, note))


def _verified(
    report: Report,
    source: Path | bytes,
    path: Path,
    samples: HeldOutSplit | None,
    prepared: Prepared,
    solution: Solution,
    size: int | None = None,
) -> Report:
    """Add the verification results of the file at `path` to the report. `size`: bytes of the file it stands in for."""
    device = prepared.recipe.device
    judged = Judged.of(prepared.plan, prepared.backend)
    wishes = prepared.recipe.verify
    comparison = proof.check(
        source,
        path,
        None if samples is None else samples.judged,
        seen=None if samples is None else samples.seen,
        timed=None if samples is None else next(iter(samples.every)),
        device=device,
        limit=wishes.feeds,
        latency=wishes.latency,
        without=judged.without,
        keep_io=prepared.recipe.keep_io or prepared.plan.float_type == "fp32",
        opens=judged.opens,
    )
    if size is not None:
        comparison = replace(comparison, bytes_quantized=size)
    layers: tuple[profile.LayerError, ...] = ()
    if samples is not None:
        comparison = replace(comparison, held_out=samples.count)
        feeds = samples.judged
        layers = profile.errors(prepared.graph, prepared.plan, solution, feeds, limit=PROFILE_FEEDS, device=device)
    problems = [*report.problems, *comparison.problems()]
    if comparison.problems():
        begin = profile.first_lost(layers)
        if begin is not None:
            problems.append(f"it begins at '{begin.tensor}', input of '{begin.node}' ({begin.sqnr_db:.1f} dB)")
    problems.extend(_limits(prepared.recipe).problems(comparison))
    left_float = comparison.kernels.refusals() if comparison.kernels and prepared.backend.name == COUNTED else ()
    return replace(
        report,
        metrics=comparison.to_dict(),
        refusals=(*report.refusals, *left_float),
        layers=tuple(row.to_dict() for row in profile.worst_first(layers)),
        problems=tuple(problems),
        notes=(*report.notes, *judged.notes, *comparison.notes()),
    )


def _limits(recipe: Recipe) -> proof.Limits:
    """Return the limits that the recipe sets for the result."""
    wishes = recipe.verify
    return proof.Limits(
        min_sqnr_db=wishes.min_sqnr_db,
        min_cosine=wishes.min_cosine,
        max_size_ratio=wishes.max_size_ratio,
        max_latency_ratio=wishes.max_latency_ratio,
        min_integer=wishes.min_integer,
        levels_db=wishes.levels_db,
    )

"""Last stage: compare the file with the float model, and check the limits of the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx import precision, profiling
from sbonnx import verify as proof
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.errors import RecipeError
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.linting import View
from sbonnx.linting.ort.numbers import saturates_there
from sbonnx.planning import Plan
from sbonnx.recipe import Recipe
from sbonnx.report import Note, Problem, Refusal
from sbonnx.report.comparison import Portability
from sbonnx.report.searched import Cause
from sbonnx.report.verdict import ON_CPU
from sbonnx.runtimes import chosen_runtimes
from sbonnx.runtimes.portability import portability
from sbonnx.stages.state import PipelineState, Prepared
from sbonnx.system.cpu import target_cpu
from sbonnx.verify.ort_options import VerifyOptions
from sbonnx.verify.runtimes import runtime_here

OLDEST_OPSET: Final = 7
"""Oldest opset that onnxruntime has kernels for."""

UNCOMPARED: Final = Note(
    "not-compared", "no data was given: the file was checked and opened at every level, and not compared with float"
)
"""Note in the report of a mode that needs no data and got none."""

EMULATED: Final = Note(
    "emulated",
    "onnxruntime's CPU has no kernels for bfloat16: the file was checked and not run; figures are of a copy in "
    "float32 whose tensors are rounded to bfloat16",
)
"""Note in the report of a file in bfloat16."""

PROFILE_FEEDS: Final = 4
"""Feeds on which the error of each layer is measured for the report. With 8, the median layer of five networks changes
by 0.1 to 0.2 dB, half of the difference between two sets of 4."""


def limits_of(recipe: Recipe) -> proof.Limits:
    """Return the limits that the recipe sets for the result."""
    section = recipe.verify
    return proof.Limits(
        min_sqnr_db=section.min_sqnr_db,
        min_cosine=section.min_cosine,
        max_size_ratio=section.max_size_ratio,
        max_latency_ratio=section.max_latency_ratio,
        min_integer=section.min_integer,
        levels_db=section.levels_db,
    )


RUNTIMES: Final = "VERIFY.RUNTIMES"


def check_outputs(prepared: Prepared, data: Any) -> None:
    """Check that outputs and runtimes that the recipe names exist, and that outputs can have their tasks.

    Args:
        data: of the request; None without data.

    Raises:
        RecipeError: one does not, or cannot; or runtimes have no data.
        DeviceError: a runtime is not installed.
    """
    section, graph = prepared.recipe.verify, prepared.graph
    if chosen_runtimes(section.runtimes, RUNTIMES) and data is None:
        raise RecipeError(f"{RUNTIMES} compares outputs: give data, or leave it out")
    limits_of(prepared.recipe).check_outputs([output.name for output in graph.outputs])
    proof.check_tasks(section.task, graph, section.head)


def verify(state: PipelineState, path: Path) -> PipelineState:
    """Compare the file at `path` with the float model, and add the results to the report.

    bfloat16 has no onnxruntime kernels: it is compared as float32 rounded to bfloat16.

    Raises:
        ModelError: the file is not valid, or does not load.
    """
    notes = () if state.data is not None else (UNCOMPARED,)
    with reference_of(state) as reference:
        if state.prepared.plan.float_type != "bf16":
            return _verified(state, reference, path, notes=notes)
        graphs.check_file(path)
        with temporary_folder() as folder:
            emulated = folder / "emulated.onnx"
            graphs.save(precision.emulated(state.quantized), emulated)
            verified = _verified(state, reference, emulated, notes=notes, size=proof.file_bytes(path))
    return replace(verified, report=replace(verified.report, notes=(*verified.report.notes, EMULATED)))


@contextmanager
def reference_of(state: PipelineState) -> Iterator[Path | bytes]:
    """Yield the reference model: the model itself, or with a newer opset if onnxruntime cannot run its own."""
    if state.prepared.graph.info.original_opset >= OLDEST_OPSET:
        yield state.request.source
        return
    with temporary_folder() as folder:
        converted = folder / "converted.onnx"
        graphs.save(graphs.load(state.request.model), converted)
        yield converted


def _verified(
    state: PipelineState, reference: Path | bytes, path: Path, *, notes: tuple[Note, ...], size: int | None = None
) -> PipelineState:
    """Add the verification results of the file at `path`. `size`: bytes of the file that it stands in for."""
    prepared, report, samples = state.prepared, state.report, state.data
    recipe = prepared.recipe
    device = "cpu" if prepared.backend.judged_on_cpu else recipe.device
    runtime, why = runtime_here(prepared.backend)
    judged = replace(
        VerifyOptions.of(prepared.plan, prepared.backend),
        device=device,
        runtime=runtime,
        task=recipe.verify.task,
        head=recipe.verify.head,
    )
    depth = proof.Depth(
        latency=recipe.verify.latency and prepared.plan.cpu in ("", target_cpu().name),
        keep_io=recipe.keep_io or prepared.plan.float_type == "fp32",
        limit=recipe.verify.feeds,
    )
    absent = (Note("runtime-absent", f"the file was executed in onnxruntime only. {why}"),) if why else ()
    comparison = proof.check(
        reference,
        path,
        None if samples is None else samples.judged,
        seen=None if samples is None else samples.seen,
        timed=None if samples is None else next(iter(samples.every)),
        depth=depth,
        options=judged,
    )
    comparison = _with_unknown_sums(replace(comparison, cpu=prepared.plan.cpu), prepared.plan, path)
    if size is not None:
        comparison = replace(comparison, bytes_quantized=size)
    labelled, max_loss = state.request.evaluation, state.request.max_loss
    missed: tuple[Problem, ...] = ()
    if labelled is not None:
        models = {"float": reference, "quantized": path}
        evaluation = proof.evaluate(models, labelled, device=device)
        evaluation = replace(evaluation, max_loss=recipe.mixed.max_loss if max_loss is None else max_loss)
        comparison, missed = replace(comparison, evaluation=evaluation), evaluation.problems()
        notes = (*notes, *labelled.notes(prepared.graph))
    layers: tuple[profiling.LayerError, ...] = ()
    if samples is not None:
        calibrated = not samples.count and bool(report.counts.samples)
        comparison = replace(comparison, held_out=samples.count, calibrated=calibrated, doubts=state.doubts)
        layers = profiling.errors(
            prepared.graph, prepared.plan, state.solution, samples.judged, limit=PROFILE_FEEDS, device=recipe.device
        )
    problems = [*report.problems, *comparison.problems(), *comparison.unknown()]
    if comparison.problems():
        begin = profiling.first_lost(layers)
        if begin is not None:
            where = f"'{begin.tensor}', input of '{begin.node}' ({begin.sqnr_db:.1f} dB)"
            problems.append(Problem("first-lost-layer", f"it begins at {where}"))
    answers = _in_runtimes(state, reference, path)
    problems += () if answers is None else answers.problems()
    limits = limits_of(recipe)
    below: tuple[Note, ...] = ()
    problems += [*missed, *limits.problems(comparison)]
    if state.request.pruned is not None:  # the distance of a pruned model from the original was asked for
        below = tuple(Note(problem.code, problem) for problem in limits.quality(comparison))
        problems = [problem for problem in problems if problem.code != "output-far-from-float"]
    # of another runtime, the count of kernels is only a figure, and that the file is slower here says nothing
    own = comparison.runtime == prepared.backend.name
    left_float = comparison.kernels.refusals() if comparison.kernels and own else ()
    measured = [note for note in comparison.notes() if own or note.code != "slower"]
    verified = replace(
        report,
        metrics=comparison,
        refusals=(*report.refusals, *left_float),
        layers=profiling.worst_first(layers),
        portability=answers,
        problems=tuple(problems),
        notes=tuple(dict.fromkeys((*report.notes, *notes, *absent, *below, *judged.notes, *measured))),
    )
    return with_details(replace(state, report=verified, comparison=comparison))


def _in_runtimes(state: PipelineState, reference: Path | bytes, path: Path) -> Portability | None:
    """Run the file in the runtimes of the recipe; None without runtimes."""
    runtimes = chosen_runtimes(state.prepared.recipe.verify.runtimes, RUNTIMES)
    if not runtimes or state.data is None:
        return None
    return portability(reference, path, state.data.judged, runtimes, state.request.evaluation)


def _with_unknown_sums(comparison: proof.Comparison, plan: Plan, path: Path) -> proof.Comparison:
    """Add the operators that can saturate on the CPU that the file is for, if onnxruntime compared no outputs."""
    if (comparison.runtime == ON_CPU and comparison.feeds) or plan.exact_products or not target_cpu().exact:
        return comparison
    saturating = saturates_there(View(graphs.load(path, opset=1), ON_CPU, plan.cpu))
    return replace(comparison, unknown_sums=tuple(node for node, _, _ in saturating))


def with_details(state: PipelineState) -> PipelineState:
    """Add to the report what pages show beyond the figures, if the request asks for it."""
    if not state.request.details:
        return state
    details = _details(state, state.report.refusals)
    report = replace(state.report, details=details, causes=_causes(state, details))
    return replace(state, report=report)


def with_causes(state: PipelineState) -> PipelineState:
    """Add to the report why its worst layers lose what they lose, if a change may help and it does not have them."""
    if not state.report.verdict.repairable or state.report.causes:
        return state
    return replace(
        state, report=replace(state.report, causes=_causes(state, _details(state, (), profiling.losses_to_explain)))
    )


def _causes(state: PipelineState, details: profiling.Details) -> tuple[Cause, ...]:
    prepared, measured = state.prepared, state.ranges or MeasuredRanges({})
    return profiling.causes_of(
        prepared.plan, state.solution, details, prepared.recipe, ranges=measured.bounds, groups=measured.groups
    )


def _details(
    state: PipelineState, refusals: Sequence[Refusal], losses: Callable[..., profiling.Profile] = profiling.losses
) -> profiling.Details:
    """Measure the details of a page by the losses of layers. Scales that are computed at run time have none."""
    prepared, recipe = state.prepared, state.prepared.recipe
    static = recipe.mode != "dynamic" and state.data is not None
    options = profiling.WalkOptions(PROFILE_FEEDS, recipe.device, recipe.calibration.memory, recipe.calibration.threads)
    return profiling.details(
        prepared.graph,
        prepared.plan,
        state.solution,
        state.data.judged if static and state.data is not None else None,
        refusals=refusals,
        options=options,
        profiled=losses,
    )

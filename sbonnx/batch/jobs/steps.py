"""Steps of jobs: shared work becomes one step, and the key of a step is the digest of all its inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Final

from sbonnx.backends import BACKENDS
from sbonnx.batch.accept import code_digest
from sbonnx.batch.file_digests import MISSING, Digests
from sbonnx.batch.jobs.job import Acceptance, Job, JobEvaluation, Step, StepLimits
from sbonnx.batch.jobs.outputs import Inputs, file_name
from sbonnx.batch.redaction import reveal_job, revealed
from sbonnx.batch.remote import fetch, is_url, local_path
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.graph.digests import combined, text
from sbonnx.recipe import AUTO, Recipe, load
from sbonnx.system.cpu import target_cpu
from sbonnx.system.machine_costs import RUNTIMES
from sbonnx.system.python_files import names_function
from sbonnx.version import __version__

FORMAT: Final = "2"
"""Format version of step outputs. It is part of all keys."""


@dataclass(frozen=True)
class JobInputs:
    """Inputs of a job, as digests.

    Attributes:
        model, data: digests of the content; "none" without data.
        recipe: the validated recipe; None if it is invalid, which the step reports.
        recipe_digest: digest of the recipe including overrides, and of its kernel cost file.
        evaluation: digest of the evaluation, its data and its functions; None without one.
    """

    model: str
    data: str
    recipe: Recipe | None
    recipe_digest: str
    evaluation: str | None = None


def steps_of(jobs: Iterable[Job], state: Path | None = None) -> tuple[Step, ...]:
    """Return the steps of jobs, each after its dependencies.

    Jobs that measure the same model on the same data in the same way share one calibrate step, regardless of backend,
    bit width and recipe. Jobs with equal keys share one quantize step, which writes the file of each.

    Args:
        state: folder for cached digests and downloads of URLs.

    Raises:
        RecipeError: an environment variable that a job refers to is not set.
    """
    digests = Digests(state)
    groups: dict[str, list[tuple[Job, JobInputs]]] = {}
    alone: dict[str, list[Job]] = {}
    order: list[tuple[str, Job, JobInputs]] = []
    works: dict[str, str] = {}
    for job in jobs:
        given = job_inputs(job, digests, state)
        key = quantize_key(job, given, digests)
        works[key] = work_key(job, given)
        alone.setdefault(key, []).append(job)
        order.append((key, job, given))
        shared = sketches_digest(job, given)
        if shared is not None:
            groups.setdefault(shared, []).append((job, given))
    _check_external_data([job for _, job, _ in order], digests)
    digests.save()
    first: dict[str, Step] = {}
    behind: dict[str, str] = {}
    for shared, rows in groups.items():
        sharers = tuple(job for job, _ in rows)
        model = sharers[0].model.replace(os.sep, "/").rpartition("/")[2]
        step = Step(calibrate_key(shared, rows), "calibrate", f"calibrate {model}", sharers, (), _widest(sharers))
        first[step.key] = step
        behind.update((job.name, step.key) for job, _ in rows)
    steps: dict[str, Step] = {}
    for key, job, _ in order:
        before = behind.get(job.name)
        if before is not None:
            steps.setdefault(before, first[before])
        if key not in steps:
            group = tuple(alone[key])
            title = f"quantize {job.name}" + (f" and {len(group) - 1} more" if len(group) > 1 else "")
            after = () if before is None else (before,)
            steps[key] = Step(key, "quantize", title, group, after, _widest(group), works[key])
    return tuple(steps.values())


def _check_external_data(jobs: Sequence[Job], digests: Digests) -> None:
    """Check that no output overwrites the external data of a model.

    Raises:
        RecipeError: an output does.
    """
    inputs = Inputs(())
    for name in dict.fromkeys(job.model for job in jobs):
        path = local_path(revealed(name))
        if path is None:
            continue
        for beside in digests.external(path):
            inputs.add(path.parent / beside, f"external data of '{name}'")
    for job in jobs:
        over = inputs.over(revealed(job.output))
        if over is not None:
            raise RecipeError(f"'{job.name}' would overwrite {over}: use another output than '{job.output}'")


def job_inputs(job: Job, digests: Digests, state: Path | None = None) -> JobInputs:
    """Compute the digests of a job's inputs.

    Raises: see `steps_of`.
    """
    real = reveal_job(job)
    model = _digest(real.model, "model", digests, state)
    if real.ort_libraries:
        model = _joined("custom operators", model, *(digests.of(Path(library)) for library in real.ort_libraries))
    data = "none" if real.data is None else _digest(real.data, "data", digests, state)
    if real.preprocess is not None and data not in ("none", MISSING):
        file = real.preprocess_file
        settings = real.preprocess if file is None else _digest(file, "data", digests, state)
        data = MISSING if settings == MISSING else _joined("preprocessed", data, settings)
    recipe: Recipe | None = None
    try:
        recipe = recipe_of(real, state)
        plain = recipe.to_dict()
        for key in ("MEMORY", "THREADS", "CACHE"):  # without effect on results
            plain["CALIBRATION"].pop(key, None)
        plain["CPU"] = target_cpu(recipe.cpu).name  # "this" differs from machine to machine
        costs = BACKENDS[recipe.backend].cost_file(str(recipe.kernel_costs), recipe.cpu)
        own = "" if costs is None else digests.of(Path(costs))
        recipe_digest = _joined("recipe", repr(_sorted(plain)), own)
    except SbonnxError as error:  # the step reports it; the key covers the source and the error
        source = "" if real.recipe in (None, AUTO) else digests.of(_local(str(real.recipe), state, "data"))
        rows = [f"{key}={value}" for key, value in real.overrides]
        recipe_digest = _joined("unfit", real.backend, str(real.recipe), source, *rows, str(error))
    return JobInputs(model, data, recipe, recipe_digest, _evaluation_digest(real.evaluation, digests, state))


def _evaluation_digest(evaluation: JobEvaluation | None, digests: Digests, state: Path | None) -> str | None:
    """Return the digest of an evaluation. The code of functions counts with the modules of their folder."""
    if evaluation is None:
        return None
    plain = [evaluation.labels, evaluation.split, *(evaluation.functions or [evaluation.metric])]
    code = [code_digest(named, digests) for named in evaluation.functions]
    data = _digest(evaluation.data, "data", digests, state)
    if evaluation.vocabulary is not None:
        code.append(_digest(evaluation.vocabulary, "data", digests, state))
    if evaluation.blank is not None:
        code.append(f"blank {evaluation.blank}")
    return _joined("evaluation", evaluation.metric, data, *(repr(part) for part in plain), *code)


def _digest(name: str, what: str, digests: Digests, state: Path | None) -> str:
    """Return the digest of a model or data; `MISSING` if a URL cannot be fetched, so that only its own jobs fail."""
    if names_function(name):  # the file is tracked, the data that it reads is not
        name = name.rpartition(":")[0]
    try:
        path = _local(name, state, what)
    except SbonnxError:  # the step tries again and reports the error
        return MISSING
    return digests.of_model(path) if what == "model" else digests.of(path)


def recipe_of(job: Job, state: Path | None = None) -> Recipe:
    """Load the recipe of a job whose environment variables are substituted.

    Raises:
        RecipeError: see `sbonnx.recipe.load`.
    """
    source = job.recipe if job.recipe in (None, AUTO) else _local(str(job.recipe), state, "data")
    return load(source, backend=job.backend, overrides=[f"{key}={value}" for key, value in job.overrides])


def measures_alone(recipe: Recipe) -> bool:
    """Return whether a recipe needs its own measurements, which cannot be shared with other jobs.

    AUTO and MIXED evaluate on held-out data, equalization by measured ranges changes the activations, and a recipe
    with an explicit cache uses that one.
    """
    equalize = recipe.equalize
    equalizes = equalize.smooth_quant not in (False, AUTO) or equalize.absorb_bias or equalize.awq
    searches = recipe.auto.enable or recipe.mixed.wanted
    return bool(searches or equalizes or recipe.calibration.cache is not None)


def sketches_digest(job: Job, given: JobInputs) -> str | None:
    """Return the name of the folder with a job's shared statistics; None if it measures by itself, or nothing.

    It depends on the model, the data and the calibration settings, but not on backends and bit widths. Jobs that prune
    share the measurements for it, whatever their budgets, in a separate folder.
    """
    recipe = given.recipe
    if recipe is None or recipe.calibration.cache is not None:
        return None
    if not recipe.sparse.wanted and (recipe.mode != "static" or measures_alone(recipe)):
        return None
    if MISSING in (given.model, given.data) or given.data == "none":
        return None
    calibration = recipe.calibration
    feedback = sorted(calibration.feedback.items())
    chosen = [recipe.samples, calibration.pick, calibration.seed, recipe.verify.held_out]
    parts = [given.model, given.data, job.split, *chosen, feedback, recipe.device]
    return _joined(
        "pruning" if recipe.sparse.wanted else "sketches", FORMAT, runtime_version(), *(repr(part) for part in parts)
    )


def work_key(job: Job, given: JobInputs) -> str:
    """Return the digest of all inputs of a job's file and report, without its acceptance thresholds.

    It includes the file name, because a model refers to its external data file by name.
    """
    timed = job.accept.max_latency_ratio is not None and given.recipe is not None and not given.recipe.verify.latency
    parts = [given.model, given.data, job.split, job.backend, given.recipe_digest, file_name(job), timed]
    parts += [] if given.evaluation is None else [given.evaluation]
    return _joined("quantize", FORMAT, __version__, runtime_version(), *(repr(part) for part in parts))


def quantize_key(job: Job, given: JobInputs, digests: Digests) -> str:
    """Return the digest of all inputs of a job's file and verdict; equal to `work_key` without acceptance thresholds.

    Raises:
        RecipeError: see `steps_of`.
    """
    work, accept = work_key(job, given), job.accept
    if accept == Acceptance():
        return work
    code = "" if accept.metric is None else code_digest(revealed(accept.metric), digests)
    return _joined("accept", work, repr(accept), code)


def calibrate_key(shared: str, rows: Iterable[tuple[Job, JobInputs]]) -> str:
    """Return the digest of a calibrate step. It includes the recipes of its jobs, because targets may need more."""
    wanted = sorted({f"{job.backend} {given.recipe_digest}" for job, given in rows})
    return _joined("calibrate", FORMAT, __version__, shared, *wanted)


def _widest(jobs: Sequence[Job]) -> StepLimits:
    """Return the loosest limits of some jobs: no limit if one has none."""
    memory = [job.limits.memory for job in jobs]
    seconds = [job.limits.seconds for job in jobs]
    return StepLimits(
        memory=None if None in memory else max(limit for limit in memory if limit is not None),
        seconds=None if None in seconds else max(limit for limit in seconds if limit is not None),
        retries=max(job.limits.retries for job in jobs),
    )


def _sorted(value: object) -> object:
    """Convert mappings to pairs, recursively; their order is kept, because it can be significant."""
    return [(key, _sorted(value[key])) for key in value] if isinstance(value, Mapping) else value


def _local(name: str, state: Path | None, what: str) -> Path:
    if not is_url(name):
        return Path(name)
    return fetch(name, (state or Path(".sbonnx")) / "remote", what=what).path


@lru_cache(maxsize=1)
def runtime_version() -> str:
    """Return the name and version of the installed onnxruntime, without importing it."""
    for name in RUNTIMES:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "no onnxruntime"


def _joined(tag: str, *parts: str) -> str:
    return text(combined(tag, *(part.encode("utf-8", "surrogatepass") for part in parts)))

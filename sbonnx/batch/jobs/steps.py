"""From jobs to steps: what is worth doing once is one step, and a step's key says what its result depends on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Final

from sbonnx.batch.accept import code_digest
from sbonnx.batch.digests import MISSING, Digests
from sbonnx.batch.jobs.job import Acceptance, Job, Limits, Step
from sbonnx.batch.jobs.outputs import Inputs
from sbonnx.batch.redaction import reveal_job, revealed
from sbonnx.batch.storage.remote import fetch
from sbonnx.batch.storage.urls import is_url, local_path
from sbonnx.errors import RecipeError, SbonnxError
from sbonnx.graph.digests import combined, text
from sbonnx.recipe import AUTO, Recipe, load
from sbonnx.version import __version__

FORMAT: Final = "2"
"""Of what steps leave behind: another one makes all keys new."""

RUNTIMES: Final = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-directml", "onnxruntime-openvino")


@dataclass(frozen=True)
class Given:
    """What a job is made of, as far as a look at its files tells.

    Attributes:
        model, data: digests of the content; of no data, "none".
        recipe: validated; None where it cannot be, and the step says why.
        wishes: digest of the recipe, overrides laid over it.
    """

    model: str
    data: str
    recipe: Recipe | None
    wishes: str


def steps_of(jobs: Iterable[Job], state: Path | None = None) -> tuple[Step, ...]:
    """The steps of some jobs, each behind those that it needs.

    Jobs that measure the same model on the same data in the same way share one calibrate step, whatever their
    backends, widths and recipes. Jobs with equal keys share one quantize step, which writes the file of each.

    Args:
        state: folder in which digests of files are remembered, and into which URLs are fetched.

    Raises:
        RecipeError: an environment variable that a job refers to is not set.
    """
    digests = Digests(state)
    groups: dict[str, list[tuple[Job, Given]]] = {}
    alone: dict[str, list[Job]] = {}
    order: list[tuple[str, Job, Given]] = []
    works: dict[str, str] = {}
    for job in jobs:
        given = look_at(job, digests, state)
        key = quantize_key(job, given, digests)
        works[key] = work_key(job, given)
        alone.setdefault(key, []).append(job)
        order.append((key, job, given))
        shared = sketches_digest(job, given)
        if shared is not None:
            groups.setdefault(shared, []).append((job, given))
    _spare_external([job for _, job, _ in order], digests)
    digests.save()
    first: dict[str, Step] = {}
    behind: dict[str, str] = {}
    for shared, rows in groups.items():
        step = _calibrate(shared, rows)
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


def _spare_external(jobs: Sequence[Job], digests: Digests) -> None:
    """No output over the external data of a model.

    Raises:
        RecipeError: there is one.
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
            raise RecipeError(f"'{job.name}' would write over {over}: give it another output than '{job.output}'")


def look_at(job: Job, digests: Digests, state: Path | None = None) -> Given:
    """What a job is made of.

    Raises: see `steps_of`.
    """
    real = reveal_job(job)
    model = _digest(real.model, "model", digests, state)
    data = "none" if real.data is None else _digest(real.data, "data", digests, state)
    recipe: Recipe | None = None
    try:
        recipe = recipe_of(real, state)
        wishes = _wishes(recipe, digests)
    except SbonnxError as error:  # the step says so; the key is of what was written, and of what is wrong with it
        source = "" if real.recipe in (None, AUTO) else digests.of(_local(str(real.recipe), state, "data"))
        rows = [f"{key}={value}" for key, value in real.overrides]
        wishes = _joined("unfit", real.backend, str(real.recipe), source, *rows, str(error))
    return Given(model, data, recipe, wishes)


def _digest(name: str, what: str, digests: Digests, state: Path | None) -> str:
    """The digest of a model or of data; `MISSING` where a URL cannot be had, which costs its own jobs only."""
    try:
        path = _local(name, state, what)
    except SbonnxError:  # the step asks once more, and says why
        return MISSING
    return digests.of_model(path) if what == "model" else digests.of(path)


def recipe_of(job: Job, state: Path | None = None) -> Recipe:
    """The validated recipe of a job whose values are filled in.

    Raises:
        RecipeError: see `sbonnx.recipe.load`.
    """
    source = job.recipe if job.recipe in (None, AUTO) else _local(str(job.recipe), state, "data")
    return load(source, backend=job.backend, overrides=[f"{key}={value}" for key, value in job.overrides])


def measures_alone(recipe: Recipe) -> bool:
    """Whether a recipe measures on more than its model as it is: what others measure is of no use to it.

    AUTO and MIXED try on data held out; what is equalized by measured ranges has others afterwards; and who names a
    cache wants that one.
    """
    wishes = recipe.equalize
    equalizes = wishes.smooth_quant is not False or wishes.absorb_bias or wishes.awq
    searches = recipe.auto.enable or recipe.mixed.wanted
    return bool(searches or equalizes or recipe.calibration.cache is not None)


def sketches_digest(job: Job, given: Given) -> str | None:
    """Name of the folder with the statistics that a job looks up; None where it measures by itself, or nothing.

    Of the model, the data, and what else they depend on: not of backends and widths.
    """
    recipe = given.recipe
    if recipe is None or recipe.mode != "static" or measures_alone(recipe):
        return None
    if MISSING in (given.model, given.data) or given.data == "none":
        return None
    wishes = recipe.calibration
    feedback = sorted(wishes.feedback.items())
    chosen = [recipe.samples, wishes.pick, wishes.seed, recipe.verify.held_out]
    parts = [given.model, given.data, job.split, *chosen, feedback, recipe.device]
    return _joined("sketches", FORMAT, runtime_version(), *(repr(part) for part in parts))


def work_key(job: Job, given: Given) -> str:
    """Digest of all that a job's file and the figures of its report depend on: not of what the job accepts.

    The name of the file is among it: a model refers to its data file by name.
    """
    timed = job.accept.max_latency_ratio is not None and given.recipe is not None and not given.recipe.verify.latency
    parts = [given.model, given.data, job.split, job.backend, given.wishes, file_name(job), timed]
    return _joined("quantize", FORMAT, __version__, runtime_version(), *(repr(part) for part in parts))


def quantize_key(job: Job, given: Given, digests: Digests) -> str:
    """Digest of all that a job's file and verdict depend on: `work_key` where nothing is asked of the result.

    Raises:
        RecipeError: see `steps_of`.
    """
    work, accept = work_key(job, given), job.accept
    if accept == Acceptance():
        return work
    code = "" if accept.metric is None else code_digest(revealed(accept.metric), digests)
    return _joined("accept", work, repr(accept), code)


def file_name(job: Job) -> str:
    """Name of the file that a job writes, without its folder."""
    bare = job.output.split("?")[0] if is_url(job.output) else job.output
    return bare.replace(os.sep, "/").rstrip("/").rpartition("/")[2]


def calibrate_key(shared: str, rows: Iterable[tuple[Job, Given]]) -> str:
    """Digest of what a calibrate step measures. What its jobs wish for is in it: other targets may want more."""
    wanted = sorted({f"{job.backend} {given.wishes}" for job, given in rows})
    return _joined("calibrate", FORMAT, __version__, shared, *wanted)


def _calibrate(shared: str, rows: Sequence[tuple[Job, Given]]) -> Step:
    """The step that measures for some jobs."""
    jobs = tuple(job for job, _ in rows)
    key = calibrate_key(shared, rows)
    model = jobs[0].model.replace(os.sep, "/").rpartition("/")[2]
    return Step(key, "calibrate", f"calibrate {model}", jobs, (), _widest(jobs))


def _widest(jobs: Sequence[Job]) -> Limits:
    """The widest limits of some jobs: no limit where one has none."""
    memory = [job.limits.memory for job in jobs]
    seconds = [job.limits.seconds for job in jobs]
    return Limits(
        memory=None if None in memory else max(one for one in memory if one is not None),
        seconds=None if None in seconds else max(one for one in seconds if one is not None),
        retries=max(job.limits.retries for job in jobs),
    )


def _wishes(recipe: Recipe, digests: Digests) -> str:
    """Digest of a recipe, and of the file of costs that it may name. How the work is done does not count."""
    plain = recipe.to_dict()
    for key in ("MEMORY", "WORKERS", "THREADS", "CACHE"):
        plain["CALIBRATION"].pop(key, None)
    costs = str(recipe.kernel_costs)
    own = "" if costs in ("bundled", "none") else digests.of(Path(costs))
    return _joined("recipe", repr(_sorted(plain)), own)


def _sorted(value: object) -> object:
    """Mappings as sorted pairs, but those whose order means something."""
    return [(key, _sorted(value[key])) for key in value] if isinstance(value, Mapping) else value


def _local(name: str, state: Path | None, what: str) -> Path:
    """A path; the content of a URL is fetched."""
    if not is_url(name):
        return Path(name)
    return fetch(name, (state or Path(".sbonnx")) / "remote", what=what).path


@lru_cache(maxsize=1)
def runtime_version() -> str:
    """Name and version of the installed onnxruntime, which is not imported for that."""
    for name in RUNTIMES:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "no onnxruntime"


def _joined(tag: str, *parts: str) -> str:
    return text(combined(tag, *(part.encode("utf-8", "surrogatepass") for part in parts)))


__all__ = [
    "Given",
    "calibrate_key",
    "file_name",
    "look_at",
    "quantize_key",
    "recipe_of",
    "sketches_digest",
    "steps_of",
    "work_key",
]

"""Plan of a batch: jobs, steps, up-to-date results, and the estimated duration."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sbonnx.batch.jobs.job import Job, Outcome, Places, Step
from sbonnx.batch.jobs.outputs import Inputs, refusal
from sbonnx.batch.redaction import revealed
from sbonnx.errors import RecipeError


@dataclass(frozen=True)
class BatchRequest:
    """A parsed batch.

    Attributes:
        title: name of the batch.
        places: paths of the batch.
        jobs: all jobs of the batch, in order.
        chosen: the jobs selected for this run.
        steps: steps of the chosen jobs, each after its dependencies. Shared measurements cover all jobs, chosen or
            not, so that they do not depend on the selection.
        folder: that of the job file, or of the outputs; paths below it are relative in texts for people.
    """

    title: str
    places: Places
    jobs: tuple[Job, ...]
    chosen: tuple[Job, ...]
    steps: tuple[Step, ...]
    folder: Path | None = None


@dataclass(frozen=True)
class Todo:
    """The remaining work of a batch.

    Attributes:
        steps: steps to run, each after its dependencies.
        settled: outcomes, by key, of steps that need not run.
        seconds: expected duration of `steps`, by key, if a step with the same title ran before.
        judged: steps whose files exist: only their acceptance thresholds changed, which takes no process.
    """

    steps: tuple[Step, ...]
    settled: Mapping[str, Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)
    judged: tuple[Step, ...] = ()

    def wall(self, workers: int) -> float | None:
        """Estimate the wall time on `workers`. A step without an estimate counts as the mean of its kind.

        Returns None if no step has an estimate.
        """
        if not self.steps:
            return 0.0
        if not self.seconds:
            return None
        mean = {
            kind: _mean(self.seconds[s.key] for s in self.steps if s.kind == kind and s.key in self.seconds)
            for kind in ("calibrate", "quantize")
        }
        usual = _mean(self.seconds.values()) or 0.0
        took = {step.key: self.seconds.get(step.key, mean[step.kind] or usual) for step in self.steps}
        ends: dict[str, float] = {}
        for step in self.steps:
            ends[step.key] = took[step.key] + max((ends.get(need, 0.0) for need in step.after), default=0.0)
        return max(*ends.values(), sum(took.values()) / workers)


def request_of(
    jobs: str | os.PathLike[str] | Iterable[Job],
    *,
    only: str | None = None,
    output: str | os.PathLike[str] | None = None,
) -> BatchRequest:
    """Read the jobs and determine their steps. Creates the state folders.

    Args:
        jobs: a job file, or jobs.
        only: glob of job names.
        output: folder of the batch, if `jobs` is not a file.

    Raises:
        RecipeError: the job file is invalid, no job matches, or the folder is missing.
        SbonnxError: see `steps_of`.
    """
    from sbonnx.batch.jobs.matrix import selected
    from sbonnx.batch.jobs.steps import steps_of

    base: Path | None = None
    if isinstance(jobs, (str, os.PathLike)):
        from sbonnx.batch.jobs.jobfile import read_jobs

        title, folder, all_jobs = read_jobs(jobs)
        base = Path(jobs).absolute().parent
    else:
        if output is None:
            raise RecipeError("a batch of jobs without a job file has no folder: pass output=")
        title, folder, all_jobs = "batch", Path(output).absolute(), tuple(jobs)
        _check(all_jobs, Places(folder))
    chosen = selected(all_jobs, only)
    places = Places(folder)
    return BatchRequest(
        title, places, all_jobs, chosen, _needed(steps_of(all_jobs, places.state), chosen), base or folder
    )


def todo(
    wished: BatchRequest,
    settled: Mapping[str, Outcome],
    past: Mapping[tuple[str, str], float],
    judged: Sequence[Step] = (),
) -> Todo:
    """Determine the remaining steps. Calibration steps are dropped if no remaining step needs them.

    Args:
        settled: outcomes of steps that need not run, by key.
        past: seconds by kind and title, see `state.past`.
        judged: steps of which only the acceptance is to be checked.
    """
    fine = {*settled, *(step.key for step in judged)}
    left = [step for step in wished.steps if step.kind == "quantize" and step.key not in fine]
    read = {need for step in left for need in step.after}
    steps = tuple(
        step for step in wished.steps if step.key not in fine and (step.kind == "quantize" or step.key in read)
    )
    seconds = {step.key: past[step.kind, step.title] for step in steps if (step.kind, step.title) in past}
    return Todo(steps, settled, seconds, tuple(judged))


def _needed(steps: Sequence[Step], chosen: Sequence[Job]) -> tuple[Step, ...]:
    """Return the steps of the chosen jobs and their dependencies."""
    names = {job.name for job in chosen}
    own: dict[str, Step] = {}
    for step in steps:
        if step.kind == "quantize":
            jobs = tuple(job for job in step.jobs if job.name in names)
            if jobs:
                own[step.key] = step if len(jobs) == len(step.jobs) else replace(step, jobs=jobs)
    needed = {need for step in own.values() for need in step.after}
    return tuple(own.get(step.key, step) for step in steps if step.key in own or step.key in needed)


def _check(jobs: Sequence[Job], places: Places) -> None:
    """Check that jobs created in code have distinct names and outputs, and only write to allowed paths.

    Raises:
        RecipeError: they do not.
    """
    if not jobs:
        raise RecipeError("the batch has no jobs: pass at least one")
    for what in ("name", "output"):
        seen: set[str] = set()
        for job in jobs:
            value = getattr(job, what)
            if value in seen:
                raise RecipeError(f"two jobs have the {what} '{value}': use different ones")
            seen.add(value)
    inputs = Inputs(jobs)
    for job in jobs:
        over, told = inputs.over(revealed(job.output)), refusal(job, places)
        if over is not None:
            raise RecipeError(f"'{job.name}' would overwrite '{job.output}', {over}: use another output")
        if told is not None:
            raise RecipeError(f"'{job.name}' has an output, '{job.output[:200]}', that {told}")


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else None

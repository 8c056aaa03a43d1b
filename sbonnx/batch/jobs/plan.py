"""What a batch is to do: its jobs and steps, what is up to date, how long the rest will take."""

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
class Wish:
    """What is asked for.

    Attributes:
        title: name of the batch.
        places: where it keeps what.
        jobs: all that the batch has, in their order.
        chosen: those of them that are wanted now.
        steps: of the chosen jobs, each behind those that it needs. What is shared is measured for all jobs, chosen or
            not, so that it is the same whatever is chosen.
    """

    title: str
    places: Places
    jobs: tuple[Job, ...]
    chosen: tuple[Job, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Todo:
    """A wish held against what is there.

    Attributes:
        steps: to be run, each behind those that it needs.
        settled: outcomes, by key, of steps that need not run.
        seconds: that each of `steps` will take, by key, as far as steps of that name were run before.
    """

    steps: tuple[Step, ...]
    settled: Mapping[str, Outcome]
    seconds: Mapping[str, float] = field(default_factory=dict)

    def wall(self, workers: int) -> float | None:
        """Seconds that all of it will take on so many workers; a step that never ran counts as one like it does on
        the mean. None where nothing is known."""
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


def wish(
    jobs: str | os.PathLike[str] | Iterable[Job],
    *,
    only: str | None = None,
    output: str | os.PathLike[str] | None = None,
) -> Wish:
    """Read the jobs and find their steps; folders of the state are made.

    Args:
        jobs: a job file, or jobs.
        only: a glob of names.
        output: the folder of the batch, where `jobs` are no file.

    Raises:
        RecipeError: the job file cannot be used, no job matches, or the folder is missing.
        SbonnxError: see `steps_of`.
    """
    from sbonnx.batch.jobs.matrix import selected
    from sbonnx.batch.jobs.steps import steps_of

    if isinstance(jobs, (str, os.PathLike)):
        from sbonnx.batch.jobs.jobfile import read_jobs

        title, folder, found = read_jobs(jobs)
    else:
        if output is None:
            raise RecipeError("a batch of jobs without a job file has no folder: give output=")
        title, folder, found = "batch", Path(output).absolute(), tuple(jobs)
        _check(found, Places(folder))
    chosen = selected(found, only)
    places = Places(folder)
    return Wish(title, places, found, chosen, _needed(steps_of(found, places.state), chosen))


def todo(wished: Wish, settled: Mapping[str, Outcome], past: Mapping[tuple[str, str], float]) -> Todo:
    """What is left of a wish. Nobody measures what nobody will read.

    Args:
        settled: outcomes of steps that need not run, by key.
        past: seconds by kind and title, see `state.past`.
    """
    left = [step for step in wished.steps if step.kind == "quantize" and step.key not in settled]
    read = {need for step in left for need in step.after}
    steps = tuple(
        step for step in wished.steps if step.key not in settled and (step.kind == "quantize" or step.key in read)
    )
    seconds = {step.key: past[step.kind, step.title] for step in steps if (step.kind, step.title) in past}
    return Todo(steps, settled, seconds)


def _needed(steps: Sequence[Step], chosen: Sequence[Job]) -> tuple[Step, ...]:
    """Steps of the chosen jobs, and those that they need."""
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
    """Jobs that were made by hand are as distinct as those of a file, and write no other places.

    Raises:
        RecipeError: they are not, or do.
    """
    if not jobs:
        raise RecipeError("the batch has no jobs: give at least one")
    for what in ("name", "output"):
        seen: set[str] = set()
        for job in jobs:
            value = getattr(job, what)
            if value in seen:
                raise RecipeError(f"two jobs have the {what} '{value}': give each its own")
            seen.add(value)
    inputs = Inputs(jobs)
    for job in jobs:
        over, told = inputs.over(revealed(job.output)), refusal(job, places)
        if over is not None:
            raise RecipeError(f"'{job.name}' would write over '{job.output}', {over}: give it another output")
        if told is not None:
            raise RecipeError(f"'{job.name}' has an output, '{job.output[:200]}', that {told}")


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return sum(found) / len(found) if found else None

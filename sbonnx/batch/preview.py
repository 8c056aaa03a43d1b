"""Reads what a dry run would use: models, recipes, and the first sample of the data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sbonnx.batch.jobs.job import Job
from sbonnx.batch.jobs.steps import recipe_of
from sbonnx.batch.redaction import Redactor, reveal_job
from sbonnx.batch.remote import localized
from sbonnx.errors import SbonnxError


@dataclass(frozen=True)
class PlannedJob:
    """A job.

    Attributes:
        name: its name.
        model, backend, output: the float model, the runtime and the file to write.
    """

    name: str
    model: str
    backend: str
    output: str


@dataclass(frozen=True)
class PlannedStep:
    """A step of a batch.

    Attributes:
        key: digest of its inputs.
        kind: calibrate or quantize.
        title: display name.
        jobs: names of the jobs that need it.
        to_be_run: whether it is not up to date.
        seconds: expected time; null if unknown.
    """

    key: str
    kind: str
    title: str
    jobs: tuple[str, ...]
    to_be_run: bool
    seconds: float | None


@dataclass(frozen=True)
class BatchPreview:
    """Preview of a batch.

    Attributes:
        title: title of the job file.
        jobs: the jobs.
        steps: the steps.
        seconds: expected wall time; null if unknown.
        faults: reasons why jobs cannot run, by name of the job.
    """

    title: str
    jobs: tuple[PlannedJob, ...]
    steps: tuple[PlannedStep, ...]
    seconds: float | None
    faults: dict[str, str]


def faults_of(jobs: Iterable[Job], state: Path) -> dict[str, str]:
    """Return the reasons, by name, of the jobs that cannot run: their recipe, model, data or metric cannot be used.

    Each model is opened once, with its weights left on disk, and of each data set, labelled ones too, the first sample
    is read, preprocessed and checked against the inputs of the model, and the metric against its outputs. For a metric
    of boxes, the head of the detector must be stated or recognized. Nothing is run.

    Args:
        state: state folder of the batch, for downloads of URLs.
    """
    seen: dict[tuple[object, ...], str] = {}
    faults: dict[str, str] = {}
    for job in jobs:
        key = (job.model, job.data, job.split, job.preprocess, job.ort_libraries, job.evaluation)
        if key not in seen:
            seen[key] = _read_fault(job, state)
        reason = _recipe_fault(job, state) or seen[key]
        if reason:
            faults[job.name] = Redactor.of([job]).text(reason)
    return faults


def _read_fault(job: Job, state: Path) -> str:
    """Return the reason why the model, a first sample or the metric cannot be used; "" if all can."""
    from sbonnx import graph as graphs
    from sbonnx.batch.work import evaluation_of
    from sbonnx.calib.data import dataset as datasets
    from sbonnx.calib.data import with_preprocess
    from sbonnx.verify import libraries_of

    try:
        real = localized(reveal_job(job), state / "remote")
        with libraries_of(real.ort_libraries):
            graph = graphs.load(real.model)
            if real.data is not None:
                data = with_preprocess(real.data, real.preprocess)
                next(iter(datasets.read(data, graph, split=real.split, limit=1)))
            evaluation = evaluation_of(real)
            if evaluation is not None:
                evaluation.check_outputs(graph)
                evaluation.check_first(graph)
    except SbonnxError as error:
        return str(error)
    return ""


def _recipe_fault(job: Job, state: Path) -> str:
    try:
        recipe_of(reveal_job(job), state)
    except SbonnxError as error:
        return str(error)
    return ""

"""Data types of a batch: jobs, steps, outcomes and paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Protocol

from sbonnx.calib.data.readers.preprocess_values import PRESETS
from sbonnx.report import Report
from sbonnx.report.comparison import CommandAdvice
from sbonnx.report.notebook import Result
from sbonnx.report.reading import read
from sbonnx.system.python_files import names_function
from sbonnx.system.terminal import map_strings
from sbonnx.values import OBJECT

Status = Literal["done", "unaccepted", "refused", "failed", "crashed", "out of memory", "timed out", "skipped"]
"""Status of an ended step.

done: succeeded. unaccepted: the file was written, but misses the job's acceptance thresholds or failed verification.
refused: a `SbonnxError`, which gives the reason. failed: another exception, with its traceback in the log. crashed: the
process died. out of memory, timed out: a limit was exceeded. skipped: a dependency failed.
"""

FINE: Final[tuple[Status, ...]] = ("done",)
"""Statuses that count as success."""

AGAIN: Final[tuple[Status, ...]] = ("crashed",)
"""Statuses that are retried. A refused step is not, because it would be refused again."""

Kind = Literal["calibrate", "quantize"]


@dataclass(frozen=True)
class Acceptance:
    """Acceptance thresholds of a job's result; None: no threshold.

    Attributes:
        min_sqnr: minimum signal-to-quantization-noise ratio of any output against float, dB.
        min_agreement: minimum share, 0 to 1, of samples whose top-1 class is unchanged.
        max_size_ratio: maximum size of the quantized file divided by that of the float file.
        max_latency_ratio: maximum latency divided by that of the float model; only measured if set.
        min_metric: minimum values, by name, of the job's metric (see `metric`).
        metric: "file.py:function" with (path of a model) → {name: value}, run in the job's process; None: none.
        max_loss: maximum loss in the metric of the job's evaluation, see `JobEvaluation`.
    """

    min_sqnr: float | None = None
    min_agreement: float | None = None
    max_size_ratio: float | None = None
    max_latency_ratio: float | None = None
    min_metric: tuple[tuple[str, float], ...] = ()
    metric: str | None = None
    max_loss: float | None = None


@dataclass(frozen=True)
class JobEvaluation:
    """Labelled data of a job and the metric that is computed on it, as in `sbonnx.verify.EvaluationData`.

    Attributes:
        data: path or URL.
        metric: name, or "file.py:function".
        labels: name of the array of labels; None: recognized by its name.
        decode: "file.py:function" that converts outputs; None: none.
        split: split feeds into batches of this many samples; None: as the job's data.
        vocabulary, blank, head: as in `sbonnx.verify.EvaluationData`.
    """

    data: str
    metric: str
    labels: str | None = None
    decode: str | None = None
    split: int | None = None
    vocabulary: str | None = None
    blank: int | None = None
    head: str | None = None

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions of the user that it calls, "file.py:function"."""
        return tuple(name for name in (self.metric, self.decode) if name is not None and names_function(name))

    def with_paths(self, convert: Callable[[str], str]) -> JobEvaluation:
        """Return it with the data and the files of its functions converted."""

        def of(name: str) -> str:
            file, _, function = name.rpartition(":")
            return f"{convert(file)}:{function}" if names_function(name) else name

        decode = None if self.decode is None else of(self.decode)
        vocabulary = None if self.vocabulary is None else convert(self.vocabulary)
        return replace(self, data=convert(self.data), metric=of(self.metric), decode=decode, vocabulary=vocabulary)


@dataclass(frozen=True)
class StepLimits:
    """Resource limits of a step.

    Attributes:
        memory: bytes of resident memory, including child processes; None: no limit.
        seconds: wall time; None: no limit.
        retries: number of retries after a crash (`AGAIN`).
    """

    memory: int | None = None
    seconds: float | None = None
    retries: int = 1


@dataclass(frozen=True)
class Job:
    """One quantized file to create.

    Attributes:
        name: unique name in the batch; matched by `--only` and shown in reports.
        model: path or URL (fsspec) of the float model.
        data: path or URL of the calibration data, as for `sbonnx.quantize`; None: none.
        preprocess: preset, or path or URL of a file, as for `sbonnx.quantize`; None: none.
        split: split each feed into batches of this many samples; None: do not split.
        backend: such as "onnxruntime" or "tensorrt@10".
        recipe: path of a recipe, "auto", or None.
        overrides: recipe values by key, as text, applied on top of the recipe.
        output: path or URL of the file to write.
        accept, limits: see `Acceptance` and `StepLimits`.
        evaluation: labelled data and a metric; None: none.
        outside_output: whether the output may be outside the folder of the batch.
        ort_libraries: paths of libraries of custom operators, see `sbonnx.system.runtime.use_libraries`.
    """

    name: str
    model: str
    data: str | None
    backend: str
    output: str
    split: int | None = None
    recipe: str | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    accept: Acceptance = Acceptance()
    limits: StepLimits = StepLimits()
    evaluation: JobEvaluation | None = None
    outside_output: bool = False
    preprocess: str | None = None
    ort_libraries: tuple[str, ...] = ()

    @property
    def preprocess_file(self) -> str | None:
        """The path or URL of the preprocessing; None for a preset, or without one."""
        return None if self.preprocess in PRESETS else self.preprocess


def encodable(value: Any) -> Any:
    """Escape lone surrogates in the strings of JSON values, which UTF-8 cannot encode."""
    return map_strings(lambda text: text.encode("utf-8", "backslashreplace").decode(), value)


@dataclass(frozen=True)
class Step:
    """A unit of work, run once in one process, for one job or for all jobs that share it.

    Attributes:
        key: digest of all inputs of the step: equal keys, equal results.
        kind: "calibrate": statistics of a model's activations on its data, for all targets; "quantize": one file.
        title: display name.
        jobs: the jobs that need it; for "quantize" those with the same key.
        after: keys of the steps that must end first.
        limits: the loosest limits of its jobs.
        work: key of the folder with its files. Steps that differ only in their acceptance share the files, and each
            has a verdict under its own key. "": the key of the step.
    """

    key: str
    kind: Kind
    title: str
    jobs: tuple[Job, ...]
    after: tuple[str, ...] = ()
    limits: StepLimits = StepLimits()
    work: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", encodable(self.title))
        object.__setattr__(self, "work", self.work or self.key)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step, as plain values for JSON. Texts are made `encodable`.

    Attributes:
        key, status: see `Step` and `Status`.
        reason: one sentence; "" if done.
        seconds, peak_bytes: wall time and peak resident memory of the last attempt.
        attempts: number of attempts.
        report: `sbonnx.report.Report.to_dict`, for a quantize step.
        accepted: values compared with the acceptance thresholds: (what, found, wanted, met). Values that were not
            measured are NaN.
        counters: such as {"runs": 512}: samples run through the float model for statistics.
        finished: UTC, ISO 8601.
        error: type name of the exception if refused or failed, such as "ModelError".
        files: digests of its output files, by name.
        reads: lists of the files that its job's metric read, see `accept.both`.
    """

    key: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    peak_bytes: int = 0
    attempts: int = 1
    report: dict[str, Any] | None = None
    accepted: tuple[tuple[str, float, float, bool], ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    finished: str = ""
    error: str = ""
    files: dict[str, str] = field(default_factory=dict)
    reads: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("reason", "report", "accepted", "error"):
            object.__setattr__(self, name, encodable(getattr(self, name)))

    @cached_property
    def result(self) -> Report | None:
        """The report as a value."""
        return None if self.report is None else read(Report, self.report)


class Tell(Protocol):
    """Progress callback of a step. It may be called often, and from any thread of the step."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """Report `done` of `total` pieces (None: unknown) of a stage."""


class Watch:
    """Receiver of the events of an engine, from one thread; its methods do nothing."""

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """Begin a batch, with all its steps, and the outcomes, by key, of steps that are already done."""

    def started(self, step: Step, attempt: int, where: str) -> None:
        """Report the start of an attempt (from 1), in the process or on the worker `where`."""

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """Report the progress of a step, see `Tell`, and the memory of its processes in bytes, 0 if unknown."""

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """Report the end of an attempt; `again`: it will be retried."""

    def close(self) -> None:
        """End the batch. Idempotent."""


@dataclass(frozen=True)
class Places:
    """Paths of a batch. All are on one file system, so that files can be moved by a rename.

    Attributes:
        output: output folder of the job file, with the reports.
        state: its subfolder ".sbonnx" with the state of the batch, statistics, step outputs and logs.
    """

    output: Path

    @property
    def state(self) -> Path:
        return self.output / ".sbonnx"

    @property
    def database(self) -> Path:
        """SQLite database with steps and outcomes."""
        return self.state / "state.sqlite"

    def sketches(self, digest: str) -> Path:
        """Return the folder of the calibration cache of a model and its data."""
        return self.state / "sketches" / digest

    @property
    def metrics(self) -> Path:
        """Folder with the metrics of float models, and lists of the files that metrics have read."""
        return self.state / "metrics"

    def made(self, key: str) -> Path:
        """Return the output folder of a step. It appears atomically, by a rename, and contains `outcome.json`."""
        return self.state / "steps" / key

    def log(self, key: str) -> Path:
        """Return the log with the stderr output and traceback of a step's process."""
        return self.state / "logs" / f"{key}.log"


@dataclass(frozen=True)
class HistoryRow:
    """Figures of a run of a job.

    Attributes:
        finished: UTC, ISO 8601.
        status: status of the job.
        sqnr_db: lowest signal-to-noise ratio of the outputs in dB.
        size_ratio, latency_ratio: relative to float.
        metric, value: name and value of the metric that the job asked for; None without one.
    """

    finished: str
    status: str
    sqnr_db: float | None
    size_ratio: float | None
    latency_ratio: float | None
    metric: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class JobResult:
    """A job with its outcome: one row of the report.

    Attributes:
        job: the job.
        outcome: outcome of its quantize step, or of a failed dependency.
        up_to_date: whether nothing had to run.
        advice: a command to try; None without one.
    """

    job: Job
    outcome: Outcome
    up_to_date: bool = False
    advice: CommandAdvice | None = field(default=None, metadata=OBJECT)


@dataclass(frozen=True, repr=False)
class BatchReport(Result):
    """Report of a batch.

    Attributes:
        title: title of the job file.
        version: version of sbonnx.
        started, finished: UTC, ISO 8601.
        rows: one per job, in the order of the job file.
        steps: outcomes of all steps, including calibration, by key.
        titles: titles of all steps, by key.
        history: figures of the last runs by name of the job, oldest first, this one last; see `State.history`.
    """

    json_keys: ClassVar = ("ok", "exit_code", ...)
    frame_of: ClassVar = "rows"
    title: str
    version: str
    started: str
    finished: str
    rows: tuple[JobResult, ...]
    steps: dict[str, Outcome] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    history: dict[str, tuple[HistoryRow, ...]] = field(default_factory=dict)

    def runs_of(self, job: str) -> tuple[HistoryRow, ...]:
        """Return the figures of the last runs of a job, oldest first; empty if it has none."""
        return self.history.get(job, ())

    @property
    def ok(self) -> bool:
        """Whether all jobs are done."""
        return all(row.outcome.status in FINE for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0: all jobs are done; 1: not all. An invalid job file (exit code 2) never gets here."""
        return 0 if self.ok else 1

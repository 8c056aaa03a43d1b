"""What passes between the parts of a batch: jobs, the steps that they are made of, and what became of those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

Status = Literal["done", "unaccepted", "refused", "failed", "crashed", "out of memory", "timed out", "skipped"]
"""How a step ended.

done: as asked. unaccepted: the file is there, and worse than what the job accepts, or wrong. refused: sbonnx said why
it cannot be done (a `SbonnxError`). failed: an exception that is none of those, with its traceback in the log. crashed:
its process died. out of memory, timed out: it was over its limit. skipped: a step that it needs did not end well.
"""

FINE: Final[tuple[Status, ...]] = ("done",)
"""How a job ends in a batch of which nothing is to be said."""

AGAIN: Final[tuple[Status, ...]] = ("crashed",)
"""What another attempt may mend. Who was refused would be refused again."""

Kind = Literal["calibrate", "quantize"]


@dataclass(frozen=True)
class Acceptance:
    """What a job's result must be to be accepted; None: whatever it is.

    Attributes:
        min_sqnr: least signal to quantization noise of any output against float, dB.
        min_agreement: least share, 0 to 1, of samples whose best class stays the same.
        max_size_ratio: most bytes of the quantized file over those of the float file.
        max_latency_ratio: most time of a run over that of the float model; measured where it is asked for.
        min_metric: least value, by name, of metrics that the job names (see `metric`).
        metric: "file.py:function" with (path of a model) → {name: value}, run in the job's process; None: none.
    """

    min_sqnr: float | None = None
    min_agreement: float | None = None
    max_size_ratio: float | None = None
    max_latency_ratio: float | None = None
    min_metric: tuple[tuple[str, float], ...] = ()
    metric: str | None = None


@dataclass(frozen=True)
class Limits:
    """What a step may take.

    Attributes:
        memory: bytes of resident memory, children included; None: no limit.
        seconds: of wall time; None: no limit.
        retries: further attempts where its process died (`AGAIN`).
    """

    memory: int | None = None
    seconds: float | None = None
    retries: int = 1


@dataclass(frozen=True)
class Job:
    """One quantized file that is wanted.

    Attributes:
        name: unique in its batch; it is what `--only` matches and reports show.
        model: path or URL (fsspec) of the float model.
        data: path or URL of the calibration data, as for `sbonnx.quantize`; None: none.
        split: cut each feed into pieces of so many samples; None: as they come.
        backend: such as "onnxruntime" or "tensorrt@10".
        recipe: path of a recipe, "auto", or None.
        overrides: values of the recipe by key, as texts, over that.
        output: path or URL of the file to write.
        accept, limits: see there.
        outside_output: the output may lie outside the folder of the batch.
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
    limits: Limits = Limits()
    outside_output: bool = False


def encodable(value: Any) -> Any:
    """A text that UTF-8 can hold: halves of surrogate pairs, which Python's texts may have, as escapes. Plain values
    (of JSON) with such texts."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {encodable(key): encodable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(encodable(inner) for inner in value)
    return value


@dataclass(frozen=True)
class Step:
    """A piece of work: done once, in one process, for one job or for all that share it.

    Attributes:
        key: digest of all that its result depends on: equal keys, equal results.
        kind: "calibrate": statistics of a model's activations on its data, for all targets; "quantize": one file.
        title: for people.
        jobs: those that it is for; one where it quantizes.
        after: keys of the steps that must have ended first.
        limits: the widest of its jobs'.
        work: key under which its files are kept. Steps that differ in what their jobs accept share them; each has its
            verdict under its own key. "": the key of the step.
    """

    key: str
    kind: Kind
    title: str
    jobs: tuple[Job, ...]
    after: tuple[str, ...] = ()
    limits: Limits = Limits()
    work: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", encodable(self.title))
        object.__setattr__(self, "work", self.work or self.key)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a step, as plain values for JSON. Texts are made `encodable`.

    Attributes:
        key, status: see `Step` and `Status`.
        reason: one sentence; "" where it is done.
        seconds, peak_bytes: wall time and highest resident memory of its last attempt.
        attempts: how many there were.
        report: of `sbonnx.report.Report.to_dict`, where it quantized.
        accepted: what was held against the acceptance: (what, found, wanted, met).
        counters: such as {"runs": 512}: samples that went through the float model for statistics.
        finished: UTC, ISO 8601.
        error: name of the exception's type where it was refused or failed, such as "ModelError".
        files: digests of the files that it made, by name.
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


class Tell(Protocol):
    """How a step says where it is; it may be called often, and from any of its threads."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None:
        """`done` of `total` pieces (None: not known) of what `stage` names."""


class Watch(Protocol):
    """What an engine tells as it goes; from one thread."""

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """A batch begins: all its steps, and outcomes by key of those that are done already."""

    def started(self, step: Step, attempt: int, where: str) -> None:
        """An attempt (from 1) at a step begins, in the process or on the worker `where`."""

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """Where a step is, see `Tell`; bytes of memory that its processes hold, 0 where that is not known."""

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """An attempt has ended; `again`: there will be another."""

    def close(self) -> None:
        """The batch has ended. Twice is once."""


@dataclass(frozen=True)
class Places:
    """Where a batch keeps what. All on one file system, so that a rename is all it takes.

    Attributes:
        output: the folder that the job file names; reports lie there.
        state: its folder ".sbonnx": state of the batch, statistics, what steps have made, logs.
    """

    output: Path

    @property
    def state(self) -> Path:
        """Folder of what is not for people."""
        return self.output / ".sbonnx"

    @property
    def database(self) -> Path:
        """SQLite: which steps there are, and what became of them."""
        return self.state / "state.sqlite"

    def sketches(self, digest: str) -> Path:
        """Folder of the calibration cache of a model on its data."""
        return self.state / "sketches" / digest

    @property
    def metrics(self) -> Path:
        """Folder with metrics of float models, and lists of the files that metrics have read."""
        return self.state / "metrics"

    def made(self, key: str) -> Path:
        """Folder of what a step has made: it appears whole, by a rename, with `outcome.json` in it."""
        return self.state / "steps" / key

    def log(self, key: str) -> Path:
        """What a step's process said on stderr, and its traceback."""
        return self.state / "logs" / f"{key}.log"


@dataclass(frozen=True)
class JobResult:
    """A job with what became of it: a row of the report.

    Attributes:
        job: what was asked for.
        outcome: of its quantize step; of a step that it needs, where that did not end well.
        up_to_date: nothing was to be done.
    """

    job: Job
    outcome: Outcome
    up_to_date: bool = False


@dataclass(frozen=True)
class BatchReport:
    """All of a batch.

    Attributes:
        title: name of the job file.
        version: of sbonnx.
        started, finished: UTC, ISO 8601.
        rows: one a job, in the order of the job file.
        steps: outcome of every step, calibrations too, by key.
        titles: title of every step, by key.
    """

    title: str
    version: str
    started: str
    finished: str
    rows: tuple[JobResult, ...]
    steps: dict[str, Outcome] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all jobs are done as asked."""
        return all(row.outcome.status in FINE for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0: all done; 1: not all. (2, a job file that cannot be used, never gets here.)"""
        return 0 if self.ok else 1

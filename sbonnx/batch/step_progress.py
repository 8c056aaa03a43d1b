"""Progress of a batch and of its steps: a table on a terminal, lines in a log, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, final

from sbonnx.batch.jobs.job import FINE, Outcome, Step, Tell, Watch
from sbonnx.progress import Progress
from sbonnx.system.sizes import size_text
from sbonnx.system.terminal import LINE_LENGTH, escaped, json_escaped, one_line, relative_paths

LINE_EVERY: Final = 60.0
"""Maximum seconds without output before the running steps are printed."""

JSON_EVERY: Final = 0.5
"""Minimum seconds between two JSON lines about the same step."""

DRAWS: Final = 4
"""Redraws of the table per second."""

ENDED_ROWS: Final = 12
"""Number of ended steps in the table, the latest last; the report has all of them."""

NAME_WIDTH: Final = 48


@dataclass
class _At:
    """A running step."""

    step: Step
    began: float
    attempt: int
    where: str
    stage: str = "starting"
    done: int = 0
    total: int | None = None
    memory: int = 0
    printed: str = ""
    printed_at: float = 0.0


class _Board(Watch):
    """Base of the displays: all steps, the running ones, and the estimated remaining time."""

    def __init__(
        self, stream: IO[str] | None = None, *, expected: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self.is_open = False
        self.steps: dict[str, Step] = {}
        self.at_work: dict[str, _At] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.settled = 0
        self.began = time.monotonic()
        self._expected = dict(expected or {})
        self._spent = 0.0

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        self.steps = {step.key: step for step in steps}
        self.settled = len(settled)
        self.outcomes = dict(settled)
        self.began = time.monotonic()
        self.is_open = True

    def started(self, step: Step, attempt: int, where: str) -> None:
        self.at_work[step.key] = _At(step, time.monotonic(), attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """Implement `Watch.told`; an empty stage updates only the memory."""
        at = self.at_work.get(step.key)
        if at is not None:
            at.memory = memory
            if stage:
                at.stage, at.done, at.total = stage, done, total

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        self.at_work.pop(step.key, None)
        if again:
            return
        self.outcomes[step.key] = outcome
        self._spent += outcome.seconds
        if outcome.status in FINE:
            self._expected[step.kind, step.title] = outcome.seconds

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self.finish()

    def finish(self) -> None:
        """Display the end of the batch."""

    def left(self) -> float | None:
        """Estimate the remaining seconds, assuming the current number of running steps; None if unknown."""
        own = [
            outcome.seconds for outcome in list(self.outcomes.values()) if outcome.status in FINE and outcome.seconds
        ]
        usual = sum(own) / len(own) if own else None
        total = 0.0
        for key, step in list(self.steps.items()):  # a copy: rich's thread calls this too
            if key in self.outcomes:
                continue
            seconds = self._expected.get((step.kind, step.title), usual)
            if seconds is None:
                return None
            at = self.at_work.get(key)
            total += seconds if at is None else max(0.0, seconds - (time.monotonic() - at.began))
        return total / max(1, len(self.at_work))

    def counts(self) -> str:
        texts = [f"{len(self.outcomes)} of {len(self.steps)} steps"]
        if self.settled:
            texts.append(f"{self.settled} up to date")
        bad = sum(outcome.status not in FINE for outcome in list(self.outcomes.values()))
        if bad:
            texts.append(f"{bad} not successful")
        return ", ".join(texts)


def ending(step: Step, outcome: Outcome, *, again: bool) -> str:
    """Format the end of an attempt as one line."""
    figures = f"{clock(outcome.seconds)}, {size_text(outcome.peak_bytes)}" if outcome.seconds else ""
    name = step.title if step.title.startswith(step.kind) else f"{step.kind} {step.title}"
    text = f"{name}: {outcome.status}" + (f" ({figures})" if figures else "")
    if outcome.reason:
        text += f": {relative_paths(outcome.reason)}"
    return one_line(f"{text}; it will be retried" if again else text, LINE_LENGTH)


def clock(seconds: float) -> str:
    """Format a duration: ``3.2 s``, ``4:05``, ``1:02:03``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


class StepProgress(Progress):
    """`Progress` that reports to the batch runner.

    Attributes:
        samples: number of samples run through the float model for statistics.
    """

    def __init__(self, tell: Tell) -> None:
        self.samples = 0
        self._tell = tell
        self._what = "quantize"
        self._done = 0
        self._total: int | None = None

    def start(self, what: str, total: int | None) -> None:
        self._what, self._done, self._total = what, 0, total
        self._tell(what, 0, total)

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        if segment is not None:
            self._done = 0

    def advance(self, pieces: int = 1) -> None:
        self._done += pieces
        self._tell(self._what, self._done, self._total)

    def count_samples(self, samples: int) -> None:
        self.samples += samples


@final
class Quiet(Watch):
    """Watch without any output."""


@final
class BatchLines(_Board):
    """Prints one line at the begin, at the end, for each step that ends, and for each minute without one."""

    _printed = 0.0

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        super().begin(steps, settled)
        self._print(f"{len(steps)} steps, {len(settled)} up to date")

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        super().told(step, stage, done, total, memory)
        if time.monotonic() - self._printed >= LINE_EVERY:
            self._print("running: " + "; ".join(_where(at) for at in self.at_work.values()))

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        super().ended(step, outcome, again=again)
        self._print(f"[{len(self.outcomes)}/{len(self.steps)}] {ending(step, outcome, again=again)}")

    def finish(self) -> None:
        self._print(f"{self.counts()}, in {clock(time.monotonic() - self.began)}")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        print(one_line(text), file=self._stream, flush=True)


@final
class BatchJsonLines(_Board):
    """Prints one JSON object per line. "event" is begin, started, told, ended or end; events and keys may be added.

    begin: steps, up_to_date. started: key, kind, title, jobs, attempt, where. told: key, stage, done, total,
    memory_bytes; at most two per second for a stage. ended: key, kind, title, jobs, status, reason, seconds,
    peak_bytes, attempts, again. end: ended, steps, seconds. All but begin and end: left_seconds, null if unknown.
    """

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        super().begin(steps, settled)
        self._print("begin", steps=len(steps), up_to_date=len(settled))

    def started(self, step: Step, attempt: int, where: str) -> None:
        super().started(step, attempt, where)
        self._print("started", **_about(step), attempt=attempt, where=where, left_seconds=self._left())

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        super().told(step, stage, done, total, memory)
        at = self.at_work.get(step.key)
        if at is None or (at.printed == at.stage and time.monotonic() - at.printed_at < JSON_EVERY):
            return
        at.printed, at.printed_at = at.stage, time.monotonic()
        figures = {"stage": at.stage, "done": at.done, "total": at.total, "memory_bytes": memory}
        self._print("told", key=step.key, **figures, left_seconds=self._left())

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        super().ended(step, outcome, again=again)
        self._print(
            "ended",
            **_about(step),
            status=outcome.status,
            reason=outcome.reason,
            seconds=round(outcome.seconds, 3),
            peak_bytes=outcome.peak_bytes,
            attempts=outcome.attempts,
            again=again,
            left_seconds=self._left(),
        )

    def finish(self) -> None:
        seconds = round(time.monotonic() - self.began, 3)
        self._print("end", ended=len(self.outcomes), steps=len(self.steps), seconds=seconds)

    def _left(self) -> float | None:
        left = self.left()
        return None if left is None else round(left, 1)

    def _print(self, event: str, **values: Any) -> None:
        line = json_escaped(json.dumps({"event": event, **values}, ensure_ascii=False))
        print(line, file=self._stream, flush=True)


@final
class Table(_Board):
    """Live table: running steps with stage, progress, memory and time, and the last ended steps."""

    def __init__(
        self, stream: IO[str] | None = None, *, expected: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        super().__init__(stream, expected=expected)
        self._console = Console(file=stream) if stream is not None else Console(stderr=True)
        self._live: Any = Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=DRAWS, transient=True
        )

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        super().begin(steps, settled)
        self._live.start()

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        super().ended(step, outcome, again=again)
        if outcome.status not in FINE:  # printed permanently, above the table
            self._console.print(ending(step, outcome, again=again), markup=False, highlight=False, soft_wrap=True)

    def finish(self) -> None:
        self._live.stop()

    def _drawn(self) -> Any:
        """Build the current table; called by rich's thread."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table as Rows
        from rich.text import Text

        left = self.left()
        title = self.counts() + ("" if left is None else f", about {clock(left)} left")
        rows = Rows(box=None, pad_edge=False)
        for name in ("job", "stage", "progress", "time", "memory"):
            rows.add_column(name, justify="right" if name in ("time", "memory") else "left", no_wrap=True)
        done = list(self.outcomes.items())[self.settled :][-ENDED_ROWS:]
        for key, outcome in done:
            if key in self.steps:
                peak = size_text(outcome.peak_bytes) if outcome.peak_bytes else ""
                rows.add_row(_name(self.steps[key]), outcome.status, "", clock(outcome.seconds), peak, style="dim")
        for at in list(self.at_work.values()):
            memory = size_text(at.memory) if at.memory else ""
            again = "" if at.attempt == 1 else f" (attempt {at.attempt})"
            time_so_far = clock(time.monotonic() - at.began)
            bar = ProgressBar(at.total, min(at.done, at.total), width=20) if at.total else str(at.done or "")
            rows.add_row(_name(at.step), Text(escaped(f"{at.stage}{again}")), bar, time_so_far, memory)
        return Group(Text(title), rows)


def _where(at: _At) -> str:
    of = f" of {at.total}" if at.total else ""
    count = f" {at.done}{of}" if at.done or at.total else ""
    memory = f", {size_text(at.memory)}" if at.memory else ""
    return f"{at.step.title} ({at.stage}{count}, {clock(time.monotonic() - at.began)}{memory})"


def _name(step: Step) -> Any:
    from rich.text import Text

    title = step.title if len(step.title) <= NAME_WIDTH else f"{step.title[: NAME_WIDTH - 1]}…"
    return Text(escaped(title))


def _about(step: Step) -> dict[str, Any]:
    return {"key": step.key, "kind": step.kind, "title": step.title, "jobs": [job.name for job in step.jobs]}


def make_watch(
    *,
    quiet: bool = False,
    as_json: bool = False,
    stream: IO[str] | None = None,
    expected: Mapping[tuple[str, str], float] | None = None,
) -> Watch:
    """Create a watch for the output stream (None: stderr): JSON lines if `as_json`, no output if `quiet`, a table on a
    terminal, else lines.

    Args:
        expected: seconds by kind and title of steps that ran before, see `state.past`.
    """
    if as_json:
        return BatchJsonLines(stream, expected=expected)
    if quiet:
        return Quiet()
    target = stream if stream is not None else sys.stderr
    return Table(stream, expected=expected) if target.isatty() else BatchLines(stream, expected=expected)

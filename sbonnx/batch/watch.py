"""Where a batch is, as it goes: a live table on a terminal, plain lines in a log, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, final

from sbonnx.batch.jobs.job import FINE, Outcome, Step, Watch
from sbonnx.progress import size_text
from sbonnx.terminal import LINE_LENGTH, escaped, json_escaped, one_line

LINE_EVERY: Final = 60.0
"""Seconds without a word after which lines say what is at work."""

JSON_EVERY: Final = 0.5
"""Seconds between two JSON lines about the same step."""

DRAWS: Final = 4
"""Times a second that the table is drawn."""

ENDED_ROWS: Final = 12
"""Steps that have ended and are still shown, the latest last; all of them stand in the report."""

NAME_WIDTH: Final = 48


@dataclass
class _At:
    """A step at work."""

    step: Step
    began: float
    attempt: int
    where: str
    stage: str = "starting"
    done: int = 0
    total: int | None = None
    memory: int = 0


class _Board:
    """What all ways of showing keep: which steps there are, which are at work, how long the rest will take."""

    def __init__(self, expected: Mapping[tuple[str, str], float] | None = None) -> None:
        self.steps: dict[str, Step] = {}
        self.at_work: dict[str, _At] = {}
        self.ended: dict[str, Outcome] = {}
        self.settled = 0
        self.began = time.monotonic()
        self._expected = dict(expected or {})
        self._spent = 0.0

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self.steps = {step.key: step for step in steps}
        self.settled = len(settled)
        self.ended = dict(settled)
        self.began = time.monotonic()

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self.at_work[step.key] = _At(step, time.monotonic(), attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> _At | None:
        """See `Watch`; without a stage, memory alone is new."""
        at = self.at_work.get(step.key)
        if at is not None:
            at.memory = memory
            if stage:
                at.stage, at.done, at.total = stage, done, total
        return at

    def finish(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch.ended`."""
        self.at_work.pop(step.key, None)
        if again:
            return
        self.ended[step.key] = outcome
        self._spent += outcome.seconds
        if outcome.status in FINE:
            self._expected[step.kind, step.title] = outcome.seconds

    def left(self) -> float | None:
        """Seconds until the end, as if as many steps were always at work as now; None where nothing is known yet."""
        own = [outcome.seconds for outcome in list(self.ended.values()) if outcome.status in FINE and outcome.seconds]
        usual = sum(own) / len(own) if own else None
        total = 0.0
        for key, step in list(self.steps.items()):  # rich's thread asks as well
            if key in self.ended:
                continue
            known = self._expected.get((step.kind, step.title), usual)
            if known is None:
                return None
            at = self.at_work.get(key)
            total += known if at is None else max(0.0, known - (time.monotonic() - at.began))
        return total / max(1, len(self.at_work))

    def counts(self) -> str:
        """How many have ended, and how."""
        texts = [f"{len(self.ended)} of {len(self.steps)} steps"]
        if self.settled:
            texts.append(f"{self.settled} up to date")
        bad = sum(outcome.status not in FINE for outcome in list(self.ended.values()))
        if bad:
            texts.append(f"{bad} not done as asked")
        return ", ".join(texts)


def ending(step: Step, outcome: Outcome, *, again: bool) -> str:
    """What to say of an attempt that has ended, in a line."""
    figures = f"{clock(outcome.seconds)}, {size_text(outcome.peak_bytes)}" if outcome.seconds else ""
    name = step.title if step.title.startswith(step.kind) else f"{step.kind} {step.title}"
    text = f"{name}: {outcome.status}" + (f" ({figures})" if figures else "")
    if outcome.reason:
        text += f": {outcome.reason}"
    return one_line(f"{text}; it will be tried again" if again else text, LINE_LENGTH)


def clock(seconds: float) -> str:
    """Seconds for people: ``3.2 s``, ``4:05``, ``1:02:03``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d}"
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@final
class Quiet:
    """Says nothing."""

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""

    def close(self) -> None:
        """See `Watch`."""


@final
class Lines:
    """A line for each step that ends, one at the begin and at the end, and one every minute in which none ends."""

    def __init__(
        self, stream: IO[str] | None = None, *, expected: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._board = _Board(expected)
        self._open = False
        self._said = 0.0

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self._board.begin(steps, settled)
        self._open = True
        self._say(f"{len(steps)} steps, {len(settled)} up to date")

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self._board.started(step, attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        self._board.told(step, stage, done, total, memory)
        if time.monotonic() - self._said >= LINE_EVERY:
            self._say("at work: " + "; ".join(_where(at) for at in self._board.at_work.values()))

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self._board.finish(step, outcome, again=again)
        self._say(f"[{len(self._board.ended)}/{len(self._board.steps)}] {ending(step, outcome, again=again)}")

    def close(self) -> None:
        """See `Watch`."""
        if self._open:
            self._open = False
            self._say(f"{self._board.counts()}, in {clock(time.monotonic() - self._board.began)}")

    def _say(self, text: str) -> None:
        self._said = time.monotonic()
        print(one_line(text), file=self._stream, flush=True)


@final
class JsonLines:
    """One JSON object a line. "event" is begin, started, told, ended or end; others may be added, and keys too.

    begin: steps, up_to_date. started: key, kind, title, jobs, attempt, where. told: key, stage, done, total,
    memory_bytes; at most two a second of a stage. ended: key, kind, title, jobs, status, reason, seconds, peak_bytes,
    attempts, again. end: ended, steps, seconds. All but begin and end: left_seconds, null while nothing is known.
    """

    def __init__(
        self, stream: IO[str] | None = None, *, expected: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._board = _Board(expected)
        self._told: dict[str, tuple[str, float]] = {}
        self._open = False

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self._board.begin(steps, settled)
        self._open = True
        self._say("begin", steps=len(steps), up_to_date=len(settled))

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self._board.started(step, attempt, where)
        self._told.pop(step.key, None)
        self._say("started", **_about(step), attempt=attempt, where=where, left_seconds=self._left())

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        at = self._board.told(step, stage, done, total, memory)
        if at is None:
            return
        before, when = self._told.get(step.key, ("", 0.0))
        if before == at.stage and time.monotonic() - when < JSON_EVERY:
            return
        self._told[step.key] = (at.stage, time.monotonic())
        self._say(
            "told",
            key=step.key,
            stage=at.stage,
            done=at.done,
            total=at.total,
            memory_bytes=memory,
            left_seconds=self._left(),
        )

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self._board.finish(step, outcome, again=again)
        self._say(
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

    def close(self) -> None:
        """See `Watch`."""
        if self._open:
            self._open = False
            board = self._board
            seconds = round(time.monotonic() - board.began, 3)
            self._say("end", ended=len(board.ended), steps=len(board.steps), seconds=seconds)

    def _left(self) -> float | None:
        left = self._board.left()
        return None if left is None else round(left, 1)

    def _say(self, event: str, **values: Any) -> None:
        line = json_escaped(json.dumps({"event": event, **values}, ensure_ascii=False))
        print(line, file=self._stream, flush=True)


@final
class Table:
    """A table that is drawn anew: steps at work with stage, progress, memory and time; the last that have ended."""

    def __init__(
        self, stream: IO[str] | None = None, *, expected: Mapping[tuple[str, str], float] | None = None
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._board = _Board(expected)
        self._console = Console(file=stream) if stream is not None else Console(stderr=True)
        self._live: Any = Live(
            console=self._console, get_renderable=self._drawn, refresh_per_second=DRAWS, transient=True
        )
        self._shown = False

    def begin(self, steps: Sequence[Step], settled: Mapping[str, Outcome]) -> None:
        """See `Watch`."""
        self._board.begin(steps, settled)
        self._live.start()
        self._shown = True

    def started(self, step: Step, attempt: int, where: str) -> None:
        """See `Watch`."""
        self._board.started(step, attempt, where)

    def told(self, step: Step, stage: str, done: int, total: int | None, memory: int) -> None:
        """See `Watch`."""
        self._board.told(step, stage, done, total, memory)

    def ended(self, step: Step, outcome: Outcome, *, again: bool) -> None:
        """See `Watch`."""
        self._board.finish(step, outcome, again=again)
        if outcome.status not in FINE:  # above the table, to stay
            self._console.print(ending(step, outcome, again=again), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """See `Watch`."""
        if self._shown:
            self._shown = False
            self._live.stop()

    def _drawn(self) -> Any:
        """The table as it is now; called by rich's thread."""
        from rich.console import Group
        from rich.table import Table as Rows
        from rich.text import Text

        board = self._board
        left = board.left()
        title = board.counts() + ("" if left is None else f", about {clock(left)} left")
        rows = Rows(box=None, pad_edge=False)
        for name in ("job", "stage", "progress", "time", "memory"):
            rows.add_column(name, justify="right" if name in ("time", "memory") else "left", no_wrap=True)
        done = list(board.ended.items())[board.settled :][-ENDED_ROWS:]
        for key, outcome in done:
            if key in board.steps:
                peak = size_text(outcome.peak_bytes) if outcome.peak_bytes else ""
                rows.add_row(_name(board.steps[key]), outcome.status, "", clock(outcome.seconds), peak, style="dim")
        for at in list(board.at_work.values()):
            memory = size_text(at.memory) if at.memory else ""
            again = "" if at.attempt == 1 else f" (attempt {at.attempt})"
            time_so_far = clock(time.monotonic() - at.began)
            rows.add_row(_name(at.step), Text(escaped(f"{at.stage}{again}")), _progress(at), time_so_far, memory)
        return Group(Text(title), rows)


def _where(at: _At) -> str:
    """A step at work, for a line."""
    of = f" of {at.total}" if at.total else ""
    count = f" {at.done}{of}" if at.done or at.total else ""
    memory = f", {size_text(at.memory)}" if at.memory else ""
    return f"{at.step.title} ({at.stage}{count}, {clock(time.monotonic() - at.began)}{memory})"


def _progress(at: _At) -> Any:
    """A bar where the total is known, else the count."""
    from rich.progress_bar import ProgressBar

    if at.total:
        return ProgressBar(total=at.total, completed=min(at.done, at.total), width=20)
    return str(at.done) if at.done else ""


def _name(step: Step) -> Any:
    from rich.text import Text

    title = step.title if len(step.title) <= NAME_WIDTH else f"{step.title[: NAME_WIDTH - 1]}…"
    return Text(escaped(title))


def _about(step: Step) -> dict[str, Any]:
    """What JSON lines say a step is."""
    return {"key": step.key, "kind": step.kind, "title": step.title, "jobs": [job.name for job in step.jobs]}


def make_watch(
    *,
    quiet: bool = False,
    as_json: bool = False,
    stream: IO[str] | None = None,
    expected: Mapping[tuple[str, str], float] | None = None,
) -> Watch:
    """The watch for where the output goes (None: stderr): JSON where asked for, nothing when quiet, a table on a
    terminal, else lines.

    Args:
        expected: seconds by kind and title of steps that were done before, see `state.past`.
    """
    if as_json:
        return JsonLines(stream, expected=expected)
    if quiet:
        return Quiet()
    target = stream if stream is not None else sys.stderr
    return Table(stream, expected=expected) if target.isatty() else Lines(stream, expected=expected)

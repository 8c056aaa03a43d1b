"""Progress of calibration: a bar on a terminal or in a notebook, one line a minute in a log, JSON lines, or nothing."""

from __future__ import annotations

import html
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, ParamSpec, Protocol, TypeVar, final, runtime_checkable

from sbonnx.system.sizes import size_text
from sbonnx.system.terminal import LINE_LENGTH, escaped, one_line

P = ParamSpec("P")
R = TypeVar("R")

LINE_EVERY: Final = 60.0
"""Seconds between two lines in a log."""

JSON_EVERY: Final = 0.25
"""Seconds between two JSON lines, and between two updates of the figures next to the bar."""


class Progress(Protocol):
    """Receiver of progress updates; its methods do nothing. `start` begins a stage; `advance` counts its items."""

    def start(self, what: str, total: int | None) -> None:
        """Begin the stage `what`: a pass over `total` items (None: unknown), or one such pass for each segment."""
        return

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Set the current segment, k of n (None: unchanged; a new k resets the count), and the bytes on disk."""
        return

    def advance(self, pieces: int = 1) -> None:
        """Count more items as done."""
        return

    def close(self) -> None:
        """End the display. Idempotent."""
        return


@runtime_checkable
class SampleCounter(Protocol):
    """Optional part of a `Progress`: counts the samples that calibration runs."""

    def count_samples(self, samples: int) -> None:
        """Count samples that were run through the float model to observe its activations.

        Samples of an interrupted run, or with cached statistics, do not count.
        """


def count_samples(progress: Progress, samples: int) -> None:
    """Count samples if `progress` is a `SampleCounter`; other receivers are left alone."""
    if isinstance(progress, SampleCounter):
        progress.count_samples(samples)


def memory_in_use() -> int | None:
    """Return the resident memory of this process in bytes, or its peak if only that is reported; None if unknown.

    Linux: resident set of /proc/self/statm (proc(5)). macOS and BSD: ru_maxrss, in bytes and in KiB (getrusage(2)).
    """
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:  # not Linux
        return _peak()
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _peak() -> int | None:
    """Return the peak resident set in bytes; None on Windows."""
    if sys.platform == "win32":
        return None
    import resource

    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024


@dataclass(frozen=True)
class Figures:
    """Snapshot of the progress.

    Attributes:
        stage: description of the current work.
        segment, segments: number of the current segment, from 1, and their count; None if there is a single pass.
        done, total: items done and in all in this segment; total is None if unknown.
        per_second: items per second in this segment.
        memory_bytes: as `memory_in_use`.
        spilled_bytes: activations on disk.
        eta_seconds: time left for all segments, if they all take as long; None if it cannot be estimated yet.
        elapsed_seconds: since the start of the stage.
    """

    stage: str
    segment: int | None
    segments: int | None
    done: int
    total: int | None
    per_second: float
    memory_bytes: int | None
    spilled_bytes: int
    eta_seconds: float | None
    elapsed_seconds: float

    def pace(self) -> str:
        """Format items per second, memory, disk and time left, as far as they are known."""
        parts = [f"{self.per_second:.3g}/s"]
        if self.memory_bytes is not None:
            parts.append(f"{size_text(self.memory_bytes)} in memory")
        if self.spilled_bytes:
            parts.append(f"{size_text(self.spilled_bytes)} on disk")
        if self.eta_seconds is not None:
            parts.append(f"{_clock(self.eta_seconds)} left")
        return ", ".join(parts)

    def line(self) -> str:
        """Format the snapshot as one line."""
        place = "" if self.segment is None else f"segment {self.segment} of {self.segments}, "
        of = "" if self.total is None else f" of {self.total}"
        return f"{self.stage}: {place}{self.done}{of}, {self.pace()}"

    def to_json(self) -> str:
        """Format as one JSON object on one line: the attributes, rates and seconds rounded to a thousandth."""
        values = {name: round(value, 3) if isinstance(value, float) else value for name, value in vars(self).items()}
        return json.dumps(values)


class _Tally:
    """Counters shared by all displays."""

    def __init__(self) -> None:
        self.what = ""
        self.total: int | None = None
        self.done = 0
        self.segment: tuple[int, int] | None = None
        self.spilled = 0
        self.began = self.segment_began = time.monotonic()

    def start(self, what: str, total: int | None) -> None:
        """Reset all counters."""
        self.what, self.total, self.done, self.segment, self.spilled = what, total, 0, None, 0
        self.began = self.segment_began = time.monotonic()

    def state(self, segment: tuple[int, int] | None, spilled: int) -> bool:
        """Update segment and spilled bytes. Return whether a new segment reset the count."""
        self.spilled = spilled
        if segment is None or segment == self.segment:
            return False
        anew = self.segment is not None
        self.segment = segment
        if anew:
            self.done, self.segment_began = 0, time.monotonic()
        return anew

    def figures(self) -> Figures:
        """Return the current snapshot."""
        now = time.monotonic()
        number, count = self.segment or (1, 1)
        left = None
        if self.total:
            share = (number - 1 + min(self.done / self.total, 1)) / count
            left = (now - self.began) * (1 - share) / share if share > 0 else None
        return Figures(
            stage=self.what,
            segment=self.segment and number,
            segments=self.segment and count,
            done=self.done,
            total=self.total,
            per_second=self.done / max(now - self.segment_began, 1e-9),
            memory_bytes=memory_in_use(),
            spilled_bytes=self.spilled,
            eta_seconds=left,
            elapsed_seconds=now - self.began,
        )


@final
class Silent(Progress):
    """Progress without output."""


@final
class Lines(Progress):
    """Progress as one line a minute (`Figures.line`). Work of less than a minute prints nothing."""

    def __init__(self, stream: IO[str] | None = None, *, every: float = LINE_EVERY) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._every = every
        self._tally = _Tally()
        self._said = time.monotonic()

    def start(self, what: str, total: int | None) -> None:
        """Begin a stage."""
        self._tally.start(what, total)
        self._said = time.monotonic()

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Set the segment and the spilled bytes."""
        self._tally.state(segment, spilled)

    def advance(self, pieces: int = 1) -> None:
        """Count items; print a line if one is due."""
        self._tally.done += pieces
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            print(one_line(self._tally.figures().line(), LINE_LENGTH), file=self._stream, flush=True)


@final
class JsonLines(Progress):
    """Progress as JSON: `Figures`, one object per line, at most four a second, and always the last of each stage.

    The keys are those of `Figures`: stage, segment, segments, done, total, per_second, memory_bytes, spilled_bytes,
    eta_seconds, elapsed_seconds. Others may be added; none changes its meaning.
    """

    def __init__(self, stream: IO[str] | None = None, *, every: float = JSON_EVERY) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._every = every
        self._tally = _Tally()
        self._said = time.monotonic()
        self._open = False

    def start(self, what: str, total: int | None) -> None:
        """Print the last object of the previous stage, then begin a stage."""
        self.close()
        self._tally.start(what, total)
        self._said, self._open = time.monotonic(), True

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Set the segment and the spilled bytes."""
        self._tally.state(segment, spilled)

    def advance(self, pieces: int = 1) -> None:
        """Count items; print an object if one is due."""
        self._tally.done += pieces
        if time.monotonic() - self._said >= self._every:
            self._say()

    def close(self) -> None:
        """Print the last object of the stage. Idempotent."""
        if self._open:
            self._open = False
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        print(self._tally.figures().to_json(), file=self._stream, flush=True)


@final
class Bar(Progress):
    """Progress bar on a terminal, with the figures next to it."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=stream) if stream is not None else Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        self._bar: Any = RichProgress(*columns, console=console, transient=True)
        self._tally = _Tally()
        self._said = 0.0
        self._task: Any = None

    def start(self, what: str, total: int | None) -> None:
        """Show a new bar for the stage, also after `close`."""
        self._bar.start()
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._tally.start(what, total)
        self._task = self._bar.add_task(_shown(what), total=total, pace="")

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Show the segment; reset the bar if it is a new one."""
        if self._tally.state(segment, spilled) and self._task is not None:
            self._bar.reset(self._task)
        if segment is not None and self._task is not None:
            text = f"{_shown(self._tally.what)}, segment {segment[0]} of {segment[1]}"
            self._bar.update(self._task, description=text)

    def advance(self, pieces: int = 1) -> None:
        """Advance the bar; update its figures if due."""
        self._tally.done += pieces
        if self._task is None:
            return
        now = time.monotonic()
        if now - self._said >= JSON_EVERY:
            self._said = now
            self._bar.update(self._task, pace=self._tally.figures().pace())
        self._bar.advance(self._task, pieces)

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        self._bar.stop()


def _shown(text: str) -> str:
    """Return the text with markup of rich escaped."""
    return escaped(text).replace("[", "\\[")


@final
class NotebookBar(Progress):
    """Progress bar in a notebook: one line of HTML that is updated in place, and removed at the end."""

    def __init__(self, display: Any = None, *, every: float = JSON_EVERY) -> None:
        """Create it. The bar appears with the first stage.

        Args:
            display: ``IPython.display``, or a stand-in of it.
            every: seconds between two updates.
        """
        self._display = import_module("IPython.display") if display is None else display
        self._every = every
        self._tally = _Tally()
        self._said = 0.0
        self._handle: Any = None

    def start(self, what: str, total: int | None) -> None:
        """Begin a stage."""
        self._tally.start(what, total)
        self._show()

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        """Set the segment and the spilled bytes."""
        self._tally.state(segment, spilled)

    def advance(self, pieces: int = 1) -> None:
        """Count items; update the bar if due."""
        self._tally.done += pieces
        if time.monotonic() - self._said >= self._every:
            self._show()

    def close(self) -> None:
        """Remove the bar. Idempotent."""
        if self._handle is not None:
            self._handle.update(self._display.HTML(""))
            self._handle = None

    def _show(self) -> None:
        self._said = time.monotonic()
        figures = self._tally.figures()
        limits = f'value="{figures.done}" max="{figures.total}"' if figures.total else ""
        page = self._display.HTML(f"<progress {limits}></progress> <small>{html.escape(figures.line())}</small>")
        if self._handle is None:
            self._handle = self._display.display(page, display_id=True)
        else:
            self._handle.update(page)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def shown_by_default(function: Callable[P, R]) -> Callable[P, R]:
    """Show a bar during a function in a notebook or on a terminal, if its keyword ``progress`` is None or absent."""

    @wraps(function)
    def shown(*args: P.args, **kwargs: P.kwargs) -> R:
        notebook = in_notebook()
        if kwargs.get("progress") is not None or not (notebook or sys.stderr.isatty()):
            return function(*args, **kwargs)
        bar: Progress = NotebookBar() if notebook else Bar()
        try:
            kwargs["progress"] = bar
            return function(*args, **kwargs)
        finally:
            bar.close()

    return shown


def by_keyword(what: str, example: str, *, most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Limit the positional arguments of a function, with an error that shows a call.

    Args:
        what: the arguments that may be positional.
        most: their number.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                raise TypeError(f"{len(args)} arguments by position, where {what} may be; name the others: {example}")
            return function(*args, **kwargs)

        return called

    return decorated


def make_progress(*, quiet: bool = False, as_json: bool = False, stream: IO[str] | None = None) -> Progress:
    """Choose the display for a stream (None: stderr): JSON if requested, nothing if quiet, a bar on a terminal, else
    lines.
    """
    if as_json:
        return JsonLines(stream)
    if quiet:
        return Silent()
    target = stream if stream is not None else sys.stderr
    return Bar(stream) if target.isatty() else Lines(stream)


def _clock(seconds: float) -> str:
    """Format seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

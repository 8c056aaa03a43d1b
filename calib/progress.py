"""How far calibration is: a bar on a terminal, a line a minute in a log, or nothing."""

from __future__ import annotations

import sys
import time
from typing import IO, Any, Final, Protocol, final

LINE_EVERY: Final = 60.0
"""Seconds between two lines in a log."""


class Progress(Protocol):
    """What calibration tells as it goes. `start` begins a stretch of work; `advance` counts pieces of it."""

    def start(self, what: str, total: int | None) -> None:
        """Begin `what`, of `total` pieces (None: not known)."""

    def advance(self, pieces: int = 1) -> None:
        """So many more are done."""

    def close(self) -> None:
        """No more will come. Twice is once."""


@final
class Silent:
    """Says nothing."""

    def start(self, what: str, total: int | None) -> None:
        """See `Progress`."""

    def advance(self, pieces: int = 1) -> None:
        """See `Progress`."""

    def close(self) -> None:
        """See `Progress`."""


@final
class Lines:
    """One line a minute: what, how far, pieces a second, time left. Work of less than a minute says nothing."""

    def __init__(self, stream: IO[str] | None = None, *, every: float = LINE_EVERY) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._every = every
        self._what = ""
        self._total: int | None = None
        self._done = 0
        self._began = self._said = time.monotonic()

    def start(self, what: str, total: int | None) -> None:
        """See `Progress`."""
        self._what, self._total, self._done = what, total, 0
        self._began = self._said = time.monotonic()

    def advance(self, pieces: int = 1) -> None:
        """See `Progress`."""
        self._done += pieces
        now = time.monotonic()
        if now - self._said < self._every:
            return
        self._said = now
        rate = self._done / max(now - self._began, 1e-9)
        text = f"{self._what}: {self._done}"
        if self._total:
            left = max(self._total - self._done, 0) / rate
            text += f" of {self._total}, {rate:.3g}/s, {_clock(left)} left"
        else:
            text += f", {rate:.3g}/s"
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """See `Progress`."""


@final
class Bar:
    """A bar with the time left, on a terminal."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        console = Console(file=stream) if stream is not None else Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar: Any = RichProgress(*columns, console=console, transient=True)
        self._task: Any = None
        self._bar.start()

    def start(self, what: str, total: int | None) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(what, total=total)

    def advance(self, pieces: int = 1) -> None:
        """See `Progress`."""
        if self._task is not None:
            self._bar.advance(self._task, pieces)

    def close(self) -> None:
        """See `Progress`."""
        self._bar.stop()


def make_progress(*, quiet: bool = False, stream: IO[str] | None = None) -> Progress:
    """The progress for where the output goes: nothing when quiet, a bar on a terminal, else lines."""
    if quiet:
        return Silent()
    target = stream if stream is not None else sys.stderr
    return Bar(stream) if target.isatty() else Lines(stream)


def _clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"

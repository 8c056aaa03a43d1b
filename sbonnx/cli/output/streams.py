"""Standard streams of the command line: always open, robust against closed pipes, free of native messages.

Native libraries (absl, RE2, protobuf, onnxruntime before its logger is set up) write to descriptor 2 directly. While a
command runs, descriptor 2 is an unnamed file, and Python's stderr a duplicate of the original descriptor. If the
process crashes, a watcher child process copies the end of that file to the original stderr.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, TextIO

from sbonnx.errors import is_memory_message, out_of_memory
from sbonnx.system.terminal import escaped

SHOWN_BYTES: Final = 16 << 10
"""Maximum bytes of native messages shown after a crash: the last ones."""

_captured: list[IO[bytes]] = []
"""The file of native messages, if they are captured."""


@contextmanager
def standard_streams(*, capture: bool) -> Iterator[None]:
    """Replace stdout and stderr until the block ends, unless the caller has replaced them already.

    Args:
        capture: redirect what native libraries write to stderr.
    """
    if sys.stdout is not sys.__stdout__ or sys.stderr is not sys.__stderr__:
        yield
        return
    _open_closed()
    before = sys.stdout, sys.stderr
    _flush(before)
    with _native_messages(capture) as shown:
        sys.stdout, sys.stderr = _stream(1, before[0]), _stream(shown, before[1], error=True)
        try:
            yield
        finally:
            _flush((sys.stdout, sys.stderr))
            sys.stdout, sys.stderr = before


def _flush(streams: tuple[TextIO | None, ...]) -> None:
    for stream in streams:
        if stream is not None:
            with suppress(OSError, ValueError):  # `error_lines.guard` has reported it
                stream.flush()


def last_native_message() -> str:
    """Return the last captured line written by native code, or ""."""
    if not _captured:
        return ""
    return _last_line(_tail(_captured[-1].fileno()).decode(errors="replace"))


def _open_closed() -> None:
    """Open descriptors 0 to 2 if they are closed (``>&-``). Otherwise the next opened file would get such a number, and
    everything printed would be written to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # returns the lowest free descriptor, this one
            os.set_inheritable(descriptor, True)


class _Sink(io.FileIO):
    """A stream that discards output once its reader has closed the pipe (``| head``)."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno(), inheritable=os.get_inheritable(self.fileno()))
            os.close(null)
            return memoryview(data).nbytes


def _stream(descriptor: int, like: TextIO | None, *, error: bool = False) -> TextIO:
    """Open a text stream on a descriptor; characters that its encoding lacks are escaped."""
    sink = _Sink(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(sink),
        encoding=getattr(like, "encoding", None) or "utf-8",
        errors="backslashreplace",
        line_buffering=error or sink.isatty(),
    )


@contextmanager
def _native_messages(capture: bool) -> Iterator[int]:
    """Redirect descriptor 2 to a file if the system supports it; yield the descriptor of the original stderr."""
    try:
        wanted = capture and hasattr(os, "fork")
        file = tempfile.TemporaryFile(prefix="sbonnx-", buffering=0) if wanted else None  # noqa: SIM115 - see below
    except OSError:  # no space for the file: do not redirect
        file = None
    if file is None:
        yield 2
        return
    with file:
        shown = os.dup(2)
        watcher = _Watcher(file.fileno(), shown)
        os.dup2(file.fileno(), 2)
        _captured.append(file)
        try:
            yield shown
        finally:
            _captured.remove(file)
            os.dup2(shown, 2)
            watcher.end()
            os.close(shown)


class _Watcher:
    """A child process that copies the end of `file` to `shown` if this process ends without calling `end`."""

    def __init__(self, file: int, shown: int) -> None:
        waits, self._control = os.pipe()
        self._owner, self._pid = os.getpid(), -1
        with suppress(OSError):  # process limit reached: the messages of a crash are lost
            self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self._control)
                _watch(waits, file, shown)
            finally:
                os._exit(0)
        os.close(waits)

    def end(self) -> None:
        """End the child process. No-op in a fork of the process that started it."""
        if os.getpid() != self._owner:
            return
        with suppress(OSError):  # the child was killed
            os.write(self._control, b".")
        os.close(self._control)
        if self._pid > 0:
            with suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def _watch(waits: int, file: int, shown: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # sent to the whole group
        signal.signal(number, signal.SIG_IGN)
    for descriptor in range(3):  # readers of these streams wait until all copies are closed
        os.close(descriptor)
    if os.read(waits, 1):
        return
    text = escaped(_tail(file).decode(errors="replace"), keep="\n\t")
    if is_memory_message(text):
        text = f"{out_of_memory(_last_line(text))}\n"
    elif not text and _is_address_space_limited():
        text = f"{out_of_memory('native code crashed without a message')}\n"
    os.write(shown, text.encode(errors="replace"))


def _is_address_space_limited() -> bool:
    """Whether ``ulimit -v`` is set: the dynamic linker and native code then crash where an allocation fails."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def _tail(file: int) -> bytes:
    size = os.fstat(file).st_size
    return os.pread(file, SHOWN_BYTES, max(0, size - SHOWN_BYTES))

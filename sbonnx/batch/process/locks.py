"""Locks on files: one batch at a time in a folder, one process at a time for a step."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sbonnx.batch.jobs.job import Places
from sbonnx.errors import OutputError

if sys.platform != "win32":
    import fcntl

TAKEN: Final = (errno.EWOULDBLOCK, errno.EACCES, errno.EAGAIN)


def lock_path(places: Places, key: str) -> Path:
    """The file that a step's process holds a lock on for as long as it works."""
    return places.made(key).with_name(f"{key}.lock")


def take(path: Path, *, wait: bool = False) -> int | None:
    """A lock on `path`, as an open file; closing that, or the end of the process, gives it back.

    The file stays: who removed it could let two hold "it" at once. Locks are of the system (flock), so that nothing
    is left of one when its process is killed.

    Args:
        wait: until it is free.

    Returns:
        The file descriptor; None: another process has it.

    Raises:
        OutputError: there are no locks on this file system.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error
    if sys.platform == "win32":  # no flock: nothing tells that two are at work
        return fd
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        os.close(fd)
        if error.errno in TAKEN:
            return None
        raise OutputError(
            f"'{path}' cannot be locked ({error.strerror}): give an output folder on a file system that has locks"
        ) from error
    return fd


@contextmanager
def sole(places: Places) -> Iterator[None]:
    """This process is the only one that runs a batch in this folder.

    Raises:
        OutputError: another one does, and which; or there are no locks.
    """
    path = places.state / "lock"
    fd = take(path)
    if fd is None:
        holder = path.read_text(errors="replace").strip() or "unknown"
        raise OutputError(
            f"a batch is at work in '{places.output}' (process {holder}): wait until it has ended, or end it"
        )
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)

"""File locks: one batch at a time in a folder, one process at a time for a step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import lock_descriptor

from sbonnx.batch.jobs.job import Places, Tell
from sbonnx.errors import OutputError

HOLDER: Final = 1
"""Offset of the process id in a lock file: on Windows, byte 0 of a locked file cannot be read."""


def lock_path(places: Places, key: str) -> Path:
    """Return the lock file of a step. The step's process holds the lock while it runs."""
    return places.made(key).with_name(f"{key}.lock")


def take(path: Path, *, wait: bool = False) -> int | None:
    """Lock `path` and return the open file. Closing it, or the end of the process, releases the lock.

    The file is never removed, because then two processes could hold a lock on different files of that name. The locks
    are flock(2), on Windows LockFileEx, so that they are released when a process is killed.

    Args:
        wait: whether to block until the lock is free.

    Returns:
        The file descriptor, or None if another process holds the lock.

    Raises:
        OutputError: the file system does not support locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error
    try:
        locked = lock_descriptor(fd, blocking=wait)
    except OSError as error:
        os.close(fd)
        raise OutputError(
            f"'{path}' cannot be locked ({error.strerror}): use an output folder on a file system with locks"
        ) from error
    except BaseException:  # an interrupt while it waits
        os.close(fd)
        raise
    if not locked:
        os.close(fd)
        return None
    return fd


def take_when_free(path: Path, tell: Tell) -> int | None:
    """Lock `path` as `take`; report to `tell` if another process has to be waited for."""
    lock = take(path)
    if lock is None:
        tell("waiting for another process at the same step")
        lock = take(path, wait=True)
    return lock


@contextmanager
def batch_lock(places: Places) -> Iterator[None]:
    """Lock the folder, so that this process is the only one that runs a batch there.

    Raises:
        OutputError: another process holds the lock (the message names it), or locks are not supported.
    """
    path = places.state / "lock"
    fd = take(path)
    if fd is None:
        with path.open("rb", buffering=0) as file:
            file.seek(HOLDER)
            holder = file.read().decode(errors="replace").strip() or "unknown"
        raise OutputError(
            f"a batch is running in '{places.output}' (process {holder}): wait until it has ended, or terminate it"
        )
    try:
        os.ftruncate(fd, 0)
        os.lseek(fd, HOLDER, os.SEEK_SET)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)

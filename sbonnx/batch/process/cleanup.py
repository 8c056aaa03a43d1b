"""Cleanup after killed processes: incomplete folders, temporary files and temporary names of outputs."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from sbonnx.batch.jobs.job import Places, Step
from sbonnx.batch.process.locks import lock_path, take
from sbonnx.batch.redaction import revealed
from sbonnx.batch.remote import local_path
from sbonnx.calib.cache.entries import remove_abandoned
from sbonnx.errors import OutputError, SbonnxError

UNUSED_DAYS: Final = 30.0
"""Days until unused step outputs are removed. They are kept for some time, because a recipe may be used again."""


def scratch_of(places: Places) -> Path:
    """Return the temporary folder of all processes of a batch, in the system's folder for temporary files.

    Its name is derived from the output folder, so that it can be found after a kill.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    name = hashlib.sha256(os.fsencode(places.output.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"sbonnx-{user}-{name}"


def scratch_root(places: Places) -> Path | None:
    """Create `scratch_of`; None if that fails, or if it belongs to another user."""
    root = scratch_of(places)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        fd = _opened(root)
    except OSError:
        return None
    if fd is None:
        return None
    os.close(fd)
    return root


def sweep(places: Places, steps: Iterable[Step]) -> None:
    """Remove leftovers of dead processes of any step in this folder, and next to the outputs of `steps`.

    Whether a process is dead is determined by the lock of its step, not by its PID, which may be reused or from
    another machine. Files in use, and files without a name pattern of a batch, are kept.
    """
    scratch = scratch_of(places)
    for folder, head in ((places.state / "steps", "."), (scratch, "")):
        fd = _opened(folder)
        if fd is None:
            continue
        try:
            for name in os.listdir(fd):
                key = _key_of(name, head, places)
                if key is not None:
                    _unless_at_work(places, key, partial(_remove_in, fd, name))
        finally:
            os.close(fd)
    remove_empty(scratch)
    remove_abandoned(places.state)
    for cache, _, _ in os.walk(places.state / "sketches"):
        remove_abandoned(Path(cache))
    for step in steps:
        left = [path for job in step.jobs if step.kind == "quantize" for path in _beside(job.output)]
        if left:
            _unless_at_work(places, step.key, partial(_remove_all, left))


def clear(places: Places, key: str) -> None:
    """Remove a step's output and its incomplete folders. Only for the holder of its lock."""
    if os.path.lexists(places.made(key)):
        unmake(places, key)
    for path in places.made(key).parent.iterdir():
        if _key_of(path.name, ".", places) == key:
            remove(path)


def prune(places: Places, days: float = UNUSED_DAYS) -> None:
    """Remove step outputs, with their locks and logs, and statistics and metrics that were not used for `days`.

    Otherwise nightly runs with new models would fill the disk (see `used`). Files at the outputs are kept.
    """
    oldest = time.time() - days * 86400
    for path in (*_old(places.state / "sketches", oldest), *_old(places.metrics, oldest)):
        remove(path)
    for path in _old(places.state / "steps", oldest):
        if path.is_dir():
            left = [path, lock_path(places, path.name), places.log(path.name)]
            _unless_at_work(places, path.name, partial(_remove_all, left))


def _old(root: Path, oldest: float) -> list[Path]:
    """Return entries of `root` last used before `oldest`, without temporary files and locks."""
    if not root.is_dir():
        return []
    entries = [path for path in root.iterdir() if not path.name.startswith(".") and path.suffix != ".lock"]
    return [path for path in entries if path.lstat().st_mtime < oldest]


def used(made: Path) -> None:
    """Mark a folder or file as used now, so that `prune` keeps it."""
    with contextlib.suppress(OSError):  # a refused step has no output
        os.utime(made)


def remove(path: Path) -> None:
    """Remove a file or folder. Errors are ignored, because a leftover only costs disk space."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def unmake(places: Places, key: str) -> None:
    """Remove a step's output; it disappears atomically, by a rename."""
    output = places.made(key)
    hidden = output.with_name(f".{key}.{os.getpid()}")
    remove(hidden)
    try:
        os.rename(output, hidden)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"'{output}' cannot be removed: {error.strerror or error}") from error
    remove(hidden)


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    with contextlib.suppress(OSError):  # in use
        folder.rmdir()


def _unless_at_work(places: Places, key: str, do: Callable[[], None]) -> None:
    lock = take(lock_path(places, key))
    if lock is None:
        return
    try:
        do()
    finally:
        os.close(lock)


def _key_of(name: str, head: str, places: Places) -> str | None:
    """Parse the step's key from a name ``<head><key>.<pid>``.

    Returns None for other names, and if the step has no lock file, so that it never ran here.
    """
    match = re.fullmatch(rf"{re.escape(head)}([^.].*)\.[0-9]+", name)
    return match[1] if match is not None and lock_path(places, match[1]).is_file() else None


def _opened(folder: Path) -> int | None:
    """Open a folder of this user; None if it does not exist, or is a symbolic link."""
    try:
        fd = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return None
    if hasattr(os, "getuid") and os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        return None
    return fd


def _remove_in(folder: int, name: str) -> None:
    """Remove a file, link or folder from an open folder. Links are never followed, even if created concurrently.

    Errors are ignored, because a leftover only costs disk space.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(os.lstat(name, dir_fd=folder).st_mode):
            os.unlink(name, dir_fd=folder)
            return
        for _, folders, files, inner in os.fwalk(name, topdown=False, follow_symlinks=False, dir_fd=folder):
            for entry in (*files, *folders):
                try:
                    os.unlink(entry, dir_fd=inner)
                except OSError:  # a folder, already empty
                    os.rmdir(entry, dir_fd=inner)
        os.rmdir(name, dir_fd=folder)


def _remove_all(paths: Iterable[Path]) -> None:
    for path in paths:
        remove(path)


def _beside(output: str) -> list[Path]:
    """List the temporary files of an output: ``.<name>.<hex digits>.tmp``."""
    try:
        path = local_path(revealed(output))
    except SbonnxError:  # an unset variable: the step reports it
        return []
    if path is None:
        return []
    fits = re.compile(rf"\.{re.escape(path.name)}(\.data)?\.[0-9a-f]+\.tmp").fullmatch
    try:
        with os.scandir(path.parent) as rows:
            return [Path(row.path) for row in rows if fits(row.name) and row.is_file(follow_symlinks=False)]
    except OSError:  # no such folder
        return []

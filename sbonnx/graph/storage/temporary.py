"""Temporary folders. Those of killed processes are removed by the next run that uses the same parent folder.

Each folder contains a marker file that its process keeps locked (flock) until it ends, even if it is killed. A folder
is removed only if it has the name and the owner of one, and its marker is not locked. Process ids are not used, because
they recur. The marker is the first file of a folder and the last to go, so a kill at any moment leaves a folder that is
empty, or that has a marker; a marker without its whole text is removed only where it is the only file.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

if sys.platform != "win32":
    import fcntl

PREFIX: Final = "sbonnx-"
"""Name prefix in the system's folder for temporary files."""

SUFFIX: Final = ".sbonnx"
"""Name suffix of all of them. Those next to outputs are hidden."""

REPLACED: Final = "replaced"
"""Subfolder with what is being replaced next to the temporary folder, see `restore`."""

MARKER: Final = ".sbonnx-lock"
MAGIC: Final = b"temporary folder of sbonnx; removed when nobody has a lock on this file\n"

NAME_BYTES: Final = 200
"""Bytes of an output's name used in the name of its temporary folder: file systems allow 255 in all."""

_swept: set[str] = set()
"""Parent folders in which this process has removed abandoned folders."""


@contextmanager
def temporary_folder(next_to: Path | None = None) -> Iterator[Path]:
    """Create a folder that is removed with its content when the block ends.

    Args:
        next_to: path of an output; the folder is hidden and on the same file system. None: in TMPDIR.

    Raises:
        OSError: it cannot be created.
    """
    if next_to is None:
        parent, prefix = Path(tempfile.gettempdir()), PREFIX
    else:
        short = os.fsencode(next_to.name)[:NAME_BYTES].decode(errors="ignore")
        parent, prefix = next_to.parent, f".{short}."
    sweep_once(parent)
    folder, lock = _locked_folder(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder, lock)


def _locked_folder(parent: Path, prefix: str) -> tuple[Path, int | None]:
    """Create a folder and lock it; the lock is None on platforms without locks, where nothing is swept."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=prefix, suffix=SUFFIX, dir=parent))
        if sys.platform == "win32":
            return folder, None
        try:
            lock = _lock(folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        if lock is not None:
            return folder, lock


def _lock(folder: Path) -> int | None:
    """Create and lock the marker of a new folder; None if another process has swept it meanwhile."""
    if sys.platform == "win32":
        return None
    try:
        lock = os.open(folder / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        if not folder.parent.is_dir():
            raise
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            os.write(lock, MAGIC)  # after locking: a complete marker without a lock is an abandoned one
            return lock
    except BlockingIOError:
        pass
    except OSError:  # a file system without locks, where nothing is swept
        return lock
    os.close(lock)
    return None


def _remove(folder: Path, lock: int | None) -> None:
    """Remove a folder of this process, the marker last."""
    if lock is not None:
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _empty(descriptor)
            finally:
                os.close(descriptor)
        os.close(lock)  # before the marker goes: NFS keeps the names of open files
    shutil.rmtree(folder, ignore_errors=True)


def restore(folder: str | Path) -> None:
    """Move what a temporary folder was to replace back to its place, if nothing is there."""
    with suppress(FileNotFoundError):
        for name in os.listdir(os.path.join(folder, REPLACED)):
            place = os.path.join(os.path.dirname(folder), name)
            if not os.path.lexists(place):
                os.rename(os.path.join(folder, REPLACED, name), place)


def sweep_once(parent: Path) -> None:
    """Call `sweep`, once in this process for each folder."""
    resolved = os.path.realpath(parent)
    if resolved not in _swept:
        _swept.add(resolved)
        sweep(parent)


def sweep(parent: Path) -> None:
    """Remove the temporary folders in `parent` whose processes have ended. Symlinks are not followed.

    What they were replacing is restored.
    """
    if sys.platform == "win32":
        return
    try:
        with os.scandir(parent) as entries:
            names = [entry.name for entry in entries]
    except OSError:  # missing or not readable: the caller's own write reports it
        return
    for name in names:
        if name.startswith((PREFIX, ".")) and name.endswith(SUFFIX):
            _remove_abandoned(os.path.join(parent, name))


def _remove_abandoned(path: str) -> None:
    """Remove one folder if its marker, or that it is empty, proves that it is abandoned."""
    if sys.platform == "win32":
        return
    user = os.geteuid()
    with suppress(OSError):  # removed meanwhile, not a folder, not empty, not accessible, or locked
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if os.fstat(folder).st_uid != user:
                return
            with suppress(FileNotFoundError):
                lock = os.open(MARKER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
                try:
                    about = os.fstat(lock)
                    text = os.pread(lock, len(MAGIC) + 1, 0) if stat.S_ISREG(about.st_mode) else b"\0"
                    if about.st_uid != user or not MAGIC.startswith(text):
                        return
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    if text == MAGIC:
                        restore(path)
                        _empty(folder)
                    elif os.listdir(folder) != [MARKER]:
                        return
                    os.unlink(MARKER, dir_fd=folder)
                finally:
                    os.close(lock)
            os.rmdir(path)
        finally:
            os.close(folder)


def _empty(folder: int) -> None:
    """Remove everything except the marker from an open folder, by descriptors, since paths may change meanwhile."""
    for root, folders, files, descriptor in os.fwalk(".", topdown=False, dir_fd=folder):
        for name in files:
            if root != "." or name != MARKER:
                os.unlink(name, dir_fd=descriptor)
        for name in folders:
            try:
                os.rmdir(name, dir_fd=descriptor)
            except NotADirectoryError:  # a symlink to a folder
                os.unlink(name, dir_fd=descriptor)

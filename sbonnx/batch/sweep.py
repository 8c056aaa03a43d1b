"""What killed processes leave behind, and its end: folders half filled, temporary files, temporary names of outputs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sbonnx.batch.hidden import revealed
from sbonnx.batch.job import Places, Step
from sbonnx.batch.sole import lock_path, take
from sbonnx.batch.urls import local_path
from sbonnx.errors import OutputError, SbonnxError

UNUSED_DAYS: Final = 30.0
"""Days for which what a step has made is kept though no batch asks for it: a recipe may come back."""


def scratch_of(places: Places) -> Path:
    """The folder for temporary files of all processes of a batch, where the system keeps such files. It is found again
    after a kill, since its name follows from the output's."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    name = hashlib.sha256(os.fsencode(places.output.resolve())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"sbonnx-{user}-{name}"


def scratch_root(places: Places) -> Path | None:
    """`scratch_of`, made; None where it cannot be, or is somebody else's."""
    root = scratch_of(places)
    try:
        root.mkdir(mode=0o700, exist_ok=True)
        return root if not hasattr(os, "getuid") or root.lstat().st_uid == os.getuid() else None
    except OSError:
        return None


def sweep(places: Places, steps: Iterable[Step]) -> None:
    """Remove what processes that are gone have left of any step in this folder, and beside the outputs of `steps`.

    Whether a process is gone is told by the lock of its step, not by its number: that may be another's by now, or of
    another machine. What is in use stays.
    """
    own = scratch_of(places)
    for folder in (places.state / "steps", own):
        if not folder.is_dir():
            continue
        for path in list(folder.iterdir()):
            key = _key_of(path, hidden=folder != own)
            if key is not None:
                _unless_at_work(places, key, [path])
    remove_empty(own)
    for step in steps:
        left = [path for job in step.jobs if step.kind == "quantize" for path in _beside(job.output)]
        if left:
            _unless_at_work(places, step.key, left)


def prune(places: Places, days: float = UNUSED_DAYS) -> None:
    """Remove what steps have made, with their locks and logs, that no batch has asked for in so many days, and
    statistics that no step has (see `used`): each night's new models would fill the disk. What lies at the outputs
    stays."""
    oldest = time.time() - days * 86400
    for path in _folders(places.state / "sketches", oldest):
        remove(path)
    for path in _folders(places.state / "steps", oldest):
        _unless_at_work(places, path.name, [path, lock_path(places, path.name), places.log(path.name)])


def _folders(root: Path, oldest: float) -> list[Path]:
    """Those of `root` that were used before `oldest`, and are not temporary."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return [path for path in found if path.stat().st_mtime < oldest]


def used(made: Path) -> None:
    """Somebody has asked for this folder: `prune` lets it live."""
    try:
        os.utime(made)
    except OSError:  # its step was refused, and has made nothing
        return


def remove(path: Path) -> None:
    """Remove a file or folder; what cannot be removed stays, and costs room only."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        return


def unmake(places: Places, key: str) -> None:
    """Remove what a step has made, at once as others see it."""
    made = places.made(key)
    hidden = made.with_name(f".{key}.{os.getpid()}")
    remove(hidden)
    try:
        os.rename(made, hidden)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"'{made}' cannot be removed: {error.strerror or error}") from error
    remove(hidden)


def remove_empty(folder: Path) -> None:
    """Remove a folder, should nothing be in it."""
    try:
        folder.rmdir()
    except OSError:  # in use
        return


def _unless_at_work(places: Places, key: str, paths: list[Path]) -> None:
    lock = take(lock_path(places, key))
    if lock is None:
        return
    try:
        for path in paths:
            remove(path)
    finally:
        os.close(lock)


def _key_of(path: Path, *, hidden: bool) -> str | None:
    """The step's key of a name such as ``.<key>.<pid>``; None where it is no such name."""
    name = path.name
    if hidden:
        if not name.startswith("."):
            return None
        name = name[1:]
    key, dot, number = name.rpartition(".")
    return key if dot and key and number.isdigit() else None


def _beside(output: str) -> list[Path]:
    """Temporary names of an output, as its writers make them: hidden, the output's name, and something behind it."""
    try:
        path = local_path(revealed(output))
    except SbonnxError:  # a variable is not set: the step says so
        return []
    if path is None:
        return []
    if not path.parent.is_dir():
        return []
    head = f".{path.name}."
    return [one for one in path.parent.iterdir() if one.name.startswith(head) and one.name.endswith(".tmp")]

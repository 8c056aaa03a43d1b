"""Publication of step outputs to the output paths of jobs."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Final

from sbonnx.batch.digests import Digests
from sbonnx.batch.intact import FILES
from sbonnx.batch.jobs.job import Job, Places, Step
from sbonnx.batch.jobs.outputs import escape_of
from sbonnx.batch.jobs.steps import file_name
from sbonnx.batch.outcomes import read_made
from sbonnx.batch.redaction import revealed
from sbonnx.batch.storage.remote import upload
from sbonnx.batch.storage.urls import local_path
from sbonnx.errors import OutputError
from sbonnx.graph.digests import file_digest
from sbonnx.graph.storage.files import is_replaceable

if sys.platform == "linux":
    import fcntl

FICLONE: Final = 0x40049409
"""Request code of ioctl_ficlone(2), Linux: Btrfs, XFS, bcachefs, OCFS2, OpenZFS."""


def publish(step: Step, places: Places, digests: Digests | None = None) -> bool:
    """Copy the files of a step to the outputs of its jobs, each atomically: data files first, the model last.

    Files with the right digest are not touched. Outputs share no inode with the state folder, so that programs that
    modify an output do not change the stored files. They share blocks if the file system supports cloning.

    Args:
        digests: digests of the batch; None: load them from the state folder.

    Returns:
        Whether any file was written.

    Raises:
        OutputError: the files cannot be written, or the step's output is missing or damaged.
    """
    if step.kind != "quantize":
        return False
    outcome = read_made(places, step.key)
    wanted = {} if outcome is None else outcome.files
    known = Digests(places.state) if digests is None else digests
    moved = [_put(made_files(step, places, job), job, places, wanted, known) for job in step.jobs]
    if digests is None:
        known.save()
    return any(moved)


def made_files(step: Step, places: Places, job: Job) -> list[Path]:
    """Return the output files of a step, the model last.

    Raises:
        OutputError: the model is missing.
    """
    folder = places.made(step.work) / FILES
    model = folder / file_name(job)
    found = sorted(path for path in folder.iterdir() if path != model) if folder.is_dir() else []
    if not model.is_file():
        raise OutputError(f"'{folder}' does not hold '{model.name}' any more: run the batch with --force")
    return [*found, model]


def _put(files: list[Path], job: Job, places: Places, wanted: dict[str, str], digests: Digests) -> bool:
    """Copy the files of one job to its output."""
    output = revealed(job.output)
    place = local_path(output)
    if place is None:
        upload(files, output)
        return True
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        told = escape_of(place, places, outside=job.outside_output)
        if told is not None:
            raise OutputError(f"'{job.output}' {told}")
        targets = [place.with_name(file.name) for file in files[:-1]] + [place]
        moved = [
            _copy(file, target, wanted.get(file.name), digests) for file, target in zip(files, targets, strict=True)
        ]
    except OSError as error:
        raise OutputError(f"'{job.output}' cannot be written: {error.strerror or error}") from error
    return any(moved)


def _copy(source: Path, target: Path, wanted: str | None, digests: Digests) -> bool:
    """Copy one file over an existing one, atomically; return False if it was already up to date.

    Args:
        wanted: digest of the file.
    """
    is_replaceable(target)
    if not os.path.islink(target) and digests.of(target) == wanted and not target.samefile(source):
        return False
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        _clone(source, temporary)
        if file_digest(temporary).hex() != wanted:
            digests.forget(source)
            raise OutputError(f"'{source}' is damaged: run the batch again, which makes it anew")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _clone(source: Path, target: Path) -> None:
    """Copy to a new file; blocks are shared if the file system supports it."""
    with source.open("rb") as ours, target.open("xb") as theirs:
        if sys.platform == "linux":
            try:
                fcntl.ioctl(theirs.fileno(), FICLONE, ours.fileno())
                return
            except OSError:  # different file systems, or cloning not supported
                pass
    shutil.copyfile(source, target)


__all__ = ["made_files", "publish"]

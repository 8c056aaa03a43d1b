"""Puts what a step has made where its jobs want it."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Final

from sbonnx.batch.hidden import revealed
from sbonnx.batch.job import Job, Places, Step
from sbonnx.batch.remote import upload
from sbonnx.batch.steps import file_name
from sbonnx.batch.urls import local_path
from sbonnx.errors import OutputError
from sbonnx.graph.files import is_replaceable

FILES: Final = "files"
"""Folder, in that of a step, with the model and its data files."""

CHUNK: Final = 1 << 20


def publish(step: Step, places: Places) -> bool:
    """The files of a step at the outputs of its jobs: each whole or not at all, data files first, the model last.

    What is there already is left alone. A hard link where the file system has them, else a copy.

    Returns:
        Whether anything was to be done.

    Raises:
        OutputError: they cannot be put there, or the step has made none.
    """
    if step.kind != "quantize":
        return False
    moved = [_put(made_files(step, places, job), job) for job in step.jobs]
    return any(moved)


def made_files(step: Step, places: Places, job: Job) -> list[Path]:
    """The files that a step has made, the model last.

    Raises:
        OutputError: there is no model.
    """
    folder = places.made(step.key) / FILES
    model = folder / file_name(job)
    found = sorted(path for path in folder.iterdir() if path != model) if folder.is_dir() else []
    if not model.is_file():
        raise OutputError(f"'{folder}' does not hold '{model.name}' any more: run the batch with --force")
    return [*found, model]


def _put(files: list[Path], job: Job) -> bool:
    """The files of one job at its output."""
    wanted = revealed(job.output)
    place = local_path(wanted)
    if place is None:
        upload(files, wanted)
        return True
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        moved = [_link(file, place.with_name(file.name) if file != files[-1] else place) for file in files]
    except OSError as error:
        raise OutputError(f"'{job.output}' cannot be written: {error.strerror or error}") from error
    return any(moved)


def _link(source: Path, target: Path) -> bool:
    """One file at its place, over an older one; whether it was not there yet."""
    is_replaceable(target)
    if _same(source, target):
        return False
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without links
            shutil.copyfile(source, temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def _same(source: Path, target: Path) -> bool:
    """Whether the target is the file itself, or has its bytes."""
    if not target.is_file() or source.stat().st_size != target.stat().st_size:
        return False
    if source.samefile(target):
        return True
    with source.open("rb") as ours, target.open("rb") as theirs:
        while chunk := ours.read(CHUNK):
            if chunk != theirs.read(CHUNK):
                return False
    return True


__all__ = ["FILES", "made_files", "publish"]

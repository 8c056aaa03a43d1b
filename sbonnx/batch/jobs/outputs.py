"""Outputs of jobs: which paths are allowed, and publication of the files of steps."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from sbonnx.batch.file_digests import Digests
from sbonnx.batch.jobs.job import Job, Places, Step
from sbonnx.batch.metric import sources_of
from sbonnx.batch.outcomes import FILES, read_made
from sbonnx.batch.redaction import revealed
from sbonnx.batch.remote import is_url, local_path, upload
from sbonnx.errors import OutputError, SbonnxError
from sbonnx.graph.digests import file_digest
from sbonnx.graph.storage.output_files import is_replaceable
from sbonnx.recipe import AUTO

RESERVED: Final = ("report.json", "report.html", "report.xml", ".sbonnx")
"""Names in the output folder that the batch itself writes."""

LONGEST_NAME: Final = 230
"""Maximum bytes of a file name. Most file systems allow 255, and temporary names are longer."""

LONGEST_PATH: Final = 4000
"""Maximum bytes of a path. Linux allows 4095."""


def escape_of(place: Path, places: Places, *, outside: bool) -> str | None:
    """Return the reason why a path is not allowed as an output, or None. Symbolic links are followed.

    Args:
        outside: whether paths outside the output folder are allowed.
    """
    root = os.path.realpath(places.output)
    parent = os.path.realpath(place.parent)
    if parent != root and not parent.startswith(root.rstrip(os.sep) + os.sep):
        how = "move it there, or allow it with outside_output: true"
        return None if outside else f"is outside the output folder '{places.output}': {how}"
    if os.path.relpath(os.path.join(parent, place.name), root).split(os.sep)[0] in RESERVED:
        return "is a file that the batch itself writes: use another name"
    return None


def refusal(job: Job, places: Places) -> str | None:
    """Return the reason why a job cannot write its output; None if it can, or if the output is a remote URL."""
    output = revealed(job.output)
    place = local_path(output)
    if place is None:
        return None
    longest = max((len(os.fsencode(part)) for part in place.parts), default=0)
    if longest > LONGEST_NAME:
        return f"has a name of {longest} bytes, more than {LONGEST_NAME}: shorten it"
    if len(os.fsencode(place)) > LONGEST_PATH:
        return f"has a path of {len(os.fsencode(place))} bytes, more than {LONGEST_PATH}: shorten it"
    return escape_of(place, places, outside=job.outside_output)


def file_name(job: Job) -> str:
    """Return the name of the file that a job writes, without its folder."""
    bare = job.output.split("?")[0] if is_url(job.output) else job.output
    return bare.replace(os.sep, "/").rstrip("/").rpartition("/")[2]


class Inputs:
    """Files and folders that jobs read, by real path.

    Args:
        jobs: jobs of one batch.
        files: additional inputs as (description, path), such as the job file.
    """

    def __init__(self, jobs: Iterable[Job], files: Iterable[tuple[str, Path]] = ()) -> None:
        self._files = {os.path.realpath(path): what for what, path in files}
        self._folders: dict[str, str] = {}
        seen: set[str] = set()
        for job in jobs:
            metric = job.accept.metric
            names = {
                "the model": job.model,
                "the data": job.data,
                "the preprocessing": job.preprocess_file,
                "the recipe": None if job.recipe == AUTO else job.recipe,
                "the metric": None if metric is None else metric.rpartition(":")[0],
                "the labelled data": None if job.evaluation is None else job.evaluation.data,
                "the vocabulary": None if job.evaluation is None else job.evaluation.vocabulary,
            }
            libraries = [("the library", name) for name in job.ort_libraries]
            for what, name in (*names.items(), *libraries):
                if name is not None and name not in seen:
                    seen.add(name)
                    self._add(what, name, job.name)

    def add(self, path: Path, what: str) -> None:
        self._files[os.path.realpath(path)] = what

    def over(self, output: str) -> str | None:
        """Return the input that a job would overwrite, or None. The external data file next to the model counts too."""
        place = local_path(output)
        if place is None:
            return None
        for path in (os.path.realpath(place), os.path.realpath(f"{place}.data")):
            if path in self._files:
                return self._files[path]
            folder = next((folder for folder in self._folders if path.startswith(folder + os.sep)), None)
            if folder is not None:
                return f"part of {self._folders[folder]}"
        return None

    def _add(self, what: str, name: str, job: str) -> None:
        try:
            path = local_path(revealed(name))
        except SbonnxError:  # the step reports the error
            return
        if path is None:
            return
        called = f"{what} of '{job}'"
        real = os.path.realpath(path)
        if os.path.isdir(path):
            self._folders[real.rstrip(os.sep)] = called
            return
        self._files[real] = called
        if what == "the metric":
            for source in sources_of(path):
                self._files[os.path.realpath(source)] = called


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
    cache = Digests(places.state) if digests is None else digests
    moved = [_put(made_files(step, places, job), job, places, wanted, cache) for job in step.jobs]
    if digests is None:
        cache.save()
    return any(moved)


def made_files(step: Step, places: Places, job: Job) -> list[Path]:
    """Return the output files of a step, the model last.

    Raises:
        OutputError: the model is missing.
    """
    folder = places.made(step.work) / FILES
    model = folder / file_name(job)
    data_files = sorted(path for path in folder.iterdir() if path != model) if folder.is_dir() else []
    if not model.is_file():
        raise OutputError(f"'{folder}' has no file '{model.name}' any more: run the batch with --force")
    return [*data_files, model]


def _put(files: list[Path], job: Job, places: Places, wanted: dict[str, str], digests: Digests) -> bool:
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
    except OutputError:
        raise
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
            raise OutputError(f"'{source}' is damaged: run the batch again, which creates it again")
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

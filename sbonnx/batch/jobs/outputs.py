"""Validation of the output paths of jobs: inside the output folder, and not a file that a job reads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from sbonnx.batch.jobs.job import Job, Places
from sbonnx.batch.metric import sources_of
from sbonnx.batch.redaction import revealed
from sbonnx.batch.storage.urls import local_path
from sbonnx.errors import SbonnxError
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
        return "is what the batch itself writes: give another name"
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
            for what, name in _named(job):
                if name not in seen:
                    seen.add(name)
                    self._add(what, name, job.name)

    def add(self, path: Path, what: str) -> None:
        """Add one file."""
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


def _named(job: Job) -> Sequence[tuple[str, str]]:
    metric = job.accept.metric
    rows = (
        ("the model", job.model),
        ("the data", job.data),
        ("the recipe", None if job.recipe == AUTO else job.recipe),
        ("the metric", None if metric is None else metric.rpartition(":")[0]),
    )
    return [(what, name) for what, name in rows if name is not None]


__all__ = ["Inputs", "escape_of", "refusal"]

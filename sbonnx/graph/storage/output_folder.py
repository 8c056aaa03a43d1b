"""Output folders: a copy of an input folder with other models, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sbonnx.errors import OutputError, SbonnxError
from sbonnx.graph.storage.temporary import MARKER, REPLACED, SUFFIX, restore, sweep_once, temporary_folder
from sbonnx.report.codes import Note
from sbonnx.system.input_files import check_regular, protected_inputs

SHOWN: Final = 5
"""Names of files in a note."""


@dataclass(frozen=True)
class OutputFolder:
    """A folder to write.

    Attributes:
        target: its path.
        source: folder that is copied in part; None: there is none.
        inputs: files that are read during the run.
        provenance: name of the file by which a folder of an earlier run is recognized.
        force: an existing folder may be replaced, if an earlier run wrote it.
    """

    target: Path
    source: Path | None
    inputs: tuple[Path, ...]
    provenance: str
    force: bool

    def check(self) -> None:
        """Check, before the work begins, that the folder may be written.

        Raises:
            OutputError: it is the input, contains it or is in it, exists and `force` is not set, is no folder of an
                earlier run, or its parent folder is missing or not writable.
        """
        sweep_once(self.target.absolute().parent)  # a killed run may have left the folder that it was replacing
        target, inputs = self.target, [path.resolve() for path in (*self.inputs, *protected_inputs())]
        if self.source is not None:
            inputs.append(self.source.resolve())
        there = target.resolve()
        if any(there == path or there in path.parents for path in inputs):
            raise OutputError(f"'{target}' is or contains the input: give another name for the output folder")
        if any(path in there.parents for path in inputs):
            raise OutputError(f"'{target}' is in an input folder, and would be read with it: give a name outside of it")
        parent = target.absolute().parent
        if not parent.is_dir():
            raise OutputError(f"there is no folder '{parent}' to write '{target.name}' to: create it first")
        if not os.access(parent, os.W_OK | os.X_OK):
            raise OutputError(f"'{target}' cannot be written: no permission in '{parent}'")
        if not os.path.lexists(target):
            return
        if target.is_symlink() or not target.is_dir():
            raise OutputError(f"'{target}' is not a folder: give the name of a folder to write")
        if not any(target.iterdir()):
            return
        if not self.force:
            raise OutputError(f"'{target}' exists: give --force (force=True) to replace it")
        if not (target / self.provenance).is_file():
            raise OutputError(
                f"'{target}' has no {self.provenance}, so no earlier run wrote it: remove it, or name another"
            )

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """Yield a hidden folder next to `target`, which becomes `target` when the block ends.

        After an exception or an interrupt, `target` is as before; after a kill, as before or as a complete run leaves
        it, at the latest when the next run in this place begins.

        Raises:
            OutputError: as in `check`, or the disk is full.
        """
        self.check()
        target = self.target
        try:
            with temporary_folder(next_to=target.absolute()) as temporary:
                stage = temporary / "folder"
                stage.mkdir()
                try:
                    yield stage
                except OutputError as error:
                    raise OutputError(str(error).replace(str(stage), str(target))) from error
                self.check()
                if target.exists():
                    (temporary / REPLACED).mkdir()
                    os.replace(target, temporary / REPLACED / target.name)
                try:
                    os.replace(stage, target)
                except BaseException:
                    restore(temporary)
                    raise
        except SbonnxError:
            raise
        except OSError as error:
            raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error

    def copy_source(self, stage: Path, *, skipped: Collection[Path] = (), copied: Collection[str] = ()) -> list[Note]:
        """Place the files of the source folder in the staged folder, except `inputs` and `skipped`.

        Only regular files of the folder are placed, see `is_own_file`. A link in a downloaded folder may lead to any
        file of the user, which would be published with the output.

        Args:
            stage: folder that `staged` yields.
            skipped: more files that are left out.
            copied: names of files that may be edited, which are copied; others are hard-linked where possible.

        Returns:
            A note about what was left out because it is not such a file; none if there is nothing.

        Raises:
            OSError: a file cannot be copied.
        """
        assert self.source is not None
        left_out = {os.path.realpath(path) for path in (*self.inputs, *skipped)}
        foreign: list[str] = []
        for path in _entries(self.source):
            inside = path.relative_to(self.source)
            hidden = any(part == MARKER or (part.startswith(".") and part.endswith(SUFFIX)) for part in inside.parts)
            if hidden or inside.name == self.provenance or os.path.realpath(path) in left_out:
                continue
            if not is_own_file(path, self.source):
                foreign.append(str(inside))
                continue
            place = stage / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            if inside.name in copied:
                shutil.copyfile(path, place)
            else:
                _link(path, place)
        return left_out_notes(self.source, foreign)


def left_out_notes(folder: Path, names: Sequence[str]) -> list[Note]:
    """Return a note about entries of a folder that are not copied, if there are any."""
    if not names:
        return []
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    listed = ", ".join(f"'{name}'" for name in names[:SHOWN])
    return [
        Note(
            "files-not-copied",
            f"not copied from '{folder}': {listed}{more}: only regular files are copied, and no "
            "links out of the folder",
        )
    ]


def is_own_file(path: Path, folder: Path) -> bool:
    """Whether a path is a regular file of a folder, links resolved.

    In the cache of the Hugging Face hub (``models--NAME/snapshots/REVISION``), links to its ``blobs`` count too.
    """
    try:
        check_regular(path)
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        return False
    top = folder.resolve()
    blobs = [parent.parent.parent / "blobs" for parent in (top, top.parent) if parent.parent.name == "snapshots"]
    return any(real.is_relative_to(root) for root in (top, *(parent for parent in blobs if not parent.is_symlink())))


def _entries(folder: Path) -> Iterator[Path]:
    """Yield the entries of a folder and its subfolders, without folders, sorted; links to folders are not followed."""
    for root, folders, files in os.walk(folder):
        folders.sort()
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in sorted((*files, *links)))


def _link(path: Path, place: Path) -> None:
    """Hard-link a file, or copy it where links are not possible."""
    try:
        os.link(path.resolve(), place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, place)

"""Output folders: a copy of an input folder with other models, written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from sbonnx.errors import OutputError
from sbonnx.graph.storage.temporary import MARKER, SUFFIX, temporary_folder


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
        target, inputs = self.target, [path.resolve() for path in self.inputs]
        if self.source is not None:
            inputs.append(self.source.resolve())
        there = target.resolve()
        if any(there == path or there in path.parents for path in inputs):
            raise OutputError(f"'{target}' is or contains the input: give another name for the output folder")
        if self.source is not None and self.source.resolve() in there.parents:
            raise OutputError(
                f"'{target}' is in the input folder, and would be copied with it next time: give a name outside of it"
            )
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

        After an exception, an interrupt or a kill, `target` is as before.

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
                    os.replace(target, temporary / "replaced")
                try:
                    os.replace(stage, target)
                except OSError:
                    with suppress(OSError):
                        os.replace(temporary / "replaced", target)
                    raise
        except OSError as error:
            raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error

    def copy_source(self, stage: Path, *, skipped: Collection[Path] = (), copied: Collection[str] = ()) -> None:
        """Place the files of the source folder in the staged folder, except `inputs` and `skipped`.

        Args:
            stage: folder that `staged` yields.
            skipped: more files that are left out.
            copied: names of files that may be edited, which are copied; others are hard-linked where possible.

        Raises:
            OSError: a file cannot be copied.
        """
        assert self.source is not None
        left_out = {path.resolve() for path in (*self.inputs, *skipped)}
        for path in sorted(self.source.rglob("*")):
            inside = path.relative_to(self.source)
            hidden = any(part == MARKER or (part.startswith(".") and part.endswith(SUFFIX)) for part in inside.parts)
            if path.is_dir() or path.resolve() in left_out or hidden or inside.name == self.provenance:
                continue
            place = stage / inside
            place.parent.mkdir(parents=True, exist_ok=True)
            if inside.name in copied:
                shutil.copyfile(path, place)
            else:
                _link(path, place)


def _link(path: Path, place: Path) -> None:
    """Hard-link a file, or copy it where links are not possible."""
    try:
        os.link(path.resolve(), place)
    except OSError:  # another file system, or one without links
        shutil.copyfile(path, place)

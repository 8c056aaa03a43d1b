"""A model file that appears only once it has proved itself."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sbonnx.errors import OutputError, SbonnxError
from sbonnx.graph.files import check_target


@contextmanager
def staged(target: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> Iterator[Path]:
    """A path of the same name in a hidden folder beside `target`, to write to and to test.

    What lies in that folder (the model and its data files, which it names relative to itself) moves to its place
    when the block ends; an exception or an interrupt leaves nothing, and an older file as it was.

        with staged(Path("m.int8.onnx")) as path:
            save(graph, path)
            prove(path)

    Args:
        inputs, force: see `check_target`.

    Raises:
        OutputError: see `check_target`; or the folder cannot be written to.
    """
    inputs = list(inputs)
    check_target(target, inputs, force=force)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error
    try:
        yield folder / target.name
        made = sorted(folder.iterdir(), key=lambda path: path.name == target.name)  # the model last
        for path in made:
            check_target(target.parent / path.name, inputs, force=force)
        try:
            for path in made:
                os.replace(path, target.parent / path.name)
        except OSError as error:
            raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error
    except SbonnxError as error:  # in words of the place that the user knows
        raise type(error)(str(error).replace(str(folder / target.name), str(target))) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)

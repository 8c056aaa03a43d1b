"""Staging of model files: a file is published only after it was verified."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from sbonnx.errors import OutputError, SbonnxError
from sbonnx.graph.storage.files import check_target, move
from sbonnx.graph.storage.temporary import MARKER, temporary_folder


@contextmanager
def staged(target: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder next to `target`, to write to and to test.

    The files in that folder (the model and its data files, which it references relatively) are moved to their final
    place when the block ends. An exception or an interrupt leaves nothing behind, and an older file unchanged.

        with staged(Path("m.int8.onnx")) as path:
            save(graph, path)
            prove(path)

    Args:
        inputs, force: as in `check_target`.

    Raises:
        OutputError: as in `check_target`; or the folder cannot be written to.
    """
    inputs = list(inputs)
    check_target(target, inputs, force=force)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(beside=target))
        except OSError as error:
            raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error
        try:
            yield folder / target.name
            _publish(folder, target, inputs, force=force)
        except (SbonnxError, OSError) as error:
            if not folder.is_dir():
                raise OutputError(f"'{target}' cannot be written: its folder was removed during the run") from error
            if isinstance(error, OSError):
                raise
            # with the path that the user knows
            raise type(error)(str(error).replace(str(folder / target.name), str(target))) from error


def _publish(folder: Path, target: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Move the files to their final path, the model last."""
    made = [path for path in folder.iterdir() if path.name != MARKER]
    made.sort(key=lambda path: path.name == target.name)
    for path in made:
        check_target(target.parent / path.name, inputs, force=force)
    try:
        for path in made:
            move(path, target.parent / path.name)
    except OSError as error:
        raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error

"""Model files on disk, written whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sbonnx.errors import OutputError
from sbonnx.graph import wire
from sbonnx.graph.write import Skeleton

EXTERNAL_BYTES: Final = 3 << 29
"""Weights of more than 1.5 GiB go to a file of their own: protobuf can hold 2 GiB in all."""

ALIGNMENT: Final = 4096
"""Each tensor of a data file starts at a page, so that runtimes can map it."""


def model_pieces(made: Skeleton) -> Iterator[bytes | memoryview]:
    """The bytes of the model with its weights inside, in pieces; the same graph gives the same bytes."""
    for piece in wire.inflate(made.model.SerializeToString(deterministic=True), made.sizes()):
        if piece.payload is None:
            yield piece.content
        else:
            yield from made.chunks(piece.payload)


def write_model(
    made: Skeleton, path: Path, *, inputs: Iterable[Path], force: bool, external_over: int = EXTERNAL_BYTES
) -> None:
    """Write a model, weights streamed: inside, or beside it in `<name>.data` when they are too many.

    Args:
        inputs: files that must not be written over: the model that was read, and its data.
        force: replace an existing file.
        external_over: bytes of weights past which they go to the data file.

    Raises:
        OutputError: the file exists, is an input, or cannot be written. Nothing is left behind then.
    """
    external = sum(made.sizes()) > external_over
    data = path.with_name(f"{path.name}.data")
    targets = [path, data] if external else [path]
    for target in targets:
        check_target(target, inputs, force=force)
    with _reporting(path), _temporary(path) as temporary:
        if not external:
            _write(temporary, model_pieces(made))
            os.replace(temporary, path)
            return
        with _temporary(data) as temporary_data:
            places = list(_places(made.sizes()))
            _write(temporary_data, _data_pieces(made, places))
            _write(temporary, [_with_locations(made, data.name, places)])
            new = not data.exists()
            os.replace(temporary_data, data)
            try:
                os.replace(temporary, path)
            except BaseException:
                if new:
                    data.unlink()
                raise


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a small file whole or not at all, over what is there.

    Raises:
        OutputError: it cannot be written there.
    """
    check_target(path, (), force=True)
    with _reporting(path), _temporary(path) as temporary:
        _write(temporary, [content])
        os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` of a text in UTF-8."""
    write_bytes(path, text.encode())


def check_target(path: Path, inputs: Iterable[Path], *, force: bool) -> None:
    """That a file may be written here, before the work begins.

    Args:
        inputs: files that must not be written over.
        force: an existing file may be replaced.

    Raises:
        OutputError: a folder, in no folder, an input, or there already.
    """
    if path.is_dir():
        raise OutputError(f"'{path}' is a folder: give the name of the file to write")
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder '{path.parent}' to write '{path.name}' to: make it first")
    if not path.exists():
        return
    if any(given.exists() and path.samefile(given) for given in inputs):
        raise OutputError(f"'{path}' is an input of this run: give another name for the output")
    if not force:
        raise OutputError(f"'{path}' exists: give --force (force=True) to replace it")


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Turns what the system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """A name beside the file for the time of writing. Whatever happens, nothing of it stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    with open(path, "xb") as file:
        for content in contents:
            file.write(content)


def _places(sizes: Iterable[int]) -> Iterator[int]:
    """Offset of each payload in the data file."""
    at = 0
    for size in sizes:
        yield at
        at += size + -size % ALIGNMENT


def _data_pieces(made: Skeleton, places: list[int]) -> Iterator[bytes | memoryview]:
    at = 0
    for number, (place, size) in enumerate(zip(places, made.sizes(), strict=True)):
        yield bytes(place - at)
        yield from made.chunks(number)
        at = place + size


def _with_locations(made: Skeleton, file: str, places: list[int]) -> bytes:
    """The model's bytes, its references turned into places of the data file."""
    return made.located(lambda number, size: {"location": file, "offset": str(places[number]), "length": str(size)})

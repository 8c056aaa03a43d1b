"""Safe reading of input files: only regular files of bounded size, so that every read ends."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

KINDS: Final = {
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}
"""Names of the file types, by `stat.S_IFMT`, that reading would block on or never finish."""

_PIECE: Final = 1 << 20

LARGEST_JSON: Final = 1 << 26
"""Default maximum size in bytes of a JSON file, which takes about ten times as much memory."""

_protected: list[Path] = []
"""Inputs of the runs that are in progress, see `protecting`."""


@contextmanager
def protecting(inputs: Iterable[str | os.PathLike[str] | None]) -> Iterator[None]:
    """Refuse outputs at these files, and in these folders, within the context (`graph.check_target`).

    Args:
        inputs: whatever names the inputs of a run; names of nothing that exists have no effect.
    """
    count = len(_protected)
    _protected.extend(Path(path) for path in inputs if path is not None and os.path.exists(path))
    try:
        yield
    finally:
        del _protected[count:]


def protected_inputs() -> tuple[Path, ...]:
    """Return the files and folders of `protecting`."""
    return tuple(_protected)


def native_source(path: str | os.PathLike[str]) -> str | bytes:
    """Return a model file in the form that onnx and onnxruntime accept: its path, or its content if that is not UTF-8.

    They cannot find the external data of a model that is passed as content.
    """
    name = os.fspath(path)
    try:
        name.encode()
    except UnicodeEncodeError:
        with open(name, "rb") as file:
            return file.read()
    return name


def check_regular(path: str | os.PathLike[str]) -> int:
    """Return the size in bytes of a regular file; links are followed.

    Raises:
        OSError: there is no such file, or it is not a regular file; `strerror` gives the reason.
    """
    try:
        status = os.stat(path)
    except ValueError as error:  # a NUL, an unpaired surrogate
        raise OSError(errno.EINVAL, "the system has no such names", os.fspath(path)) from error
    return _regular_size(status, path)


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Open a regular file for reading; never block on a FIFO without a writer.

    Raises:
        OSError: as in `check_regular`, or it cannot be opened.
    """
    check_regular(path)  # first: opening a device can have side effects
    file = open(path, "rb", opener=_opened_at_once)  # noqa: SIM115
    try:
        _regular_size(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def read_regular(path: str | os.PathLike[str], largest: int) -> bytes:
    """Read a regular file of at most `largest` bytes.

    Raises:
        OSError: as in `open_regular`, or it is larger.
    """
    with open_regular(path) as file:
        return read_opened(file, largest)


def read_opened(file: IO[bytes], largest: int) -> bytes:
    """Read an opened file of at most `largest` bytes.

    Raises:
        OSError: it is larger.
    """
    size = os.fstat(file.fileno()).st_size
    content = b"" if size > largest else file.read(size)
    while size <= largest and (more := file.read(_PIECE)):  # it grows, or the file system reports no size
        content += more
        size = len(content)
    if size > largest:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and at most {largest} are read", file.name)
    return content


def read_json(path: str | os.PathLike[str], largest: int = LARGEST_JSON) -> Any:
    """Read a JSON file of at most `largest` bytes.

    Raises:
        OSError: as in `read_regular`.
        ValueError: it is not UTF-8, not JSON, or nested too deeply.
    """
    return parse_json(read_regular(path, largest).decode("utf-8"))


def parse_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _regular_size(found: os.stat_result, path: str | os.PathLike[str]) -> int:
    if not stat.S_ISREG(found.st_mode):
        code = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        kind = KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(code, f"it is {kind}, not a regular file", os.fspath(path))
    return found.st_size


def _opened_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))

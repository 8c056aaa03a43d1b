"""Atomic writing of files, and staging of model files that are published only after verification."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import accumulate
from pathlib import Path
from typing import Final

from sbonnx.errors import OutputError, SbonnxError
from sbonnx.graph.exporter import Skeleton
from sbonnx.graph.storage.model_file import external_names
from sbonnx.graph.storage.temporary import MARKER, SUFFIX, temporary_folder
from sbonnx.system.input_files import protected_inputs

EXTERNAL_BYTES: Final = 1 << 28
"""If the weights have more than 256 MiB, they are written to a separate file, which checkers and runtimes map.

They hold up to five copies of a model file in memory, and protobuf limits it to 2 GiB.
"""

ALIGNMENT: Final = 4096
"""Each tensor of a data file starts at a page boundary, so that runtimes can map it."""

SPECIAL: Final = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a FIFO (named pipe)",
    stat.S_IFSOCK: "a socket",
}
"""File types that are never replaced. A rename over /dev/null by root would remove the device."""

MODEL_SUFFIX: Final = ".onnx"

OTHER_FORMATS: Final = frozenset(
    {".textproto", ".pbtxt", ".txtpb", ".prototxt", ".json", ".onnxjson", ".onnxtext", ".onnxtxt", ".ort"}
)
"""Suffixes by which `onnx.load` reads other formats (`onnx.serialization.registry`), and onnxruntime its own."""


def write_model(
    made: Skeleton, path: Path, *, inputs: Iterable[Path], force: bool, external_over: int = EXTERNAL_BYTES
) -> None:
    """Write a model, weights streamed: in the model file, or in `<name>.data` next to it if they are too large.

    Args:
        inputs: files that must not be overwritten: the model that was read, and its data.
        force: replace an existing file.
        external_over: if the weights have more bytes, they are written to the data file.

    Raises:
        OutputError: the file exists, is an input, or cannot be written. No partial file is left.
    """
    external = sum(made.sizes()) > external_over
    data = path.with_name(f"{path.name}.data")
    targets = [path, data] if external else [path]
    for target in targets:
        check_target(target, inputs, force=force, model=target is path)
    with _reporting(path), _temporary(path) as temporary:
        if not external:
            _write(temporary, made.pieces())
            move(temporary, path)
            return
        with _temporary(data) as temporary_data:
            offsets = list(accumulate((size + -size % ALIGNMENT for size in made.sizes()), initial=0))

            def place(number: int, size: int) -> dict[str, str]:
                return {"location": data.name, "offset": str(offsets[number]), "length": str(size)}

            _write(temporary_data, _data_pieces(made))
            _write(temporary, [made.located(place)])
            new = not data.exists()
            move(temporary_data, data)
            try:
                move(temporary, path)
            except BaseException:
                if new:
                    data.unlink()
                raise


def write_bytes(path: Path, content: bytes | memoryview) -> None:
    """Write a small file atomically; an existing file is replaced.

    Raises:
        OutputError: it cannot be written there.
    """
    with replacing(path) as temporary:
        _write(temporary, [content])


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8 with `write_bytes`; lone surrogates become backslash escapes."""
    write_bytes(path, text.encode(errors="backslashreplace"))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path whose file replaces `path` when the block ends; after an exception `path` is unchanged.

    Raises:
        OutputError: it cannot be written there.
    """
    check_target(path, (), force=True)
    with _reporting(path), _temporary(path) as temporary:
        yield temporary
        move(temporary, path)


def check_target(path: Path, inputs: Iterable[Path], *, force: bool, model: bool = False) -> None:
    """Check, before the work begins, that a file may be written here.

    A symlink to a regular file counts as that file; writing replaces the link, not its target.

    Args:
        inputs: files that must not be overwritten, including outputs of the same run that do not exist yet. Those of
            `protecting` are added.
        force: an existing file may be replaced.
        model: it is a model, whose suffix must not be of another format, in which onnx and runtimes would read it.

    Raises:
        OutputError: a folder, device, FIFO or socket, or a symlink to one; its folder is missing or not writable; an
            input, external data of a model included; in an input folder; or it exists and `force` is False.
    """
    there = is_replaceable(path)
    if model and path.suffix.lower() in OTHER_FORMATS:
        raise OutputError(f"'{path}': models are written as protobuf, and {path.suffix} is another format: use .onnx")
    folder = path.parent
    if not os.path.isdir(folder):
        raise OutputError(f"there is no folder '{folder}' to write '{path.name}' to: create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise OutputError(f"'{path}' cannot be written: {reason}: name another folder")
    if any(_same(path, given) for given in inputs):
        kind = "an input of this run" if there else "another output of this run"
        raise OutputError(f"'{path}' is {kind}: give another name for the output")
    check_outside_inputs(path)
    if there and not force:
        raise OutputError(f"'{path}' exists: give --force (force=True) to replace it")


def check_outside_inputs(path: Path) -> None:
    """Check that a file or folder is no input of `protecting`, no external data of one, and in no input folder.

    Raises:
        OutputError: it is.
    """
    place, there = Path(os.path.realpath(path.parent)) / path.name, os.path.exists(path)
    if place.parent.name.endswith(SUFFIX):  # staged
        place = place.parents[1] / place.name
    inputs = protected_inputs()
    with_models = {os.path.realpath(given.parent) for given in inputs if given.suffix.lower() == MODEL_SUFFIX}
    for given in inputs:
        if given.is_dir():
            folder = os.path.realpath(given)
            # a model next to the input model, in a folder that has test_data_set_* too
            beside = str(place.parent) == folder in with_models and MODEL_SUFFIX in path.suffixes
            if place.is_relative_to(folder) and not beside:
                raise OutputError(f"'{path}' is in '{given}', an input of this run: name a file outside of it")
        elif there and any(_same(path, input_file) for input_file in _files_of(given)):
            raise OutputError(f"'{path}' is an input of this run: give another name for the output")


def _files_of(given: Path) -> Iterator[Path]:
    yield given
    if given.suffix.lower() == MODEL_SUFFIX:
        yield from (given.parent / name for name in external_names(given))


def is_replaceable(path: Path) -> bool:
    """Whether a regular file, a symlink to one or a dangling symlink exists at `path`; False if nothing does.

    Raises:
        OutputError: something else exists there, or the name is invalid.
    """
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            with suppress(FileNotFoundError):
                mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a NUL, or an unpaired surrogate
        raise OutputError(f"'{path}' cannot be written: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISDIR(mode):
        raise OutputError(f"'{path}' is a folder: give the name of the file to write")
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        kind = SPECIAL.get(stat.S_IFMT(mode), "a special file")
        raise OutputError(f"'{path}' is {kind}, not a regular file: give the name of a file to write")
    return True


def move(temporary: Path, path: Path) -> None:
    """Rename a file to its final path, replacing a regular file.

    Raises:
        OutputError: as in `is_replaceable`.
        OSError: it cannot be renamed.
    """
    is_replaceable(path)
    os.replace(temporary, path)


def _same(path: Path, other: Path) -> bool:
    """Whether two names refer to one file, which may not exist yet."""
    try:
        return os.path.samefile(path, other)
    except (OSError, ValueError):
        return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def _reporting(path: Path) -> Iterator[None]:
    """Convert errors of the system to one-line messages."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not path.parent.is_dir():
            raise OutputError(f"'{path}' cannot be written: its folder was removed during the run") from error
        raise OutputError(f"'{path}' cannot be written: {error.strerror or error}") from error


@contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    """Yield a temporary path on the same file system. It is removed in any case."""
    with temporary_folder(next_to=path) as folder:
        yield folder / path.name


def _write(path: Path, contents: Iterable[bytes | memoryview]) -> None:
    with open(path, "xb") as file:
        for content in contents:
            file.write(content)


def _data_pieces(made: Skeleton) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the data file: payloads, each padded to the alignment except the last."""
    padding = 0
    for number, size in enumerate(made.sizes()):
        yield bytes(padding)
        yield from made.chunks(number)
        padding = -size % ALIGNMENT


@contextmanager
def staged(target: Path, inputs: Iterable[Path] = (), *, force: bool = False) -> Iterator[Path]:
    """Yield a path of the same name in a hidden folder next to `target`, to write to and to verify.

    The files in that folder (the model and its data files, which it references relatively) are moved to their final
    path when the block ends. After an exception or interrupt no file is left, and an older one is unchanged.

        with staged(Path("m.int8.onnx")) as path:
            save(graph, path)
            verify(path)

    Args:
        inputs, force: as in `check_target`.

    Raises:
        OutputError: as in `check_target`; or the folder cannot be written to.
    """
    inputs = list(inputs)
    check_target(target, inputs, force=force, model=True)
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(temporary_folder(next_to=target))
        except OSError as error:
            raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error
        try:
            yield folder / target.name
            _publish(folder, target, inputs, force=force)
        except (SbonnxError, OSError) as error:
            if not folder.is_dir():
                raise OutputError(f"'{target}' cannot be written: its folder was removed during the run") from error
            if not isinstance(error, SbonnxError):
                raise
            # with the path that the user knows
            raise type(error)(str(error).replace(str(folder / target.name), str(target))) from error


def _publish(folder: Path, target: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Move the files to their final path, the model last."""
    files = [path for path in folder.iterdir() if path.name != MARKER]
    files.sort(key=lambda path: path.name == target.name)
    for path in files:
        check_target(target.parent / path.name, inputs, force=force)
    try:
        for path in files:
            move(path, target.parent / path.name)
    except OSError as error:
        raise OutputError(f"'{target}' cannot be written: {error.strerror or error}") from error

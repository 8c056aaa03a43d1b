"""Outputs of a model as .npz files: one file, or a folder of one file per feed, which is also a form of data."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.errors import OutputError
from sbonnx.graph import check_target
from sbonnx.graph.storage.output_files import check_outside_inputs, write_bytes
from sbonnx.graph.storage.temporary import temporary_folder

LONGEST_NAME: Final = (1 << 16) - 1
"""Bytes of a name in a zip archive."""


def check_outputs_path(path: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Check, before the work begins, that outputs may be written here.

    Raises:
        OutputError: the path is an input, exists (a file without `force`, or a folder that is not empty), or has no
            folder.
    """
    check_outside_inputs(path)
    if path.suffix.lower() == ".npz":
        check_target(path, inputs=inputs, force=force)
    elif path.suffix and not path.is_dir():
        raise OutputError(f"-o {path}: outputs are written to FILE.npz, or to a folder without a suffix")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OutputError(f"'{path}' exists and is no empty folder: name another folder")
    elif not path.parent.is_dir():
        raise OutputError(f"there is no folder '{path.parent}' to write '{path.name}' to: create it first")


@contextmanager
def saving_outputs(path: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that takes the outputs of one feed. They are at `path` when the block ends, whole or not at all.

    Args:
        path: FILE.npz, where outputs of several feeds are joined along the leading axis; or a folder.

    Raises:
        OutputError: an output is no array of numbers, has a name that is too long, or cannot be joined.
    """
    if path.suffix.lower() == ".npz":
        parts: dict[str, list[Any]] = {}

        def add(outputs: Mapping[str, Any]) -> None:
            for name, value in outputs.items():
                parts.setdefault(name, []).append(value)

        yield add
        write_bytes(path, _npz({name: _joined(name, values) for name, values in parts.items()}))
        return
    with temporary_folder(next_to=path) as temporary:
        folder, numbers = temporary / path.name, count()
        folder.mkdir()

        def write(outputs: Mapping[str, Any]) -> None:
            (folder / f"{next(numbers):05}.npz").write_bytes(_npz(outputs))

        yield write
        folder.replace(path)


def _joined(name: str, values: list[Any]) -> Any:
    try:
        return values[0] if len(values) == 1 else np.concatenate(values)
    except ValueError as error:
        raise OutputError(
            f"the shapes of the output '{name}' differ from feed to feed and cannot be joined in one .npz: "
            "give -o a folder"
        ) from error


def _npz(arrays: Mapping[str, Any]) -> bytes:
    """Serialize arrays as .npz. `numpy.savez` cannot store every name, such as ``file``."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, value in arrays.items():
            if not isinstance(value, np.ndarray) or value.dtype.kind == "O":
                raise OutputError(f"the output '{name}' is no array of numbers and cannot be saved in .npz: drop -o")
            if len(f"{name}.npy".encode()) > LONGEST_NAME:
                raise OutputError(f"the name of the output '{name[:40]}...' is too long for .npz: drop -o")
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, value, allow_pickle=False)
    return buffer.getvalue()

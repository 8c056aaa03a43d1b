"""`DataPath`: a path of data with the preprocessing of its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sbonnx.errors import DataError

Preprocessing = str | os.PathLike[str] | Mapping[str, Any]
"""A preset such as "imagenet", the path of a file with settings, or the settings themselves; see docs/data.md."""


@dataclass(frozen=True)
class DataPath(os.PathLike[str]):
    """Path of data and how its files become inputs of a model; usable wherever data is given.

    Attributes:
        path: a file or folder of images, audio or text.
        preprocess: preset, file or settings; None: none given.
    """

    path: str | os.PathLike[str]
    preprocess: Preprocessing | None = None

    def __fspath__(self) -> str:
        return os.fspath(self.path)

    def __str__(self) -> str:
        return os.fspath(self.path)


def with_preprocess(data: Any, preprocess: Preprocessing | None) -> Any:
    """Return `data` with a preprocessing, or unchanged if that is None.

    Raises:
        DataError: `data` is no path: arrays are preprocessed already.
    """
    if preprocess is None:
        return data
    if not isinstance(data, (str, os.PathLike)):
        kind = "missing" if data is None else f"of type {type(data).__name__}"
        raise DataError(
            f"a preprocessing applies to paths of images, audio or text, and the data is {kind}: leave it out"
        )
    return DataPath(data.path if isinstance(data, DataPath) else data, preprocess)

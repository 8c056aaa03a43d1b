"""Data with its preprocessing: `DataPath` of files, `DataRows` of rows in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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


@dataclass(frozen=True)
class DataRows:
    """Rows with pictures or texts, such as a dataset of Hugging Face, and how they become inputs of a model.

    Usable wherever data is given. All other columns are labels, by their names.

    Attributes:
        rows: has a length, and mappings as items.
        preprocess: preset, file or settings.
        column: the column with the picture or text, or two columns with pairs of texts; None: the one that has them.
    """

    rows: Any
    preprocess: Preprocessing
    column: Any = None


def with_preprocess(data: Any, preprocess: Preprocessing | None) -> Any:
    """Return `data` with a preprocessing, or unchanged if that is None.

    Raises:
        DataError: `data` is neither a path nor rows: arrays are preprocessed already.
    """
    if preprocess is None:
        return data
    if not isinstance(data, (str, os.PathLike)):
        if isinstance(data, DataRows):
            return replace(data, preprocess=preprocess)
        if _has_rows(data):
            return DataRows(data, preprocess)
        kind = "missing" if data is None else f"of type {type(data).__name__}"
        raise DataError(
            f"a preprocessing applies to paths of images, audio or text and to rows with them, and the data is {kind}: "
            "leave it out"
        )
    return DataPath(data.path if isinstance(data, DataPath) else data, preprocess)


def _has_rows(data: Any) -> bool:
    """Whether the items of an object are mappings by position, as those of a list or of a dataset."""
    if isinstance(data, (Mapping, np.ndarray)) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        return False
    return len(data) == 0 or isinstance(data[0], Mapping)

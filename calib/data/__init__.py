"""Readers that present every kind of calibration data as one kind of source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sbonnx.calib.data.data_path import DataPath, DataRows, Preprocessing, with_preprocess
from sbonnx.calib.data.files import READERS, Reader, open_path
from sbonnx.calib.data.labels import LabelledFeed, Naming, cut_labels, loaded_labels, naming_of
from sbonnx.calib.data.objects import Pick, Sampling, Source, open_object
from sbonnx.calib.data.readers.python_file import open_python
from sbonnx.calib.data.readers.rows import open_rows
from sbonnx.calib.data.validate import Feed, InputSpec, cut, fitted, named, without_defaults
from sbonnx.system.python_files import names_function

ALL = Sampling()
"""Every feed, in order."""


def open_source(data: Any, inputs: Sequence[InputSpec], sampling: Sampling = ALL) -> Source:
    """Open the reader for `data`: a path by its contents, an object by its interface.

    Args:
        sampling: the feeds that will be used; of data that can be iterated only once, only these are kept.

    Raises:
        DataError: the data is of no supported kind.
    """
    if isinstance(data, (str, os.PathLike)):
        if names_function(os.fspath(data)) and not os.path.exists(data):
            return open_python(os.fspath(data), sampling)
        return open_path(data, inputs, sampling)
    if isinstance(data, DataRows):
        return open_rows(data, inputs)
    return open_object(data, sampling)


__all__ = [
    "ALL",
    "READERS",
    "DataPath",
    "DataRows",
    "Feed",
    "InputSpec",
    "LabelledFeed",
    "Naming",
    "Pick",
    "Preprocessing",
    "Reader",
    "Sampling",
    "Source",
    "cut",
    "cut_labels",
    "fitted",
    "loaded_labels",
    "named",
    "naming_of",
    "open_source",
    "with_preprocess",
    "without_defaults",
]

"""The contract of data readers."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from onnx import ModelProto

from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.errors import DataError


def check_reader(path: str | os.PathLike[str], model: ModelProto | str | os.PathLike[str]) -> None:
    """Check the data reader for the suffix of a file.

    The clauses: the feeds have the names, types and shapes of the model's inputs; a second iteration gives the same
    feeds, also after a first one was left early; a file without content is an error of one line; the file is not
    changed.

    Args:
        path: a file in the format of the reader, with at least one feed for the model.
        model: that the feeds are for.

    Raises:
        AssertionError: a clause is broken.
        DataError: no reader for the suffix is installed, or the reader cannot read the file.
    """
    path, graph = Path(path), graphs.load(model)
    where = f"reader of '{path.suffix}'"
    before = path.read_bytes()
    data = read(path, graph)
    next(iter(data))
    _check_same(where, data)
    assert path.read_bytes() == before, f"{where}: the file is not changed"
    empty = path.with_name(f"{path.stem}.empty{path.suffix}")
    try:
        empty.write_bytes(b"")
        read(empty, graph)
    except DataError as error:
        assert "\n" not in str(error), f"{where}: its errors have one line"
    else:
        raise AssertionError(f"{where}: a file without content is an error")
    finally:
        empty.unlink()


def _check_same(where: str, data: Dataset) -> None:
    first, second = list(data), list(data)
    assert len(first) == len(second), f"{where}: each iteration has all feeds"
    for feed, repeated in zip(first, second, strict=True):
        assert feed.keys() == repeated.keys(), f"{where}: each iteration has the same inputs"
        assert all(np.array_equal(feed[name], repeated[name], equal_nan=True) for name in feed), (
            f"{where}: each iteration gives the same values"
        )

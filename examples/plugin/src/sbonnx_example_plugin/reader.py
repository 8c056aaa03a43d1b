"""A data reader: tables in .csv files for models of one input; each row is one feed of one sample.

The first row has the names of the columns. A column `label` is the label, the others are the values of the input.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sbonnx.calib.data import InputSpec
from sbonnx.errors import DataError


def read_table(path: Path, inputs: Sequence[InputSpec]) -> Iterator[dict[str, Any]]:
    """Yield one feed for each row.

    Args:
        path: of the table.
        inputs: names, types and shapes of the inputs of the model.

    Raises:
        DataError: a cell is no number, or the model has several inputs.
    """
    if len(inputs) != 1:
        raise DataError(f"'{path}' is a table for one input, and the model has {len(inputs)}: save .npz files")
    (spec,) = inputs
    sample = [size if isinstance(size, int) else -1 for size in (spec.shape or (1, -1))[1:]]
    with path.open(newline="", encoding="utf-8") as file:
        for number, row in enumerate(csv.DictReader(file), start=1):
            label = row.pop("label", None)
            try:
                values = np.array([float(cell) for cell in row.values()], np.float32).reshape(1, *sample)
                target = None if label is None else np.array([int(label)])
            except (TypeError, ValueError) as error:
                raise DataError(f"'{path}', row {number}: {error}") from error
            yield {spec.name: values} if target is None else {spec.name: values, "label": target}

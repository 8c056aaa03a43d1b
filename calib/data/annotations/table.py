"""CSV tables: rows ``file,label`` or ``file,label,x1,y1,x2,y2``, one for each box."""

from __future__ import annotations

import csv
import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from sbonnx.calib.data.annotations.image_boxes import ImageBoxes, annotated, numbered, rows_of
from sbonnx.calib.data.readers.media_files import (
    CLASS_FILE,
    LARGEST,
    MediaFiles,
    class_lines,
    class_numbers,
    kind_of,
    read_labels,
)
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Categories
from sbonnx.system.input_files import read_regular

COLUMNS: Final = "file,label,x1,y1,x2,y2"
WIDTH: Final = 6
CORNERS: Final = (["x1", "y1", "x2", "y2"], ["xmin", "ymin", "xmax", "ymax"])
"""Names of the last four columns in a header."""


def has_boxes(path: Path) -> bool:
    """Return whether the first row of a table is one of boxes, or a header that names their corners."""
    cells = next(iter(_rows(path)), (0, []))[1]
    return len(cells) == WIDTH and (_is_header(cells) or all(_is_number(cell) or not cell for cell in cells[2:]))


def read_table(path: Path) -> tuple[str, MediaFiles]:
    """Read the files of a table, relative to its folder, with their labels or boxes. Return also their kind.

    Raises:
        DataError: a row is damaged, or a file is missing.
    """
    if has_boxes(path):
        return "images", _read_boxes(path)
    labels = {path.parent / name: label for name, label in read_labels(path).items()}
    kinds = {kind_of(file) for file in labels}
    missing = next((file for file in labels if not file.is_file()), None)
    if missing is not None or len(kinds) != 1 or kinds & {None, "texts"}:
        why = "names no files of images or audio" if missing is None else f"names '{missing}', which does not exist"
        raise DataError(f"'{path}' {why}: its rows are file,label or {COLUMNS}, with files relative to its folder")
    return kinds.pop() or "", MediaFiles(f"'{path}'", tuple(labels), labels)


def _rows(path: Path) -> list[tuple[int, list[str]]]:
    """Return the rows with their line numbers, without those that are empty."""
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text))
        return [(reader.line_num, [cell.strip() for cell in row]) for row in reader if row]
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"'{path}' is no table: {str(error).splitlines()[0]}") from error


def _is_header(cells: Sequence[str]) -> bool:
    return [cell.lower() for cell in cells[2:]] in CORNERS


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _read_boxes(path: Path) -> MediaFiles:
    """Read rows of boxes. An image without boxes has one row, with empty cells after its name."""
    rows = _rows(path)
    rows = rows[1:] if _is_header(rows[0][1]) else rows
    boxes: dict[Path, list[tuple[str, tuple[float, ...]]]] = defaultdict(list)
    for line, cells in rows:
        where = f"'{path}' line {line}"
        if len(cells) != WIDTH:
            raise DataError(f"{where} has {len(cells)} cells and needs {WIDTH}: {COLUMNS}")
        labelled = boxes[path.parent / cells[0]]
        if any(cells[1:]):
            labelled.append((cells[1], _corners(cells, where)))
    names = {name for rows_of_image in boxes.values() for name, _ in rows_of_image}
    numbers, categories = _classes(path, names)
    return annotated(
        f"'{path}'",
        {
            image: ImageBoxes(
                f"'{image}' of '{path}'",
                categories,
                rows_of([corners for _, corners in labelled]),
                np.array([numbers[name] for name, _ in labelled], np.int64),
            )
            for image, labelled in boxes.items()
        },
    )


def _corners(cells: Sequence[str], where: str) -> tuple[float, ...]:
    try:
        corners = tuple(float(cell) for cell in cells[2:])
    except ValueError as error:
        raise DataError(f"{where} must be {COLUMNS} with numbers, got {','.join(cells)[:80]}") from error
    if not all(map(math.isfinite, corners)) or corners[2] < corners[0] or corners[3] < corners[1]:
        raise DataError(f"{where} needs corners in pixels with x1 <= x2 and y1 <= y2: {','.join(cells)[:80]}")
    return corners


def _classes(path: Path, names: set[str]) -> tuple[Mapping[str, int], Categories]:
    """Return the numbers of the labels: numbers as they are, names as `class_numbers` says.

    Raises:
        DataError: a name is not in ``classes.txt``.
    """
    listed = path.parent / CLASS_FILE
    lines = class_lines(listed) if listed.is_file() else ()
    if all(name.isdecimal() for name in names):
        return {name: int(name) for name in names}, numbered(lines, f"'{path}'")
    return class_numbers(path.parent, sorted(names)), numbered(lines or sorted(names), f"'{path}'")

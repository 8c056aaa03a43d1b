"""Rows with pictures or texts, such as a dataset of Hugging Face `datasets`, as feeds with labels.

Rows are recognized by their form, so that no package is needed: anything with a length whose items are mappings.
Pictures are Pillow images, undecoded (``{"bytes": ..., "path": ...}``), uint8 arrays (height, width[, channels]).
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.data_path import DataRows
from sbonnx.calib.data.objects import Source
from sbonnx.calib.data.readers.image_settings import ImageSettings
from sbonnx.calib.data.readers.images import FORMATS, Picture, decode, open_pictures, reason_of, upright
from sbonnx.calib.data.readers.preprocess_values import read_settings
from sbonnx.calib.data.readers.texts import Text, tokenized
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError

PICTURES: Final = ("image", "img", "picture", "pixel_values")
TEXTS: Final = ("text", "sentence", "content")
"""Columns that are taken if several could be meant."""


def open_rows(data: DataRows, inputs: Sequence[InputSpec]) -> Source:
    """Open rows. All other columns are labels, by their names.

    Raises:
        DataError: the object has no rows, the column is missing or ambiguous, or the preprocessing does not fit.
    """
    rows, kind = data.rows, type(data.rows).__name__
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(
            f"{kind} has no length, and rows are read by position: give a list, such as list(rows.take(256))"
        )
    name, total = f"the {kind}", len(rows)
    if not total:
        raise DataError(f"{name} has no rows")
    first = rows[0]
    if not isinstance(first, Mapping):
        raise DataError(f"a preprocessing applies to rows by column name, and row 0 of {name} is {_type(first)}")
    settings = read_settings(data.preprocess)
    if "tokenizer" in settings.values:
        columns = _text_columns(data.column, first)
        return tokenized(name, [_text(rows[place], place, columns) for place in range(total)], inputs, settings)
    column = _column(
        data.column, [key for key, value in first.items() if _is_picture(value)], PICTURES, first, "picture"
    )

    def at(place: int) -> Picture:
        row = rows[place]
        where = f"row {place}"
        labels = {str(key): value for key, value in row.items() if key != column}
        return Picture(where, partial(_decode, row[column], where), labels)

    return open_pictures(name, total, at, inputs, ImageSettings.parse(settings))


def _column(wanted: str | None, found: Sequence[Any], usual: Sequence[str], first: Mapping[Any, Any], what: str) -> Any:
    """Return the column to read.

    Raises:
        DataError: it is missing, or there are several.
    """
    columns = ", ".join(f"'{key}' ({_type(value)})" for key, value in first.items())
    if wanted is not None:
        if wanted not in first:
            raise DataError(f"the rows have no column '{wanted}': there are {columns}")
        return wanted
    if not found:
        raise DataError(f"the rows have no {what}: their columns are {columns}")
    if len(found) == 1:
        return found[0]
    column = next((key for key in usual if key in found), None)
    if column is None:
        raise DataError(f"several columns have a {what}, {columns}: name one, DataRows(rows, preprocess, column=...)")
    return column


def _text_columns(wanted: str | Sequence[str] | None, first: Mapping[Any, Any]) -> tuple[Any, ...]:
    """Return the column of texts, or the two columns of pairs."""
    if wanted is not None and not isinstance(wanted, str):
        if len(wanted) != 2:
            raise DataError(f"a pair of texts is in two columns, got {len(wanted)}")
        return tuple(_column(name, (), (), first, "text") for name in wanted)
    text_keys = [key for key, value in first.items() if isinstance(value, str)]
    return (_column(wanted, text_keys, TEXTS, first, "text"),)


def _text(row: Mapping[Any, Any], place: int, columns: Sequence[Any]) -> Text:
    values: list[str] = []
    for column in columns:
        value = row.get(column)
        if isinstance(value, str):
            values.append(value)
        else:
            raise DataError(f"column '{column}' of row {place} is {_type(value)}, and a text is needed: leave it out")
    labels = {str(key): value for key, value in row.items() if key not in columns}
    return Text(f"row {place}", values[0], values[1] if len(values) > 1 else None, labels)


def _is_picture(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype == np.uint8 and value.ndim in (2, 3)
    if isinstance(value, Mapping):
        return set(value) == {"bytes", "path"}
    return all(hasattr(value, name) for name in ("convert", "mode", "size"))


def _decode(value: Any, where: str, mode: str) -> Any:
    """Return a picture as a PIL image in a mode.

    Raises:
        DataError: it is none, or cannot be decoded.
    """
    from PIL import Image

    if not _is_picture(value):
        raise DataError(f"{where} has no picture but {_type(value)}: leave the row out")
    if isinstance(value, Mapping) and value["bytes"] is None:
        return decode(Path(value["path"]), mode)
    try:
        if isinstance(value, Mapping):
            value = Image.open(io.BytesIO(value["bytes"]), formats=FORMATS)
        elif isinstance(value, np.ndarray):
            value = Image.fromarray(value[..., 0] if value.ndim == 3 and value.shape[2] == 1 else value)
        return upright(value, mode, where)
    except DataError:
        raise
    except Exception as error:  # of Pillow's plugins, see `decode`
        raise DataError(f"the picture of {where} cannot be decoded: {reason_of(error)}") from error


def _type(value: Any) -> str:
    return "nothing" if value is None else f"of type {type(value).__name__}"

"""Folders of images, audio or texts: their files in natural order, and labels of class folders or label files."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from sbonnx.calib.data.labels import ClassNumber
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Categories
from sbonnx.report.codes import Note
from sbonnx.system.input_files import read_regular

IMAGES: Final = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".gif"})
AUDIO: Final = frozenset({".wav", ".flac", ".ogg", ".mp3", ".aif", ".aiff", ".opus"})
TEXTS: Final = frozenset({".txt", ".jsonl"})
MEDIA: Final[dict[str, frozenset[str]]] = {"images": IMAGES, "audio": AUDIO, "texts": TEXTS}
"""Suffixes of files, in lower case, by kind."""

ARRAYS: Final = frozenset({".npz", ".npy"})
"""Suffixes of arrays, which are not mixed with media."""

LABEL_FILES: Final = ("labels.csv", "labels.tsv", "labels.json", "labels.jsonl", "metadata.csv", "metadata.jsonl")
"""Files with labels by file name; the last two are those of Hugging Face's image and audio folders."""

TEXT_COLUMNS: Final = ("text", "transcription", "transcript", "sentence")
"""Names of columns whose values are texts, not classes."""

LABEL_COLUMNS: Final = ("label", "class", "target")
"""Names of columns whose values are classes."""

FILE_COLUMNS: Final = ("file", "file_name", "filename", "path", "audio_filepath", "image")
"""Names of the column of file names."""

CLASS_FILE: Final = "classes.txt"
"""File with the names of the classes, one a line, in the order of their numbers in the model."""

LARGEST: Final = 1 << 28
"""Maximum size in bytes of a label file."""


@dataclass(frozen=True)
class MediaFiles:
    """Files of one kind, in the order in which they are used.

    Attributes:
        name: origin, for messages.
        paths: the files; at least one.
        labels: labels by file; files without a label are absent.
        notes: one sentence each about files that are not used.
    """

    name: str
    paths: tuple[Path, ...]
    labels: Mapping[Path, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def natural(path: Path) -> list[Any]:
    """Sort key that puts 2.npz before 10.npz."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", path.name)]


def kind_of(path: Path) -> str | None:
    """Return the kind of media of a file by its suffix; None: it is none."""
    suffix = path.suffix.lower()
    return next((kind for kind, suffixes in MEDIA.items() if suffix in suffixes), None)


def find_media(folder: Path, entries: Sequence[Path]) -> tuple[str, MediaFiles] | None:
    """Return the kind and the media of a folder; None if it holds none.

    Media lie in the folder itself, or in one subfolder for each class (images, audio): then the label of a file is the
    position of its folder among the sorted names, or among the lines of classes.txt. labels.csv (file,label) or
    labels.json ({file: label}) in the folder gives labels by the name of the file, relative to the folder; classes by
    name are numbered in the same way.

    Args:
        entries: visible entries of the folder, in natural order.

    Raises:
        DataError: the folder mixes kinds, or a label file cannot be read.
    """
    files = [entry for entry in entries if entry.name not in LABEL_FILES and not entry.is_dir()]
    classes = {entry: _inside(entry) for entry in entries if entry.is_dir()}
    classes = {
        place: inside_class
        for place, inside_class in classes.items()
        if any(kind_of(class_file) in ("images", "audio") for class_file in inside_class)
    }
    top = {kind for entry in files if (kind := kind_of(entry))}
    if "images" in top or "audio" in top or classes:
        top.discard("texts")  # a README.txt next to them
    kinds = top | {
        kind
        for inside_class in classes.values()
        for class_file in inside_class
        if (kind := kind_of(class_file)) and kind != "texts"
    }
    if not kinds:
        return None
    arrays = sorted({entry.suffix for entry in files if entry.suffix in ARRAYS})
    if kinds == {"texts"} and arrays:
        return None
    if len(kinds) > 1 or arrays:
        raise DataError(
            f"folder '{folder}' mixes {' and '.join([*sorted(kinds), *arrays])}: keep one kind of data in it"
        )
    (kind,) = kinds
    if top and classes:
        place = next(iter(classes)).name
        raise DataError(f"folder '{folder}' holds {kind} itself and in subfolders ('{place}'): keep them in one level")
    inside = [class_file for inside_class in classes.values() for class_file in inside_class] if classes else files
    paths = tuple(class_file for class_file in inside if kind_of(class_file) == kind)
    labels = _labels(folder, paths, list(classes))
    others = [class_file for class_file in inside if kind_of(class_file) != kind]
    return kind, MediaFiles(f"folder '{folder}'", paths, labels, _ignored(folder, kind, others))


def _inside(folder: Path) -> list[Path]:
    """List the visible files of a subfolder, in natural order.

    Raises:
        DataError: it cannot be read.
    """
    try:
        files = [entry for entry in folder.iterdir() if not entry.name.startswith(".") and not entry.is_dir()]
    except OSError as error:
        raise DataError(f"'{folder}' cannot be read: {error.strerror}") from error
    return sorted(files, key=natural)


def _ignored(folder: Path, kind: str, others: Sequence[Path]) -> tuple[Note, ...]:
    if not others:
        return ()
    what = "1 file is" if len(others) == 1 else f"{len(others)} files are"
    return (Note("data-not-used", f"folder '{folder}': {what} not of {kind} and ignored, such as '{others[0].name}'"),)


def _labels(folder: Path, paths: Sequence[Path], classes: Sequence[Path]) -> dict[Path, Any]:
    rows = labels_of(folder, paths)
    if rows is not None:
        return rows
    numbers = class_numbers(folder, [place.name for place in classes]) if classes else {}
    return {path: numbers[path.parent.name] for path in paths if classes}


def class_lines(path: Path) -> list[str]:
    """Read the names of classes, one a line.

    Raises:
        DataError: the file cannot be read, or has a name twice.
    """
    try:
        lines = [line.strip() for line in read_regular(path, LARGEST).decode("utf-8-sig").splitlines() if line.strip()]
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"'{path}' is no text: {error}") from error
    if len(set(lines)) < len(lines):
        raise DataError(f"'{path}' has the class '{next(line for line in lines if lines.count(line) > 1)}' twice")
    return lines


def class_numbers(folder: Path, names: Sequence[str]) -> dict[str, int]:
    """Return the numbers of classes: lines of ``classes.txt`` of a folder, whole or their first words (WordNet ids of
    ImageNet, followed by a description); without the file, positions in sorted order, as `ClassNumber`.

    Raises:
        DataError: the file does not list one of them.
    """
    listed = folder / CLASS_FILE
    if not listed.is_file():
        ordered = tuple(sorted(set(names)))
        categories = Categories(tuple(range(len(ordered))), ordered, f"'{folder}'")
        return {name: ClassNumber(number, categories) for number, name in enumerate(ordered)}
    lines = class_lines(listed)
    numbers = {line.split()[0]: number for number, line in enumerate(lines)}
    numbers |= {line: number for number, line in enumerate(lines)}
    unknown = sorted(set(names) - numbers.keys())
    if unknown:
        raise DataError(f"'{listed}' does not list the class '{unknown[0]}': add it as a line")
    return {name: numbers[name] for name in names}


def labels_of(folder: Path, paths: Sequence[Path]) -> dict[Path, Any] | None:
    """Return the labels of files by the label file of their folder; None without one.

    Raises:
        DataError: there are several label files, or it cannot be read, or names none of the files.
    """
    given = [folder / name for name in LABEL_FILES if (folder / name).is_file()]
    if not given:
        return None
    if len(given) > 1:
        raise DataError(f"folder '{folder}' holds both '{given[0].name}' and '{given[1].name}': keep one of them")
    rows = read_labels(given[0])
    keys = {path: path.relative_to(folder).as_posix() for path in paths}
    labels = {path: rows[key] for path, key in keys.items() if key in rows}
    if not labels and paths:
        example = next(iter(rows), "nothing")
        raise DataError(
            f"'{given[0]}' has labels of none of the files, such as '{keys[paths[0]]}': it names '{example}'"
        )
    return labels


def read_labels(path: Path) -> dict[str, Any]:
    """Read labels by file name: a table (.csv, .tsv, .jsonl), or a JSON object.

    A table has the columns file and label; a header may name them (`FILE_COLUMNS`), and a column of `TEXT_COLUMNS`
    holds texts, such as transcripts. Integers stay integers. If all labels are texts that are no integers, they are
    names of classes (see `class_numbers`), unless their column is of texts.

    Raises:
        DataError: the file cannot be read, is of another form, or has a file twice.
    """
    try:
        text = read_regular(path, LARGEST).decode("utf-8-sig")
        rows, texts = _rows(text, path.suffix)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error, RecursionError) as error:
        raise DataError(f"'{path}' holds no labels: {str(error).splitlines()[0][:200]}") from error
    labels: dict[str, Any] = {}
    for name, value in rows:
        key = os.path.normpath(str(name).strip()).replace(os.sep, "/")
        if key in labels:
            raise DataError(f"'{path}' has two labels for '{key}': keep one")
        labels[key] = value
    return labels if texts else _numbered(path.parent, labels)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("it has a name twice")
    return values


def _rows(text: str, suffix: str) -> tuple[list[tuple[str, Any]], bool]:
    """Return (file, label) rows, and whether the labels are texts.

    Raises:
        ValueError: the text is of another form.
    """
    if suffix == ".json":
        values = json.loads(text, object_pairs_hook=_object)
        if not isinstance(values, dict):
            raise ValueError('it must be an object of labels by file name, such as {"a.jpg": 3}')
        return list(values.items()), False
    rows = _objects(text) if suffix == ".jsonl" else _cells(text, "excel-tab" if suffix == ".tsv" else "excel")
    names = list(rows[0]) if rows else []
    file = next((name for name in names if name.lower() in FILE_COLUMNS), names[0] if names else "")
    label = next((name for name in names if name.lower() in (*TEXT_COLUMNS, *LABEL_COLUMNS) and name != file), None)
    if rows and label is None:
        raise ValueError(f"no column holds labels: name one of {', '.join(names)} 'label', or 'text' for texts")
    texts = str(label).lower() in TEXT_COLUMNS
    pairs = [(row.get(file, ""), row.get(str(label), "")) for row in rows]
    if texts:
        return pairs, True
    return [(name, _integer(value.strip()) if isinstance(value, str) else value) for name, value in pairs], False


def _objects(text: str) -> list[dict[str, Any]]:
    """Parse lines of JSON objects."""
    rows = [json.loads(line, object_pairs_hook=_object) for line in text.splitlines() if line.strip()]
    if not all(isinstance(row, dict) and row for row in rows):
        raise ValueError("each line must be a JSON object")
    return rows


def _cells(text: str, dialect: str) -> list[dict[str, Any]]:
    """Parse a table of cells; without a header its columns are file and label."""
    rows = [row for row in csv.reader(io.StringIO(text), dialect) if row]
    names = [cell.strip() for cell in rows[0]] if rows else []
    if len(names) > 1 and any(name.lower() in (*TEXT_COLUMNS, *LABEL_COLUMNS) for name in names):
        rows = rows[1:]
    else:
        names = ["file", LABEL_COLUMNS[0]]
    for row in rows:
        if len(row) != len(names):
            what = " and ".join(names[:2]) if len(names) == 2 else "as the header"
            raise ValueError(f"a row has {len(row)} cells and needs {len(names)}, {what}: {','.join(row)[:80]}")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _integer(text: str) -> int | str:
    return int(text) if re.fullmatch(r"[+-]?\d{1,18}", text) else text


def _numbered(folder: Path, labels: dict[str, Any]) -> dict[str, Any]:
    if not labels or not all(isinstance(value, str) for value in labels.values()):
        return labels
    numbers = class_numbers(folder, list(labels.values()))
    return {key: numbers[value] for key, value in labels.items()}

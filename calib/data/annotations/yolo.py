"""YOLO text files: trees ``images/`` and ``labels/`` with a .txt file for each image, and ``data.yaml``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.annotations.image_boxes import ImageBoxes, annotated, numbered, rows_of
from sbonnx.calib.data.readers.media_files import CLASS_FILE, MediaFiles, class_lines, kind_of, natural
from sbonnx.calib.data.readers.preprocess_values import yaml_values
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Categories
from sbonnx.system.input_files import read_regular

LARGEST: Final = 16 << 20
"""Maximum size in bytes of a text file."""

SLACK: Final = 1e-3
"""Maximum distance of a coordinate from 0 to 1 that is taken as rounding."""


def is_data_yaml(path: Path) -> bool:
    """Return whether a file is a ``data.yaml``: class names and paths of images."""
    values = yaml_values(path)
    return "names" in values and any(key in values for key in ("train", "val", "test"))


def read_data_yaml(path: Path) -> MediaFiles:
    """Read the validation images that a ``data.yaml`` names, with their boxes.

    Raises:
        DataError: a path does not exist, or a file is damaged.
    """
    values = yaml_values(path)
    given = values.get("val")
    if not given:
        raise DataError(f"'{path}' has no val: name the folder of images instead, such as '{path.parent}/images/test'")
    root = path.parent / str(values.get("path") or ".")
    images: list[Path] = []
    for entry in given if isinstance(given, list) else [given]:
        place = next((place for place in _places(path, root, str(entry)) if place.exists()), None)
        if place is None:
            raise DataError(f"'{path}': val is '{entry}', which does not exist in '{root}': correct path or val")
        images += _images(place) if place.is_dir() else _listed(place)
    return _with_boxes(f"val of '{path}'", images, _categories(path, values))


def read_yolo(folder: Path) -> MediaFiles:
    """Read a folder of images with the boxes of the parallel folder of labels.

    Class names are those of a ``data.yaml`` or ``classes.txt`` next to ``images``; without one, their number is not
    known.

    Raises:
        DataError: the images are in folders for training and validation, there are no labels, or a file is damaged.
    """
    place = folder / "images" if (folder / "images").is_dir() else folder
    inner = [entry for entry in sorted(place.iterdir()) if entry.is_dir()]
    if inner and not any(kind_of(entry) == "images" for entry in place.iterdir()):
        names = ", ".join(f"'{entry}'" for entry in inner)
        raise DataError(f"'{folder}' holds several sets of images: name the folder of one, {names}")
    root = _root(place)
    return _with_boxes(f"folder '{place}'", _images(place), _categories_of(root))


def has_labels(folder: Path) -> bool:
    """Return whether a folder has a parallel folder of labels with text files: images/ and labels/, or images/val."""
    place = folder / "images" if (folder / "images").is_dir() else folder
    if "images" not in place.parts:
        return False
    labels = label_file(place / "any.jpg").parent
    return place.is_dir() and next(labels.rglob("*.txt"), None) is not None


def label_file(image: Path) -> Path:
    """Return the text file of an image: the last folder ``images`` of its path becomes ``labels``."""
    parts = list(image.parts)
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return Path(*parts).with_suffix(".txt")


def _places(path: Path, root: Path, entry: str) -> tuple[Path, ...]:
    """Return the places that an entry may mean; exports of Roboflow begin with one ``../`` too many."""
    return root / entry, path.parent / entry, path.parent / entry.removeprefix("../")


def _images(folder: Path) -> list[Path]:
    """List the images of a folder and its subfolders in natural order."""
    files = [path for path in folder.rglob("*") if kind_of(path) == "images"]
    return sorted(files, key=lambda path: [natural(Path(part)) for part in path.relative_to(folder).parts])


def _listed(path: Path) -> list[Path]:
    """Return the images that a text file lists, relative to its folder."""
    return [path.parent / line.strip() for line in _text(path).splitlines() if line.strip()]


def _text(path: Path) -> str:
    try:
        return read_regular(path, LARGEST).decode("utf-8")
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"'{path}' is no text: {error}") from error


def _root(place: Path) -> Path:
    """Return the folder with ``images``."""
    parts = place.parts
    return Path(*parts[: len(parts) - 1 - parts[::-1].index("images")]) if "images" in parts else place


def _categories_of(root: Path) -> Categories:
    file = next((path for path in sorted(root.glob("*.yaml")) if is_data_yaml(path)), None)
    if file is not None:
        return _categories(file, yaml_values(file))
    listed = next((path for path in (root / CLASS_FILE, root / "labels" / CLASS_FILE) if path.is_file()), None)
    return numbered(class_lines(listed) if listed else (), f"'{listed or root}'")


def _categories(path: Path, values: Mapping[str, Any]) -> Categories:
    """Return the classes of a ``data.yaml``: a list of names, or names by number."""
    names = values["names"]
    if isinstance(names, dict):
        if sorted(names) != list(range(len(names))):
            raise DataError(f"'{path}': the numbers of names must be 0, 1, ...")
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or values.get("nc", len(names)) != len(names):
        raise DataError(f"'{path}': names must list as many classes as nc says")
    return numbered([str(name) for name in names], f"'{path}'")


def _with_boxes(name: str, images: Sequence[Path], categories: Categories) -> MediaFiles:
    """Return images with their boxes; an image without a text file has none.

    Raises:
        DataError: no image has a text file, or one is damaged.
    """
    files = {image: label_file(image) for image in images}
    if images and not any(file.is_file() for file in files.values()):
        raise DataError(f"{name}: no image has a label file, such as '{files[images[0]]}': put them there")
    return annotated(name, {image: _boxes(file, categories) for image, file in files.items()})


def _boxes(file: Path, categories: Categories) -> ImageBoxes:
    lines = _text(file).splitlines() if file.is_file() else []
    rows = [_row(line.split(), f"'{file}' line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    rows = list(dict.fromkeys(rows))  # repeated lines are dropped, as Ultralytics does
    classes = np.array([row[0] for row in rows], np.int64)
    if categories.names and len(classes) and classes.max() >= len(categories.names):
        raise DataError(
            f"'{file}' has class {classes.max()} and {categories.name} names {len(categories.names)} classes: "
            "correct one of them"
        )
    return ImageBoxes(f"'{file}'", categories, rows_of([row[1:] for row in rows]), classes, shares=True)


def _row(cells: Sequence[str], where: str) -> tuple[int, float, float, float, float]:
    """Return class and corners of a line: class, center, width and height; or class and the points of a polygon."""
    try:
        number, values = int(cells[0]), [float(cell) for cell in cells[1:]]
    except ValueError as error:
        raise DataError(f"{where} must be numbers: class x y width height, got '{' '.join(cells)[:60]}'") from error
    if number < 0 or (len(values) != 4 and (len(values) < 6 or len(values) % 2)):
        raise DataError(f"{where} must be class x y width height, or class and the points of a polygon")
    if not all(math.isfinite(value) and -SLACK <= value <= 1 + SLACK for value in values):
        raise DataError(f"{where} has coordinates outside of 0 to 1: divide them by the width and height of the image")
    return number, *(_box(*values) if len(values) == 4 else _around(values[::2], values[1::2]))


def _box(x: float, y: float, width: float, height: float) -> tuple[float, float, float, float]:
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _around(xs: Iterable[float], ys: Iterable[float]) -> tuple[float, float, float, float]:
    xs, ys = list(xs), list(ys)
    return min(xs), min(ys), max(xs), max(ys)

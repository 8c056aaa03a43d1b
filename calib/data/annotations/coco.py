"""COCO JSON: ``instances_*.json`` with ``images``, ``annotations`` and ``categories``, and a folder of images."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from sbonnx.calib.data.annotations.image_boxes import ImageBoxes, annotated, rows_of
from sbonnx.calib.data.readers.media_files import MediaFiles
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Categories
from sbonnx.system.input_files import read_regular

KEYS: Final = ("images", "annotations", "categories")
LARGEST: Final = 1 << 30
"""Maximum size in bytes of an annotation file."""


def is_coco(path: Path) -> bool:
    """Return whether a file is a JSON object with the keys of COCO.

    Raises:
        DataError: it cannot be read.
    """
    content = _content(path)
    return content[:64].lstrip()[:1] == b"{" and all(f'"{key}"'.encode() in content for key in KEYS)


def read_coco(path: Path) -> MediaFiles:
    """Read images and boxes of a COCO file, in its order. Crowds, areas and category numbers are those of the file.

    Raises:
        DataError: the file is damaged or not consistent, or its images are not found.
    """
    try:
        values = json.loads(_content(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is no readable JSON: {str(error).splitlines()[0]}") from error
    images, annotations, categories = (_rows(path, values, key) for key in KEYS)
    classes = _categories(path, categories)
    places = {number: place for place, number in enumerate(classes.ids)}
    by_image: dict[Any, list[Mapping[str, Any]]] = {row["id"]: [] for row in images}
    if len(by_image) < len(images):
        raise DataError(f"'{path}' has an image id twice")
    for row in annotations:
        if row.get("image_id") not in by_image or row.get("category_id") not in places:
            raise DataError(f"'{path}': annotation {row['id']} is of an image or category that the file does not have")
        by_image[row["image_id"]].append(row)
    folder = _folder(path, images)
    return annotated(
        f"'{path}'",
        {
            folder / str(image["file_name"]): _boxes(path, image, by_image[image["id"]], classes, places)
            for image in images
        },
    )


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error


def _rows(path: Path, values: Any, key: str) -> Sequence[Mapping[str, Any]]:
    """Return a list of the file, each of whose objects has an id."""
    rows = values.get(key) if isinstance(values, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "id" in row for row in rows):
        raise DataError(f"'{path}' needs lists of objects with an id: {', '.join(KEYS)}; '{key}' is none")
    return rows


def _categories(path: Path, rows: Sequence[Mapping[str, Any]]) -> Categories:
    """Return the categories by rising id."""
    names = {row["id"]: str(row.get("name", row["id"])) for row in rows}
    if not names or len(names) < len(rows) or not all(type(number) is int and number >= 0 for number in names):
        raise DataError(f"'{path}' needs categories with different whole numbers as id")
    return Categories(tuple(sorted(names)), tuple(names[number] for number in sorted(names)), f"'{path}'")


def _boxes(
    path: Path,
    image: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    categories: Categories,
    places: Mapping[Any, int],
) -> ImageBoxes:
    corners = []
    for row in rows:
        try:
            x, y, width, height = map(float, row["bbox"])
            if not (np.isfinite([x, y]).all() and 0 <= width < np.inf and 0 <= height < np.inf):
                raise ValueError("no box")
        except (KeyError, TypeError, ValueError) as error:
            box = f"{row.get('bbox')}; it must be [x, y, width, height], width and height not negative"
            raise DataError(f"'{path}': bbox of annotation {row['id']} is {box}") from error
        corners.append((x, y, x + width, y + height))
    array = rows_of(corners)
    sides = (image.get("height"), image.get("width"))
    return ImageBoxes(
        where=f"image '{image['file_name']}' of '{path}'",
        categories=categories,
        corners=array,
        classes=np.array([places[row["category_id"]] for row in rows], np.int64),
        crowd=np.array([bool(row.get("iscrowd")) for row in rows], bool),
        areas=np.array(
            [row.get("area", np.prod(box[2:] - box[:2])) for row, box in zip(rows, array, strict=True)], np.float64
        ),
        size=sides if all(isinstance(side, int) and side > 0 for side in sides) else None,  # type: ignore[arg-type]
    )


def _folder(path: Path, images: Sequence[Mapping[str, Any]]) -> Path:
    """Return the folder of the images: the one with the first image of the file.

    Raises:
        DataError: none has it.
    """
    if not images or not all(isinstance(row.get("file_name"), str) for row in images):
        raise DataError(f"'{path}' has no images, or images without file_name")
    first = images[0]["file_name"]
    folders = image_folders(path)
    holding = next((folder for folder in folders if (folder / first).is_file()), None)
    if holding is None:
        places = ", ".join(f"'{folder}'" for folder in folders)
        raise DataError(f"the images of '{path}', such as '{first}', are in none of {places}: put them in one of these")
    return holding


def image_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders in which the images of an annotation file may be: named as its split, or images."""
    root = path.parent.parent if path.parent.name == "annotations" else path.parent
    split = path.stem.rpartition("_")[2]
    return tuple(dict.fromkeys((path.parent, root / split, root / "images" / split, root / "images", root)))


def coco_files(folder: Path) -> list[Path]:
    """Return the annotation files of a folder: ``annotations/instances_*.json`` or ``_annotations.coco.json``.

    Other names in ``annotations`` are taken if they have the form of COCO and none is called instances.
    """
    exported = folder / "_annotations.coco.json"
    if exported.is_file():
        return [exported]
    files = sorted((folder / "annotations").glob("*.json"))
    return [path for path in files if path.name.startswith("instances")] or [path for path in files if is_coco(path)]

"""Pascal VOC: ``Annotations/*.xml``, ``JPEGImages/`` and lists of images in ``ImageSets/Main``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

import numpy as np

from sbonnx.calib.data.annotations.image_boxes import ImageBoxes, annotated, numbered, rows_of
from sbonnx.calib.data.readers.media_files import CLASS_FILE, MediaFiles, class_lines, natural
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import Categories
from sbonnx.system.input_files import read_regular

LARGEST: Final = 16 << 20
"""Maximum size in bytes of an XML file."""

ANNOTATIONS, IMAGES = "Annotations", "JPEGImages"


def is_voc(folder: Path) -> bool:
    """Return whether a folder has the XML files and images of Pascal VOC."""
    return (folder / IMAGES).is_dir() and next((folder / ANNOTATIONS).glob("*.xml"), None) is not None


def voc_root(path: Path) -> Path | None:
    """Return the folder of Pascal VOC that a list of images is of (``ROOT/ImageSets/Main/val.txt``); None: none."""
    return next((root for root in path.parents[:3] if path.suffix == ".txt" and is_voc(root)), None)


def read_voc(root: Path, listed: Path | None = None) -> MediaFiles:
    """Read images and boxes.

    Corners are pixel numbers from 1, both ends included: x1 and y1 less 1 are the edges. Objects that are difficult
    are ignored by the metric. Classes are the lines of ``classes.txt``, else the sorted names of all XML files.

    Args:
        root: folder with ``Annotations`` and ``JPEGImages``.
        listed: text file whose lines begin with the name of an image; None: the only list of the folder, else all.

    Raises:
        DataError: there are several lists, or a file is damaged or missing.
    """
    lists = sorted((root / "ImageSets" / "Main").glob("*.txt"))
    sets = [path for path in lists if "_" not in path.stem]  # NAME_val.txt are lists of one class
    if listed is None and len(sets) > 1:
        names = ", ".join(f"'{path}'" for path in sets)
        raise DataError(f"'{root}' has several lists of images: name one, {names}")
    listed = listed or next(iter(sets), None)
    files = sorted((root / ANNOTATIONS).glob("*.xml"), key=natural)
    trees = {path.stem: _tree(path) for path in files}
    classes = _classes(root, list(trees.values()))
    boxes = {}
    for name in list(trees) if listed is None else _names(listed):
        path = root / ANNOTATIONS / f"{name}.xml"
        if name not in trees:
            raise DataError(f"'{listed}' lists '{name}', and there is no '{path}'")
        file = trees[name].findtext("filename") or f"{name}.jpg"
        image = root / IMAGES / file
        boxes[image if image.is_file() else root / IMAGES / f"{name}.jpg"] = _boxes(path, trees[name], classes)
    return annotated(f"'{listed or root}'", boxes)


def _names(listed: Path) -> list[str]:
    return [line.split()[0] for line in _content(listed).decode("utf-8", "replace").splitlines() if line.strip()]


def _content(path: Path) -> bytes:
    try:
        return read_regular(path, LARGEST)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error


def _tree(path: Path) -> ElementTree.Element:
    content = _content(path)
    if b"<!DOCTYPE" in content:
        raise DataError(f"'{path}' declares a document type, which may expand without limit: remove the line")
    try:
        return ElementTree.fromstring(content)
    except ElementTree.ParseError as error:
        raise DataError(f"'{path}' is no readable XML: {error}") from error


def _classes(root: Path, trees: Sequence[ElementTree.Element]) -> Categories:
    listed = root / CLASS_FILE
    if listed.is_file():
        return numbered(class_lines(listed), f"'{listed}'")
    names = {item.findtext("name", "").strip() for tree in trees for item in tree.iter("object")}
    return numbered(sorted(names), f"'{root}'")


def _boxes(path: Path, tree: ElementTree.Element, categories: Categories) -> ImageBoxes:
    corners, classes, difficult = [], [], []
    for number, item in enumerate(tree.iter("object"), 1):
        name, where = item.findtext("name", "").strip(), f"'{path}', object {number}"
        if name not in categories.names:
            raise DataError(f"{where} is of class '{name}', which {categories.name} does not have: add it there")
        corners.append(_corners(item, where))
        classes.append(categories.names.index(name))
        difficult.append(item.findtext("difficult", "0").strip() == "1")
    height, width = (int(float(tree.findtext(f"size/{side}") or 0)) for side in ("height", "width"))
    return ImageBoxes(
        where=f"'{path}'",
        categories=categories,
        corners=rows_of(corners),
        classes=np.array(classes, np.int64),
        ignored=np.array(difficult, bool),
        size=(height, width) if height and width else None,
    )


def _corners(item: ElementTree.Element, where: str) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = (
            float(item.findtext(f"bndbox/{side}", "")) for side in ("xmin", "ymin", "xmax", "ymax")
        )
    except ValueError as error:
        raise DataError(f"{where} needs a bndbox of xmin, ymin, xmax and ymax") from error
    if not (left <= right and top <= bottom):
        raise DataError(f"{where}: xmax or ymax is below xmin or ymin")
    return left - 1, top - 1, right, bottom

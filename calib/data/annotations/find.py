"""Recognition of annotated images by the structure of a file or folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sbonnx.calib.data.annotations.coco import coco_files, image_folders, is_coco, read_coco
from sbonnx.calib.data.annotations.table import has_boxes, read_table
from sbonnx.calib.data.annotations.voc import ANNOTATIONS, is_voc, read_voc, voc_root
from sbonnx.calib.data.annotations.yolo import has_labels, is_data_yaml, read_data_yaml, read_yolo
from sbonnx.calib.data.readers.media_files import LABEL_FILES, MediaFiles
from sbonnx.errors import DataError

YAML: Final = (".yaml", ".yml")
DATA_FILES: Final = ("data.yaml", "data.yml", "dataset.yaml")
"""Files of YOLO data that a folder is recognized by; others are named themselves."""


def annotated_at(path: Path) -> tuple[str, MediaFiles] | None:
    """Return kind and files of annotated data at a path; None: it is none.

    Files: COCO JSON, ``data.yaml`` of YOLO, a list of ``ImageSets`` of Pascal VOC, a CSV table. Folders: those that
    have these, as docs/data.md lists them.

    Raises:
        DataError: the annotations are ambiguous or damaged.
    """
    if os.path.isdir(path):  # False also for names that the system does not allow
        return _in_folder(path)
    if not os.path.isfile(path):
        return None
    if path.suffix == ".csv":
        return read_table(path)
    if path.suffix == ".json" and is_coco(path):
        return "images", read_coco(path)
    if path.suffix in YAML and is_data_yaml(path):
        return "images", read_data_yaml(path)
    root = voc_root(path)
    return None if root is None else ("images", read_voc(root, path))


def _in_folder(folder: Path) -> tuple[str, MediaFiles] | None:
    jsons = coco_files(folder)
    yamls = [path for name in DATA_FILES if (path := folder / name).is_file() and is_data_yaml(path)]
    table = folder / LABEL_FILES[0]
    boxes = table.is_file() and has_boxes(table)
    labels, voc = not yamls and has_labels(folder), is_voc(folder)
    kinds = [
        name
        for name, there in (
            ("COCO JSON", jsons),
            ("YOLO", yamls or labels),
            ("Pascal VOC", voc),
            (f"boxes in {table.name}", boxes),
        )
        if there
    ]
    if not kinds:  # the folder of annotations itself, of COCO or Pascal VOC
        return _in_folder(folder.parent) if folder.name.lower() == ANNOTATIONS.lower() else None
    if len(kinds) > 1:
        raise DataError(f"folder '{folder}' has annotations of {' and '.join(kinds)}: name the file of one")
    if jsons:
        return "images", read_coco(_only(folder, jsons))
    if voc:
        return "images", read_voc(folder)
    if boxes:
        return read_table(table)
    return "images", read_yolo(folder) if labels else read_data_yaml(_only(folder, yamls))


def _only(folder: Path, files: list[Path]) -> Path:
    """Return the only annotation file of a folder, or the only one whose images are there.

    Raises:
        DataError: there are several.
    """
    usable = files
    if len(files) > 1 and files[0].suffix == ".json":
        usable = [
            path for path in files if any(place.name == path.stem.rpartition("_")[2] for place in _existing(path))
        ]
    if len(usable) != 1:
        names = ", ".join(f"'{path}'" for path in files)
        raise DataError(f"folder '{folder}' has several annotation files: name one of {names}")
    return usable[0]


def _existing(path: Path) -> list[Path]:
    return [place for place in image_folders(path) if place.is_dir()]

"""Small trees of COCO, YOLO, Pascal VOC and CSV give the boxes that pycocotools and the XML have, in the image."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sbonnx.calib.data import DataPath, InputSpec
from sbonnx.calib.data.dataset import read
from sbonnx.errors import DataError
from sbonnx.metrics.classification import TopK

INPUT = (InputSpec("x", np.dtype(np.float32), (1, 3, 40, 40)),)
SIZES = {"a": (80, 40), "b": (40, 80), "c": (33, 21)}
"""Width and height of the images; c has no boxes."""
BOXES: dict[str, list[tuple[str, float, float, float, float]]] = {
    "a": [("dog", 8, 4, 40, 20), ("cat", 16, 8, 72, 40)],
    "b": [("cat", 4, 40, 36, 76)],
    "c": [],
}
NAMES = ("cat", "dog")
IDS = {"cat": 17, "dog": 18}

Write = Callable[[Path], Path]


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        Image.new("RGB", size).save(folder / f"{name}.png")


def coco_values() -> dict[str, Any]:
    images = [{"id": ord(name), "file_name": f"{name}.png", "width": w, "height": h} for name, (w, h) in SIZES.items()]
    rows = [
        {"image_id": ord(name), "category_id": IDS[kind], "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
        for name, boxes in BOXES.items()
        for kind, x1, y1, x2, y2 in boxes
    ]
    rows = [{**row, "id": number, "area": 7.0 * number + 1} for number, row in enumerate(rows)]
    rows[1]["iscrowd"] = 1
    categories = [{"id": number, "name": name} for name, number in reversed(IDS.items())]
    return {"images": images, "annotations": rows, "categories": categories}


def coco(folder: Path) -> Path:
    write_images(folder / "val2017")
    (folder / "annotations").mkdir()
    text = json.dumps(coco_values())
    (folder / "annotations" / "instances_val2017.json").write_text(text)
    (folder / "annotations" / "instances_train2017.json").write_text(text)  # whose images are not there
    (folder / "annotations" / "captions_val2017.json").write_text('{"images": [], "annotations": []}')
    return folder


def roboflow(folder: Path) -> Path:
    write_images(folder)
    (folder / "_annotations.coco.json").write_text(json.dumps(coco_values()))
    return folder


def yolo(folder: Path) -> Path:
    write_images(folder / "images" / "val")
    labels = folder / "labels" / "val"
    labels.mkdir(parents=True)
    for name, boxes in BOXES.items():
        w, h = SIZES[name]
        lines = []
        for kind, x1, y1, x2, y2 in boxes:
            if kind == "dog":  # a polygon
                lines.append(f"1 {x1 / w} {y2 / h} {x2 / w} {y1 / h} {x1 / w} {y1 / h}")
            else:
                lines.append(f"0 {(x1 + x2) / 2 / w} {(y1 + y2) / 2 / h} {(x2 - x1) / w} {(y2 - y1) / h}")
        if lines:  # an image without boxes has no file
            (labels / f"{name}.txt").write_text("\n".join(lines))
    (folder / "data.yaml").write_text("path: .\ntrain: images/train\nval: images/val\nnames: {0: cat, 1: dog}\n")
    return folder


def yolo_file(folder: Path) -> Path:
    return yolo(folder) / "data.yaml"


def yolo_images(folder: Path) -> Path:
    return yolo(folder) / "images" / "val"


def voc(folder: Path) -> Path:
    write_images(folder / "JPEGImages")
    (folder / "Annotations").mkdir()
    for name, boxes in BOXES.items():
        width, height = SIZES[name]
        objects = "".join(
            f"<object><name>{kind}</name><difficult>{int(kind == 'dog')}</difficult><bndbox><xmin>{x1 + 1}</xmin>"
            f"<ymin>{y1 + 1}</ymin><xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
            for kind, x1, y1, x2, y2 in boxes
        )
        size = f"<size><width>{width}</width><height>{height}</height></size>"
        text = f"<annotation><filename>{name}.png</filename>{size}{objects}</annotation>"
        (folder / "Annotations" / f"{name}.xml").write_text(text)
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    (folder / "ImageSets" / "Main" / "val.txt").write_text("a\nb\nc\n")
    (folder / "ImageSets" / "Main" / "cat_val.txt").write_text("a 1\nb 1\nc -1\n")
    return folder


def voc_list(folder: Path) -> Path:
    (voc(folder) / "ImageSets" / "Main" / "train.txt").write_text("a\n")
    return folder / "ImageSets" / "Main" / "val.txt"


def table(folder: Path) -> Path:
    write_images(folder)
    rows = [f"{name}.png,{kind},{x1},{y1},{x2},{y2}" for name, boxes in BOXES.items() for kind, x1, y1, x2, y2 in boxes]
    (folder / "labels.csv").write_text("\n".join(["file,label,x1,y1,x2,y2", *rows, "c.png,,,,,"]))
    return folder


def table_file(folder: Path) -> Path:
    return table(folder) / "labels.csv"


TREES: tuple[Write, ...] = (coco, roboflow, yolo, yolo_file, yolo_images, voc, voc_list, table, table_file)


def labels_of(path: Path, preprocess: Any = "yolo") -> list[Any]:
    return [feed.labels for _, feed in read(DataPath(path, preprocess), INPUT).labelled()]


@pytest.mark.parametrize("tree", TREES)
def test_boxes_of_all_formats(tree: Write, tmp_path: Path) -> None:
    """Boxes in pixels of the image, classes by position, and the way back from the letterbox."""
    found = labels_of(tree(tmp_path / "data"))
    assert len(found) == len(SIZES)
    for labels, (name, boxes) in zip(found, BOXES.items(), strict=True):
        (corners,), (classes,), (placement,) = labels["boxes"], labels["classes"], labels["placement"]
        assert np.allclose(corners, np.array([box[1:] for box in boxes]).reshape(-1, 4))
        assert classes.tolist() == [NAMES.index(box[0]) for box in boxes]
        assert labels["categories"][0].names == NAMES
        width, height = SIZES[name]
        assert placement.image == (height, width) and placement.size == (40, 40)
        inside = np.array([[0, 20 * (1 - height / width), 40, 20 * (1 + height / width)]])
        if width >= height and name != "c":
            assert np.allclose(placement.back(inside), [[0, 0, width, height]])
        assert np.allclose(placement.back(np.array([[-9, -9, 99, 99]])), [[0, 0, width, height]])  # clipped


def test_coco_equals_pycocotools(tmp_path: Path) -> None:
    """Ids, crowds and areas."""
    module = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    folder = coco(tmp_path)
    with redirect_stdout(io.StringIO()):
        reference = module.COCO(str(folder / "annotations" / "instances_val2017.json"))
    for labels, name in zip(labels_of(folder), SIZES, strict=True):
        rows = reference.imgToAnns[ord(name)]
        assert labels["areas"][0].tolist() == [row["area"] for row in rows]
        assert labels["crowd"][0].tolist() == [bool(row["iscrowd"]) for row in rows]
        ids = labels["categories"][0].ids
        assert [ids[place] for place in labels["classes"][0]] == [row["category_id"] for row in rows]
        assert ids == tuple(sorted(reference.getCatIds()))


def test_difficult_objects_are_ignored(tmp_path: Path) -> None:
    assert labels_of(voc(tmp_path))[0]["ignored"][0].tolist() == [True, False]


@pytest.mark.parametrize(
    "settings",
    [
        {"preset": "unit"},
        {"resize": "none", "scale": 1},
        {"resize": "shorter", "crop": "model", "scale": 1},
        {"resize": "letterbox", "scale": 1},
        {"resize": "none", "crop": [90, 30], "scale": 1},
    ],
)
def test_placement_is_that_of_the_pixels(settings: dict[str, Any], tmp_path: Path) -> None:
    """A bright square of the image is where the placement says in the input."""
    pixels = np.zeros((80, 60, 3), np.uint8)
    pixels[20:60, 12:36] = 255
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("a.png,0,12,20,36,60\n")
    dynamic = settings["resize"] == "none" if "resize" in settings else False
    spec = InputSpec("x", np.dtype(np.float32), (1, 3, None, None) if dynamic else (1, 3, 40, 40))
    ((_, feed),) = read(DataPath(tmp_path, settings), (spec,)).labelled()
    bright = feed.feed["x"][0, 0] > feed.feed["x"].max() / 2
    (rows,), (columns,) = np.nonzero(bright.any(1)), np.nonzero(bright.any(0))
    box = np.array([[columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]], float)
    placement = feed.labels["placement"][0]
    assert placement.size == feed.feed["x"].shape[2:]
    expected = np.clip(feed.labels["boxes"][0] * np.tile(placement.scale, 2) + np.tile(placement.offset, 2), 0, 99)
    limits = np.tile(placement.size[::-1], 2)
    assert np.abs(box - np.minimum(expected, limits)).max() <= 1


def test_class_folders_and_tables_take_a_list_of_classes(tmp_path: Path) -> None:
    """Lines of classes.txt number folders and names; WordNet ids are the first words of lines."""
    for folder in ("n02", "n01"):
        (tmp_path / folder).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / folder / "x.png")
    assert [labels["label"].tolist() for labels in labels_of(tmp_path)] == [[0], [1]]
    top1, scores = TopK(1), {"scores": np.zeros((1, 3), np.float32)}
    with pytest.raises(DataError, match=r"has 2 classes \('n01' is 0\) and the output has 3: list all classes of the"):
        top1.add(scores, labels_of(tmp_path)[0])
    (tmp_path / "classes.txt").write_text("n02 tench\nn01 goldfish, Carassius\n")
    top1.add(scores, labels_of(tmp_path)[0])
    assert [labels["label"].tolist() for labels in labels_of(tmp_path)] == [[1], [0]]
    (tmp_path / "val.csv").write_text("file,label\nn02/x.png,n01\n")
    assert [labels["label"].tolist() for labels in labels_of(tmp_path / "val.csv")] == [[1]]
    (tmp_path / "classes.txt").write_text("n02\n")
    with pytest.raises(DataError, match=r"classes\.txt' does not list the class 'n01': add it as a line"):
        labels_of(tmp_path)


def broken(tree: Write, file: str, old: str, new: str) -> Write:
    def write(folder: Path) -> Path:
        path = tree(folder)
        text = (folder / file).read_text()
        assert old in text
        (folder / file).write_text(text.replace(old, new, 1))
        return path

    return write


JSON = "annotations/instances_val2017.json"
FAULTS: dict[str, tuple[Write, str]] = {
    "image id": (broken(coco, JSON, '"image_id": 97', '"image_id": 1'), "annotation 0 is of an image or category"),
    "bbox": (broken(coco, JSON, "[8, 4, 32, 16]", "[8, 4, 32]"), r"0 is \[8, 4, 32\]; it must be \[x, y, width"),
    "negative width": (broken(coco, JSON, "[8, 4, 32, 16]", "[8, 4, -32, 16]"), r"-32, 16\]; .* height not negative"),
    "another size": (broken(coco, JSON, '"width": 80', '"width": 81'), "40 x 80 pixels .*annotations are of 40 x 81"),
    "a missing image": (
        broken(coco, JSON, '"b.png"', '"d.png"'),
        r"names 3 images and 1 are missing, .*d\.png",
    ),
    "no images": (broken(coco, JSON, '"a.png"', '"e.png"'), r"such as 'e\.png', are in none of .*val2017"),
    "pixels": (broken(yolo, "labels/val/b.txt", "0 0.5", "0 20"), r"b\.txt' line 1 has coordinates outside of 0 to 1"),
    "cells": (broken(yolo, "labels/val/a.txt", "1 ", ""), r"a\.txt' line 1 must be class x y|must be numbers"),
    "class": (broken(yolo, "labels/val/b.txt", "0 ", "2 "), r"has class 2 and .*data\.yaml' names 2 classes"),
    "val": (broken(yolo, "data.yaml", "val: images/val", "val: images/no"), "val is 'images/no', which does not exist"),
    "xml": (broken(voc, "Annotations/a.xml", "</object>", ""), r"a\.xml' is no readable XML"),
    "bndbox": (broken(voc, "Annotations/b.xml", "<xmin>5", "<xmin>"), r"b\.xml', object 1 needs a bndbox"),
    "list": (broken(voc, "ImageSets/Main/val.txt", "b\n", "z\n"), r"lists 'z', and there is no .*z\.xml"),
    "row": (broken(table, "labels.csv", "cat,16", "16"), r"labels\.csv' line 3 has 5 cells and needs 6"),
    "order": (broken(table, "labels.csv", "cat,16", "cat,96"), r"labels\.csv' line 3 needs corners in pixels"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_faults_are_named(case: str, tmp_path: Path) -> None:
    """One line with the file and the place in it."""
    write, message = FAULTS[case]
    with pytest.raises(DataError, match=message) as error:
        labels_of(write(tmp_path / "data"))
    assert "\n" not in str(error.value)


def test_ambiguous_folders_name_the_choices(tmp_path: Path) -> None:
    folder = coco(tmp_path / "coco")
    write_images(folder / "train2017")
    with pytest.raises(DataError, match=r"several annotation files: name one of .*instances_train2017\.json"):
        labels_of(folder)
    assert len(labels_of(folder / JSON)) == 3
    voc_list(tmp_path / "voc")
    with pytest.raises(DataError, match=r"several lists of images: name one, .*train\.txt"):
        labels_of(tmp_path / "voc")
    yolo(voc(tmp_path / "both"))
    with pytest.raises(DataError, match="has annotations of YOLO and Pascal VOC: name the file of one"):
        labels_of(tmp_path / "both")

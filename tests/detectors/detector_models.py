"""Small detectors whose outputs are known boxes, encoded as each head has them, and a folder of annotated images."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from sbonnx.spec import Array

SIDE = 64
"""Height and width of the input."""
IMAGE = (128, 64)
"""Width and height of the image: by letterbox, it is scaled by half and moved down by 16 pixels."""
TRUE = np.array([[8.0, 4, 40, 40], [60, 20, 124, 60], [20, 30, 52, 62]])
CLASSES = np.array([0, 2, 1])
NAMES = ("cat", "dog", "bird")
IDS = (3, 7, 9)
"""Category ids of the COCO file."""
BOXES = TRUE / 2 + (0, 16, 0, 16)
"""The boxes in the input, pixels."""
STRIDES = (8, 16, 32)


class Builder:
    """Nodes and constants of a model with an image input; outputs are listed in the order of `output`."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.outputs: list[onnx.ValueInfoProto] = []
        self.op("ReduceMax", ["images"], "peak", keepdims=0)
        self.op("Mul", ["peak", self.constant(np.zeros((), np.float32))], "zero")

    def constant(self, value: Array) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def op(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        """Add a node with one output and return its name."""
        self.nodes.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
        return output

    def value(self, value: Array, name: str) -> str:
        """Return a tensor with these values, float32, that depends on the image."""
        return self.op("Add", [self.constant(value.astype(np.float32)), "zero"], name)

    def output(self, name: str, shape: tuple[int | str, ...], kind: int = TensorProto.FLOAT) -> None:
        """Make a tensor an output."""
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def save(self, path: Path) -> Path:
        """Write the model."""
        image = helper.make_tensor_value_info("images", TensorProto.FLOAT, (1, 3, SIDE, SIDE))
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "detector", [image], self.outputs, constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
        return path


def centers(boxes: Array) -> Array:
    """Center, width and height of corners."""
    return np.concatenate([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def logit(shares: Array) -> Array:
    values: Array = np.log(shares / (1 - shares))
    return values


def scored(rows: int, classes: int, first: int = 0) -> Array:
    """Scores (rows, classes): near 1 for the class of each box, in the first rows; classes begin at `first`."""
    scores = np.full((rows, classes), 1e-6)
    scores[np.arange(3), CLASSES + first] = 0.9 - 0.1 * np.arange(3)
    return scores


def cell_rows(anchors: int, of_row: Callable[[Array, int, int, int], Array]) -> Array:
    """Rows for all cells of stride 8, 16, 32: `of_row(box, x, y, stride)` at the cell of stride 8 of each box."""
    count = anchors * sum((SIDE // stride) ** 2 for stride in STRIDES)
    rows = np.zeros((count, 8))
    rows[:, 4:] = 1e-6
    for box, number, score in zip(centers(BOXES), CLASSES, (0.9, 0.8, 0.7), strict=True):
        x, y = (int(side // 8) for side in box[:2])
        row = y * (SIDE // 8) + x
        rows[row, :4], rows[row, 4], rows[row, 5 + number] = of_row(box, x, y, 8), 1.0, score
    return rows


def yolov5(b: Builder) -> None:
    b.value(cell_rows(3, lambda box, x, y, stride: box)[None], "output0")
    b.output("output0", (1, 252, 8))


def yolov5_maps(b: Builder) -> None:
    """Offsets of the first anchor of stride 8, 10 x 13 pixels."""

    def offsets(box: Array, x: int, y: int, stride: int) -> Array:
        moved = (box[:2] / stride - (x, y) + 0.5) / 2
        return np.concatenate([moved, np.sqrt(box[2:] / (10, 13)) / 2])

    rows = np.clip(cell_rows(3, offsets), 1e-6, 1 - 1e-6)
    first = logit(rows[:192]).reshape(1, 3, 8, 8, 8)
    for name, values in (
        ("p3", first),
        ("p4", np.full((1, 3, 4, 4, 8), -15.0)),
        ("p5", np.full((1, 3, 2, 2, 8), -15.0)),
    ):
        b.value(values, name)
        b.output(name, values.shape)


def yolov8(b: Builder) -> None:
    columns = np.concatenate([np.zeros((84, 4)), np.full((84, 3), 1e-6)], 1)
    columns[5:8] = np.concatenate([centers(BOXES), scored(3, 3)], 1)
    b.value(columns.T[None], "output0")
    b.output("output0", (1, 7, 84))


def yolox(b: Builder) -> None:
    def offsets(box: Array, x: int, y: int, stride: int) -> Array:
        return np.concatenate([box[:2] / stride - (x, y), np.log(box[2:] / stride)])

    b.value(cell_rows(1, offsets)[None], "output")
    b.output("output", (1, 84, 8))


def yolox_decoded(b: Builder) -> None:
    """Grid and strides applied in the graph."""
    rows = cell_rows(1, lambda box, x, y, stride: np.concatenate([box[:2], np.log(box[2:])]))[None]
    b.value(rows[..., :2], "xy")
    b.op("Exp", [b.value(rows[..., 2:4], "raw")], "wh")
    b.value(rows[..., 4:], "scores")
    b.op("Concat", ["xy", "wh", "scores"], "output", axis=2)
    b.output("output", (1, 84, 8))


def end2end(b: Builder) -> None:
    """Rows in another order, selected by TopK."""
    rows = np.zeros((1, 10, 6))
    rows[0, 4:7] = np.concatenate([BOXES, np.array([[0.9, 0.8, 0.7]]).T, CLASSES[:, None]], 1)
    b.value(rows, "rows")
    b.value(rows[0, :, 4], "scores")
    b.nodes.append(helper.make_node("TopK", ["scores", b.constant(np.array([5]))], ["best", "places"], name="top"))
    b.op("Gather", ["rows", "places"], "output0", axis=1)
    b.output("output0", (1, 5, 6))


def torchvision(b: Builder) -> None:
    """Classes from 1, as 0 is the background."""
    for name, values in (("boxes", BOXES), ("scores", np.array([0.9, 0.8, 0.7]))):
        b.value(values, name)
        b.output(name, ("boxes", 4) if values.ndim == 2 else ("boxes",))
    b.op("Cast", [b.value(CLASSES + 1.0, "numbers")], "labels", to=TensorProto.INT64)
    b.output("labels", ("boxes",), TensorProto.INT64)


def tensorflow(b: Builder) -> None:
    """y1, x1, y2, x2 as shares, category ids."""
    values = {
        "detection_boxes:0": (BOXES / SIDE)[None][..., [1, 0, 3, 2]],
        "detection_scores:0": np.array([[0.9, 0.8, 0.7]]),
        "detection_classes:0": np.array(IDS, float)[CLASSES][None],
        "num_detections:0": np.array([3.0]),
    }
    for name, value in values.items():
        b.value(value, name)
        b.output(name, value.shape)


def indices(b: Builder) -> None:
    """NonMaxSuppression at the end, boxes in pixels."""
    b.value(BOXES[None][..., [3, 2, 1, 0]], "b")  # the other two corners
    b.value(scored(3, 3).T[None], "s")
    limits = [
        b.constant(np.array([9])),
        b.constant(np.array([0.5], np.float32)),
        b.constant(np.array([0.3], np.float32)),
    ]
    b.op("NonMaxSuppression", ["b", "s", *limits], "chosen")
    b.output("b", (1, 3, 4))
    b.output("s", (1, 3, 3))
    b.output("chosen", ("n", 3), TensorProto.INT64)


PRIORS = np.concatenate([np.linspace(0.1, 0.9, 40).reshape(20, 2), np.full((20, 2), 0.4)], 1)


def offsets_to_priors() -> Array:
    found = np.zeros((20, 4))
    shares = centers(BOXES / SIDE)
    found[:3, :2] = (shares[:, :2] - PRIORS[:3, :2]) / (0.1 * PRIORS[:3, 2:])
    found[:3, 2:] = np.log(shares[:, 2:] / PRIORS[:3, 2:]) / 0.2
    return found


def ssd(b: Builder) -> None:
    """Priors, variances and corners in the graph, background first."""
    offsets = offsets_to_priors()[None]
    b.value(offsets[..., :2] * 0.1 * PRIORS[:, 2:], "moved")
    b.op("Add", ["moved", b.constant(PRIORS[None, :, :2].astype(np.float32))], "center")
    b.op("Exp", [b.value(offsets[..., 2:] * 0.2, "grown")], "factor")
    b.op("Mul", ["factor", b.constant(PRIORS[None, :, 2:].astype(np.float32) / 2)], "half")
    b.op("Concat", [b.op("Sub", ["center", "half"], "low"), b.op("Add", ["center", "half"], "high")], "boxes", axis=2)
    _softmax(b)
    b.output("boxes", (1, 20, 4))


def _softmax(b: Builder) -> None:
    scores = scored(20, 4, first=1)
    scores[:, 0] = 1 - scores[:, 1:].sum(1)
    b.op("Softmax", [b.value(np.log(scores)[None], "logits")], "scores", axis=2)
    b.output("scores", (1, 20, 4))


def ssd_raw(b: Builder) -> None:
    b.value(offsets_to_priors()[None], "offsets")
    b.output("offsets", (1, 20, 4))
    _softmax(b)


def detr(b: Builder) -> None:
    """The last class is no object; boxes end in Sigmoid."""
    scores = scored(8, 4)
    scores[:, 3] = 1 - scores[:, :3].sum(1)
    _queries(b, np.log(scores))


def rtdetr(b: Builder) -> None:
    """Sigmoid scores; queries are chosen by TopK."""
    b.nodes.append(helper.make_node("TopK", ["flat", b.constant(np.array([5]))], ["best", "places"], name="queries"))
    b.nodes.insert(0, helper.make_node("Reshape", ["images", b.constant(np.array([1, -1]))], ["flat"], name="flat"))
    _queries(b, logit(scored(8, 3)))


def _queries(b: Builder, logits: Array) -> None:
    boxes = np.full((8, 4), 0.5)
    boxes[:3] = centers(BOXES / SIDE)
    b.value(logits[None], "logits")
    b.op("Sigmoid", [b.value(logit(boxes)[None], "raw")], "pred_boxes")
    b.output("logits", (1, 8, logits.shape[1]))
    b.output("pred_boxes", (1, 8, 4))


def fastestdet(b: Builder) -> None:
    """Cells of 8 pixels: object, tanh offsets, sizes, classes."""
    values = np.zeros((8, 8, 8))
    values[0] = 1e-6
    values[5:] = 1 / 3
    for box, number in zip(centers(BOXES), CLASSES, strict=True):
        x, y = (int(side // 8) for side in box[:2])
        values[0, y, x] = 1 - 1e-6
        values[1:3, y, x] = np.arctanh(box[:2] / 8 - (x, y))
        values[3:5, y, x] = logit(box[2:] / SIDE)
        values[5:, y, x] = np.where(np.arange(3) == number, 0.98 - 0.01 * number, 0.01)
    b.op("Sigmoid", [b.value(logit(values[:1])[None], "object_raw")], "object")
    identity = b.constant(np.eye(4, dtype=np.float32).reshape(4, 4, 1, 1))
    b.op("Conv", [b.value(values[1:5][None], "box_raw"), identity], "box")
    b.op("Softmax", [b.value(np.log(values[5:])[None], "class_raw")], "class", axis=1)
    b.op("Concat", ["object", "box", "class"], "output", axis=1)
    b.output("output", (1, 8, 8, 8))


MODELS: Mapping[str, Callable[[Builder], None]] = {
    build.__name__: build
    for build in (
        *(yolov5, yolov5_maps, yolov8, yolox, yolox_decoded, end2end, torchvision, tensorflow, indices, ssd, ssd_raw),
        *(detr, rtdetr, fastestdet),
    )
}


def write_coco(folder: Path) -> Path:
    """Write an image with three boxes, and one without boxes."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "val").mkdir()
    images = [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "b.png"}]
    for image in images:
        image.update(width=IMAGE[0], height=IMAGE[1])
        Image.new("RGB", IMAGE).save(folder / "val" / str(image["file_name"]))
    rows = [
        {"id": number + 1, "image_id": 5, "category_id": IDS[kind], "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
        for number, ((x1, y1, x2, y2), kind) in enumerate(zip(TRUE.tolist(), CLASSES, strict=True))
    ]
    categories = [{"id": number, "name": name} for number, name in zip(IDS, NAMES, strict=True)]
    text = json.dumps({"images": images, "annotations": rows, "categories": categories})
    (folder / "annotations" / "instances_val.json").write_text(text)
    return folder

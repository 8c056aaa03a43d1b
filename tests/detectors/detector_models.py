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
        self.inputs: list[onnx.ValueInfoProto] = []
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

    def input(self, name: str, kind: int, count: int = 2) -> str:
        """Add an input (1, count) besides the image."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, (1, count)))
        return name

    def save(self, path: Path, side: int = SIDE) -> Path:
        """Write the model, with inputs of `side` x `side` pixels."""
        image = helper.make_tensor_value_info("images", TensorProto.FLOAT, (1, 3, side, side))
        constants = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph(self.nodes, "detector", [image, *self.inputs], self.outputs, constants)
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


def yolov5_maps(b: Builder, coefficients: int = 0) -> None:
    """Offsets of the first anchor of stride 8, 10 x 13 pixels; coefficients of masks after the classes."""

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
        values = np.concatenate([values, np.ones((*values.shape[:4], coefficients))], 4)
        b.value(values, name)
        b.output(name, values.shape)


def yolov5_masks(b: Builder) -> None:
    """Two coefficients after the classes, and the maps that they weight."""
    rows = cell_rows(3, lambda box, x, y, stride: box)
    b.value(np.concatenate([rows, np.ones((252, 2))], 1)[None], "output0")
    b.output("output0", (1, 252, 10))
    _masks(b)


def yolov5_maps_masks(b: Builder) -> None:
    yolov5_maps(b, coefficients=2)
    _masks(b)


def _masks(b: Builder) -> None:
    b.value(np.ones((1, 2, 16, 16)), "output1")
    b.output("output1", (1, 2, 16, 16))


def yolov8(b: Builder) -> None:
    _columns(b, {}, after=0)


def yolov8_masks(b: Builder) -> None:
    """Two coefficients after the scores, and the maps that they weight."""
    _columns(b, {"coefficients": np.ones((1, 2, 84))}, after=2)
    _masks(b)


def yolov8_keypoints(b: Builder) -> None:
    """Two keypoints after the scores, x, y and Sigmoid of each, joined before a Reshape."""
    b.op("Sigmoid", [b.value(np.zeros((1, 2, 1, 84)), "seen_raw")], "seen")
    b.op("Concat", [b.value(np.ones((1, 2, 2, 84)), "places"), "seen"], "points", axis=2)
    b.op("Reshape", ["points", b.constant(np.array([1, 6, 84]))], "keypoints")
    _columns(b, {"keypoints": None}, after=6)


def yolov8_angles(b: Builder) -> None:
    """The angle of each box after the scores, a multiple of a Sigmoid."""
    b.op("Sigmoid", [b.value(np.zeros((1, 1, 84)), "angle_raw")], "turn")
    b.op("Mul", ["turn", b.constant(np.array(np.pi, np.float32))], "angle")
    _columns(b, {"angle": None}, after=1)


def _columns(b: Builder, extra: Mapping[str, Array | None], *, after: int) -> None:
    """Boxes, scores and extra columns, given or made already, joined as YOLOv8 does."""
    boxes, scores = np.zeros((1, 4, 84)), np.full((84, 3), 1e-6)
    boxes[0, :, 5:8], scores[5:8] = centers(BOXES).T, scored(3, 3)
    b.op("Sigmoid", [b.value(logit(scores).T[None], "scores_raw")], "scores")
    joined = b.op("Concat", [b.value(boxes, "boxes"), "scores"], "boxes_scores" if extra else "output0", axis=1)
    for name, value in extra.items():
        if value is not None:
            b.value(value, name)
        b.op("Concat", [joined, name], "output0", axis=1)
    b.output("output0", (1, 7 + after, 84))


def yolox(b: Builder) -> None:
    def offsets(box: Array, x: int, y: int, stride: int) -> Array:
        return np.concatenate([box[:2] / stride - (x, y), np.log(box[2:] / stride)])

    rows = cell_rows(1, offsets)
    levels = []
    for place, (first, count) in enumerate(((0, 64), (64, 16), (80, 4))):
        part = rows[None, first : first + count].transpose(0, 2, 1)
        boxes = conv(b, part[:, :4], f"box{place}")
        shares = np.clip(part, 1e-6, 1 - 1e-6)
        scores = [
            b.op("Sigmoid", [b.value(logit(shares[:, place_of]), f"raw_{name}{place}")], f"{name}{place}")
            for name, place_of in (("object", slice(4, 5)), ("class", slice(5, 8)))
        ]
        levels.append(b.op("Concat", [boxes, *scores], f"level{place}", axis=1))
    b.op("Transpose", [b.op("Concat", levels, "all", axis=2)], "output", perm=[0, 2, 1])
    b.output("output", (1, 84, 8))


def conv(b: Builder, value: Array, name: str) -> str:
    """Return values (1, channels, cells) that come out of a convolution."""
    count = value.shape[1]
    identity = b.constant(np.eye(count, dtype=np.float32)[..., None])
    return b.op("Conv", [b.value(value, f"{name}_in"), identity], name)


def yolox_decoded(b: Builder) -> None:
    """Grid and strides applied in the graph."""
    rows = cell_rows(1, lambda box, x, y, stride: np.concatenate([box[:2], np.log(box[2:])]))[None]
    b.value(rows[..., :2], "xy")
    b.op("Exp", [b.value(rows[..., 2:4], "raw")], "wh")
    b.value(rows[..., 4:], "scores")
    b.op("Concat", ["xy", "wh", "scores"], "output", axis=2)
    b.output("output", (1, 84, 8))


def end2end(b: Builder, coefficients: int = 0) -> None:
    """Rows in another order, selected by TopK; coefficients of masks after them."""
    rows = np.ones((1, 10, 6 + coefficients))
    rows[..., :6] = 0
    rows[0, 4:7, :6] = np.concatenate([BOXES, np.array([[0.9, 0.8, 0.7]]).T, CLASSES[:, None]], 1)
    b.value(rows, "rows")
    b.value(rows[0, :, 4], "scores")
    b.nodes.append(helper.make_node("TopK", ["scores", b.constant(np.array([5]))], ["best", "places"], name="top"))
    b.op("Gather", ["rows", "places"], "output0", axis=1)
    b.output("output0", (1, 5, 6 + coefficients))


def end2end_masks(b: Builder) -> None:
    end2end(b, coefficients=2)
    _masks(b)


def paddle(b: Builder) -> None:
    """Class, score and box of all images and their number; boxes are divided by the scale of the image."""
    scale = b.op("Concat", [b.input("scale_factor", TensorProto.FLOAT)] * 2, "scale", axis=1)
    shape = b.op("Div", [b.input("im_shape", TensorProto.FLOAT), b.constant(np.array([[SIDE, SIDE]], np.float32))], "s")
    boxes = b.op("Div", [b.value(BOXES, "b"), scale], "unscaled")
    boxes = b.op("Mul", [boxes, b.op("Concat", [shape, shape], "shares", axis=1)], "boxes")
    front = b.value(np.stack([CLASSES, [0.9, 0.8, 0.7]], 1), "front")
    b.op("Concat", [front, boxes], "multiclass_nms3_0.tmp_0", axis=1)
    b.op("Cast", [b.value(np.array([3.0]), "count")], "multiclass_nms3_0.tmp_2", to=TensorProto.INT32)
    b.output("multiclass_nms3_0.tmp_0", ("n", 6))
    b.output("multiclass_nms3_0.tmp_2", (1,), TensorProto.INT32)


def rtdetr_sizes(b: Builder) -> None:
    """Boxes as shares, multiplied by the width and height of the second input."""
    sizes = b.op("Cast", [b.input("orig_target_sizes", TensorProto.INT64)], "sizes", to=TensorProto.FLOAT)
    b.op("Mul", [b.value(BOXES[None] / SIDE, "shares"), b.op("Concat", [sizes, sizes], "four", axis=1)], "boxes")
    b.op("Cast", [b.value(CLASSES[None] + 0.0, "numbers")], "labels", to=TensorProto.INT64)
    b.value(np.array([[0.9, 0.8, 0.7]]), "scores")
    b.output("labels", (1, 3), TensorProto.INT64)
    b.output("boxes", (1, 3, 4))
    b.output("scores", (1, 3))


def end2end7(b: Builder) -> None:
    """Rows of YOLOv7's --end2end, selected by NonMaxSuppression."""
    rows = np.concatenate([np.zeros((3, 1)), BOXES, CLASSES[:, None], np.array([[0.9, 0.8, 0.7]]).T], 1)
    b.value(BOXES[None], "b")
    b.value(scored(3, 3).T[None], "s")
    limits = [b.constant(np.array([9])), *(b.constant(np.array([value], np.float32)) for value in (0.5, 0.3))]
    b.op("NonMaxSuppression", ["b", "s", *limits], "chosen")
    b.op("Gather", ["chosen", b.constant(np.array(2))], "places", axis=1)
    b.op("Gather", [b.value(rows, "rows"), "places"], "output", axis=0)
    b.output("output", ("n", 7))


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


def ppyoloe(b: Builder) -> None:
    """Corners divided by a scale, and scores with the classes before the cells (exports without NMS)."""
    boxes = np.zeros((1, 84, 4))
    boxes[0, :3] = BOXES
    b.op("Div", [b.value(boxes, "scaled"), b.constant(np.ones((1, 1, 4), np.float32))], "boxes")
    b.op("Sigmoid", [b.value(logit(scored(84, 3)).T[None], "raw")], "scores")
    b.output("boxes", (1, 84, 4))
    b.output("scores", (1, 3, 84))


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


def rfdetr(b: Builder) -> None:
    """Boxes are offsets to proposals that TopK selects: added in their size, and factors as exponents."""
    proposals = np.full((12, 4), 0.3)
    proposals[:, :2] = np.linspace(0.1, 0.9, 24).reshape(12, 2)
    order = np.arange(12)[::-1]  # of falling score
    b.value(order[None] + 0.0, "scores_of_proposals")
    sizes = b.value(np.full((1, 12, 2), 0.3), "raw_sizes")
    b.op(
        "Concat",
        [b.op("Add", ["zero", b.constant(proposals[None, :, :2].astype(np.float32))], "c"), sizes],
        "p",
        axis=2,
    )
    count = b.constant(np.array([8]))
    b.nodes.append(helper.make_node("TopK", ["scores_of_proposals", count], ["best", "places"], name="top"))
    b.op(
        "Expand",
        [b.op("Unsqueeze", ["places", b.constant(np.array([2]))], "column"), b.constant(np.array([1, 8, 4]))],
        "rows",
    )
    b.op("GatherElements", ["p", "rows"], "reference", axis=1)
    ends = [b.constant(np.array([value])) for value in (0, 2, 4)]
    last = b.constant(np.array([2]))
    b.op("Slice", ["reference", ends[0], ends[1], last], "reference_center")
    b.op("Slice", ["reference", ends[1], ends[2], last], "reference_size")
    wanted, deltas = centers(BOXES / SIDE), np.zeros((8, 4))
    deltas[:3] = np.concatenate([(wanted[:, :2] - proposals[:3, :2]) / 0.3, np.log(wanted[:, 2:] / 0.3)], 1)
    raw = b.op("Transpose", [conv(b, deltas.T[None], "bbox_embed")], "deltas", perm=[0, 2, 1])
    moved = b.op("Slice", [raw, ends[0], ends[1], last], "moved")
    grown = b.op("Slice", [raw, ends[1], ends[2], last], "grown")
    b.op("Add", [b.op("Mul", [moved, "reference_size"], "m"), "reference_center"], "xy")
    b.op("Mul", [b.op("Exp", [grown], "e"), "reference_size"], "wh")
    b.op("Concat", ["xy", "wh"], "dets", axis=2)
    b.value(logit(scored(8, 3))[None], "labels")
    b.output("dets", (1, 8, 4))
    b.output("labels", (1, 8, 3))


def mmdeploy(b: Builder) -> None:
    """Boxes with their scores, and labels; padding has class -1."""
    rows, numbers = np.zeros((1, 5, 5)), np.full((1, 5), -1.0)
    rows[0, :3] = np.concatenate([BOXES, np.array([[0.9, 0.8, 0.7]]).T], 1)
    numbers[0, :3] = CLASSES
    b.value(rows, "dets")
    b.op("Cast", [b.value(numbers, "numbers")], "labels", to=TensorProto.INT64)
    b.output("dets", (1, 5, 5))
    b.output("labels", (1, 5), TensorProto.INT64)


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


def _cells_of(stride: int) -> list[tuple[int, Array, int]]:
    """Cell, box (x1, y1, x2, y2) and class of the boxes; all are at stride 8."""
    centers_of = (BOXES[:, :2] + BOXES[:, 2:]) // 16
    cells = (centers_of[:, 1] * (SIDE // 8) + centers_of[:, 0]).astype(int)
    return list(zip(cells.tolist(), BOXES, CLASSES.tolist(), strict=True)) if stride == 8 else []


def picodet(b: Builder) -> None:
    """Distances in 8 bins: the mean of two neighbouring bins. Level 64 has one cell."""
    for stride in (*STRIDES, 64):
        count = (SIDE // stride) ** 2
        scores, bins = np.full((1, count, 3), 1e-6), np.full((1, count, 4, 8), -30.0)
        bins[..., 0] = 0
        for cell, box, number in _cells_of(stride):
            center = (np.array([cell % 8, cell // 8]) + 0.5) * stride
            distances = np.concatenate([center - box[:2], box[2:] - center]) / stride
            scores[0, cell, number] = 0.9 - 0.1 * number
            for side, distance in enumerate(distances):
                share = distance % 1
                bins[0, cell, side] = -30.0
                bins[0, cell, side, int(distance)] = np.log(max(1 - share, 1e-9))
                bins[0, cell, side, int(distance) + 1] = np.log(max(share, 1e-9))
        b.op("Sigmoid", [b.value(logit(scores), f"raw{stride}")], f"scores{stride}")
        distances_of = conv(b, bins.reshape(1, count, 32).transpose(0, 2, 1), f"bins{stride}")
        b.op("Transpose", [distances_of], f"distances{stride}", perm=[0, 2, 1])
        b.output(f"scores{stride}", (1, count, 3))
        b.output(f"distances{stride}", (1, count, 32))


def _distributions(b: Builder, strides: tuple[int, ...], middle: float) -> None:
    """Scores and 8 bins of distances of each level, joined; the cells of the boxes are at stride 8."""
    levels = []
    for stride in strides:
        count = (SIDE // stride) ** 2
        scores, bins = np.full((1, count, 3), 1e-6), np.zeros((1, count, 4, 8))
        for cell, box, number in _cells_of(stride):
            point = (np.array([cell % 8, cell // 8]) + middle) * stride
            distances = np.concatenate([point - box[:2], box[2:] - point]) / stride
            scores[0, cell, number] = 0.9 - 0.1 * number
            places = np.abs(np.arange(8) - distances[:, None])
            bins[0, cell] = np.log(np.clip(1 - places, 1e-9, None))
        raw = b.op("Sigmoid", [b.value(logit(scores).transpose(0, 2, 1), f"raw{stride}")], f"scores{stride}")
        bins_of = conv(b, bins.reshape(1, count, 32).transpose(0, 2, 1), f"bins{stride}")
        levels.append(b.op("Concat", [raw, bins_of], f"level{stride}", axis=1))
    b.op("Transpose", [b.op("Concat", levels, "all", axis=2)], "output", perm=[0, 2, 1])
    b.output("output", (1, sum((SIDE // stride) ** 2 for stride in strides), 35))


def nanodet(b: Builder) -> None:
    """Distances from the centers of the cells."""
    _distributions(b, STRIDES, 0.5)


def nanodet_plus(b: Builder) -> None:
    """Distances from the corners of the cells, and a fourth level."""
    _distributions(b, (*STRIDES, 64), 0.0)


def scrfd(b: Builder) -> None:
    """Two rows for each cell, without an axis of images; the second rows of the cells have the boxes."""
    for stride in STRIDES:
        count = 2 * (SIDE // stride) ** 2
        scores, distances = np.full((count, 1), 1e-6), np.zeros((count, 4))
        for cell, box, number in _cells_of(stride):
            point = np.array([cell % 8, cell // 8]) * stride
            scores[2 * cell + 1] = 0.9 - 0.1 * number
            distances[2 * cell + 1] = np.concatenate([point - box[:2], box[2:] - point]) / stride
        b.op("Sigmoid", [b.value(logit(scores), f"raw{stride}")], f"score_{stride}")
        b.value(distances, f"bbox_{stride}")
        b.value(np.zeros((count, 10)), f"kps_{stride}")
    for name, columns in (("score", 1), ("bbox", 4), ("kps", 10)):
        for stride in STRIDES:
            b.output(f"{name}_{stride}", (2 * (SIDE // stride) ** 2, columns))


def yunet(b: Builder) -> None:
    """Class, object, box and landmarks of each stride."""
    for stride in STRIDES:
        count = (SIDE // stride) ** 2
        scores, raw = np.full((1, count, 1), 1e-6), np.zeros((1, count, 4))
        for cell, box, number in _cells_of(stride):
            scores[0, cell] = 0.9 - 0.1 * number
            raw[0, cell, :2] = (box[:2] + box[2:]) / 2 / stride - (cell % 8, cell // 8)
            raw[0, cell, 2:] = np.log((box[2:] - box[:2]) / stride)
        for name in ("cls", "obj"):
            b.op("Sigmoid", [b.value(logit(scores), f"raw_{name}{stride}")], f"{name}_{stride}")
            b.output(f"{name}_{stride}", (1, count, 1))
        for name, value in (("bbox", raw), ("kps", np.zeros((1, count, 10)))):
            b.value(value, f"{name}_{stride}")
            b.output(f"{name}_{stride}", value.shape)


def centerface(b: Builder) -> None:
    """Cells of 4 pixels: heat, then sizes and offsets, y before x."""
    heat, maps = np.full((1, 1, 16, 16), 1e-6), np.zeros((2, 1, 2, 16, 16))
    for number, (x, y, width, height) in zip(CLASSES, centers(BOXES), strict=True):
        column, line = int(x // 4), int(y // 4)
        heat[0, 0, line, column] = 0.9 - 0.1 * number
        maps[0, 0, :, line, column] = np.log([height / 4, width / 4])
        maps[1, 0, :, line, column] = y / 4 - line - 0.5, x / 4 - column - 0.5
    b.op("Sigmoid", [b.value(logit(heat), "raw")], "heat")
    for name, value in (("sizes", maps[0]), ("offsets", maps[1]), ("landmarks", np.zeros((1, 10, 16, 16)))):
        b.value(value, name)
    for name, count in (("heat", 1), ("sizes", 2), ("offsets", 2), ("landmarks", 10)):
        b.output(name, (1, count, 16, 16))


def transposed_yolov8(b: Builder) -> None:
    """Rows of boxes and classes without an object score: no head has this form."""
    b.op("Sigmoid", [b.value(np.zeros((1, 84, 3)), "raw")], "scores")
    b.op("Concat", [b.value(np.ones((1, 84, 4)), "boxes"), "scores"], "output", axis=2)
    b.output("output", (1, 84, 7))


MODELS: Mapping[str, Callable[[Builder], None]] = {
    build.__name__: build
    for build in (
        *(
            yolov5,
            yolov5_masks,
            yolov5_maps,
            yolov5_maps_masks,
            yolov8,
            yolov8_masks,
            yolox,
            yolox_decoded,
            end2end,
            torchvision,
            tensorflow,
            indices,
            ssd,
            ssd_raw,
            ppyoloe,
        ),
        *(end2end_masks, paddle, rtdetr_sizes, nanodet, nanodet_plus, scrfd),
        *(rfdetr, mmdeploy),
        *(detr, rtdetr, fastestdet, end2end7, picodet, yunet, centerface),
    )
}


def write_coco(folder: Path, *, one_class: bool = False) -> Path:
    """Write an image with three boxes of three classes and one without boxes; or the first, with boxes of one class."""
    (folder / "annotations").mkdir(parents=True)
    (folder / "val").mkdir()
    images = [{"id": 5, "file_name": "a.png"}, {"id": 6, "file_name": "b.png"}][: 1 if one_class else 2]
    for image in images:
        image.update(width=IMAGE[0], height=IMAGE[1])
        Image.new("RGB", IMAGE).save(folder / "val" / str(image["file_name"]))
    rows = [
        {"id": number + 1, "image_id": 5, "category_id": IDS[kind], "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0}
        for number, ((x1, y1, x2, y2), kind) in enumerate(zip(TRUE.tolist(), CLASSES, strict=True))
    ]
    if one_class:
        rows = [{**row, "category_id": IDS[0]} for row in rows]
    categories = [{"id": number, "name": name} for number, name in zip(IDS, NAMES, strict=True)]
    categories = categories[:1] if one_class else categories
    text = json.dumps({"images": images, "annotations": rows, "categories": categories})
    (folder / "annotations" / "instances_val.json").write_text(text)
    return folder

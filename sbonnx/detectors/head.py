"""Heads of detectors by name, with the settings of their reference implementations, and how a user states one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from sbonnx.errors import RecipeError

Corners = Literal["xyxy", "yxyx", "cxcywh"]
Unit = Literal["pixels", "shares", "strides"]
Activation = Literal["none", "sigmoid", "softmax"]
Background = Literal["none", "first", "last"]
Numbering = Literal["from0", "from1", "ids"]


@dataclass(frozen=True)
class Head:
    """Form of the outputs of a detector, and the selection of its detections.

    Attributes:
        name: see `HEADS`.
        score: minimum score of a detection.
        iou: boxes of one class whose IoU with one of a higher score is above this are dropped; None: no NMS.
        most: maximum number of detections of an image.
        corners: order of the four numbers of a box; None: not known from the graph.
        unit: pixels of the input of the model, shares of its width and height, or strides of the cell (distances);
            None: not known from the graph.
        scores: activation that the scores still need; None: not known from the graph.
        background: class of the background, which is no detection.
        classes: class numbers: position in the annotations from 0 or from 1, or category id; None: by their count.
        decoded: whether grid and anchors are applied in the graph.
        priors: file of the prior boxes, see `decode.prior_boxes`.
    """

    name: str
    score: float = 0.001
    iou: float | None = None
    most: int = 300
    corners: Corners | None = "xyxy"
    unit: Unit | None = "pixels"
    scores: Activation | None = "none"
    background: Background = "none"
    classes: Numbering | None = None
    decoded: bool = True
    priors: str | None = None


@dataclass(frozen=True)
class HeadKind:
    """A head of the table.

    Attributes:
        form: its outputs, for messages and docs.
        head: its default settings.
        options: settings that a user may state besides `score`, `iou`, `most` and `classes`.
    """

    form: str
    head: Head
    options: tuple[str, ...] = ()


HEADS: Final[Mapping[str, HeadKind]] = {
    "yolov5": HeadKind(
        "(1, N, 5 + classes), 3 rows for each cell of the strides 8, 16, 32 (also of YOLOv3, v7); or one map a stride, "
        "(1, 3, h, w, 5 + classes), with the anchors of YOLOv5",
        Head("yolov5", iou=0.6, corners="cxcywh"),
    ),
    "yolov7": HeadKind(
        "as yolov5; maps with the anchors of YOLOv7",
        Head("yolov7", iou=0.65, corners="cxcywh"),
    ),
    "yolov8": HeadKind(
        "(1, 4 + classes, N), one column for each cell of the strides 8, 16, 32 (also of YOLOv6, v9, 11, 12)",
        Head("yolov8", iou=0.7, corners="cxcywh"),
    ),
    "yolox": HeadKind(
        "(1, N, 5 + classes), one row for each cell of the strides 8, 16, 32",
        Head("yolox", iou=0.65, corners="cxcywh"),
    ),
    "end2end": HeadKind(
        "(1, N, 6) of x1, y1, x2, y2, score, class after a selection in the graph (YOLOv10, YOLO26, exports with NMS)",
        Head("end2end", classes="from0"),
        ("unit",),
    ),
    "end2end7": HeadKind(
        "(N, 7) of image, x1, y1, x2, y2, class, score after a selection in the graph (YOLOv7 with --end2end)",
        Head("end2end7", classes="from0"),
    ),
    "paddle": HeadKind(
        "(N, 6) of class, score, x1, y1, x2, y2 of all images, and their number in each image (PaddleDetection)",
        Head("paddle", classes="from0"),
    ),
    "nms": HeadKind(
        "outputs named boxes, scores and classes (or labels), or dets (boxes and scores) and labels, after a selection "
        "in the graph (torchvision, TensorFlow, RT-DETR, D-FINE, MMDeploy, SSD and Faster R-CNN of the ONNX model zoo)",
        Head("nms", score=0.0, unit=None),
        ("unit", "corners"),
    ),
    "indices": HeadKind(
        "boxes (1, N, 4), scores (1, classes, N) and the selected indices of NonMaxSuppression",
        Head("indices", score=0.0, corners=None, unit=None),
        ("unit", "corners"),
    ),
    "ssd": HeadKind(
        "boxes (1, N, 4) and scores (1, N, classes) or (1, classes, N) of priors or cells (SSD, RetinaNet, UltraFace; "
        "PP-YOLOE and YOLO-NAS without NMS)",
        Head("ssd", score=0.01, iou=0.45, most=200, corners=None, unit=None, scores=None),
        ("unit", "corners", "scores", "background", "priors"),
    ),
    "detr": HeadKind(
        "logits (1, queries, classes + 1), of which the last is no object, and boxes (1, queries, 4)",
        Head("detr", score=0.0, most=100, corners="cxcywh", unit="shares", scores="softmax", background="last"),
    ),
    "rtdetr": HeadKind(
        "logits (1, queries, classes) and boxes (1, queries, 4) (RT-DETR, RF-DETR, Deformable and Conditional DETR, "
        "DINO)",
        Head("rtdetr", score=0.0, corners="cxcywh", unit="shares", scores="sigmoid"),
    ),
    "fastestdet": HeadKind(
        "(1, 5 + classes, h, w): object (sigmoid), box, classes (softmax)",
        Head("fastestdet", iou=0.45),
    ),
    "picodet": HeadKind(
        "two outputs for each of the strides 8, 16, 32, 64 (or the first three): scores (1, cells, classes) and "
        "distances (1, cells, 4 bins)",
        Head("picodet", score=0.025, iou=0.6, most=100),
    ),
    "nanodet": HeadKind(
        "(1, N, classes + 4 bins), one row for each cell of the strides 8, 16, 32 (NanoDet), and 64 (NanoDet-Plus)",
        Head("nanodet", score=0.05, iou=0.6, most=100),
    ),
    "fcos": HeadKind(
        "three outputs for each of the strides 8, 16, 32, 64, 128: classes (1, classes, h, w), centerness (1, 1, h, w) "
        "and distances (1, 4, h, w)",
        Head("fcos", score=0.05, iou=0.6, most=100, unit=None),
        ("unit",),
    ),
    "fcosrows": HeadKind(
        "three outputs for all cells of the strides 8, 16, 32, 64, 128: classes (1, N, classes), distances (1, N, 4) "
        "and centerness (1, N, 1) (raw FCOS of torchvision)",
        Head("fcosrows", score=0.2, iou=0.6, most=100),
    ),
    "retinanet": HeadKind(
        "classes (1, N, classes) and offsets (1, N, 4), 9 rows for each cell of the strides 8, 16, 32, 64, 128 (raw "
        "RetinaNet of torchvision, with its default anchors)",
        Head("retinanet", score=0.05, iou=0.5),
    ),
    "rtmdet": HeadKind(
        "two outputs for each of the strides 8, 16, 32: classes (1, classes, h, w) and distances (1, 4, h, w) from the "
        "corner of the cell (raw RTMDet)",
        Head("rtmdet", iou=0.65, unit=None),
        ("unit",),
    ),
    "scrfd": HeadKind(
        "two or three outputs for each of the strides 8, 16, 32, with 2 rows for each cell: score (rows, 1), distances "
        "(rows, 4) and landmarks (rows, 10)",
        Head("scrfd", score=0.02, iou=0.45, most=750),
    ),
    "yunet": HeadKind(
        "four outputs for each of the strides 8, 16, 32: class (1, cells, 1), object (1, cells, 1), box (1, cells, 4) "
        "and landmarks (1, cells, 10)",
        Head("yunet", score=0.02, iou=0.45, most=750),
    ),
    "centerface": HeadKind(
        "heat map (1, 1, h, w), then sizes (1, 2, h, w), offsets (1, 2, h, w) and landmarks (1, 10, h, w) (CenterFace)",
        Head("centerface", score=0.05, iou=0.3, most=750),
    ),
}
"""Heads by name. Scores, IoU and numbers are those with which the reference implementations compute mAP."""

COMMON: Final = ("score", "iou", "most", "classes")
WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "unit": ("pixels", "shares", "strides"),
    "corners": ("xyxy", "yxyx", "cxcywh"),
    "scores": ("none", "sigmoid", "softmax"),
    "background": ("none", "first", "last"),
    "classes": ("from0", "from1", "ids"),
}
"""Values of the settings that are words."""


@dataclass(frozen=True)
class HeadChoice:
    """A head that the user states.

    Attributes:
        name: of `HEADS`.
        options: settings of `Head` that replace the default ones and what the graph says.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def applied(self, head: Head) -> Head:
        """Return a head with the options."""
        return replace(head, **self.options)


def head_choice(text: str) -> HeadChoice:
    """Read ``NAME`` or ``NAME:KEY=VALUE,...``, such as ``yolov8`` or ``nms:unit=pixels,classes=ids``.

    Raises:
        RecipeError: there is no such head or key, or a value does not fit.
    """
    name, _, rest = text.partition(":")
    kind = HEADS.get(name)
    if kind is None:
        close = difflib.get_close_matches(name, HEADS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RecipeError(f"there is no head '{name}': {hint}use {', '.join(HEADS)}")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        keys = (*COMMON, *kind.options)
        if not equals or key not in keys:
            raise RecipeError(f"--head {name} has no setting '{part}': give KEY=VALUE of {', '.join(keys)}")
        options[key] = _value(name, key, value)
    return HeadChoice(name, options)


def _value(name: str, key: str, text: str) -> Any:
    if key == "priors":
        return text
    if key in WORDS:
        if text not in WORDS[key]:
            raise RecipeError(f"--head {name}: {key} is one of {', '.join(WORDS[key])}, got '{text}'")
        return text
    read: Callable[[str], float] = int if key == "most" else float
    try:
        value = read(text)
    except ValueError:
        value = -1
    if value < 0 or (key != "most" and value > 1):
        raise RecipeError(f"--head {name}: {key} is a number from 0{'' if key == 'most' else ' to 1'}, got '{text}'")
    return value

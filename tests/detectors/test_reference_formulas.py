"""Boxes and scores of random outputs equal those of the published post-processing, written as loops over cells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from sbonnx import graph as graphs
from sbonnx.detectors import HeadDecoder, head_choice
from sbonnx.errors import DataError
from sbonnx.metrics.boxes import detections
from sbonnx.spec import Array
from tests.detectors.detector_models import Builder, conv, logit

SIDE, CLASSES = 256, 3
Row = tuple[list[float], list[float]]


def cells(strides: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Stride, number in the level, x and y of all cells."""
    for stride in strides:
        for number in range((SIDE // stride) ** 2):
            yield stride, number, number % (SIDE // stride), number // (SIDE // stride)


def decoded(b: Builder, folder: Path, head: str, stated: str = "") -> tuple[Array, Array, Array]:
    """All boxes, classes and scores of a model, without suppression; the head is recognized unless it is stated.

    Args:
        stated: settings of the head after its name, or a comma.
    """
    path = b.save(folder / "m.onnx", SIDE)
    session = onnxruntime.InferenceSession(path)
    feed = {"images": np.zeros((1, 3, SIDE, SIDE), np.float32)}
    outputs = dict(zip([value.name for value in session.get_outputs()], session.run(None, feed), strict=True))
    if not stated:
        HeadDecoder(lambda: graphs.load(path))(outputs, feed, {})
    choice = head_choice(f"{head}:score=0,iou=1,most=30000{stated}")
    (boxes,) = detections(HeadDecoder(lambda: graphs.load(path), choice)(outputs, feed, {}))
    order = np.lexsort((boxes.scores, boxes.corners[:, 0]))
    return boxes.corners[order], boxes.classes[order], boxes.scores[order]


def check(got: tuple[Array, Array, Array], expected: list[Row]) -> None:
    """Compare with (box, scores of all classes) of each cell."""
    corners = np.array([box for box, scores in expected for _ in scores])
    scores = np.array([score for _, scores in expected for score in scores])
    classes = np.array([number for _, scores in expected for number in range(len(scores))])
    order = np.lexsort((scores, corners[:, 0]))
    np.testing.assert_allclose(got[0], corners[order], atol=1e-3)
    np.testing.assert_allclose(got[2], scores[order], atol=1e-6)
    assert got[1].tolist() == classes[order].tolist()


def box_at(x: float, y: float, distances: Array) -> list[float]:
    """distance2bbox of MMDetection, NanoDet and InsightFace."""
    left, top, right, bottom = map(float, distances)
    return [x - left, y - top, x + right, y + bottom]


@pytest.mark.parametrize("ending", ["Relu", "Exp", "Mul", "Conv"])
def test_fcos(ending: str, tmp_path: Path) -> None:
    """AdelaiDet (Relu: strides), the original (Exp: pixels), a factor in the graph; of others, the unit is stated."""
    rng, strides, b = np.random.default_rng(0), (8, 16, 32, 64, 128), Builder()
    values = {}
    for stride in strides:
        side = SIDE // stride
        maps = [rng.normal(size=(1, count, side, side)).astype(np.float32) for count in (CLASSES, 4, 1)]
        values[stride] = maps
        b.value(maps[0], f"logits{stride}")
        raw = b.value(maps[1], f"raw{stride}")
        if ending == "Conv":
            b.op("Conv", [raw, b.constant(np.eye(4, dtype=np.float32)[..., None, None])], f"reg{stride}")
        elif ending == "Mul":
            b.op("Relu", [raw], f"positive{stride}")
            b.op("Mul", [f"positive{stride}", b.constant(np.float32(stride)[None])], f"reg{stride}")
        else:
            b.op(ending, [raw], f"reg{stride}")
        b.value(maps[2], f"centerness{stride}")
    for name, count in (("logits", CLASSES), ("reg", 4), ("centerness", 1)):
        for stride in strides:
            b.output(f"{name}{stride}", (1, count, SIDE // stride, SIDE // stride))
    expected: list[Row] = []
    for stride, number, x, y in cells(strides):
        logits, reg, center = (part.reshape(part.shape[1], -1)[:, number].astype(np.float64) for part in values[stride])
        in_strides = reg if ending == "Conv" else np.maximum(reg, 0)
        distances = np.exp(reg) if ending == "Exp" else in_strides * stride
        box = box_at(x * stride + stride // 2, y * stride + stride // 2, distances)
        expected.append((box, np.sqrt(1 / (1 + np.exp(-logits)) / (1 + np.exp(-center))).tolist()))
    if ending == "Conv":
        with pytest.raises(DataError, match=r"does not say unit \(pixels or strides\)"):
            decoded(b, tmp_path, "fcos")
    check(decoded(b, tmp_path, "fcos", stated=",unit=strides" if ending == "Conv" else ""), expected)


def test_scrfd(tmp_path: Path) -> None:
    """Two rows a cell, with an axis of images and without landmarks, as newer exports have them."""
    rng, b, values = np.random.default_rng(1), Builder(), {}
    for stride in (8, 16, 32):
        rows = 2 * (SIDE // stride) ** 2
        scores, distances = rng.uniform(0.01, 0.99, (1, rows, 1)), rng.uniform(0, 4, (1, rows, 4))
        values[stride] = scores, distances
        b.op("Sigmoid", [b.value(logit(scores), f"raw{stride}")], f"score{stride}")
        b.value(distances, f"bbox{stride}")
    for name, count in (("score", 1), ("bbox", 4)):
        for stride in (8, 16, 32):
            b.output(f"{name}{stride}", (1, 2 * (SIDE // stride) ** 2, count))
    expected: list[Row] = []
    for stride, number, x, y in cells((8, 16, 32)):
        for row in (2 * number, 2 * number + 1):
            scores, distances = values[stride]
            expected.append((box_at(x * stride, y * stride, distances[0, row] * stride), scores[0, row].tolist()))
    check(decoded(b, tmp_path, "scrfd"), expected)


@pytest.mark.parametrize("strides", [(8, 16, 32), (8, 16, 32, 64)])
def test_nanodet(strides: tuple[int, ...], tmp_path: Path) -> None:
    """gfl_head.py and nanodet_plus_head.py, with another number of bins (reg_max: 10); boxes end at the border."""
    rng, b, bins, levels, values = np.random.default_rng(2), Builder(), 11, [], {}
    for stride in strides:
        count = (SIDE // stride) ** 2
        scores, raw = rng.uniform(0.01, 0.99, (1, CLASSES, count)), rng.normal(size=(1, 4 * bins, count)) * 3
        values[stride] = scores, raw
        b.op("Sigmoid", [b.value(logit(scores), f"raw{stride}")], f"scores{stride}")
        levels.append(b.op("Concat", [f"scores{stride}", conv(b, raw, f"bins{stride}")], f"level{stride}", axis=1))
    b.op("Transpose", [b.op("Concat", levels, "all", axis=2)], "output", perm=[0, 2, 1])
    b.output("output", (1, sum((SIDE // stride) ** 2 for stride in strides), CLASSES + 4 * bins))
    expected: list[Row] = []
    for stride, number, x, y in cells(strides):
        powers = np.exp(values[stride][1][0, :, number].reshape(4, bins))
        distances = (powers / powers.sum(1, keepdims=True)) @ np.arange(bins) * stride
        middle = 0.5 if len(strides) == 3 else 0
        box = box_at((x + middle) * stride, (y + middle) * stride, distances)
        expected.append((np.clip(box, 0, SIDE).tolist(), values[stride][0][0, :, number].tolist()))
    check(decoded(b, tmp_path, "nanodet"), expected)


@pytest.mark.parametrize("ending", ["Mul", "Exp", "Conv"])
def test_rtmdet(ending: str, tmp_path: Path) -> None:
    """rtmdet_head.py of MMDetection (a factor in the network) and MMYOLO (Exp, or nothing, and a factor after it)."""
    rng, b, values = np.random.default_rng(3), Builder(), {}
    for stride in (8, 16, 32):
        logits, raw = (rng.normal(size=(1, count, SIDE // stride, SIDE // stride)) for count in (CLASSES, 4))
        values[stride] = logits, raw
        b.value(logits, f"cls{stride}")
        distances = conv(b, raw.reshape(1, 4, -1), f"conv{stride}")
        if ending == "Mul":
            distances = b.op(ending, [distances, b.constant(np.float32(stride)[None])], f"pixels{stride}")
        elif ending == "Exp":
            distances = b.op(ending, [distances], f"strides{stride}")
        b.op("Reshape", [distances, b.constant(np.array(raw.shape))], f"reg{stride}")
    for name, count in (("cls", CLASSES), ("reg", 4)):
        for stride in (8, 16, 32):
            b.output(f"{name}{stride}", (1, count, SIDE // stride, SIDE // stride))
    expected: list[Row] = []
    for stride, number, x, y in cells((8, 16, 32)):
        logits, raw = (part.reshape(part.shape[1], -1)[:, number] for part in values[stride])
        box = box_at(x * stride, y * stride, (np.exp(raw) if ending == "Exp" else raw) * stride)
        expected.append((np.clip(box, 0, SIDE).tolist(), (1 / (1 + np.exp(-logits))).tolist()))
    with pytest.raises(DataError, match=r"\(rtmdet, if distances are from the corner of the cell\): name the head"):
        decoded(b, tmp_path, "rtmdet")
    if ending == "Conv":
        with pytest.raises(DataError, match=r"does not say unit \(pixels or strides\)"):
            decoded(b, tmp_path, "rtmdet", ",")
    check(decoded(b, tmp_path, "rtmdet", ",unit=strides" if ending == "Conv" else ","), expected)


def test_torchvision_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """postprocess_detections of fcos.py and retinanet.py: of 160 pixels, level P6 has 3 cells of 53 pixels."""
    side = 160
    monkeypatch.setattr("tests.detectors.test_reference_formulas.SIDE", side)
    rng, strides = np.random.default_rng(4), (8, 16, 32, 64, 128)
    places = [
        (stride, y, x) for stride in strides for y in range(-(-side // stride)) for x in range(-(-side // stride))
    ]
    count = len(places)
    fcos, retina = Builder(), Builder()
    logits, center, reg = (
        rng.normal(middle, size=(rows, columns)).astype(np.float32).astype(np.float64)
        for middle, rows, columns in ((0, 9 * count, CLASSES), (0, count, 1), ((0, 0, 3, 0), 9 * count, 4))
    )
    for b, rows in ((fcos, count), (retina, 9 * count)):
        outputs = {"cls_logits": logits[:rows], "bbox_regression": reg[:rows]}
        outputs |= {"bbox_ctrness": center} if b is fcos else {}
        for name, value in outputs.items():
            b.value(value[None], name)
            b.output(name, (1, *value.shape))
    of_fcos: list[Row] = []
    of_retina: list[Row] = []
    for number, (stride, y, x) in enumerate(places):
        step = side // -(-side // stride)
        scores = np.sqrt(1 / (1 + np.exp(-logits[number])) / (1 + np.exp(-center[number])))
        of_fcos.append((np.clip(box_at(x * step, y * step, reg[number] * stride), 0, side).tolist(), scores.tolist()))
        shapes = [(ratio, int(4 * stride * 2 ** (third / 3))) for ratio in (0.5, 1, 2) for third in range(3)]
        for place, (ratio, size) in enumerate(shapes):
            half_width, half_height = round(size / ratio**0.5 / 2), round(size * ratio**0.5 / 2)
            dx, dy, dw, dh = reg[9 * number + place].tolist()
            middle = x * step + dx * 2 * half_width, y * step + dy * 2 * half_height
            half = [np.exp(min(d, np.log(62.5))) * s for d, s in ((dw, half_width), (dh, half_height))]
            box = [middle[0] - half[0], middle[1] - half[1], middle[0] + half[0], middle[1] + half[1]]
            row_scores = 1 / (1 + np.exp(-logits[9 * number + place]))
            of_retina.append((np.clip(box, 0, side).tolist(), row_scores.tolist()))
    for b, head, message in (
        (fcos, "fcosrows", "fcosrows, if dist"),
        (retina, "retinanet", "--head retinanet for the anchors"),
    ):
        with pytest.raises(DataError, match=message):
            decoded(b, tmp_path, head)
    check(decoded(fcos, tmp_path, "fcosrows", ","), of_fcos)
    check(decoded(retina, tmp_path, "retinanet", ","), of_retina)

"""Boxes encoded as each head has them are found again in the image; NMS equals that of onnxruntime."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import sbonnx
from sbonnx.batch.api import batch
from sbonnx.calib.data import DataPath
from sbonnx.cli import main
from sbonnx.detectors import HEADS, head_choice
from sbonnx.detectors.nms import suppressed
from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics.boxes import Boxes
from sbonnx.verify import EvaluationData, evaluate
from sbonnx.verify.labelled.conversions import readers_of
from tests.detectors.detector_models import (
    MODELS,
    PRIORS,
    Builder,
    transposed_yolov8,
    write_coco,
    yolov8_angles,
    yolov8_keypoints,
)
from tests.support.values import some

STATED = {
    "yolov5_maps": "yolov5",
    "yolov5_maps_masks": "yolov5",
    "torchvision": "nms:unit=pixels,classes=from1",
    "tensorflow": "nms:classes=ids",
    "indices": "indices:unit=pixels",
    "ssd_raw": "ssd:priors=priors.npy",
    "ppyoloe": "ssd:corners=xyxy,unit=pixels",
    "detr": "detr",
    "end2end7": "end2end7",
    "centerface": "centerface",
}
"""Heads that the structure does not decide, as a user states them; the others are recognized."""


FACES = ("yunet", "centerface", "scrfd")
"""Heads of one class."""


@pytest.fixture(scope="module")
def coco(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("detectors") / "coco")


@pytest.fixture(scope="module")
def faces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_coco(tmp_path_factory.mktemp("faces") / "coco", one_class=True)


def map_of(model: Path, coco: Path, head: str | None) -> float:
    data = EvaluationData(DataPath(coco, "yolo"), "map", head=head)
    return evaluate({"m": model}, data).rows[0].metric.value


@pytest.mark.parametrize("name", MODELS)
def test_boxes_of_each_head(
    name: str, coco: Path, faces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mean average precision over IoU 0.5 to 0.95 is 1; without the statement, an error names what is missing."""
    monkeypatch.chdir(tmp_path)
    np.save("priors.npy", PRIORS)
    builder = Builder()
    MODELS[name](builder)
    model = builder.save(tmp_path / "m.onnx")
    data = faces if name in FACES else coco
    assert map_of(model, data, STATED.get(name)) == pytest.approx(1.0)
    if name in STATED:
        missing = {"yolov5_maps": "yolov5 or yolov7", "detr": "detr, whose last class", "tensorflow": "classes=from0"}
        with pytest.raises(DataError, match=missing.get(name, STATED[name].partition("=")[0])):
            map_of(model, data, None)


def test_rows_without_an_object_score_are_no_yolox(coco: Path, tmp_path: Path) -> None:
    """The shape alone would fit YOLOX: a row for each cell."""
    builder = Builder()
    transposed_yolov8(builder)
    with pytest.raises(DataError, match=r"does not say how its outputs 'output' float32 \(1, 84, 7\).*name the head"):
        map_of(builder.save(tmp_path / "m.onnx"), coco, None)


@pytest.mark.parametrize("build", [yolov8_keypoints, yolov8_angles])
def test_columns_after_the_scores_are_no_classes(build: Callable[[Builder], None], coco: Path, tmp_path: Path) -> None:
    """The shape alone would fit YOLOv8 with more classes."""
    builder = Builder()
    build(builder)
    with pytest.raises(DataError, match=r"are boxes \(yolov8, if .* without keypoints or angles\): name the head"):
        map_of(builder.save(tmp_path / "m.onnx"), coco, None)


def test_statements_that_do_not_fit(coco: Path, tmp_path: Path) -> None:
    builder = Builder()
    MODELS["yolov8"](builder)
    model = builder.save(tmp_path / "m.onnx")
    yolo = tmp_path / "yolo"
    (yolo / "images").mkdir(parents=True)
    (yolo / "labels").mkdir()
    shutil.copy(coco / "val" / "a.png", yolo / "images")
    (yolo / "labels" / "a.txt").write_text("0 0.5 0.5 0.2 0.2")
    (yolo / "classes.txt").write_text("cat")
    with pytest.raises(DataError, match=r"list all of the model, in its order, in classes\.txt"):
        map_of(model, yolo, None)
    with pytest.raises(DataError, match="give the folder that has the annotations too"):
        map_of(model, coco / "val", None)
    assert map_of(model, coco / "annotations", None) == pytest.approx(1.0)
    with pytest.raises(DataError, match=r"head rtdetr does not fit the outputs 'output0' float32 \(1, 7, 84\)"):
        map_of(model, coco, "rtdetr")
    with pytest.raises(RecipeError, match=r"did you mean yolov8\? use yolov5, "):
        head_choice("yolo8")
    with pytest.raises(RecipeError, match="yolov8 has no setting 'unit=pixels': give KEY=VALUE of score, iou, most"):
        head_choice("yolov8:unit=pixels")
    with pytest.raises(RecipeError, match="iou is a number from 0 to 1, got 'half'"):
        head_choice("yolov8:iou=half")
    with pytest.raises(RecipeError, match="for the boxes of a detector, and the metric top1 takes no boxes"):
        EvaluationData("x", "top1", head="yolov8").converter(readers_of(b""))
    assert head_choice("nms:unit=shares,most=5").applied(HEADS["nms"].head).most == 5


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.sampled_from((0.3, 0.5, 0.7)))
def test_suppression_equals_onnxruntime(seed: int, count: int, iou: float) -> None:
    """Classes apart, boxes on a grid so that equal overlaps occur."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 20, (count, 2)).astype(np.float32)
    boxes = np.concatenate([corners, corners + rng.integers(1, 12, (count, 2))], 1).astype(np.float32)
    scores = rng.permutation(count).astype(np.float32) + 1
    classes = rng.integers(0, 3, count)
    by_class = np.where(classes[None] == np.arange(3)[:, None], scores, 0)[None].astype(np.float32)
    most, least = np.array([count]), np.array([0.5], np.float32)
    chosen = NMS.run(None, {"b": boxes[None], "s": by_class, "n": most, "i": np.array([iou], np.float32), "t": least})[
        0
    ]
    kept = suppressed(Boxes(boxes.astype(np.float64), classes, scores.astype(np.float64)), iou, count)
    assert sorted(kept.scores.tolist()) == sorted(scores[chosen[:, 2]].tolist())
    assert kept.scores.tolist() == sorted(kept.scores.tolist(), reverse=True)


def nms_session() -> onnxruntime.InferenceSession:
    """onnxruntime's NonMaxSuppression."""
    kinds: dict[str, list[int | str | None]] = {"b": [1, "n", 4], "s": [1, 3, "n"], "i": [1], "t": [1]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in kinds.items()]
    inputs.append(helper.make_tensor_value_info("n", TensorProto.INT64, (1,)))
    node = helper.make_node("NonMaxSuppression", ["b", "s", "n", "i", "t"], ["out"])
    out = helper.make_tensor_value_info("out", TensorProto.INT64, ("k", 3))
    graph = helper.make_graph([node], "nms", inputs, [out])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return onnxruntime.InferenceSession(model.SerializeToString())


NMS = nms_session()


def test_the_help_and_documentation_list_all_heads() -> None:
    from sbonnx.cli import options

    listed = re.findall(r"[a-z0-9]+", options.HEAD.help.partition(":")[2])
    assert listed == list(HEADS)
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, kind in HEADS.items():
        iou = "none" if kind.head.iou is None else f"{kind.head.iou:g}"
        assert f"| `{name}` | {kind.form} | {kind.head.score:g} | {iou} | {kind.head.most} |" in text


@pytest.fixture
def detector(coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a model in the working folder whose float boxes are right."""
    monkeypatch.chdir(tmp_path)
    builder = Builder()
    MODELS["fastestdet"](builder)
    return builder.save(tmp_path / "m.onnx").name


def test_quantize_computes_the_metric_of_both_models(
    detector: str, coco: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The head is recognized in both; a head that does not fit is refused before any work."""
    words = ["quantize", detector, "--data", str(coco), "--preprocess", "yolo", "-o", "q.onnx", "--json", "--no-config"]
    words += ["--eval", str(coco), "--metric", "map50"]
    for head in ("ssd", "nms", "indices"):
        assert main([*words, "--head", head]) == 2
        assert f"the head {head} does not fit the outputs 'output' float32 (1, 8, 8, 8)" in capsys.readouterr().err
    other = Builder()
    MODELS["rtdetr_sizes"](other)
    filled = ["quantize", other.save(Path("sizes.onnx")).name, *words[2:5], "yolo", "-o", "s.onnx", "--no-config"]
    assert main([*filled, "--data", str(coco), "--preprocess", "yolo"]) in (0, 1)
    assert "inputs          filled besides the image: 'orig_target_sizes' with width, height" in capsys.readouterr().out
    sizes = np.full((2, 2), 64, np.int64)
    np.savez("arrays.npz", images=np.random.default_rng(0).random((2, 3, 64, 64), np.float32), orig_target_sizes=sizes)
    arrays = ["quantize", "sizes.onnx", "--data", "arrays.npz", "--split", "1", "-o", "a.onnx", "--no-config"]
    assert main([*arrays, *words[-4:], "--preprocess", "yolo"]) in (0, 1)
    assert "inputs          filled besides the image" in capsys.readouterr().out, "of the labelled images alone"
    assert main(words) in (0, 1)
    rows = json.loads(capsys.readouterr().out)["metrics"]["evaluation"]["rows"]
    assert len(rows) == 2 and rows[0]["metric"]["value"] == pytest.approx(1.0)


def test_sizes_that_are_filled_are_named(
    coco: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name and shape: an input of that name with three values is another one."""
    monkeypatch.chdir(tmp_path)
    builder = Builder()
    MODELS["paddle"](builder)
    model = builder.save(tmp_path / "m.onnx").name
    filled = "filled besides the image: 'scale_factor' with 1, 1, 'im_shape' with height, width of the model's input"
    assert main(["eval", model, str(coco), "--metric", "map", "--preprocess", "yolo", "--no-config"]) == 0
    output = capsys.readouterr()
    assert filled in output.out + output.err and "1.0000" in output.out
    result = sbonnx.run(model, str(coco), preprocess="yolo")
    assert filled in result.notes[0] and result["multiclass_nms3_0.tmp_0"].shape == (6, 6)
    other = Builder()
    other.output(other.input("im_shape", TensorProto.FLOAT, 3), (1, 3))
    with pytest.raises(DataError, match=r"the model has 2 \('images', 'im_shape'\)"):
        sbonnx.run(other.save(tmp_path / "other.onnx"), str(coco), preprocess="yolo")


@pytest.mark.slow
def test_jobs_state_a_head(detector: str, coco: Path, tmp_path: Path) -> None:
    """With a score above those of all boxes nothing is detected: the job file's settings of the head are used."""
    scores = {"all": "fastestdet:score=0.01", "none": "fastestdet:score=1"}
    source = {"model": detector, "data": str(coco), "preprocess": "yolo", "set": {"samples": 1, "rounding": "nearest"}}
    labelled = {"data": str(coco), "metric": "map50"}
    jobs = [{**source, "name": name, "eval": {**labelled, "head": head}} for name, head in scores.items()]
    (tmp_path / "jobs.yaml").write_text(json.dumps({"output": "out", "jobs": jobs}))
    reports = [some(row.outcome.report) for row in batch(tmp_path / "jobs.yaml", workers=1).rows]
    values = [report["metrics"]["evaluation"]["rows"][0]["metric"]["value"] for report in reports]
    assert values == [pytest.approx(1.0), 0.0]

"""Tasks of outputs that the user names: figures against plain formulas, shapes that fit, and the verdict."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx import verify
from sbonnx.assets import digits
from sbonnx.batch.jobs.jobfile import read_jobs
from sbonnx.batch.work import evaluation_of
from sbonnx.calib.data import LabelledFeed
from sbonnx.cli import main
from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics.boxes import Boxes
from sbonnx.metrics.detection import overlap_share
from sbonnx.recipe import load
from sbonnx.recipe.names import OutputTask
from sbonnx.report.comparison import Comparison
from sbonnx.report.figures import OutputQuality
from sbonnx.report.verdict import verdict_of
from sbonnx.spec import Array
from sbonnx.verify import EvaluationData, Tasks, VerifyOptions
from sbonnx.verify.quality import QualitySamples
from tests.detectors.detector_models import SIDE, Builder, yolov8, yolov8_angles
from tests.support.models import model
from tests.support.values import some

RNG = np.random.default_rng(11)


def judged(
    pairs: list[tuple[Array, Array]], tasks: Tasks, proto: onnx.ModelProto | None = None, name: str = "y"
) -> OutputQuality:
    """Quality of one output by (float, quantized) feeds of one sample."""
    samples = QualitySamples([name], proto, tasks)
    for ref, val in pairs:
        samples.add([ref[None]], [val[None]], {"x": RNG.standard_normal((1, 7))})
    (found,) = samples.result()
    return found


def value(found: OutputQuality, name: str) -> float:
    return next(figure.value for figure in found.figures if figure.name == name)


def softmax(rows: Array) -> Array:
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    found: Array = powers / powers.sum(-1, keepdims=True)
    return found


@pytest.mark.parametrize("last", [False, True])
def test_pixels_of_rare_classes_count_as_much_as_the_background(last: bool) -> None:
    """A background of 60 of 64 pixels is right, and every pixel of the object is lost: 50 %, not 94 %."""
    reference = np.zeros((2, 8, 8))
    reference[0] = 5.0
    reference[:, 0, :4] = [[0.0], [5.0]]
    other = reference.copy()
    other[:, 0, :4] = [[5.0], [0.0]]
    if last:
        reference, other = (np.moveaxis(one, 0, -1) for one in (reference, other))
    found = judged([(reference, other)] * 3, "segmentation")
    assert found.nature == "pixels" and found.why == "the task segmentation is given"
    assert value(found, "agreement") == pytest.approx(0.5)
    p = softmax(np.array([5.0, 0.0]))
    assert value(found, "KL") == pytest.approx((p * np.log(p / p[::-1])).sum() / 2)


def test_tokens_by_hand() -> None:
    scores = 3 * RNG.standard_normal((9, 6, 5))
    other = scores + RNG.standard_normal(scores.shape)
    found = judged(list(zip(scores, other, strict=True)), "tokens")
    shares, divergences = [], []
    for ref, val in zip(scores, other, strict=True):
        p, q = softmax(ref), softmax(val)
        top = p.argmax(1)
        each = [(top == kind) for kind in np.unique(top)]
        shares.append(np.mean([(q.argmax(1) == top)[rows].mean() for rows in each]))
        divergences.append(np.mean([(p * np.log(p / q)).sum(1)[rows].mean() for rows in each]))
    assert found.nature == "tokens"
    assert value(found, "agreement") == pytest.approx(np.mean(shares))
    assert value(found, "KL") == pytest.approx(np.mean(divergences))


def test_equal_decisions_of_few_samples_have_an_interval() -> None:
    """Weights of classes do not sum to 1 exactly; that of an interval without width would prove something."""
    scores = 3 * RNG.standard_normal((6, 49, 7))
    found = judged([(one, 1.001 * one) for one in scores], "tokens").figure("agreement")
    assert found is not None and found.value == 1.0 and found.low == pytest.approx(0.61, abs=0.01)


def test_one_score_is_a_decision_between_two_classes() -> None:
    """A probability above 0.5, or a logit above 0: some logits are within 0 and 1."""
    logits = np.array([[0.2], [3.0], [-2.0], [0.8]])
    moved = np.array([[-0.2], [3.0], [-2.0], [0.4]])
    found = judged(list(zip(logits, moved, strict=True)), "classification")
    assert value(found, "agreement") == 0.75, "0.8 and 0.4 are the same class"
    shares, others = (1 / (1 + np.exp(-one)) for one in (logits, moved))
    both = judged(list(zip(shares, others, strict=True)), "classification")
    assert value(both, "agreement") == 0.75
    assert value(both, "KL") == pytest.approx(value(found, "KL"), rel=1e-5)


def test_probabilities_that_do_not_exclude_each_other() -> None:
    """Tags after a sigmoid: their softmax would hardly change, whatever happens to them."""
    p = RNG.uniform(0.01, 0.99, (12, 40))
    q = RNG.uniform(0.01, 0.99, (12, 40))
    found = judged(list(zip(p, q, strict=True)), "classification")
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).sum(1).mean()
    assert value(found, "KL") == pytest.approx(expected)
    assert found.state == "lost"


def test_embeddings_by_their_centred_cosine() -> None:
    """A mean that all vectors share does not hide that they are told apart no more."""
    middle = 50 * RNG.standard_normal(24)
    vectors = middle + RNG.standard_normal((40, 24))
    near = vectors + 0.05 * RNG.standard_normal(vectors.shape)
    found = judged(list(zip(vectors, near, strict=True)), "embedding")
    cosines = [
        a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        for a, b in zip(vectors - vectors.mean(0), near - vectors.mean(0), strict=True)
    ]
    assert found.nature == "embedding" and value(found, "centred cosine") == pytest.approx(np.mean(cosines))
    assert (found.state, found.decided_by) == ("kept", "relative error")
    coarse = vectors + 0.2 * RNG.standard_normal(vectors.shape)
    found = judged(list(zip(vectors, coarse, strict=True)), "embedding")
    assert (found.state, found.decided_by) == ("kept", "centred cosine"), found.figures
    mixed = judged(list(zip(vectors, vectors[::-1], strict=True)), "embedding")
    assert (mixed.state, mixed.decided_by) == ("lost", "centred cosine")


@pytest.mark.parametrize("shape", [(6, 1, 1), (1, 1, 6), (6,)])
def test_vectors_with_axes_of_length_1(shape: tuple[int, ...]) -> None:
    """As convolutions end in NCHW and NHWC."""
    rows = RNG.standard_normal((20, 6))
    pairs = [(row.reshape(shape), (row + 0.02).reshape(shape)) for row in rows]
    assert value(judged(pairs, "embedding"), "centred cosine") > 0.9
    found = judged(pairs, "classification")
    assert value(found, "agreement") == 1.0 and value(found, "KL") == pytest.approx(0.0, abs=1e-9)


def test_regression_uses_the_error_alone() -> None:
    """Logits whose classes all agree, and numbers of something: only their error counts."""
    proto = model("agraph (float[N,7] x) => (float[N,3] logits) { logits = MatMul (x, w) }", w=(7, 3))
    logits = 20 * np.eye(3)[np.arange(40) % 3]
    pairs = list(zip(logits, 0.2 * logits, strict=True))
    assert judged(pairs, None, proto, "logits").nature == "classes"
    found = judged(pairs, "regression", proto, "logits")
    assert [figure.name for figure in found.figures] == ["SQNR", "relative error"]
    assert (found.state, found.decided_by) == ("lost", "relative error")
    whole = RNG.integers(0, 1000, (12, 5))
    found = judged(list(zip(whole, whole + 1, strict=True)), "regression")
    assert found.nature == "values" and found.state == "kept"


def boxes(*rows: tuple[float, ...]) -> Boxes:
    found = np.array(rows, np.float64).reshape(-1, 6)
    return Boxes(found[:, :4], found[:, 5].astype(np.int64), found[:, 4])


ONE = (0.0, 0.0, 10.0, 10.0, 0.9, 1.0)


@pytest.mark.parametrize(
    ("other", "share"),
    [
        ([ONE], 1.0),
        ([(1.0, 0.0, 10.0, 10.0, 0.8, 1.0)], 2 * 0.8 * 0.9 / 1.7),
        ([(6.0, 0.0, 16.0, 10.0, 0.9, 1.0)], 0.0),
        ([(0.0, 0.0, 10.0, 10.0, 0.9, 2.0)], 0.0),
        ([ONE, (50.0, 50.0, 60.0, 60.0, 0.2, 1.0)], 1.8 / 2.0),
        ([ONE, ONE], 1.8 / 2.7),
        ([ONE, (5.0, 5.0, 5.0, 9.0, 1.6, 1.0), (0.0, 0.0, np.inf, 10.0, 0.7, 1.0)], 1.0),
        ([], 0.0),
    ],
)
def test_overlap_of_detections(other: list[tuple[float, ...]], share: float) -> None:
    assert overlap_share(boxes(ONE), boxes(*other)) == pytest.approx(share)
    assert overlap_share(boxes(*other), boxes(ONE)) == pytest.approx(share)


def test_detections_overlap_fully_with_themselves() -> None:
    """Equal boxes of other scores are paired by their scores, and the sums are exact."""
    rows = [(*ONE[:4], score, 1.0) for score in (0.1, 0.3, 0.7)] * 3
    assert overlap_share(boxes(*rows), boxes(*rows)) == 1.0


def test_no_detections_say_nothing() -> None:
    assert overlap_share(boxes(), boxes()) is None


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(("moved", "state"), [(0.0, "kept"), (0.1, "kept"), (0.5, "uncertain"), (30.0, "lost")])
def test_detections_are_matched_in_any_order(several: bool, moved: float, state: str) -> None:
    names = ["boxes", "scores", "classes"] if several else ["found"]
    samples = QualitySamples(names, None, "detection")
    for number in range(40):
        count = 2 + number % 3
        corners = 100 * np.arange(count)[:, None] + np.array([0.0, 0.0, 20.0, 20.0])
        rows = np.concatenate([corners, RNG.uniform(0.3, 1, (count, 1)), RNG.integers(0, 2, (count, 1))], 1)
        other = rows[::-1].copy()
        other[:, :4] += moved
        split = [
            (one[None, :, :4], one[None, :, 4], one[None, :, 5]) if several else (one[None],) for one in (rows, other)
        ]
        samples.add(list(split[0]), list(split[1]), {"x": RNG.standard_normal((1, 7))})
    first, *rest = samples.result()
    assert (first.state, first.decided_by, first.samples) == (state, "detection overlap", 40)
    assert {one.state for one in rest} <= {"unjudged"}
    metrics = Comparison(feeds=40, quality=(first, *rest))
    assert f"accuracy {state}: " in verdict_of(metrics).rows[0].text
    assert "the detections overlap with those of float by " in verdict_of(metrics).text


@pytest.mark.parametrize(("shift", "state"), [(0.0, "kept"), (2.0, "uncertain"), (100.0, "lost")])
def test_a_head_of_the_float_model_says_what_boxes_are(shift: float, state: str, tmp_path: Path) -> None:
    """Centers of a YOLOv8 head are moved: rows without a detection move as well and do not count."""
    files = []
    for name, moved in (("m.onnx", 0.0), ("q.onnx", shift)):
        builder = Builder()
        yolov8(builder)
        builder.constants["c2"] = builder.constants["c2"] + moved
        files.append(builder.save(tmp_path / name))
    feeds = [{"images": RNG.uniform(size=(1, 3, SIDE, SIDE)).astype(np.float32)} for _ in range(34)]
    quick = verify.Depth(latency=False)
    verify.check_tasks("detection", graphs.load(files[0]))
    (row,) = verify.compare(files[0], files[1], feeds, depth=quick, options=VerifyOptions(task="detection")).quality
    assert (row.state, row.decided_by, row.samples) == (state, "detection overlap", 34)
    (plain,) = verify.compare(files[0], files[1], feeds, depth=quick).quality
    assert plain.nature == "values"


def test_a_task_asks_for_labels_where_no_head_is_certain(tmp_path: Path) -> None:
    builder = Builder()
    yolov8_angles(builder)
    graph = graphs.load(builder.save(tmp_path / "m.onnx"))
    with pytest.raises(RecipeError, match=r"detector, state its head \(--head, VERIFY.HEAD\), or only labels"):
        verify.check_tasks("detection", graph)
    with pytest.raises(RecipeError, match="the head yolov5 does not fit the outputs"):
        verify.check_tasks("detection", graph, "yolov5")
    with pytest.raises(RecipeError, match="there is no head 'yolov88': did you mean yolov8"):
        verify.check_tasks("detection", graph, "yolov88")


def test_a_stated_head_decides(tmp_path: Path) -> None:
    """Where the structure does not decide: a column of angles is taken for a class, as the user says."""
    builder = Builder()
    yolov8_angles(builder)
    file = builder.save(tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", images=RNG.uniform(size=(8, 3, SIDE, SIDE)).astype(np.float32))
    settings: dict[str, Any] = {"task": "detection", "recipe": {"VERIFY": {"LATENCY": False}}, "samples": 8}
    with pytest.raises(RecipeError, match=r"VERIFY\.HEAD"):
        sbonnx.quantize(file, tmp_path / "d.npz", split=1, **settings)
    graph, image = graphs.load(file), np.zeros((1, 3, SIDE, SIDE), np.float32)
    labels = {"boxes": np.zeros((1, 1, 4)), "labels": np.zeros((1, 1), np.int64)}
    labelled = EvaluationData([LabelledFeed({"images": image}, labels)], "map50")
    settings |= {"evaluation": labelled, "head": "yolov8:score=0.01"}
    report = sbonnx.quantize(file, tmp_path / "d.npz", split=1, **settings)
    (row,) = some(report.metrics).quality
    assert row.figure("detection overlap") is not None and row.nature == "detections"
    assert report.settings["VERIFY"]["HEAD"] == "yolov8:score=0.01"
    assert len(some(some(report.metrics).evaluation).rows) == 2, "the head is that of the metric too"
    assert replace(labelled, metric="top1").with_head("yolov8").head is None
    job = {"model": str(file), "data": str(tmp_path / "d.npz"), "set": {"head": "yolov8"}}
    job["eval"] = {"data": str(tmp_path / "d.npz"), "metric": "map50"}
    (tmp_path / "jobs.yaml").write_text(json.dumps({"output": "out", "jobs": [job]}))
    _, _, (read,) = read_jobs(tmp_path / "jobs.yaml")
    assert some(evaluation_of(read)).head == "yolov8"
    compared = sbonnx.compare(
        file, file, tmp_path / "d.npz", split=1, samples=2, task="detection", head="yolov8", evaluation=labelled
    )
    assert some(compared.comparison.quality[0].figure("detection overlap")).value == 1.0, "boxes without an area"
    assert some(compared.comparison.evaluation).samples == 1
    with pytest.raises(DataError, match="name the head with --head"):
        labelled.check_first(graph)
    replace(labelled, head="yolov8").check_first(graph)
    with pytest.raises(DataError, match="the head yolov5 does not fit"):
        replace(labelled, head="yolov5").check_first(graph)


NETWORK = """agraph (float[N,8] x, float[N,2,4,3] past)
    => (float[N,3] scores, float[N,2,3,3] map, float[N,2,4,3] present) {
    scores = MatMul (x, w) r = Reshape (x, s) p = Pad (r, pads) map = Relu (p) present = Relu (past) }"""


def graph_file(folder: Path) -> Path:
    file = folder / "m.onnx"
    pads, shape = np.array([0, 0, 1, 1, 0, 0, 0, 0]), np.array([0, 2, 2, 2])
    onnx.save(model(NETWORK, w=(8, 3), s=shape, pads=pads), file)
    return file


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("segmentation", "does not fit output 'scores', float (?, 3): it takes (batch, classes, height, width), "),
        (
            "segmentation",
            "Classification, tokens, embedding or regression fit; name the output if another one is meant",
        ),
        ("classification", "does not fit output 'map', float (?, 2, 3, 3)"),
        ({"map": "embedding"}, "Segmentation, tokens or regression fit; "),
        ({"nothing": "tokens"}, "no such output: there are 'scores', 'map', 'present'"),
        ({"scores": "detection"}, "the task detection does not fit the outputs 'scores' float32 (1, 3)"),
        ({"scores": "classification", "map": "segmentation"}, None),
        ("regression", None),
    ],
)
def test_tasks_that_do_not_fit(task: Tasks, message: str | None, tmp_path: Path) -> None:
    graph = graphs.load(graph_file(tmp_path))
    if message is None:
        verify.check_tasks(task, graph)
        return
    with pytest.raises(RecipeError) as caught:
        verify.check_tasks(task, graph)
    assert message in str(caught.value), caught.value


def test_a_task_of_all_outputs_is_not_one_of_states(tmp_path: Path) -> None:
    file = graph_file(tmp_path)
    feeds = [
        {"x": RNG.standard_normal((1, 8)).astype(np.float32), "past": np.ones((1, 2, 4, 3), np.float32)}
        for _ in range(8)
    ]
    quick = verify.Depth(latency=False)
    found = verify.compare(file, file, feeds, depth=quick, options=VerifyOptions(task="tokens"))
    assert [one.nature for one in found.quality] == ["tokens", "tokens", "state"]
    named = verify.compare(file, file, feeds, depth=quick, options=VerifyOptions(task={"present": "regression"}))
    assert [one.nature for one in named.quality] == ["classes", "values", "values"]


def test_shapes_that_only_a_run_shows(tmp_path: Path) -> None:
    """An output without a shape in the file is checked on the first feed."""
    file = tmp_path / "m.onnx"
    onnx.save(model("agraph (float[N,4] x) => (float[A,B,C] y) { y = Unsqueeze (x, one) }", one=np.array([2])), file)
    verify.check_tasks("classification", graphs.load(file))
    feeds = [{"x": np.ones((1, 4), np.float32)}]
    assert (
        verify.compare(file, file, feeds, options=VerifyOptions(task="classification")).quality[0].nature == "classes"
    )
    with pytest.raises(RecipeError, match=r"the task embedding does not fit output 'y'|detections after NMS"):
        verify.compare(file, file, feeds, options=VerifyOptions(task="detection"))


@pytest.mark.parametrize("task", ["classification", "tokens", "embedding", "regression"])
def test_quantize_with_a_task(task: OutputTask, tmp_path: Path) -> None:
    """The same file, whatever its outputs mean."""
    output = tmp_path / "q.onnx"
    settings = {"VERIFY": {"LATENCY": False}}
    report = sbonnx.quantize(digits().model, digits().calib, recipe=settings, task=task, output=output, effort="fast")
    (row,) = some(report.metrics).quality
    assert row.why == f"the task {task} is given"
    assert report.settings["VERIFY"]["TASK"] == task
    plain = sbonnx.quantize(digits().model, digits().calib, recipe=settings, effort="fast").quantized
    assert plain is not None
    assert [node.SerializeToString() for node in onnx.load(output).graph.node] == [
        node.SerializeToString() for node in plain.graph.node
    ]


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(digits().model), str(digits().model), "--data", str(digits().calib), "--samples", "8", "--split", "1"]
    assert main(["compare", *files, "--task", "scores=regression", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["quality"][0]["nature"] == "values" and found["quality"][0]["decided_by"] == "SQNR"
    for words, message in (
        (["--task", "segmentation"], "the task segmentation does not fit output 'scores'"),
        (["--task", "clasification"], "must be classification, segmentation"),
        (["--task", "y=tokens"], "a task is given for output 'y'"),
        (["--task", "tokens", "--task", "scores=tokens"], "--task is one task of all outputs, or OUTPUT=TASK once"),
    ):
        for verb in (["compare", *files], ["quantize", files[0], *files[2:4], "-o", str(tmp_path / "q.onnx")]):
            assert main([*verb, *words]) == 2
            error = capsys.readouterr().err.strip()
            assert message in error and "\n" not in error, error
    assert not (tmp_path / "q.onnx").exists()


def test_the_recipe() -> None:
    assert load({"VERIFY": {"TASK": "Tokens"}}).verify.task == "tokens"
    given: dict[str, Any] = {"a.b": "embedding", "c": "REGRESSION"}
    assert load(None, overrides={"task": given}).verify.task == {"a.b": "embedding", "c": "regression"}
    with pytest.raises(RecipeError, match=r"must be classification, .* or regression for output 'c', got 'class'"):
        load({"VERIFY": {"TASK": {"c": "class"}}})

"""Task metrics equal those of scikit-learn, scipy and pycocotools, also of samples that count several times."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.errors import DataError, RecipeError
from sbonnx.metrics import TaskMetric, task_metric
from sbonnx.spec import Array

SEEDS = st.integers(0, 2**31)


def filled(name: str, outputs: Array, labels: Array, parts: int = 1) -> TaskMetric:
    """The metric of these arrays, added in some parts."""
    metric = task_metric(name).make()
    for some, true in zip(np.array_split(outputs, parts), np.array_split(labels, parts), strict=True):
        metric.add({"y": some}, {"label": true})
    return metric


def agrees(metric: TaskMetric, expected: Any, rng: np.random.Generator, *arrays: Array) -> None:
    """The metric, and that of a bootstrap sample, equals `expected` of the arrays."""
    assert metric.value() == pytest.approx(expected(*arrays), abs=1e-12)
    counts = rng.multinomial(metric.count, np.full(metric.count, 1 / metric.count))
    again = [np.repeat(array, counts, axis=0) for array in arrays]
    assert metric.value(counts) == pytest.approx(expected(*again), abs=1e-12)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(6, 9), st.integers(20, 60), st.integers(1, 4))
def test_classification_equals_scikit_learn(seed: int, classes: int, samples: int, parts: int) -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, samples)])
    scores = rng.standard_normal((len(labels), classes)).astype(np.float32) + 2 * np.eye(classes)[labels]
    scores = scores.astype(np.float32)
    every = list(range(classes))

    def top(k: int, scores: Array, labels: Array) -> float:
        return float(sk.top_k_accuracy_score(labels, scores, k=k, labels=every))

    agrees(filled("top1", scores, labels, parts), lambda s, y: top(1, s, y), rng, scores, labels)
    agrees(filled("top5", scores, labels, parts), lambda s, y: top(5, s, y), rng, scores, labels)
    agrees(
        filled("f1", scores, labels, parts),
        lambda s, y: sk.f1_score(y, s.argmax(1), average="macro", zero_division=0),
        rng,
        scores,
        labels,
    )
    powers = np.exp(scores.astype(np.float64))
    shares = powers / powers.sum(1, keepdims=True)
    expected = sk.roc_auc_score(labels, shares, multi_class="ovr", average="macro")
    assert filled("auc", scores, labels, parts).value() == pytest.approx(expected, abs=1e-12)
    assert filled("auc", shares, labels, parts).value() == pytest.approx(expected, abs=1e-9)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(4, 60), st.integers(1, 4))
def test_binary_metrics_equal_scikit_learn_with_ties(seed: int, samples: int, parts: int) -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(seed)
    labels = np.concatenate([[0, 1], rng.integers(0, 2, samples)])
    shares = np.round(rng.random(len(labels)), 1)

    def area(scores: Array, labels: Array) -> float:
        return float(sk.roc_auc_score(labels, scores)) if len(set(labels)) == 2 else math.nan

    metric = filled("auc", shares[:, None], labels, parts)
    assert metric.value() == pytest.approx(area(shares, labels))
    counts = rng.multinomial(len(labels), np.full(len(labels), 1 / len(labels)))
    expected = area(np.repeat(shares, counts), np.repeat(labels, counts))
    assert metric.value(counts) == pytest.approx(expected, nan_ok=True)
    assert filled("auc", np.stack([1 - shares, shares], 1), labels).value() == pytest.approx(area(shares, labels))
    agrees(
        filled("f1", shares, labels, parts),
        lambda s, y: sk.f1_score(y, s >= 0.5, zero_division=0),
        rng,
        shares,
        labels,
    )


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(10, 60), st.integers(1, 4))
def test_correlations_equal_scipy_with_ties(seed: int, samples: int, parts: int) -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    rng = np.random.default_rng(seed)
    outputs = np.round(rng.standard_normal(samples), 1)
    labels = np.round(outputs + rng.standard_normal(samples), 1)
    agrees(
        filled("pearson", outputs[:, None], labels, parts), lambda x, y: stats.pearsonr(x, y)[0], rng, outputs, labels
    )
    agrees(filled("spearman", outputs, labels, parts), lambda x, y: stats.spearmanr(x, y)[0], rng, outputs, labels)


@settings(max_examples=15, deadline=None)
@given(SEEDS, st.integers(2, 6), st.integers(1, 6), st.integers(1, 3))
def test_mean_iou_equals_scikit_learn(seed: int, classes: int, samples: int, parts: int) -> None:
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(seed)
    scores = rng.standard_normal((samples, classes, 4, 5)).astype(np.float32)
    labels = rng.integers(0, classes, (samples, 4, 5))
    labels[rng.random(labels.shape) < 0.3] = 255
    labels[:, 0, 0] = 0

    def expected(scores: Array, labels: Array) -> float:
        used = labels != 255
        return float(sk.jaccard_score(labels[used], scores.argmax(1)[used], average="macro", zero_division=0))

    parts = min(parts, samples)
    agrees(filled("miou", scores, labels, parts), expected, rng, scores, labels)
    assert filled("miou", scores.argmax(1), labels, parts).value() == pytest.approx(expected(scores, labels))


@settings(max_examples=10, deadline=None)
@given(SEEDS, st.integers(2, 6))
def test_errors_of_signals_and_perplexity(seed: int, samples: int) -> None:
    """MSE against scikit-learn, PSNR by its definition, perplexity against torch's cross entropy."""
    sk = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    functional = pytest.importorskip("torch.nn.functional", reason="torch is not installed")
    torch = pytest.importorskip("torch", reason="torch is not installed")
    rng = np.random.default_rng(seed)
    labels = rng.random((samples, 3, 4, 4)).astype(np.float32)
    outputs = (labels + 0.1 * rng.standard_normal(labels.shape)).astype(np.float32)

    def mse(x: Array, y: Array) -> float:
        return float(sk.mean_squared_error(y.reshape(len(y), -1).astype(np.float64), x.reshape(len(x), -1)))

    agrees(filled("mse", outputs, labels, 2), mse, rng, outputs, labels)
    each = [10 * math.log10(1 / mse(one[None], true[None])) for one, true in zip(outputs, labels, strict=True)]
    assert filled("psnr", outputs, labels, 2).value() == pytest.approx(np.mean(each))
    bytes_ = np.rint(255 * labels).astype(np.uint8)
    assert filled("psnr", 255 * labels, bytes_, 1).value() > 50

    scores = rng.standard_normal((samples, 5, 7)).astype(np.float32)
    tokens = rng.integers(0, 7, (samples, 5))
    tokens[:, 3:] = -100

    def perplexity(scores: Array, tokens: Array) -> float:
        rows = torch.from_numpy(scores.reshape(-1, 7)).double()
        return math.exp(float(functional.cross_entropy(rows, torch.from_numpy(tokens.reshape(-1)))))

    agrees(filled("perplexity", scores, tokens, 2), perplexity, rng, scores, tokens)


def random_boxes(rng: np.random.Generator, count: int) -> Array:
    corners = rng.uniform(0, 60, (count, 2))
    return np.concatenate([corners, corners + rng.uniform(5, 40, (count, 2))], 1)


def coco_stats(found: list[Array], true: list[Array]) -> list[float]:
    """AP over IoU 0.5 to 0.95, at 0.5, at 0.75, of small, medium and large areas, by pycocotools.

    Rows are (x1, y1, x2, y2, score, class) and (class, x1, y1, x2, y2, crowd, area).
    """
    coco = pytest.importorskip("pycocotools.coco", reason="pycocotools is not installed")
    evaluation = pytest.importorskip("pycocotools.cocoeval", reason="pycocotools is not installed")
    truth: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image, rows in enumerate(true):
        for number, x1, y1, x2, y2, crowd, area in rows.tolist():
            row = {"image_id": image, "category_id": int(number), "bbox": [x1, y1, x2 - x1, y2 - y1], "area": area}
            truth.append({**row, "iscrowd": int(crowd), "id": len(truth) + 1})
    for image, rows in enumerate(found):
        for x1, y1, x2, y2, score, kind in rows.tolist():
            box = [x1, y1, x2 - x1, y2 - y1]
            results.append({"image_id": image, "category_id": int(kind), "bbox": box, "score": score})
    with redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        kinds = sorted({row["category_id"] for row in truth})
        reference.dataset = {
            "images": [{"id": image} for image in range(len(true))],
            "annotations": truth,
            "categories": [{"id": kind} for kind in kinds],
            "info": {},
        }
        reference.createIndex()
        judge = evaluation.COCOeval(reference, reference.loadRes(results), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return [float(value) for value in judge.stats[:6]]


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(1, 6), st.integers(1, 4), st.booleans())
def test_average_precision_equals_pycocotools(seed: int, images: int, classes: int, whole: bool) -> None:
    """Images without boxes, crowds, areas of masks; with `whole`, corners are integers, so that overlaps are equal."""
    rng = np.random.default_rng(seed)
    true, found = [], []
    for image in range(images):
        boxes = random_boxes(rng, int(rng.integers(image == 0, 8)))
        near = boxes[rng.integers(0, max(len(boxes), 1), 2 * len(boxes))] + rng.normal(0, 3, (2 * len(boxes), 4))
        guesses = np.concatenate([near, random_boxes(rng, 4)])
        if whole:
            boxes, guesses = np.rint(boxes / 4) * 4, np.rint(guesses / 4) * 4
        guesses[:, 2:] = np.maximum(guesses[:, 2:], guesses[:, :2] + 1)
        kinds = rng.integers(0, classes, len(boxes))
        crowd = (rng.random(len(boxes)) < 0.2) & (np.arange(len(boxes)) > 0)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1) * rng.choice([1.0, 0.6, 12.0], len(boxes))
        true.append(np.column_stack([kinds, boxes, crowd, areas]))
        labels = np.concatenate([np.tile(kinds, 2)[: len(near)], rng.integers(0, classes, 4)])
        found.append(np.column_stack([guesses, np.round(rng.random(len(guesses)), 1), labels]))
    expected = coco_stats(found, true)
    names = ("map50-95", "map50", "map75", "map-small", "map-medium", "map-large")
    for name, wanted in zip(names, expected, strict=True):
        metric = task_metric(name).make()
        for guess, rows in zip(found, true, strict=True):
            parts = {"classes": rows[:, 0], "boxes": rows[:, 1:5], "crowd": rows[:, 5], "areas": rows[:, 6]}
            metric.add({"detections": guess[None]}, {part: [values] for part, values in parts.items()})
        assert metric.value() == pytest.approx(math.nan if wanted == -1 else wanted, abs=1e-9, nan_ok=True)
    assert metric.count == images


def test_layouts_of_detections() -> None:
    """One array, named arrays with padding and a count, and TensorFlow's order of coordinates."""
    boxes = np.array([[[0.0, 0, 10, 10], [20, 20, 40, 30], [1, 1, 2, 2]]])
    scores, classes = np.array([[0.9, 0.8, 0.7]]), np.array([[0.0, 3, 0]])
    true = {"boxes": boxes[:, :2], "classes": np.array([[0, 3]])}
    rows = np.concatenate([boxes, scores[..., None], classes[..., None]], 2)
    padded = {"num_dets": np.array([[2]]), "det_boxes": boxes, "det_scores": scores, "det_classes": classes}
    turned = {
        "detection_boxes": boxes[..., [1, 0, 3, 2]],
        "detection_scores": scores,
        "detection_classes": classes,
        "num_detections": np.array([2.0]),
    }
    single = {"boxes": boxes[0], "labels": classes[0].astype(np.int64), "scores": scores[0]}
    for outputs in ({"output0": rows}, padded, turned, single):
        metric = task_metric("map").make()
        metric.add(outputs, true)
        assert metric.value() == pytest.approx(1.0)
    with pytest.raises(DataError, match="name the head with --head, or decode them with --decode"):
        task_metric("map50").make().add({"a": np.zeros((1, 84, 100)), "b": np.zeros((1, 3))}, true)
    with pytest.raises(DataError, match="are they x, y, w, h"):
        task_metric("map50").make().add({"d": rows}, {"label": np.array([[[0, 5, 5, 3, 3]]])})
    with pytest.raises(DataError, match=r"takes labels 'boxes'.*the data has 'id'"):
        task_metric("map50").make().add({"d": rows}, {"id": np.arange(3)})


def test_equal_scores_count_in_order_and_nan_is_a_miss() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [np.nan, 0.0, 1.0]], np.float32)
    assert filled("top1", scores, np.array([0, 1, 2])).value() == pytest.approx(1 / 3)
    assert math.isnan(filled("mse", scores, np.zeros((3, 3), np.float32)).value())


MISMATCHES: dict[str, tuple[str, Array, Mapping[str, Any], str]] = {
    "no labels": ("top1", np.zeros((2, 3), np.float32), {}, "top1 needs labels and the data has none"),
    "another name": (
        "top1",
        np.zeros((2, 3), np.float32),
        {"id": np.zeros(2)},
        "There are 'id': name it with --labels",
    ),
    "float labels": ("top1", np.zeros((2, 3), np.float32), {"y": np.zeros(2)}, "save them as int64"),
    "out of range": ("top1", np.zeros((2, 3), np.float32), {"y": np.array([1, 3])}, "are the classes counted from 1"),
    "too few": ("top1", np.zeros((2, 3), np.float32), {"y": np.array([1])}, "one label for each of the 2 samples"),
    "a map": ("top1", np.zeros((2, 3, 4, 4), np.float32), {"y": np.zeros(2, int)}, r"the output is float32 \(2, 3, 4"),
    "few classes": ("top5", np.zeros((2, 3), np.float32), {"y": np.zeros(2, int)}, "only 3 classes: use top1"),
    "logits": ("f1", np.full((2, 1), 3.0, np.float32), {"y": np.zeros(2, int)}, "apply the sigmoid"),
    "another size": ("miou", np.zeros((1, 3, 4, 4), np.float32), {"y": np.zeros((1, 8, 8), int)}, "resize them"),
    "a class": ("miou", np.zeros((1, 3, 2, 2), np.float32), {"y": np.full((1, 2, 2), 9)}, "label 9 and the output"),
    "a vector": ("spearman", np.zeros((2, 3), np.float32), {"y": np.zeros(2)}, "one value for each sample"),
    "text": ("top1", np.zeros((2, 3), np.float32), {"y": np.array(["a", "b"])}, "are no numbers"),
    "vocabulary": ("perplexity", np.zeros((1, 2, 3), np.float32), {"y": np.array([[0, 3]])}, "label 3 and the vocab"),
    "output size": ("mse", np.zeros((2, 3), np.float32), {"y": np.zeros((2, 4))}, "takes labels of the output's shape"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_mismatches_are_named(case: str) -> None:
    name, output, labels, message = MISMATCHES[case]
    with pytest.raises(DataError, match=message) as error:
        task_metric(name).make().add({"out": output}, labels)
    assert "\n" not in str(error.value)


def test_several_outputs_need_a_name() -> None:
    outputs = {"a": np.eye(3, dtype=np.float32), "b": -np.eye(3, dtype=np.float32)}
    with pytest.raises(DataError, match="choose one, as in top1:a"):
        task_metric("top1").make().add(outputs, {"label": np.arange(3)})
    metric = task_metric("top1:a").make()
    metric.add(outputs, {"label": np.arange(3)})
    assert metric.value() == 1.0
    with pytest.raises(RecipeError, match="did you mean miou"):
        task_metric("miuo")


def test_functions_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(
        "def errors(outputs, labels):\n    return (outputs['y'] != labels['label']).astype(float)\n"
        "errors.lower_is_better = True\n"
        "def ratio(outputs, labels):\n    import numpy as np\n"
        "    return np.stack([outputs['y'], labels['label']], 1)\n"
        "def wrong(outputs, labels):\n    return outputs['x']\n"
    )
    outputs, labels = np.array([1.0, 2, 3]), np.array([1, 2, 5])
    kind = task_metric(f"{file}:errors")
    assert not kind.higher_is_better
    assert filled(f"{file}:errors", outputs, labels).value() == pytest.approx(1 / 3)
    assert filled(f"{file}:ratio", outputs, labels).value() == pytest.approx(6 / 8)
    with pytest.raises(DataError, match=r"own\.py:wrong' failed: KeyError: 'x'"):
        filled(f"{file}:wrong", outputs, labels)
    with pytest.raises(RecipeError, match="has no function 'none'"):
        task_metric(f"{file}:none")


def test_losses_are_differences_of_shares_and_relative_else() -> None:
    assert task_metric("top1").loss(0.9, 0.88) == pytest.approx(0.02)
    assert task_metric("perplexity").loss(20.0, 21.0) == pytest.approx(0.05)
    assert task_metric("psnr").loss(30.0, 27.0) == pytest.approx(0.1)

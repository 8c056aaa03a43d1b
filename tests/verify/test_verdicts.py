"""Verdicts on files whose true state is known: none says "kept" of a bad file, next to none "lost" of a good one.

True states are those of a task: top-1 of all labelled digits, R² of numbers whose labels are known, the accuracy that a
calibrated model expects of its classes, nearest neighbours, and mAP, of onnxruntime's outputs. A file is good if it
loses at most 1 % of it. The sentence of every verdict shows the figure that decided, with its interval and limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx import graph as graphs
from sbonnx import verify
from sbonnx.assets import digits
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.input_check import doubts_about, first_layer_of
from sbonnx.metrics.detection import MeanAveragePrecision
from sbonnx.recipe.names import OutputTask
from sbonnx.report.comparison import Comparison
from sbonnx.report.verdict import Verdict, kept_text, verdict_of
from sbonnx.spec import Array
from sbonnx.verify import Depth, EvaluationData
from tests.support.models import model, run

pytestmark = pytest.mark.slow

LOSS = 0.01
"""Loss up to which accuracy is kept."""

COUNTS = (1, 4, 16, 100)
"""Numbers of samples that files are compared on."""


FEW_COUNTS = COUNTS[1:]
"""Those of files whose task is given."""


@dataclass(frozen=True)
class Case:
    """A verdict beside the truth.

    Attributes:
        name: file, data and number of samples.
        verdict: the one that was given.
        loss: what the file really loses; for figures of wrong data, which prove nothing, what no verdict is right with.
        metrics: what the verdict is of.
    """

    name: str
    verdict: Verdict
    loss: float
    metrics: Comparison

    @property
    def wrong(self) -> str:
        """Kind of the error: "" if there is none."""
        kept, lost = (self.verdict.accuracy == state for state in ("kept", "lost"))
        return "false kept" if kept and self.loss > LOSS else "false lost" if lost and self.loss <= LOSS else ""


def with_noise(proto: onnx.ModelProto, share: float) -> onnx.ModelProto:
    """Return a copy with noise on each weight, of a share of its standard deviation."""
    rng, changed = np.random.default_rng(4), onnx.ModelProto()
    changed.CopyFrom(proto)
    for tensor in changed.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype == np.float32 and values.ndim >= 2:
            noisy = values + (share * values.std() * rng.standard_normal(values.shape)).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(noisy.astype(np.float32), tensor.name))
    return changed


def compared(
    floats: Path,
    other: Path,
    feeds: list[dict[str, Array]],
    labels: EvaluationData | None = None,
    task: OutputTask | None = None,
) -> Comparison:
    """Return the figures of a comparison, with what is found about the data and on labels, as `compare` does."""
    graph = graphs.load(floats)
    data = datasets.read(feeds, graph)
    doubts = doubts_about(first_layer_of(graph), data)
    judged = verify.VerifyOptions(task=task)
    comparison = verify.compare(floats, other, data, depth=Depth(latency=False), options=judged)
    found = replace(comparison, doubts=doubts)
    if labels is not None:
        found = replace(found, evaluation=verify.evaluate({"float": floats, "other": other}, labels))
    return found


def case(name: str, metrics: Comparison, loss: float) -> Case:
    return Case(name, verdict_of(metrics, problems=metrics.problems()), loss, metrics)


def case_of_wrong_data(name: str, metrics: Comparison) -> Case:
    found = case(name, metrics, 0.0)
    return replace(found, loss=np.inf if found.verdict.accuracy != "lost" else -np.inf)


IMAGES = np.load(digits().calib)["image"]
LABELLED = np.load(digits().eval)

WRONG_DATA: dict[str, Callable[[Array], Array]] = {
    "times 255": lambda x: 255 * x,
    "over 255": lambda x: x / 255,
    "zeros": lambda x: 0 * x,
    "shifted": lambda x: x - 2,
}


def digit_files(folder: Path) -> dict[str, Path]:
    """Write the digits network with noise, and quantized to several widths."""
    proto = onnx.load(digits().model)
    files = {}
    for share in (0.01, 0.05, 0.6, 1.0):
        files[f"noise {share}"] = folder / f"noise{share}.onnx"
        onnx.save(with_noise(proto, share), files[f"noise {share}"])
    for bits in ("w8a8", "w4a8", "w2a2"):
        files[bits] = folder / f"{bits}.onnx"
        sbonnx.quantize(
            digits().model,
            digits().calib,
            verify=False,
            bits=bits,
            backend="virtual",
            output=files[bits],
            effort="fast",
        )
    return files


def top1(file: Path) -> float:
    scores = run(onnx.load(file), {"image": LABELLED["image"]}, level="all")["scores"]
    return float((scores.argmax(1) == LABELLED["label"]).mean())


def neighbours_lost(file: Path) -> float:
    """Accuracy of nearest neighbours by the cosine of the scores that is lost."""
    accuracies = []
    for each in (digits().model, file):
        scores = run(onnx.load(each), {"image": LABELLED["image"]}, level="all")["scores"].astype(np.float64)
        scores /= np.linalg.norm(scores, axis=1, keepdims=True)
        alike = scores @ scores.T
        np.fill_diagonal(alike, -2)
        accuracies.append((LABELLED["label"][alike.argmax(1)] == LABELLED["label"]).mean())
    return float(accuracies[0] - accuracies[1])


def cases_of_digits(folder: Path) -> Iterator[Case]:
    before = top1(digits().model)
    for name, file in digit_files(folder).items():
        loss = before - top1(file)
        for count in COUNTS:
            feeds = [{"image": image[None]} for image in IMAGES[:count]]
            yield case(f"digits {name}, {count} samples", compared(digits().model, file, feeds), loss)
            if count not in FEW_COUNTS:
                continue
            task: OutputTask
            for task, lost in (("classification", loss), ("regression", loss), ("embedding", neighbours_lost(file))):
                found = compared(digits().model, file, feeds, task=task)
                yield case(f"digits {name} as {task}, {count} samples", found, lost)
        for kind, change in WRONG_DATA.items():
            feeds = [{"image": change(image[None])} for image in IMAGES[:32]]
            found = compared(digits().model, file, feeds)
            yield case_of_wrong_data(f"digits {name}, {kind}", found)
        inverted = [{"image": 1 - image[None]} for image in IMAGES[:32]]  # wrong too, and not to be seen
        yield case(f"digits {name}, inverted", compared(digits().model, file, inverted), loss)
        for count in (4, 50, 450):
            labels = folder / f"labels{count}.npz"
            np.savez(labels, image=LABELLED["image"][:count], label=LABELLED["label"][:count])
            feeds = [{"image": image[None]} for image in IMAGES[:8]]
            found = compared(digits().model, file, feeds, EvaluationData(labels, "top1"))
            yield case(f"digits {name}, {count} labels", found, loss)
        np.savez(folder / "mixed.npz", image=LABELLED["image"], label=(LABELLED["label"] * 7 + 3)[::-1] % 10)
        feeds = [{"image": image[None]} for image in IMAGES[:32]]
        found = compared(digits().model, file, feeds, EvaluationData(folder / "mixed.npz", "top1"))
        yield case_of_wrong_data(f"digits {name}, other labels", found)


NETWORKS = {
    "numbers": "agraph (float[N,16] x) => (float[N,6] y) { a = MatMul (x, w) b = Tanh (a) y = MatMul (b, v) }",
    "numbers around anchors": """agraph (float[N,16] x) => (float[N,6] y) {
        a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) y = Add (c, anchors) }""",
    "scores of positions": """agraph (float[N,16] x) => (float[N,6,1] y) {
        a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) d = Sigmoid (c) y = Reshape (d, six) }""",
    "numbers beside a cache": """agraph (float[N,16] x, float[N,2,4,3] past) => (float[N,6] y, float[N,2,4,3] present) {
        a = MatMul (x, w) b = Tanh (a) y = MatMul (b, v) present = Add (past, bias) }""",
}


def cases_of_numbers(folder: Path) -> Iterator[Case]:
    rng = np.random.default_rng(8)
    for name, text in NETWORKS.items():
        values: dict[str, Any] = {"w": rng.standard_normal((16, 32)) / 4, "v": rng.standard_normal((32, 6)) / 6}
        values |= {"anchors": 30 * rng.standard_normal(6), "six": np.array([0, 6, 1]), "bias": np.array([0.0])}
        used = {
            key: value.astype(np.float32) if value.dtype.kind == "f" else value
            for key, value in values.items()
            if f" {key})" in text
        }
        proto = model(text, **used)
        floats = folder / f"{name}.onnx"
        onnx.save(proto, floats)
        cache = rng.standard_normal((1, 2, 4, 3)).astype(np.float32)
        feeds = [{"x": rng.standard_normal((1, 16)).astype(np.float32), "past": cache} for _ in range(600)]
        feeds = [{key: feed[key] for key in ("x", "past") if f" {key}" in text.partition("=>")[0]} for feed in feeds]
        plain = outputs(proto, feeds)
        for share in (0.02, 0.06, 0.3, 0.9):
            other = with_noise(proto, share)
            for tensor in other.graph.initializer:  # the cache is 39 dB from float, whatever the rest is
                if tensor.name == "bias":
                    tensor.CopyFrom(numpy_helper.from_array(np.array([0.011], np.float32), "bias"))
            file = folder / "other.onnx"
            onnx.save(other, file)
            around = ((plain - plain.mean(0)) ** 2).sum()
            loss = float(((outputs(other, feeds) - plain) ** 2).sum() / around)  # of R², if labels are the float values
            for count in COUNTS:
                yield case(f"{name}, noise {share}, {count} samples", compared(floats, file, feeds[:count]), loss)


TASKS: dict[str, tuple[OutputTask, str, tuple[int, ...]]] = {
    "maps": (
        "segmentation",
        """agraph (float[N,3,12,12] x) => (float[N,4,12,12] y) {
            a = Conv <pads = [1,1,1,1]> (x, w) b = Tanh (a) c = Conv (b, v) y = Add (c, background) }""",
        (3, 12, 12),
    ),
    "steps": (
        "tokens",
        """agraph (float[N,12,8] x) => (float[N,12,6] y) {
            a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) y = Softmax <axis = 2> (c) }""",
        (12, 8),
    ),
    "tags": (
        "classification",
        """agraph (float[N,16] x) => (float[N,5] y) {
            a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) y = Sigmoid (c) }""",
        (16,),
    ),
    "boxes": (
        "detection",
        """agraph (float[N,16] x) => (float[N,4,6] y) {
            a = MatMul (x, w) b = Tanh (a) c = MatMul (b, v) r = Reshape (c, rows)
            m = Mul (r, size) p = Add (m, anchors)
            e, s, k = Split <axis = 2> (p, parts) t = Sigmoid (s) i = Relu (k) y = Concat <axis = 2> (e, t, i) }""",
        (16,),
    ),
}


def cases_of_tasks(folder: Path) -> Iterator[Case]:
    rng = np.random.default_rng(12)
    corners = 40 * np.arange(4)[:, None] + np.array([0, 0, 20, 20])
    values: dict[str, dict[str, Any]] = {
        "maps": {
            "w": rng.standard_normal((16, 3, 3, 3)) / 3,
            "v": rng.standard_normal((4, 16, 1, 1)),
            "background": np.array([3, 0, 0, -1])[:, None, None],
        },
        "steps": {"w": rng.standard_normal((8, 32)) / 2, "v": rng.standard_normal((32, 6))},
        "tags": {"w": rng.standard_normal((16, 32)) / 4, "v": rng.standard_normal((32, 5)) / 2},
        "boxes": {
            "w": rng.standard_normal((16, 32)) / 4,
            "v": rng.standard_normal((32, 24)) / 6,
            "rows": np.array([0, 4, 6]),
            "size": np.array([2, 2, 2, 2, 2, 0]),
            "anchors": np.concatenate([corners, np.zeros((4, 1)), np.arange(4)[:, None] % 2], 1)[None],
            "parts": np.array([4, 1, 1]),
        },
    }
    for name, (task, text, shape) in TASKS.items():
        used: dict[str, Any] = {
            key: x if key in ("rows", "parts") else np.asarray(x, np.float32) for key, x in values[name].items()
        }
        proto, floats = model(text, **used), folder / f"{name}.onnx"
        onnx.save(proto, floats)
        feeds = [{"x": rng.standard_normal((1, *shape)).astype(np.float32)} for _ in range(600)]
        plain = outputs(proto, feeds)
        for share in (0.02, 0.06, 0.3, 0.9):
            other, file = onnx.ModelProto(), folder / "other.onnx"
            other.CopyFrom(proto)
            noisy = {tensor.name: tensor for tensor in with_noise(proto, share).graph.initializer}
            for tensor in other.graph.initializer:
                if tensor.name in ("w", "v"):
                    tensor.CopyFrom(noisy[tensor.name])
            onnx.save(other, file)
            loss = LOST[name](plain, outputs(other, feeds))
            for count in FEW_COUNTS:
                found = compared(floats, file, feeds[:count], task=task)
                yield case(f"{name}, noise {share}, {count} samples", found, loss)


def expected_loss(p: Array, q: Array) -> float:
    """Accuracy that float loses by the decisions of another model if labels are as probable as it says.

    The mean over positions, or over the classes of float if that is more. Shapes (positions, classes).
    """
    rows, top = np.arange(len(p)), p.argmax(1)
    lost = p[rows, top] - p[rows, q.argmax(1)]
    return float(max(lost.mean(), np.mean([lost[top == kind].mean() for kind in np.unique(top)])))


def softmax(rows: Array) -> Array:
    powers = np.exp(rows - rows.max(-1, keepdims=True))
    found: Array = powers / powers.sum(-1, keepdims=True)
    return found


def map_lost(plain: Array, other: Array) -> float:
    """mAP at an IoU of 0.5 that is lost; true boxes are those of float with a score above 0.5, moved by a tenth."""
    truth = plain.copy()
    truth[..., :4] += np.random.default_rng(3).uniform(-2, 2, truth[..., :4].shape)
    scores = []
    for found in (plain, other):
        metric = MeanAveragePrecision((0.5,))
        for image, true in zip(found, truth, strict=True):
            wanted = true[true[:, 4] > 0.5]
            metric.add({"y": image}, {"boxes": wanted[None, :, :4], "classes": wanted[None, :, 5].round().astype(int)})
        scores.append(metric.value())
    return scores[0] - scores[1]


LOST: dict[str, Callable[[Array, Array], float]] = {
    "maps": lambda p, q: expected_loss(*(softmax(np.moveaxis(x, 1, -1).reshape(-1, 4)) for x in (p, q))),
    "steps": lambda p, q: expected_loss(p.reshape(-1, 6), q.reshape(-1, 6)),
    "tags": lambda p, q: float((np.maximum(p, 1 - p) - np.where(q > 0.5, p, 1 - p)).mean()),
    "boxes": map_lost,
}


def outputs(proto: onnx.ModelProto, feeds: list[dict[str, Array]]) -> Array:
    whole = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0]}
    found: Array = run(proto, whole, level="all")["y"].astype(np.float64)
    return found


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("verdicts")
    return [*cases_of_digits(folder), *cases_of_numbers(folder), *cases_of_tasks(folder)]


def test_the_sentence_shows_the_figure_that_decided(cases: list[Case]) -> None:
    """Value, interval and limit of the sentence are those of the figure, and prove the state."""
    judged = [one for one in cases if one.metrics.evaluation is None and one.verdict.accuracy in ("kept", "uncertain")]
    assert len(judged) > 120
    for one in judged:
        found = [row for row in one.metrics.quality if row.decided_by]
        rows = [row for row in found if row.state == one.verdict.accuracy]
        shown = [
            figure
            for row in rows
            for figure in row.figures
            if figure.name == row.decided_by and figure.text() in text_of(one)
        ]
        assert shown, (one.name, text_of(one))
        if one.verdict.accuracy == "kept":
            assert all(figure.proved for figure in shown), (one.name, text_of(one))
            assert kept_text(shown[0].name, shown[0].kept) in text_of(one)


def text_of(one: Case) -> str:
    return next(row.text for row in one.verdict.rows if row.text.startswith("accuracy"))


def test_no_bad_file_is_called_kept(cases: list[Case]) -> None:
    assert len(cases) >= 60
    assert [(case.name, case.loss) for case in cases if case.wrong == "false kept"] == []


def test_next_to_no_good_file_is_called_lost(cases: list[Case]) -> None:
    wrong = [(case.name, case.loss, case.verdict.text) for case in cases if case.wrong == "false lost"]
    assert len(wrong) <= 1, wrong


def test_verdicts_decide_where_there_is_enough_data(cases: list[Case]) -> None:
    """A verdict that is never sure would pass the tests above."""
    enough = [case for case in cases if case.name.endswith(" 100 samples")]
    counts = Counter((case.loss <= LOSS, case.verdict.accuracy) for case in enough)
    assert counts[True, "kept"] > 0.6 * sum(count for (good, _), count in counts.items() if good), counts
    assert counts[False, "lost"] > 0.4 * sum(count for (good, _), count in counts.items() if not good), counts


def test_wrong_data_is_seen(cases: list[Case]) -> None:
    wrong = [case for case in cases if case.name.rpartition(", ")[2] in (*WRONG_DATA, "other labels")]
    assert len(wrong) > 30 and {case.verdict.accuracy for case in wrong} == {"doubtful"}


@pytest.mark.parametrize(
    ("name", "metric", "images"), [("cifar_resnet20", "clean:top1", 500), ("ultraface_rfb320", "f1_with_float", 100)]
)
def test_of_a_real_model(name: str, metric: str, images: int, pack: Path, tmp_path: Path) -> None:
    """Files of several widths, compared on 1 and 16 samples beside their metric."""
    tools = load_pack(pack)
    floats, feeds = pack / "models" / f"{name}.onnx", tools.load_calib(name, limit=32)[:32]
    before = tools.evaluate(name, str(floats), limit=images)[metric] if metric != "f1_with_float" else 1.0
    found = []
    for bits in ("w8a8", "w2a2"):
        file = tmp_path / f"{bits}.onnx"
        sbonnx.quantize(floats, feeds, verify=False, bits=bits, backend="virtual", output=file, effort="fast")
        loss = before - tools.evaluate(name, str(file), limit=images)[metric]  # of ResNet-20 all clean ones
        limit = LOSS if metric != "f1_with_float" else 0.1
        found += [
            case(f"{bits}, {count} samples", compared(floats, file, feeds[:count]), loss if loss > limit else 0.0)
            for count in (1, 16)
        ]
        wrong = [{key: 255 * value for key, value in feed.items()} for feed in feeds[:16]]
        found.append(case_of_wrong_data(f"{bits}, wrong data", compared(floats, file, wrong)))
    assert [case for case in found if case.wrong] == []

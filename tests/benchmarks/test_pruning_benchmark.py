"""Benchmark of pruning: sizes counted on files, ratios by bisection, correction of mean and variance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.pruning.files import correct_statistics, sizes
from benchmarks.pruning.scores import judge
from benchmarks.pruning.sparse import zeros_of
from benchmarks.pruning.ways import bisected
from benchmarks.scores import divergences
from tests.support.models import model, run

NET = """agraph (float[N,3,8,8] x) => (float[N,5] y) {
    c = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w1, b1)
    r = Relu (c)
    d = Conv <group = 6> (r, w2, b2)
    g = GlobalAveragePool (d)
    f = Flatten (g)
    y = Gemm <transB = 1> (f, w3, b3)
}"""
WEIGHTS: dict[str, Any] = {"w1": (6, 3, 3, 3), "b1": 6, "w2": (6, 1, 3, 3), "b2": 6, "w3": (5, 6), "b3": 5}


def files(folder: Path) -> tuple[Path, Path, list[dict[str, np.ndarray]]]:
    """The network, the same with half of the inputs of the last two layers masked, and samples."""
    plain = model(NET, **WEIGHTS)
    masked = onnx.ModelProto()
    masked.CopyFrom(plain)
    for tensor in masked.graph.initializer:
        if tensor.name in ("w2", "w3"):
            values = onnx.numpy_helper.to_array(tensor).copy()
            if tensor.name == "w2":
                values[3:] *= 0.5
            else:
                values[:, 4:] = 0
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    paths = folder / "plain.onnx", folder / "masked.onnx"
    for path, proto in zip(paths, (plain, masked), strict=True):
        onnx.save(proto, str(path))
    rng = np.random.default_rng(0)
    return *paths, [{"x": rng.standard_normal((1, 3, 8, 8)).astype(np.float32)} for _ in range(50)]


def test_sizes_follow_from_shapes(tmp_path: Path) -> None:
    plain, _, feeds = files(tmp_path)
    macs, values = sizes(plain, feeds[0])
    assert macs == 6 * 27 * 16 + 6 * 9 * 4 + 30
    assert values == 6 * 27 + 6 + 6 * 9 + 6 + 30 + 5
    batch = {"x": np.concatenate([feed["x"] for feed in feeds[:4]])}
    assert sizes(plain, batch)[0] == macs


def test_correction_gives_the_outputs_of_each_layer_their_statistics_back(tmp_path: Path) -> None:
    plain, masked, feeds = files(tmp_path)
    output = tmp_path / "tuned.onnx"
    correct_statistics(plain, masked, output, feeds)
    x = np.concatenate([feed["x"] for feed in feeds])
    want, before, after = (run(str(path), {"x": x})["y"] for path in (plain, masked, output))
    np.testing.assert_allclose(after.mean(axis=0), want.mean(axis=0), atol=1e-4)
    np.testing.assert_allclose(after.std(axis=0), want.std(axis=0), rtol=1e-3)
    assert np.abs(before.std(axis=0) / want.std(axis=0) - 1).max() > 0.1


def test_the_least_ratio_that_meets_the_share_is_taken() -> None:
    found = bisected(lambda ratio: (1 - ratio) ** 2, 0.49)
    assert 0.3 <= found < 0.3 + 2**-7
    assert bisected(lambda _: 1.0, 0.5) == pytest.approx(1 - 2**-7)


def test_divergence_is_that_of_probabilities() -> None:
    reference, found = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.75, 0.25], [0.9, 0.1]]) + 3
    np.testing.assert_allclose(
        divergences(reference, found), [0.5 * np.log(0.5 / 0.75) + 0.5 * np.log(2), 0], atol=1e-12
    )


class OneSet:
    """Pack with one evaluation set, whose labels are those of the file `labels`."""

    def __init__(self, labels: Path) -> None:
        self._labels = labels

    def entry(self, _: str) -> dict[str, Any]:
        return {"eval_files": {"clean": "labels"}}

    def _path(self, _: str) -> Path:
        return self._labels


def test_scores_are_against_labels_and_against_float(tmp_path: Path) -> None:
    np.savez(tmp_path / "labels.npz", Y=[0, 1, 1, 0])
    reference = np.array([[2.0, 0], [0, 2], [0, 2], [0, 2]])
    found = np.array([[2.0, 0], [0, 2], [2, 0], [2, 0]])
    record = judge(OneSet(tmp_path / "labels.npz"), "net", {"clean": reference}, {"clean": found})
    values = {score: sets["clean"][0] for score, sets in record.items()}
    assert values["top1"] == 0.75 and values["agreement"] == 0.5
    assert values["sqnr"] == pytest.approx(0.0)  # errors of two rows have twice the energy of a row
    assert values["kl"] == pytest.approx(np.tanh(1), rel=1e-6)


def test_zeros_are_counted_in_groups_of_input_channels(tmp_path: Path) -> None:
    """Two of four weights along the kernel are zero in the one layer, two of four input channels in the other."""
    first, along = np.ones((4, 4, 1, 1), np.float32), np.ones((2, 4, 2, 2), np.float32)
    across = along.copy()
    along[..., 0, :] = 0
    across[:, :2] = 0
    text = """agraph (float[1,4,4,4] x) => (float[1,2,3,3] y) {
        a = Conv (x, w1)
        y = Conv (a, w2)
    }"""
    for weight, fitting in ((along, 0.5), (across, 1.0)):
        path = tmp_path / "net.onnx"
        onnx.save(model(text, w1=first, w2=weight), str(path))
        assert zeros_of(path) == (0.5, fitting)

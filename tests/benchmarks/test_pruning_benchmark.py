"""Benchmark of pruning: sizes counted on files, ratios by bisection, correction of mean and variance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.pruning import bisected
from benchmarks.pruning_files import correct_statistics, sizes
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

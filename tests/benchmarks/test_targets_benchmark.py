"""The benchmark of targets on the bundled model: every table is made, and what it counts is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.targets import half as targets_half
from benchmarks.targets import latency as targets_latency
from benchmarks.targets import lint as targets_lint
from benchmarks.targets.latency import HEADER, Line
from benchmarks.targets.lint import FACTS, Census
from benchmarks.targets.models import PEERS, Subject, open_axes, stacked
from sbonnx.assets import digits
from tests.support.models import model


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The digits with 16 samples."""
    images = np.load(digits().calib)["image"][:16]
    singles = [{"image": image[None]} for image in images]
    return Subject("digits", digits().model, singles, singles)


def test_samples_are_stacked_along_the_open_axis(tmp_path: Path) -> None:
    made = model("g (float[2,N,3] state, float[N,4] x, int64 rate) => (float[2,N,3] y) { y = Identity(state) }")
    onnx.save(made, str(tmp_path / "m.onnx"))
    axes = open_axes(tmp_path / "m.onnx")
    assert axes == {"state": 1, "x": 0, "rate": None}
    feed = {"state": np.zeros((2, 1, 3)), "x": np.zeros((1, 4)), "rate": np.array(16000)}
    made_of = stacked([feed] * 5, axes)
    assert {name: value.shape for name, value in made_of.items()} == {"state": (2, 5, 3), "x": (5, 4), "rate": ()}


@pytest.mark.slow
def test_latency(subject: Subject, tmp_path: Path) -> None:
    lines = targets_latency.measure(subject, tmp_path, 2)
    assert [line.batch for line in lines] == [1, 8]
    assert set(lines[0].wall) == {"float", "ours", *PEERS}
    assert all(len(values) == 2 and min(values) > 0 for values in lines[0].wall.values())
    integers, left = lines[0].kernels["ours"].split("; ")
    assert int(integers) > 5, left
    shown = targets_latency.text(lines, 2)
    assert all(f"| {name} |" in shown for name in HEADER)
    assert "| geometric mean |" in shown


def test_the_best_of_the_peer_is_what_is_compared() -> None:
    wall = {"float": [2.0, 4.0], "ours": [1.0, 1.0], "a": [0.5, 0.5], "b": [1.0, 3.0]}
    line = Line("m", 1, wall, wall, {"ours": "7; 0"}, {"c": "fails: no"})
    assert line.best == "a"
    cells = {name: None if cell is None else cell.value for name, cell in line.cells().items()}
    assert cells == {HEADER[3]: 0.375, HEADER[4]: 0.1875, HEADER[5]: 2.0, HEADER[6]: 0.375, HEADER[7]: 2.0}
    (means,) = targets_latency.geometric([line, Line("n", 1, {**wall, "ours": [0.25, 0.25]}, wall, {}, {})])
    assert means[5] == "1.00 ≤ 0.909091: **missed**"
    assert "- m, c: fails: no" in targets_latency.text([line], 2)


@pytest.mark.slow
def test_lint(subject: Subject) -> None:
    own = targets_lint.our_rows(subject)
    assert [row[1] for row in own] == list(targets_lint.VERSIONS)
    assert [row[2] for row in own[:2]] == ["0", "0"], "sbonnx's files have no errors"
    assert own[2][2].startswith("fails: "), "TensorRT 8.6 reads opset 17 at most, the digits have 18"
    rows = targets_lint.peer_rows(subject)
    counts = {(row[1], row[2]): int(row[3]) for row in rows if row[3]}
    facts = list(FACTS)
    assert counts["default", facts[1]] > 0
    assert counts["TensorRT switches", facts[0]] == counts["TensorRT switches", facts[1]] == 0
    assert counts["TensorRT switches", facts[2]] > 0, "the peer knows no residual branch"


CENSUS = """
agraph (float[N,2,4,4] x) => (float[N,2,4,4] y) {
    xq = QuantizeLinear(x, s, z)
    xd = DequantizeLinear(xq, s, z)
    bd = DequantizeLinear(b, s, i)
    c = Conv(xd, w, bd)
    cq = QuantizeLinear(c, s, o)
    cd = DequantizeLinear(cq, s, o)
    a = Add(cd, xd)
    r = Relu(cd)
    m = Mul(a, r)
    mq = QuantizeLinear(m, s, o)
    y = DequantizeLinear(mq, s, o)
}"""


def test_facts_are_counted() -> None:
    zeros = {"z": np.uint8(128), "o": np.uint8(0), "i": np.int32(0), "b": np.zeros(2, np.int32), "s": np.float32(0.1)}
    made = model(CENSUS, w=(2, 2, 1, 1), **zeros)
    assert list(Census(made).facts().values()) == [1, 1, 1, 1, 1, 1]


def test_half_precision(subject: Subject, tmp_path: Path) -> None:
    pure, mixed = (targets_half.row(subject, label, tmp_path) for label in targets_half.FILES)
    assert pure[2] == "0"
    assert int(pure[3]) > 10
    assert float(pure[5]) > 50
    assert 15 < float(mixed[5]) < 50
    assert (pure[7], mixed[7]) == ("0", "0")


def test_islands_are_counted() -> None:
    made = model("""
        g (float16[4] x) => (float[4] y) {
            a = Relu(x)
            b = Cast <to = 1> (a)
            c = Relu(b)
            d = Sigmoid(c)
            e = Cast <to = 10> (d)
            f = Relu(e)
            h = Cast <to = 1> (f)
            y = Relu(h)
        }""")
    kept = targets_half.kept(made)
    assert (kept.single, kept.half, kept.islands) == (3, 2, 2)

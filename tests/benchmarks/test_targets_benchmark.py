"""The benchmark of targets on the bundled model: every table is made, and what it counts is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.targets import half as targets_half
from benchmarks.targets import latency as targets_latency
from benchmarks.targets import lint as targets_lint
from benchmarks.targets.latency import HEADER
from benchmarks.targets.lint import FACTS
from benchmarks.targets.models import PEERS, Subject
from sbonnx.assets import digits


@pytest.fixture(scope="module")
def subject() -> Subject:
    """The digits with 16 samples."""
    images = np.load(digits().calib)["image"][:16]
    singles = [{"image": image[None]} for image in images]
    return Subject("digits", digits().model, singles, singles)


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


def test_half_precision(subject: Subject, tmp_path: Path) -> None:
    pure, mixed = (targets_half.row(subject, label, tmp_path) for label in targets_half.FILES)
    assert pure[2] == "0"
    assert int(pure[3]) > 10
    assert float(pure[5]) > 50
    assert 15 < float(mixed[5]) < 50
    assert (pure[7], mixed[7]) == ("0", "0")

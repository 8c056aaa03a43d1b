"""Weights that branches of an If share: one rounding, and one compensated bias."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from tests.support.models import model, run

SIZE = 32
TEXT = """agraph (float[N,32] x, bool c) => (float[N,32] y) {
    y = If (c) <
        then_branch = one () => (float[N,32] p) { p = Gemm (x, v, b) },
        else_branch = two () => (float[N,32] q) { q = Gemm (x, v, b2) }
    >
}"""


@pytest.mark.parametrize("equal", [True, False])
def test_a_bias_compensates_the_error_in_both_branches(equal: bool, tmp_path: Path) -> None:
    """Samples select one branch. Biases that differ in float are those of other layers, and stay."""
    random = np.random.default_rng(0)
    weight, bias = random.normal(0, 1, (SIZE, SIZE)), random.normal(0, 1, SIZE)
    other = bias if equal else bias + 1
    values = {"v": weight, "b": bias, "b2": other}
    stored: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in values.items()}
    proto = model(TEXT, **stored)
    inputs = random.normal(1, 1, (16, 24, SIZE)).astype(np.float32)  # a mean error to compensate
    feeds = [{"x": row, "c": np.array(True)} for row in inputs]
    recipe: dict[str, Any] = {
        "mode": "weight_only",
        "w_bit": 2,
        "rounding": "gptq",
        "MIN_WEIGHT_SIZE": 0,
        "VERIFY.HELD_OUT": 0.0,
    }
    path = tmp_path / "q.onnx"
    sbonnx.quantize(proto, feeds, output=path, **recipe)
    written = onnx.load(path)
    first, second = (run(written, {"x": inputs[0], "c": np.array(picks)})["y"] for picks in (True, False))
    moved = np.abs(second - first - (other - bias)).max()
    assert moved < 1e-5 if equal else moved > 1e-3

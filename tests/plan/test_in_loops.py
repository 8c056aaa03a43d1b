"""Weights that control flow reads too: the file holds them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.spec import Array
from tests.support.models import model, run

LOOP = """agraph (float[N,64] x) => (float[N,128] y) {
    a = MatMul(x, w0)
    r = Relu(a)
    h = MatMul(r, w)
    n = Constant<value = int64 {3}>()
    c = Constant<value = bool {1}>()
    e, last = Loop(n, c, h, w) <body = steps (int64 i, bool k, float[N,128] s, float[128,128] v) => (
            bool k2, float[N,128] s2, float[128,128] v2) {
        k2 = Identity(k)
        m = MatMul(s, v)
        o = MatMul(m, w)
        s2 = Tanh(o)
        v2 = Identity(v)
    }>
    y = Relu(e)
}"""
"""A weight that a product reads, that a Loop carries, and that its body reads from outside."""


def quantized(path: Path, **settings: Any) -> tuple[Any, onnx.ModelProto, list[Array]]:
    """The report, the file, and float and quantized outputs."""
    rng = np.random.default_rng(0)
    w0, w = ((rng.standard_normal((size, 128)) / size**0.5).astype(np.float32) for size in (64, 128))
    proto = model(LOOP, w0=w0, w=w)
    feeds = [{"x": rng.standard_normal((1, 64)).astype(np.float32)} for _ in range(16)]
    report = sbonnx.quantize(proto, feeds, output=path, verify=False, **settings)
    outputs = [run(one, feeds[0], level="off")["y"] for one in (proto, str(path))]
    return report, onnx.load(path), outputs


@pytest.mark.parametrize("settings", [{}, {"mode": "dynamic"}, {"backend": "virtual"}, {"format": "qoperator"}])
def test_the_body_reads_the_dequantized_weight(settings: dict[str, Any], tmp_path: Path) -> None:
    _, file, (floats, found) = quantized(tmp_path / "q.onnx", **settings)
    assert [one.data_type for one in file.graph.initializer if list(one.dims) == [128, 128]] == [onnx.TensorProto.INT8]
    assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - found) ** 2)) > 25


@pytest.mark.parametrize("settings", [{"mode": "weight_only"}, {"bits": "w4a8"}])
def test_a_narrow_weight_that_the_body_needs_stays_float(settings: dict[str, Any], tmp_path: Path) -> None:
    report, file, _ = quantized(tmp_path / "q.onnx", **settings)
    matrices = [list(one.dims) for one in file.graph.initializer if one.data_type == onnx.TensorProto.FLOAT]
    assert matrices.count([128, 128]) == 1
    assert sum("would hold it twice" in refusal.why for refusal in report.refusals) == 1
    assert sum(int(np.prod(one.dims)) >= 128 * 128 for one in file.graph.initializer) == 1


def test_a_loop_that_the_recipe_excludes_keeps_its_floats(tmp_path: Path) -> None:
    _, file, _ = quantized(tmp_path / "q.onnx", recipe={"EXCLUDE": ["Loop*"]})
    kinds = [one.data_type for one in file.graph.initializer if list(one.dims) == [128, 128]]
    assert sorted(kinds) == [onnx.TensorProto.FLOAT, onnx.TensorProto.INT8]

"""Attention masks, in the model and as inputs: scores keep their range, and minus infinity is a number like others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.errors import DataError
from sbonnx.spec import Array
from tests.e2e.test_runtime_rewrites import LEVELS, outputs
from tests.support.models import model

HEADS = """
    q0 = MatMul (x, wq)
    q1 = Reshape (q0, heads)
    q = Transpose <perm = [0,2,1,3]> (q1)
    k0 = MatMul (x, wk)
    k1 = Reshape (k0, heads)
    k = Transpose <perm = [0,2,3,1]> (k1)
    v0 = MatMul (x, wv)
    v1 = Reshape (v0, heads)
    v = Transpose <perm = [0,2,1,3]> (v1)
    s = MatMul (q, k)
    MASKED
    p = Softmax <axis = -1> (m)
    o0 = MatMul (p, v)
    o1 = Transpose <perm = [0,2,1,3]> (o0)
    o2 = Reshape (o1, flat)
    y = MatMul (o2, wo)
}"""
INSIDE = "agraph (float[2,6,32] x, int64[2,1,1,6] mask) => (float[2,6,8] y) {" + HEADS
AS_INPUT = "agraph (float[2,6,32] x, float[2,1,6,6] mask) => (float[2,6,8] y) {" + HEADS
FORMS = {
    "add": "b = Cast <to = 1> (mask) n = Sub (one, b) l = Mul (n, low) m = Add (s, l)",
    "where": "b = Cast <to = 9> (mask) m = Where (b, s, low)",
    "input": "m = Add (s, mask)",
}


def attention(form: str, low: float) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    weights = {f"w{name}": rng.standard_normal((32, 8 if name == "o" else 32)) * 0.2 for name in "qkvo"}
    numbers: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in weights.items()}
    numbers |= {"heads": np.array([0, 0, 4, 8]), "flat": np.array([0, 0, 32])}
    constants = {"add": {"one": np.float32(1), "low": np.float32(low)}, "where": {"low": np.float32(low)}}.get(form, {})
    text = (AS_INPUT if form == "input" else INSIDE).replace("MASKED", FORMS[form])
    return model(text, **numbers, **constants)


def feeds(form: str, low: float) -> list[dict[str, Array]]:
    rng = np.random.default_rng(1)
    found = []
    for number in range(6):
        mask: Array = (np.arange(6) < np.array([[6], [3 + number % 3]])).astype(np.int64).reshape(2, 1, 1, 6)
        if form == "input":
            causal = np.where(np.triu(np.ones((6, 6), bool), 1), low, 0).astype(np.float32)
            mask = np.broadcast_to(causal, (2, 1, 6, 6)).copy()
        found.append({"x": rng.standard_normal((2, 6, 32)).astype(np.float32), "mask": mask})
    return found


def assert_near(proto: onnx.ModelProto, data: list[dict[str, Array]], file: Path, least: float) -> None:
    reference = outputs(proto, data, LEVELS[0])
    for level in LEVELS:
        noise = ((outputs(file, data, level) - reference) ** 2).sum()
        assert 10 * np.log10((reference**2).sum() / noise) > least, level


MASKS = [
    *(("add", low) for low in (-1e4, -65504.0, -1e9, -1e30)),
    *(("where", low) for low in (-1e4, -1e9, -np.inf)),
    *(("input", low) for low in (-1e4, -1e9, -np.inf)),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("bits", "least"), [("w8a8", 25.0), ("w8a16", 32.0)])
@pytest.mark.parametrize(("form", "low"), MASKS)
def test_scores_behind_masks_keep_their_range(form: str, low: float, bits: str, least: float, tmp_path: Path) -> None:
    """For qnn, which quantizes the masked scores."""
    proto, data = attention(form, low), feeds(form, low)
    report = sbonnx.quantize(proto, data, backend="qnn", bits=bits, output=tmp_path / "q.onnx")
    assert_near(proto, data, tmp_path / "q.onnx", least)
    if low != -1e30:
        assert any(note.startswith("'m': masks down to") for note in report.notes)
    read = {node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node for name in node.output if name == "m"}
    assert read == {"Add" if form != "where" else "Where"}


@pytest.mark.parametrize(
    ("observer", "least"), [("minmax", 25), ("percentile", 22), ("mse", 22), ("moving_average", 15)]
)
def test_every_observer_leaves_masks_out(observer: str, least: float, tmp_path: Path) -> None:
    proto, data = attention("input", -np.inf), feeds("input", -np.inf)
    recipe = {"A": {"OBSERVER": {"TYPE": observer}}}
    sbonnx.quantize(proto, data, backend="qnn", recipe=recipe, output=tmp_path / "q.onnx")
    assert_near(proto, data, tmp_path / "q.onnx", least)


MODES: dict[str, dict[str, Any]] = {
    "onnxruntime": {"recipe": {"KERNEL_COSTS": "none"}},
    "tensorrt": {"backend": "tensorrt"},
    "virtual": {"backend": "virtual"},
    "dynamic": {"recipe": {"MODE": "dynamic", "MIN_WEIGHT_SIZE": 1}},
    "weight_only": {"recipe": {"MODE": "weight_only", "MIN_WEIGHT_SIZE": 1, "W": {"QUANTIZER": {"BIT": 8}}}},
    "fp16": {"backend": "tensorrt", "high_precision": "fp16", "bits": "w0a0"},
}


@pytest.mark.parametrize("mode", MODES)
def test_infinite_masks_as_inputs_calibrate(mode: str, tmp_path: Path) -> None:
    proto, data = attention("input", -np.inf), feeds("input", -np.inf)
    sbonnx.quantize(proto, data, output=tmp_path / "q.onnx", **MODES[mode])
    assert_near(proto, data, tmp_path / "q.onnx", 20.0)


@pytest.mark.parametrize(("name", "value"), [("mask", np.nan), ("mask", np.inf), ("x", -np.inf)])
def test_other_infinite_values_are_refused(name: str, value: float, tmp_path: Path) -> None:
    proto, data = attention("input", -np.inf), feeds("input", -np.inf)
    data[2][name].flat[7] = value
    with pytest.raises(DataError, match=f"input '{name}' of .*clean or drop that sample"):
        sbonnx.quantize(proto, data, backend="qnn", output=tmp_path / "q.onnx")

"""MODE: dynamic, against numpy, onnxruntime's kernels and its own quantize_dynamic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx.errors import RecipeError
from sbonnx.spec import Array
from tests.support.models import model, run
from tests.support.values import some
from tests.support.writing import kernels, ops, prepared, sqnr, without_data

RNG = np.random.default_rng(0)

ATTENTION = """
agraph (float[N,S,128] x) => (float[N,S,128] y) {
    q = MatMul (x, wq)
    k = MatMul (x, wk)
    v = MatMul (x, wv)
    qb = Add (q, bq)
    t = Transpose <perm = [0,2,1]> (k)
    p = MatMul (qb, t)
    s = Softmax (p)
    o = MatMul (s, v)
    m = MatMul (o, wo)
    y = Add (m, bo)
}"""


def attention() -> onnx.ModelProto:
    return model(ATTENTION, wq=(128, 128), wk=(128, 128), wv=(128, 128), wo=(128, 128), bq=128, bo=128)


def test_readers_of_one_tensor_share_its_quantization() -> None:
    made, refusals = without_data(attention(), mode="dynamic")
    assert ops(made)["DynamicQuantizeLinear"] == 2
    assert ops(made)["MatMulInteger"] == 4
    assert ops(made)["MatMul"] == 2
    assert sorted({refusal.why for refusal in refusals}) == ["it multiplies two activations"]


def test_onnxruntime_makes_one_kernel_of_each() -> None:
    made, _ = without_data(attention(), mode="dynamic")
    found = kernels(made)
    assert found["MatMulIntegerToFloat"] == 3
    assert found["DynamicQuantizeMatMul"] == 1
    assert not found["MatMulInteger"] and not found["Cast"]


def test_levels_agree_and_stay_near_float() -> None:
    proto = attention()
    made, _ = without_data(proto, mode="dynamic")
    x = {"x": RNG.standard_normal((2, 9, 128)).astype(np.float32)}
    off, optimised = run(made, x)["y"], run(made, x, level="all")["y"]
    assert sqnr(off, optimised) > 60
    assert sqnr(run(proto, x)["y"], off) > 30


def reference(x: Array, weight: Array) -> Array:
    """x @ weight by the formulas of ONNX DynamicQuantizeLinear and symmetric int8, one scale a column."""
    low, high = np.float32(min(x.min(), 0)), np.float32(max(x.max(), 0))
    scale = np.float32((high - low) / np.float32(255)) if high > low else np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, 255)
    codes = np.clip(np.rint(x / scale) + zero, 0, 255)
    step = np.maximum(-weight.min(0).clip(max=0) / 128, weight.max(0).clip(min=0) / 127).astype(np.float32)
    weights = np.clip(np.rint(weight / step), -128, 127)
    return np.asarray(((codes - zero) @ weights) * scale * step)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(rows=st.integers(1, 5), offset=st.floats(-3, 3), spread=st.floats(0.01, 100), seed=st.integers(0, 999))
def test_numbers_are_those_of_the_formula(rows: int, offset: float, spread: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((160, 128)).astype(np.float32)
    made, _ = without_data(
        model("agraph (float[N,160] x) => (float[N,128] y) { y = MatMul (x, w) }", w=weight), mode="dynamic", cpu="vnni"
    )
    x = ((rng.standard_normal((rows, 160)) + offset) * spread).astype(np.float32)
    expected = reference(x, weight)
    for level in ("off", "all"):
        assert sqnr(expected, run(made, {"x": x}, level=level)["y"]) > 45  # a tie may round the other way


@pytest.mark.parametrize(
    "attributes", ["", "<transB = 1>", "<transB = 1, alpha = 0.5, beta = 2.0>", "<alpha = 3.0, beta = 0.25>"]
)
def test_a_gemm_with_its_factors(attributes: str) -> None:
    shape = (128, 192) if "transB" in attributes else (192, 128)
    text = f"agraph (float[4,192] x) => (float[4,128] y) {{ y = Gemm {attributes} (x, w, b) }}"
    proto = model(text, w=shape, b=128)
    made, _ = without_data(proto, mode="dynamic")
    x = {"x": RNG.standard_normal((4, 192)).astype(np.float32)}
    assert ops(made)["MatMulInteger"] == 1 and not ops(made)["Gemm"]
    assert sqnr(run(proto, x)["y"], run(made, x)["y"]) > 35


def test_a_product_in_a_branch_quantizes_what_it_captures() -> None:
    text = """
    agraph (bool c, float[N,128] x) => (float[N,128] y) {
        y = If (c) <
            then_branch = yes () => (float[N,128] t) { t = MatMul (x, w) },
            else_branch = no () => (float[N,128] f) { f = MatMul (x, v) }
        >
    }"""
    proto = model(text, w=(128, 128), v=(128, 128))
    made, _ = without_data(proto, mode="dynamic")
    x = RNG.standard_normal((3, 128)).astype(np.float32)
    for condition in (True, False):
        feeds: dict[str, Any] = {"c": np.array(condition), "x": x}
        assert sqnr(run(proto, feeds)["y"], run(made, feeds)["y"]) > 35


def test_what_stays_float_says_why() -> None:
    text = """
    agraph (float[N,3,8,8] x, float[N,8] z) => (float[N,4,8,8] y, float[N,8] s, float[N,128] g) {
        y = Conv <pads = [1,1,1,1]> (x, k)
        s = MatMul (z, w)
        t = MatMul (s, u)
        g = MatMul (t, v)
    }"""
    proto = model(text, k=(4, 3, 3, 3), w=(8, 8), u=(8, 128), v=(128, 128))
    _, refusals = without_data(proto, mode="dynamic", exclude=["MatMul_2"])
    why = {refusal.where: refusal.why for refusal in refusals}
    assert "ConvInteger" in why["Conv_0"]
    assert why["MatMul_0"].startswith("it has 64 weights; MIN_WEIGHT_SIZE is 16384, below which")
    assert why["MatMul_1"].startswith("it has 1024 weights; MIN_WEIGHT_SIZE is 16384, below which")
    assert why["MatMul_2"] == "the recipe says so (EXCLUDE[0])"


def test_other_backends_and_the_simulation_refuse(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="only onnxruntime has kernels"):
        sbonnx.quantize(attention(), None, backend="tensorrt", mode="dynamic")
    with pytest.raises(RecipeError, match="cannot simulate MODE: dynamic"):
        sbonnx.QuantModel(attention(), backend="onnxruntime", mode="dynamic")


def test_no_data_is_needed_and_the_report_says_what_was_not_compared(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"mode": "dynamic", "cpu": "vnni"}
    report = sbonnx.quantize(attention(), None, output=tmp_path / "q.onnx", **keys)
    assert report.ok, report.problems
    assert any("not compared with float" in note for note in report.notes)
    assert any("4 MatMulInteger" in note for note in report.notes)
    assert not some(report.metrics).outputs
    rng = np.random.default_rng(0)  # of its own: on some draws the attention of random weights tips over
    feeds = [{"x": rng.standard_normal((1, 7, 128)).astype(np.float32)} for _ in range(3)]
    compared = sbonnx.quantize(attention(), feeds, output=tmp_path / "p.onnx", **keys)
    assert compared.ok and some(compared.metrics).outputs[0].sqnr_db > 30
    assert (tmp_path / "p.onnx").read_bytes() == (tmp_path / "q.onnx").read_bytes()


def test_the_plan_carries_its_rule() -> None:
    plan = prepared(attention(), mode="dynamic", cpu="vnni").plan
    assert not plan.of_role("activation")
    assert {site.spec.label() for site in plan.sites} == {"int8 axis 1"}
    assert all("at run time" in site.why for site in plan.sites)

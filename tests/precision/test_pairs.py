"""Quantized models in half precision: scales of the type of the tensors, codes made with them, and the lint's word."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import sbonnx
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from sbonnx.linting import lint
from sbonnx.planning.magnitudes import KINDS
from sbonnx.precision.representable import exactly
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds
from tests.precision.converting import assert_few_casts, casts, made, normal, ops_by_type, types, whys
from tests.support.models import model, residual, run
from tests.support.values import some

FEEDS = normal(2, 3, 8, 8, count=6)


def quantized(proto: onnx.ModelProto, feeds: list[dict[str, Array]], **wishes: Any) -> sbonnx.Report:
    report = sbonnx.quantize(proto, feeds, **{"backend": "tensorrt", "high_precision": "fp16", **wishes})
    assert report.ok, report.problems
    return report


def numbers(proto: onnx.ModelProto) -> dict[str, Array]:
    """Constants by name; bfloat16 as ml_dtypes."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


@pytest.mark.parametrize("weights", ["codes", "qdq"])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_a_residual_network_is_typed_throughout(kind: str, weights: str) -> None:
    report = quantized(residual(), FEEDS, high_precision=kind, weights=weights)
    ops = ops_by_type(made(report))
    for op in ("Conv", "Relu", "Add", "GlobalAveragePool", "Gemm", "DequantizeLinear"):
        assert ops[op] == {kind}, (op, ops[op])
    assert casts(made(report)) == {f"fp32 -> {kind}": 1, f"{kind} -> fp32": 1}
    assert_few_casts(made(report))
    held = numbers(made(report))
    for node in made(report).graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            scale = held[node.input[1]].astype(np.float32)
            assert exactly(scale, KINDS[kind])
    for target in ("tensorrt@11", "tensorrt@10"):
        assert not [f for f in lint(made(report), target) if f.severity == "error"], lint(made(report), target)
        assert not {"T05", "T15", "T18", "T19"} & {finding.rule for finding in lint(made(report), target)}


def test_the_codes_are_those_of_the_rounded_scales() -> None:
    """Weights from the file, read back with its own scales, lie within half a step of the float ones."""
    proto = residual()
    made_of = numbers(made(quantized(proto, FEEDS, fuse_bn=False, effort="fast")))
    floats = numbers(proto)
    for name in ("w1", "w2"):
        codes, scale = made_of[f"{name}_quantized"], made_of[f"{name}_scale_fp16"]
        assert scale.dtype == np.float16
        steps = scale.astype(np.float32).reshape(-1, *[1] * (codes.ndim - 1))
        assert (np.abs(codes * steps - floats[name]) <= steps * 0.5001).all()
        assert np.abs(codes.astype(int)).max(axis=tuple(range(1, codes.ndim))).min() >= 126


@pytest.mark.slow
def test_fp16_and_fp32_of_one_model_agree() -> None:
    wide = quantized(residual(), FEEDS, high_precision="fp32")
    for level in ("off", "all"):
        for feed in FEEDS[:3]:
            one, other = run(made(wide), feed, level=level)["y"], run(made(quantized(residual(), FEEDS)), feed)["y"]
            assert np.abs(one - other).max() < 0.05 * np.abs(one).max()


@pytest.mark.parametrize("bits", ["w4a8", "w8a4", "w8a8", "w8a16"])
def test_widths_of_the_virtual_backend(bits: str) -> None:
    report = quantized(residual(), FEEDS, backend="virtual", bits=bits)
    assert {"fp16"} == ops_by_type(made(report))["Conv"]
    assert np.isfinite(run(made(report), FEEDS[0], level="all")["y"]).all()


def test_a_pair_past_the_range_stays_float() -> None:
    """Activations of 1e5: their scale of 800 fits float16, what its codes stand for does not."""
    proto = model(
        """agraph (float[N,16,4,4] x) => (float[N,16,4,4] y) {
            m = Mul (x, large)  a = Abs (m)  c = Conv (a, w)  h = Tanh (c)  e = Conv (h, v)  y = Tanh (e) }""",
        large=np.float32(3e4), v=(16, 16, 1, 1),
        w=np.random.default_rng(1).normal(0, 0.02, (16, 16, 1, 1)).astype(np.float32),
    )  # fmt: skip
    feeds = normal(2, 16, 4, 4, count=4)
    report = quantized(proto, feeds)
    kinds = types(made(report))
    assert kinds["a"] == "fp32"
    assert kinds["h"] == kinds["e"] == "fp16"
    assert any(line.startswith("a: reaches") for line in whys(report))
    assert not any(line.split(":")[0].endswith("DequantizeLinear") for line in whys(report))
    first, last = run(proto, feeds[0])["y"], run(made(report), feeds[0])["y"]
    assert np.abs(first - last).mean() < 0.1
    assert {"fp32", "fp16"} <= ops_by_type(made(report))["DequantizeLinear"]


@settings(max_examples=60, deadline=None)
@given(
    top=st.floats(1e-3, 4e5), kind=st.sampled_from([np.float16, ml_dtypes.bfloat16]), bits=st.sampled_from([4, 8, 16])
)
def test_rounded_scales_cover_the_range(top: float, kind: Any, bits: int) -> None:
    """Rounded up, by at most one step of the type: nothing that the exact scale represents is clipped."""
    spec = QuantSpec(bits=bits)
    found = params_from_bounds(Bounds(np.float32(-top), np.float32(top)), spec, scale_dtype=kind)
    assert float(np.asarray(found.scale).astype(kind)) == float(found.scale)
    exact = np.float32(top) / spec.qmax
    if exact > 2.0**-14:
        step = 2.0 ** -(10 if kind is np.float16 else 7)
        assert exact * (1 - 1e-6) <= float(found.scale) <= exact * (1 + step)


@pytest.mark.parametrize("wishes", [{"backend": "onnxruntime"}, {"backend": "tensorrt@8.6"}, {}])
@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_refused_with_a_way_on(wishes: dict[str, Any], kind: Literal["fp16", "bf16"]) -> None:
    with pytest.raises(RecipeError, match=r"(?i)high_precision.*must be fp32") as caught:
        sbonnx.quantize(residual(), FEEDS, high_precision=kind, **wishes)
    assert "tensorrt" in str(caught.value) or "--fp16" in str(caught.value)


def test_step_by_step(tmp_path: Path) -> None:
    """`QuantModel` measures what was fed, as `quantize` does."""
    with sbonnx.QuantModel(residual(), backend="tensorrt", high_precision="fp16") as steps:
        steps.prepare_calibration()
        for feed in FEEDS:
            steps(feed)
        steps.calc_qparams()
        steps.export_onnx(tmp_path / "steps.onnx")
    expected = made(quantized(residual(), FEEDS))
    found = onnx.load(str(tmp_path / "steps.onnx"))
    assert ops_by_type(found)["Conv"] == {"fp16"}
    assert run(found, FEEDS[0])["y"] == pytest.approx(run(expected, FEEDS[0])["y"], abs=1e-6)


def test_bfloat16_is_said_to_be_emulated() -> None:
    report = quantized(residual(), FEEDS, high_precision="bf16")
    assert any("checked and not run" in note for note in report.notes)
    size = made(report).ByteSize()
    assert some(report.metrics).bytes_quantized == pytest.approx(size, rel=0.05)


def test_blocks_of_int4_weights_in_half_precision() -> None:
    proto = model("agraph (float[N,256] x) => (float[N,256] y) { m = MatMul (x, w)  y = Tanh (m) }", w=(256, 256))
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((4, 256)).astype(np.float32) / 16} for _ in range(4)]
    report = quantized(proto, feeds, mode="weight_only")
    ops = ops_by_type(made(report))
    assert ops["DequantizeLinear"] == ops["MatMul"] == {"fp16"}
    assert_few_casts(made(report))


def test_the_flags_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(residual(), str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "d.npz", x=np.concatenate([feed["x"] for feed in FEEDS]))
    command = ["quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / "d.npz"), "--backend", "tensorrt"]
    assert main([*command, "--high-precision", "fp16", "--no-keep-io", "-v", "-o", str(tmp_path / "q.onnx")]) == 0
    assert "0 stay float32" in capsys.readouterr().out
    kinds = types(onnx.load(str(tmp_path / "q.onnx")))
    assert kinds["x"] == kinds["y"] == "fp16"
    assert main([*command[:-1], "onnxruntime", "--high-precision", "fp16", "-o", str(tmp_path / "r.onnx")]) == 2
    assert "must be fp32 for the backend onnxruntime" in capsys.readouterr().err

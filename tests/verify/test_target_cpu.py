"""Files for another CPU than this one: what its kernels compute is judged, on CPUs with and without VNNI."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.cpu import CPUS, RECORDED_CPU, target_cpu
from sbonnx.lint import lint
from sbonnx.runtime import open_session, session_options
from sbonnx.spec import Array
from sbonnx.verify.runtimes import RECORDED, exact_products, open_in
from tests.support.models import model, run

PRODUCTS = "agraph (uint8[1,64] a) => (int32[1,16] y) { y = MatMulInteger (a, b) }"
WIDE: dict[str, Any] = {
    "w1": np.random.default_rng(1).uniform(-1, 1, (64, 64)).astype(np.float32),
    "w2": np.random.default_rng(2).uniform(-1, 1, (64, 64)).astype(np.float32),
}
TWO = "agraph (float[N,64] x) => (float[N,64] y) { h = MatMul (x, w1) r = Relu (h) y = MatMul (r, w2) }"


def feeds(count: int = 4) -> list[dict[str, Array]]:
    """Inputs near their largest value, with which sums of two products saturate."""
    rng = np.random.default_rng(0)
    return [{"x": rng.uniform(0.8, 1, (8, 64)).astype(np.float32)} for _ in range(count)]


def quantized(path: Path, **keys: Any) -> sbonnx.Report:
    return sbonnx.quantize(model(TWO, **WIDE), feeds(), output=path, kernel_costs="none", held_out=0, **keys)


def metadata(path: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(path).metadata_props}


@pytest.mark.parametrize("exact", [False, True])
def test_what_this_cpu_is_called_is_what_its_kernels_compute(exact: bool) -> None:
    """255 * 127 * 64 against onnxruntime's own product, with and without its option for exact products."""
    proto = model(PRODUCTS, b=np.full((64, 16), 127, np.int8))
    session = open_session(proto.SerializeToString(), session_options("all", exact=exact))
    (y,) = session.run(None, {"a": np.full((1, 64), 255, np.uint8)})
    assert (y == 255 * 127 * 64).all() == (exact or target_cpu().exact)


def test_kernels_that_are_exact_are_those_of_users() -> None:
    """onnxruntime's option halves their speed, so it is set only where products saturate."""
    text = session_options("all", exact=True)
    given = {"session.x64quantprecision": "1"} if not target_cpu().exact else {}
    for key, value in given.items():
        assert text.get_session_config_entry(key) == value
    if not given:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            text.get_session_config_entry("session.x64quantprecision")


@pytest.mark.parametrize("name", CPUS)
def test_the_file_names_its_cpu_and_its_weights_suit_it(name: str, tmp_path: Path) -> None:
    report = quantized(tmp_path / "q.onnx", cpu=name, verify=False)
    assert metadata(tmp_path / "q.onnx")[RECORDED_CPU] == name
    assert report.settings["CPU"] == name
    assert not [one for one in lint(tmp_path / "q.onnx", "onnxruntime") if one.rule == "O36"]
    found = [one for one in lint(tmp_path / "q.onnx", "onnxruntime", cpu="avx2") if one.rule == "O36"]
    assert bool(found) == CPUS[name].exact


def test_figures_of_a_file_for_exact_kernels_are_theirs(tmp_path: Path) -> None:
    report = quantized(tmp_path / "q.onnx", cpu="vnni")
    assert report.ok, report.problems
    x = np.concatenate([feed["x"] for feed in feeds()])
    floats, exact = run(model(TWO, **WIDE), {"x": x})["y"], run(str(tmp_path / "q.onnx"), {"x": x}, level="all")["y"]
    sqnr = 10 * np.log10((floats**2).sum() / ((floats - exact) ** 2).sum())
    assert report.metrics["outputs"][0]["sqnr_db"] == pytest.approx(sqnr, abs=0.1)
    assert (report.metrics["latency_ratio"] is None) == (target_cpu().name != "vnni")
    assert exact_products(tmp_path / "q.onnx")
    opened = open_in("onnxruntime", tmp_path / "q.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(opened, exact, rtol=1e-5)


def test_sums_that_this_cpu_cannot_compute_are_a_problem(tmp_path: Path) -> None:
    """Weights of 8 bits, by request, for kernels that saturate: not judged by kernels that do not."""
    report = quantized(tmp_path / "q.onnx", cpu="avx2", reduce_range=False)
    assert any("can saturate on avx2" in problem for problem in report.problems) == target_cpu().exact
    assert quantized(tmp_path / "s.onnx", cpu="avx2").ok


@pytest.mark.parametrize("backend", ["tensorrt", "qnn", "virtual"])
def test_files_for_other_runtimes_are_exact_and_name_no_cpu(backend: str, tmp_path: Path) -> None:
    report = quantized(tmp_path / "q.onnx", backend=backend, cpu="avx2")
    assert report.ok, report.problems
    assert any(refusal.where == "CPU" for refusal in report.refusals)
    assert metadata(tmp_path / "q.onnx")[RECORDED] == backend
    assert RECORDED_CPU not in metadata(tmp_path / "q.onnx")
    assert exact_products(tmp_path / "q.onnx")


def test_a_file_of_another_tool_runs_with_the_kernels_of_this_cpu(tmp_path: Path) -> None:
    onnx.save(model(TWO, **WIDE), tmp_path / "f.onnx")
    assert not exact_products(tmp_path / "f.onnx")

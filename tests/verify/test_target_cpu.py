"""Files for another CPU than this one: what its kernels compute is judged, on CPUs with and without VNNI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.cli import main
from sbonnx.linting import lint
from sbonnx.present.text.summary import facts_of
from sbonnx.report.verdict import verdict_of
from sbonnx.spec import Array
from sbonnx.system.cpu import CPUS, RECORDED_CPU, target_cpu
from sbonnx.system.runtime import open_session, session_options
from sbonnx.verify.other_cpu import saturating_session
from sbonnx.verify.other_cpu.saturating_sums import LAYOUTS
from sbonnx.verify.runtimes import RECORDED, exact_products, open_in
from tests.support.models import model, run
from tests.support.values import some

PRODUCTS = "agraph (uint8[1,64] a) => (int32[1,16] y) { y = MatMulInteger (a, b) }"
WIDE: dict[str, Any] = {
    "w1": np.random.default_rng(1).uniform(-1, 1, (64, 64)).astype(np.float32),
    "w2": np.random.default_rng(2).uniform(-1, 1, (64, 64)).astype(np.float32),
}
SATURATING_DB = 14.5
"""SQNR of 8-bit weights by onnxruntime's kernels without VNNI."""

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
    assert some(report.metrics).outputs[0].sqnr_db == pytest.approx(sqnr, abs=0.1)
    assert (some(report.metrics).latency_ratio is None) == (target_cpu().name != "vnni")
    assert exact_products(tmp_path / "q.onnx")
    opened = open_in("onnxruntime", tmp_path / "q.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(opened, exact, rtol=1e-5)


def test_figures_of_a_file_for_saturating_kernels_are_theirs(tmp_path: Path) -> None:
    """Weights of 8 bits, by request: the same loss on CPUs that saturate and, computed in numpy, on others."""
    report = quantized(tmp_path / "q.onnx", cpu="avx2", reduce_range=False)
    assert "sums of two products saturate" in dict(facts_of(report))["weights"]
    (problem,) = report.problems
    assert "at 'extended' and 'all'" in problem
    assert "8-bit products of avx2 saturate" in problem or not target_cpu().exact
    assert some(report.metrics).outputs[0].sqnr_db == pytest.approx(SATURATING_DB, abs=0.1)
    assert bool(some(report.metrics).saturating) == target_cpu().exact
    assert not some(report.metrics).unknown_sums
    computed = "2 integer operators saturate on avx2 and not on this CPU"
    assert any(computed in note for note in report.notes) == target_cpu().exact
    assert ("computed as avx2 CPUs compute it" in verdict_of(report.metrics).text) == target_cpu().exact
    assert quantized(tmp_path / "s.onnx", cpu="avx2").ok


def test_compare_judges_any_file_as_another_cpu_computes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file for exact kernels, on CPUs that it is not for."""
    onnx.save(model(TWO, **WIDE), tmp_path / "f.onnx")
    np.savez(tmp_path / "x.npz", x=np.concatenate([feed["x"] for feed in feeds()]))
    quantized(tmp_path / "q.onnx", cpu="vnni", verify=False)
    words = ["compare", "f.onnx", "q.onnx", "--data", "x.npz", "--json"]
    found = {}
    for cpu in ("avx2", "vnni"):
        main([str(tmp_path / word) if "." in word else word for word in words] + ["--cpu", cpu])
        found[cpu] = json.loads(capsys.readouterr().out)
        assert (found[cpu]["latency_ratio"] is None) == (target_cpu().name != cpu)
    assert found["vnni"]["outputs"][0]["sqnr_db"] > SATURATING_DB + 10
    assert found["avx2"]["outputs"][0]["sqnr_db"] == pytest.approx(SATURATING_DB, abs=0.1)
    assert ("computed as avx2 CPUs compute it" in found["avx2"]["verdict"]["text"]) == target_cpu().exact
    assert main(["compare", str(tmp_path / "f.onnx"), str(tmp_path / "q.onnx"), "--data", "x", "--cpu", "z80"]) == 2


@pytest.mark.skipif(not target_cpu().exact, reason="this CPU computes saturating sums itself")
def test_sums_that_are_not_computed_are_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that are computed in numpy are left out here."""
    monkeypatch.setattr(saturating_session, "NOT_COMPUTED", frozenset(LAYOUTS))
    monkeypatch.setattr(saturating_session, "LAYOUTS", {})
    report = quantized(tmp_path / "q.onnx", cpu="avx2", reduce_range=False)
    assert any("can saturate on avx2 and not on this CPU" in problem for problem in report.problems)
    assert len(some(report.metrics).unknown_sums) == 2


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

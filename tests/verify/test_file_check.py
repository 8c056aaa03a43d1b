"""`check` and `compare` beyond the outputs: optimisation levels, kernels, what cannot be measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

import sbonnx
from sbonnx import verify
from sbonnx.errors import ModelError
from sbonnx.spec import Array
from tests.support.models import model, residual, run
from tests.support.values import some
from tests.verify.qdq import named, needed

RNG = np.random.default_rng(1)
FEEDS: list[dict[str, Array]] = [{"x": RNG.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(6)]
DEEP = verify.Depth(latency=False, levels=True, kernels=True)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    sbonnx.quantize(residual(), FEEDS, output=tmp_path / "q.onnx", verify=False)
    return tmp_path / "q.onnx"


def test_levels_are_held_against_float_and_against_off(output: Path) -> None:
    """The figures, by hand: both files run on the first feeds at both ends."""
    comparison = verify.check(residual().SerializeToString(), output, FEEDS)
    assert [one.level for one in comparison.levels] == list(verify.LEVEL_NAMES)
    off, last = comparison.levels[0], comparison.levels[-1]
    count = off.feeds
    assert 1 <= count <= 4
    reference = np.concatenate([run(residual(), feed, level="all")["y"] for feed in FEEDS[:count]])
    plain, best = (
        np.concatenate([run(str(output), feed, level=level)["y"] for feed in FEEDS[:count]]) for level in ("off", "all")
    )
    assert last.sqnr_db == pytest.approx(10 * np.log10((reference**2).sum() / ((reference - best) ** 2).sum()), abs=0.1)
    assert off.sqnr_db == pytest.approx(10 * np.log10((reference**2).sum() / ((reference - plain) ** 2).sum()), abs=0.1)
    assert last.max_abs == pytest.approx(float(np.abs(plain - best).max()), abs=1e-5)
    assert (off.off_db, off.max_abs) == (float("inf"), 0)
    assert verify.Limits().problems(comparison) == ()


def wrong_bias() -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """A float Gemm, and one whose bias has another scale than the product: QGemm reads its codes as if it had not."""
    body = """xq = QuantizeLinear (x, s, mid) xd = DequantizeLinear (xq, s, mid) wd = DequantizeLinear (m, s, zero)
        bd = DequantizeLinear (b, other, bz) y = Gemm (xd, wd, bd)"""
    numbers = needed(body, {"other": np.float32(0.004)})
    quantized = named(model(f"agraph (float[4,8] x) => (float[4,8] y) {{ {body} }}", **numbers))
    w, b = numbers["m"].astype(np.float32) * 0.02, numbers["b"].astype(np.float32) * np.float32(0.004)
    return model("agraph (float[4,8] x) => (float[4,8] y) { y = Gemm (x, w, b) }", w=w, b=b), quantized


def test_a_level_that_computes_something_else_is_a_problem(tmp_path: Path) -> None:
    reference, quantized = wrong_bias()
    onnx.save(quantized, str(tmp_path / "q.onnx"))
    feeds = [{"x": RNG.standard_normal((4, 8)).astype(np.float32)} for _ in range(3)]
    comparison = verify.compare(reference.SerializeToString(), tmp_path / "q.onnx", feeds, depth=DEEP)
    (problem,) = verify.Limits(min_sqnr_db=0.0).problems(comparison)
    assert "output 'y' depends on onnxruntime's optimisation level: at 'extended' and 'all'" in problem
    assert comparison.levels[0].sqnr_db > 25 > 10 > comparison.levels[-1].sqnr_db


def test_few_bits_are_no_disagreement(tmp_path: Path) -> None:
    """Codes that fall on the other side of a rounding move a coarse model much, and not away from float."""
    report = sbonnx.quantize(
        residual(), FEEDS, output=tmp_path / "q.onnx", backend="virtual", bits="w2a2", rounding="nearest"
    )
    assert not [problem for problem in report.problems if "optimisation level" in problem]


def test_the_graph_cannot_be_written(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the optimised graph: everything else is measured, and the report says what was not."""
    original = verify.session

    def refuses(*arguments: Any, write: Path | None = None, **more: Any) -> Any:
        return original(*arguments, write=None if write is None else tmp_path / "absent" / write.name, **more)

    monkeypatch.setattr("sbonnx.verify.sessions.session", refuses)
    comparison = verify.compare(residual().SerializeToString(), output, FEEDS, depth=DEEP)
    assert comparison.kernels is not None and "could not be written" in comparison.kernels.skipped
    assert comparison.kernels.share is None
    assert comparison.outputs and comparison.levels
    (problem,) = verify.Limits(min_integer=0.5).problems(comparison)
    assert problem.startswith("integer kernels were not counted: ")


def test_models_that_do_not_fit_together_are_counted_and_compared_at_all_levels(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = residual().SerializeToString()
    beside = verify.check(source, output, FEEDS)
    monkeypatch.setattr("sbonnx.verify.file_check.TOGETHER_BYTES", 0)
    apart = verify.check(source, output, FEEDS)
    assert [(one.level, one.off_db) for one in apart.levels] == [(one.level, one.off_db) for one in beside.levels]
    assert apart.kernels is not None and beside.kernels is not None
    assert apart.kernels.in_integers == beside.kernels.in_integers > 3
    assert (apart.latency_ratio is None, beside.latency_ratio is None) == (True, False)
    (problem,) = verify.Limits(max_latency_ratio=5.0).problems(apart)
    assert "not measured" in problem and "VERIFY.MAX_LATENCY_RATIO" in problem


def test_a_large_graph_is_opened_at_both_ends_only(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The levels in between are left out, with a note; every other figure is that of all levels."""
    source = residual().SerializeToString()
    every = verify.check(source, output, FEEDS, depth=verify.Depth(latency=False))
    opened: list[str] = []
    original = verify.session

    def notes(*arguments: Any, level: str = "all", **more: Any) -> Any:
        opened.append(level)
        return original(*arguments, level=level, **more)

    monkeypatch.setattr("sbonnx.verify.sessions.session", notes)
    monkeypatch.setattr("sbonnx.verify.file_check.MANY_NODES", len(onnx.load(str(output)).graph.node) - 1)
    ends = verify.check(source, output, FEEDS, depth=verify.Depth(latency=False))
    assert set(opened) == {"off", "all"}
    assert (every.levels_left_out, ends.levels_left_out) == ((), ("basic", "extended"))
    assert [one.level for one in ends.levels] == ["off", "all"]
    assert [one.off_db for one in ends.levels] == [every.levels[0].off_db, every.levels[-1].off_db]
    assert ends.outputs == every.outputs and ends.kernels == every.kernels
    assert not every.notes() and "'basic' and 'extended' were not opened" in ends.notes()[0]


def test_without_data_the_file_is_checked_and_loaded_only(output: Path) -> None:
    comparison = verify.check(residual().SerializeToString(), output, None)
    assert (comparison.outputs, comparison.feeds, comparison.levels, comparison.latency_ratio) == ((), 0, (), None)
    assert comparison.kernels is not None and comparison.kernels.share == 1.0
    assert verify.Limits().problems(comparison) == ()
    asked = verify.Limits(min_sqnr_db=20.0, min_cosine={"y": 0.9}, max_latency_ratio=1.0).problems(comparison)
    assert len(asked) == 3 and all("no data" in problem for problem in asked)
    made = onnx.load(str(output))
    made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(made, str(output))
    with pytest.raises(ModelError, match="not those"):
        verify.check(residual().SerializeToString(), output, None)


def test_narrow_inputs_and_outputs_where_they_were_asked_for(tmp_path: Path) -> None:
    """float16 in and out: another interface, unless the recipe does without the old one."""
    text = "agraph (float[N,4] x) => (float[N,3] y) { y = MatMul (x, w) }"
    w = RNG.standard_normal((4, 3)).astype(np.float32)
    narrow = model(text.replace("float[", "float16["), w=w.astype(np.float16))
    onnx.save(narrow, str(tmp_path / "h.onnx"))
    assert narrow.graph.input[0].type.tensor_type.elem_type == TensorProto.FLOAT16
    feeds = [{"x": RNG.standard_normal((2, 4)).astype(np.float32)}]
    source = model(text, w=w).SerializeToString()
    with pytest.raises(ModelError, match="not those"):
        verify.check(source, tmp_path / "h.onnx", feeds)
    comparison = verify.check(source, tmp_path / "h.onnx", feeds, depth=verify.Depth(keep_io=False))
    assert comparison.outputs[0].sqnr_db > 50


def test_the_report_says_what_stayed_float(tmp_path: Path) -> None:
    """Symmetric activations on onnxruntime: no Relu folds, each such op is a row with its reason."""
    report = sbonnx.quantize(residual(), FEEDS, output=tmp_path / "q.onnx", a_qscheme="per-tensor-symmetric")
    rows = [one for one in report.refusals if one.what == "integer kernel"]
    assert {"stem", "conv1"} <= {one.where for one in rows}
    assert all("Conv runs in float: the Relu after it stays" in one.why for one in rows if one.where == "stem")
    kernels = some(some(report.metrics).kernels)
    assert kernels.in_integers < kernels.planned and len(kernels.float_weighted) >= 2
    other = sbonnx.quantize(residual(), FEEDS, output=tmp_path / "t.onnx", backend="tensorrt")
    assert other.ok and not [one for one in other.refusals if one.what == "integer kernel"]
    assert some(some(other.metrics).kernels).planned > 0, "a figure all the same"


def test_weights_beside_the_file_are_not_read(tmp_path: Path, output: Path) -> None:
    """External data: sizes include it, kernels are counted without it."""
    made = onnx.load(str(output))
    before = sum(numpy_helper.to_array(tensor).nbytes for tensor in made.graph.initializer)
    onnx.save(made, str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.bin", size_threshold=16)
    comparison = verify.compare(residual().SerializeToString(), tmp_path / "e.onnx", FEEDS, depth=DEEP)
    assert comparison.bytes_quantized >= before
    assert comparison.kernels is not None and comparison.kernels.share == 1.0

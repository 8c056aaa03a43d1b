"""Quantized files read as plans: ours against the profile that made them, other tools' against onnxruntime itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.assets import digits
from sbonnx.errors import ModelError
from sbonnx.metrics import sqnr_db
from sbonnx.pipeline import quantized_graph, solve
from sbonnx.profiling import WalkOptions, file_losses, losses, subject_of
from sbonnx.stages.state import Request, read_recipe
from tests.support.models import model, residual, run

MODEL = str(digits().model)
IMAGES = np.load(digits().calib)["image"][:24]
DATA = [{"image": IMAGES[:16]}, {"image": IMAGES[16:]}]


def made(folder: Path, backend: str, **wishes: Any) -> tuple[Path, Any]:
    """A file that this package writes, and the profile of the plan that it was written from."""
    recipe, rules = read_recipe(None, backend, wishes)
    state = solve(Request(MODEL, recipe, rules, data=DATA))
    prepared, solution = state.prepared, state.solution
    assert state.data is not None
    path = folder / "q.onnx"
    graphs.save(quantized_graph(prepared, solution), path)
    return path, losses(prepared.graph, prepared.plan, solution, state.data.every)


WISHES: dict[str, dict[str, Any]] = {
    "onnxruntime w8a8": {"backend": "onnxruntime"},
    "onnxruntime w4a8": {"backend": "onnxruntime", "bits": "w4a8"},
    "onnxruntime w6a8, nearest": {"backend": "onnxruntime", "bits": "w6a8", "rounding": "nearest"},
    "tensorrt w8a8": {"backend": "tensorrt"},
    "virtual w4a8, biases corrected": {"backend": "virtual", "bits": "w4a8"},
    "virtual w3a6": {"backend": "virtual", "bits": "w3a6", "rounding": "nearest"},
}


@pytest.mark.slow
@pytest.mark.parametrize("wishes", WISHES)
def test_a_file_has_the_profile_of_its_plan(wishes: str, tmp_path: Path) -> None:
    """The file knows its codes and scales, the float model its weights: together they are plan and solution."""
    path, expected = made(tmp_path, **WISHES[wishes])
    subject = subject_of(MODEL, path)
    assert not subject.notes
    found = file_losses(MODEL, path, subject.graph, subject.plan, subject.solution, DATA)
    assert not found.notes
    known = {row.node: row for row in expected.layers}
    assert {row.node for row in found.layers} == known.keys()
    for one in found.layers:
        other = known[one.node]
        assert one.gathered == pytest.approx(other.gathered, abs=0.1), "biases are not float in the file"
        assert one.activations == pytest.approx(other.activations, abs=0.01)
        assert one.weights == (other.weights if other.weights is None else pytest.approx(other.weights, abs=0.1))
    assert found.outputs["scores"] == pytest.approx(expected.outputs["scores"], abs=0.5), "of onnxruntime's kernels"


@pytest.mark.slow
def test_integer_operators(tmp_path: Path) -> None:
    recipe, rules = read_recipe(None, "onnxruntime", {"format": "qoperator"})
    state = solve(Request(MODEL, recipe, rules, data=DATA))
    prepared, solution = state.prepared, state.solution
    path = tmp_path / "q.onnx"
    graphs.save(quantized_graph(prepared, solution), path)
    assert any(node.op_type == "QLinearConv" for node in onnx.load(str(path)).graph.node)
    subject = subject_of(MODEL, path)
    found = losses(subject.graph, subject.plan, subject.solution, DATA)
    expected = losses(prepared.graph, prepared.plan, solution, DATA)
    known = {row.node: row for row in expected.layers}
    rows = {name: row for row in found.layers for name in known if row.node.startswith(f"{name}_QLinearConv")}
    assert len(rows) == sum(row.op == "Conv" for row in expected.layers)
    for name, row in rows.items():
        assert row.weights == pytest.approx(known[name].weights, abs=0.1)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """What onnxruntime's quantizer is fed with."""

    def __init__(self, feeds: list[dict[str, Any]]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> dict[str, Any] | None:
        return next(self._feeds, None)


def by_onnxruntime(proto: onnx.ModelProto, feeds: list[dict[str, Any]], path: Path, form: QuantFormat) -> Path:
    """The file of onnxruntime's own quantizer."""
    source = path.with_name("float.onnx")
    onnx.save(proto, source)
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
    quantize_static(str(source), str(path), Reader(feeds), quant_format=form, per_channel=True, **types)
    return path


@pytest.mark.parametrize("form", [QuantFormat.QDQ, QuantFormat.QOperator], ids=["qdq", "qoperator"])
def test_a_file_of_onnxruntimes_quantizer(form: QuantFormat, tmp_path: Path) -> None:
    """At the outputs: what onnxruntime itself gives for both files. Every weight of the float model is found."""
    proto = residual()
    feeds = [{"x": np.random.default_rng(seed).standard_normal((4, 3, 8, 8)).astype(np.float32)} for seed in (0, 1)]
    path = by_onnxruntime(proto, feeds, tmp_path / "q.onnx", form)
    subject = subject_of(tmp_path / "float.onnx", path)
    found = losses(subject.graph, subject.plan, subject.solution, feeds)
    whole = {"x": np.concatenate([feed["x"] for feed in feeds])}
    expected = sqnr_db(run(proto, whole)["y"], run(onnx.load(str(path)), whole)["y"])
    assert not subject.notes
    assert found.outputs["y"] == pytest.approx(expected, abs=1.5), "its output pair counts in the file alone"
    convs = [row for row in found.layers if row.op == "Conv"]
    assert len(convs) == 3
    assert all(35 < (row.weights or 0) < 60 for row in convs)


def test_weights_of_another_model(tmp_path: Path) -> None:
    """They count as not rounded, and that is said; so is that the float model gives something else."""
    feeds = [{"x": np.random.default_rng(0).standard_normal((4, 3, 8, 8)).astype(np.float32)}]
    path = by_onnxruntime(residual(), feeds, tmp_path / "q.onnx", QuantFormat.QDQ)
    other = residual(seed=5)
    onnx.save(other, tmp_path / "other.onnx")
    subject = subject_of(tmp_path / "other.onnx", path)
    assert any("4 weights are not those of the float model" in note for note in subject.notes)
    other_path = tmp_path / "other.onnx"
    found = file_losses(other_path, path, subject.graph, subject.plan, subject.solution, feeds)
    assert {row.weights for row in found.layers if row.op == "Conv"} == {np.inf}
    (note,) = found.notes
    assert "without its pairs the file is" in note


def test_a_file_without_pairs() -> None:
    with pytest.raises(ModelError, match="has no Q/DQ pairs and no integer operators with constant numbers"):
        subject_of(MODEL, MODEL)


@pytest.mark.slow
def test_the_file_is_not_touched(tmp_path: Path) -> None:
    path, _ = made(tmp_path, "onnxruntime")
    before = path.read_bytes()
    subject = subject_of(MODEL, path)
    losses(subject.graph, subject.plan, subject.solution, DATA, options=WalkOptions(limit=1))
    assert path.read_bytes() == before


def test_blocks(tmp_path: Path) -> None:
    """Weights with a scale a block: the loss is that of the exported file in onnxruntime."""
    rng = np.random.default_rng(0)
    proto = model("agraph (float[N,64] x) => (float[N,32] y) { y = MatMul (x, w) }", opset=21, w=(64, 32))
    proto.graph.node[0].name = "product"
    recipe, rules = read_recipe(None, "virtual", {"mode": "weight_only", "bits": "w4a8", "block_size": 16})
    state = solve(Request(proto, recipe, rules, data=None))
    prepared, solution = state.prepared, state.solution
    path = tmp_path / "q.onnx"
    quantized = graphs.copy(prepared.graph)
    qdq.insert(quantized, prepared.plan, solution)
    graphs.save(quantized, path)
    feeds = [{"x": rng.standard_normal((8, 64)).astype(np.float32)}]
    (row,) = losses(prepared.graph, prepared.plan, solution, feeds).layers
    expected = sqnr_db(run(proto, feeds[0])["y"], run(onnx.load(str(path)), feeds[0])["y"])
    assert row.alone == row.weights == row.gathered == pytest.approx(expected, abs=0.01)
    subject = subject_of(proto, path)
    (again,) = losses(subject.graph, subject.plan, subject.solution, feeds).layers
    assert again.weights == pytest.approx(expected, abs=0.01)


def test_weights_that_rounding_moved_far_are_found(tmp_path: Path) -> None:
    """The inputs of the second layer vary in one direction: its rounded weights are far from float, and still its own.

    The file beside it has the weight before the batch norm was folded in, which lies nearer to them.
    """
    rng = np.random.default_rng(3)
    bn: dict[str, Any] = {
        "gamma": np.full(8, 1.8, np.float32),
        "beta": np.zeros(8, np.float32),
        "mean": np.zeros(8, np.float32),
        "var": np.ones(8, np.float32),
    }
    weight = rng.standard_normal((8, 8, 3, 3)).astype(np.float32)
    proto = model(
        """agraph (float[N,8,6,6] x) => (float[N,8,4,4] y) {
            c = Conv (x, w)
            y = BatchNormalization (c, gamma, beta, mean, var)
        }""",
        w=weight,
        **bn,
    )
    direction = rng.standard_normal((1, 8, 6, 6)).astype(np.float32)
    feeds = [{"x": direction * scale} for scale in np.linspace(-2, 2, 12, dtype=np.float32)]
    recipe, rules = read_recipe(None, "virtual", {"bits": "w2a8"})
    state = solve(Request(proto, recipe, rules, data=feeds))
    prepared, solution = state.prepared, state.solution
    path, source = tmp_path / "q.onnx", tmp_path / "f.onnx"
    graphs.save(quantized_graph(prepared, solution), path)
    onnx.save(proto, source)
    (folded,) = (site for site in prepared.plan.of_role("weight"))
    kept = graphs.query.constant(graphs.query.tensors_by_name(prepared.graph)[folded.tensor])
    subject = subject_of(source, path)
    (site,) = subject.plan.of_role("weight")
    found = graphs.query.constant(graphs.query.tensors_by_name(subject.graph)[site.tensor])
    assert kept is not None and found is not None
    np.testing.assert_array_equal(found, kept)
    assert not file_losses(source, path, subject.graph, subject.plan, subject.solution, feeds).notes

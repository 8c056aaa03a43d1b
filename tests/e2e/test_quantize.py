"""The front door: same bytes for the same inputs, nothing worse in silence, nothing half-written, interface kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qdq, verify
from sbonnx.errors import ModelError
from sbonnx.moments import Moments
from sbonnx.recipe.keywords import BackendForm
from sbonnx.rounding import ROUNDERS, Grid, Rounder, make_rounder
from sbonnx.spec import Array, QParams
from tests.support.models import model, residual, run


def feeds(count: int = 4, batch: int = 2) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((batch, 3, 8, 8)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_names_order_and_dynamic_axes_of_inputs_and_outputs_are_kept(backend: BackendForm, tmp_path: Path) -> None:
    """An unused input stays as well."""
    proto = residual()
    proto.graph.input.append(helper.make_tensor_value_info("unused", TensorProto.INT64, ["K"]))
    samples = [{**feed, "unused": np.zeros(3, np.int64)} for feed in feeds()]
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, samples, backend=backend, output=path)
    assert report.ok, report.problems
    made = onnx.load(str(path))
    assert list(made.graph.input) == list(proto.graph.input)
    assert list(made.graph.output) == list(proto.graph.output)


def test_original_node_names_survive() -> None:
    report = sbonnx.quantize(residual(), feeds(), backend="onnxruntime")
    assert report.quantized is not None
    names = {node.name for node in report.quantized.graph.node}
    assert {"stem", "conv1", "conv2", "add", "gap", "fc"} <= names


def test_both_nodes_of_a_pair_carry_the_width_and_one_their_origin() -> None:
    report = sbonnx.quantize(residual(), feeds(), backend="virtual", bits="w4a6")
    assert report.quantized is not None
    bits: dict[str, set[int]] = {"DequantizeLinear": set(), "QuantizeLinear": set()}
    for node in report.quantized.graph.node:
        if node.op_type in bits and not node.input[0].endswith("_mantissa"):  # a float bias, kept bit for bit
            value = {a.name: a.i for a in node.attribute}["__bits"]
            props = {entry.key: entry.value for entry in node.metadata_props}
            assert props["sbonnx.bits"] == str(value)
            assert ("sbonnx.tensor" in props) == (node.op_type == "DequantizeLinear")
            bits[node.op_type].add(value)
    assert bits == {"DequantizeLinear": {4, 6}, "QuantizeLinear": {6}}


def test_four_bit_weights_are_stored_in_four_bits() -> None:
    report = sbonnx.quantize(residual(), feeds(), backend="virtual", bits="w4a8")
    assert report.quantized is not None
    kinds = {tensor.data_type for tensor in report.quantized.graph.initializer if tensor.name.endswith("_quantized")}
    assert kinds == {TensorProto.INT4}


def test_a_model_in_memory_comes_back_in_memory_and_is_not_changed() -> None:
    proto = residual()
    before = proto.SerializeToString(deterministic=True)
    report = sbonnx.quantize(proto, feeds())
    assert proto.SerializeToString(deterministic=True) == before
    assert report.quantized is not None
    reference = run(proto, feeds()[0])["y"]
    value = run(report.quantized, feeds()[0], level="all")["y"]
    assert np.abs(reference - value).max() < 0.1 * np.abs(reference).max()


def test_the_report_is_plain_json() -> None:
    report = sbonnx.quantize(residual(), feeds())
    text = json.dumps(report.to_dict())
    assert json.loads(text)["counts"]["weights"] == 4
    assert report.layers, "the layers are profiled"


def test_outputs_that_collapse_are_a_problem_that_names_where_it_begins(tmp_path: Path) -> None:
    """A range fixed by hand that clips everything away: done, but not ok."""
    skipless = model(
        """agraph (float[N,3,8,8] x) => (float[N,10] y) {
            c = Conv (x, w)
            r1 = Relu (c)
            g = GlobalAveragePool (r1)
            f = Flatten (g)
            y = Gemm (f, v)
        }""",
        w=(8, 3, 3, 3),
        v=(8, 10),
    )
    recipe = {"BACKEND": "virtual", "RANGES": {"r1": [0.0, 1e-6]}, "BIAS_CORRECTION": "none"}
    report = sbonnx.quantize(skipless, feeds(), recipe=recipe, output=tmp_path / "q.onnx")
    assert not report.ok
    assert any("'y'" in problem for problem in report.problems)
    assert any("'r1'" in problem for problem in report.problems), "names the layer where it begins"


def test_a_model_with_nothing_to_quantize_says_so() -> None:
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { y = Exp (x) }")
    report = sbonnx.quantize(proto, [{"x": np.ones((2, 3), np.float32)}], backend="onnxruntime")
    assert not report.ok
    assert "nothing was quantized" in report.problems[0]


def test_a_file_without_quantized_tensors_is_the_model_as_it_was(tmp_path: Path) -> None:
    """Rewrites for quantization, metadata and biases that correct an error would make it larger."""
    proto = model("agraph (float[2,3] x) => (float[2,3] y) { e = Exp (x) z = Identity (e) y = Neg (z) }")
    onnx.save(proto, tmp_path / "f.onnx")
    report = sbonnx.quantize(
        tmp_path / "f.onnx", [{"x": np.ones((2, 3), np.float32)}], output=tmp_path / "q.onnx", verify=False
    )
    assert "nothing was quantized" in report.problems[0] and not report.applied
    written = onnx.load(tmp_path / "q.onnx")
    assert [node.op_type for node in written.graph.node] == ["Exp", "Identity", "Neg"] and not written.metadata_props


def test_pairs_of_tensors_with_long_names_do_not_make_the_file_larger(tmp_path: Path) -> None:
    """TensorFlow's exporters join names, and a pair repeats the name of its tensor. The float weight gets it back."""
    proto = model(
        "agraph (float[1,3,8,8] x) => (float[1,16,4,4] y) { a = Conv (x, v) b = Relu (a) y = Conv (b, w) }",
        v=(16, 3, 3, 3),
        w=(16, 16, 3, 3),
    )
    long = {name: ";".join(f"model/block_{name}/conv2d_{number}" for number in range(24)) for name in "abvw"}
    for tensor in proto.graph.initializer:
        tensor.name = long[tensor.name]
    for node in proto.graph.node:
        for names in (node.input, node.output):
            names[:] = [long.get(name, name) for name in names]
    onnx.save(proto, tmp_path / "f.onnx")
    sbonnx.quantize(tmp_path / "f.onnx", feeds(batch=1), output=tmp_path / "q.onnx", backend="virtual", verify=False)
    assert (tmp_path / "q.onnx").stat().st_size < (tmp_path / "f.onnx").stat().st_size
    graph = graphs.load(tmp_path / "q.onnx")
    qdq.strip(graph)
    assert {long["v"], long["w"]} <= set(graphs.query.tensors_by_name(graph))


def test_models_with_pairs_or_integer_ops_are_refused() -> None:
    report = sbonnx.quantize(residual(), feeds())
    assert report.quantized is not None
    with pytest.raises(ModelError, match="already"):
        sbonnx.quantize(report.quantized, feeds())
    integer = helper.make_model(
        helper.make_graph(
            [helper.make_node("ConvInteger", ["x", "w"], ["y"])],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.UINT8, [1, 1, 3, 3])],
            [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 1, 1, 1])],
            [numpy_helper.from_array(np.ones((1, 1, 3, 3), np.uint8), "w")],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
    )
    with pytest.raises(ModelError, match="already"):
        sbonnx.quantize(integer, [{"x": np.ones((1, 1, 3, 3), np.uint8)}])


def test_strip_gives_the_float_graph_back() -> None:
    """Weights within half a quantum, no Q/DQ left, interface and outputs kept."""
    proto = residual()
    for backend in ("onnxruntime", "tensorrt", "virtual"):
        report = sbonnx.quantize(proto, feeds(), backend=backend, verify=False, cpu="vnni")
        assert report.quantized is not None
        graph = graphs.load(report.quantized)
        pairs = qdq.read(graph)
        assert {pair.qparams.spec.bits for pair in pairs} == {8}
        assert qdq.strip(graph) > 0
        assert not {node.op for node in graph.nodes} & {"QuantizeLinear", "DequantizeLinear"}
        reference, stripped = run(proto, feeds()[0])["y"], run(graphs.to_proto(graph), feeds()[0])["y"]
        assert np.abs(reference - stripped).max() < 0.05 * np.abs(reference).max()


def half(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model in float16, inputs and outputs too."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    for tensor in made.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float16), tensor.name))
    for value in (*made.graph.input, *made.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT16
    del made.graph.value_info[:]
    return made


def test_float16_models_stay_float_on_onnxruntime() -> None:
    """Its CPU has no integer kernels for them: the pairs would only cost, and its rewrites lose the biases."""
    samples: list[dict[str, Any]] = [{"x": feed["x"].astype(np.float16)} for feed in feeds()]
    report = sbonnx.quantize(half(residual()), samples, backend="onnxruntime")
    assert "quantize the float32 model" in report.problems[0]


@pytest.mark.parametrize("backend", ["tensorrt", "virtual"])
def test_float16_models_get_float16_scales(backend: BackendForm, tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"x": feed["x"].astype(np.float16)} for feed in feeds()]
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(half(residual()), samples, backend=backend, output=path)
    assert report.ok, report.problems
    made = onnx.load(str(path))
    assert made.opset_import[0].version >= 19
    scales = [numpy_helper.to_array(t) for t in made.graph.initializer if t.name.endswith("_scale")]
    assert {scale.dtype for scale in scales} == {np.dtype(np.float16)}
    assert all((scale >= 2.0**-14).all() for scale in scales), "no scale is a denormal"


def test_verification_sees_a_damaged_file(tmp_path: Path) -> None:
    """The check can fail: a file whose weights were overwritten is not ok."""
    path = tmp_path / "q.onnx"
    sbonnx.quantize(residual(), feeds(), output=path)
    made = onnx.load(str(path))
    for tensor in made.graph.initializer:
        if tensor.name.startswith("wf") and tensor.name.endswith("_quantized"):
            wrong = -numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(wrong, tensor.name))
    onnx.save(made, str(path))
    comparison = verify.check(residual().SerializeToString(), path, feeds())
    assert comparison.problems()


def test_verification_refuses_another_interface(tmp_path: Path) -> None:
    path = tmp_path / "q.onnx"
    sbonnx.quantize(residual(), feeds(), output=path)
    made = onnx.load(str(path))
    made.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(made, str(path))
    with pytest.raises(ModelError, match="not those"):
        verify.check(residual().SerializeToString(), path, feeds())


def test_large_models_are_compared_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same errors as side by side, without a latency."""
    path = tmp_path / "q.onnx"
    sbonnx.quantize(residual(), feeds(), output=path, verify=False)
    source = residual().SerializeToString()
    beside = verify.compare(source, path, feeds())
    monkeypatch.setattr("sbonnx.verify.file_check.TOGETHER_BYTES", 0)
    monkeypatch.setattr("sbonnx.verify.file_check.WAITING_BYTES", 0)
    apart = verify.compare(source, path, feeds())
    assert apart.outputs == beside.outputs
    assert apart.feeds == beside.feeds == 4
    assert beside.latency_ratio is not None
    assert apart.latency_ratio is None


def test_a_model_older_than_onnxruntime_runs_is_compared_with_itself_lifted() -> None:
    """Opset 6: Gemm with its broadcast attribute."""
    weights = [
        numpy_helper.from_array(np.random.default_rng(0).standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (4, 16)), ("b", (16,)))
    ]
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "w", "b"], ["h"], broadcast=1), helper.make_node("Relu", ["h"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 4]),
            *(helper.make_tensor_value_info(tensor.name, TensorProto.FLOAT, tensor.dims) for tensor in weights),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 16])],
        weights,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 6)], ir_version=3)
    x = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    report = sbonnx.quantize(proto, [{"x": x}], backend="onnxruntime")
    assert report.ok, report.problems
    assert report.counts.weights == 1
    assert report.quantized is not None
    found = run(report.quantized, {"x": x}, level="all")["y"]
    weight, bias = (numpy_helper.to_array(tensor) for tensor in weights)
    assert np.abs(found - np.maximum(x @ weight + bias, 0)).max() < 0.1


def test_a_rounding_of_the_table_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in `ROUNDERS` is all it takes, for `quantize` and `QuantModel` alike."""

    class Careful(Rounder):
        seen: ClassVar[list[tuple[int, ...]]] = []

        def solve(self, grid: Grid, moments: Moments, qparams: QParams) -> tuple[Array, QParams]:
            self.seen.append(moments.layout.shape)
            return make_rounder("gptq", {}).solve(grid, moments, qparams)

    monkeypatch.setitem(ROUNDERS, "careful", Careful)
    recipe = {"BACKEND": "virtual", "EFFORT": "fast", "W": {"SPECIFIC": [{"conv1": ["ROUNDING.TYPE", "careful"]}]}}
    report = sbonnx.quantize(residual(), feeds(), recipe=recipe, verify=False)
    assert report.quantized is not None
    held = {t.name: numpy_helper.to_array(t) for t in report.quantized.graph.initializer}
    assert Careful.seen == [held["w1_quantized"].shape]
    with sbonnx.QuantModel(residual(), recipe) as made:
        made.prepare_calibration()
        for feed in feeds():
            made(feed)
        solution = made.calc_qparams()
        assert {gain.rounding for gain in solution.gains.values()} == {"careful"}
        np.testing.assert_array_equal(solution.codes["w1"], held["w1_quantized"])


def test_quant_model_without_data_notes_unmeasured_steps() -> None:
    """Weights alone need no data; a rounding and a scaling that would look at some are told, once."""
    wishes: dict[str, Any] = {"MODE": "weight_only", "w_bit": 4, "awq": True}
    text = "agraph (float[n,64] x) => (float[n,8] y) { y = MatMul (x, w) }"
    with sbonnx.QuantModel(model(text, w=(64, 8)), None, backend="onnxruntime", **wishes) as quant:
        for _ in range(2):
            solution = quant.calc_qparams()
            assert any("without second moments of their inputs" in note for note in solution.notes)
            assert [str(one) for one in quant.prepared.refusals if "EQUALIZE.AWQ" in str(one)] == [
                "scale by activations: not at EQUALIZE.AWQ: input activations are measured on data"
            ]

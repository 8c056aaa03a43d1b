"""Files for the QNN provider: node units everywhere, types and axes that it takes, and rectifiers without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantType
from onnxruntime.quantization import quantize as ort_quantize
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

from sbonnx import graph as graphs
from sbonnx import qdq, quantize
from sbonnx.errors import RecipeError
from sbonnx.linting import lint
from sbonnx.spec import Array
from sbonnx.verify import session
from tests.backends.qnn.graphs import feeds_for, parsed
from tests.support.values import some

RESIDUAL = """g (float[N,8,8,8] x) => (float[N,8,8,8] y, float[N,10] z) {
    a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w0)
    b = Clip(a, low, high)
    c = Mul(b, k)
    d = ConvTranspose<kernel_shape=[1,1]>(c, w1)
    e = Add(d, b)
    y = Sigmoid(e)
    f = GlobalAveragePool(e)
    g = Flatten(f)
    z = MatMul(g, w2)
}"""
WEIGHTS = {"w0": (8, 8, 3, 3), "w1": (8, 8, 1, 1), "w2": (8, 10), "k": (8, 1, 1)}


def residual() -> onnx.ModelProto:
    return parsed(RESIDUAL, WEIGHTS, low=np.float32(0), high=np.float32(6))


def initializers(model: onnx.ModelProto) -> dict[str, Array]:
    return {value.name: numpy_helper.to_array(value) for value in model.graph.initializer}


def units(model: onnx.ModelProto) -> list[str]:
    """Return the ops with an input that no DequantizeLinear writes, or an output that not only QuantizeLinear reads."""
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    floats = {value.name for value in model.graph.initializer if value.data_type == onnx.TensorProto.FLOAT}
    broken = []
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            continue
        readers = [user.op_type for user in model.graph.node if node.output[0] in user.input]
        read = node.input[:1] if node.op_type == "Clip" else node.input  # its bounds are attributes of the integer op
        inputs = [name for name in read if name in makers or name in floats]
        alone = [name for name in inputs if makers.get(name) != "DequantizeLinear"]
        if alone or readers != ["QuantizeLinear"]:
            broken.append(node.name)
    return broken


def quantized(model: onnx.ModelProto, **settings: Any) -> tuple[onnx.ModelProto, Any]:
    report = quantize(model, feeds_for(model), backend="qnn", **settings)
    assert not report.problems
    assert report.quantized is not None
    return report.quantized, report


@pytest.mark.parametrize("bits", ["w8a8", "w8a16"])
def test_every_op_is_a_node_unit(bits: str) -> None:
    model, report = quantized(residual(), bits=bits)
    assert units(model) == []
    assert [value.name for value in model.graph.output] == ["y", "z"]
    assert min(output.sqnr_db for output in some(report.metrics).outputs) > {"w8a8": 25, "w8a16": 35}[bits]


def test_types_and_axes() -> None:
    model, _ = quantized(residual(), bits="w8a16")
    values = initializers(model)
    axes = {node.input[0]: {a.name: a.i for a in node.attribute}.get("axis") for node in model.graph.node}
    assert values["x_zero_point"].dtype == np.uint16
    assert values["k_quantized"].dtype == np.uint16, "an operand has the type of the activations"
    for weight, axis in (("w0", 0), ("w1", 1)):
        assert values[f"{weight}_quantized"].dtype == np.int8
        assert values[f"{weight}_scale"].shape == (8,)
        assert axes[f"{weight}_quantized"] == axis
    assert values["w2_scale"].shape == (), "the provider takes no scales per channel at MatMul"
    assert values["y_scale"] == 2.0**-16, "prescribed for Sigmoid"
    assert values["y_zero_point"] == 0


def test_rectifiers_between_op_and_pair_have_no_effect_or_are_units() -> None:
    model, _ = quantized(residual())
    assert "Clip" not in {node.op_type for node in model.graph.node}
    other, _ = quantized(residual(), RANGES={"b": [-2, 7]})
    assert "Clip" in {node.op_type for node in other.graph.node}
    assert units(other) == []


@pytest.mark.parametrize("top", [0.5, 6.0])
def test_a_removed_rectifier_is_restored_with_its_pairs(top: float, tmp_path: Path) -> None:
    text = """g (float[N,8,8,8] x) => (float[N,8,8,8] y) {
        a = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w0)
        b = Clip(a, low, high)
        c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(b, w1)
        d = Relu(c)
        y = ConvTranspose<kernel_shape=[1,1]>(d, w2)
    }"""
    weights: dict[str, tuple[int, ...]] = {"w0": (8, 8, 3, 3), "w1": (8, 8, 3, 3), "w2": (8, 8, 1, 1)}
    floats = parsed(text, weights, low=0.0, high=top)
    model, _ = quantized(floats)
    assert not {"Relu", "Clip"} & {node.op_type for node in model.graph.node}
    graph = graphs.load(model)
    qdq.strip(graph)
    graphs.save(graph, tmp_path / "restored.onnx")
    restored = onnx.load(str(tmp_path / "restored.onnx"))
    assert [node.op_type for node in restored.graph.node] == ["Conv", "Clip", "Conv", "Relu", "ConvTranspose"]
    (feed, *_) = feeds_for(floats)
    wanted, found = (session(one.SerializeToString()).run(None, feed)[0] for one in (floats, restored))
    assert np.square(wanted - found).sum() < 1e-2 * np.square(wanted).sum()


def test_excluded_nodes_stay_float_and_outputs_can() -> None:
    model, _ = quantized(residual(), EXCLUDE=["tensor:y"])
    (sigmoid,) = (node for node in model.graph.node if node.op_type == "Sigmoid")
    assert list(sigmoid.output) == ["y"]


ENDS = """g (float[N,8,8,8] x) => (float[N,8,8,8] y, float[N,8,8,8] z) {
    a = Transpose<perm=[0,1,3,2]>(x)
    b = Conv<kernel_shape=[1,1]>(a, w0)
    c = Conv<kernel_shape=[1,1]>(b, w1)
    d = Conv<kernel_shape=[1,1]>(c, w2)
    y = Relu(d)
    z = Sigmoid(c)
}"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("ends", "floats"),
    [
        ("both", set()),
        ("inputs", {"d", "y", "z"}),
        ("outputs", {"a"}),
        ("none", {"a", "d", "y", "z"}),
    ],
)
def test_inputs_and_outputs_of_the_graph_are_quantized_on_request(ends: str, floats: set[str]) -> None:
    source = parsed(ENDS, {"w0": (8, 8, 1, 1), "w1": (8, 8, 1, 1), "w2": (8, 8, 1, 1)})
    model, report = quantized(source, quantize_io=ends)
    quantizers = {node.input[0] for node in model.graph.node if node.op_type == "QuantizeLinear"}
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    for name, quantizes in (("x", ends in ("both", "inputs")), ("y", ends in ("both", "outputs"))):
        assert (name in quantizers or makers.get(name) == "DequantizeLinear") is quantizes, name
    assert {finding.node for finding in lint(model, "qnn")} == floats - {"y"}  # floats on both sides
    assert set(units(model)) == floats - {"a"}  # which does not see inputs of the graph
    assert {refusal.where for refusal in report.refusals} <= floats


def test_other_backends_write_float_outputs() -> None:
    source = parsed(ENDS, {"w0": (8, 8, 1, 1), "w1": (8, 8, 1, 1), "w2": (8, 8, 1, 1)})
    with pytest.raises(RecipeError, match="quantize_io= must be inputs or none for all backends but"):
        quantize(source, feeds_for(source), quantize_io="both")
    report = quantize(source, feeds_for(source), kernel_costs="none", quantize_io="none", verify=False)
    assert "x" not in {site.tensor for site in report.sites}


def test_the_quantizer_of_onnxruntime_quantizes_inputs_and_outputs(tmp_path: Path) -> None:
    """The default of QUANTIZE_IO is what its tool for QNN does."""
    model, path, out = residual(), tmp_path / "float.onnx", tmp_path / "ort.onnx"
    onnx.save(model, path)
    ort_quantize(str(path), str(out), get_qnn_qdq_config(str(path), _Reader(feeds_for(model))))
    for theirs in (onnx.load(str(out)), quantized(model)[0]):
        makers = {name: node.op_type for node in theirs.graph.node for name in node.output}
        assert {makers["y"], makers["z"]} == {"DequantizeLinear"}
        assert [node.op_type for node in theirs.graph.node if "x" in node.input] == ["QuantizeLinear"]


def test_wide_activations_are_not_summed_in_int32() -> None:
    model = parsed("g (float[N,2048] x) => (float[N,8] y) { y = Gemm(x, w, b) }", {"w": (2048, 8)}, b=np.ones(8))
    wide, report = quantized(model, bits="w8a16")
    assert units(wide) == []
    assert not report.refusals


def test_a_prescribed_range_is_not_that_of_a_concat() -> None:
    text = """g (float[N,8,8,8] x) => (float[N,16,8,8] y) {
        a = Conv<kernel_shape=[1,1]>(x, w)
        b = Sigmoid(a)
        y = Concat<axis=1>(a, b)
    }"""
    model, report = quantized(parsed(text, {"w": (8, 8, 1, 1)}), bits="w8a16")
    values = initializers(model)
    assert values["b_scale"] == 2.0**-16 != values["y_scale"]
    assert some(report.metrics).outputs[0].sqnr_db > 35


def test_matrix_products_have_one_scale_and_a_zero_point_by_default() -> None:
    text = "g (float[N,32] x) => (float[N,8] y) { y = MatMul(x, w) }"
    kinds = [
        initializers(quantized(parsed(text, {"w": (32, 8)}), **settings)[0])["w_quantized"].dtype
        for settings in ({}, {"w_qscheme": "per-channel-symmetric"})
    ]
    assert kinds == [np.uint8, np.int8]


class _Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self.feeds = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self.feeds, None)


def test_no_less_accurate_than_the_quantizer_of_onnxruntime(tmp_path: Any) -> None:
    model, path, out = residual(), tmp_path / "float.onnx", tmp_path / "ort.onnx"
    onnx.save(model, path)
    feeds = feeds_for(model)
    config = get_qnn_qdq_config(str(path), _Reader(feeds), weight_type=QuantType.QInt8, per_channel=True)
    ort_quantize(str(path), str(out), config)
    ours, _ = quantized(model)
    wanted = [session(path).run(None, feed) for feed in feeds]

    def noise(source: Any) -> Array:
        run = session(source)
        rows = [
            [np.square(u - v).sum() for u, v in zip(run.run(None, feed), want, strict=True)]
            for feed, want in zip(feeds, wanted, strict=True)
        ]
        return np.asarray(np.sum(rows, axis=0))

    assert (noise(ours.SerializeToString()) <= 1.05 * noise(out)).all()


def test_a_transformer_is_in_integers_from_table_to_output() -> None:
    """The HTP refuses files with a float table or the float ops of a GELU, and leaves int8 scales of norms out."""
    text = """g (int64[1,8] ids) => (float[1,8,16] y) {
        a = Gather(table, ids)
        n = LayerNormalization(a, gain, shift)
        b = MatMul(n, w0)
        c = Div(b, root)
        d = Erf(c)
        e = Add(d, one)
        f = Mul(b, e)
        h = Mul(f, half)
        y = MatMul(h, w1)
    }"""
    weights: dict[str, tuple[int, ...]] = {"table": (50, 16), "gain": (16,), "shift": (16,), "w0": (16, 32)}
    constants = {"root": 2**0.5, "one": 1.0, "half": 0.5}
    source = parsed(text, {**weights, "w1": (32, 16)}, **constants)
    rng = np.random.default_rng(2)
    report = quantize(source, [{"ids": rng.integers(0, 50, (1, 8))} for _ in range(8)], backend="qnn")
    model = some(report.quantized)
    assert not report.problems
    assert lint(model, "qnn") == []
    ops = [node.op_type for node in model.graph.node if node.op_type not in ("QuantizeLinear", "DequantizeLinear")]
    assert ops == ["Gather", "LayerNormalization", "MatMul", "Gelu", "MatMul"]
    values = initializers(model)
    assert {values[f"{name}_quantized"].dtype.name for name in ("table", "gain")} == {"uint8"}
    (gather,) = (node for node in model.graph.node if node.op_type == "Gather")
    pairs = {node.output[0]: node.input[1:] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    (behind,) = (node for node in model.graph.node if gather.output[0] in node.input)
    assert list(pairs[gather.input[0]]) == list(behind.input[1:]), "rows of a table have the scale behind the Gather"


def test_tensors_that_hold_infinite_numbers_stay_float() -> None:
    """As in decoders of pitch, which pad logarithms with -inf; a Cast reads the rows of a table."""
    text = """g (float[N,8] x) => (float[N,4] y) {
        a = MatMul(x, w)
        ends = Constant<value_ints=[0,1,0,1]>()
        b = Pad(a, ends, infinity)
        best = ArgMax<axis=1>(b)
        row = Gather(table, best)
        halved = Cast<to=10>(row)
        axes = Constant<value_ints=[1]>()
        c = Squeeze(halved, axes)
        d = Cast<to=1>(c)
        r = Relu(a)
        e = MatMul(r, v)
        y = Add(e, d)
    }"""
    proto = parsed(text, {"w": (8, 8), "v": (8, 4), "table": (10, 4)}, infinity=np.float32(-np.inf))
    report = quantize(proto, feeds_for(proto), backend="qnn", verify=False)
    assert {one.where for one in report.refusals if one.code == "infinite-values"} >= {"b", "best"}
    assert {"w", "v"} <= {site.tensor for site in report.sites if site.role == "weight"}

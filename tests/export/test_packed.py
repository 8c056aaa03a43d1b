"""Low bits on onnxruntime: narrow in the file, bytes and integer kernels where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, numpy_helper

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.export.packed import WORTH, pack
from sbonnx.graph import Node, query
from sbonnx.ops import DEQUANTIZE, INTEGER_OPS
from sbonnx.planning import Solution
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared
from tests.support.models import model, run
from tests.support.writing import kernels, ops, prepared, solved, sqnr, written

NET = """
agraph (float[N,16,12,12] x) => (float[N,10] y) {
    c1 = Conv <pads = [1,1,1,1]> (x, w1, b1)
    r1 = Relu (c1)
    c2 = Conv <pads = [1,1,1,1]> (r1, w2, b2)
    a = Add (c2, r1)
    r2 = Relu (a)
    g = GlobalAveragePool (r2)
    f = Flatten (g)
    y = Gemm <transB = 1> (f, wf, bf)
}"""
RNG = np.random.default_rng(0)
DATA = [{"x": RNG.standard_normal((2, 16, 12, 12)).astype(np.float32)} for _ in range(4)]


def net(opset: int = 17) -> onnx.ModelProto:
    shapes: dict[str, Any] = {"w1": (32, 16, 3, 3), "b1": 32, "w2": (32, 32, 3, 3), "b2": 32, "wf": (10, 32), "bf": 10}
    return model(NET, opset=opset, **shapes)


def made(**wishes: object) -> tuple[Prepared, Solution, onnx.ModelProto]:
    """What was planned, the numbers, and the file."""
    ready = prepared(net(), **{"w.rounding.type": "nearest", "kernel_costs": "none", "cpu": "vnni", **wishes})
    solution = solved(ready, DATA)
    return ready, solution, written(ready, solution)[0]


@pytest.mark.parametrize(
    "scheme",
    ["per-channel-symmetric", pytest.param("per-channel-affine", id="affine weights"), "per-tensor-symmetric"],
)
@pytest.mark.parametrize("bits", ["w2a8", "w3a8", "w4a8", "w5a8", "w7a8", "w4a4", "w8a5"])
def test_integer_kernels_at_every_width(bits: str, scheme: str) -> None:
    _, _, proto = made(bits=bits, w_qscheme=scheme)
    found = kernels(proto)
    assert found["QLinearConv"] == 2 and found["Conv"] + found["FusedConv"] + found["Cast"] == 0, found
    off, full = (run(proto, DATA[0], level=level)["y"] for level in ("off", "all"))
    assert sqnr(off, full) > 30  # a code of the last layers may round the other way


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
def test_the_file_holds_the_codes_in_few_bits(bits: int) -> None:
    ready, solution, proto = made(bits=f"w{bits}a8", w_qscheme="per-channel-symmetric")
    stored = {tensor.name: tensor for tensor in proto.graph.initializer if "_packed" in tensor.name}
    assert len(stored) == (2 if bits <= 4 else 0)  # the classifier's 320 weights are not worth a Cast
    assert all(tensor.data_type == TensorProto.INT4 for tensor in stored.values())
    assert sum(len(tensor.raw_data) for tensor in stored.values()) == (
        0 if bits > 4 else (32 * 16 * 9 + 32 * 32 * 9) // 2
    )
    pairs = {pair.source: pair for pair in qdq.read(graphs.load(proto)) if pair.codes}
    for site in ready.plan.of_role("weight"):
        (pair,) = (pair for name, pair in pairs.items() if name.startswith(site.tensor))
        values = {tensor.name: tensor for tensor in proto.graph.initializer}[pair.source]
        wanted = solution.codes[site.key].astype(np.int8)
        np.testing.assert_array_equal(numpy_helper.to_array(values).astype(np.int8), wanted)
        assert pair.qparams.spec.bits == bits


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_zero_points_go_into_codes_and_out_of_what_is_stored(bits: int, form: str) -> None:
    ready, solution, proto = made(bits=f"w{bits}a8", format=form)
    stored = [tensor for tensor in proto.graph.initializer if "_packed" in tensor.name]
    assert [tensor.data_type for tensor in stored] == [TensorProto.INT4] * (2 if bits <= 4 else 0)
    graph, readers = graphs.load(proto), DEQUANTIZE | INTEGER_OPS
    read = [query.unpacked(tensor) for node in graph.nodes if node.op in readers for tensor in node.inputs]
    for site in (site for site in ready.plan.of_role("weight") if site.tensor in ("w1", "w2")):
        zeros = solution.qparams[site.key].zero_point
        assert zeros.any()
        about_zero = solution.codes[site.key].astype(np.int8) - zeros.reshape(-1, 1, 1, 1)
        assert any(one is not None and np.array_equal(one, about_zero) for one in read), site.key


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("bits", [2, 4, 6])
def test_what_is_read_back_has_the_width_and_the_values(bits: int, form: str) -> None:
    ready, solution, proto = made(bits=f"w{bits}a8", format=form)
    graph = graphs.load(proto)
    qdq.unfold(graph)
    pairs = {pair.node: pair for pair in qdq.read(graph) if pair.codes}
    nodes = query.node_by_name(graph)
    values = {name: values_of(nodes[name]) for name in pairs}
    for site in (site for site in ready.plan.of_role("weight") if site.tensor in ("w1", "w2")):
        wanted = solution.qparams[site.key].dequantize(solution.codes[site.key])
        (name,) = (name for name, found in values.items() if np.array_equal(found, wanted))
        qparams = pairs[name].qparams
        if form == "qdq":  # integer ops say no width
            assert qparams.spec.bits == bits and not qparams.spec.symmetric
        np.testing.assert_array_equal(qparams.dequantize(qparams.quantize(wanted)), wanted)


def values_of(node: Node) -> Array:
    """What a DequantizeLinear of constants gives."""
    codes, scale, zero = (query.unpacked(tensor) for tensor in node.inputs)
    assert codes is not None and scale is not None and zero is not None
    shape = [-1] + [1] * (codes.ndim - 1) if scale.ndim else []
    steps = (codes.astype(np.int32) - zero.astype(np.int32).reshape(shape)).astype(np.float32)
    return np.asarray(steps * scale.reshape(shape))


def test_strip_finds_the_weights_behind_a_cast() -> None:
    ready, solution, proto = made(bits="w4a4")
    graph = graphs.load(proto)
    assert qdq.strip(graph)
    assert not any(node.op in ("Cast", "Clip", "QuantizeLinear", "DequantizeLinear") for node in graph.nodes)
    assert sorted(node.op for node in graph.nodes) == sorted(node.op for node in ready.graph.nodes)
    weight = query.constant(query.tensors_by_name(graph)["w2"])
    assert weight is not None and len(np.unique(weight[0])) <= 16
    assert "w2" in solution.codes


@pytest.mark.parametrize("bits", ["w8a16", "w4a16"])
def test_activations_of_two_bytes_run_in_float(bits: str) -> None:
    _, _, proto = made(bits=bits)
    found = kernels(proto)
    assert found["QLinearConv"] == 0 and found["Conv"] + found["FusedConv"] == 2
    off, full = (run(proto, DATA[0], level=level)["y"] for level in ("off", "all"))
    assert sqnr(off, full) > 60


def test_integer_ops_read_packed_codes_too() -> None:
    _, _, proto = made(bits="w4a8", format="qoperator")
    found = ops(proto)
    assert found["QLinearConv"] == 2 and found["Sub"] == 2 and found["Cast"] == 4
    assert kernels(proto)["Cast"] == 0
    np.testing.assert_array_equal(run(proto, DATA[0])["y"], run(proto, DATA[0], level="all")["y"])


@pytest.mark.parametrize("bits", [7, 8])
def test_zero_points_stay_where_codes_about_0_would_be_too_large(bits: int) -> None:
    _, solution, proto = made(bits=f"w{bits}a8", w_qscheme="per-channel-affine")
    zeros = [numpy_helper.to_array(one) for one in proto.graph.initializer if one.name == "w2_zero_point"]
    np.testing.assert_array_equal(zeros[0], solution.qparams["w2"].zero_point)
    assert zeros[0].any()


def test_newer_files_hold_two_bits_in_two() -> None:
    graph = graphs.load(dequantized(RNG.integers(-2, 2, (64, 64)).astype(np.int8), 25))
    assert pack(graph) == 1
    (cast,) = (node for node in graph.nodes if node.op == "Cast")
    assert str(query.dtype(cast.inputs[0])) == "int2"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scheme", ["auto", "per-channel-symmetric", "per-tensor-symmetric"])
def test_two_bits_of_a_recipe_are_two_bits_in_newer_files(scheme: str, tmp_path: Path) -> None:
    """Codes about zero points per channel, the default below 8 bits, are centred first. onnxruntime runs them."""
    sizes = {}
    for opset in (21, 25):
        path = tmp_path / f"{opset}.onnx"
        source = net(opset)
        source.ir_version = 10 if opset == 21 else 11
        settings = {"bits": "w2a8", "w_qscheme": scheme, "kernel_costs": "none", "cpu": "vnni"}
        report = sbonnx.quantize(source, DATA, output=path, verify=False, **settings)  # type: ignore[arg-type]
        assert report.ok
        kinds = {one.name: one.data_type for one in onnx.load(path).graph.initializer if len(one.dims) == 4}
        wide = {name: kind for name, kind in kinds.items() if "middles" not in name}
        assert set(wide.values()) == {TensorProto.INT4 if opset == 21 else TensorProto.INT2}
        sizes[opset] = sum(one.ByteSize() for one in onnx.load(path).graph.initializer)
        floats, found = (run(one, DATA[0], level="off")["y"] for one in (source, str(path)))
        assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - found) ** 2)) > 5
    assert sizes[25] < 0.7 * sizes[21]


def dequantized(codes: Array, opset: int) -> onnx.ModelProto:
    """y = x @ DequantizeLinear(codes)."""
    text = f"agraph (float[N,{codes.shape[0]}] x) => (float[N,{codes.shape[1]}] y) {{"
    text += "w = DequantizeLinear (q, s) y = MatMul (x, w) }"
    return model(text, opset=opset, q=codes, s=np.array(0.1, np.float32))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(low=st.integers(-12, 0), high=st.integers(0, 12), unsigned=st.booleans(), rows=st.integers(1, 70))
def test_packing_changes_no_number(low: int, high: int, unsigned: bool, rows: int) -> None:
    codes = RNG.integers(low, high + 1, (rows, 32)).astype(np.int8)
    if unsigned:
        codes = (codes - low).astype(np.uint8)
    proto = dequantized(codes, 21)
    graph = graphs.load(proto)
    limits = ml_dtypes.iinfo(ml_dtypes.uint4 if unsigned else ml_dtypes.int4)  # type: ignore[no-untyped-call]
    fits = limits.min <= codes.min() and codes.max() <= limits.max
    fits = codes.size >= WORTH and (fits or np.ptp(codes.astype(int), axis=0).max() <= limits.max - limits.min)
    assert pack(graph) == int(fits)
    after = graphs.to_proto(graph)
    onnx.checker.check_model(after, full_check=True)
    x = {"x": RNG.standard_normal((3, rows)).astype(np.float32)}
    np.testing.assert_array_equal(run(proto, x)["y"], run(after, x)["y"])

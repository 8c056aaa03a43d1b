"""Weights of every type and in every form of storage come back bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from sbonnx.graph import Constant, load, save, serialize, to_proto
from sbonnx.graph.model import Graph
from sbonnx.graph.query import constant, dtype, tensors_by_name
from sbonnx.spec import Array
from tests.support.models import model, run

TYPES = {
    name: value
    for name, value in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING") and value in helper.get_all_tensor_dtypes()
}


def holding(tensor: TensorProto, opset: int | None = None) -> ModelProto:
    """A model whose only weight is `tensor`, passed on to its output."""
    newest = onnx.defs.onnx_opset_version() if opset is None else opset
    out = helper.make_tensor_value_info("y", tensor.data_type, list(tensor.dims))
    graph = helper.make_graph([helper.make_node("Identity", [tensor.name], ["y"])], "g", [], [out], [tensor])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", newest)])


WIDTHS = {"float4_e2m1fn": 4, "float6_e2m3fn": 6, "float6_e3m2fn": 6, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2}


def bits(kind: int, shape: tuple[int, ...]) -> Array:
    """Every bit pattern a type has, as often as the shape wants, as an array of that type."""
    element = np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    count = int(np.prod(shape))
    if element == np.bool_:
        flags: Array = np.arange(count) % 3 == 0
        return flags.reshape(shape)
    if element.itemsize == 1:
        width = WIDTHS.get(element.name, 8)
        codes = np.arange(count) % (1 << width)
        if element.name in ("int4", "uint4", "int2", "uint2"):
            signed = codes - (1 << width - 1) if element.name.startswith("i") else codes
            return np.asarray(signed.astype(element).reshape(shape))
        small: Array = codes.astype(np.uint8).view(element)
        return small.reshape(shape)
    noise = np.random.default_rng(0).bytes(count * element.itemsize)
    patterns: Array = np.frombuffer(noise, element)
    return patterns.reshape(shape)


def raw(values: Array) -> bytes:
    packed: bytes = numpy_helper.from_array(np.ascontiguousarray(values)).raw_data
    return packed


@pytest.mark.sampled
@pytest.mark.parametrize("shape", [(7,), (), (0,), (3, 0, 2), (601, 9)], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_bit_exact(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = bits(TYPES[name], shape)
    source = holding(numpy_helper.from_array(values, "w"))
    graph = load(source)
    weight = tensors_by_name(graph)["w"]
    assert weight.shape == shape and dtype(weight) == values.dtype
    read = constant(weight)
    assert read is not None and read.dtype == values.dtype and raw(read) == raw(values)
    for external_over in (1 << 40, 0):
        path = tmp_path / f"{external_over}.onnx"
        save(graph, path, external_over=external_over)
        again = onnx.load(path).graph.initializer[0]
        assert raw(numpy_helper.to_array(again)) == raw(values) and again.data_type == TYPES[name]
        assert tuple(again.dims) == shape


FIELDS: dict[str, tuple[int, list[Any]]] = {
    "float in float_data": (TensorProto.FLOAT, [1.5, -2.25, 3e-30]),
    "double in double_data": (TensorProto.DOUBLE, [1.5, -2.25, 1e-300]),
    "int64 in int64_data": (TensorProto.INT64, [1, -2, 2**62]),
    "uint64 in uint64_data": (TensorProto.UINT64, [1, 2, 2**63 + 1]),
    "int32 in int32_data": (TensorProto.INT32, [1, -2, 3]),
    "int8 in int32_data": (TensorProto.INT8, [1, -128, 127]),
    "uint16 in int32_data": (TensorProto.UINT16, [1, 65535, 127]),
    "bool in int32_data": (TensorProto.BOOL, [1, 0, 1]),
    "float16 in int32_data": (TensorProto.FLOAT16, [1.5, -2.25, 6e-8]),
    "bfloat16 in int32_data": (TensorProto.BFLOAT16, [1.5, -2.25, 1e-38]),
    "complex64 in float_data": (TensorProto.COMPLEX64, [1 + 2j, -1j, 0.5]),
}


@pytest.mark.parametrize("repeats", [1, 700])
@pytest.mark.parametrize("form", FIELDS)
def test_values_outside_raw_data(form: str, repeats: int, tmp_path: Path) -> None:
    kind, few = FIELDS[form]
    tensor = helper.make_tensor("w", kind, [len(few) * repeats], few * repeats)
    assert not tensor.raw_data
    want = numpy_helper.to_array(tensor)
    path = tmp_path / "m.onnx"
    path.write_bytes(holding(tensor).SerializeToString())
    for graph in (load(path), load(holding(tensor))):
        got = constant(tensors_by_name(graph)["w"])
        assert got is not None and got.dtype == want.dtype and got.tobytes() == want.tobytes()
        assert numpy_helper.to_array(to_proto(graph).graph.initializer[0]).tobytes() == want.tobytes()


def test_strings_keep_their_bytes() -> None:
    values = [b"a", "grün".encode(), b"", b"tail\0", b"\xff\xfe"]
    tensor = TensorProto(name="w", data_type=TensorProto.STRING, dims=[5], string_data=values)
    graph = load(holding(tensor, opset=17))
    assert list(to_proto(graph).graph.initializer[0].string_data) == values
    read = constant(tensors_by_name(graph)["w"])
    assert read is not None and read.tolist() == ["a", "grün", "", "tail\0", b"\xff\xfe"]


def test_constants_are_read_only_views() -> None:
    source = model("agraph (float[N,64] x) => (float[N,64] y) { h = MatMul(x, w)  y = Add(h, b) }", w=(64, 64), b=64)
    graph = load(source)
    for name in ("w", "b"):
        values = constant(tensors_by_name(graph)[name])
        assert values is not None
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1
        np.testing.assert_array_equal(values, numpy_helper.to_array(source.graph.initializer[0 if name == "w" else 1]))


def in_a_session(graph: Graph, feeds: dict[str, Array]) -> dict[str, Array]:
    """Outputs from what `serialize` gives, as the calibration does it."""
    import onnxruntime as ort

    content, weights = serialize(graph)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    values = [ort.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.float16])
def test_a_session_gets_large_weights_beside_the_model(kind: type, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weight: Array = rng.standard_normal((256, 256)).astype(kind)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    ends = [helper.make_tensor_value_info(name, element, ["N", 256]) for name in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="m")
    source = helper.make_model(
        helper.make_graph([node], "a" * 7, ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(source.SerializeToString())
    graph = load(path)
    content, weights = serialize(graph)
    assert len(content) < 10_000 and list(weights) == ["w"]
    assert weights["w"].flags.aligned
    x: Array = rng.standard_normal((3, 256)).astype(kind)
    np.testing.assert_allclose(in_a_session(graph, {"x": x})["y"], run(source, {"x": x}, level="all")["y"], rtol=1e-3)


BRANCHES = """agraph (bool c, float[N,256] x) => (float[N,256] y) {
    y = If (c) <
        then_branch = t () => (float[N,256] p) { q = MatMul(x, wt)  p = Add(q, shared) },
        else_branch = e () => (float[N,256] r) { s = Sub(x, shared)  r = MatMul(s, we) }>
}"""


@pytest.mark.parametrize("flag", [True, False])
def test_large_weights_of_branches(flag: bool, tmp_path: Path) -> None:
    """Inside a branch where one reads them, outside where both do; in a session, a file and a data file."""
    source = model(BRANCHES, wt=(256, 256), we=(256, 256), shared=(300, 256))
    graph = load(source)
    feeds = {"c": np.array(flag), "x": np.random.default_rng(1).standard_normal((300, 256)).astype(np.float32)}
    want = run(source, feeds)["y"]
    written = to_proto(graph)
    assert [tensor.name for tensor in written.graph.initializer] == ["shared"]
    assert [tensor.name for tensor in written.graph.node[0].attribute[0].g.initializer] == ["wt"]
    np.testing.assert_allclose(run(written, feeds)["y"], want, rtol=1e-5, atol=1e-4)
    for external_over in (1 << 40, 0):
        path = tmp_path / f"{external_over}.onnx"
        save(graph, path, external_over=external_over)
        np.testing.assert_allclose(run(str(path), feeds)["y"], want, rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(run(to_proto(load(path)), feeds)["y"], want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(in_a_session(graph, feeds)["y"], want, rtol=1e-5, atol=1e-4)


def test_types_that_numpy_does_not_have_stand_inside_the_model() -> None:
    for name in ("BFLOAT16", "INT4", "FLOAT8E4M3FN"):
        values = bits(TYPES[name], (400, 400))
        content, weights = serialize(load(holding(numpy_helper.from_array(values, "w"), opset=21)))
        assert not weights
        held = ModelProto.FromString(content).graph.initializer[0]
        assert raw(numpy_helper.to_array(held)) == raw(values)


def test_a_constant_that_is_an_output() -> None:
    source = model("agraph (float[2] x) => (float[2] y, float[3] w) { y = Relu(x) }", w=3)
    graph = load(source)
    assert isinstance(graph.outputs[1], Constant)
    feeds = {"x": np.ones(2, np.float32)}
    np.testing.assert_array_equal(run(to_proto(graph), feeds)["w"], run(source, feeds)["w"])

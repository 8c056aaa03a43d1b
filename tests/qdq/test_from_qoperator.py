"""Integer operators as float ones between pairs: each against onnxruntime's own kernel, and files of its tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.qdq.integer_products import CONCAT, CONTRIBUTED, OPERATORS, UNKNOWN
from sbonnx.spec import Array
from tests.support.models import residual, run

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "QLinearConv": {"pads": [1, 1, 1, 1]},
    "QGemm": {"transB": 1, "alpha": 1.0},
    "QLinearLeakyRelu": {"alpha": 0.2},
    "QLinearSoftmax": {"axis": 1, "opset": 13},
    "QLinearAveragePool": {"kernel_shape": [2, 2], "channels_last": 0},
    "QLinearGlobalAveragePool": {"channels_last": 0},
}
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "QLinearConv": ((2, 4, 6, 6), (5, 4, 3, 3)),
    "QLinearMatMul": ((2, 4, 6), (2, 6, 5)),
    "QGemm": ((3, 8), (5, 8)),
}
IMAGE = (2, 4, 6, 6)


class Single:
    """One integer operator with uint8 activations, and int8 weights where it has some."""

    def __init__(self, op: str, weight: str = "uint8", per_channel: bool = False, **attributes: Any) -> None:
        self.rng = np.random.default_rng(0)
        self.stored: list[onnx.TensorProto] = []
        self.layout = OPERATORS[op]
        inputs = [""] * (self.layout.out + 2)
        for number, (codes, scale, zero) in enumerate(self.layout.data):
            second = number == 1 and op in SHAPES
            shape = SHAPES.get(op, (IMAGE, IMAGE))[number]
            kind = weight if second else "uint8"
            channels = (shape[0],) if second and per_channel else ()
            inputs[codes] = "x" if number == 0 else self.keep(self.codes(shape, kind))
            inputs[scale] = self.keep(self.rng.uniform(0.01, 0.03, channels).astype(np.float32))
            inputs[zero] = self.keep(np.full(channels, 0 if kind == "int8" else 120, kind))
        for at in self.layout.passed:
            inputs[at] = self.keep(self.rng.integers(0, 2, IMAGE).astype(bool))
        inputs[self.layout.out] = self.keep(np.float32(1 / 256 if op in ("QLinearSoftmax", "QLinearSigmoid") else 0.05))
        inputs[self.layout.out + 1] = self.keep(np.uint8(0 if op in ("QLinearSoftmax", "QLinearSigmoid") else 110))
        if self.layout.bias is not None:
            inputs += [""] * (self.layout.bias + 1 - len(inputs))
            inputs[self.layout.bias] = self.keep(self.rng.integers(-2000, 2000, 5).astype(np.int32))
        domain = "com.microsoft" if op in CONTRIBUTED else ""
        node = helper.make_node(op, inputs, ["y"], "node", domain=domain, **{**ATTRIBUTES.get(op, {}), **attributes})
        self.model = self.wrap(node, SHAPES.get(op, (IMAGE,))[0])

    def codes(self, shape: tuple[int, ...], kind: str) -> Array:
        ends = np.iinfo(kind)
        return self.rng.integers(ends.min, ends.max + 1, shape).astype(kind)

    def keep(self, value: Any) -> str:
        self.stored.append(numpy_helper.from_array(np.asarray(value), f"c{len(self.stored)}"))
        return self.stored[-1].name

    def wrap(self, node: onnx.NodeProto, shape: tuple[int, ...]) -> onnx.ModelProto:
        x = helper.make_tensor_value_info("x", TensorProto.UINT8, shape)
        y = helper.make_tensor_value_info("y", TensorProto.UINT8, None)
        graph = helper.make_graph([node], "g", [x], [y], self.stored)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, ir_version=8, opset_imports=opsets)

    def feed(self) -> dict[str, Array]:
        (x,) = self.model.graph.input
        return {"x": self.codes(tuple(dim.dim_value for dim in x.type.tensor_type.shape.dim), "uint8")}


FORMS = [(op, "uint8") for op in OPERATORS] + [(op, "int8") for op in SHAPES]
FORMS += [("QLinearConv", "per channel"), ("QGemm", "per channel")]


@pytest.mark.parametrize(("op", "form"), FORMS)
def test_every_layout_computes_what_onnxruntimes_kernel_does(op: str, form: str) -> None:
    """To a code, where the kernel rounds products in another order."""
    single = Single(op, "uint8" if form == "uint8" else "int8", form == "per channel")
    feed = single.feed()
    graph = graphs.load(single.model, opset=1)
    fired, refusals = qdq.unfold(graph)
    assert ([one.node for one in fired], refusals) == (["node"], ())
    assert OPERATORS[op].op in {node.op for node in graph.nodes}
    assert not [node for node in graph.nodes if qdq.is_integer_op(node)]
    reference, made = run(single.model, feed)["y"], run(graphs.to_proto(graph), feed)["y"]
    assert np.abs(reference.astype(int) - made.astype(int)).max() <= 1
    assert len(np.unique(reference)) > 5


def test_the_float_operator_keeps_the_name_and_the_shape() -> None:
    graph = graphs.load(Single("QLinearAdd").model, opset=1)
    qdq.unfold(graph)
    (add,) = [node for node in graph.nodes if node.op == "Add"]
    assert add.name == "node"
    assert graphs.query.dtype(add.outputs[0]) == np.float32


@pytest.mark.parametrize(
    ("op", "attributes", "why"),
    [
        ("QLinearAveragePool", {"channels_last": 1}, "channels come last"),
        ("QAttention", {"num_heads": 2}, "no single float operator"),
    ],
)
def test_what_cannot_be_written_says_why(op: str, attributes: dict[str, Any], why: str) -> None:
    if op in OPERATORS:
        model = Single(op, **attributes).model
    else:
        assert op in UNKNOWN
        model = Single("QLinearAdd").model
        model.graph.node[0].op_type = op
    graph = graphs.load(model, opset=1)
    before = graphs.digest(graph)
    fired, (refusal,) = qdq.unfold(graph)
    assert not fired
    assert refusal.where == "node"
    assert why in refusal.why
    assert graphs.digest(graph) == before


def test_concat_has_any_number_of_operands() -> None:
    single = Single("QLinearAdd")
    keep = single.keep
    pieces = [keep(np.float32(0.05)), keep(np.uint8(100)), "x", keep(np.float32(0.02)), keep(np.uint8(9))]
    pieces += [keep(single.codes(IMAGE, "uint8")), keep(np.float32(0.04)), keep(np.uint8(50))]
    model = single.wrap(helper.make_node(CONCAT, pieces, ["y"], "cat", domain="com.microsoft", axis=1), IMAGE)
    graph = graphs.load(model, opset=1)
    qdq.unfold(graph)
    feed = {"x": single.codes(IMAGE, "uint8")}
    made = run(graphs.to_proto(graph), feed)["y"].astype(int)
    assert np.abs(made - run(model, feed)["y"]).max() <= 1


# --- files of onnxruntime's tools -------------------------------------------------------------------------------------


class Reader:
    """Data for onnxruntime's quantizer."""

    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self._feeds: Iterator[dict[str, Array]] = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def images() -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", ["QUInt8", "QInt8"])
def test_the_qoperator_form_of_a_residual_block(per_channel: bool, kind: str, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    source, target = tmp_path / "f.onnx", tmp_path / "q.onnx"
    onnx.save(residual(), str(source))
    quantization.quantize_static(
        str(source),
        str(target),
        Reader(images()),
        quant_format=quantization.QuantFormat.QOperator,
        activation_type=quantization.QuantType[kind],
        per_channel=per_channel,
    )
    graph = graphs.load(target, opset=1)
    fired, refusals = qdq.unfold(graph)
    assert len(fired) >= 4
    assert not refusals
    assert not [node for node in graph.nodes if qdq.is_integer_op(node)]
    reference, made = run(str(target), images()[0])["y"], run(graphs.to_proto(graph), images()[0])["y"]
    assert np.abs(reference - made).max() < 0.05 * np.abs(reference).max()  # a code here or there
    floats = graphs.load(target, opset=1)
    qdq.strip(floats, unfold=True)
    assert not [node for node in floats.nodes if "Quantize" in node.op or "QLinear" in node.op]
    assert sorted(node.op for node in floats.nodes) == sorted(node.op_type for node in residual().graph.node)
    expected, made = run(residual(), images()[0])["y"], run(graphs.to_proto(floats), images()[0])["y"]
    assert np.abs(expected - made).max() < 0.05 * np.abs(expected).max()


def product(columns: int = 48) -> onnx.ModelProto:
    text = "agraph (float[3,64] x) => (float[3,N] y) { h = MatMul (x, w)\n y = Add (h, b) }"
    from tests.support.models import model

    return model(text, w=(64, columns), b=columns)


def test_dynamic_quantization_becomes_a_product_with_a_dequantized_weight(tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    source, target = tmp_path / "f.onnx", tmp_path / "q.onnx"
    onnx.save(product(), str(source))
    for per_channel in (False, True):
        quantization.quantize_dynamic(str(source), str(target), per_channel=per_channel)
        graph = graphs.load(target, opset=1)
        assert [one.pattern.split()[-1] for one in qdq.unfold(graph)[0]] == ["MatMulInteger"]
        assert sorted(node.op for node in graph.nodes) == ["Add", "DequantizeLinear", "MatMul"]
        x = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}
        reference, made = run(str(target), x)["y"], run(graphs.to_proto(graph), x)["y"]
        assert np.abs(reference - made).max() < 0.03 * np.abs(reference).max()


@pytest.mark.parametrize("opset", [17, 21])
@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
def test_packed_weights_in_blocks_are_unpacked(opset: int, bits: int, symmetric: bool, tmp_path: Path) -> None:
    nbits = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    model = product()
    model.opset_import[0].version = opset
    model.ir_version = 10
    quantizer = nbits.MatMulNBitsQuantizer(model, bits=bits, block_size=32, is_symmetric=symmetric, accuracy_level=1)
    quantizer.process()
    packed = quantizer.model.model
    assert [node.op_type for node in packed.graph.node] == ["MatMulNBits", "Add"]
    graph = graphs.load(packed, opset=1)
    assert len(qdq.unfold(graph)[0]) == 1
    ops = [node.op for node in graph.nodes]
    assert ops == (["DequantizeLinear", "MatMul", "Add"] if opset >= 21 else ["MatMul", "Add"])
    x = {"x": np.random.default_rng(1).standard_normal((3, 64)).astype(np.float32)}
    np.testing.assert_allclose(run(graphs.to_proto(graph), x)["y"], run(packed, x)["y"], rtol=1e-4, atol=1e-4)

"""Shapes after operators of onnxruntime, against the shapes that it computes; operators that only it knows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.capi import onnxruntime_pybind11_state as native

import sbonnx
from sbonnx import graph as graphs
from sbonnx.errors import ModelError
from sbonnx.graph import check_file, shape_inference
from sbonnx.graph.exporter import read_type
from sbonnx.ops import CONTRIB, RUNTIME_OPS
from sbonnx.spec import Array
from tests.support.models import run

RNG = np.random.default_rng(0)
BATCH, STEPS, HIDDEN, HEADS, KV, SIZE, PAST = 2, 5, 32, 4, 2, 8, 3


def normal(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Case:
    """One operator: inputs that are fed (dynamic leading axes), constants, absent inputs (""), outputs, attributes."""

    op: str
    fed: dict[str, Array]
    constants: dict[str, Array]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]
    domain: str = CONTRIB

    def model(self) -> onnx.ModelProto:
        node = helper.make_node(self.op, self.inputs, self.outputs, name="n", domain=self.domain, **self.attributes)
        feeds = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), self.sizes(value))
            for name, value in self.fed.items()
        ]
        results = [helper.make_empty_tensor_value_info(name) for name in self.outputs if name]
        stored = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph([node], "g", feeds, results, stored)
        imports = [helper.make_opsetid("", 21), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    @staticmethod
    def sizes(value: Array) -> list[Any]:
        return [f"d{at}" if at < 2 and value.ndim > 2 else size for at, size in enumerate(value.shape)]


X = {"x": normal(BATCH, STEPS, HIDDEN)}
GAMMA = {"g": normal(HIDDEN)}
CACHE = {"pk": normal(BATCH, KV, PAST, SIZE), "pv": normal(BATCH, KV, PAST, SIZE)}
LENGTHS = {"len": np.full(BATCH, PAST, np.int32), "total": np.asarray(PAST + 1, np.int32)}
CODES = {"b": RNG.integers(0, 255, (24, 2, 8), np.uint8), "s": normal(24, 2)}
TABLE = {"t": RNG.integers(0, 255, (11, 16), np.uint8), "s": normal(11, 2)}
ROTARY = {"c": normal(16, SIZE // 2), "n": normal(16, SIZE // 2)}
ONE = {"q": normal(BATCH, 1, HEADS * SIZE), "k": normal(BATCH, 1, KV * SIZE), "v": normal(BATCH, 1, KV * SIZE)}
PACKED = {"q": normal(BATCH, 1, (HEADS + 2 * KV) * SIZE)}
FULL = {"q": normal(BATCH, STEPS, HIDDEN), "k": normal(BATCH, 7, HIDDEN), "v": normal(BATCH, 7, 2 * HIDDEN)}
GROUPED = {"num_heads": HEADS, "kv_num_heads": KV}

CASES = {
    "skip rms": Case(
        "SkipSimplifiedLayerNormalization", {**X, "r": normal(BATCH, STEPS, HIDDEN)}, GAMMA, ("x", "r", "g"),
        ("y", "", "", "sum"), {},
    ),
    "skip norm": Case(
        "SkipLayerNormalization", {**X, "r": normal(BATCH, STEPS, HIDDEN)}, GAMMA, ("x", "r", "g"),
        ("y", "", "", "sum"), {},
    ),
    "rms": Case("SimplifiedLayerNormalization", X, GAMMA, ("x", "g"), ("y",), {"axis": -1}, ""),
    "rotary": Case(
        "RotaryEmbedding", {"x": normal(BATCH, STEPS, HIDDEN)}, {**ROTARY, "p": np.zeros((1,), np.int64)},
        ("x", "p", "c", "n"), ("y",), {"num_heads": HEADS},
    ),
    "gelu": Case("Gelu", X, {}, ("x",), ("y",), {}),
    "fast gelu": Case("FastGelu", X, {}, ("x",), ("y",), {}),
    "bias gelu": Case("BiasGelu", X, GAMMA, ("x", "g"), ("y",), {}),
    "quick gelu": Case("QuickGelu", X, {}, ("x",), ("y",), {}),
    "grouped": Case(
        "GroupQueryAttention", {**ONE, **CACHE}, LENGTHS, ("q", "k", "v", "pk", "pv", "len", "total"),
        ("y", "nk", "nv"), GROUPED,
    ),
    "grouped packed": Case(
        "GroupQueryAttention", {**PACKED, **CACHE}, LENGTHS, ("q", "", "", "pk", "pv", "len", "total"),
        ("y", "nk", "nv"), GROUPED,
    ),
    "attention": Case("MultiHeadAttention", FULL, {}, ("q", "k", "v"), ("y",), {"num_heads": HEADS}),
    "nbits": Case(
        "MatMulNBits", X, CODES, ("x", "b", "s"), ("y",), {"K": HIDDEN, "N": 24, "bits": 4, "block_size": 16},
    ),
    "table": Case(
        "GatherBlockQuantized", {"i": RNG.integers(0, 11, (BATCH, STEPS, 1), np.int64)}, TABLE, ("t", "i", "s"), ("y",),
        {"bits": 4, "block_size": 16, "gather_axis": 0, "quantize_axis": 1},
    ),
    "experts": Case(
        "MoE", {"x": normal(6, HIDDEN), "r": normal(6, 3)}, {"u": normal(3, 48, HIDDEN), "d": normal(3, HIDDEN, 48)},
        ("x", "r", "u", "", "d"), ("y",), {"k": 2, "activation_type": "gelu"},
    ),
    "quantized experts": Case(
        "QMoE", {"x": normal(6, HIDDEN), "r": normal(6, 3)},
        {
            "u": RNG.integers(0, 255, (3, 48, HIDDEN // 2), np.uint8), "us": normal(3, 48, 2),
            "d": RNG.integers(0, 255, (3, HIDDEN, 24), np.uint8), "ds": normal(3, HIDDEN, 3),
        },
        ("x", "r", "u", "us", "", "d", "ds"), ("y",),
        {"k": 2, "activation_type": "gelu", "expert_weight_bits": 4, "block_size": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inferred_shapes_are_those_that_the_runtime_computes(case: Case) -> None:
    proto = case.model()
    inferred = shape_inference.infer_shapes(proto, strict_mode=True, data_prop=True)
    assert inferred.graph.node == proto.graph.node and inferred.graph.initializer == proto.graph.initializer
    values = {value.name: value for value in [*inferred.graph.output, *inferred.graph.value_info]}
    assert values.keys() == set(filter(None, case.outputs)), "tensors of the stand-ins are gone"
    computed = run(proto, case.fed)
    for value in values.values():
        kind, shape = read_type(value.type)
        actual = computed[value.name]
        assert kind == actual.dtype and shape is not None and len(shape) == actual.ndim, value.name
        for known, size in zip(shape, actual.shape, strict=True):
            assert not isinstance(known, int) or known == size, value.name
    wide = {"attention": ("y",), "grouped": ("nk", "nv"), "grouped packed": ("nk", "nv")}
    names = {name for name, members in CASES.items() if members is case}
    ranks_only = {tensor for name in names for tensor in wide.get(name, ())}
    for value in values.values():
        if value.name not in ranks_only:
            assert read_type(value.type)[1][-1] == computed[value.name].shape[-1], "channels are known"  # type: ignore[index]


def test_every_rule_has_a_case() -> None:
    assert {case.op for case in CASES.values()} == set(shape_inference.RULES)


def test_runtime_ops_are_those_that_onnx_has_no_schema_for() -> None:
    own = {schema.name for schema in native.get_all_operator_schema() if schema.domain in ("", "ai.onnx")}
    theirs = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert RUNTIME_OPS <= own - theirs


def decoder(opset: int = 21) -> onnx.ModelProto:
    """Two products after normalizations that onnx does not know, in a branch too; no shapes in between."""
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
    normed = helper.make_node("SimplifiedLayerNormalization", ["x", "g"], ["n"], name="norm", axis=-1, epsilon=1e-5)
    product = helper.make_node("MatMul", ["n", "w"], ["m"], name="up")
    skip = helper.make_node("SkipSimplifiedLayerNormalization", ["m", "x", "g"], ["s"], name="skip", domain=CONTRIB)
    inner = helper.make_node("MatMul", ["s", "v"], ["z"], name="down")
    result = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    other = helper.make_graph([helper.make_node("Identity", ["s"], ["i"], name="same")], "other", [], [
        helper.make_tensor_value_info("i", TensorProto.FLOAT, None)
    ])  # fmt: skip
    body = helper.make_graph([inner], "body", [], [result])
    choice = helper.make_node("If", ["c"], ["y"], name="if", then_branch=body, else_branch=other)
    graph = helper.make_graph(
        [normed, product, skip, choice],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", HIDDEN]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", HIDDEN])],
        [numpy_helper.from_array(normal(*shape), name) for name, shape in
         {"g": (HIDDEN,), "w": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN)}.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


@pytest.mark.parametrize("opset", [13, 21])
def test_a_decoder_is_loaded_converted_and_written(opset: int, tmp_path: Path) -> None:
    """Operators that onnx does not know stay in ONNX's own domain, through conversion and onnx.checker."""
    proto = decoder(opset)
    loaded = graphs.load(proto, opset=21)
    shapes = {tensor.name: tuple(tensor.shape or ()) for tensor in graphs.query.all_tensors(loaded)}
    assert shapes["n"] == shapes["m"] == shapes["s"] == shapes["z"] == ("n", HIDDEN)
    graphs.save(loaded, tmp_path / "m.onnx")
    check_file(tmp_path / "m.onnx")
    feeds = {"x": normal(3, HIDDEN), "c": np.asarray(True)}
    want, got = run(proto, feeds)["y"], run(str(tmp_path / "m.onnx"), feeds)["y"]
    np.testing.assert_array_equal(got, want)


def test_other_errors_beside_unknown_operators_are_found(tmp_path: Path) -> None:
    proto = decoder()
    proto.graph.node[1].input[1] = "absent"
    onnx.save(proto, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="absent"):
        check_file(tmp_path / "m.onnx")


def test_products_without_known_rank_are_quantized(tmp_path: Path) -> None:
    """No rule knows the operator before the first product."""
    proto = decoder()
    proto.graph.node[0].CopyFrom(helper.make_node("Trilu", ["x"], ["n"], name="norm", domain=CONTRIB))
    report = sbonnx.quantize(proto, None, output=tmp_path / "q.onnx", mode="weight_only", w_bit=8, min_weight_size=0)
    assert report.counts.weights == 2 and not report.problems
    feeds = {"x": normal(3, HIDDEN), "c": np.asarray(True)}
    exact, rounded = run(proto, feeds)["y"], run(str(tmp_path / "q.onnx"), feeds)["y"]
    assert np.abs(exact - rounded).mean() < 0.02 * np.abs(exact).mean()

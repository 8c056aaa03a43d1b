"""Decoders in weight_only: one table for embedding and head, one copy of the codes for both branches of an If."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sbonnx
from sbonnx.backends.onnxruntime.backend import has_two_bits
from sbonnx.graph import load, query, to_proto
from sbonnx.linear.embedding import tie_tables
from sbonnx.qdq import strip
from sbonnx.spec import Array
from tests.support.models import model, run
from tests.support.writing import ops, prepared, solved, written

RNG = np.random.default_rng(0)
ROWS, WIDTH = 40, 64
TABLE = RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)

INNER = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32) / 8

FORMS: dict[str, tuple[str, dict[str, Array]]] = {
    "through a Transpose": (
        "t = Transpose <perm = [1, 0]> (w) x = Gather (t, i) h = Tanh (x) y = MatMul (h, w)", {"w": TABLE.T},
    ),
    "two copies": ("x = Gather (t, i) h = Tanh (x) y = MatMul (h, w)", {"t": TABLE, "w": TABLE.T}),
    "transB": ("x = Gather (t, i) h = Tanh (x) y = Gemm <transB = 1> (h, t)", {"t": TABLE}),
    "transB, two copies": ("x = Gather (t, i) h = Tanh (x) y = Gemm <transB = 1> (h, w)", {"t": TABLE, "w": TABLE}),
}  # fmt: skip


def decoder(form: str) -> onnx.ModelProto:
    text, weights = FORMS[form]
    stored: dict[str, Any] = {name: np.ascontiguousarray(value) for name, value in weights.items()}
    return model(f"agraph (int64[N] i) => (float[N,{ROWS}] y) {{ {text} }}", **stored)


def codes_of(proto: onnx.ModelProto) -> list[Array]:
    """All byte tensors, of all scopes, but for zero points."""
    found: list[Array] = []

    def visit(graph: onnx.GraphProto) -> None:
        values = [numpy_helper.to_array(one) for one in graph.initializer if not one.name.endswith("zero_points")]
        found.extend(value for value in values if value.dtype == np.uint8)
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    visit(attribute.g)

    visit(proto.graph)
    return found


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", FORMS)
def test_one_table_for_embedding_and_head(form: str, bits: int) -> None:
    """The file computes what the float model computes with the dequantized matrix, and holds its codes once."""
    ready = prepared(decoder(form), mode="weight_only", embedding_bits=bits, block_size=32, accuracy_level=1)
    (site,) = ready.plan.sites
    assert {reader.node for reader in site.readers} and site.spec.bits == bits
    solution = solved(ready, None)
    made, refusals = written(ready, solution)
    assert not refusals
    assert ops(made) == {"GatherBlockQuantized": 1, "Reshape": 1, "Tanh": 1, "MatMulNBits": 1}
    (codes,) = codes_of(made)
    stored = 4 if bits == 2 and not has_two_bits() else bits
    assert codes.nbytes == ROWS * WIDTH * stored // 8
    table = solution.qparams[site.key].dequantize(solution.codes[site.key])
    table = table if table.shape == (ROWS, WIDTH) else table.T
    rows = np.array([3, 0, 39, 3])
    expected = np.tanh(table[rows]) @ table.T
    for level in ("off", "all"):
        np.testing.assert_allclose(run(made, {"i": rows}, level=level)["y"], expected, rtol=1e-5, atol=2e-5)
    assert np.abs(table - TABLE).max() < {2: 2.0, 4: 0.6, 8: 0.05}[bits]


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine"])
def test_rows_of_an_untied_table_are_those_of_numpy(bits: int, block: int, scheme: str) -> None:
    proto = model("agraph (int64[N] i) => (float[N,128] y) { y = Gather (t, i) }", t=(10, 128))
    wish = {"quantize_inputs_of": {"EMBEDDING": True}, "w_qscheme": scheme, "block_size": block}
    ready = prepared(proto, mode="weight_only", embedding_bits=bits, **wish)
    solution = solved(ready, None)
    made, refusals = written(ready, solution)
    assert not refusals and ops(made) == {"GatherBlockQuantized": 1}
    assert len(made.graph.node[0].input) == 4, "zero points are always written"
    (site,) = ready.plan.sites
    rows = np.array([[3, 0], [9, 3]])
    expected = solution.qparams[site.key].dequantize(solution.codes[site.key])[rows]
    np.testing.assert_array_equal(run(made, {"i": rows.reshape(-1)})["y"].reshape(expected.shape), expected)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine"])
def test_tables_are_read_back_as_floats(bits: int, scheme: str) -> None:
    """A tied table becomes float values again, those of the file, and one matrix when it is quantized again."""
    ready = prepared(decoder("two copies"), mode="weight_only", embedding_bits=bits, w_qscheme=scheme, accuracy_level=1)
    made, _ = written(ready, solved(ready, None))
    graph = load(made, opset=21)
    assert strip(graph, unfold=True) == 2
    floats = to_proto(graph)
    assert ops(floats) == {"Gather": 1, "Tanh": 1, "MatMul": 1}
    rows = np.array([3, 0, 39, 3])
    np.testing.assert_allclose(run(floats, {"i": rows})["y"], run(made, {"i": rows})["y"], rtol=1e-5, atol=2e-5)
    again = prepared(made, mode="weight_only", requantize=True)
    assert len(again.plan.sites) == 1 and len(again.plan.sites[0].readers) == 2


def test_blocks_of_a_table_divide_its_rows() -> None:
    """Rows of 48 values: blocks of 16, for the head too, which shares the table."""
    text = "agraph (int64[N] i) => (float[N,40] y) { x = Gather (t, i) y = Gemm <transB = 1> (x, t) }"
    ready = prepared(model(text, t=(40, 48)), mode="weight_only", block_size=32)
    (site,) = ready.plan.sites
    assert site.spec.block_size == 16
    odd = prepared(model(text, t=(40, 44)), mode="weight_only", block_size=32)
    assert any("do not divide into blocks of 16" in refusal.why for refusal in odd.refusals)


def test_zero_points_of_a_row_fill_its_bytes() -> None:
    """onnxruntime before 1.27 reads the zero points of a row with an odd number of blocks from a wrong byte."""
    text = "agraph (int64[N] i) => (float[N,128] y) { y = Gather (t, i) }"
    for bits, size in ((4, 64), (8, 128)):
        wish = {"quantize_inputs_of": {"EMBEDDING": True}, "block_size": 128}
        ready = prepared(model(text, t=(10, 128)), mode="weight_only", embedding_bits=bits, **wish)
        assert [site.spec.block_size for site in ready.plan.sites] == [size]


def test_equal_values_tie_and_others_do_not() -> None:
    graph = load(decoder("two copies"))
    assert tie_tables(graph) == ["t"] and tie_tables(graph) == []
    proto = decoder("two copies")
    changed = TABLE.copy()
    changed[-1, -1] += 1
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(changed, "t"))
    graph = load(proto)
    assert tie_tables(graph) == [] and not any(node.op == "Transpose" for node in query.all_nodes(graph))


def widths(**wish: Any) -> dict[str, int]:
    text = """agraph (int64[N] i, int64[N] p) => (float[N,40] y) {
        x = Gather (t, i) q = Gather (u, p) s = Add (x, q) h = MatMul (s, v) a = Tanh (h) y = MatMul (a, w) }"""
    proto = model(text, t=(40, 64), u=(16, 64), v=(64, 64), w=(64, 40))
    return {site.tensor: site.spec.bits for site in prepared(proto, mode="weight_only", **wish).plan.sites}


def test_embedding_and_head_have_widths_of_their_own() -> None:
    """8 bits by default. A small table of positions stays float unless the recipe asks for it."""
    assert widths() == {"t": 8, "v": 4, "w": 8}
    assert widths(w_bit=2) == {"t": 8, "v": 2, "w": 8}
    assert widths(embedding_bits=4) == {"t": 4, "v": 4, "w": 4}
    assert widths(last_bits={"W": 4}) == {"t": 8, "v": 4, "w": 4}
    assert widths(embedding_bits=0) == {"v": 4}
    assert widths(quantize_inputs_of={"EMBEDDING": False}) == {"v": 4, "w": 8}
    assert widths(quantize_inputs_of={"EMBEDDING": True}) == {"t": 8, "u": 8, "v": 4, "w": 8}
    assert widths(backend="virtual") == {"v": 4, "w": 4}


def merged(branches: int = 2) -> onnx.ModelProto:
    """Two products and a table; with two branches as one If whose branches read the same weights."""
    weights = {
        "t": TABLE,
        "v": INNER,
        "b": TABLE[0, :WIDTH],
        "w": TABLE.T,
    }

    def nodes(stem: str) -> list[onnx.NodeProto]:
        steps = (
            ("Gather", "t i", "x"),
            ("MatMul", "x v", "m"),
            ("Add", "m b", "h"),
            ("Tanh", "h", "a"),
            ("MatMul", "a w", "y"),
        )
        known = {*weights, "i"}
        return [
            helper.make_node(
                op,
                [name if name in known else stem + name for name in read.split()],
                [stem + out],
                name=f"{stem}{op}_{out}",
            )
            for op, read, out in steps
        ]

    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "N", ROWS])
    stored = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in weights.items()]
    inputs = [helper.make_tensor_value_info("i", TensorProto.INT64, [1, "N"])]
    body = nodes("")
    if branches == 2:
        inputs.append(helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1]))
        parts = {
            name: helper.make_graph(
                nodes(f"{name}_"),
                name,
                [],
                [helper.make_tensor_value_info(f"{name}_y", TensorProto.FLOAT, [1, "N", ROWS])],
            )
            for name in ("past", "none")
        }
        body = [
            helper.make_node("If", ["use_cache_branch"], ["y"], then_branch=parts["past"], else_branch=parts["none"])
        ]
    graph = helper.make_graph(body, "g", inputs, [result], stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_both_branches_of_a_merged_decoder_read_the_same_codes(rounding: str, tmp_path: Path) -> None:
    """The codes equal those of the model without branches and are stored once, whichever branch the samples select."""
    ids = [RNG.integers(0, ROWS, (1, 24)) for _ in range(12)]
    wish: dict[str, Any] = {"mode": "weight_only", "accuracy_level": 1, "rounding": rounding}
    wish |= {"w_bit": 8, "VERIFY.HELD_OUT": 0.0}
    made = {}
    for name, proto, more in (
        ("single", merged(1), {}),
        ("past", merged(), {"use_cache_branch": np.array([True])}),
        ("none", merged(), {"use_cache_branch": np.array([False])}),
    ):
        feeds = [{"i": one, **more} for one in ids]
        report = sbonnx.quantize(proto, feeds, output=tmp_path / f"{name}.onnx", **wish)
        assert not report.problems and not [one for one in report.refusals if "round" in one.what]
        assert ("rounded by gptq" in " ".join(report.notes)) == (rounding == "gptq")
        made[name] = onnx.load(tmp_path / f"{name}.onnx")
    for name in ("past", "none"):
        assert not any(tensor.data_type == TensorProto.UINT8 for node in made[name].graph.node
                       for attribute in node.attribute for tensor in attribute.g.initializer)  # fmt: skip
        for one, other in zip(codes_of(made[name]), codes_of(made["single"]), strict=True):
            np.testing.assert_array_equal(one, other)
        for picks in (True, False):
            feed = {"i": ids[0]}
            got = run(made[name], {**feed, "use_cache_branch": np.array([picks])})["y"]
            np.testing.assert_allclose(got, run(made["single"], feed)["y"], rtol=1e-5, atol=1e-5)


def test_a_branch_that_never_ran_is_rounded_to_nearest_and_named() -> None:
    """Weights that only one branch reads, in the branch that no sample selects."""
    proto = merged()
    (choice,) = proto.graph.node
    other = next(attribute.g for attribute in choice.attribute if attribute.name == "else_branch")
    own = RNG.standard_normal((WIDTH, WIDTH)).astype(np.float32)
    other.initializer.append(numpy_helper.from_array(own, "own"))
    inner = next(node for node in other.node if node.op_type == "MatMul")
    inner.input[1] = "own"
    feeds = [{"i": RNG.integers(0, ROWS, (1, 24)), "use_cache_branch": np.array([True])} for _ in range(8)]
    report = sbonnx.quantize(proto, feeds, mode="weight_only", rounding="gptq", w_bit=8)
    named = [(one.where, one.why) for one in report.refusals if one.what == "round by inputs"]
    assert len(named) == 1 and named[0][0] == "none_MatMul_m" and "never ran" in named[0][1]

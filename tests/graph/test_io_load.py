"""What files may look like, and what becomes of it: never another answer in onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

import sbonnx
from sbonnx.graph import Constant, Graph, load, to_proto
from sbonnx.graph.query import (
    all_nodes,
    all_tensors,
    constant,
    dtype,
    node_by_name,
    rank,
    scopes,
    shape,
    tensors_by_name,
)
from sbonnx.spec import Array
from tests.support.models import model, run


def parsed(text: str, opset: str = '"": 17', ir: int = 8) -> ModelProto:
    """A model from text, not checked: unsorted and unnamed as it is written."""
    made: ModelProto = onnx.parser.parse_model(f"<ir_version: {ir}, opset_import: [{opset}]> {text}")
    return made


def same(
    source: ModelProto, feeds: dict[str, Array], *, opset: int = 13, sorted_source: ModelProto | None = None
) -> Graph:
    """Load, write, check, compare in onnxruntime; returns the graph."""
    graph = load(source, opset=opset)
    written = to_proto(graph)
    onnx.checker.check_model(written, full_check=True)
    before, after = run(sorted_source or source, feeds), run(written, feeds)
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_allclose(before[name], after[name], rtol=1e-5, atol=1e-5)
    return graph


def names_are_unique(graph: Graph) -> None:
    nodes = [node.name for node in all_nodes(graph)]
    assert all(nodes) and len(set(nodes)) == len(nodes)
    tensors = [tensor.name for tensor in all_tensors(graph)]
    assert len(set(tensors)) == len(tensors)


X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def constant_node(name: str, **value: Any) -> NodeProto:
    return helper.make_node("Constant", [], [name], **value)


SPARSE = helper.make_sparse_tensor(
    helper.make_tensor("v", TensorProto.FLOAT, [2], [3.0, 4.0]),
    helper.make_tensor("i", TensorProto.INT64, [2], [0, 2]),
    [3],
)
SPARSE_ROWS = helper.make_sparse_tensor(
    helper.make_tensor("v", TensorProto.FLOAT, [2], [3.0, 4.0]),
    helper.make_tensor("i", TensorProto.INT64, [2, 2], [0, 1, 1, 2]),
    [2, 3],
)
FORMS: dict[str, tuple[NodeProto, Any, Any]] = {
    "value": (constant_node("c", value=numpy_helper.from_array(X)), X, np.float32),
    "large value": (constant_node("c", value=numpy_helper.from_array(np.arange(999.0))), np.arange(999.0), np.float64),
    "value_float": (constant_node("c", value_float=2.5), 2.5, np.float32),
    "value_floats": (constant_node("c", value_floats=[2.5, 1.0]), [2.5, 1], np.float32),
    "value_int": (constant_node("c", value_int=7), 7, np.int64),
    "value_ints": (constant_node("c", value_ints=[7, -1]), [7, -1], np.int64),
    "value_string": (constant_node("c", value_string="ä"), "ä", object),
    "value_strings": (constant_node("c", value_strings=["a", "b\0"]), ["a", "b\0"], object),
    "sparse_value": (constant_node("c", sparse_value=SPARSE), [3, 0, 4], np.float32),
    "sparse rows": (constant_node("c", sparse_value=SPARSE_ROWS), [[0, 3, 0], [0, 0, 4]], np.float32),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("in_branch", [False, True])
def test_constant_nodes_become_constants(form: str, in_branch: bool) -> None:
    node, value, kind = FORMS[form]
    element = helper.np_dtype_to_tensor_dtype(np.dtype(kind)) if kind is not object else TensorProto.STRING
    out = helper.make_tensor_value_info("y", element, np.shape(value))
    pick = helper.make_node("Identity", ["c"], ["y"], name="pick")
    nodes, inputs = [node, pick], []
    if in_branch:
        branches = [helper.make_graph(nodes, f"b{n}", [], [out]) for n in range(2)]
        nodes = [helper.make_node("If", ["flag"], ["y"], then_branch=branches[0], else_branch=branches[1], name="if")]
        inputs = [helper.make_tensor_value_info("flag", TensorProto.BOOL, [])]
    source = helper.make_model(
        helper.make_graph(nodes, "g", inputs, [out]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    graph = load(source)
    names_are_unique(graph)
    held = [tensor for tensor in all_tensors(graph) if isinstance(tensor, Constant)]
    assert len(held) == (2 if in_branch else 1) and not any(node.op == "Constant" for node in all_nodes(graph))
    found = constant(held[0])
    assert found is not None and found.dtype == np.dtype(kind) and not found.flags.writeable
    assert found.tolist() == (value.tolist() if isinstance(value, np.ndarray) else value)
    written = to_proto(graph)
    onnx.checker.check_model(written, full_check=True)
    feeds = {"flag": np.array(True)} if in_branch else {}
    got = run(written, feeds)["y"]
    if "sparse" not in form:  # onnxruntime takes a sparse constant for another type than its readers do
        np.testing.assert_array_equal(got, run(source, feeds)["y"])
    assert got.tolist() == (value.tolist() if isinstance(value, np.ndarray) else value)


def test_initializers_listed_among_the_inputs_are_constants() -> None:
    source = parsed("g (float[2,3] x, float[3] w) => (float[2,3] y) { y = Add(x, w) }", '"": 9', ir=3)
    source.graph.initializer.append(numpy_helper.from_array(np.ones(3, np.float32), "w"))
    graph = same(source, {"x": X})
    assert [tensor.name for tensor in graph.inputs] == ["x"] and graph.info.overridable == ("w",)
    assert graph.info.ir_version >= 4
    assert any("listed among the inputs" in note for note in graph.info.notes)


LISTED = """g (float[N,8] x, float limit, float[8] shift, float[8] unused) => (float[N,8] y, float[8] z) {
    a = MatMul(x, w)
    b = Min(a, limit)
    z = Neg(shift)
    y = Add(b, z)
}"""


@pytest.mark.parametrize(("ir", "more"), [(8, ()), (8, ("w",)), (3, ("w",))])
def test_defaults_of_inputs_stay_inputs(ir: int, more: tuple[str, ...], tmp_path: Path) -> None:
    """If they are meant: weights are not among them. And if nothing was computed from them."""
    source = parsed(LISTED, '"": 13', ir=ir)
    rng = np.random.default_rng(0)
    values = {"limit": np.float32(0.5), "shift": rng.standard_normal(8), "unused": np.zeros(8)}
    for name, value in {**values, "w": rng.standard_normal((8, 8))}.items():
        source.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
        if name in more:
            source.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape))
    feeds = [{"x": rng.standard_normal((4, 8)).astype(np.float32)} for _ in range(8)]
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(source, feeds, output=path)
    written = onnx.load(path)
    assert [one.name for one in written.graph.input] == (["x"] if more else ["x", "limit", "unused"])
    assert any(("stay inputs with a default" in note) == (not more) for note in report.notes if "were listed" in note)
    if not more:
        other = {**feeds[0], "limit": np.array(-0.5, np.float32)}
        wanted, found = (run(one, other)["y"] for one in (source, written))
        assert 10 * np.log10(np.sum(wanted**2) / np.sum((wanted - found) ** 2)) > 25
        assert not np.allclose(wanted, run(source, feeds[0])["y"], atol=0.1)


UNSORTED = """g (bool c, float[2,3] x) => (float[2,3] y) {
    y = Neg(z)
    z = If (c) <
        then_branch = t () => (float[2,3] p) { p = Add(q, h)  q = Relu(h) },
        else_branch = e () => (float[2,3] r) { r = Neg(x) }>
    h = Exp(x)
}"""
SORTED = """g (bool c, float[2,3] x) => (float[2,3] y) {
    h = Exp(x)
    z = If (c) <
        then_branch = t () => (float[2,3] p) { q = Relu(h)  p = Add(q, h) },
        else_branch = e () => (float[2,3] r) { r = Neg(x) }>
    y = Neg(z)
}"""


@pytest.mark.parametrize("flag", [True, False])
def test_unsorted_files_are_sorted_with_readers_in_branches(flag: bool) -> None:
    graph = same(parsed(UNSORTED), {"c": np.array(flag), "x": X}, sorted_source=parsed(SORTED))
    assert [node.op for node in graph.nodes] == ["Exp", "If", "Neg"]
    assert any("sorted" in note for note in graph.info.notes)
    assert not load(parsed(SORTED)).info.notes[1:], "what is sorted is not noted"


def test_sorted_files_keep_their_order() -> None:
    source = parsed("g (float[2] x) => (float[2] y) { b = Relu(x) a = Neg(x) c = Exp(x) d = Add(c, a) y = Add(d, b) }")
    assert [node.outputs[0].name for node in load(source).nodes] == ["b", "a", "c", "d", "y"]


def test_nodes_without_a_name_or_with_a_taken_one_get_one() -> None:
    source = parsed(SORTED)
    branch = source.graph.node[1].attribute[0].g
    for node, name in zip([*source.graph.node, *branch.node], ["a", "Add_0", "a", "a", ""], strict=True):
        node.name = name
    graph = same(source, {"c": np.array(True), "x": X}, sorted_source=parsed(SORTED))
    names_are_unique(graph)
    assert graph.nodes[0].name == "a" and graph.nodes[1].name == "Add_0"
    assert "Add_0" not in {node.name for _, scope in list(scopes(graph))[1:] for node in scope.nodes}
    assert load(source).info.notes == graph.info.notes


def test_tensors_of_equal_names_in_two_branches_are_distinct() -> None:
    source = parsed(
        """g (bool c, float[2,3] x) => (float[2,3] y) {
        y = If (c) <then_branch = t () => (float[2,3] o) { h = Exp(x)  o = Neg(h) },
                    else_branch = e () => (float[2,3] o) { h = Relu(x)  o = Neg(h) }> }"""
    )
    for flag in (True, False):
        names_are_unique(same(source, {"c": np.array(flag), "x": X}))


def test_a_branch_that_passes_on_an_outer_tensor() -> None:
    """Not every runtime takes such a file; a copy inside makes it one that all take."""
    source = parsed(
        """g (bool c, float[2,3] x) => (float[2,3] y) {
        h = Exp(x)
        y = If (c) <then_branch = t () => (float[2,3] h) { }, else_branch = e () => (float[2,3] o) { o = Neg(h) }> }"""
    )
    graph = load(source)
    names_are_unique(graph)
    out = run(to_proto(graph), {"c": np.array(True), "x": X})["y"]
    np.testing.assert_allclose(out, np.exp(X), rtol=1e-6)


LOOP = """g (int64 n, float[3] x) => (float[3] y, float[k,3] all) {
    t = Constant <value = bool {1}> ()
    w = Constant <value = float[3] {0.5, 0.25, 2.0}> ()
    y, all = Loop (n, t, x) <body = b (int64 i, bool going, float[3] v) => (bool on, float[3] next, float[3] out) {
        on = Identity(going)
        s = Mul(v, w)
        next = Add(s, x)
        out = Neg(next) }>
}"""
SCAN = """g (float[3] a, float[4,3] xs) => (float[3] z, float[4,3] all) {
    w = Constant <value = float[3] {0.5, 0.25, 2.0}> ()
    z, all = Scan (a, xs) <num_scan_inputs = 1, body = b (float[3] v, float[3] e) => (float[3] next, float[3] out) {
        s = Mul(v, w)
        next = Add(s, e)
        out = Relu(next) }>
}"""


def test_loop_and_scan() -> None:
    graph = same(parsed(LOOP), {"n": np.array(4), "x": X[0]})
    assert [where for where, _ in scopes(graph)] == ["", f"{graph.nodes[0].name}/body"]
    same(parsed(SCAN), {"a": X[0], "xs": np.concatenate([X, X])})


def test_branches_in_branches_read_across_two_levels() -> None:
    source = parsed(
        """g (bool c, bool d, float[2,3] x) => (float[2,3] y) {
        h = Exp(x)
        y = If (c) <
            then_branch = t () => (float[2,3] o) {
                k = Neg(x)
                o = If (d) <then_branch = t2 () => (float[2,3] p) { p = Add(h, k) },
                            else_branch = e2 () => (float[2,3] q) { q = Sub(h, k) }> },
            else_branch = e () => (float[2,3] r) { r = Identity(h) }> }"""
    )
    for flags in ((True, True), (True, False), (False, False)):
        graph = same(source, {"c": np.array(flags[0]), "d": np.array(flags[1]), "x": X})
    names_are_unique(graph)


def with_functions() -> ModelProto:
    source = parsed("g (float[2,3] x) => (float[2,3] y) { h = my.scale(x)  y = my.twice(h) }", '"": 17, "my": 1')
    domains = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    body = [constant_node("two", value_float=2.0), helper.make_node("Mul", ["a", "two"], ["b"])]
    source.functions.append(helper.make_function("my", "scale", ["a"], ["b"], body, domains))
    calls = [helper.make_node("scale", ["a"], ["t"], domain="my"), helper.make_node("scale", ["t"], ["b"], domain="my")]
    source.functions.append(helper.make_function("my", "twice", ["a"], ["b"], calls, domains))
    return source


def test_functions_are_inlined() -> None:
    graph = same(with_functions(), {"x": X})
    names_are_unique(graph)
    assert [node.op for node in graph.nodes] == ["Mul"] * 3
    assert "2 local functions inlined" in graph.info.notes


def test_omitted_inputs_and_outputs_stay_omitted() -> None:
    shapes: dict[str, Any] = {"w": (1, 20, 3), "r": (1, 20, 5), "h": (1, 2, 5), "c": (1, 2, 5)}
    source = model(
        """agraph (float[4,2,3] x) => (float[1,2,5] yh) {
        , yh = LSTM <hidden_size = 5> (x, w, r, , , h, c) }""",
        **shapes,
    )
    graph = same(source, {"x": np.ones((4, 2, 3), np.float32)})
    assert [tensor.name for tensor in graph.nodes[0].inputs] == ["x", "w", "r", "", "", "h", "c"]
    assert [tensor.name for tensor in graph.nodes[0].outputs] == ["", "yh"]


def test_types_that_are_no_tensors_pass_through() -> None:
    types = {
        "sequence": helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 3])),
        "optional": helper.make_optional_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [3])),
        "map": helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, None)),
    }
    for kind, proto in types.items():
        ends = [helper.make_value_info(name, proto) for name in ("x", "y")]
        node = helper.make_node("Identity", ["x"], ["h"]), helper.make_node("Identity", ["h"], ["y"])
        source = helper.make_model(
            helper.make_graph(list(node), "g", ends[:1], ends[1:]),
            opset_imports=[helper.make_opsetid("", 17)],
            ir_version=8,
        )
        graph = load(source)
        assert dtype(graph.inputs[0]) is None and shape(graph.inputs[0]) is None, kind
        written = to_proto(graph)
        assert written.graph.input[0] == ends[0] and written.graph.output[0] == ends[1], kind


def test_sequences_run() -> None:
    source = parsed(
        """g (float[2,3] x) => (float[n,3] y) {
        s = SequenceConstruct(x, x)
        y = ConcatFromSequence <axis = 0> (s) }"""
    )
    for opset in (13, 21):
        same(source, {"x": X}, opset=opset)


def test_quantized_models_are_kept_and_noted() -> None:
    source = model(
        """agraph (float[2,3] x) => (float[2,3] y) {
        q = QuantizeLinear(x, s, z)
        d = DequantizeLinear(q, s, z)
        y = Relu(d) }""",
        s=np.float32(0.1),
        z=np.int8(3),
    )
    graph = same(source, {"x": X})
    assert [node.op for node in graph.nodes] == ["QuantizeLinear", "DequantizeLinear", "Relu"]
    assert "the model has 2 QuantizeLinear and DequantizeLinear nodes already" in graph.info.notes


def test_shapes_are_inferred_inputs_and_outputs_stay_as_the_file_has_them() -> None:
    source = model("agraph (float[N,3] x) => (float[A,B] y) { h = MatMul(x, w)  y = Relu(h) }", w=(3, 400))
    graph = load(source)
    assert shape(tensors_by_name(graph)["h"]) == ("N", 400)
    assert shape(graph.outputs[0]) == ("A", "B") and shape(graph.inputs[0]) == ("N", 3)
    assert to_proto(graph).graph.output[0].type == source.graph.output[0].type


def test_shape_arithmetic_is_followed() -> None:
    source = model(
        """agraph (float[2,3,4] x) => (float[a,b] y) {
        s = Shape(x)
        zero = Constant <value = int64 {0}> ()
        n = Gather(s, zero)
        axes = Constant <value = int64[1] {0}> ()
        u = Unsqueeze(n, axes)
        rest = Constant <value = int64[1] {-1}> ()
        t = Concat <axis = 0> (u, rest)
        h = Reshape(x, t)
        y = Relu(h) }"""
    )
    assert shape(tensors_by_name(load(source))["h"]) == (2, 12)


def test_a_model_whose_shapes_cannot_be_inferred_loads_with_a_note() -> None:
    source = parsed("g (float[2,3] x, float[4,5] z) => (float[a,b] y) { h = MatMul(x, z)  y = Relu(h) }")
    graph = load(source)
    assert [node.op for node in graph.nodes] == ["MatMul", "Relu"]
    wrong_type = parsed("g (float[2,3] x) => (float[a,b] y) { h = Gather(x, x)  y = Relu(h) }")
    assert rank(tensors_by_name(load(wrong_type))["x"]) == 2


CARRIED = {
    "a tensor": helper.make_attribute("value", numpy_helper.from_array(X)),
    "a list of tensors": AttributeProto(
        name="value", type=AttributeProto.TENSORS, tensors=[numpy_helper.from_array(X, "a"), numpy_helper.from_array(X)]
    ),
    "a sparse tensor": helper.make_attribute("value", SPARSE),
    "a type": helper.make_attribute("value", helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 3])),
    "text": helper.make_attribute("value", "grün"),
    "bytes": AttributeProto(name="value", type=AttributeProto.STRING, s=b"\xff\x00a"),
    "lists of bytes": AttributeProto(name="value", type=AttributeProto.STRINGS, strings=[b"\xff", b"a"]),
    "no integers": AttributeProto(name="value", type=AttributeProto.INTS),
    "integers": helper.make_attribute("value", [1, -(2**62)]),
    "floats": helper.make_attribute("value", [0.1, 1e-30]),
    "nan": helper.make_attribute("value", float("inf")),
    "hidden": helper.make_attribute("__bits", 4),
}


@pytest.mark.parametrize("kind", CARRIED)
@pytest.mark.parametrize("source_opset", [11, 17])
def test_attributes_of_every_kind_survive(kind: str, source_opset: int) -> None:
    source = parsed("g (float[2,3] x) => (float[2,3] y) { y = my.Thing(x) }", f'"": {source_opset}, "my": 2')
    source.graph.node[0].attribute.append(CARRIED[kind])
    written = to_proto(load(source))
    attribute = written.graph.node[0].attribute[0]
    assert attribute == CARRIED[kind] or attribute.t.raw_data == CARRIED[kind].t.raw_data != b""
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": max(13, source_opset), "my": 2}


@pytest.mark.parametrize(
    ("op", "name", "kind"), [("ReduceMax", "axes", 7), ("LSTM", "activations", 8), ("LSTM", "activation_beta", 6)]
)
def test_an_empty_list_keeps_its_type(op: str, name: str, kind: int) -> None:
    source = parsed("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    source.graph.node[0].op_type = op
    source.graph.node[0].input.extend(["x", "x"] if op == "LSTM" else [])
    source.graph.node[0].attribute.append(AttributeProto(name=name, type=kind))  # type: ignore[arg-type]
    assert to_proto(load(source)).graph.node[0].attribute[0].type == kind


def test_hidden_attributes_run() -> None:
    source = model("agraph (float[2,3] x) => (float[2,3] y) { y = Relu <__bits = 4> (x) }")
    graph = same(source, {"x": X})
    assert graph.nodes[0].attrs["__bits"] == 4
    assert node_by_name(graph)["Relu_0"] is graph.nodes[0]


def test_weights_that_are_said_to_be_inline() -> None:
    """As in a model whose external data onnx.load has read: data_location is DEFAULT, and written."""
    weight = np.linspace(-1, 1, 3 * 4096, dtype=np.float32).reshape(3, 4096)
    source = model("agraph (float[2,3] x) => (float[2,4096] y) { y = MatMul (x, w) }", w=weight)
    source.graph.initializer[0].data_location = TensorProto.DEFAULT
    np.testing.assert_array_equal(constant(tensors_by_name(same(source, {"x": X}))["w"]), weight)

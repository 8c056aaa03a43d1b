"""Pieces of a graph as models of their own: the source's numbers, and the source untouched."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest

from sbonnx.errors import ModelError
from sbonnx.graph import Graph, digest, extract, load, to_proto
from sbonnx.graph.query import all_nodes, all_tensors, constant, node_by_name, tensors_by_name
from sbonnx.spec import Array
from tests.graph.test_edit import BRANCHES, X, links_are_whole, long_chain
from tests.support.models import model, residual, run


def with_outputs(source: onnx.ModelProto, *names: str) -> onnx.ModelProto:
    """The whole model with more outputs, to compare a piece with."""
    proto = onnx.ModelProto()
    proto.CopyFrom(source)
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in names)
    return proto


def checked(piece: Graph) -> onnx.ModelProto:
    proto = to_proto(piece)
    onnx.checker.check_model(proto, full_check=True)
    links_are_whole(piece)
    return proto


def test_a_piece_computes_what_the_whole_does() -> None:
    source = residual()
    graph = load(source)
    before, ids = digest(graph), [id(node) for node in all_nodes(graph)]
    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    whole = run(with_outputs(source, "r", "a", "c1"), {"x": image})
    piece = extract(graph, ["r"], ["a", "c1"])
    assert [tensor.name for tensor in piece.inputs] == ["r"] and [tensor.name for tensor in piece.outputs] == [
        "a",
        "c1",
    ]
    assert [node.name for node in piece.nodes] == ["conv1", "relu1", "conv2", "add"]
    got = run(checked(piece), {"r": whole["r"]})
    for name in ("a", "c1"):
        np.testing.assert_allclose(got[name], whole[name], rtol=1e-5, atol=1e-5)
    assert digest(graph) == before and [id(node) for node in all_nodes(graph)] == ids
    links_are_whole(graph)


def test_weights_are_shared_and_nothing_else() -> None:
    graph = load(residual())
    piece = extract(graph, ["x"], ["y"])
    mine, theirs = tensors_by_name(graph), tensors_by_name(piece)
    held, copied = constant(mine["w1"]), constant(theirs["w1"])
    assert held is not None and copied is not None and np.shares_memory(held, copied)
    assert not {id(tensor) for tensor in all_tensors(graph)} & {id(tensor) for tensor in all_tensors(piece)}
    assert not {id(node) for node in all_nodes(graph)} & {id(node) for node in all_nodes(piece)}
    piece.nodes[0].attrs["pads"] = [0, 0, 0, 0]
    assert graph.nodes[0].attrs["pads"] == [1, 1, 1, 1]


def test_an_input_in_the_middle_cuts_off_what_makes_it() -> None:
    graph = load(residual())
    piece = extract(graph, ["c2", "r"], ["r2"])
    assert [node.name for node in piece.nodes] == ["add", "relu2"]
    checked(piece)


def test_an_input_that_is_an_output_and_an_unused_one() -> None:
    graph = load(residual())
    piece = extract(graph, ["r", "x"], ["r", "c1"])
    assert [tensor.name for tensor in piece.inputs] == ["r", "x"] and [node.name for node in piece.nodes] == ["conv1"]
    checked(piece)


def test_one_of_two_outputs_of_a_node_is_given() -> None:
    source = model("agraph (float[4,2] x) => (float[2,2] y) { a, b = Split <axis = 0> (x)  y = Add(a, b) }", opset=13)
    piece = extract(load(source), ["x", "a"], ["y"])
    assert [node.op for node in piece.nodes] == ["Split", "Add"]
    values = {"x": np.arange(8, dtype=np.float32).reshape(4, 2), "a": np.zeros((2, 2), np.float32)}
    np.testing.assert_array_equal(run(checked(piece), values)["y"], values["x"][2:])


def test_a_constant_can_become_an_input() -> None:
    graph = load(residual())
    piece = extract(graph, ["r", "w1"], ["c1"])
    assert [tensor.name for tensor in piece.inputs] == ["r", "w1"]
    assert [tensor.name for tensor in to_proto(piece).graph.initializer] == ["b1"]
    checked(piece)


@pytest.mark.parametrize(
    ("inputs", "outputs", "says"),
    [
        (["r"], ["s"], r"needs 'x', which node 'stem' \(Conv\) reads, and the given inputs do not lead to it"),
        (["c1"], ["r2"], r"needs 'x'"),
        ([], ["x"], r"the piece needs 'x', and the given inputs"),
        (["nowhere"], ["r2"], r"there is no tensor 'nowhere'"),
        (["x"], ["nowhere"], r"there is no tensor 'nowhere'"),
    ],
)
def test_what_cannot_be_computed_is_refused(inputs: list[str], outputs: list[str], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        extract(load(residual()), inputs, outputs)


def test_a_scope_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ModelError, match="there is no scope 'If_0/body'"):
        extract(load(residual()), ["x"], ["y"], scope="If_0/body")


def test_an_input_of_unknown_type_is_refused() -> None:
    graph = load(residual())
    tensors_by_name(graph)["r"].dtype = None
    with pytest.raises(ModelError, match="element type of 'r' is not known"):
        extract(graph, ["r"], ["c1"])


def branch_values(flag: bool) -> tuple[Graph, dict[str, Array], dict[str, Array]]:
    source = model(BRANCHES, w=3)
    feeds = {"c": np.array(flag), "x": X}
    return load(source), feeds, run(with_outputs(source, "h", "k"), feeds)


@pytest.mark.parametrize("flag", [True, False])
def test_a_node_with_bodies_wants_what_they_capture(flag: bool) -> None:
    graph, feeds, whole = branch_values(flag)
    piece = extract(graph, ["c", "h", "k"], ["y"])
    assert [node.op for node in piece.nodes] == ["If"]
    got = run(checked(piece), {"c": feeds["c"], "h": whole["h"], "k": whole["k"]})
    np.testing.assert_allclose(got["y"], whole["y"], rtol=1e-6)
    longer = extract(graph, ["c", "h"], ["y"])
    assert [node.op for node in longer.nodes] == ["Relu", "If"], "what is captured is computed"
    np.testing.assert_allclose(run(checked(longer), {"c": feeds["c"], "h": whole["h"]})["y"], whole["y"], rtol=1e-6)
    with pytest.raises(ModelError, match="needs 'x'"):
        extract(graph, ["c"], ["y"])


def test_a_piece_of_a_branch_takes_outer_tensors_as_inputs() -> None:
    graph, _, whole = branch_values(True)
    piece = extract(graph, [], ["p"], scope="If_0/then_branch")
    assert [tensor.name for tensor in piece.inputs] == ["h"]
    np.testing.assert_allclose(run(checked(piece), {"h": whole["h"]})["p"], whole["y"], rtol=1e-6)
    inner = extract(graph, ["a"], ["p"], scope="If_0/then_branch")
    assert [tensor.name for tensor in inner.inputs] == ["a"] and [node.op for node in inner.nodes] == ["Neg"]
    links_are_whole(graph)


def test_a_piece_of_a_branch_with_a_branch_inside() -> None:
    graph, feeds, whole = branch_values(False)
    piece = extract(graph, [], ["q"], scope="If_0/else_branch")
    assert sorted(tensor.name for tensor in piece.inputs) == ["c", "h", "k"]
    values = {"c": feeds["c"], "h": whole["h"], "k": whole["k"]}
    np.testing.assert_allclose(run(checked(piece), values)["q"], whole["y"], rtol=1e-6)
    assert len(node_by_name(piece)) == 4


LOOP = """agraph (int64 n, float[3] x) => (float[3] y) {
    going = Constant <value = bool {1}> ()
    bias = Exp(x)
    y = Loop (n, going, x) <body = b (int64 i, bool ci, float[3] v) => (bool co, float[3] next) {
        co = Identity(ci)
        s = Mul(v, bias)
        next = Add(s, w) }>
}"""


def test_a_piece_of_a_loop_body() -> None:
    graph = load(model(LOOP, w=3))
    piece = extract(graph, ["v"], ["next"], scope="Loop_0/body")
    assert [tensor.name for tensor in piece.inputs] == ["v", "bias"]
    v, bias = np.ones(3, np.float32), np.full(3, 2, np.float32)
    weight = constant(tensors_by_name(graph)["w"])
    assert weight is not None
    np.testing.assert_allclose(run(checked(piece), {"v": v, "bias": bias})["next"], 2 + weight, rtol=1e-6)
    with pytest.raises(ModelError, match="needs 'v'"):
        extract(graph, ["bias"], ["next"], scope="Loop_0/body")


@pytest.mark.slow
def test_ten_thousand_pieces_of_ten_thousand_nodes() -> None:
    """Each piece costs what it holds, not what the graph holds."""
    graph = load(long_chain(10_000))
    index = tensors_by_name(graph)
    started = time.perf_counter()
    for layer in range(1, 5_000):
        piece = extract(graph, [f"m{layer - 1}", "x"], [f"m{layer}"], index=index)
        assert len(piece.nodes) == 2
    assert time.perf_counter() - started < 15

"""Questions to graphs and changes to them: links stay whole, names unique, answers the same."""

from __future__ import annotations

import time

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper

from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, Variable, load, to_proto
from sbonnx.graph.edit import (
    Names,
    add_constant,
    add_node,
    replace_all_uses,
    replace_input,
    replace_output,
    sort,
    sweep,
)
from sbonnx.graph.query import (
    all_nodes,
    all_tensors,
    attribute,
    captured,
    constant,
    dtype,
    node_by_name,
    output_names,
    producer,
    rank,
    readers,
    scopes,
    shape,
    tensors_by_name,
)
from tests.graph.editing import insert_after
from tests.support.models import model, run

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)

BRANCHES = """agraph (bool c, float[2,3] x) => (float[2,3] y) {
    h = Exp(x)
    k = Relu(h)
    y = If (c) <
        then_branch = t () => (float[2,3] p) { a = Add(h, w)  p = Neg(a) },
        else_branch = e () => (float[2,3] q) {
            i = If (c) <then_branch = t2 () => (float[2,3] r) { r = Add(h, h) },
                        else_branch = e2 () => (float[2,3] s) { s = Sub(k, w) }>
            q = Neg(i) }>
}"""


def branches() -> Graph:
    return load(model(BRANCHES, w=3))


def answers(graph: Graph) -> list[list[float]]:
    proto = to_proto(graph)
    onnx.checker.check_model(proto, full_check=True)
    return [run(proto, {"c": np.array(flag), "x": X})["y"].tolist() for flag in (True, False)]


def links_are_whole(graph: Graph) -> None:
    """Every node stands in the lists of its tensors as often as it uses them, and nothing else does."""
    uses: dict[int, int] = {}
    nodes = {id(node) for node in all_nodes(graph)}
    for node in all_nodes(graph):
        for tensor in node.inputs:
            uses[id(tensor)] = uses.get(id(tensor), 0) + 1
            assert sum(reader is node for reader in tensor.outputs) == sum(read is tensor for read in node.inputs)
        for tensor in node.outputs:
            assert [maker is node for maker in tensor.inputs] == [True]
    for tensor in all_tensors(graph):
        assert len(tensor.outputs) == uses.get(id(tensor), 0), tensor.name
        assert all(id(node) in nodes for node in [*tensor.inputs, *tensor.outputs])
    names = [tensor.name for tensor in all_tensors(graph)]
    assert len(names) == len(set(names))


def test_questions() -> None:
    graph = branches()
    tensors, nodes = tensors_by_name(graph), node_by_name(graph)
    assert [where for where, _ in scopes(graph)] == [
        "",
        "If_0/then_branch",
        "If_0/else_branch",
        "If_0/else_branch/If_1/then_branch",
        "If_0/else_branch/If_1/else_branch",
    ]
    assert [(node.op, index) for node, index in readers(tensors["h"])] == [
        ("Relu", 0),
        ("Add", 0),
        ("Add", 0),
        ("Add", 1),
    ]
    assert producer(tensors["h"]) is nodes["Exp_0"] and producer(tensors["x"]) is None
    assert producer(tensors["w"]) is None and isinstance(tensors["w"], Constant)
    assert output_names(graph) == {"y", "p", "q", "r", "s"}
    then, other = (body for _, body in list(scopes(graph))[1:3])
    assert [tensor.name for tensor in captured(then)] == ["h"]
    assert {tensor.name for tensor in captured(other)} == {"h", "k", "c"}
    assert shape(tensors["k"]) == (2, 3) and rank(tensors["k"]) == 2 and dtype(tensors["k"]) == np.float32
    assert shape(Variable("v")) is None and rank(Variable("v")) is None and dtype(Variable("v")) is None
    assert dtype(Variable("v", dtype=TensorProto.BFLOAT16)) == helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
    assert constant(tensors["h"]) is None and constant(None) is None
    links_are_whole(graph)


def test_attributes() -> None:
    graph = load(
        model("agraph (int64[2] s) => (float[a,b] y) { y = ConstantOfShape <value = float[1] {2.5}> (s) }", opset=20)
    )
    value = attribute(graph.nodes[0], "value")
    assert isinstance(value, np.ndarray) and value.tolist() == [2.5]
    assert attribute(graph.nodes[0], "none", 7) == 7 and attribute(graph.nodes[0], "none") is None


def test_names_collide_with_nothing() -> None:
    graph = branches()
    names = Names(graph)
    assert names.fresh("new") == "new" and names.fresh("new") == "new_1" and names.fresh("new") == "new_2"
    for taken in ("h", "a", "r", "w", "If_1"):  # outer, inner, deepest, constant, node
        assert names.fresh(taken) == f"{taken}_1"
    assert names.fresh("h_1") == "h_1_1" and names.fresh("") == "_1"


def test_a_node_after_a_tensor_is_seen_by_all_readers() -> None:
    graph = branches()
    before = answers(graph)
    tensors, names = tensors_by_name(graph), Names(graph)
    out = insert_after(tensors["h"], "Identity", graph=graph, names=names)
    assert {(node.op, index) for node, index in readers(out)} == {("Relu", 0), ("Add", 0), ("Add", 1)}
    assert [node.op for node, _ in readers(tensors["h"])] == ["Identity"]
    assert answers(graph) == before and shape(out) == (2, 3) and dtype(out) == np.float32
    links_are_whole(graph)
    sort(graph)
    assert [node.op for node in graph.nodes] == ["Exp", "Identity", "Relu", "If"]


def test_a_node_after_an_output_takes_its_name() -> None:
    graph = branches()
    before = answers(graph)
    names = Names(graph)
    for scope in [scope for _, scope in scopes(graph)]:
        old = scope.outputs[0].name
        insert_after(scope.outputs[0], "Identity", graph=scope, names=names)
        assert scope.outputs[0].name == old and scope.outputs[0].inputs[0].op == "Identity"
    assert answers(graph) == before
    links_are_whole(graph)


def test_uses_move_and_some_are_kept() -> None:
    graph = branches()
    tensors = tensors_by_name(graph)
    relu = node_by_name(graph)["Relu_0"]
    assert replace_all_uses(tensors["h"], tensors["x"], graph=graph, keep=[relu]) == 3
    assert [node.op for node, _ in readers(tensors["h"])] == ["Relu"]
    assert len(readers(tensors["x"])) == 4
    links_are_whole(graph)


@pytest.mark.parametrize("to", ["x", "w", "h"])
def test_an_output_replaced_by_what_cannot_take_its_name(to: str) -> None:
    """An input, a constant and a tensor that is an output already: an Identity stands between."""
    source = model("agraph (float[2,3] x) => (float[2,3] h, float[2,3] y) { h = Exp(x)  y = Identity(h) }", w=(2, 3))
    source.graph.node.append(helper.make_node("Neg", ["w"], ["u"], name="n"))
    graph = load(source)
    tensors = tensors_by_name(graph)
    value = constant(tensors["w"]) if to == "w" else {"x": X, "h": np.exp(X)}[to]
    assert value is not None
    assert replace_all_uses(tensors["y"], tensors[to], graph=graph) == 1
    assert [tensor.name for tensor in graph.outputs] == ["h", "y"]
    sweep(graph)
    links_are_whole(graph)
    np.testing.assert_allclose(run(to_proto(graph), {"x": X})["y"], value, rtol=1e-6)


def test_an_output_replaced_by_a_tensor_of_the_graph_keeps_its_name() -> None:
    graph = load(model("agraph (float[2,3] x) => (float[2,3] y) { h = Exp(x)  y = Identity(h) }"))
    tensors = tensors_by_name(graph)
    replace_all_uses(tensors["y"], tensors["h"], graph=graph)
    assert sweep(graph) == 1
    assert [node.op for node in graph.nodes] == ["Exp"] and graph.outputs[0].name == "y"
    np.testing.assert_allclose(run(to_proto(graph), {"x": X})["y"], np.exp(X), rtol=1e-6)
    links_are_whole(graph)


def test_inputs_and_outputs_are_replaced_one_by_one() -> None:
    graph = branches()
    add = node_by_name(graph)["Add_1"]
    replace_input(add, 1, tensors_by_name(graph)["k"])
    assert [tensor.name for tensor in add.inputs] == ["h", "k"]
    links_are_whole(graph)
    exp = node_by_name(graph)["Exp_0"]
    old, new = exp.outputs[0], Variable("new", np.dtype(np.float32), (2, 3))
    replace_output(exp, 0, new)
    replace_all_uses(old, new, graph=graph)
    links_are_whole(graph)
    h = np.exp(X)
    np.testing.assert_allclose(
        answers(graph)[1], -(np.maximum(h, 0) - constant(tensors_by_name(graph)["w"])), rtol=1e-5
    )


def test_new_nodes_and_constants() -> None:
    graph = branches()
    names = Names(graph)
    two = add_constant(graph, "two", np.array(2, np.float32), names)
    node = add_node(graph, "Mul", [graph.outputs[0], two], names=names, stem="double", attrs={"__note": "x"})
    assert (node.name, node.outputs[0].name, two.name) == ("double", "double_out", "two")
    split = add_node(graph, "Split", [node.outputs[0]], names=names, stem="double", outputs=2)
    assert split.name == "double_1" and [tensor.name for tensor in split.outputs] == ["double_1_out0", "double_1_out1"]
    links_are_whole(graph)


def test_sweep_removes_what_nothing_needs_in_every_scope() -> None:
    graph = branches()
    before = answers(graph)
    names = Names(graph)
    for _, scope in list(scopes(graph)):
        chain = scope.outputs[0]
        for _ in range(2):
            chain = add_node(scope, "Relu", [chain], names=names, stem="dead").outputs[0]
    lost = add_constant(graph, "lost", X, names)
    add_node(graph, "Add", [tensors_by_name(graph)["h"], lost], names=names, stem="dead")
    assert sweep(graph) == 11 and sweep(graph) == 0
    assert lost.name not in tensors_by_name(graph) and not any("dead" in node.name for node in all_nodes(graph))
    assert answers(graph) == before
    links_are_whole(graph)


def test_sweep_takes_a_dead_node_with_its_bodies() -> None:
    graph = branches()
    graph.outputs = [tensors_by_name(graph)["h"]]
    assert sweep(graph) == 8  # Relu, If, and what is in the bodies
    assert [node.op for node in graph.nodes] == ["Exp"] and [tensor.name for tensor in graph.inputs] == ["c", "x"]
    links_are_whole(graph)


def test_sweep_keeps_inputs_outputs_and_nodes_of_which_one_output_is_needed() -> None:
    source = model(
        """agraph (float[2,4] x, float[3] unused) => (float[2,2] y, float[3] same) {
        y, z = Split <axis = 1> (x)
        same = Identity(unused)
        dead = Relu(z) }""",
        opset=13,
    )
    graph = load(source)
    graph.outputs.pop()
    assert sweep(graph) == 2
    assert [tensor.name for tensor in graph.inputs] == ["x", "unused"] and len(graph.nodes[0].outputs) == 2


def test_sort_counts_readers_in_branches_and_keeps_order() -> None:
    graph = branches()
    before = answers(graph)
    order = [node.name for node in graph.nodes]
    sort(graph)
    assert [node.name for node in graph.nodes] == order
    for _, scope in scopes(graph):
        scope.nodes.reverse()
    assert answers(graph) == before, "writing sorts"
    sort(graph)
    assert [node.name for node in graph.nodes] == order


def test_a_cycle_is_refused() -> None:
    graph = branches()
    replace_input(node_by_name(graph)["Exp_0"], 0, tensors_by_name(graph)["k"])
    with pytest.raises(ModelError, match="depends on its own output: the graph has a cycle"):
        sort(graph)
    with pytest.raises(ModelError, match="cycle"):
        to_proto(graph)


def test_a_constant_read_in_two_branches_is_written_once_where_both_see_it() -> None:
    graph = branches()
    names = Names(graph)
    shared = add_constant(graph, "shared", np.ones(3, np.float32), names)
    for name in ("Add_0", "Add_1"):
        replace_input(node_by_name(graph)[name], 1, shared)
    proto = to_proto(graph)
    onnx.checker.check_model(proto, full_check=True)
    assert [tensor.name for tensor in proto.graph.initializer] == ["shared"]
    assert len(answers(graph)) == 2


def long_chain(count: int) -> ModelProto:
    nodes = []
    last = "x"
    for index in range(count // 2):
        nodes.append(helper.make_node("Add", [last, "x"], [f"a{index}"], name=f"add{index}"))
        nodes.append(helper.make_node("Mul", [f"a{index}", "w"], [f"m{index}"], name=f"mul{index}"))
        last = f"m{index}"
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3]) for name in ("x", last)]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [3], [1.0, 0.5, 0.25])
    graph = helper.make_graph(nodes, "long", ends[:1], ends[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
def test_ten_thousand_nodes_and_a_tensor_that_all_of_them_read() -> None:
    """Quadratic ways take minutes here."""
    graph = load(long_chain(10_000))
    names, tensors = Names(graph), tensors_by_name(graph)
    started = time.perf_counter()
    insert_after(tensors["x"], "Relu", graph=graph, names=names)
    replace_all_uses(tensors["w"], add_constant(graph, "v", np.ones(3, np.float32), names), graph=graph)
    for index in range(0, 5_000, 5):
        insert_after(tensors[f"a{index}"], "Relu", graph=graph, names=names)
    sort(graph)
    graph.outputs = [tensors["m2500"]]
    removed = sweep(graph)
    to_proto(graph)
    assert removed > 4_000 and len(graph.nodes) > 4_000
    assert time.perf_counter() - started < 15
    assert isinstance(graph.nodes[0], Node)

"""The size of inlined local functions is computed before inlining."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, helper, parser

from sbonnx.errors import ModelError
from sbonnx.graph import load
from sbonnx.graph.local_functions import InlinedSize, Key, _callees_first, _cost, inline, key_of
from sbonnx.graph.query import all_nodes
from tests.support.models import run

IMPORTS = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]


def model(functions: list[FunctionProto], node: NodeProto) -> ModelProto:
    made: ModelProto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17, "f": 1]> g (float[2] x) => (float[2] y) { }'
    )
    made.graph.node.append(node)
    made.functions.extend(functions)
    return made


def call(name: str, *, source: str = "a", target: str = "b", **attributes: Any) -> NodeProto:
    return helper.make_node(name, [source], [target], domain="f", **attributes)


def function(name: str, nodes: list[NodeProto], attributes: tuple[str, ...] = ()) -> FunctionProto:
    return helper.make_function("f", name, ["a"], ["b"], nodes, IMPORTS, attributes)


def doubling(count: int) -> ModelProto:
    """Each function calls the next one twice."""
    relu = helper.make_node("Relu", ["a"], ["b"])
    calls = [[call(f"f{n + 1}", target="m"), call(f"f{n + 1}", source="m")] for n in range(count)]
    functions = [function(f"f{n}", nodes) for n, nodes in enumerate([*calls, [relu]])]
    return model(functions, call("f0", source="x", target="y"))


def chain(count: int) -> ModelProto:
    relu = helper.make_node("Relu", ["a"], ["b"])
    functions = [function(f"f{n}", [call(f"f{n + 1}") if n < count else relu]) for n in range(count + 1)]
    return model(functions, call("f0", source="x", target="y"))


def deep(count: int) -> ModelProto:
    """Each function holds an If that calls the next one."""
    functions = []
    for number in range(count + 1):
        inner = call(f"f{number + 1}") if number < count else helper.make_node("Relu", ["a"], ["b"])
        branch = helper.make_graph([inner], "t", [], [helper.make_empty_tensor_value_info("b")])
        always = helper.make_node("Constant", [], ["c"], value_int=1)
        cast = helper.make_node("Cast", ["c"], ["d"], to=9)
        choice = helper.make_node("If", ["d"], ["e"], then_branch=branch, else_branch=branch)
        functions.append(function(f"f{number}", [always, cast, choice, helper.make_node("Identity", ["e"], ["b"])]))
    return model(functions, call("f0", source="x", target="y"))


def copied_attribute() -> ModelProto:
    """One long attribute of a call, that stands in many nodes of the function."""
    node = helper.make_node("Constant", [], [""])
    node.attribute.append(AttributeProto(name="value_floats", ref_attr_name="v", type=AttributeProto.FLOATS))
    nodes = []
    for number in range(2000):
        nodes.append(NodeProto.FromString(node.SerializeToString()))
        nodes[-1].output[0] = f"c{number}"
    nodes.append(helper.make_node("Relu", ["a"], ["b"]))
    return model([function("f0", nodes, ("v",))], call("f0", source="x", target="y", v=[1.0] * 100_000))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (doubling(25), r"function 'f\.f9' would have 65536 nodes; the limit is 50000"),
        (chain(200), r"would have 101 nested function calls; the limit is 100"),
        (deep(40), r"would have \d+ (nodes|nested graphs); the limit is"),
        (copied_attribute(), r"would have \d{9,} bytes; the limit is"),
    ],
    ids=["doubling", "chain", "deep", "copied attribute"],
)
def test_what_would_become_too_large(made: ModelProto, says: str) -> None:
    start = time.process_time()
    with pytest.raises(ModelError, match=f"its functions cannot be inlined: .*{says}") as caught:
        load(made)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 5


@pytest.mark.parametrize("made", [doubling(6), chain(20), deep(3)], ids=["doubling", "chain", "deep"])
def test_the_computed_size_is_that_of_the_inlined_graph(made: ModelProto) -> None:
    costs: dict[Key, InlinedSize] = {}
    for one in _callees_first(made):
        costs[key_of(one)] = _cost(one.node, costs)
    counted = _cost(made.graph.node, costs)
    constants = 2**4 - 1 if "If" in str(made) else 0  # Constant nodes become constants
    assert len(list(all_nodes(load(made)))) == counted.nodes - constants


def test_a_parameter_without_argument_is_no_empty_input() -> None:
    scale = "<float[8] w = {1, 1, 1, 1, 1, 1, 1, 1}>"
    nested = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17, "f": 1]> '
        f"g (float[2,8] x, float[2,8] skip) => (float[2,8] y) {scale} {{ y = f.Norm (x, skip, w) }} "
        '<domain: "f", opset_import: ["": 17]> '
        "Norm (a, b, scale, bias) => (out) { added = Add (a, b) out = LayerNormalization (added, scale, bias) }"
    )
    inlined = inline(nested, "model")
    assert [len(node.input) for node in inlined.graph.node] == [2, 2]
    feed = {"x": np.arange(16, dtype=np.float32).reshape(2, 8), "skip": np.ones((2, 8), np.float32)}
    assert np.isfinite(run(inlined, feed, level="all")["y"]).all()

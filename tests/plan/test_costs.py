"""Prices of single nodes: what the table holds, and nothing for what it does not."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx import graph as graphs
from sbonnx.backends.onnxruntime.costs import DERIVED, load_costs
from sbonnx.pipeline import prepare
from sbonnx.stages.state import read_recipe
from sbonnx.system.cpu import CPUS, TargetCpu
from tests.support.models import model
from tests.support.values import some


def test_integer_convolutions_are_cheaper_and_pools_dearer() -> None:
    proto = model(
        """agraph (float[1,64,56,56] x) => (float[1,64,28,28] y) {
            c = Conv <pads = [1,1,1,1]> (x, w)
            y = AveragePool <kernel_shape = [2,2], strides = [2,2]> (c)
        }""",
        w=(64, 64, 3, 3),
    )
    conv, pool = (load_costs().of(node) for node in graphs.load(proto).nodes)
    assert conv is not None
    assert conv.integers < conv.floats / 2
    assert pool is not None
    assert pool.integers > pool.floats * 2


@pytest.mark.parametrize("cpu", ["vnni", "avx2", "avx512"])
@pytest.mark.parametrize("groups", [2, 16])
def test_several_outputs_of_one_channel_are_no_depthwise_convolution(groups: int, cpu: str) -> None:
    """onnxruntime has no kernel for them: in integers, each group copies its windows."""
    text = f"""agraph (float[1,{groups},200,96] x) => (float[1,64,200,96] y) {{
        y = Conv <pads = [1,1,1,1], group = {groups}> (x, w)
    }}"""
    price = load_costs(cpu=CPUS[cpu]).of(graphs.load(model(text, w=(64, 1, 3, 3))).nodes[0])
    assert price is not None
    assert price.integers > 2 * price.floats


@pytest.mark.parametrize("cpu", CPUS.values(), ids=lambda cpu: cpu.name)
def test_every_class_of_cpu_has_costs(cpu: TargetCpu) -> None:
    """Convolutions gain most with dot products; with uint8 weights (exact products), least."""
    text = """agraph (float[1,64,28,28] x) => (float[1,64,28,28] y) { y = Conv <pads = [1,1,1,1]> (x, w) }"""
    node = graphs.load(model(text, w=(64, 64, 3, 3))).nodes[0]
    signed, unsigned = (costs.of(node) for costs in (load_costs(cpu=cpu), load_costs(cpu=cpu).with_unsigned_weights()))
    assert signed is not None
    assert unsigned is not None
    ratios = signed.integers / signed.floats, unsigned.integers / unsigned.floats
    if DERIVED.get(cpu.name, cpu.name) == "vnni":
        assert ratios[0] == ratios[1] < 0.4
    else:
        assert 0.4 < ratios[0] < 0.75
        assert 1.1 * ratios[0] < ratios[1] < 1


@pytest.mark.parametrize("text", ["y = Conv (x, w)", "y = Exp (x)"])
def test_sequences_and_unknown_ops_have_no_price(text: str) -> None:
    proto = model(f"agraph (float[1,4,9] x) => (float[1,4,7] y) {{ {text} }}", w=(4, 4, 3))
    assert load_costs().of(graphs.load(proto).nodes[0]) is None


def test_nodes_without_inputs() -> None:
    """An If of a constant reads nothing by itself, nor does an Optional."""
    body = [
        helper.make_graph(
            [helper.make_node("Identity", ["x"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2])],
        )
        for name in ("a", "b")
    ]
    nodes = [
        helper.make_node("RandomNormal", [], ["r"], shape=[2], name="random"),
        helper.make_node("If", ["c"], ["i"], then_branch=body[0], else_branch=body[1]),
        helper.make_node("Add", ["i", "r"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(proto)
    wishes, rules = read_recipe(None, "onnxruntime", {})
    assert prepare(proto, wishes, rules).plan.sites == ()


@pytest.mark.parametrize("cpu", ["vnni", "avx2"])
def test_rows_of_one_tap_cost_as_much_as_rows_of_three(cpu: str) -> None:
    """12 channels are copied (im2col): 7x1 took 1.5 to 2.1 times as long in integers as in float, 7x3 the same."""
    ratios = []
    for columns in (1, 3):
        pads = f"3,{columns // 2},3,{columns // 2}"
        text = f"agraph (float[1,12,128,93] x) => (float[1,12,128,93] y) {{ y = Conv <pads=[{pads}]> (x, w) }}"
        (node,) = graphs.load(model(text, w=(12, 12, 7, columns))).nodes
        price = some(load_costs(cpu=CPUS[cpu]).of(node))
        ratios.append(price.integers / price.floats)
    assert ratios[0] > 1.3 and ratios[1] < 1.1

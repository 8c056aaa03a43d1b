"""Estimated time of graphs: sums of the backend's prices, steps of channels, no plan slower than float."""

from __future__ import annotations

import onnx
import pytest

from benchmarks.detectors import DETECTORS
from sbonnx import graph as graphs
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.backends.onnxruntime.costs import load_costs
from sbonnx.graph import Graph, Node
from sbonnx.pipeline import prepare
from sbonnx.planning import Plan, cost_partition, plan_times
from sbonnx.planning.times import GraphTimes
from sbonnx.stages.state import Prepared, read_recipe
from tests.support.models import model

CHAIN = """agraph (float[1,16,40,40] x) => (float[1,32,40,40] y) {
    [one] a = Conv <pads = [1,1,1,1]> (x, w0)
    [act] r = Relu (a)
    [two] b = Conv <pads = [1,1,1,1]> (r, w1)
    [end] y = Sqrt (b)
}"""


def times_of(graph: Graph, costs: KernelCosts) -> GraphTimes:
    return GraphTimes.of(graph.nodes, {output.name for output in graph.outputs}, costs)


def test_the_time_of_a_division_is_the_sum_of_the_backends_prices() -> None:
    graph, costs = graphs.load(model(CHAIN, w0=(32, 16, 3, 3), w1=(32, 32, 3, 3))), load_costs()
    one, _, two, end = graph.nodes
    prices = {node.name: costs.of(node) for node in (one, two)}
    first, second = prices["one"], prices["two"]
    assert first is not None and second is not None and costs.of(end) is None
    x, r, b = one.inputs[0], two.inputs[0], two.outputs[0]
    times = times_of(graph, costs)
    floats = costs.reorder_input(x) + first.floats + second.floats + costs.reorder_output(b)
    assert times.of_division(()) == pytest.approx(floats)
    whole = first.integers + second.integers
    edges = costs.quantize(x, reorder=False) + costs.dequantize(b, reorder=False)
    assert times.of_division({"one", "two"}) == pytest.approx(whole + edges)
    half = costs.quantize(x, reorder=False) + first.integers + costs.dequantize(r, reorder=True)
    assert times.of_division({"one"}) == pytest.approx(half + second.floats + costs.reorder_output(b))
    half = costs.reorder_input(x) + first.floats + costs.quantize(r, reorder=True) + second.integers
    assert times.of_division({"two"}) == pytest.approx(half + costs.dequantize(b, reorder=False))


def conv(into: int, out: int, side: int = 20, group: int = 1) -> Node:
    text = f"agraph (float[1,{into},{side},{side}] x) => (float[1,{out},{side},{side}] y) "
    text += f"{{ y = Conv <group = {group}, pads = [1,1,1,1]> (x, w) }}"
    return graphs.load(model(text, w=(out, into // group, 3, 3))).nodes[0]


def price(*sizes: int, **more: int) -> tuple[float, float]:
    found = load_costs().of(conv(*sizes, **more))
    assert found is not None
    return found.floats, found.integers


def test_prices_know_blocks_and_remainders_of_channels() -> None:
    assert price(32, 20)[0] == price(32, 32)[0] > price(32, 16)[0], "float computes whole blocks of 16"
    assert price(20, 32)[0] == pytest.approx(price(32, 32)[0])
    assert price(64, 18, side=40)[1] > price(64, 24, side=40)[1], (
        "outputs that are no multiple of 4 are slow in integers"
    )
    assert price(24, 24, group=24)[1] == price(32, 32, group=32)[1], "depthwise layers are widened to 16"
    floats, integers = price(16, 16, side=80, group=16)
    assert integers > floats, "few channels: a depthwise layer gathers its input"
    floats, integers = price(64, 64, side=40)
    assert integers < floats / 2


def test_a_pool_between_a_float_and_an_integer_convolution() -> None:
    """onnxruntime moves the QuantizeLinear before the pool, whose kernel for codes with channels first is slow."""
    text = """agraph (float[1,32,40,40] x) => (float[1,32,20,20] y) {
        a = Conv <pads = [1,1,1,1]> (x, w0)
        p = MaxPool <kernel_shape = [2,2], strides = [2,2]> (a)
        c = Conv <pads = [1,1,1,1]> (p, w1)
        y = Sqrt (c)
    }"""
    graph, costs = graphs.load(model(text, w0=(32, 32, 3, 3), w1=(32, 32, 3, 3))), load_costs()
    first, pool, last, _ = graph.nodes
    assert costs.quantize(pool.outputs[0], reorder=True) > costs.quantize(first.outputs[0], reorder=True), (
        "of a quarter"
    )
    times = times_of(graph, costs)
    assert times.of_division({last.name}) > times.of_division({first.name, pool.name, last.name})


def prepared(proto: onnx.ModelProto) -> Prepared:
    recipe, backend = read_recipe(None, "onnxruntime", {})
    return prepare(proto, recipe, backend)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", DETECTORS)
def test_no_plan_of_a_small_detector_is_slower_than_float(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_partition, "MODEL_SLACK_NS", 0.0)
    found = prepared(DETECTORS[name]())
    time_of = plan_times(found.graph, load_costs())
    assert found.plan.of_role("weight")
    assert time_of(found.plan) <= time_of(Plan(()))


def test_layers_that_lose_in_integers_stay_float() -> None:
    """The stem and the depthwise layer of 16 channels at 160 x 160 of an SSD."""
    slow = {refusal.where for refusal in prepared(DETECTORS["ssd"]()).refusals if refusal.code == "slower-in-integers"}
    assert {"Conv_0", "Conv_2"} <= slow


def test_integers_in_a_network_of_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of 64 values take longer in integers, by the fixed time of a kernel; ten of 1024 values do not."""
    monkeypatch.setattr(cost_partition, "MODEL_SLACK_NS", 0.0)
    text = "agraph (float[1,4] x) => (float[1,1] y) { a = MatMul (x, w0) r = Relu (a) b = MatMul (r, w1) y = Relu (b) }"
    small, large = (prepared(model(text, w0=(4, side), w1=(side, 1 if side == 64 else side))) for side in (64, 1024))
    assert not small.plan.sites and large.plan.of_role("weight")


def test_filters_larger_than_the_measured_ones_have_a_price() -> None:
    """A decimation filter of 256 taps takes about 10 times as long in integers, which copy its windows one by one."""
    text = "agraph (float[1,1,1,4096] x) => (float[1,1,1,1921] y) { y = Conv <strides = [1,2]> (x, w) }"
    price = load_costs().of(graphs.load(model(text, w=(1, 1, 1, 256))).nodes[0])
    assert price is not None and price.integers > 2 * price.floats


def test_only_stems_of_stride_2_are_folded() -> None:
    """7 x 7 taps of one channel with strides of 1 and 3 are gathered one by one."""
    floats, integers = [], []
    for strides in ("[2,2]", "[1,4]"):
        text = "agraph (float[1,1,96,96] x) => (float y) { y = Conv <pads=[3,3,3,3], strides=" + strides + "> (x, w) }"
        price = load_costs().of(graphs.load(model(text, w=(32, 1, 7, 7))).nodes[0])
        assert price is not None
        floats.append(price.floats)
        integers.append(price.integers)
    assert floats[0] == pytest.approx(floats[1], rel=0.1) and integers[1] > 2 * integers[0]

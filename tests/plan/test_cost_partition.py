"""Which integer kernels pay: the cut against every division tried one by one, and what becomes of it in plans."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx import graph as graphs
from sbonnx.backends.kernel_costs import KINDS, KernelCosts, Price
from sbonnx.backends.onnxruntime.costs import BUNDLED, OrtKernelCosts, load_costs
from sbonnx.errors import RecipeError
from sbonnx.graph import Node, Tensor, query
from sbonnx.pipeline import prepare
from sbonnx.planning import costs_of
from sbonnx.planning.cost_partition import SLACK_NS, SLACK_SHARE, slower_in_integers
from sbonnx.planning.survey import Survey
from sbonnx.planning.times import GraphTimes
from sbonnx.report.codes import Reason
from sbonnx.stages.state import read_recipe
from tests.support.models import model

WEIGHTS: dict[str, Any] = {f"w{index}": (4, 4, 1, 1) for index in range(4)}

BRANCHES = """agraph (float[N,4,8,8] x) => (float[N,4,8,8] y) {
    a = Conv (x, w0)
    b = Conv (a, w1)
    s = Sigmoid (b)
    m = Mul (b, s)
    t = Transpose <perm = [0,1,3,2]> (m)
    c = Conv (t, w2)
    d = Add (c, a)
    e = AveragePool <kernel_shape = [3,3], pads = [1,1,1,1]> (d)
    y = Conv (e, w3)
}"""


class Prices(OrtKernelCosts):
    """Prices by chance; those of an op do not change."""

    def __init__(self, seed: int) -> None:
        super().__init__({})
        object.__setattr__(self, "seed", seed)

    def _chance(self, what: str, name: str) -> float:
        # whole microseconds by a seeded, portable generator: no two sums fall together by rounding
        return float(random.Random(f"{self.seed}{what}{name}").randrange(1000, 60_000_000))  # type: ignore[attr-defined]

    def of(self, node: Node) -> Price | None:
        return Price(self._chance("float", node.name), self._chance("integer", node.name))

    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        return self._chance("quantize", tensor.name)

    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        return self._chance("dequantize", tensor.name)


def times_of(survey: Survey, costs: KernelCosts) -> GraphTimes:
    return GraphTimes.of((place.node for place in survey.places), survey.outputs, costs)


def price_of(survey: Survey, able: set[str], integers: set[str], costs: KernelCosts) -> float:
    """What a division costs, added up as one would by hand."""
    nodes = [place.node for place in survey.places]
    prices = {node.name: price for node in nodes if (price := costs.of(node)) is not None}
    slack = max(SLACK_NS, SLACK_SHARE * sum(prices[name].floats for name in able))
    total = 0.0
    for node in nodes:
        price = prices[node.name]
        extra = slack if node.name in able else 0.0
        total += price.integers if node.name in integers else price.floats + extra
    tensors = {tensor.name: tensor for node in nodes for tensor in (*node.inputs, *node.outputs)}
    for tensor in tensors.values():
        if query.constant(tensor) is not None:
            continue
        producer = query.producer(tensor)
        written = producer is not None and producer.name in integers
        read = {node.name in integers for node, index in query.readers(tensor)}
        read |= {False} if tensor.name in survey.outputs else set()
        if not written and True in read:
            total += costs.quantize(tensor, reorder=False)
        if written and False in read:
            total += costs.dequantize(tensor, reorder=False)
    return total


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_cut_is_the_cheapest_of_all_divisions(seed: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbonnx.planning.cost_partition.MODEL_SLACK_NS", math.inf)
        check_the_cut(seed)


def check_the_cut(seed: int) -> None:
    survey = Survey(graphs.load(model(BRANCHES, **WEIGHTS)))
    names = [place.node.name for place in survey.places]
    movers = {place.node.name for place in survey.places if place.node.op == "Transpose"}
    able = set(names) - movers
    costs = Prices(seed)
    floats = set(slower_in_integers(survey, able, frozenset(), times_of(survey, costs)))
    best = min(
        price_of(survey, able, {name for name, chosen in zip(names, choice, strict=True) if chosen}, costs)
        for choice in itertools.product((False, True), repeat=len(names))
    )
    found = min(price_of(survey, able, (able - floats) | moved, costs) for moved in (set(), movers))
    assert found == pytest.approx(best, rel=1e-9)


class EqualPrices(Prices):
    """Every op loses 8 µs in integers; conversions cost nothing."""

    def of(self, node: Node) -> Price | None:
        return Price(50_000.0, 58_000.0)

    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        return 0.0

    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        return 0.0


def test_small_losses_of_many_ops_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is below the slack of an op; together they are not."""
    survey = Survey(graphs.load(model(BRANCHES, **WEIGHTS)))
    names = {place.node.name for place in survey.places if place.node.op != "Transpose"}
    slack = 2.5 * 8000
    monkeypatch.setattr("sbonnx.planning.cost_partition.MODEL_SLACK_NS", slack)
    assert len(names) * 8000 > slack and SLACK_NS > 8000
    assert set(slower_in_integers(survey, names, frozenset(), times_of(survey, EqualPrices(0)))) == names
    two = {place.node.name for place in survey.places if place.node.name in sorted(names)[:2]}
    assert slower_in_integers(survey, two, frozenset(), times_of(survey, EqualPrices(0))) == {}


POOLED = """agraph (float[N,64,56,56] x) => (float[N,64,28,28] y) {
    a = Conv <pads = [1,1,1,1]> (x, w0)
    r = Relu (a)
    p = AveragePool <kernel_shape = [2,2], strides = [2,2]> (r)
    b = Conv <pads = [1,1,1,1]> (p, w1)
    t = Relu (b)
    c = Conv <pads = [1,1,1,1]> (t, w2)
    y = Sigmoid (c)
}"""


def pooled() -> onnx.ModelProto:
    square = (64, 64, 3, 3)
    return model(POOLED, w0=square, w1=square, w2=square)


def plan_of(proto: onnx.ModelProto, **overrides: Any) -> tuple[set[str], dict[str, Reason]]:
    """Op types with a weight or an output in integers, and what is slower in integers with the reason."""
    wishes, rules = read_recipe(None, "onnxruntime", overrides)
    prepared = prepare(proto, wishes, rules)
    ops = {node.name: node.op for node in prepared.graph.nodes}
    integer = {ops[reader.node] for site in prepared.plan.of_role("weight") for reader in site.readers}
    integer |= {op for op in ops.values() if any(f"QLinear{op}" in site.why for site in prepared.plan.sites)}
    slow = {ops[r.where]: r.why for r in prepared.refusals if r.code == "slower-in-integers"}
    return integer, slow


def test_a_slow_integer_pool_stays_float_and_says_so() -> None:
    ops, slow = plan_of(pooled())
    assert ops == {"Conv"}
    assert list(slow) == ["AveragePool"]
    assert "µs a sample" in slow["AveragePool"]


def test_rules_alone_quantize_it() -> None:
    assert plan_of(pooled(), kernel_costs="none") == ({"Conv", "AveragePool"}, {})


def test_what_a_recipe_asks_for_by_name_is_done() -> None:
    assert plan_of(pooled(), **{"QUANTIZE_INPUTS_OF.POOL": True}) == ({"Conv", "AveragePool"}, {})


def test_a_users_table_of_kernel_costs(tmp_path: Path) -> None:
    """Where integer convolutions cost a second, nothing is quantized."""
    text = BUNDLED.read_text().replace('"kernel": "QLinearConv", ', '"kernel": "QLinearConv", "was": 0, ')
    slow = tmp_path / "slow.json"
    rows = text.splitlines()
    slow.write_text(
        "\n".join(
            row.replace('"fixed_ns": ', '"fixed_ns": 1000000000') if '"QLinearConv"' in row else row for row in rows
        )
    )
    assert load_costs(str(slow)).fits["QLinearConv", "3x3", "u8"].fixed_ns >= 1e9
    ops, found = plan_of(pooled(), kernel_costs=str(slow))
    assert ops == set()
    assert "Conv" in found
    slow.write_text(BUNDLED.read_text().replace('"machine": {', '"machine": {"margin": 9, '))
    assert plan_of(pooled(), kernel_costs=str(slow))[0] == set()


@pytest.mark.parametrize("machine", ['{"block": 0}', '{"margin": 0.9}'])
def test_numbers_of_a_machine(machine: str, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(f'{{"machine": {machine}, "fits": []}}')
    with pytest.raises(RecipeError, match=r"is 1 or more, not 0"):
        plan_of(pooled(), kernel_costs=str(tmp_path / "costs.json"))


def test_exact_products_without_dot_products_have_costs_of_their_own() -> None:
    limited = costs_of(*read_recipe(None, "onnxruntime", {"cpu": "avx2"}))
    assert limited is not None
    unlimited = costs_of(*read_recipe(None, "onnxruntime", {"cpu": "avx2", "reduce_range": False}))
    assert unlimited == limited.with_unsigned_weights() != limited
    assert limited.margin > 1


def table(cost: str) -> str:
    costs = ", ".join(f'"{kind}": {cost}' for kind in KINDS)
    return f'{{"fits": [{{"kernel": "Conv", "variant": "", "type": "u8", {costs}}}]}}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "{}", '{"fits": [{"kernel": "Conv"}]}', "[" * 100_000, '{"fits": ' * 100_000, '{"fits": 7}', "[]"),
        *(table(cost) for cost in ("NaN", "-1", "Infinity", '"1"', "[]", "9" * 400, "9" * 5000)),
    ],
    ids=lambda text: text[-20:],
)
def test_no_table(text: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=r"KERNEL_COSTS: .*costs.json is not a table of kernel costs"):
        plan_of(pooled(), kernel_costs=str(path))


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "limit"), [(True, 64), (False, 128)])
def test_reduced_range(wanted: bool, limit: int) -> None:
    """Weights of 7 bits: two products of a byte and a weight fit 16 bits, which CPUs without VNNI add them in."""
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((1, 64, 56, 56)).astype(np.float32)}]
    report = sbonnx.quantize(pooled(), feeds, backend="onnxruntime", reduce_range=wanted, verify=False)
    assert report.quantized is not None
    codes = [
        onnx.numpy_helper.to_array(tensor).astype(int)
        for tensor in report.quantized.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 4
    ]
    assert codes
    assert limit // 2 < max(int(np.abs(values).max()) for values in codes) <= limit

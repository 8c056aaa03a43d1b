"""Heads of attention, groups of convolutions and layers with one weight, removed as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.graph import Graph
from sbonnx.linear.zero_patterns import Unstructured
from sbonnx.options import RunOptions
from sbonnx.pruning.budgets.budget import network_size
from sbonnx.pruning.graph_pruning import prune_graph
from sbonnx.pruning.groups.channel_removal import mask, remove
from sbonnx.pruning.groups.dimensions import Dependencies, dependencies
from sbonnx.pruning.groups.pruning_plan import LayerSide
from sbonnx.pruning.settings import Pruning
from sbonnx.pruning.sparsity.choice import choose_sparse
from tests.support.models import model, run

HEADS = """agraph (float[N,5,6] x{more}) => (float[N,5,6] y) {{
    qm = MatMul (x, wq) qb = Add (qm, bq) qr = Reshape (qb, apart) qh = Transpose <perm = [0,2,1,3]> (qr)
    km = MatMul (x, wk) kb = Add (bk, km) kr = Reshape (kb, apart) kh = Transpose <perm = [0,2,3,1]> (kr)
    vm = MatMul (x, wv) vb = Add (vm, bv) vr = Reshape (vb, apart) vh = Transpose <perm = [0,2,1,3]> (vr)
    s0 = MatMul (qh, kh) s1 = Mul (s0, scale) s2 = Add (s1, {bias})
    p = Softmax <axis = -1> (s2)
    c0 = MatMul (p, vh) c1 = Transpose <perm = [0,2,1,3]> (c0) c = Reshape (c1, joined)
    om = MatMul (c, wo) o = Add (om, bo)
    y = Add (o, x)
}}"""
WEIGHTS: dict[str, Any] = {
    **{f"w{letter}": (6, 12) for letter in "qkv"},
    **{f"b{letter}": 12 for letter in "qkv"},
    "wo": (12, 6),
    "bo": 6,
    "scale": np.float32(0.5),
    "positions": (1, 3, 5, 5),
    "apart": np.array([0, 0, 3, 4]),
    "joined": np.array([0, 0, 12]),
}
SAMPLE = {"x": np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)}


def attention(more: str = "", bias: str = "positions", **weights: Any) -> Graph:
    """Three heads of four channels, with a bias for each pair of positions in each head."""
    return graphs.load(model(HEADS.format(more=more, bias=bias), **{**WEIGHTS, **weights}))


def layers(found: Dependencies) -> list[set[tuple[str, str]]]:
    """Layers and directions of each dimension, by the name of the weight."""
    weight = {linear.node.name: linear.node.inputs[1].name for linear in found.linears}
    return [{(weight[side.layer], side.direction) for side in one.channels} for one in found.dimensions]


def without(graph: Graph, groups: tuple[int, ...], feed: dict[str, np.ndarray]) -> Graph:
    """Remove groups of the only dimension, and check against the masked graph."""
    found = dependencies(graph)
    (dimension,) = found.dimensions
    plan = found.plan_of([(dimension, groups)])
    masked, small = graphs.copy(graph), graphs.copy(graph)
    mask(masked, plan)
    remove(small, plan)
    want, got = run(graphs.to_proto(masked), feed)["y"], run(graphs.to_proto(small), feed)["y"]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert np.abs(want - run(graphs.to_proto(graph), feed)["y"]).max() > 0.1
    return small


def shapes(graph: Graph) -> dict[str, tuple[int, ...]]:
    return {weight.name: tuple(weight.dims) for weight in graphs.to_proto(graph).graph.initializer}


def test_a_head_is_removed_with_its_queries_keys_and_values() -> None:
    graph = attention()
    found = dependencies(graph)
    assert layers(found) == [{("wq", "out"), ("wk", "out"), ("wv", "out"), ("wo", "in")}]
    (dimension,) = found.dimensions
    assert {tuple(map(tuple, channels)) for channels in dimension.channels.values()} == {
        ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))
    }
    small = without(graph, (1,), SAMPLE)
    sizes = shapes(small)
    assert {sizes[name] for name in ("wq", "wk", "wv")} == {(6, 8)}
    assert (sizes["wo"], sizes["bq"], sizes["positions"]) == ((8, 6), (8,), (1, 2, 5, 5))
    reshapes = {node.name: node.inputs[1].values.tolist() for node in small.nodes if node.op == "Reshape"}
    assert sorted(reshapes.values()) == [[0, 0, 2, 4]] * 3 + [[0, 0, 8]]


def test_a_bias_that_is_not_constant_pins_heads_and_leaves_channels_of_values() -> None:
    graph = attention(more=", float[1,3,5,5] table", bias="table")
    found = dependencies(graph)
    assert layers(found) == [{("wv", "out"), ("wo", "in")}]
    assert {channels.shape for channels in found.dimensions[0].channels.values()} == {(4, 3)}
    reasons = [one.why for one in found.pinned()]
    assert sum("combines it with 'table', whose channels are pinned" in why for why in reasons) == 2
    table = np.random.default_rng(1).standard_normal((1, 3, 5, 5)).astype(np.float32)
    assert shapes(without(graph, (0, 2), {**SAMPLE, "table": table}))["wv"] == (6, 6)


REPEATED = """agraph (float[N,T,6] x) => (float[N,T,6] y) {{
    qm = MatMul (x, wq) qr = Reshape (qm, apart) qh = Transpose <perm = [0,2,1,3]> (qr)
    km = MatMul (x, wk) kr = Reshape (km, pair) {repeat}
    s = MatMul (qh, kh) p = Softmax <axis = -1> (s)
    c0 = MatMul (p, qh) c1 = Transpose <perm = [0,2,1,3]> (c0) c = Reshape (c1, joined)
    y = MatMul (c, wo)
}}"""


@pytest.mark.parametrize("handled", [True, False])
def test_grouped_queries_go_with_their_keys_or_are_pinned_with_a_reason(handled: bool) -> None:
    """One head of keys for two heads of queries, repeated before or after the positions are moved behind the heads."""
    if handled:
        repeat = "ke = Expand (kr, twice) kf = Reshape (ke, apart) kh = Transpose <perm = [0,2,3,1]> (kf)"
        targets = {"pair": [0, -1, 2, 1, 3], "twice": [1, 1, 1, 2, 1], "apart": [0, -1, 4, 3]}
    else:
        repeat = (
            "kt = Transpose <perm = [0,2,3,1,4]> (kr) ke = Expand (kt, twice) kf = Reshape (ke, behind) "
            "kh = Transpose <perm = [0,1,3,2]> (kf)"
        )
        targets = {"pair": [0, -1, 2, 1, 3], "twice": [1, 1, 2, 1, 1], "apart": [0, -1, 4, 3], "behind": [0, 4, -1, 3]}
    arrays: dict[str, Any] = {name: np.array(target) for name, target in targets.items()}
    arrays |= {"joined": np.array([0, -1, 12]), "wq": (6, 12), "wk": (6, 6), "wo": (12, 6)}
    graph = graphs.load(model(REPEATED.format(repeat=repeat), **arrays))
    found = dependencies(graph)
    if not handled:
        assert not any(("wk", "out") in sides for sides in layers(found))
        assert any("Reshape" in one.why and "does not preserve channels" in one.why for one in found.pinned())
        return
    assert layers(found) == [{("wq", "out"), ("wk", "out"), ("wo", "in")}]
    sizes = shapes(without(graph, (1,), SAMPLE))
    assert (sizes["wq"], sizes["wk"], sizes["wo"]) == ((6, 6), (6, 3), (6, 6))


def test_a_norm_of_each_head_passes_heads() -> None:
    """Queries that are normalized per head keep heads apart; the scale of a channel is the same for all heads."""
    text = HEADS.format(more="", bias="positions").replace(
        "s0 = MatMul (qh", "qn = LayerNormalization <axis = -1> (qh, ones) qs = Mul (qn, each) s0 = MatMul (qs"
    )
    graph = graphs.load(model(text, ones=4, each=(3, 1, 4), **WEIGHTS))
    sizes = shapes(without(graph, (0,), SAMPLE))
    assert (sizes["ones"], sizes["each"]) == ((4,), (2, 1, 4))


def test_groups_of_a_convolution_are_removed_as_a_whole() -> None:
    """Eight groups of two channels: eight whole groups can go, or two positions of every group."""
    text = """agraph (float[2,3,4,4] x) => (float[2,4,4,4] y) {
        a = Conv (x, wa, ba) b = Conv <group = 8> (a, wb, bb) c = Relu (b) y = Conv (c, wc)
    }"""
    weights: dict[str, Any] = {"wa": (16, 3, 1, 1), "ba": 16, "wb": (8, 2, 1, 1), "bb": 8, "wc": (4, 8, 1, 1)}
    graph = graphs.load(model(text, **weights))
    found = dependencies(graph)
    assert layers(found) == [{("wa", "out"), ("wc", "in")}]
    assert found.dimensions[0].channels[LayerSide(found.linears[0].node.name, "out")].tolist() == [
        [2 * group, 2 * group + 1] for group in range(8)
    ]
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)}
    small = without(graph, (1, 6), feed)
    assert [node.attrs["group"] for node in small.nodes if "group" in node.attrs and node.attrs["group"] > 1] == [6]
    assert shapes(small)["wb"] == (6, 2, 1, 1)
    counted = network_size(graph, found, found.dimensions, {})
    assert counted.total("macs", np.array([2])) == 16 * (12 * 3 + 6 * 2 + 4 * 6)
    assert counted.total("size", np.array([2])) == 4 * (12 * 3 + 6 * 2 + 4 * 6 + 16 + 8)


def test_group_norms_lose_whole_groups() -> None:
    """GroupNorm as exported: InstanceNormalization over the channels of each group."""
    text = """agraph (float[2,3,4,4] x) => (float[2,4,4,4] y) {
        a = Conv (x, wa) r = Reshape (a, groups) i = InstanceNormalization (r, g, b) f = Reshape (i, back)
        m = Mul (f, gamma) y = Conv (m, wc)
    }"""
    targets: dict[str, Any] = {"groups": np.array([0, 4, -1]), "back": np.array([2, 12, 4, 4])}
    graph = graphs.load(model(text, wa=(12, 3, 1, 1), g=4, b=4, gamma=(12, 1, 1), wc=(4, 12, 1, 1), **targets))
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 4, 4)).astype(np.float32)}
    sizes = shapes(without(graph, (2,), feed))
    assert (sizes["wa"], sizes["g"], sizes["gamma"]) == ((9, 3, 1, 1), (3,), (9, 1, 1))


SHARED = """agraph (float[2,3,4,4] x, float[2,3,8,8] z) => (float[2,2,4,4] y, float[2,2,8,8] u) {
    a = Conv (x, stem) b = Conv (a, w, bias) r = Relu (b) y = Conv (r, head)
    c = Conv (z, other) d = Conv (c, w, bias) s = Relu (d) u = Conv (s, head)
}"""
SHARED_WEIGHTS: dict[str, Any] = {"stem": (6, 3, 1, 1), "other": (6, 3, 1, 1), "w": (8, 6, 1, 1), "bias": 8}


def test_layers_with_one_weight_lose_the_same_channels() -> None:
    """A detection head on two levels: both calls lose the same channels, and the weight is stored once."""
    graph = graphs.load(model(SHARED, head=(2, 8, 1, 1), **SHARED_WEIGHTS))
    found = dependencies(graph)
    assert sorted(layers(found), key=len) == [
        {("w", "out"), ("head", "in")},
        {("stem", "out"), ("other", "out"), ("w", "in")},
    ]
    assert [len(one.channels) for one in found.dimensions] == [4, 4]
    plan = found.plan_of([(one, (0, 3)) for one in found.dimensions])
    masked = graphs.copy(graph)
    mask(masked, plan)
    small = graphs.copy(masked)
    remove(small, plan)
    rng = np.random.default_rng(0)
    feed = {name: rng.standard_normal((2, 3, size, size)).astype(np.float32) for name, size in (("x", 4), ("z", 8))}
    for name, want in run(graphs.to_proto(masked), feed).items():
        np.testing.assert_allclose(run(graphs.to_proto(small), feed)[name], want, rtol=1e-5, atol=1e-5)
    assert sorted(shapes(small).values()) == [(2, 6, 1, 1), (4, 3, 1, 1), (4, 3, 1, 1), (6,), (6, 4, 1, 1)]
    size = network_size(graph, found, found.dimensions, {})
    assert size.total("size", np.zeros(2)) == 4 * (2 * 18 + 48 + 8 + 16)
    assert size.total("size", np.array([2, 2])) == 4 * (2 * 12 + 24 + 8 + 12)
    assert size.total("macs", np.zeros(2)) == (16 + 64) * (18 + 48 + 16)


def test_layers_with_one_weight_are_not_refitted() -> None:
    graph = graphs.load(model(SHARED, head=(2, 8, 1, 1), **SHARED_WEIGHTS))
    rng = np.random.default_rng(0)
    feeds = [
        {name: rng.standard_normal((2, 3, size, size)).astype(np.float32) for name, size in (("x", 4), ("z", 8))}
        for _ in range(8)
    ]
    done = prune_graph(graph, Samples.of(feeds, graph, RunOptions(threads=1)), Pruning(macs=0.7))
    assert done.macs <= 0.7
    assert sum("another layer reads the same weight" in one.why for one in done.refusals) == 4
    assert sum(len(shape) == 4 for shape in shapes(done.graph).values()) == 4
    reasons = {one.why for one in choose_sparse(dependencies(graph), Unstructured(0.5)) if "weight" in str(one.why)}
    assert reasons == {"another layer reads the same weight"}


def test_a_weight_that_other_nodes_read_is_pinned() -> None:
    text = """agraph (float[2,3,4,4] x) => (float[2,2,4,4] y, float[8,6,1,1] n) {
        a = Conv (x, stem) b = Conv (a, w) y = Conv (b, head) n = Neg (w)
    }"""
    found = dependencies(graphs.load(model(text, stem=(6, 3, 1, 1), w=(8, 6, 1, 1), head=(2, 8, 1, 1))))
    assert not found.dimensions
    assert sum("weight 'w' of" in one.why and "is read 2 times" in one.why for one in found.pinned()) == 2


@pytest.mark.parametrize("strategy", ["obs", "output", "l1norm"])
def test_the_head_that_nothing_reads_goes_first(strategy: str) -> None:
    """The rows of the output projection that read head 1 are small, and its weights are small for norms."""
    rng = np.random.default_rng(3)
    weights: dict[str, Any] = {name: rng.standard_normal((6, 12)).astype(np.float32) for name in ("wq", "wk", "wv")}
    wo = rng.standard_normal((12, 6)).astype(np.float32)
    wo[4:8] *= 1e-3
    for each in weights.values():
        each[:, 4:8] *= 0.5
    graph = attention(wo=wo, **weights)
    feeds = [{"x": rng.standard_normal((1, 5, 6)).astype(np.float32)} for _ in range(40)]
    settings = Pruning(strategy=strategy, ratio=0.34)
    done = prune_graph(graph, Samples.of(feeds, graph, RunOptions(threads=1)), settings)
    gone = {side.direction: channels for side, channels in done.plan.removed.items()}
    assert gone == {"out": (4, 5, 6, 7), "in": (4, 5, 6, 7)}
    (row,) = [row for row in done.layers if row.removed]
    assert row.after < 1e-4


def test_multiplications_of_attention_are_counted_by_head() -> None:
    graph = attention()
    found = dependencies(graph)
    size = network_size(graph, found, found.dimensions, {})
    linear = 5 * 6 * 12 * 4
    scores = context = 3 * 5 * 5 * 4
    assert size.total("macs", np.array([0])) == linear + scores + context
    assert size.total("macs", np.array([1])) == (linear + scores + context) * 2 / 3


def test_sizes_that_depend_on_the_input_are_measured() -> None:
    """Feeds of 4 and 8 positions: means over samples, also for layers that read no dimension."""
    text = HEADS.format(more="", bias="scale").replace("N,5,6", "N,T,6")
    graph = graphs.load(model(text, **WEIGHTS))
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, size, 6)).astype(np.float32)} for size in (4, 8) * 4]
    done = prune_graph(graph, Samples.of(feeds, graph, RunOptions(threads=1)), Pruning(macs=0.7, refit=False))
    assert done.macs == pytest.approx(2 / 3)
    found = dependencies(graph)
    assert [one.groups for one in found.dimensions] == [3]


def test_multiples_of_channels_are_met_by_heads() -> None:
    found = dependencies(attention())
    (dimension,) = found.dimensions
    assert [dimension.multiple(channels) for channels in (1, 4, 8, 6)] == [1, 1, 2, 3]


def test_a_trained_transformer_has_its_heads_as_groups(pack: Path) -> None:
    """MiniLM: six layers with 12 heads of 32 channels; that removal equals masking is tested with the other models."""
    found = dependencies(graphs.load(pack / "models" / "minilm_l6.onnx"))
    heads = [one for one in found.dimensions if one.groups == 12]
    assert len(heads) == 6
    assert {channels.shape for one in heads for channels in one.channels.values()} == {(12, 32)}
    assert {(len(one.writers), len(one.readers)) for one in heads} == {(3, 1)}

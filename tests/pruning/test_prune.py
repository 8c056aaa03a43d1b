"""Pruning as a whole, on small networks with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from sbonnx import graph as graphs
from sbonnx import patterns
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.ops import LINEAR
from sbonnx.options import RunOptions
from sbonnx.pruning.graph_pruning import Pruned, prune_graph
from sbonnx.pruning.settings import LayerPruning, Pruning
from tests.support.models import batchnorm, model, residual, run

NET = """agraph (float[N,3,8,8] x) => (float[N,6] y) {
    s = Conv <pads = [1,1,1,1]> (x, ws)
    sb = BatchNormalization (s, b_gamma, b_beta, b_mean, b_var)
    sr = Relu (sb)
    e = Conv (sr, we, be)
    er = Clip (e, lo, hi)
    d = Conv <group = 16, pads = [1,1,1,1]> (er, wd, bd)
    dr = Clip (d, lo, hi)
    p = Conv (dr, wp, bp)
    a = Add (p, sr)
    g = GlobalAveragePool (a)
    f = Flatten (g)
    y = Gemm <transB = 1> (f, wf, bf)
}"""
WEIGHTS: dict[str, Any] = {
    "ws": (8, 3, 3, 3),
    "we": (16, 8, 1, 1),
    "be": 16,
    "wd": (16, 1, 3, 3),
    "bd": 16,
    "wp": (8, 16, 1, 1),
    "bp": 8,
    "wf": (6, 8),
    "bf": 6,
    "lo": np.float32(0),
    "hi": np.float32(6),
}


def inverted(**more: Any) -> Graph:
    """A stem with batch norm, an inverted residual block with a depthwise convolution, a classifier."""
    weights: dict[str, Any] = {**WEIGHTS, **batchnorm("b", 8), **more}
    graph = graphs.load(model(NET, **weights))
    for stage in (patterns.SIMPLIFY, patterns.FUSE):
        patterns.apply(graph, stage)
    return graph


def feeds(count: int = 60, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Images that are sums of few patterns, so that channels are correlated."""
    rng = np.random.default_rng(seed)
    basis = np.random.default_rng(9).standard_normal((5, 3 * 8 * 8))
    images = rng.standard_normal((count, 5)) @ basis + 0.1 * rng.standard_normal((count, 192))
    return [{"x": image.reshape(1, 3, 8, 8).astype(np.float32)} for image in images]


def pruned(graph: Graph, **settings: Any) -> Pruned:
    return prune_graph(graph, Samples.of(feeds(), graph, RunOptions(threads=1)), Pruning(**settings))


def error(graph: Graph, small: Graph) -> float:
    """Error of the output on other images, relative to the output."""
    x = np.concatenate([feed["x"] for feed in feeds(40, seed=5)])
    want, got = (run(graphs.to_proto(each), {"x": x})["y"] for each in (graph, small))
    return float(np.square(got - want).sum() / np.square(want).sum())


def sizes(graph: Graph) -> tuple[float, float]:
    """Multiplications of one sample and bytes of constants, counted on a graph with known shapes."""
    proto = graphs.to_proto(graph)
    dims = {weight.name: tuple(weight.dims) for weight in proto.graph.initializer}
    macs = 0.0
    for node in proto.graph.node:
        if node.op_type in LINEAR:
            shape = dims[node.input[1]]
            per_output = np.prod(shape[1:]) if node.op_type == "Conv" else shape[1]
            macs += np.prod(shape) if node.op_type == "Gemm" else shape[0] * 64 * per_output
    return macs, float(sum(len(numpy_helper.to_array(w).tobytes()) for w in proto.graph.initializer))


@pytest.mark.parametrize("kind", ["macs", "size"])
def test_the_budget_is_met_on_the_file(kind: str) -> None:
    graph = inverted()
    before = sizes(graph)
    found = pruned(graph, **{kind: 0.6})
    place = ("macs", "size").index(kind)
    given = getattr(found, kind)
    assert given <= 0.6
    assert sizes(found.graph)[place] / before[place] == pytest.approx(given)
    assert error(graph, found.graph) < 0.5
    masked, small = (error(graph, each) for each in (found.masked, found.graph))
    assert small == pytest.approx(masked, rel=1e-3)


def test_refit_and_curves_reduce_the_error() -> None:
    ways: dict[str, dict[str, Any]] = {
        "norms": {"ratio": 0.5, "strategy": "l1norm", "refit": False},
        "refit": {"ratio": 0.5, "strategy": "l1norm"},
        "obs": {"ratio": 0.5},
    }
    errors = {name: error(inverted(), pruned(inverted(), **settings).graph) for name, settings in ways.items()}
    assert errors["obs"] < errors["norms"]
    assert errors["refit"] < errors["norms"] / 2


def test_two_runs_write_the_same_bytes() -> None:
    found = [graphs.to_proto(pruned(inverted(), macs=0.6).graph).SerializeToString() for _ in range(2)]
    assert found[0] == found[1]


def test_without_data_norms_decide_and_nothing_is_refitted() -> None:
    graph = graphs.load(residual())
    found = prune_graph(graph, None, Pruning(ratio=0.5))
    assert not found.layers
    assert [(row.before, row.after) for row in found.dimensions] == [(8, 4), (8, 4)]
    inner = next(row for row in found.dimensions if row.writers == ("conv1",))
    weight = next(each for each in residual().graph.initializer if each.name == "w1")
    norms = np.abs(np.frombuffer(weight.raw_data, np.float32).reshape(8, -1)).sum(axis=1)
    gone = next(channels for side, channels in found.plan.removed.items() if side.layer == "conv1" and side[1] == "out")
    assert inner.readers == ("conv2",)
    assert set(gone) == set(np.argsort(norms)[:4].tolist())


def test_multiples_and_the_least_share_hold() -> None:
    found = pruned(inverted(), macs=0.7, multiple=4)
    assert {row.after % 4 for row in found.dimensions} == {0}
    # a budget that cannot be met: as little as the limits allow
    found = pruned(inverted(), macs=0.1, least=0.5)
    assert found.macs > 0.1
    assert [row.after for row in found.dimensions] == [row.before // 2 for row in found.dimensions]


def test_refusals_name_the_reason() -> None:
    with pytest.raises(DataError, match="give calibration data"):
        prune_graph(graphs.load(residual()), None, Pruning(macs=0.5))
    with pytest.raises(DataError, match="'obs' reads activations"):
        prune_graph(graphs.load(residual()), None, Pruning(ratio=0.5, strategy="obs"))
    only = graphs.load(model("agraph (float[1,3,4,4] x) => (float[1,2,4,4] y) { y = Conv (x, w) }", w=(2, 3, 1, 1)))
    with pytest.raises(RecipeError, match=r"no channels of the model can be removed: .*'y' is an output"):
        prune_graph(only, None, Pruning(ratio=0.5))


@pytest.mark.slow
def test_layers_with_their_own_settings() -> None:
    """The stem writes the residual stream together with p; e and d write the inner dimension."""
    stem, expand, depthwise, project = (f"Conv_{number}" for number in range(4))

    def remaining(**settings: Any) -> dict[frozenset[str], int]:
        return {frozenset(row.writers): row.after for row in pruned(inverted(), **settings).dimensions}

    both, inner = frozenset({stem, project}), frozenset({expand})
    assert remaining(ratio=0.5) == {both: 4, inner: 8}
    # the least ratio of the layers that write a dimension counts, that of a depthwise layer between included
    assert remaining(ratio=0.5, layers={project: LayerPruning(0.25)}) == {both: 6, inner: 8}
    assert remaining(ratio=0.5, layers={depthwise: LayerPruning(0.0)}) == {both: 4, inner: 16}
    # without a ratio for all, others are not pruned
    assert remaining(layers={expand: LayerPruning(0.5)}) == {both: 8, inner: 8}
    # a skipped layer keeps inputs and outputs, and its weights
    found = pruned(inverted(), ratio=0.5, layers={project: LayerPruning(skip=True)})
    assert {frozenset(row.writers): row.after for row in found.dimensions} == {both: 8, inner: 16}
    # with a budget, the ratio of a layer is met exactly
    assert remaining(macs=0.7, layers={expand: LayerPruning(0.25)})[inner] == 12
    with pytest.raises(RecipeError, match="different strategies: l1norm by a, random by b"):
        layers = {stem: LayerPruning(None, "l1norm", why="a"), project: LayerPruning(None, "random", why="b")}
        remaining(ratio=0.5, layers=layers)
    with pytest.raises(RecipeError, match=f"leaves no channels of '{expand}'"):
        remaining(ratio=0.5, layers={expand: LayerPruning(1.0), depthwise: LayerPruning(1.0)})

"""Pruning as a whole, on small networks with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx import patterns
from sbonnx.calib.data import dataset as datasets
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.ops import LINEAR
from sbonnx.options import RunOptions
from sbonnx.pruning.prune import Pruned, Pruning, prune_graph
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
    return prune_graph(graph, datasets.read(feeds(), graph), Pruning(**settings), RunOptions(threads=1))


def error(graph: Graph, small: Graph) -> float:
    """Error of the output on other images, relative to the output."""
    x = np.concatenate([feed["x"] for feed in feeds(40, seed=5)])
    want, got = (run(graphs.to_proto(each), {"x": x})["y"] for each in (graph, small))
    return float(np.square(got - want).sum() / np.square(want).sum())


def sizes(graph: Graph) -> tuple[float, float]:
    """Multiplications of one sample and stored values, counted on a graph with known shapes."""
    proto = graphs.to_proto(graph)
    dims = {weight.name: tuple(weight.dims) for weight in proto.graph.initializer}
    macs = 0.0
    for node in proto.graph.node:
        if node.op_type in LINEAR:
            shape = dims[node.input[1]]
            per_output = np.prod(shape[1:]) if node.op_type == "Conv" else shape[1]
            macs += np.prod(shape) if node.op_type == "Gemm" else shape[0] * 64 * per_output
    return macs, float(sum(np.prod(shape, dtype=float) for shape in dims.values()))


@pytest.mark.parametrize("kind", ["macs", "weights"])
def test_the_budget_is_met_on_the_file(kind: str) -> None:
    graph = inverted()
    before = sizes(graph)
    found = pruned(graph, **{kind: 0.6})
    # biases that pruning adds to layers without one are not counted as weights of the original
    after, given = sizes(found.graph), getattr(found, kind)
    place = ("macs", "weights").index(kind)
    assert given <= 0.6
    if kind == "macs":
        assert after[place] / before[place] == pytest.approx(given)
    else:
        assert after[place] <= 0.65 * before[place]
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
    with pytest.raises(RecipeError, match=r"cannot reach a share of .*set macs to 0\.\d+ or more"):
        pruned(inverted(), macs=0.1, least=0.5)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "needs one of macs, weights and ratio; given: none"),
        ({"macs": 0.5, "ratio": 0.5}, "given: macs, ratio"),
        ({"macs": 1.5}, "macs is 1.5; write a share between 0 and 1"),
        ({"ratio": 0.5, "strategy": "wanda"}, "strategy must be one of auto, .* got 'wanda'"),
        ({"ratio": 0.5, "multiple": 0}, "multiple 0"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        Pruning(**settings)


def test_refusals_name_the_reason() -> None:
    with pytest.raises(DataError, match="give calibration data"):
        prune_graph(graphs.load(residual()), None, Pruning(macs=0.5))
    with pytest.raises(DataError, match="'obs' reads activations"):
        prune_graph(graphs.load(residual()), None, Pruning(ratio=0.5, strategy="obs"))
    only = graphs.load(model("agraph (float[1,3,4,4] x) => (float[1,2,4,4] y) { y = Conv (x, w) }", w=(2, 3, 1, 1)))
    with pytest.raises(RecipeError, match=r"no channels of the model can be removed: .*'y' is an output"):
        prune_graph(only, None, Pruning(ratio=0.5))

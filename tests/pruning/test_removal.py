"""A model without channels computes what the model with masked channels computes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sbonnx import graph as graphs
from sbonnx import patterns
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort, sweep
from sbonnx.pruning.groups.channel_removal import PRUNED, mask, remove
from sbonnx.pruning.groups.dimensions import dependencies
from sbonnx.pruning.groups.pruning_plan import PruningPlan
from tests.pruning.random_graphs import STEPS, random_model
from tests.support.models import batchnorm, model, residual, run


def random_plan(graph: Graph, seed: int) -> PruningPlan:
    """A plan that removes a random part of every dimension."""
    rng, found = np.random.default_rng(seed), dependencies(graph)
    chosen = []
    for dimension in found.dimensions:
        order = dimension.removable(rng.permutation(dimension.groups).tolist())
        chosen.append((dimension, order[: int(rng.integers(0, len(order) + 1))]))
    return found.plan_of(chosen)


def shuffled(graph: Graph, seed: int) -> Graph:
    """A copy with its nodes in another topological order."""
    copied = graphs.copy(graph)
    random.Random(seed).shuffle(copied.nodes)
    sort(copied)
    return copied


def check_same(proto: onnx.ModelProto, feed: dict[str, np.ndarray], seed: int) -> None:
    """Compare removal with masking bit for bit."""
    graph = graphs.load(proto)
    sweep(graph)
    plan = PruningPlan.from_dict(random_plan(graph, seed).to_dict())
    masked, removed = shuffled(graph, seed), shuffled(graph, seed + 1)
    mask(masked, plan)
    remove(removed, plan)
    small = graphs.to_proto(removed)
    onnx.checker.check_model(small, full_check=True)
    want, got = run(graphs.to_proto(masked), feed), run(small, feed)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=9), st.integers(0, 2**20))
def test_removed_equals_masked_bit_for_bit(steps: list[str], seed: int) -> None:
    check_same(*random_model(steps, seed), seed)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=7), st.integers(0, 2**20))
def test_removed_equals_masked_on_many_graphs(steps: list[str], seed: int) -> None:
    check_same(*random_model(steps, seed), seed)


def check_most(proto: onnx.ModelProto, seed: int) -> None:
    """Remove as much of every dimension as can be removed together: no tensor is left empty."""
    graph = graphs.load(proto)
    sweep(graph)
    rng, found = np.random.default_rng(seed), dependencies(graph)
    orders = [dimension.removable(rng.permutation(dimension.groups).tolist()) for dimension in found.dimensions]
    plan = found.plan_of(zip(found.dimensions, orders, strict=True))
    for dimension, order in zip(found.dimensions, orders, strict=True):
        assert len(order) <= dimension.groups - 1
        if not dimension.parts:
            assert len(order) == dimension.groups - 1
    remove(graph, plan)
    onnx.checker.check_model(graphs.to_proto(graph), full_check=True)
    assert all(0 not in (tensor.shape or ()) for node in graph.nodes for tensor in node.outputs)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12), st.integers(0, 2**20))
@example(["join", "shuffle", "conv", "point", "halves", "conv", "concat", "join", "gather"], 924)
def test_the_largest_plan_leaves_no_tensor_empty(steps: list[str], seed: int) -> None:
    """The example has a tensor of parts of two dimensions."""
    check_most(random_model(steps, seed)[0], seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["cifar_resnet20", "fastestdet", "minilm_l6", "mobilenetv2_tin200", "ultraface_rfb320"]
)
def test_trained_models(pack: Path, name: str) -> None:
    """Sums of different length are not equal bit for bit, but to 1e-5 of the largest output."""
    graph = graphs.load(pack / "models" / f"{name}.onnx")
    for stage in (patterns.SIMPLIFY, patterns.FUSE):
        patterns.apply(graph, stage)
    sort(graph)
    rng, plan = np.random.default_rng(0), random_plan(graph, 0)
    assert plan.removed
    masked, removed = graphs.copy(graph), graphs.copy(graph)
    mask(masked, plan)
    remove(removed, plan)
    feed = {}
    for tensor in graph.inputs:
        shape = [dim if isinstance(dim, int) else 2 + axis for axis, dim in enumerate(tensor.shape)]
        whole = np.dtype(tensor.dtype).kind == "i"
        feed[tensor.name] = np.ones(shape, np.int64) if whole else rng.standard_normal(shape).astype(np.float32)
    small = graphs.to_proto(removed)
    assert small.ByteSize() < graphs.to_proto(masked).ByteSize()
    want, got = run(graphs.to_proto(masked), feed), run(small, feed)
    for output, value in want.items():
        assert np.abs(got[output] - value).max() <= 1e-5 * np.abs(value).max()


def test_batch_norms_and_gates_lose_their_entries() -> None:
    """A batch norm after a sum, a gate of the same channels, a spatial gate."""
    weights: dict[str, Any] = batchnorm("b", 8)
    proto = model(
        """agraph (float[2,3,6,6] x) => (float[2,4,6,6] y) {
            c = Conv (x, w)
            d = Conv (x, v)
            s = Add (c, d)
            b = BatchNormalization (s, b_gamma, b_beta, b_mean, b_var)
            p = GlobalAveragePool (b)
            q = Conv (p, u)
            g = Sigmoid (q)
            m = Mul (b, g)
            o = Conv (m, one)
            h = HardSigmoid (o)
            n = Mul (m, h)
            y = Conv (n, t)
        }""",
        w=(8, 3, 1, 1),
        v=(8, 3, 1, 1),
        u=(8, 8, 1, 1),
        one=(1, 8, 1, 1),
        t=(4, 8, 1, 1),
        **weights,
    )
    graph = graphs.load(proto)
    (dimension,) = dependencies(graph).dimensions
    assert dimension.groups == 8
    plan = dependencies(graph).plan_of([(dimension, (0, 3, 7))])
    masked = graphs.copy(graph)
    mask(masked, plan)
    remove(graph, plan)
    feed = {"x": np.random.default_rng(0).standard_normal((2, 3, 6, 6)).astype(np.float32)}
    small = graphs.to_proto(graph)
    assert {tuple(w.dims) for w in small.graph.initializer if w.name.startswith("b_")} == {(5,)}
    np.testing.assert_allclose(run(small, feed)["y"], run(graphs.to_proto(masked), feed)["y"], rtol=1e-4, atol=1e-5)


def test_the_file_says_what_was_removed() -> None:
    graph = graphs.load(residual())
    found = dependencies(graph)
    inner = next(dimension for dimension in found.dimensions if dimension.writers == ("conv1",))
    remove(graph, found.plan_of([(inner, (0, 1))]))
    assert graphs.node_metadata(graph, "conv1")[PRUNED] == "2 of 8 output channels"
    assert graphs.node_metadata(graph, "conv2")[PRUNED] == "2 of 8 input channels"
    assert PRUNED not in graphs.node_metadata(graph, "fc")
    assert [tuple(t.shape)[1] for node in graph.nodes if node.name in ("conv1", "conv2") for t in node.outputs] == [
        6,
        8,
    ]

"""Patterns of zeros and the sparse solver, against enumeration of all patterns and least squares on the rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.errors import RecipeError
from sbonnx.linear.layer import LinearLayer
from sbonnx.linear.zero_patterns import GroupSparsity, SparsityPattern, Unstructured, sparsity_pattern
from sbonnx.pruning.sparsity.solver import SparseSolver, least_squares
from sbonnx.spec import Array
from tests.support.linear_ops import layer_of

RNG = np.random.default_rng(5)
MATRIX = layer_of("MatMul", {}, (8, 3))
STRENGTH = 0.01


def inputs(rows: int, columns: int, seed: int) -> Array:
    """Correlated rows of different scales."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns)) @ rng.standard_normal((columns, columns)) * rng.uniform(0.3, 3, columns)


def best_on(x: Array, weight: Array, kept: Array, target: Array) -> Array:
    """Least squares of one output on the rows, restricted to the kept inputs; the ridge as additional rows."""
    damping = STRENGTH * np.diag(x.T @ x).mean()
    rows = np.concatenate([x, np.sqrt(damping) * np.eye(x.shape[1])])
    wanted = np.concatenate([target, np.sqrt(damping) * weight])
    found = np.zeros(x.shape[1])
    found[kept] = np.linalg.lstsq(rows[:, kept], wanted, rcond=None)[0]
    return found


def cost(x: Array, weight: Array, value: Array, target: Array) -> float:
    """The objective of the solver for one output."""
    damping = STRENGTH * np.diag(x.T @ x).mean()
    return float(((target - x @ value) ** 2).sum() + damping * ((weight - value) ** 2).sum())


def all_masks(pattern: SparsityPattern) -> Iterator[Array]:
    """Every mask of one output of eight inputs."""
    if isinstance(pattern, GroupSparsity):
        groups = [combinations(range(first, first + 4), pattern.kept) for first in (0, 4)]
        chosen = [left + right for left, right in product(*(list(each) for each in groups))]
    else:
        chosen = list(combinations(range(8), 8 - int(8 * pattern.share)))
    for kept in chosen:
        mask = np.zeros(8, bool)
        mask[list(kept)] = True
        yield mask


def solved(pattern: SparsityPattern, seed: int, layer: LinearLayer, outputs: int) -> tuple[Array, Array, Array, Array]:
    x = inputs(60, 8, seed)
    weight = np.random.default_rng(seed + 100).standard_normal((1, outputs, 8))
    target = x @ weight[0].T + 0.2 * np.random.default_rng(seed + 200).standard_normal((60, outputs))
    found = SparseSolver(pattern, layer).solve(weight, (x.T @ x)[None], (target.T @ x)[None], STRENGTH)
    assert found is not None
    return x, weight[0], target, found[0]


@pytest.mark.parametrize("pattern", [GroupSparsity(2, 4), GroupSparsity(1, 4), GroupSparsity(3, 4), Unstructured(0.5)])
def test_values_are_least_squares_on_the_chosen_inputs(pattern: SparsityPattern) -> None:
    for seed in range(5):
        x, weight, target, found = solved(pattern, seed, MATRIX, 3)
        assert (found == 0).sum() == (12 if pattern == Unstructured(0.5) else 24 - 3 * 2 * getattr(pattern, "kept", 0))
        for output, value in enumerate(found):
            expected = best_on(x, weight[output], value != 0, target[:, output])
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pattern", [GroupSparsity(2, 4), Unstructured(0.5)])
def test_zeros_are_near_the_best_of_all_patterns(pattern: SparsityPattern) -> None:
    """One output, eight inputs: 36 or 70 patterns. Magnitude is several times worse, even with least squares."""
    ours, magnitude = [], []
    layer = layer_of("MatMul", {}, (8, 1))
    for seed in range(25):
        x, weight, target, found = solved(pattern, seed, layer, 1)
        best = min(
            cost(x, weight[0], best_on(x, weight[0], mask, target[:, 0]), target[:, 0]) for mask in all_masks(pattern)
        )
        plain = SparseSolver(pattern, layer).masked(weight[None])[0, 0] != 0
        ours.append(cost(x, weight[0], found[0], target[:, 0]) / best)
        magnitude.append(cost(x, weight[0], best_on(x, weight[0], plain, target[:, 0]), target[:, 0]) / best)
    assert min(ours) >= 1 - 1e-6
    assert np.median(ours) < 1.05
    assert np.mean(np.log(ours)) < 0.4 * np.mean(np.log(magnitude))


def test_no_zeros_needed_gives_the_dense_solution() -> None:
    x = inputs(60, 8, 1)
    h = x.T @ x
    size = np.sqrt(np.diag(h))
    h = (h / np.outer(size, size))[None]
    right = RNG.standard_normal((1, 3, 8))
    found = least_squares(h, right, np.ones((1, 3, 8), bool), np.zeros((1, 3, 8)))
    np.testing.assert_allclose(found[0] @ h[0], right[0], rtol=1e-4, atol=1e-5)


def test_dead_inputs_lose_their_weights_first() -> None:
    x = inputs(60, 8, 3)
    x[:, [1, 2]] = 0.0
    weight = RNG.standard_normal((1, 3, 8))
    found = SparseSolver(Unstructured(0.25), MATRIX).solve(weight, (x.T @ x)[None], weight @ (x.T @ x), STRENGTH)
    assert found is not None
    assert not found[0][:, [1, 2]].any()
    np.testing.assert_allclose(np.delete(found, [1, 2], axis=2), np.delete(weight, [1, 2], axis=2), rtol=0.2, atol=0.1)


@st.composite
def layers(draw: st.DrawFn) -> tuple[LinearLayer, GroupSparsity]:
    """A layer with input channels in multiples of M."""
    size = draw(st.integers(2, 6))
    channels, outputs = size * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    kernel = draw(st.sampled_from([(1,), (3,), (2, 2)]))
    group = draw(st.sampled_from([1, 2]))
    pattern = GroupSparsity(draw(st.integers(1, size - 1)), size)
    kind = draw(st.sampled_from(["Conv", "ConvTranspose", "MatMul", "batches", "Gemm", "transB"]))
    shapes = {
        "Conv": ("Conv", {"group": group}, (outputs * group, channels, *kernel)),
        "ConvTranspose": ("ConvTranspose", {"group": group}, (channels * group, outputs, *kernel)),
        "MatMul": ("MatMul", {}, (channels, outputs)),
        "batches": ("MatMul", {}, (2, channels, outputs)),
        "Gemm": ("Gemm", {}, (channels, outputs)),
        "transB": ("Gemm", {"transB": 1}, (outputs, channels)),
    }
    return layer_of(*shapes[kind]), pattern


@given(layers(), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_each_group_of_input_channels_keeps_n_at_each_tap(drawn: tuple[LinearLayer, GroupSparsity], seed: int) -> None:
    layer, pattern = drawn
    assert pattern.misfit(layer) is None
    scores = np.random.default_rng(seed).random((layer.groups, layer.outputs, layer.inputs))
    mask = pattern.mask(scores, layer)
    assert pattern.excess(mask, layer) == 0
    # counted in the layout of the file
    stored = layer.by_channel(layer.from_matrices(mask))  # (groups, outputs, inputs, taps or batches)
    for first in range(0, stored.shape[2], pattern.size):
        counts = stored[:, :, first : first + pattern.size].sum(axis=2)
        assert (counts == pattern.kept).all()
    assert (scores * mask).sum() >= scores.sum() * pattern.kept / pattern.size - 1e-9


@given(st.integers(1, 40), st.floats(0.01, 0.99))
@settings(max_examples=40, deadline=None)
def test_unstructured_zeros_are_counted_exactly(columns: int, share: float) -> None:
    layer = layer_of("MatMul", {}, (columns, 3))
    scores = np.random.default_rng(columns).random((1, 3, columns))
    mask = Unstructured(share).mask(scores, layer)
    assert (~mask).sum() == int(3 * columns * share + 1e-9)
    assert scores[~mask].max(initial=0) <= scores[mask].min(initial=1)


@pytest.mark.parametrize("text", ["2", "4:2", "0:4", "2:4:8", "a:b", "2:128", ""])
def test_patterns_are_n_of_m(text: str) -> None:
    with pytest.raises(RecipeError, match="N:M"):
        sparsity_pattern(text)
    assert sparsity_pattern("2:4") == GroupSparsity(2, 4)

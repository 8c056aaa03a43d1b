"""Soft choices, compiled and in numpy, output by output; Adam against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from sbonnx.moments import Moments
from sbonnx.rounding import base as native
from sbonnx.rounding import choices as module
from sbonnx.rounding.adaround import AdaRound
from sbonnx.rounding.base import Grid
from sbonnx.rounding.choices import Adam, _SoftProblem, learn_choices
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, layer

WIDE = Case("Gemm", (70, 130), CHANNELS, {"transB": 1}, two=True)
"""More outputs than a block of the compiled steps has, more inputs than a panel, and no multiple of either."""

compiled = pytest.mark.skipif(native.loops is None, reason="not compiled: no C compiler where it was installed")
STEPS = 1000


@pytest.fixture(autouse=True, scope="module")
def one_blas_thread() -> Iterator[None]:
    """As while weights are rounded: threads that wait for small products take much longer."""
    with threadpool_limits(limits=1, user_api="blas"):
        yield


BETAS = [AdaRound(iterations=STEPS).beta(step) for step in range(STEPS)]


def parts(one: Layer) -> tuple[Grid, Moments, Array]:
    """A grid of two codes, moments, and where to begin."""
    grid = Grid.of(one.weight, one.qparams, one.layout)
    low = np.clip(np.floor(grid.ratio()), grid.qmin, grid.qmax - 1)
    return (
        replace(grid, zero=grid.zero - low, qmin=np.zeros_like(low), qmax=np.ones_like(low)),
        one.moments,
        np.clip(grid.ratio() - low, 0.01, 0.99),
    )


def problem_of(one: Layer) -> _SoftProblem:
    """Begun beside the weights, where the gradient is zero."""
    problem = _SoftProblem.of(*parts(one))
    return replace(problem, u=problem.u + np.random.default_rng(0).normal(0.0, 0.5, problem.u.shape).astype(np.float32))


def h(u: Array) -> Array:
    """The soft choice."""
    return np.asarray(np.clip(1.2 / (1.0 + np.exp(-u.astype(np.float64))) - 0.1, 0.0, 1.0))


@compiled
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), case=st.sampled_from([*sorted(CASES), ""]), late=st.booleans())
def test_single_steps_are_those_in_numpy(seed: int, case: str, late: bool) -> None:
    """Three steps, with and without the pull: bit for bit."""
    one = problem_of(layer(CASES[case] if case else WIDE, seed))
    betas = BETAS[600:603] if late else BETAS[:3]
    ours, wanted = one.compiled(0.1, 0.2, betas), one.in_numpy(0.1, 0.2, betas)
    assert not np.array_equal(wanted, one.u)
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.sampled(11)
@compiled
@pytest.mark.parametrize("case", ["conv", "conv, groups", "depthwise", "matmul, blocks", "gemm", ""])
@pytest.mark.parametrize("count", [100, 400, STEPS])
def test_many_steps_are_those_in_numpy(case: str, count: int) -> None:
    """In all three ways that outputs go, in blocks, alone, and settled: bit for bit."""
    one = problem_of(layer(CASES[case] if case else WIDE, seed=5))
    ours, wanted = one.compiled(0.1, 0.2, BETAS[:count]), one.in_numpy(0.1, 0.2, BETAS[:count])
    np.testing.assert_array_equal(ours, wanted)
    if count == STEPS:
        assert ((h(wanted) == 0) | (h(wanted) == 1)).mean() > 0.9 > ((one.u > -1) & (one.u < 1)).mean()


@pytest.mark.parametrize("case", ["conv", "matmul, blocks", ""])
def test_sums_of_products_are_exact(case: str) -> None:
    """Whole multiples of one power of two, and below 2^53 of it: the same in rational numbers, in any order."""
    one = problem_of(layer(CASES[case] if case else WIDE, seed=1))
    ratio = 1.0 if one.ratio is None else one.ratio
    values = ((h(one.u).astype(np.float32) * ratio).astype(np.float64) + one.magic) - one.magic
    step = one.unit * module.STEPS_OF_A
    for array, each in ((values, one.unit), (one.a, module.STEPS_OF_A), (one.rest, step)):
        assert np.array_equal(array / each, np.rint(array / each))
    most = np.abs(values).max() * np.abs(one.a).sum(axis=1).max() + np.abs(one.rest).max()
    assert most / step < 2.0**53
    assert np.abs(values - h(one.u) * ratio).max() <= one.unit
    assert np.array_equal(one.a, one.a.astype(np.float32))


@compiled
def test_an_output_does_not_depend_on_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: neither on its block, nor on threads, nor on how much is done in one call."""
    one = problem_of(layer(WIDE, seed=7))
    together = one.compiled(0.1, 0.2, BETAS)
    for some in (slice(0, 1), slice(3, 20), slice(60, 70)):
        alone = replace(one, rest=one.rest[:, some], u=one.u[:, some]).compiled(0.1, 0.2, BETAS)
        np.testing.assert_array_equal(alone, together[:, some])
    monkeypatch.setattr(native, "cores", lambda: 3)
    np.testing.assert_array_equal(one.compiled(0.1, 0.2, BETAS), together)
    monkeypatch.setattr(module, "AT_A_TIME", 0)
    monkeypatch.setattr(module, "SIDE_BY_SIDE", 9)
    np.testing.assert_array_equal(one.compiled(0.1, 0.2, BETAS), together)


@compiled
def test_more_outputs_alone_than_together() -> None:
    """Groups of one output each, as depthwise convolutions have them."""
    one = problem_of(layer(Case("Conv", (150, 1, 3, 3), CHANNELS, {"group": 150}), seed=2))
    ours, wanted = one.compiled(0.1, 0.2, BETAS), one.in_numpy(0.1, 0.2, BETAS)
    assert ours.shape == (150, 1, 9)
    np.testing.assert_array_equal(ours, wanted)


@pytest.mark.parametrize("loops", [pytest.param(native.loops, marks=compiled, id="C"), pytest.param(None, id="numpy")])
def test_inputs_that_are_constant_zero_stay_where_they_begin(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no gradient, and nothing waits for them to settle."""
    monkeypatch.setattr(native, "loops", loops)
    one = layer(WIDE, seed=3)
    one.x[:, :, 5:40] = one.quantized[:, :, 5:40] = 0.0
    choice, moments, share = parts(one)
    found = learn_choices(choice, moments, share, 0.1, 0.2, BETAS)
    np.testing.assert_array_equal(found[:, :, 5:40], share[:, :, 5:40] >= 0.5)
    rest = np.delete(np.arange(130), np.s_[5:40])
    assert 0.02 < (found[:, :, rest] != (share[:, :, rest] >= 0.5)).mean() < 0.5


@pytest.mark.parametrize("loops", [pytest.param(native.loops, marks=compiled, id="C"), pytest.param(None, id="numpy")])
def test_the_error_of_the_choices(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Well below that of the nearer codes; in both forms."""
    monkeypatch.setattr(native, "loops", loops)
    choice, moments, share = parts(layer(WIDE, seed=11))
    found = learn_choices(choice, moments, share, 0.1, 0.2, BETAS)
    before, after = (
        moments.error(choice.weight, choice.values(each)).sum() for each in ((share >= 0.5).astype(float), found)
    )
    assert set(np.unique(found)) == {0.0, 1.0}
    assert after < 0.8 * before


@compiled
def test_numbers_beyond_float32_end() -> None:
    """NaN in the gradient is cut off as settled, not waited for; what comes of it is one of two codes."""
    one = layer(Case("Gemm", (4, 40), QuantSpec(bits=4, axis=0), {"transB": 1}), seed=1)
    problem = problem_of(one)
    problem.a[:] = np.nan
    assert problem.compiled(0.1, 0.2, BETAS).shape == (1, 4, 40)


@pytest.mark.parametrize("rate", [0.1, 1e-3])
def test_steps_are_those_of_torch(rate: float) -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    start = generator.normal(size=(3, 5)).astype(np.float32)
    curve = np.exp(generator.normal(0.0, 3.0, (3, 5))).astype(np.float32)
    ours, adam = start.copy(), Adam(start.shape)
    theirs = torch.tensor(start.copy(), requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=rate)
    for _ in range(200):
        adam.step(ours, curve * ours, rate)
        optimizer.zero_grad()
        (torch.tensor(curve) * theirs * theirs / 2).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-3, atol=1e-5)


def test_a_gradient_of_zero_moves_nothing() -> None:
    values = np.ones((2, 2), np.float32)
    adam = Adam(values.shape)
    adam.step(values, np.array([[0, 1], [0, -1]], np.float32), 0.5)
    np.testing.assert_allclose(values, [[1.0, 0.5], [1.0, 1.5]], rtol=1e-6)

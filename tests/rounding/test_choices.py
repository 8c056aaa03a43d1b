"""Soft choices: exact sums, output by output; Adam against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from sbonnx.moments import Moments
from sbonnx.rounding import choices as module
from sbonnx.rounding.adaround import AdaRound
from sbonnx.rounding.base import Grid
from sbonnx.rounding.choices import Adam, _SoftProblem, learn_choices
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, layer

WIDE = Case("Gemm", (70, 130), CHANNELS, {"transB": 1}, two=True)
"""Sizes that are no multiples of a vector."""

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


def test_an_output_does_not_depend_on_the_others() -> None:
    """Bit for bit, although products of fewer rows may be summed in another order."""
    one = problem_of(layer(WIDE, seed=7))
    together = one.solve(0.1, 0.2, BETAS)
    assert ((h(together) == 0) | (h(together) == 1)).mean() > 0.9 > ((one.u > -1) & (one.u < 1)).mean()
    for some in (slice(0, 1), slice(3, 20)):
        alone = replace(one, rest=one.rest[:, some], u=one.u[:, some]).solve(0.1, 0.2, BETAS)
        np.testing.assert_array_equal(alone, together[:, some])


def test_inputs_that_are_constant_zero_stay_where_they_begin() -> None:
    """They have no gradient, and nothing waits for them to settle."""
    one = layer(WIDE, seed=3)
    one.x[:, :, 5:40] = one.quantized[:, :, 5:40] = 0.0
    choice, moments, share = parts(one)
    found = learn_choices(choice, moments, share, 0.1, 0.2, BETAS)
    np.testing.assert_array_equal(found[:, :, 5:40], share[:, :, 5:40] >= 0.5)
    rest = np.delete(np.arange(130), np.s_[5:40])
    assert 0.02 < (found[:, :, rest] != (share[:, :, rest] >= 0.5)).mean() < 0.5


def test_the_error_of_the_choices() -> None:
    """Well below that of the nearer codes."""
    choice, moments, share = parts(layer(WIDE, seed=11))
    found = learn_choices(choice, moments, share, 0.1, 0.2, BETAS)
    before, after = (
        moments.error(choice.weight, choice.values(each)).sum() for each in ((share >= 0.5).astype(float), found)
    )
    assert set(np.unique(found)) == {0.0, 1.0}
    assert after < 0.8 * before


def test_numbers_beyond_float32_end() -> None:
    """NaN in the gradient is cut off as settled, not waited for; what comes of it is one of two codes."""
    one = layer(Case("Gemm", (4, 40), QuantSpec(bits=4, axis=0), {"transB": 1}), seed=1)
    problem = problem_of(one)
    problem.a[:] = np.nan
    assert problem.solve(0.1, 0.2, BETAS).shape == (1, 4, 40)


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

"""Coordinate descent, and descent on sets of codes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.rounding import neighbourhood
from sbonnx.rounding.base import Grid
from sbonnx.rounding.descent import descend
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.neighbourhood import redo
from sbonnx.spec import Array
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, layer

by_case = pytest.mark.parametrize("case", CASES)


def nearest(grid: Grid) -> Array:
    return np.asarray(np.clip(np.rint(grid.ratio()), grid.qmin, grid.qmax))


def error(one: Layer, grid: Grid, codes: Array) -> Array:
    return one.moments.error(grid.weight, grid.values(codes))


@by_case
def test_no_single_code_is_better(case: str) -> None:
    """Where it ends, every other code of every weight was tried by brute force: none gains."""
    one = layer(CASES[case])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    codes = descend(grid, nearest(grid), one.moments, 1000)
    assert codes.min() >= grid.qmin and codes.max() <= grid.qmax
    ended = error(one, grid, codes)
    tolerance = 1e-5 * error(one, grid, nearest(grid)) + 1e-12
    for k in range(codes.shape[2]):
        for code in range(grid.qmin, grid.qmax + 1):
            other = codes.copy()
            other[:, :, k] = code
            assert (error(one, grid, other) >= ended - tolerance).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), sweeps=st.integers(0, 4), case=st.sampled_from(sorted(CASES)))
def test_each_sweep_is_no_worse(seed: int, sweeps: int, case: str) -> None:
    """From any codes; what was given is left as it was."""
    one = layer(CASES[case], seed)
    grid = Grid.of(one.weight, one.qparams, one.layout)
    begin = np.random.default_rng(seed).integers(grid.qmin, grid.qmax + 1, grid.weight.shape)
    before = begin.copy()
    less, more = (descend(grid, begin, one.moments, count) for count in (sweeps, sweeps + 1))
    np.testing.assert_array_equal(begin, before)
    assert (error(one, grid, more) <= error(one, grid, less) * (1 + 1e-5) + 1e-9).all()


def test_no_sweeps_no_change() -> None:
    one = layer(CASES["conv"])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    np.testing.assert_array_equal(descend(grid, nearest(grid), one.moments, 0), nearest(grid))


@pytest.mark.parametrize("case", ["conv, two streams", "conv, groups", "matmul, affine blocks"])
def test_sets_are_rounded_anew(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of five columns: never worse, output by output; after descent there is still something to gain."""
    monkeypatch.setattr(neighbourhood, "SIZE", 5)
    gained = []
    for seed in range(3):
        one = layer(CASES[case], seed)
        grid = Grid.of(one.weight, one.qparams, one.layout)
        begin = descend(grid, nearest(grid), one.moments, 100)
        found = redo(grid, begin, one.moments, 8, 10)
        assert found.min() >= grid.qmin and found.max() <= grid.qmax
        before, after = error(one, grid, begin), error(one, grid, found)
        assert (after <= before * (1 + 1e-9) + 1e-12).all()
        gained.append(after.sum() / before.sum())
    assert np.mean(gained) < 0.97


def test_small_layers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(CASES["conv"])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    np.testing.assert_array_equal(redo(grid, nearest(grid), one.moments, 8, 10), nearest(grid))
    monkeypatch.setattr(neighbourhood, "SIZE", 5)
    np.testing.assert_array_equal(redo(grid, nearest(grid), one.moments, 8, 0), nearest(grid))


def test_dead_inputs_keep_their_codes_in_sets() -> None:
    one = layer(Case("Gemm", (3, 250), CHANNELS, {"transB": 1}))
    mask = np.ones(250, np.float32)
    mask[::4] = 0.0
    x = one.x * mask
    one = Layer(one.weight, one.qparams, one.layout, x, x)
    found = Gptq().round(one.weight, one.qparams, one.moments)
    np.testing.assert_array_equal(found.codes[:, ::4], one.qparams.quantize(one.weight)[:, ::4])
    assert found.loss is not None and found.nearest is not None and found.loss < 0.5 * found.nearest

"""Coordinate descent."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.rounding import base as native
from sbonnx.rounding.base import Grid
from sbonnx.rounding.search.descent import descend, descend_from
from sbonnx.spec import Array
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, any_codes, layer

by_case = pytest.mark.parametrize("case", CASES)


def nearest(grid: Grid) -> Array:
    return grid.nearest()


def error(one: Layer, grid: Grid, codes: Array) -> Array:
    return one.moments.error(grid.weight, grid.values(codes))


@pytest.mark.sampled(9)
@by_case
def test_no_single_code_is_better(case: str) -> None:
    """Where it ends, every other code of every weight was tried by brute force: none gains."""
    one = layer(CASES[case])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    codes = descend(grid, nearest(grid), one.moments, 1000)
    assert (codes >= grid.qmin).all() and (codes <= grid.qmax).all()
    ended = error(one, grid, codes)
    tolerance = 1e-5 * error(one, grid, nearest(grid)) + 1e-12
    for k in range(codes.shape[2]):
        for code in range(int(grid.qmin.min()), int(grid.qmax.max()) + 1):
            other = codes.copy()
            other[:, :, k] = np.clip(code, grid.qmin[:, :, k], grid.qmax[:, :, k])
            assert (error(one, grid, other) >= ended - tolerance).all()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), sweeps=st.integers(0, 4), case=st.sampled_from(sorted(CASES)))
def test_each_sweep_is_no_worse(seed: int, sweeps: int, case: str) -> None:
    """From any codes; what was given is left as it was."""
    one = layer(CASES[case], seed)
    grid = Grid.of(one.weight, one.qparams, one.layout)
    begin = any_codes(grid, seed)
    before = begin.copy()
    less, more = (descend(grid, begin, one.moments, count) for count in (sweeps, sweeps + 1))
    np.testing.assert_array_equal(begin, before)
    assert (error(one, grid, more) <= error(one, grid, less) * (1 + 1e-5) + 1e-9).all()


@pytest.mark.skipif(native.loops is None, reason="not compiled: no C compiler where it was installed")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), sweeps=st.integers(1, 6), case=st.sampled_from([*sorted(CASES), ""]))
def test_compiled_as_in_numpy(seed: int, sweeps: int, case: str) -> None:
    """Bit for bit, on every kind of layer, from any codes."""
    one = layer(CASES[case] if case else Case("Gemm", (9, 70), CHANNELS, {"transB": 1}, two=True), seed)
    grid = Grid.of(one.weight, one.qparams, one.layout)
    begin = any_codes(grid, seed)
    ours = descend(grid, begin, one.moments, sweeps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "loops", None)
        np.testing.assert_array_equal(ours, descend(grid, begin, one.moments, sweeps))


def test_no_sweeps_no_change() -> None:
    one = layer(CASES["conv"])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    np.testing.assert_array_equal(descend(grid, nearest(grid), one.moments, 0), nearest(grid))


@pytest.mark.parametrize("native_loops", [True, False])
@pytest.mark.parametrize("case", [*sorted(CASES)[:3], ""])
def test_the_gradient_is_that_of_the_codes(case: str, native_loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of outputs that the numpy loop leaves out once they have converged."""
    if not native_loops:
        monkeypatch.setattr(native, "loops", None)
    one = layer(CASES[case] if case else Case("Gemm", (40, 60), CHANNELS, {"transB": 1}, two=True))
    grid = Grid.of(one.weight, one.qparams, one.layout)
    codes, rest = descend_from(grid, any_codes(grid, 3), one.moments, 20)
    expected = one.moments.gradient(grid.weight, grid.values(codes))
    np.testing.assert_allclose(rest, expected, atol=1e-4 * float(np.abs(one.moments.a).max() * np.ptp(grid.weight)))

"""Tabu search: against brute force, against the same in numpy, and what it must never do."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.moments import Moments
from sbonnx.rounding import base as native
from sbonnx.rounding import gptq
from sbonnx.rounding.base import Grid
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search import tabu as module
from sbonnx.rounding.search.descent import descend, descend_from
from sbonnx.rounding.search.tabu import tabu
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, any_codes, layer

WIDE = Case("Gemm", (9, 70), CHANNELS, {"transB": 1}, two=True)
compiled = pytest.mark.skipif(native.loops is None, reason="not compiled: no C compiler where it was installed")


def grid_of(one: Layer) -> Grid:
    return Grid.of(one.weight, one.qparams, one.layout)


def nearest(grid: Grid) -> Array:
    return grid.nearest()


def error(one: Layer, grid: Grid, codes: Array) -> Array:
    return one.moments.error(grid.weight, grid.values(codes))


@pytest.mark.slow
def test_it_finds_the_best_of_all_codes() -> None:
    """Two bits and six inputs, 40 outputs: the least of all 4,096 roundings, or close to it."""
    ratios = []
    for seed in range(8):
        one = layer(Case("Gemm", (5, 6), QuantSpec(bits=2, axis=0), {"transB": 1}, two=bool(seed % 2)), seed)
        grid = grid_of(one)
        every = np.array(
            list(itertools.product(range(int(grid.qmin.min()), int(grid.qmax.max()) + 1), repeat=6)), np.float64
        )
        losses = np.stack([error(one, grid, np.broadcast_to(codes, grid.weight.shape)) for codes in every])
        found = tabu(grid, nearest(grid), one.moments, 50)
        ratios.append(error(one, grid, found) / losses.min(axis=0))
    assert np.min(ratios) > 1 - 1e-9
    assert np.mean(np.array(ratios) < 1 + 1e-4) > 0.9
    assert np.mean(ratios) < 1.02


@compiled
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), steps=st.integers(1, 12), case=st.sampled_from([*sorted(CASES), ""]))
def test_compiled_as_in_numpy(seed: int, steps: int, case: str) -> None:
    """Bit for bit, on every kind of layer, from any codes; what was given is left as it was."""
    one = layer(CASES[case] if case else WIDE, seed)
    grid = grid_of(one)
    begin = any_codes(grid, seed)
    before = begin.copy()
    found = tabu(grid, begin, one.moments, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "loops", None)
        np.testing.assert_array_equal(found, tabu(grid, begin, one.moments, steps))
    np.testing.assert_array_equal(begin, before)
    assert (found >= grid.qmin).all() and (found <= grid.qmax).all()
    np.testing.assert_array_equal(found, np.rint(found))
    assert (error(one, grid, found) <= error(one, grid, begin)).all()


def test_it_leaves_where_no_single_code_gains() -> None:
    """After descent there is still something to gain, and more steps gain more."""
    shares = []
    for seed in range(4):
        one = layer(Case("Gemm", (8, 250), CHANNELS, {"transB": 1}), seed)
        grid = grid_of(one)
        begin = descend(grid, nearest(grid), one.moments, 100)
        losses = [error(one, grid, tabu(grid, begin, one.moments, steps)).sum() for steps in (0, 2, 20)]
        shares.append([loss / losses[0] for loss in losses])
    none, few, many = np.mean(shares, axis=0)
    assert none == 1.0 and many < few < 0.99


@pytest.mark.parametrize("case", ["conv", "depthwise", "conv, groups", "matmul, affine blocks"])
def test_parts_and_threads_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(CASES[case])
    grid = grid_of(one)
    whole = tabu(grid, nearest(grid), one.moments, 20)
    monkeypatch.setattr(module, "PART", 1)
    np.testing.assert_array_equal(tabu(grid, nearest(grid), one.moments, 20), whole)
    monkeypatch.undo()
    monkeypatch.setattr(native, "WORTH", 0)
    monkeypatch.setattr(native, "cores", lambda: 3)
    np.testing.assert_array_equal(tabu(grid, nearest(grid), one.moments, 20), whole)


def test_large_layers_get_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(WIDE)
    grid = grid_of(one)
    few = tabu(grid, nearest(grid), one.moments, 1)
    monkeypatch.setattr(module, "MOST", 70 * 70)
    np.testing.assert_array_equal(tabu(grid, nearest(grid), one.moments, 100), few)
    monkeypatch.setattr(module, "MOST", 10)
    np.testing.assert_array_equal(tabu(grid, nearest(grid), one.moments, 100), nearest(grid))


def test_dead_inputs_keep_their_codes() -> None:
    one = layer(Case("Gemm", (3, 250), CHANNELS, {"transB": 1}))
    mask = np.ones(250, np.float32)
    mask[::4] = 0.0
    x = one.x * mask
    one = Layer(one.weight, one.qparams, one.layout, x, x)
    found = Gptq().round(one.weight, one.qparams, one.moments)
    np.testing.assert_array_equal(found.codes[:, ::4], one.qparams.quantize(one.weight)[:, ::4])
    assert found.loss is not None and found.nearest is not None and found.loss < 0.5 * found.nearest


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("loops", [native.loops, None])
def test_numbers_beyond_float32_end_the_search(loops: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of 1e30: nothing that the search computes is finite, and the codes stay."""
    monkeypatch.setattr(native, "loops", loops)
    one = layer(CASES["conv"])
    grid = grid_of(one)
    huge: Moments = replace(one.moments, a=one.moments.a * 1e60)
    np.testing.assert_array_equal(tabu(grid, nearest(grid), huge, 5), nearest(grid))


def test_it_continues_from_a_descent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the gradient of the descent it computes none, and gains what the codes say."""
    one = layer(Case("Gemm", (8, 250), CHANNELS, {"transB": 1}))
    grid = grid_of(one)
    codes, rest = descend_from(grid, nearest(grid), one.moments, 50)
    before = rest.copy()
    with monkeypatch.context() as patch:
        patch.setattr(Moments, "gradient", None)
        after = tabu(grid, codes, one.moments, 8, rest)
    np.testing.assert_array_equal(rest, before)
    assert (error(one, grid, after) <= error(one, grid, codes) * (1 + 1e-6)).all()
    assert error(one, grid, after).sum() < 0.97 * error(one, grid, codes).sum()


def test_wide_layers_gain_as_much_by_fewer_beams(monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule of wide layers against that of others, on one layer."""
    one = layer(Case("Gemm", (12, 200), CHANNELS, {"transB": 1}))
    usual = Gptq().round(one.weight, one.qparams, one.moments).loss
    monkeypatch.setattr(gptq, "WIDE", 100)
    short = Gptq().round(one.weight, one.qparams, one.moments)
    assert usual is not None
    assert short.loss is not None
    assert short.nearest is not None
    assert short.loss < 1.06 * usual < short.nearest

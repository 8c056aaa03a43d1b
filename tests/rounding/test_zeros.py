"""Zeros of a sparse weight: exact zero codes after rounding, whatever the others compensate."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.rounding import ROUNDERS, base, make_rounder
from sbonnx.rounding.base import SPARSE, kept_zeros
from sbonnx.rounding.range_search import search_bounds
from sbonnx.spec import QuantSpec, bounds_of, params_from_bounds
from tests.rounding.layers import CASES, Layer, layer, scales

KEEPING = [name for name, rounder in ROUNDERS.items() if rounder.keeps_zeros]


def sparse(case: str, share: float = 0.5, seed: int = 0) -> tuple[Layer, np.ndarray]:
    """A layer of which this share of the weights is zero, and which ones."""
    one = layer(CASES[case], seed=seed)
    zeros = np.random.default_rng(seed).permutation(one.weight.size).reshape(one.weight.shape)
    gone = zeros < round(share * one.weight.size)
    weight = np.where(gone, np.float32(0), one.weight)
    return replace(one, weight=weight, qparams=scales(weight, one.qparams.spec)), gone


def test_who_keeps_zeros() -> None:
    assert KEEPING == ["nearest", "gptq"]


@pytest.mark.sampled
@pytest.mark.parametrize("name", KEEPING)
@pytest.mark.parametrize("case", [case for case in CASES if case not in ("one weight", "one input")])
def test_zeros_stay_zero(name: str, case: str) -> None:
    one, gone = sparse(case)
    found = make_rounder(name, {}).round(one.weight, one.qparams, one.moments)
    assert not one.qparams.dequantize(found.codes)[gone].any()
    nearest = one.qparams.quantize(one.weight)
    assert found.loss is None or found.loss <= one.error(replace(found, codes=nearest)).sum() * (1 + 1e-5)


@given(st.integers(0, 10_000), st.sampled_from([2, 3, 4, 8]), st.booleans(), st.floats(0.25, 0.95))
@settings(max_examples=25, deadline=None)
def test_any_grid(seed: int, bits: int, symmetric: bool, share: float) -> None:
    one, gone = sparse("conv, two streams", share + 0.02, seed)
    spec = QuantSpec(bits=bits, axis=0, symmetric=symmetric)
    qparams = scales(one.weight, spec)
    found = make_rounder("gptq", {}).round(one.weight, qparams, one.moments)
    assert not qparams.dequantize(found.codes)[gone].any()


def test_the_other_weights_compensate() -> None:
    """GPTQ with held zeros beats GPTQ whose zeros are set afterwards."""
    held, afterwards = 0.0, 0.0
    for seed in range(10):
        one, gone = sparse("conv", seed=seed)
        gptq = make_rounder("gptq", {})
        found = gptq.round(one.weight, one.qparams, one.moments)
        assert found.loss is not None
        held += found.loss
        grid = base.Grid.of(one.weight, one.qparams, one.layout)
        free = one.layout.from_matrices(gptq.solve(grid, one.moments, one.qparams)[0])
        codes = np.where(gone, one.qparams.quantize(np.zeros_like(one.weight)), free).astype(found.codes.dtype)
        afterwards += float(one.error(replace(found, codes=codes)).sum())
    assert held < 0.9 * afterwards


def test_ranges_are_searched_with_held_zeros() -> None:
    """The cost of a range is the error that GPTQ makes with it, zeros held."""
    better = []
    for seed in range(8):
        one, _ = sparse("conv, 2 bits", seed=seed)
        spec = one.qparams.spec
        bounds = search_bounds(one.weight, spec, bounds_of(one.weight, spec.axis), one.moments)
        moved = params_from_bounds(bounds, spec)
        losses = [
            make_rounder("gptq", {}).round(one.weight, qparams, one.moments).loss for qparams in (moved, one.qparams)
        ]
        assert losses[0] is not None and losses[1] is not None
        better.append(losses[0] / losses[1])
    assert np.mean(np.log(better)) < -0.1


def test_few_zeros_are_no_sparsity() -> None:
    weight = np.ones(100, np.float32)
    weight[: round(100 * SPARSE) - 1] = 0
    assert kept_zeros(weight) is None
    weight[: round(100 * SPARSE)] = 0
    kept = kept_zeros(weight)
    assert kept is not None and kept.sum() == 25
    assert kept_zeros(np.zeros(0, np.float32)) is None


def test_the_compiled_loops_and_numpy_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = sparse("conv, two streams", seed=3)
    first = make_rounder("gptq", {}).round(one.weight, one.qparams, one.moments).codes
    monkeypatch.setattr(base, "loops", None)
    np.testing.assert_array_equal(first, make_rounder("gptq", {}).round(one.weight, one.qparams, one.moments).codes)

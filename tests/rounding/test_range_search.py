"""Ranges by the error of the output."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from sbonnx.errors import NumericError
from sbonnx.rounding import Rounded
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.range_search import By, search_bounds
from sbonnx.spec import Array, Bounds, QuantSpec, bounds_of, pair_bounds, params_from_bounds
from tests.rounding.layers import CASES, Case, Layer, layer

BYS: tuple[By, ...] = get_args(By)


def bounds(one: Layer) -> Bounds:
    """The range of each tensor, channel or block."""
    spec = one.qparams.spec
    if spec.block_size is None or spec.axis is None:
        plain = bounds_of(one.weight, spec.axis)
        return pair_bounds(one.weight, spec, plain) if spec.pairs else plain
    cuts = np.arange(0, one.weight.shape[spec.axis], spec.block_size)
    return Bounds(*(end.reduceat(one.weight, cuts, axis=spec.axis) for end in (np.minimum, np.maximum)))


def searched(one: Layer, by: By) -> Layer:
    """The layer with the scales that were found."""
    spec = one.qparams.spec
    return replace(
        one, qparams=params_from_bounds(search_bounds(one.weight, spec, bounds(one), one.moments, by=by), spec)
    )


def nearest_error(one: Layer) -> Array:
    return one.error(Rounded(one.qparams.quantize(one.weight), one.qparams))


@pytest.mark.sampled
@pytest.mark.parametrize("by", BYS)
@pytest.mark.parametrize("case", CASES)
def test_bounds_are_bounds(case: str, by: By) -> None:
    """Of the same shape, finite, about 0, at most a tenth wider than given, and the same again."""
    one = layer(CASES[case])
    given = bounds(one)
    found = search_bounds(one.weight, one.qparams.spec, given, one.moments, by=by)
    for end, before in ((found.lo, given.lo), (found.hi, given.hi)):
        assert end.dtype == np.float32 and end.shape == before.shape
        assert np.isfinite(end).all()
        assert (np.abs(end) <= 1.35 * np.abs(before) + 1e-6).all() and (end * before >= 0).all()
    again = search_bounds(one.weight, one.qparams.spec, given, one.moments, by=by)
    np.testing.assert_array_equal(found.lo, again.lo)


@pytest.mark.parametrize("case", [case for case in CASES if "block" not in case and "an input" not in case])
def test_by_nearest_no_worse_by_the_rows(case: str) -> None:
    """Every group of outputs that shares a scale, or all together; here all together, and each output with its own."""
    one = layer(CASES[case])
    found, before = nearest_error(searched(one, "nearest")), nearest_error(one)
    assert found.sum() <= before.sum() * (1 + 1e-6) + 1e-12
    if one.qparams.scale.size == before.size:
        assert (found <= before * (1 + 1e-6) + 1e-12).all()


def test_it_is_the_best_of_a_fine_grid_or_near() -> None:
    """Against 200 shares of the range tried one by one."""
    one = layer(Case("Gemm", (1, 24), QuantSpec(bits=3, axis=0), {"transB": 1}))
    given, spec = bounds(one), one.qparams.spec
    errors = []
    for part in np.linspace(0.2, 1.1, 200, dtype=np.float32):
        qparams = params_from_bounds(Bounds(given.lo * part, given.hi * part), spec)
        errors.append(nearest_error(replace(one, qparams=qparams)).sum())
    assert nearest_error(searched(one, "nearest")).sum() <= np.quantile(errors, 0.05)


@pytest.mark.parametrize("spec", [QuantSpec(bits=2, axis=0), QuantSpec(bits=3), QuantSpec(3, axis=0, symmetric=False)])
def test_by_gptq_suits_gptq(spec: QuantSpec) -> None:
    """Over several layers: better for gptq's codes than the range, and than what suits the nearest codes."""
    errors: dict[str, float] = {}
    for seed in range(5):
        one = layer(Case("Gemm", (8, 60), spec, {"transB": 1}, two=bool(seed % 2)), seed)
        kinds: dict[str, Layer] = {"given": one}
        kinds.update((by, searched(one, by)) for by in BYS)
        for name, made in kinds.items():
            found = Gptq().round(made.weight, made.qparams, made.moments)
            errors[name] = errors.get(name, 0.0) + float(one.error(found).sum() / nearest_error(one).sum())
    assert (
        errors["gptq"] < errors["nearest"] and errors["gptq"] < errors["diagonal"] and errors["gptq"] < errors["given"]
    )


@pytest.mark.parametrize("case", ["matmul, blocks", "matmul, affine blocks", "matmul, a scale an input"])
def test_blocks_no_worse_together(case: str) -> None:
    """Scales of one output are found one by one, and kept where they gain together, by plain GPTQ's codes."""
    plain = Gptq(order="pivot", beams=1, steps=0, sweeps=0)
    gained = []
    for seed in range(5):
        one = layer(CASES[case], seed)
        found = searched(one, "gptq")
        before, after = (
            made.error(plain.round(made.weight, made.qparams, made.moments)).sum() for made in (one, found)
        )
        # The search weighs damped moments, a hundredth of their mean more.
        assert after <= 1.05 * before
        gained.append(after / before)
    assert np.mean(gained) < 1.0


def test_silent_inputs() -> None:
    """Where nothing was seen, the weights' own error decides; the range is no single point."""
    one = layer(Case("Gemm", (4, 20), QuantSpec(bits=3, axis=0), {"transB": 1}))
    one = replace(one, x=0 * one.x, quantized=0 * one.x)
    for by in BYS:
        found = searched(one, by)
        before = ((one.qparams.fake_quant(one.weight) - one.weight) ** 2).sum()
        if by != "gptq":
            assert ((found.qparams.fake_quant(one.weight) - one.weight) ** 2).sum() <= before
        assert (found.qparams.scale > 0.1 * one.qparams.scale).all()


def test_what_cannot_be() -> None:
    one = layer(CASES["conv"])
    spec, given = one.qparams.spec, bounds(one)
    with pytest.raises(ValueError, match="two candidates"):
        search_bounds(one.weight, spec, given, one.moments, candidates=1)
    broken = replace(one.moments, a=np.full_like(one.moments.a, np.inf))
    with pytest.raises(NumericError, match="infinite"):
        search_bounds(one.weight, spec, given, broken)
    fp8 = QuantSpec(bits=8, axis=0, kind="fp8")
    assert search_bounds(one.weight, fp8, given, one.moments) is given

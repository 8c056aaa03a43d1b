"""Half-quadratic ranges: never worse by their own error, better where a few weights stand out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.solve import weight_bounds
from sbonnx.plan.types import ObserverChoice, RoundingChoice, Site
from sbonnx.rounding.hqq import POWER, hqq_bounds
from sbonnx.spec import Array, Bounds, QuantSpec, ScaleRule, params_from_bounds


def site(spec: QuantSpec, scale: str = "observer") -> Site:
    """A weight with the range of its extremes."""
    rounding = RoundingChoice(scale=scale)  # type: ignore[arg-type]
    return Site("w", "w", "weight", spec, (), "", "w", ObserverChoice("minmax"), rounding)


def errors(weight: Array, bounds: Bounds, spec: QuantSpec, rule: ScaleRule = "exact") -> Array:
    """Sum of |w - w'|^p by explicit loops over what shares a scale."""
    made = params_from_bounds(bounds, spec, rule=rule)
    error: Array = np.abs(weight.astype(np.float64) - made.fake_quant(weight)) ** POWER
    if spec.axis is None:
        return np.array([error.sum()])
    rows = np.moveaxis(error, spec.axis, -1)
    if spec.block_size is None:
        return np.array([row.sum() for row in np.moveaxis(error, spec.axis, 0)])
    cuts = range(0, rows.shape[-1], spec.block_size)
    return np.stack([rows[..., at : at + spec.block_size].sum(-1) for at in cuts], axis=-1).reshape(-1)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    shape=st.sampled_from([(6, 40), (8, 3, 5), (4, 4, 3, 3), (70, 5)]),
    bits=st.integers(2, 8),
    signed=st.booleans(),
    symmetric=st.booleans(),
    where=st.sampled_from(["tensor", "first", "last", "blocks", "blocks of the last"]),
    rule=st.sampled_from(["exact", "sparsebit"]),
    seed=st.integers(0, 999),
)
def test_never_worse_than_where_it_began(
    shape: tuple[int, ...], bits: int, signed: bool, symmetric: bool, where: str, rule: ScaleRule, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_t(3, shape) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
    axis = {"tensor": None, "first": 0, "blocks": 0}.get(where, len(shape) - 1)
    block = 16 if where.startswith("blocks") else None
    spec = QuantSpec(bits=bits, signed=signed, symmetric=symmetric, axis=axis, block_size=block)
    before = weight_bounds(site(spec), weight, rule)
    after = hqq_bounds(weight, spec, before, rule)
    assert after.lo.shape == before.lo.shape and after.lo.dtype == np.float32
    assert (after.lo <= 0).all() and (after.hi >= 0).all()
    old, new = errors(weight, before, spec, rule), errors(weight, after, spec, rule)
    assert (new <= old * 1.001 + 1e-6 * np.abs(weight).max() ** POWER).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_few_large_weights_are_let_go(symmetric: bool) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((16, 256)).astype(np.float32)
    weight[:, 0] = 12.0
    spec = QuantSpec(bits=4, symmetric=symmetric, axis=0)
    before = weight_bounds(site(spec), weight)
    after = hqq_bounds(weight, spec, before)
    assert errors(weight, after, spec).sum() < 0.75 * errors(weight, before, spec).sum()
    rest = [np.abs(weight - params_from_bounds(b, spec).fake_quant(weight))[:, 1:].mean() for b in (before, after)]
    assert rest[1] < 0.6 * rest[0]


@pytest.mark.parametrize("bits", [3, 4])
def test_near_the_best_scale_of_a_fine_grid(bits: int) -> None:
    """One row, symmetric: the error is within 6% of the best that 4,000 scales give."""
    rng = np.random.default_rng(1)
    spec = QuantSpec(bits=bits)
    for _ in range(8):
        weight = rng.laplace(size=(1, 300)).astype(np.float32)
        found = errors(weight, hqq_bounds(weight, spec, weight_bounds(site(spec), weight)), spec)[0]
        top = np.abs(weight).max() / spec.qmax
        best = min(
            (np.abs(weight - np.clip(np.rint(weight / s), spec.qmin, spec.qmax) * s).astype(np.float64) ** POWER).sum()
            for s in np.linspace(0.05, 1.2, 4000) * top
        )
        assert best * 0.999 <= found < best * 1.06


def test_zeros_and_one_value_stay_exact() -> None:
    spec = QuantSpec(bits=4, axis=0)
    weight = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [0, -0.25, 0]], np.float32)
    made = params_from_bounds(hqq_bounds(weight, spec, weight_bounds(site(spec), weight)), spec)
    np.testing.assert_allclose(made.fake_quant(weight), weight, atol=1e-7)


def test_the_recipe_asks_for_it() -> None:
    spec = QuantSpec(bits=4, axis=0, block_size=32)
    weight = np.random.default_rng(0).standard_t(3, (128, 8)).astype(np.float32)
    asked, plain = weight_bounds(site(spec, "hqq"), weight), weight_bounds(site(spec), weight)
    np.testing.assert_array_equal(asked.lo, hqq_bounds(weight, spec, plain).lo)
    assert (asked.lo != plain.lo).any()

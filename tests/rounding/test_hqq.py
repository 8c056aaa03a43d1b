"""Half-quadratic zero points: the paper's iteration, never worse by their own error, and no scale that cuts weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sbonnx
from sbonnx.calib.qparams.solve import weight_bounds
from sbonnx.errors import RecipeError
from sbonnx.planning.types import ObserverChoice, RoundingChoice, Site
from sbonnx.rounding.hqq import BETA, ITERATIONS, KAPPA, POWER, half_quadratic, hqq_bounds
from sbonnx.spec import Array, Bounds, QuantSpec, ScaleRule, params_from_bounds
from tests.support.models import model


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
    where=st.sampled_from(["tensor", "first", "last", "blocks", "blocks of the last"]),
    rule=st.sampled_from(["exact", "sparsebit"]),
    seed=st.integers(0, 999),
)
def test_never_worse_than_where_it_began(
    shape: tuple[int, ...], bits: int, signed: bool, where: str, rule: ScaleRule, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    weight = (rng.standard_t(3, shape) * 10.0 ** rng.integers(-4, 3)).astype(np.float32)
    axis = {"tensor": None, "first": 0, "blocks": 0}.get(where, len(shape) - 1)
    block = 16 if where.startswith("blocks") else None
    spec = QuantSpec(bits=bits, signed=signed, symmetric=False, axis=axis, block_size=block)
    before = weight_bounds(site(spec), weight, rule)
    after = hqq_bounds(weight, spec, before, rule)
    assert after.lo.shape == before.lo.shape and after.lo.dtype == np.float32
    scales = [params_from_bounds(bounds, spec, rule=rule).scale for bounds in (before, after)]
    np.testing.assert_allclose(scales[1], scales[0], rtol=1e-6)
    old, new = errors(weight, before, spec, rule), errors(weight, after, spec, rule)
    assert (new <= old * 1.001 + 1e-6 * np.abs(weight).max() ** POWER).all()


def as_published(row: Array, scale: float, zero: float, top: int) -> float:
    """Equations 3 to 8 of the paper on one group, in the units of the weights; the best zero point on the way."""
    beta, found, best = BETA * scale ** (POWER - 2), zero, np.inf
    for _ in range(ITERATIONS + 1):
        codes = np.clip(np.round(row / scale + zero), 0, top)
        x = row - scale * (codes - zero)
        loss = (np.abs(x) ** POWER).sum()
        if loss < best:
            best, found = loss, zero
        small = np.maximum(np.abs(x), 1e-30)
        e = np.sign(x) * np.maximum(small - small ** (POWER - 1) / beta, 0)
        zero = np.mean(codes - (row - e) / scale)
        beta *= KAPPA
    return float(found)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_real_zero_points_are_those_of_the_paper(bits: int) -> None:
    rng = np.random.default_rng(bits)
    rows = rng.standard_t(4, (32, 64))
    scale = np.ptp(rows, axis=1) / (2**bits - 1)
    zero = -rows.min(axis=1) / scale
    spec = QuantSpec(bits=bits, signed=False, symmetric=False, axis=0)
    found = half_quadratic(rows / scale[:, None], zero, spec)
    wanted = [as_published(*row, 2**bits - 1) for row in zip(rows, scale, zero, strict=True)]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert (np.abs(found - zero) > 1e-3).any()


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_convolutions_lose_nothing_to_the_nearest_codes(bits: int) -> None:
    """Squared errors: a scale that p < 1 had narrowed lost 3 dB on such weights."""
    weight = np.random.default_rng(0).laplace(size=(16, 16, 3, 3)).astype(np.float32)
    spec = QuantSpec(bits=bits, symmetric=False, axis=0)
    before = weight_bounds(site(spec), weight)
    losses = [
        np.square(weight - params_from_bounds(bounds, spec).fake_quant(weight)).sum()
        for bounds in (before, hqq_bounds(weight, spec, before))
    ]
    assert losses[1] < 1.05 * losses[0]


def test_the_recipe_asks_for_it() -> None:
    spec = QuantSpec(bits=2, symmetric=False, axis=0, block_size=32)
    weight = np.random.default_rng(0).standard_t(3, (128, 8)).astype(np.float32) + 1
    asked, plain = weight_bounds(site(spec, "hqq"), weight), weight_bounds(site(spec), weight)
    np.testing.assert_array_equal(asked.lo, hqq_bounds(weight, spec, plain).lo)
    assert (asked.lo != plain.lo).any()


@pytest.mark.parametrize(
    "wishes", [{"w_qscheme": "per-channel-symmetric", "backend": "virtual"}, {"bits": "fp8", "backend": "tensorrt"}]
)
def test_weights_without_zero_points_are_refused(wishes: dict[str, Any]) -> None:
    text = "agraph (float[N,16,8,8] x) => (float[N,16,8,8] y) { y = Conv (x, w) }"
    proto = model(text, w=(16, 16, 1, 1))
    feeds = [{"x": np.ones((1, 16, 8, 8), np.float32)}]
    with pytest.raises(RecipeError, match="hqq' chooses zero points") as error:
        sbonnx.quantize(proto, feeds, weight_scale="hqq", **wishes)
    assert "\n" not in str(error.value)

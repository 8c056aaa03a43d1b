"""The soft choice between two codes, and its schedules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.rounding.adaround import LATE, Choice, SoftBlocks, pull
from sbonnx.spec import Array, QParams, QuantSpec, bounds_of, params_from_bounds

torch = pytest.importorskip("torch")

SPECS = [
    QuantSpec(bits=4, axis=0),
    QuantSpec(bits=3, signed=False, symmetric=False),
    QuantSpec(bits=4, axis=1, block_size=16, symmetric=False, signed=False),
]


def made(spec: QuantSpec, off: int = 0) -> tuple[Array, QParams, Array, Choice]:
    """(weight, scales, first codes, choice); `off`: how far the first codes are from the nearest."""
    weight = np.random.default_rng(0).standard_normal((6, 32)).astype(np.float32)
    if spec.block_size is None:
        bounds = bounds_of(weight, spec.axis)
    else:
        blocks = weight.reshape(6, -1, spec.block_size)
        bounds = type(bounds_of(weight))(blocks.min(2), blocks.max(2))
    qparams = params_from_bounds(bounds, spec)
    codes = np.clip(qparams.quantize(weight).astype(int) + off, spec.qmin, spec.qmax).astype(spec.dtype)
    return weight, qparams, codes, Choice(torch, weight, codes, qparams)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("off", [-2, 0, 1])
def test_what_is_not_moved_is_what_it_began_with(spec: QuantSpec, off: int) -> None:
    _, _, codes, choice = made(spec, off)
    np.testing.assert_array_equal(choice.chosen(), codes)
    assert choice.chosen().dtype == spec.dtype


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_soft_values_begin_at_the_weight(spec: QuantSpec) -> None:
    weight, qparams, _, choice = made(spec)
    values = choice.values(choice.h()).detach().numpy()
    scale = np.broadcast_to(qparams.along(qparams.scale, weight.shape), weight.shape)
    limits = qparams.along(qparams.limits.lo, weight.shape), qparams.along(qparams.limits.hi, weight.shape)
    assert (np.abs(values - np.clip(weight, *limits)) <= 0.02 * scale).all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_other_code_lies_towards_the_weight(spec: QuantSpec) -> None:
    weight, qparams, codes, choice = made(spec, 1)
    with torch.no_grad():
        choice.u.fill_(-9.0)
        low = choice.chosen().astype(int)
        choice.u.fill_(9.0)
        high = choice.chosen().astype(int)
    assert (high - low == 1).all() and ((codes == low) | (codes == high)).all()
    inside = (codes.astype(int) > spec.qmin) & (codes.astype(int) < spec.qmax)
    values = [qparams.dequantize(side.astype(spec.dtype)) for side in (low, high)]
    nearest = np.minimum(*(np.abs(side - weight) for side in values))
    assert (nearest <= np.abs(qparams.dequantize(codes) - weight) + 1e-6)[inside].all()


def test_gradients_reach_the_choices_and_not_what_is_settled() -> None:
    *_, choice = made(SPECS[0])
    choice.settle(0.5)
    (choice.values(choice.h()) ** 2).sum().backward()
    moved = choice.u.grad != 0
    assert 0 < int(moved.sum()) <= moved.numel() // 2
    before = choice.chosen()
    with torch.no_grad():
        choice.u.neg_()
    changed = choice.chosen() != before
    assert not (changed & ~moved.numpy()).any()


def test_zeros_of_a_sparse_weight_are_settled_from_the_start() -> None:
    weight, qparams, _, _ = made(SPECS[1])
    weight[:, ::2] = 0.0
    choice = Choice(torch, weight, qparams.quantize(weight), qparams)
    for share in (0.0, 0.7, 1.0):
        with torch.no_grad():
            choice.u.fill_(9.0)
        choice.settle(share)
        values = choice.values(choice.h()).detach().numpy()
        assert not values[:, ::2].any() and values[:, 1::2].any()
        assert not qparams.dequantize(choice.chosen())[:, ::2].any()


def test_settling_all_leaves_nothing_soft() -> None:
    weight, qparams, _, choice = made(SPECS[0])
    for share in (0.2, 0.7, 1.0):
        choice.settle(share)
    values = choice.values(choice.h()).detach().numpy()
    np.testing.assert_allclose(values, qparams.dequantize(choice.chosen()), rtol=1e-6)
    assert float(pull(choice.h(), 2.0).detach()) == 0.0
    assert np.abs(values - weight).max() <= qparams.scale.max() * 0.51, "nothing was moved, so they are the nearest"


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_schedules(schedule: Any) -> None:
    settings = SoftBlocks(iterations=100, warmup=0.2, beta_start=20, beta_end=2, schedule=schedule)
    assert settings.beta(19) is None and settings.beta(20) == 20
    betas = [settings.beta(step) or 0.0 for step in range(20, 100)]
    assert betas == sorted(betas, reverse=True) and betas[-1] == pytest.approx(2.0, abs=0.3)
    settled = [settings.settled(step) for step in range(100)]
    assert settled == sorted(settled) and settled[20] == 0.0 and settled[round(100 * LATE)] == 1.0
    assert settings.pace(0) == 1.0 and settings.pace(100) == pytest.approx(0.0)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="drop within"):
        SoftBlocks(drop=1.5)

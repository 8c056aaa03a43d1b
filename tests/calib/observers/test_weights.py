"""Ranges of weights: per tensor, channel and block, by every observer that is for weights."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from sbonnx.calib.observers import OBSERVERS, make_observer
from sbonnx.calib.observers.base import TILE
from sbonnx.calib.qparams.solve import weight_bounds
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import NumericError, RecipeError
from sbonnx.planning.types import ObserverChoice, Site
from sbonnx.spec import Array, Bounds, QuantSpec, params_from_bounds
from tests.calib.observers.reference import true_error

FOR_WEIGHTS = [name for name, kind in OBSERVERS.items() if kind.for_weights]
by_name = pytest.mark.parametrize("name", FOR_WEIGHTS)
WEIGHT = np.random.default_rng(0).standard_t(3, (6, 40, 3)).astype(np.float32)


def site(name: str, spec: QuantSpec) -> Site:
    """A weight 'w'."""
    return Site("w", "w", "weight", spec, (), "", "w", observer=ObserverChoice(name))


@by_name
@pytest.mark.parametrize("axis", [None, 0, 1, 2])
def test_channels(name: str, axis: int | None) -> None:
    """The same as from a sketch of the constant, which is exact whatever its size."""
    spec = QuantSpec(bits=4, axis=axis)
    found = weight_bounds(site(name, spec), WEIGHT)
    want = make_observer(name).bounds(Sketch.of(WEIGHT, axis), spec)
    np.testing.assert_array_equal([found.lo, found.hi], [want.lo, want.hi])
    assert found.lo.shape == (() if axis is None else (WEIGHT.shape[axis],))
    rows = WEIGHT.reshape(1, -1) if axis is None else np.moveaxis(WEIGHT, axis, 0).reshape(WEIGHT.shape[axis], -1)
    assert (rows.min(axis=1) <= found.lo).all()
    assert (found.hi <= rows.max(axis=1)).all()


@pytest.mark.sampled(7)
@by_name
@pytest.mark.parametrize(("axis", "size"), [(1, 16), (1, 7), (1, 100), (0, 4), (2, 3)])
def test_blocks_are_channels(name: str, axis: int, size: int) -> None:
    """Each block by itself gives the same, the shorter last ones too."""
    spec = QuantSpec(bits=4, axis=axis, block_size=size)
    found = weight_bounds(site(name, spec), WEIGHT)
    rows = np.moveaxis(WEIGHT, axis, -1)
    shape = (*rows.shape[:-1], -(-rows.shape[-1] // size))
    assert np.moveaxis(found.lo, axis, -1).shape == shape
    lo, hi = (np.moveaxis(end, axis, -1) for end in (found.lo, found.hi))
    for place in np.ndindex(shape):
        block = rows[place[:-1]][place[-1] * size : (place[-1] + 1) * size]
        alone = make_observer(name).bounds(Sketch.of(block[None]), spec)
        errors = [true_error(block, params_from_bounds(b, spec)) for b in (Bounds(lo[place], hi[place]), alone)]
        assert errors[0] == pytest.approx(float(errors[1]), rel=0.01)
        if name in ("minmax", "percentile", "kl_histogram"):
            assert (lo[place], hi[place]) == (alone.lo, alone.hi)


@pytest.mark.parametrize("block", [None, 1600])
def test_the_rule_reaches_the_observer(block: int | None) -> None:
    """The ancestor's percentile leaves out one value less below."""
    weight = np.stack([np.linspace(-1, 1, 3200)] * 2).astype(np.float32)
    weight = np.concatenate([weight[:, ::2], weight[:, 1::2]], axis=1)
    spec = QuantSpec(axis=0 if block is None else 1, block_size=block)
    chosen = Site("w", "w", "weight", spec, (), "", "w", observer=ObserverChoice("percentile", {"alpha": 0.1}))
    ours, old = weight_bounds(chosen, weight), weight_bounds(chosen, weight, "sparsebit")
    assert ours.lo.shape == ((2,) if block is None else (2, 2))
    assert (old.lo < ours.lo).all()
    assert (old.hi == ours.hi).all()


def dense(weight: Array, spec: QuantSpec) -> Array:
    """Least error of each channel over 200 symmetric ranges."""
    rows = weight.reshape(len(weight), -1)
    best = np.full(len(rows), np.inf)
    for share in np.geomspace(1, 0.05, 200):
        t = (np.abs(rows).max(axis=1) * share).astype(np.float32)
        bounds = Bounds(np.maximum(rows.min(axis=1), -t), np.minimum(rows.max(axis=1), t))
        best = np.minimum(best, true_error(rows, params_from_bounds(bounds, spec)))
    return best


@pytest.mark.parametrize("bits", [8, 4])
def test_mse_of_many_channels_is_near_a_dense_search(bits: int) -> None:
    """More than are worked on at once: level with 200 ranges on average, a few percent above at worst."""
    spec = QuantSpec(bits=bits, axis=0)
    weight = np.random.default_rng(1).standard_normal((700, 64, 3, 3)).astype(np.float32)
    assert weight.size > 3 * TILE
    params = params_from_bounds(weight_bounds(site("mse", spec), weight), spec)
    ratio = true_error(weight.reshape(700, -1), params) / dense(weight, spec)
    assert ratio.mean() < 1.001
    assert ratio.max() < 1.06


@pytest.mark.parametrize("name", ["minmax", "auto"])
def test_memory_stays_bounded(name: str) -> None:
    """64 MiB beside the sketch, for many channels and for a single long one. auto goes through all of them."""
    rng = np.random.default_rng(2)
    for weight, axis in ((rng.standard_normal((4000, 500)), 0), (rng.standard_normal((1, 1 << 21)), None)):
        sketch = Sketch.of(weight.astype(np.float32), axis)
        distribution = sketch.distribution()
        held = distribution.left.nbytes + distribution.counts.nbytes
        del distribution
        tracemalloc.start()
        make_observer(name).bounds(sketch, QuantSpec())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak - 2 * held < 64 << 20


@by_name
@pytest.mark.parametrize("block", [None, 5])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_must_be_finite(name: str, block: int | None, bad: float) -> None:
    weight = WEIGHT.copy()
    weight[1, 2, 0] = bad
    with pytest.raises(NumericError, match="weight 'w' holds NaN or infinite values"):
        weight_bounds(site(name, QuantSpec(axis=1, block_size=block)), weight)


def test_half_and_double_precision() -> None:
    half = WEIGHT.astype(np.float16)
    spec = QuantSpec(bits=4, axis=0)
    want = weight_bounds(site("mse", spec), half.astype(np.float32))
    for weight in (half, half.astype(np.float64)):
        found = weight_bounds(site("mse", spec), weight)
        np.testing.assert_array_equal([found.lo, found.hi], [want.lo, want.hi])


def test_observers_of_activations_are_refused() -> None:
    with pytest.raises(RecipeError, match="'moving_average' is for activations; use 'minmax' for weight 'w'"):
        weight_bounds(site("moving_average", QuantSpec()), WEIGHT)


@by_name
def test_a_weight_without_values(name: str) -> None:
    for spec in (QuantSpec(axis=0), QuantSpec(axis=1, block_size=4)):
        assert weight_bounds(site(name, spec), np.zeros((3, 0), np.float32)).lo.size == (3 if spec.axis == 0 else 0)

"""Sums over planes, compiled and in numpy: those of float64 over the same boxes, and one another's bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.moments import Moments, MomentSums
from sbonnx.moments import lags as planes
from sbonnx.moments.lags import PackedSums, lag_plan
from sbonnx.spec import Array
from tests.support.linear_ops import layer_of

compiled = pytest.mark.skipif(planes.loops is None, reason="not compiled: no C compiler where it was installed")
in_both = pytest.mark.parametrize(
    "loops", [pytest.param(planes.loops, marks=compiled, id="C"), pytest.param(None, id="numpy")]
)


def depthwise(channels: int, kernel: list[int], **attributes: Any) -> Geometry:
    return geometry_of(layer_of("Conv", {"group": channels}, (channels, 1, *kernel)), attributes)


def images(shape: tuple[int, ...], seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_sums_of_lagged_products_equal_float64_sums(data: st.DataObject) -> None:
    """One axis or two, any steps, one factor or two, several images: in float64 by hand, and in both forms."""
    axes = data.draw(st.integers(1, 2))
    sizes = tuple(data.draw(st.integers(1, 40)) for _ in range(axes))
    kernel = [data.draw(st.integers(1, min(4, size))) for size in sizes]
    steps = {"strides": [data.draw(st.integers(1, 3)) for _ in sizes]}
    wide = {"dilations": [data.draw(st.integers(1, 2)) if size > 8 else 1 for size in sizes]}
    pads = {"pads": [data.draw(st.integers(0, k - 1)) for k in kernel * 2]}
    geometry = depthwise(3, kernel, **steps, **wide, **pads)
    same = data.draw(st.booleans())
    plan = lag_plan(geometry.sources((1, 3, *sizes)), sizes, same=same)
    boxes = PackedSums.of(plan, sizes)
    assert boxes is not None
    one = images((2, 3, *sizes), seed=1)
    other = one if same else images((2, 3, *sizes), seed=2)
    found, in_numpy = boxes.zeros(3), boxes.zeros(3)
    boxes.add(found, one, other)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planes, "loops", None)
        boxes.add(in_numpy, one, other)
    np.testing.assert_array_equal(found, in_numpy)
    everything = (slice(None), slice(None))
    for piece, sums in zip(plan.pieces, found, strict=True):
        wanted = np.zeros(3)
        for here, there in piece.slices(10**9):
            products = one[everything + here].astype(np.float64) * other[everything + there]
            wanted += products.sum(axis=(0, *range(2, products.ndim)))
        np.testing.assert_allclose(sums[:, 0, 0], wanted, rtol=1e-4, atol=1e-4)


def moments_of(count: int, geometry: Geometry, x: Array, y: Array) -> Moments:
    sums = MomentSums(geometry, two_streams=True)
    for sample in range(count):
        sums.add(x[sample : sample + 1], y[sample : sample + 1], sample=sample)
    return sums.moments()


@in_both
def test_sums_are_added_to(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "loops", loops)
    geometry = depthwise(2, [3, 3], pads=[1] * 4)
    boxes = PackedSums.of(lag_plan(geometry.sources((1, 2, 9, 9)), (9, 9), same=True), (9, 9))
    assert boxes is not None
    one, other = images((1, 2, 9, 9), 1), images((3, 2, 9, 9), 2)
    apart, together = boxes.zeros(2), boxes.zeros(2)
    for each in (one, other):
        boxes.add(apart, each, each)
    both = np.concatenate([one, other])
    boxes.add(together, both, both)
    np.testing.assert_allclose(apart, together, rtol=1e-12)


@in_both
def test_long_sums_keep_their_digits(loops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plane of a million numbers near 1: one float32 sum over all of it would stand still."""
    monkeypatch.setattr(planes, "loops", loops)
    geometry = depthwise(1, [1, 1])
    boxes = PackedSums.of(lag_plan(geometry.sources((1, 1, 1000, 1000)), (1000, 1000), same=True), (1000, 1000))
    assert boxes is not None
    x = 1.0 + np.random.default_rng(0).random((1, 1, 1000, 1000), np.float32)
    found = boxes.zeros(1)
    boxes.add(found, x, x)
    assert found.item() == pytest.approx(float((x.astype(np.float64) ** 2).sum()), rel=1e-6)


@compiled
@pytest.mark.parametrize("stride", [1, 2])
def test_the_same_moments_where_nothing_was_compiled(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = depthwise(5, [3, 3], pads=[1] * 4, strides=[stride] * 2)
    x, y = images((4, 5, 13, 20), 1), images((4, 5, 13, 20), 2)
    monkeypatch.setattr(MomentSums, "_by_lags", lambda *_: True)
    ours = moments_of(4, geometry, x, y)
    monkeypatch.setattr(planes, "loops", None)
    wanted = moments_of(4, geometry, x, y)
    for name in ("a", "b", "c"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(wanted, name))


def test_three_axes_are_left_to_numpy() -> None:
    deep = depthwise(2, [2, 2, 2])
    assert PackedSums.of(lag_plan(deep.sources((1, 2, 4, 4, 4)), (4, 4, 4), same=True), (4, 4, 4)) is None

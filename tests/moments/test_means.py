"""Means of what layers read: against the moments of the same inputs, which are proved against explicit rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.linear.im2col import geometry_of
from sbonnx.moments import MeanSums, MomentSums
from sbonnx.spec import Array
from tests.support.linear_ops import layer_of

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any], list[tuple[int, ...]]]] = {
    "conv": ("Conv", (6, 3, 3, 3), {"pads": [1, 1, 1, 1], "strides": [2, 2]}, [(2, 3, 9, 8), (1, 3, 9, 8)]),
    "conv of two sizes": ("Conv", (4, 2, 3, 3), {"dilations": [2, 1]}, [(1, 2, 9, 9), (1, 2, 7, 12), (1, 2, 9, 9)]),
    "depthwise": ("Conv", (5, 1, 3, 3), {"group": 5, "pads": [0, 1, 2, 0]}, [(1, 5, 6, 6)]),
    "1-D, groups": ("Conv", (4, 3, 5), {"group": 2}, [(3, 6, 11)]),
    "3-D": ("Conv", (2, 2, 2, 2, 2), {}, [(1, 2, 4, 4, 4)]),
    "transposed": ("ConvTranspose", (4, 3, 3, 3), {"group": 2, "strides": [2, 2]}, [(1, 4, 5, 5), (2, 4, 5, 5)]),
    "gemm": ("Gemm", (7, 5), {}, [(4, 7)]),
    "gemm, transA": ("Gemm", (7, 5), {"transA": 1, "alpha": 0.5}, [(7, 4)]),
    "matmul": ("MatMul", (7, 5), {}, [(2, 3, 7), (1, 4, 7)]),
    "matmuls": ("MatMul", (2, 7, 5), {}, [(3, 2, 4, 7)]),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("two_streams", [False, True])
def test_means_are_those_of_the_moments(name: str, two_streams: bool) -> None:
    op, shape, attributes, inputs = CASES[name]
    layout = layer_of(op, attributes, shape)
    geometry = geometry_of(layout, attributes)
    means = MeanSums(geometry, two_streams=two_streams)
    moments = MomentSums(geometry, two_streams=two_streams)
    rng = np.random.default_rng(0)
    for sample, one in enumerate(inputs):
        x = rng.standard_normal(one).astype(np.float32) + 1
        other = (x + 0.1 * rng.standard_normal(one)).astype(np.float32) if two_streams else None
        means.add(x, other, sample=sample)
        moments.add(x, other, sample=sample)
    found, wanted = means.means(), moments.moments().means
    assert (found.layout, found.rows) == (wanted.layout, wanted.rows)
    np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(found.mean_quantized, wanted.mean_quantized, rtol=1e-6, atol=1e-7)
    weight, rounded = rng.standard_normal((2, layout.groups, layout.outputs, layout.inputs))
    np.testing.assert_allclose(found.mean_error(weight, rounded), wanted.mean_error(weight, rounded), atol=1e-5)


@pytest.mark.parametrize("other", [None, np.zeros((1, 2, 5, 5), np.float32)])
def test_streams_that_do_not_fit(other: Array | None) -> None:
    means = MeanSums(geometry_of(layer_of("Conv", {}, (4, 2, 3, 3)), {}), two_streams=True)
    with pytest.raises(ValueError, match="do not fit"):
        means.add(np.zeros((1, 2, 6, 6), np.float32), other, sample=0)


def test_no_products_are_kept() -> None:
    """The memory of means is that of one sample's input, not K x K."""
    means = MeanSums(geometry_of(layer_of("Conv", {}, (8, 4096, 1, 1)), {}), two_streams=True)
    x = np.ones((1, 4096, 2, 2), np.float32)
    means.add(x, x, sample=0)
    held = sum(value.nbytes for some in vars(means).values() if isinstance(some, list) for value in some)
    assert held < 2**20

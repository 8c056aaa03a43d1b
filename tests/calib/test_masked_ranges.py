"""Statistics without masks: of raw values and of bins, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.sketches import Sketch
from sbonnx.patterns.blocks.masks import mask_ways
from tests.support.models import model


@pytest.mark.parametrize("size", [500, 40_000])
@pytest.mark.parametrize("track", [False, True])
def test_values_below_the_cut_become_one_value(size: int, track: bool) -> None:
    rng = np.random.default_rng(0)
    scores = rng.uniform(-9, 7, size).astype(np.float32)
    masked = np.where(rng.random(size) < 0.4, scores - np.float32(1e4), scores)
    masked[:3] = -np.inf
    sketch, wanted = Sketch(track=track), Sketch(track=track)
    sketch.observe(masked[None])
    kept = np.append(masked[masked > -100], np.float32(-21))
    wanted.observe(kept[None])
    found = sketch.floored(-1000.0, -21.0)
    assert (found.lo, found.hi, found.finite, found.inf) == (wanted.lo, wanted.hi, wanted.finite, 0)
    ours, theirs = found.distribution(), wanted.distribution()
    np.testing.assert_array_equal(ours.left[ours.counts.astype(bool)], theirs.left.ravel())
    np.testing.assert_array_equal(ours.counts[ours.counts > 0], theirs.counts.ravel())
    assert sketch.inf == 3  # the original is unchanged
    if track:
        np.testing.assert_array_equal(found.track()[0], [-21.0])


def test_ways_end_at_everything_but_sums_products_and_data_movement() -> None:
    text = """agraph (float[2,3] x, float[2,3] m, float[2,3] n) => (float[2,3] y, float[2,3] z) {
        t = Mul (m, two)
        s = Add (x, t)
        r = Reshape (s, shape)
        y = Softmax (r)
        e = Exp (n)
        z = Softmax (e)
        u = Add (x, two)
        w = MatMul (u, k)
    }"""
    graph = graphs.load(model(text, two=np.float32(2), shape=np.array([2, 3]), k=(3, 3)))
    assert mask_ways(graph) == {"e": True, "r": True, "s": False, "t": False, "m": False}

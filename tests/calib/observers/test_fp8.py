"""Observers for fp8, whose steps are not even: errors against brute force, the search against a dense grid."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from sbonnx.calib.observers import OBSERVERS, make_observer, quantization_error
from sbonnx.calib.sketches import Sketch
from sbonnx.errors import RecipeError
from sbonnx.recipe.names import ONLY_INTEGERS
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, params_from_bounds

SPEC = QuantSpec(kind="fp8")
RNG = np.random.default_rng(0)
DATA = {
    "normal": RNG.standard_normal(20000),
    "heavy tails": RNG.standard_t(2, 20000),
    "one sided": np.abs(RNG.standard_normal(20000)) ** 3,
    "few values": RNG.standard_normal(50),
}


def true_error(x: Array, params: QParams) -> float:
    """Mean squared error on the data themselves, by ml_dtypes' cast."""
    codes = np.clip(x / params.scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return float(np.mean((x.astype(np.float64) - codes.astype(np.float64) * params.scale) ** 2))


def sketch_of(x: Array, *, exact: bool) -> Sketch:
    """Of everything, its values kept or counted in bins."""
    if exact:
        return Sketch.of(x.astype(np.float32), None)
    sketch = Sketch(detail="histogram")
    for piece in np.array_split(x.astype(np.float32), 4):
        sketch.observe(np.resize(piece, 40000))
    return sketch


@pytest.mark.parametrize("name", DATA)
def test_the_error_of_single_values_is_exact(name: str) -> None:
    x = DATA[name].astype(np.float32)
    params = params_from_bounds(Bounds(x.min(), x.max()), SPEC)
    found = quantization_error(sketch_of(x, exact=True).distribution(), params)
    np.testing.assert_allclose(found, true_error(x, params), rtol=1e-6)


@pytest.mark.parametrize("name", ["normal", "heavy tails", "one sided"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.01])
def test_the_error_of_bins_is_close(name: str, share: float) -> None:
    x = DATA[name].astype(np.float32)
    params = params_from_bounds(Bounds(x.min() * np.float32(share), x.max() * np.float32(share)), SPEC)
    sketch = sketch_of(x, exact=False)
    seen = np.concatenate([np.resize(piece, 40000) for piece in np.array_split(x, 4)])
    assert not sketch.distribution().exact
    np.testing.assert_allclose(quantization_error(sketch.distribution(), params), true_error(seen, params), rtol=0.05)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("exact", [True, False])
def test_least_error_is_that_of_a_dense_grid(name: str, exact: bool) -> None:
    """Within 5 %, and never worse than the whole range."""
    x = DATA[name].astype(np.float32)
    sketch = sketch_of(x, exact=exact)
    seen = x if exact else np.concatenate([np.resize(piece, 40000) for piece in np.array_split(x, 4)])
    bounds = make_observer("mse").bounds(sketch, SPEC)
    found = float(true_error(seen, params_from_bounds(bounds, SPEC)))
    ends = [Bounds(x.min() * share, x.max() * share) for share in np.geomspace(2.0**-8, 1, 200, dtype=np.float32)]
    errors = [float(true_error(seen, params_from_bounds(end, SPEC))) for end in ends]
    assert found <= errors[-1] * 1.001
    assert found <= min(errors) * (1.05 if exact else 1.1)


@pytest.mark.parametrize("name", OBSERVERS)
def test_each_observer_serves_fp8_or_says_no(name: str) -> None:
    observer = make_observer(name)
    x = DATA["normal"].astype(np.float32).reshape(4, -1)
    sketch = Sketch(detail="histogram", track=True)
    sketch.observe(x)
    assert observer.for_floats == (name not in ONLY_INTEGERS)
    if not observer.for_floats:
        with pytest.raises(RecipeError, match="for integers, whose steps are even, not for fp8"):
            observer.bounds(sketch, SPEC)
        return
    bounds = observer.bounds(sketch, SPEC)
    assert x.min() <= bounds.lo < 0 < bounds.hi <= x.max()


def test_each_channel_has_its_own_range() -> None:
    x = (RNG.standard_normal((3, 4000)) * np.array([1, 10, 1e-3])[:, None]).astype(np.float32)
    for name in ("minmax", "mse", "auto", "percentile"):
        bounds = make_observer(name).bounds(Sketch.of(x, 0), QuantSpec(kind="fp8", axis=0))
        assert bounds.hi.shape == (3,)
        assert (bounds.hi > x.max(axis=1) / 2**9).all() and (bounds.hi <= x.max(axis=1)).all()

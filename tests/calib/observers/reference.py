"""Data to try observers on, and what they approximate, written out in plain numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from hypothesis import strategies as st

from sbonnx.calib.observers import OBSERVERS
from sbonnx.calib.sketches import Distribution, Sketch
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, params_from_bounds

EXACT: Final = 1 << 14
"""Values that a sketch keeps as they are."""

Make = Callable[[np.random.Generator, int], Array]

FAMILIES: Final[dict[str, Make]] = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "relu": lambda rng, n: np.maximum(rng.standard_normal(n), 0),
    "relu6": lambda rng, n: np.clip(3 * rng.standard_normal(n) + 2, 0, 6),
    "gelu": lambda rng, n: (lambda z: z / (1 + np.exp(-1.7 * z)))(2 * rng.standard_normal(n)),
    "heavy tails": lambda rng, n: rng.standard_t(2, n),
    "offset": lambda rng, n: rng.standard_normal(n) - 3,
    "far from zero": lambda rng, n: rng.standard_normal(n) * 0.1 + 10,
    "negative": lambda rng, n: -rng.exponential(size=n),
    "spikes": lambda rng, n: rng.choice(rng.standard_normal(5), n),
    "pixels": lambda rng, n: rng.integers(0, 256, n) / 255,
    "single outlier": lambda rng, n: np.append(rng.standard_normal(n - 1), 100.0),
    "all equal": lambda rng, n: np.full(n, rng.standard_normal()),
    "all zero": lambda rng, n: np.zeros(n),
    "one value": lambda rng, n: np.append(np.zeros(n - 1), -1.0),
}
"""Distributions by name: generator and size to float64 values."""

SPECS: Final = (
    QuantSpec(),
    QuantSpec(bits=4),
    QuantSpec(bits=2),
    QuantSpec(bits=8, narrow=True),
    QuantSpec(signed=False, symmetric=False),
    QuantSpec(bits=4, signed=False, symmetric=False),
    QuantSpec(bits=3, symmetric=False),
    QuantSpec(signed=False),
    QuantSpec(bits=16),
)


@st.composite
def tensors(draw: st.DrawFn, least: int, most: int) -> Array:
    """float32 values of some family, at magnitudes from 1e-30 to 1e30."""
    family = draw(st.sampled_from(list(FAMILIES)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    magnitude = 10.0 ** draw(st.sampled_from([0, 0, 0, -3, 4, -30, 30]))
    return (FAMILIES[family](rng, draw(st.integers(least, most))) * magnitude).astype(np.float32)


small = tensors(1, 3000)
"""Sketches of these are exact."""
large = tensors(EXACT + 1, 3 * EXACT)
"""Sketches of these have bins."""
specs = st.sampled_from(SPECS)


def sketch_of(*arrays: Array, axis: int | None = None, name: str = "mse") -> Sketch:
    """A sketch of what the observer called `name` needs, of these arrays one by one."""
    needs = OBSERVERS[name].needs
    sketch = Sketch(axis=axis, detail="histogram" if needs == "histogram" else "range", track=needs == "track")
    for index, array in enumerate(arrays):
        sketch.observe(array, index)
    return sketch


def dequantized(x: Array, params: QParams) -> Array:
    """float32 `x` (or (C, n), a scale a row) after ONNX QuantizeLinear and DequantizeLinear, by their definition."""
    scale, zero = params.scale, params.zero_point.astype(np.float32)
    if scale.ndim and scale.size > 1:
        scale, zero = scale[:, None], zero[:, None]
    codes = np.clip(np.rint(x / scale) + zero, params.spec.qmin, params.spec.qmax)
    return np.asarray((codes - zero) * scale, np.float64)


def true_error(x: Array, params: QParams) -> Array:
    """Mean squared error on the data themselves, over the last axis."""
    return np.asarray(((x.astype(np.float64) - dequantized(x, params)) ** 2).mean(axis=-1))


def error_of(x: Array, bounds: Bounds, spec: QuantSpec) -> float:
    """The same of a range."""
    return float(true_error(x, params_from_bounds(bounds, spec)))


def rms_width(distribution: Distribution) -> float:
    """Root mean square of the widths of the bins that the values of the one range lie in."""
    width = (distribution.right - distribution.left).astype(np.float64)
    return float(np.sqrt((width**2 * distribution.counts).sum() / distribution.counts.sum()))


def rms(x: Array) -> float:
    """Root mean square."""
    return float(np.sqrt((x.astype(np.float64) ** 2).mean()))

"""Errors of candidate ranges for single values: the compiled loops and numpy give the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sbonnx.calib.observers import make_observer, value_errors
from sbonnx.calib.observers.value_errors import clipping_ends, squared_errors, step_means
from sbonnx.calib.sketches import Distribution, Sketch
from sbonnx.spec import Array, QParams, QuantSpec

pytestmark = pytest.mark.skipif(
    value_errors.native is None, reason="not compiled: no C compiler where it was installed"
)

SIZES = (1, 7, 8, 31, 32, 127, 128, 129, 136, 1000, 4097)


def drawn(columns: int, own: bool) -> tuple[Array, Array]:
    """Return ascending values of five ranges, some of them 0, of one sign or tiny, and their counts."""
    random = np.random.default_rng(columns)
    x = random.standard_t(3, (5, columns)).astype(np.float32)
    x[1], x[2, ::2], x[3] = np.abs(x[1]), 0, -np.abs(x[3]) * np.float32(1e-30)
    return np.sort(x, axis=1), random.integers(0, 9, (5 if own else 1, columns))


def both(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Array]) -> tuple[bytes, bytes]:
    """Return the results of the compiled loop and of numpy."""
    compiled = compute()
    with monkeypatch.context() as patch:
        patch.setattr(value_errors, "native", None)
        return compiled.tobytes(), compute().tobytes()


@pytest.mark.parametrize("own", [False, True], ids=["shared", "own"])
@pytest.mark.parametrize("columns", SIZES)
def test_same_bits(columns: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, counts = drawn(columns, own)
    random = np.random.default_rng(0)
    scale = np.exp(random.uniform(-6, 2, (4, 5)))
    zero = random.integers(0, 15, (4, 5)).astype(np.float64)
    shares = np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), np.float32)
    found = both(monkeypatch, lambda: step_means(x, shares, scale, -zero, 15 - zero))
    assert found[0] == found[1]

    for spec in (QuantSpec(4, False, False, 0), QuantSpec(8, True, True, 0), QuantSpec(16, False, False, 0)):
        params = QParams(scale[0].astype(np.float32), zero[0].astype(spec.dtype), spec)
        found = both(monkeypatch, lambda params=params: squared_errors(x, counts, params))  # type: ignore[misc]
        assert found[0] == found[1]

    distribution = Distribution(x, x, counts, x[:, 0].astype(np.float64), x[:, -1].astype(np.float64), exact=True)
    for budget in (0.0, 0.1, 10.0, 1e9):
        found = both(
            monkeypatch,
            lambda budget=budget: np.stack(clipping_ends(distribution, np.full(5, budget))),  # type: ignore[misc]
        )
        assert found[0] == found[1]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("columns", [32, 300])
def test_same_ranges(columns: int, symmetric: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = drawn(columns, own=False)
    spec = QuantSpec(4, symmetric, symmetric, 0)

    def ranges() -> Array:
        bounds = make_observer("mse", {}).bounds(Sketch.of(x, 0), spec)
        return np.stack([bounds.lo, bounds.hi])

    found = both(monkeypatch, ranges)
    assert found[0] == found[1]


def test_errors_of_values_that_overflow_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([[-3e38, -1.0, 0.0, 1.0, 3e38]], np.float32)
    scale, zero = np.full((1, 1), 2e-38), np.zeros((1, 1))
    shares = np.full((1, 5), 0.2, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        found = both(monkeypatch, lambda: step_means(x, shares, scale, zero - 8, zero + 7))
    assert np.isposinf(np.frombuffer(found[0])).all()
    assert found[0] == found[1]

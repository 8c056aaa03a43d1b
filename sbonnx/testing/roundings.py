"""The contract of roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.rounding import ROUNDERS, Rounded, make_rounder
from sbonnx.spec import Array, QParams, QuantSpec, bounds_of, params_from_bounds

ROWS: Final = 400


@dataclass(frozen=True)
class Case:
    """A kind of layer."""

    op: str
    shape: tuple[int, ...]
    spec: QuantSpec
    attributes: Mapping[str, Any] = field(default_factory=dict)


CASES: Final[dict[str, Case]] = {
    "a convolution, 4 bits": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=4, axis=0)),
    "a convolution, 8 bits": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=8, axis=0, narrow=True)),
    "a convolution, 3 bits with zero points": Case(
        "Conv", (6, 3, 2, 2), QuantSpec(bits=3, axis=0, symmetric=False, signed=False)
    ),
    "a depthwise convolution": Case("Conv", (5, 1, 3, 3), QuantSpec(bits=4, axis=0), {"group": 5}),
    "a matrix product": Case("MatMul", (24, 7), QuantSpec(bits=4, axis=1)),
    "one weight": Case("Gemm", (1, 1), QuantSpec(bits=4)),
}


def check_rounding(name: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Check the rounding with this recipe name.

    The clauses: codes have the weight's shape and the type of the spec, and lie in its range; scales and zero points
    change only if `moves_scales` is set; the squared error of the layer's output is at most that of round-to-nearest;
    the same inputs give the same codes, and the weight is not changed.

    Args:
        name: of an installed or built-in rounding.
        arguments: of the method, such as fewer iterations.

    Raises:
        AssertionError: a clause is broken.
        RecipeError: there is no such rounding.
    """
    rounder = make_rounder(name, arguments or {})
    for label, case in CASES.items():
        where = f"rounding '{name}' of {label}"
        weight, qparams, moments = _layer(case)
        before = weight.copy()
        found = rounder.round(weight, qparams, moments)
        spec = qparams.spec
        assert np.array_equal(weight, before), f"{where}: the weight is not changed"
        assert found.codes.shape == weight.shape, f"{where}: codes have the shape of the weight"
        assert found.codes.dtype == spec.dtype, f"{where}: codes have the type of the spec"
        assert spec.qmin <= found.codes.min() and found.codes.max() <= spec.qmax, f"{where}: codes are in range"
        if not ROUNDERS[name].moves_scales:
            assert found.qparams is qparams, f"{where}: scales change only with moves_scales"
        nearest = Rounded(qparams.quantize(weight), qparams)
        limit = _error(nearest, weight, moments) * (1 + 1e-6) + 1e-12
        assert _error(found, weight, moments) <= limit, f"{where}: the output is at least as close as by nearest"
        again = make_rounder(name, arguments or {}).round(weight, qparams, moments)
        assert np.array_equal(found.codes, again.codes), f"{where}: the same inputs give the same codes"


def _layer(case: Case) -> tuple[Array, QParams, Moments]:
    """Return a random layer: weight, its scales, and second moments of correlated non-negative inputs."""
    rng = np.random.default_rng(0)
    weight = rng.laplace(size=case.shape).astype(np.float32)
    layout = LinearLayer.of_shape(case.op, case.attributes, case.shape)
    assert isinstance(layout, LinearLayer)
    mix = rng.normal(size=(layout.groups, layout.inputs, layout.inputs)) + 2.0 * np.eye(layout.inputs)
    x = np.maximum(rng.normal(size=(layout.groups, ROWS, layout.inputs)) @ mix + 0.3, 0.0)
    a, mean = x.transpose(0, 2, 1) @ x, x.mean(axis=1)
    qparams = params_from_bounds(bounds_of(weight, case.spec.axis), case.spec)
    return weight, qparams, Moments(layout, ROWS, a, a, a, mean, mean)


def _error(rounded: Rounded, weight: Array, moments: Moments) -> float:
    """Return the squared error of the layer's output, summed over rows: tr((W - V) A (W - V)')."""
    matrices = moments.layout.matrices
    kept = rounded.qparams.dequantize(rounded.codes).astype(np.float64)
    error = matrices(weight.astype(np.float64)) - matrices(kept)
    return float(np.einsum("gok,gkl,gol->", error, moments.a, error))

"""The contract of roundings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.rounding import ROUNDERS, Rounded, Rounder, make_rounder
from sbonnx.spec import FP8_BITS, Array, QParams, QuantSpec, bounds_of, params_from_bounds

ROWS: Final = 400


@dataclass(frozen=True)
class Case:
    """A kind of layer; its input rows in the float and in the quantized network differ."""

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
    "a convolution, one scale": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=4)),
    "one weight": Case("Gemm", (1, 1), QuantSpec(bits=4)),
}


def check_rounding(name: str, arguments: Mapping[str, Any] | None = None) -> None:
    """Check the rounding with this recipe name.

    The clauses: codes have the weight's shape and the type of the spec, and lie in its range; scales and zero points
    change only if `moves_scales` is set, and keep their type and shape; the squared error of the layer's output is at
    most that of round-to-nearest; the same inputs give the same codes, and the weight is not changed; channels and
    groups are rounded as well as each alone; weights of 0 stay 0; weights of inputs that are always 0, weights without
    moments and fp8 weights get their nearest codes.

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
        layer = _RoundedLayer.random(case)
        before = layer.weight.copy()
        rounded = layer.rounded(rounder)
        spec = layer.qparams.spec
        assert np.array_equal(layer.weight, before), f"{where}: the weight is not changed"
        assert rounded.codes.shape == before.shape, f"{where}: codes have the shape of the weight"
        assert rounded.codes.dtype == spec.dtype, f"{where}: codes have the type of the spec"
        assert spec.qmin <= rounded.codes.min() and rounded.codes.max() <= spec.qmax, f"{where}: codes are in range"
        scale, given = rounded.qparams.scale, layer.qparams.scale
        assert (scale.dtype, scale.shape) == (given.dtype, given.shape), f"{where}: scales keep their type and shape"
        if not ROUNDERS[name].moves_scales:
            assert rounded.qparams is layer.qparams, f"{where}: scales change only with moves_scales"
        zeros = np.array_equal(rounded.qparams.zero_point, layer.qparams.zero_point)
        assert rounded.qparams.spec == spec and zeros, f"{where}: spec and zero points do not change"
        limit = layer.errors(Rounded(layer.nearest, layer.qparams)).sum() * (1 + 1e-6) + 1e-12
        assert layer.errors(rounded).sum() <= limit, f"{where}: the output is at least as close as by nearest"
        again = layer.rounded(make_rounder(name, arguments or {}))
        assert np.array_equal(rounded.codes, again.codes), f"{where}: the same inputs give the same codes"
    _check_nearest(rounder, name)
    _check_zeros(rounder, name)
    _check_parts(rounder, name)


def _check_nearest(rounder: Rounder, name: str) -> None:
    """Check weights whose codes do not matter, or that cannot be rounded by inputs."""
    layer = _RoundedLayer.random(CASES["a convolution, 4 bits"])
    alone = rounder.round(layer.weight, layer.qparams)
    assert np.array_equal(alone.codes, layer.nearest), f"rounding '{name}': without moments, nearest codes"
    silent = layer.without(slice(None)).rounded(rounder)
    assert np.array_equal(silent.codes, layer.nearest), f"rounding '{name}': inputs are always 0, nearest codes"
    dead = slice(None, None, 3)
    some = layer.without(dead).rounded(rounder)
    codes, wanted = (
        layer.layout.matrices(codes_of)[..., dead] for codes_of in (some.codes, some.qparams.quantize(layer.weight))
    )
    assert np.array_equal(codes, wanted), f"rounding '{name}': some inputs are always 0, nearest codes of their weights"
    layer = _RoundedLayer.random(Case("Conv", (6, 3, 2, 2), QuantSpec(bits=FP8_BITS, axis=0, kind="fp8")))
    rounded = layer.rounded(rounder)
    limit = layer.errors(Rounded(layer.nearest, layer.qparams)).sum() * (1 + 1e-6)
    assert rounded.codes.dtype == layer.qparams.spec.dtype, f"rounding '{name}': codes of fp8"
    assert layer.errors(rounded).sum() <= limit, f"rounding '{name}': fp8, at least as close as by nearest"


def _check_zeros(rounder: Rounder, name: str) -> None:
    for symmetric in (True, False):
        spec = QuantSpec(bits=4, axis=0, symmetric=symmetric)
        layer = _RoundedLayer.random(Case("Gemm", (3, 10), spec, {"transB": 1}), zeros=1)
        rounded = layer.rounded(rounder)
        assert not rounded.qparams.dequantize(rounded.codes)[1].any(), (
            f"rounding '{name}': a channel of zeros stays zero"
        )


def _check_parts(rounder: Rounder, name: str) -> None:
    """Check that a channel, and a group, is rounded as well as alone; products of other sizes have other last bits."""
    spec = QuantSpec(bits=4, axis=0)
    product = _RoundedLayer.random(Case("Gemm", (7, 24), spec, {"transB": 1}))
    channels = [product.part(slice(row, row + 1), 0) for row in range(7)]
    grouped = _RoundedLayer.random(Case("Conv", (6, 4, 3), spec, {"group": 2}))
    groups = [grouped.part(slice(3 * group, 3 * group + 3), group) for group in range(2)]
    for whole, parts in ((product, channels), (grouped, groups)):
        together = whole.errors(whole.rounded(rounder)).ravel()
        alone = np.concatenate([part.errors(part.rounded(rounder)).ravel() for part in parts])
        assert np.allclose(together, alone, rtol=0.1), f"rounding '{name}': each channel is rounded as if alone"


@dataclass(frozen=True)
class _RoundedLayer:
    """A weight, its scales, and the rows that it is multiplied with in both networks, (G, n, K)."""

    case: Case
    weight: Array
    qparams: QParams
    layout: LinearLayer
    x: Array
    quantized: Array

    @staticmethod
    def random(case: Case, zeros: int | None = None) -> _RoundedLayer:
        """Return a layer with correlated non-negative inputs; `zeros`: an output whose weights are 0."""
        rng = np.random.default_rng(0)
        weight = rng.laplace(size=case.shape).astype(np.float32)
        if zeros is not None:
            weight[zeros] = 0.0
        layout = LinearLayer.of_shape(case.op, case.attributes, case.shape)
        assert isinstance(layout, LinearLayer)
        mix = rng.normal(size=(layout.groups, layout.inputs, layout.inputs)) + 2.0 * np.eye(layout.inputs)
        x = np.maximum(rng.normal(size=(layout.groups, ROWS, layout.inputs)) @ mix + 0.3, 0.0)
        return _RoundedLayer(case, weight, _scales(weight, case.spec), layout, x, x + 0.1 * rng.normal(size=x.shape))

    @property
    def nearest(self) -> Array:
        """Codes by rounding to nearest."""
        return self.qparams.quantize(self.weight)

    def rounded(self, rounder: Rounder) -> Rounded:
        """Round the weight by the moments of the rows."""
        return rounder.round(self.weight, self.qparams, Moments.of_rows(self.layout, self.x, self.quantized))

    def errors(self, rounded: Rounded) -> Array:
        """Return the mean squared error of each output over the rows, (G, O)."""
        given = self.layout.matrices(rounded.qparams.dequantize(rounded.codes).astype(np.float64))
        wanted = self.x @ self.layout.matrices(self.weight.astype(np.float64)).swapaxes(1, 2)
        return np.asarray(((wanted - self.quantized @ given.swapaxes(1, 2)) ** 2).mean(axis=1))

    def without(self, inputs: slice) -> _RoundedLayer:
        """Return the layer if some inputs were always 0."""
        keep = np.ones(self.layout.inputs)
        keep[inputs] = 0.0
        return replace(self, x=self.x * keep, quantized=self.quantized * keep)

    def part(self, rows: slice, group: int) -> _RoundedLayer:
        """Return the layer of some outputs of a group."""
        attributes = {key: value for key, value in self.case.attributes.items() if key != "group"}
        weight, own = self.weight[rows], slice(group, group + 1)
        layout = LinearLayer.of_shape(self.case.op, attributes, weight.shape)
        assert isinstance(layout, LinearLayer)
        scales = _scales(weight, self.case.spec)
        return _RoundedLayer(self.case, weight, scales, layout, self.x[own], self.quantized[own])


def _scales(weight: Array, spec: QuantSpec) -> QParams:
    return params_from_bounds(bounds_of(weight, spec.axis), spec)

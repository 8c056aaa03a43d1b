"""Random layers for the tests of roundings: a weight, its scales, and the rows that it is multiplied with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.rounding import Rounded
from sbonnx.rounding.base import Grid
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, bounds_of, pair_bounds, params_from_bounds
from tests.support.linear_ops import layer_of

ROWS = 400


@dataclass(frozen=True)
class Case:
    """A kind of layer; `two` says that the quantized network's rows differ from the float one's."""

    op: str
    shape: tuple[int, ...]
    spec: QuantSpec
    attributes: Mapping[str, Any] = field(default_factory=dict)
    two: bool = False


CHANNELS = QuantSpec(bits=4, axis=0)
CASES: dict[str, Case] = {
    "conv": Case("Conv", (6, 3, 2, 2), CHANNELS),
    "conv, two streams": Case("Conv", (6, 3, 2, 2), CHANNELS, two=True),
    "conv, 2 bits": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=2, axis=0)),
    "conv, 8 bits": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=8, axis=0, narrow=True)),
    "conv, affine": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=4, axis=0, symmetric=False), two=True),
    "conv, affine, unsigned": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=3, axis=0, symmetric=False, signed=False)),
    "conv, one scale": Case("Conv", (6, 3, 2, 2), QuantSpec(bits=4), two=True),
    "conv, groups": Case("Conv", (6, 4, 3), CHANNELS, {"group": 2}, two=True),
    "depthwise": Case("Conv", (5, 1, 3, 3), CHANNELS, {"group": 5}),
    "conv transpose, groups": Case("ConvTranspose", (6, 4, 2, 2), QuantSpec(bits=4, axis=1), {"group": 2}, two=True),
    "gemm": Case("Gemm", (24, 7), QuantSpec(bits=4, axis=1)),
    "gemm, transB": Case("Gemm", (7, 24), CHANNELS, {"transB": 1}, two=True),
    "matmul, a scale an input": Case("MatMul", (12, 6), QuantSpec(bits=4, axis=0)),
    "matmul, blocks": Case("MatMul", (36, 5), QuantSpec(bits=4, axis=0, block_size=16), two=True),
    "matmul, affine blocks": Case("MatMul", (32, 5), QuantSpec(bits=3, axis=0, block_size=16, symmetric=False)),
    "matmul, batches": Case("MatMul", (2, 12, 4), QuantSpec(bits=4)),
    "conv, pairs": Case("Conv", (6, 3, 2, 2), QuantSpec(axis=0, pairs=(2, 3, 1)), two=True),
    "conv, groups, pairs": Case("Conv", (6, 4, 3), QuantSpec(axis=0, pairs=(2, 1)), {"group": 2}),
    "matmul, pairs": Case("MatMul", (11, 6), QuantSpec(axis=1, pairs=(0,))),
    "gemm, one scale, pairs": Case("Gemm", (7, 24), QuantSpec(pairs=(1,)), {"transB": 1}, two=True),
    "one input": Case("Gemm", (1, 4), QuantSpec(bits=3, axis=1), two=True),
    "one weight": Case("Gemm", (1, 1), QuantSpec(bits=4)),
}


@dataclass(frozen=True)
class Layer:
    """One layer: the rows `x` of the float network and `quantized` of the other, float32 (G, n, K)."""

    weight: Array
    qparams: QParams
    layout: LinearLayer
    x: Array
    quantized: Array

    @property
    def moments(self) -> Moments:
        """By their definition, in float64."""
        x, y = self.x.astype(np.float64), self.quantized.astype(np.float64)
        return Moments.of_rows(self.layout, x, x if self.x is self.quantized else y)

    def error(self, rounded: Rounded) -> Array:
        """Mean over the rows of the squared output error, output by output, (G, O): written out."""
        w = self.layout.matrices(self.weight.astype(np.float64))
        v = self.layout.matrices(rounded.qparams.dequantize(rounded.codes).astype(np.float64))
        wanted = np.einsum("gnk,gok->gno", self.x.astype(np.float64), w)
        given = np.einsum("gnk,gok->gno", self.quantized.astype(np.float64), v)
        return np.asarray(((wanted - given) ** 2).mean(axis=1))


def scales(weight: Array, spec: QuantSpec) -> QParams:
    """Scale and zero point over the range of each tensor, channel or block."""
    if spec.block_size is None or spec.axis is None:
        bounds = bounds_of(weight, spec.axis)
        return params_from_bounds(pair_bounds(weight, spec, bounds) if spec.pairs else bounds, spec)
    cuts = np.arange(0, weight.shape[spec.axis], spec.block_size)
    lo = np.minimum.reduceat(weight, cuts, axis=spec.axis)
    hi = np.maximum.reduceat(weight, cuts, axis=spec.axis)
    return params_from_bounds(Bounds(lo, hi), spec)


def rows(generator: np.random.Generator, groups: int, inputs: int, count: int = ROWS) -> Array:
    """Correlated rows after a rectifier, (G, n, K), inputs of different magnitude."""
    mix = generator.normal(size=(groups, inputs, inputs)) + 2.0 * np.eye(inputs)
    loud = np.exp(generator.normal(0.0, 0.7, (groups, 1, inputs)))
    return np.asarray(np.maximum(generator.normal(size=(groups, count, inputs)) @ mix + 0.3, 0.0) * loud, np.float32)


def any_codes(grid: Grid, seed: int) -> Array:
    """Random codes within the limits of each weight."""
    share = np.random.default_rng(seed).random(grid.weight.shape)
    return np.asarray(np.rint(grid.qmin + share * (grid.qmax - grid.qmin)))


def layer(case: Case, seed: int = 0) -> Layer:
    """A random layer of a kind."""
    generator = np.random.default_rng(seed)
    weight = generator.laplace(size=case.shape).astype(np.float32)
    layout = layer_of(case.op, case.attributes, case.shape)
    x = rows(generator, layout.groups, layout.inputs)
    other = x + np.float32(0.1) * generator.normal(size=x.shape).astype(np.float32) if case.two else x
    return Layer(weight, scales(weight, case.spec), layout, x, other)

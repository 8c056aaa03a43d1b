"""GPTQ: against the paper's algorithm written out, brute force over all codes, and its own parts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from sbonnx.errors import NumericError
from sbonnx.moments import Moments
from sbonnx.rounding import Rounded
from sbonnx.rounding import base as native
from sbonnx.rounding.base import Grid
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.search.beam import Planes, search
from sbonnx.rounding.search.factor import Factor, Order, ordered_factor
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, CHANNELS, Case, Layer, layer

PLAIN = Gptq(order="activation", beams=1, steps=0, sweeps=0)
WIDE = Case("Gemm", (5, 90), CHANNELS, {"transB": 1})


def by_the_paper(one: Layer, order: Array, damping: float) -> Array:
    """Algorithm 1 of the paper for one output at a time, without blocks: Cholesky's factor of the inverse."""
    a = one.moments.a[0]
    h = (a + damping * np.diagonal(a).mean() * np.eye(len(a)))[order][:, order]
    upper = np.linalg.cholesky(np.linalg.inv(h)).T
    weight = one.layout.matrices(one.weight.astype(np.float64))[0][:, order].copy()
    scale = one.qparams.scale.astype(np.float64)
    codes = np.empty_like(weight)
    spec = one.qparams.spec
    for k in range(len(a)):
        codes[:, k] = np.clip(np.rint(weight[:, k] / scale), spec.qmin, spec.qmax)
        error = (weight[:, k] - codes[:, k] * scale) / upper[k, k]
        weight[:, k:] -= error[:, None] * upper[k, k:]
    out: Array = np.empty_like(codes)
    out[:, order] = codes
    return out


@pytest.mark.parametrize("block", [1, 7, 64, 128])
@pytest.mark.parametrize("order", ["activation", "none"])
def test_one_beam_is_the_papers_algorithm(order: Order, block: int) -> None:
    one = layer(WIDE)
    square = np.diagonal(one.moments.a[0])
    columns = np.argsort(-square, kind="stable") if order == "activation" else np.arange(90)
    rounder = Gptq(order=order, beams=1, steps=0, sweeps=0, block=block)
    grid = Grid.of(one.weight, one.qparams, one.layout)
    codes, qparams = rounder.solve(grid, one.moments, one.qparams)
    np.testing.assert_array_equal(codes[0], by_the_paper(one, columns, 0.01))
    assert qparams is one.qparams


def best(one: Layer) -> float:
    """The least error of the first output over all codes that there are, by the explicit rows."""
    spec = one.qparams.spec
    codes = np.array(list(itertools.product(range(spec.qmin, spec.qmax + 1), repeat=one.x.shape[2])), np.float64)
    value = codes * float(one.qparams.scale[0])
    wanted = one.x[0].astype(np.float64) @ one.weight.reshape(one.weight.shape[0], -1)[0].astype(np.float64)
    return float(((wanted - value @ one.quantized[0].astype(np.float64).T) ** 2).mean(axis=1).min())


@pytest.mark.parametrize("two", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_as_good_as_all_codes_tried(seed: int, two: bool) -> None:
    """Seven inputs of 2 bits, 16,384 choices: the default finds the best one or all but."""
    one = layer(Case("Gemm", (1, 7), QuantSpec(bits=2, axis=0), {"transB": 1}, two=two), seed)
    found = Gptq().round(one.weight, one.qparams, one.moments)
    assert float(one.error(found).sum()) <= best(one) * 1.01 + 1e-9


def test_all_beams_are_all_codes() -> None:
    """With as many beams as there are roundings up or down, the search is exhaustive over those."""
    one = layer(Case("Gemm", (3, 6), QuantSpec(bits=8, axis=0), {"transB": 1}))
    order, factor = ordered_factor(one.moments.a, 0.0, "none")
    grid = Grid.of(one.weight, one.qparams, one.layout)
    codes, cost = search(Planes.of(grid, Factor.from_matrix(order, factor)), 64, 64)
    error = one.moments.error(grid.weight, grid.values(codes)) * one.moments.rows
    np.testing.assert_allclose(cost, error, rtol=1e-4)
    fewer = [search(Planes.of(grid, Factor.from_matrix(order, factor)), beams, 64)[1] for beams in (32, 4, 1)]
    assert all((cost <= other * (1 + 1e-6)).all() for other in fewer)


def test_the_cost_of_the_search_is_the_error() -> None:
    """In blocks, with beams, groups and shifted inputs: up to what no codes can mend, known in closed form."""
    one = layer(CASES["conv, groups"])
    moments = one.moments
    grid = Grid.of(one.weight, one.qparams, one.layout)
    order, factor = ordered_factor(moments.a, 0.0, "pivot")
    codes, cost = search(Planes.of(grid, Factor.from_matrix(order, factor), moments.pull(grid.weight)), 4, 2)
    codes = np.take_along_axis(codes, np.argsort(order, axis=1)[:, None], axis=2)
    ideal = grid.weight @ moments.b @ np.linalg.inv(moments.a)
    floor = moments.error(grid.weight, ideal) * moments.rows
    error = moments.error(grid.weight, grid.values(codes)) * moments.rows
    np.testing.assert_allclose(cost + floor, error, rtol=1e-3)


def share(one: Layer, rounder: Gptq) -> float:
    """The error as a share of that of the nearest codes, by the explicit rows."""
    nearest = Rounded(one.qparams.quantize(one.weight), one.qparams)
    return float(one.error(rounder.round(one.weight, one.qparams, one.moments)).sum() / one.error(nearest).sum())


def test_each_part_gains() -> None:
    """Over many layers: descent, beams and tabu search each lessen the error."""
    layers = [layer(Case("Gemm", (8, 250), CHANNELS, {"transB": 1}, two=bool(seed % 2)), seed) for seed in range(4)]
    steps = [
        PLAIN,
        Gptq(order="activation", beams=1, steps=0),
        Gptq(steps=0),
        Gptq(),
    ]
    shares = [float(np.mean([share(one, rounder) for one in layers])) for rounder in steps]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] < 0.9 * shares[0]


def test_shifted_inputs_are_made_up_for() -> None:
    """Quantized inputs that are 0.8 of the float ones: weights become 1.25 of what they were, where there is range."""
    one = layer(Case("Gemm", (4, 20), QuantSpec(bits=8, axis=0), {"transB": 1}))
    one = replace(one, quantized=0.8 * one.x, qparams=replace(one.qparams, scale=1.5 * one.qparams.scale))
    assert share(one, Gptq()) < 0.01
    blind = Gptq().round(one.weight, one.qparams, replace(one, quantized=one.x).moments)
    seeing = Gptq().round(one.weight, one.qparams, one.moments)
    assert one.error(seeing).sum() < 0.01 * one.error(blind).sum()
    np.testing.assert_allclose(one.qparams.dequantize(seeing.codes), 1.25 * one.weight, atol=0.3)


def test_fewer_rows_than_inputs() -> None:
    """A singular matrix of moments, without damping: the damping grows until there is a factor."""
    one = layer(WIDE)
    one = replace(one, x=one.x[:, :10], quantized=one.x[:, :10])
    assert share(one, Gptq(damping=0.0)) < 0.1


def test_parts_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs or groups are rounded a part at a time where there are many: the same codes."""
    for case in ("conv", "depthwise", "conv, groups"):
        one = layer(CASES[case])
        whole = Gptq(steps=0).round(one.weight, one.qparams, one.moments)
        with monkeypatch.context() as patch:
            patch.setattr("sbonnx.rounding.gptq.AT_ONCE", 1)
            parts = Gptq(steps=0).round(one.weight, one.qparams, one.moments)
        np.testing.assert_array_equal(whole.codes, parts.codes)


@pytest.mark.sampled
@pytest.mark.skipif(native.loops is None, reason="not compiled: no C compiler where it was installed")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("beams", [1, 3, 8])
def test_compiled_as_in_numpy(case: str, beams: int) -> None:
    """Bit for bit, codes and costs; with threads too."""
    one = layer(CASES[case])
    grid = Grid.of(one.weight, one.qparams, one.layout)
    order, factor = ordered_factor(one.moments.a, 0.01, "pivot")
    planes = Planes.of(grid, Factor.from_matrix(order, factor), one.moments.pull(grid.weight))
    found = search(planes, beams, 5)
    for name, value in (("loops", None), ("WORTH", 0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, name, value)
            for ours, theirs in zip(found, search(planes, beams, 5), strict=True):
                np.testing.assert_array_equal(ours, theirs)


def test_what_cannot_be() -> None:
    one = layer(CASES["conv"])
    moments: Moments = replace(one.moments, cross=np.full_like(one.moments.a, np.nan))
    with pytest.raises(NumericError, match="NaN"):
        Gptq().round(one.weight, one.qparams, moments)
    with pytest.raises(ValueError, match="beams"):
        Gptq(beams=0)


def test_few_rows_of_wide_layers_have_no_tabu_search() -> None:
    """It fits the noise of fewer rows than inputs. The error is computed from the gradient of the descent."""
    one = layer(Case("Gemm", (3, 1040), CHANNELS, {"transB": 1}))
    x, quantized = (rows[:, :100].astype(np.float32) for rows in (one.x, one.quantized))
    few = Moments.of_rows(one.layout, x, quantized, of_errors=True).shrunk(0.5)
    results = [
        gptq.round(one.weight, one.qparams, moments)
        for gptq, moments in ((Gptq(), few), (Gptq(steps=0), few), (Gptq(), replace(few, observed=1040)))
    ]
    np.testing.assert_array_equal(results[0].codes, results[1].codes)
    values = (one.layout.matrices(each) for each in (one.weight, one.qparams.dequantize(results[0].codes)))
    losses = [result.loss or 0.0 for result in results]
    assert losses[0] == pytest.approx(few.error(*values).sum(), rel=1e-4)
    assert 0 < losses[2] < 0.9999 * losses[0]

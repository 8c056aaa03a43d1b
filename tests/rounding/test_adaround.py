"""AdaRound by moments: between two codes, near the best of all choices, and the steps of its formula in torch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.errors import NumericError
from sbonnx.rounding.adaround import AdaRound
from sbonnx.rounding.base import Grid
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, Case, Layer, layer

STARTS = ("gptq", "nearest")


def grid_of(one: Layer) -> Grid:
    return Grid.of(one.weight, one.qparams, one.layout)


def beside(one: Layer) -> tuple[Array, Array]:
    """The lower and the upper code beside each weight, as it lies in the file."""
    grid = grid_of(one)
    low = one.layout.from_matrices(np.clip(np.floor(grid.ratio()), grid.qmin, grid.qmax - 1))
    return low, low + 1


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), case=st.sampled_from(sorted(CASES)))
def test_codes_are_the_two_beside_the_weight(seed: int, case: str) -> None:
    one = layer(CASES[case], seed)
    found = AdaRound(iterations=60, start="nearest").round(one.weight, one.qparams, one.moments)
    low, high = beside(one)
    assert ((found.codes == low) | (found.codes == high)).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**16), case=st.sampled_from(sorted(CASES)))
def test_started_from_gptq_codes_are_beside_its_own(seed: int, case: str) -> None:
    """At most one code away, and never with a larger error, output by output."""
    one = layer(CASES[case], seed)
    first = Gptq().round(one.weight, one.qparams, one.moments)
    found = AdaRound(iterations=60).round(one.weight, one.qparams, one.moments)
    away = np.abs(found.codes.astype(int) - first.codes.astype(int))
    nearest = found.codes == one.qparams.quantize(one.weight)
    assert ((away <= 1) | nearest).all()
    before, after = one.error(first), one.error(found)
    assert (after <= before * (1 + 1e-5) + 1e-9).all()


@pytest.mark.parametrize("bits", [2, 4])
def test_near_the_best_of_all_choices(bits: int) -> None:
    """Of the 2^8 ways to round eight weights up or down."""
    got, best, plain = [], [], []
    for seed in range(12):
        one = layer(Case("Gemm", (1, 8), QuantSpec(bits=bits, axis=0), {"transB": 1}), seed)
        moments, grid = one.moments, grid_of(one)
        low = beside(one)[0]
        ways = np.array(list(itertools.product((0, 1), repeat=8)))[:, None]
        errors = [moments.error(grid.weight, grid.values(low[None] + way)).item() for way in ways]
        found = AdaRound(start="nearest").round(one.weight, one.qparams, moments)
        assert found.loss is not None and found.nearest is not None
        got.append(found.loss)
        best.append(min(errors))
        plain.append(found.nearest)
    assert min(np.array(got) / np.array(best)) >= 1 - 1e-6
    assert np.median(np.array(got) / np.array(best)) < 1.03
    assert np.mean(np.array(got) / np.array(best)) < 1.15 < np.mean(np.array(plain) / np.array(best))


def in_torch(one: Layer, steps: int, ours: AdaRound) -> Array:
    """Codes (G, O, K) after so many steps of the formula on the explicit rows, by torch's autograd and Adam."""
    torch: Any = pytest.importorskip("torch")
    grid, spec = grid_of(one), one.qparams.spec
    low = np.clip(np.floor(grid.ratio()), spec.qmin, spec.qmax - 1)
    share = np.clip(grid.ratio() - low, 0.01, 0.99)
    u = torch.tensor(-np.log(1.2 / (share + 0.1) - 1.0), requires_grad=True)
    x, quantized = torch.tensor(one.x, dtype=torch.float64), torch.tensor(one.quantized, dtype=torch.float64)
    base, scale = torch.tensor(low - grid.zero), torch.tensor(grid.scale.copy())
    wanted = torch.einsum("gnk,gok->gno", x, torch.tensor(grid.weight))
    curve = scale**2 * (quantized**2).sum(dim=1)[:, None, :]
    optimizer = torch.optim.Adam([u], lr=ours.lr)
    for step in range(steps):
        h = torch.clamp(1.2 * torch.sigmoid(u) - 0.1, 0.0, 1.0)
        loss = ((wanted - torch.einsum("gnk,gok->gno", quantized, (base + h) * scale)) ** 2).sum()
        beta = ours.beta(step)
        if beta is not None:
            loss = loss + ours.weight * (curve * (1.0 - (2.0 * h - 1.0).abs() ** beta)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return np.asarray(low + (u.detach().numpy() >= 0))


@pytest.mark.parametrize("case", ["conv", "conv, groups", "conv, affine", "matmul, blocks"])
def test_the_formula_in_torch_takes_the_same_steps(case: str) -> None:
    """The gradient by moments is that of the explicit rows; the pull is what the docstring says."""
    one = layer(CASES[case], seed=3)
    ours = AdaRound(iterations=60, lr=0.03, start="nearest", sweeps=0)
    codes = ours.solve(grid_of(one), one.moments, one.qparams)[0]
    assert (codes == in_torch(one, 60, ours)).mean() > 0.98
    assert (codes != np.rint(grid_of(one).ratio())).mean() > 0.03


def test_the_exponent_falls_after_the_warmup() -> None:
    for schedule in ("linear", "cosine"):
        ada = AdaRound(iterations=100, warmup=0.2, beta_start=20, beta_end=2, schedule=schedule)
        assert ada.beta(0) is None and ada.beta(19) is None
        betas = [ada.beta(step) for step in range(20, 100)]
        assert betas[0] == pytest.approx(20)
        assert all(one is not None and other is not None and one > other for one, other in itertools.pairwise(betas))
        assert betas[40] == pytest.approx(11)
    assert ada.beta(40) == pytest.approx(2 + 9 * (1 + math.cos(math.pi / 4)))


@pytest.mark.parametrize("start", STARTS)
def test_inputs_that_are_not_finite(start: Any) -> None:
    one = layer(CASES["conv"])
    one.x[0, 0, 0] = np.nan
    with pytest.raises(NumericError, match="NaN or infinite"):
        AdaRound(iterations=5, start=start).round(one.weight, one.qparams, one.moments)


@pytest.mark.parametrize("wrong", [{"iterations": 0}, {"warmup": 1.0}, {"sweeps": -1}])
def test_arguments_out_of_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaRound(**wrong)

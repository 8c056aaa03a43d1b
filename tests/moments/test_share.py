"""What is compensated of the input error is what lowers the error of typical held-out rows."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest

from sbonnx.moments import HeldRows, Moments, MomentSums, compensation_of, share, shift_gains
from sbonnx.moments.share import Compensation
from sbonnx.spec import Array
from tests.support.linear_ops import FIXED, Linear

GEMM = Linear("Gemm", (40, 8), (8, 4))
CONV = Linear("Conv", (1, 8, 5, 8), (4, 8, 1, 1))
Pair = tuple[Array, Array]
RNG = np.random.default_rng(3)
DRIFT = (np.eye(8) + 0.1 * RNG.standard_normal((8, 8))).astype(np.float32)


def drifted(count: int, noise: float = 0.0, rows: int = 40) -> list[Pair]:
    """Samples whose quantized input is a linear map of the float one, which a weight can undo, plus noise."""
    x = RNG.standard_normal((count, rows, 8)).astype(np.float32)
    return [(one, one @ DRIFT + noise * RNG.standard_normal(one.shape).astype(np.float32)) for one in x]


def moments(samples: list[Pair]) -> Moments:
    sums = MomentSums(GEMM.geometry, two_streams=True)
    for number, (x, quantized) in enumerate(samples):
        sums.add(x, quantized, sample=number)
    return sums.moments()


def held(samples: list[Pair]) -> list[Pair]:
    rows = HeldRows(GEMM.geometry, samples=len(samples))
    for number, (x, quantized) in enumerate(samples):
        rows.add(x, quantized, sample=number)
    return rows.pairs()


def chosen(fit: list[Pair], other: list[Pair]) -> float:
    weight = np.random.default_rng(0).standard_normal((1, 4, 8)).astype(np.float32)
    return compensation_of(weight, moments(fit), held(other), bias=False).share


def test_what_holds_is_compensated_and_chance_is_not() -> None:
    assert chosen(drifted(40), drifted(10)) > 0.9
    few = [(x, x + 0.3 * RNG.standard_normal(x.shape).astype(np.float32)) for x, _ in drifted(2, rows=6)]
    many = [(x, x + 0.3 * RNG.standard_normal(x.shape).astype(np.float32)) for x, _ in drifted(20)]
    assert chosen(few, many) < 0.4


def test_some_outputs_of_a_wide_layer_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four, with the share that all have."""
    fit, other = drifted(40), drifted(10)
    usual = chosen(fit, other)
    monkeypatch.setattr(share, "WIDE", 4)
    monkeypatch.setattr(share, "FEW_OUTPUTS", 2)
    rows = Mock(wraps=share._best)
    monkeypatch.setattr(share, "_best", rows)
    assert abs(chosen(fit, other) - usual) <= 0.1
    assert rows.call_args.args[0].shape == (1, 2, 8)


def test_one_loud_sample_does_not_decide() -> None:
    """The drift of one sample is not that of the others, and its error is larger than theirs together."""
    loud = [(30 * x, 30 * x @ DRIFT) for x, _ in drifted(1)]
    exact = [(x, x + 0.01 * RNG.standard_normal(x.shape).astype(np.float32)) for x, _ in drifted(19)]
    assert chosen([*exact, *loud], [*exact, *loud]) == 0.0
    assert chosen(loud, loud) == 1.0


def test_a_mean_error_that_the_bias_takes_is_not_compensated_twice() -> None:
    samples = [(x, x + 3.0) for x, _ in drifted(20)]
    weight = np.ones((1, 4, 8), np.float32)
    assert compensation_of(weight, moments(samples), held(samples), bias=True) == Compensation(0.0, centred=True)
    assert compensation_of(weight, moments(samples), held(samples), bias=False).share > 0.5


def test_a_few_loud_rows_do_not_shift_the_others() -> None:
    """One row of each sample, such as a token whose outliers are clipped, has an error of its own."""
    samples = [(x, x.copy()) for x, _ in drifted(20)]
    weight = np.ones((1, 4, 8), np.float32)
    for _, quantized in samples:
        quantized[0] += 30.0
        quantized[1:] += 0.01 * RNG.standard_normal(quantized[1:].shape)
    found = moments(samples)
    assert not compensation_of(weight, found, held(samples), bias=True).centred
    shift = found.means.mean_error(weight, weight)
    assert not shift_gains(weight, weight, shift, held(samples))
    common = [(x, x + 0.5) for x, _ in samples]
    assert shift_gains(weight, weight, moments(common).means.mean_error(weight, weight), held(common))


@pytest.mark.parametrize("case", [GEMM, CONV], ids=lambda case: case.op)
def test_means_over_positions_count_for_convolutions(case: Linear) -> None:
    """A few loud rows of each sample shift its mean: the bias takes the mean only where positions are averaged."""
    sums, weight = MomentSums(case.geometry, two_streams=True), np.ones((1, 4, 8), np.float32)
    kept = HeldRows(case.geometry, samples=20)
    for number in range(20):
        x = RNG.standard_normal((40, 8)).astype(np.float32)
        noise = 0.2 * RNG.standard_normal(x.shape)
        noise[:4] += 1.0
        rows = [(one if case is GEMM else one.T.reshape(1, 8, 5, 8)) for one in (x, (x + noise).astype(np.float32))]
        sums.add(rows[0], rows[1], sample=number)
        kept.add(rows[0], rows[1], sample=number)
    found, pairs = sums.moments(), kept.pairs()
    assert compensation_of(weight, found, pairs, bias=True).centred == (case is CONV)
    shift = found.means.mean_error(weight, weight)
    assert not shift_gains(weight, weight, shift, pairs) and shift_gains(weight, weight, shift, pairs, pooled=True)


def test_where_nothing_can_be_said_nothing_is_compensated() -> None:
    samples = drifted(4)
    weight = np.ones((1, 4, 8), np.float32)
    same = [(x, x) for x, _ in samples]
    broken = [(np.full_like(x, np.nan), x) for x, _ in samples]
    for fit, other in ((samples, []), (same, same), (samples, broken)):
        for bias in (True, False):
            found = compensation_of(weight, moments(fit), held(other), bias=bias)
            assert found == Compensation(0.0, centred=bias)


@pytest.mark.parametrize("name", FIXED)
def test_kept_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows are kept in both networks, within the memory limit and sorted by sample number."""
    case = FIXED[name]
    width = 8 * case.layout.groups * case.layout.inputs
    monkeypatch.setattr(share, "HELD_BYTES", 3 * 4 * width)
    rows, inputs = HeldRows(case.geometry, samples=3, seed=1), [case.input(number) for number in range(3)]
    for number in (2, 0, 1):
        rows.add(inputs[number], inputs[number] + 1, sample=number)
    found = rows.pairs()
    assert len(found) == 3
    for x, (one, other) in zip(inputs, found, strict=True):
        every = case.geometry.rows(x)
        assert one.shape == other.shape == (case.layout.groups, min(4, every.shape[1]), case.layout.inputs)
        assert all((every[:, :, None] == one[:, None]).all(axis=(0, 3)).any(axis=0))
        assert np.isin(np.round(other - one, 5), (0.0, case.layout.alpha)).all()  # 0 in the padding

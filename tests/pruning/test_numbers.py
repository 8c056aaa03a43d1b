"""Criteria, refit, allocation: against solutions by other means."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import Moments
from sbonnx.options import RunOptions
from sbonnx.pruning.budgets.allocate import CountLimits, allocate
from sbonnx.pruning.criteria import CRITERIA, DAMPING, DimensionData, ReaderMoments, obs
from sbonnx.pruning.curves import SensitivityCurve
from sbonnx.pruning.fit_layers import MomentPair
from sbonnx.pruning.float_pass import OutputErrors
from sbonnx.pruning.ridge import STRENGTHS, TOLERANCE, KeptColumns, refit
from sbonnx.pruning.skips import SkipProducts
from sbonnx.spec import Array
from tests.support.models import model

RNG = np.random.default_rng(3)
LAYOUT = LinearLayer.of_shape("MatMul", {}, (12, 5))


def inputs(rows: int, columns: int = 12) -> Array:
    """Correlated input rows with a mean."""
    mix = np.random.default_rng(1).standard_normal((columns, columns))
    return RNG.standard_normal((rows, columns)) @ mix + RNG.standard_normal(columns)


def moments(x: Array, pruned: Array) -> Moments:
    """Sums over the rows of both networks, one matrix."""
    assert isinstance(LAYOUT, LinearLayer)
    one = pruned[None]
    return Moments.of_rows(LAYOUT, one if x is pruned else x[None], one)


def reader(rows: int = 400, size: int = 6) -> ReaderMoments:
    """A reader with two columns for each of `size` groups."""
    x = inputs(rows, 2 * size)
    weight = RNG.standard_normal((1, 5, 2 * size))
    return ReaderMoments(weight, (x.T @ x / rows)[None], np.arange(2 * size).reshape(size, 1, 2))


def left_error(one: ReaderMoments, gone: list[int]) -> float:
    """Error of the outputs after the best refit without these groups, with the damping of the criterion."""
    h = one.a[0] + DAMPING * np.diag(one.a[0]).mean() * np.eye(one.a.shape[1])
    out = one.columns[gone].reshape(-1)
    kept = np.setdiff1d(np.arange(h.shape[0]), out)
    schur = h[np.ix_(out, out)] - h[np.ix_(out, kept)] @ np.linalg.solve(h[np.ix_(kept, kept)], h[np.ix_(kept, out)])
    return float(np.trace(one.weight[0][:, out] @ schur @ one.weight[0][:, out].T))


def test_obs_takes_the_group_of_least_error_after_refit_each_time() -> None:
    one = reader()
    order = obs(DimensionData(6, (), (one,))).tolist()
    gone: list[int] = []
    for group in order[:-1]:
        costs = {each: left_error(one, [*gone, each]) for each in range(6) if each not in gone}
        assert group == min(costs, key=lambda each: costs[each])
        gone.append(group)


@pytest.mark.parametrize("name", sorted(CRITERIA))
def test_every_criterion_orders_all_groups_and_repeats_itself(name: str) -> None:
    data = DimensionData(150, (RNG.standard_normal((150, 4)),), (reader(size=150),), seed=4)
    found = [CRITERIA[name](data).tolist() for _ in range(2)]
    assert found[0] == found[1]
    assert sorted(found[0]) == list(range(150))
    without = DimensionData(8, (RNG.standard_normal((8, 4)),))
    assert sorted(CRITERIA[name](without).tolist()) == list(range(8))


def test_criteria_with_data_are_better_than_random() -> None:
    def mean_error(name: str) -> float:
        errors = []
        for seed in range(20):
            one = readers[seed]
            data = DimensionData(6, (one.weight[0].T.reshape(6, -1),), (one,), seed=seed)
            errors.append(left_error(one, CRITERIA[name](data)[:3].tolist()) / one.energy)
        return float(np.mean(errors))

    readers = [reader() for _ in range(20)]
    assert mean_error("obs") < mean_error("output") < mean_error("random")


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("skips", [True, False])
def test_refit_is_ridge_regression_on_the_rows(centred: bool, skips: bool) -> None:
    x = inputs(300)
    pruned = x + 0.3 * inputs(300)
    weight = RNG.standard_normal((1, 5, 12))
    d = 0.5 * inputs(300, 5) if skips else np.zeros((300, 5))
    kept = np.ones((1, 12), bool)
    kept[0, [1, 4, 5]] = False
    strength = 0.05
    target, features = x @ weight[0].T + d, pruned[:, kept[0]]
    shift = (target.mean(axis=0), features.mean(axis=0)) if centred else (0.0, 0.0)
    y, f = target - shift[0], features - shift[1]
    damping = strength * np.diag(f.T @ f / 300).mean()
    root = np.sqrt(300 * damping)
    rows = np.concatenate([f, root * np.eye(9)])
    wanted = np.concatenate([y, root * weight[0][:, kept[0]].T])
    expected = np.linalg.lstsq(rows, wanted, rcond=None)[0].T

    fit = moments(x, pruned)
    empty = replace(fit, rows=0, a=fit.a * 0, cross=None, square=None, mean=fit.mean * 0, mean_quantized=fit.mean * 0)
    products = SkipProducts(300, d.T @ x / 300, d.T @ pruned / 300, (d**2).mean(axis=0), d.mean(axis=0))
    found = refit(
        weight,
        MomentPair(fit, empty, 1.0),
        KeptColumns(kept),
        centred=centred,
        strength=strength,
        skip=(products, products) if skips else None,
    )
    np.testing.assert_allclose(found.weight[0][:, kept[0]], expected, rtol=1e-8, atol=1e-10)
    assert not found.weight[0][:, ~kept[0]].any()
    residual = target - pruned @ found.weight[0].T
    if centred:
        np.testing.assert_allclose(found.shift, residual.mean(axis=0) - 0, rtol=1e-8, atol=1e-10)
        residual = residual - found.shift
    spread = x @ weight[0].T
    energy = ((spread - (spread.mean(axis=0) if centred else 0)) ** 2).sum()
    np.testing.assert_allclose(found.after, (residual**2).sum() / energy, rtol=1e-8)
    assert found.after < found.before


def test_strength_and_refit_are_chosen_on_held_out_rows() -> None:
    """Fitted to fewer rows than columns: the least strength ruins the held-out rows, and is not taken."""
    x, other = inputs(8), inputs(2000)
    weight, kept = RNG.standard_normal((1, 5, 12)), np.ones((1, 12), bool)
    empty = replace(moments(x, x), rows=0)
    kept[0, :3] = False
    found = refit(weight, MomentPair(moments(x, x), moments(other, other), 1.0), KeptColumns(kept), centred=False)
    assert found.after <= found.before
    assert found.strength > 1e-3
    # with the strength chosen, all rows are used
    every = np.concatenate([x, other])
    whole = MomentPair(moments(every, every), empty, 1.0)
    again = refit(weight, whole, KeptColumns(kept), centred=False, strength=found.strength)
    np.testing.assert_allclose(found.weight, again.weight, rtol=1e-8, atol=1e-10)


def test_hold_out_rows_that_judge_the_network_only_choose_the_strength() -> None:
    weight, kept = RNG.standard_normal((1, 5, 12)), np.ones((1, 12), bool)
    kept[0, :3] = False
    x, others = inputs(200), [inputs(50), inputs(50)]
    pairs = [MomentPair(moments(x, x), moments(other, other), 4.0) for other in others]
    found = [refit(weight, pair, KeptColumns(kept), centred=True, strength=0.1, use_held=False) for pair in pairs]
    np.testing.assert_array_equal(found[0].weight, found[1].weight)
    np.testing.assert_array_equal(found[0].shift, found[1].shift)
    final = [refit(weight, pair, KeptColumns(kept), centred=True, strength=0.1) for pair in pairs]
    assert np.abs(final[0].weight - final[1].weight).max() > 1e-6


def test_a_weak_ridge_is_preferred_where_samples_have_several_rows() -> None:
    """With strengths of nearly equal hold-out error: the least with many rows a sample, the best with one."""
    generator, mix = np.random.default_rng(0), np.random.default_rng(1).standard_normal((12, 12))
    x, other = (generator.standard_normal((rows, 12)) @ mix for rows in (25, 2000))
    noisy, held = (rows + 0.3 * generator.standard_normal(rows.shape) for rows in (x, other))
    weight, kept = generator.standard_normal((1, 5, 12)), np.ones((1, 12), bool)
    kept[0, :6] = False
    fit, judge = moments(x, noisy), moments(other, held)
    empty = replace(fit, rows=0)

    def held_error(strength: float) -> float:
        found = refit(weight, MomentPair(fit, empty, 1.0), KeptColumns(kept), centred=True, strength=strength)
        off = (other - x.mean(axis=0)) @ weight[0].T - (held - noisy.mean(axis=0)) @ found.weight[0].T
        return float(np.square(off).sum())

    errors = {strength: held_error(strength) for strength in STRENGTHS}
    near = [strength for strength, error in errors.items() if error <= (1 + TOLERANCE) * min(errors.values())]
    one, many = (refit(weight, MomentPair(fit, judge, rows), KeptColumns(kept), centred=True) for rows in (1.0, 9.0))
    assert one.strength == min(errors, key=lambda strength: errors[strength])
    assert many.strength == min(near) < one.strength


@pytest.mark.parametrize(("classes", "centred"), [(10, True), (4, False)])
def test_an_error_that_all_scores_have_in_common_does_not_count(classes: int, centred: bool) -> None:
    text = f"agraph (float[N,6] x) => (float[N,{classes}] y) {{ y = Gemm <transB = 1> (x, w, b) }}"
    bias, options = np.arange(classes, dtype=np.float32), RunOptions(threads=1)
    plain, moved = (
        graphs.load(model(text, w=(classes, 6), b=bias + shift)) for shift in (np.float32(0), np.float32(3))
    )
    feeds = [{"x": inputs(1, 6).astype(np.float32)} for _ in range(20)]
    with Samples.of(feeds, plain, options).canonical() as samples:
        judge = OutputErrors.of(plain, samples)
    other = graphs.load(model(text, seed=1, w=(classes, 6), b=bias))
    assert judge.error(plain) == 0
    assert judge.error(other) > 0.1
    assert (judge.error(moved) < 1e-10) == centred


def test_errors_of_scores_leave_masked_classes_out() -> None:
    """A class that is -inf in every sample changes no error."""
    text = "g (float[N,6] x) => (float[N,12] y) { h = MatMul(x, w) y = Add(h, m) }"
    feeds = [{"x": inputs(1, 6).astype(np.float32)} for _ in range(20)]
    errors = []
    for lowest in (0.0, -np.inf):
        mask = np.array([lowest, *[0.0] * 11], np.float32)
        plain, other = (graphs.load(model(text, seed=seed, w=(6, 12), m=mask)) for seed in (0, 1))
        with Samples.of(feeds, plain, RunOptions(threads=1)).canonical() as samples:
            errors.append(OutputErrors.of(plain, samples).error(other))
    assert errors[0] > 0.1
    assert errors[1] == pytest.approx(errors[0], rel=0.3)


def test_allocation_reaches_the_budget_by_the_cheapest_steps() -> None:
    curves = [SensitivityCurve((0, 4), (0.0, 0.4)), SensitivityCurve((0, 4), (0.0, 0.04))]

    free = CountLimits((1, 1), (7, 7), 0.1)
    assert allocate(curves, [8, 8], free, Sum(), 100.0).tolist() == [0, 6]
    assert allocate(curves, [8, 8], CountLimits((4, 4), (7, 7), 0.1), Sum(), 100.0).tolist() == [4, 4]
    assert allocate(curves, [8, 8], free, Sum(), 10.0).tolist() == [7, 7]
    assert allocate(curves, [8, 8], free, Sum(), 100.0, np.array([5, 0])).tolist() == [5, 1]
    assert free.counts(0, 8) == list(range(8))
    assert CountLimits((8,), (23,), 0.5).counts(0, 24) == [0, 8]
    assert CountLimits((1,), (3,)).counts(0, 8) == [0, 1, 2, 3]


class Sum:
    """Ten for each group that remains, of two dimensions of eight."""

    def __call__(self, removed: Array) -> float:
        return 160.0 - 10 * float(removed.sum())

    def change(self, removed: Array, place: int, counts: Array) -> Array:
        return np.asarray(10.0 * (counts - removed[place]))


def test_curves_rise_beyond_the_last_number() -> None:
    curve = SensitivityCurve((0, 4, 8), (0.0, 0.1, 0.3))
    assert [curve.at(count) for count in (2, 6, 10)] == pytest.approx([0.05, 0.2, 0.4])

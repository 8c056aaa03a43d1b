"""What moments say of the output error is what onnxruntime's outputs say, however the moments were summed."""

from __future__ import annotations

import tracemalloc
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sbonnx.moments import Moments, MomentSums, bytes_for, products, sample_weights
from sbonnx.moments.products import Arrays, torch_arrays
from sbonnx.spec import Array
from tests.support.linear_ops import FIXED, Linear, linear_ops

WAYS = {"as it likes": None, "by lags": True, "by rows": False}


def sums_of(case: Linear, way: str = "as it likes", **more: object) -> MomentSums:
    """Sums that take this way wherever there is one."""
    sums = MomentSums(case.geometry, **{"two_streams": True, **more})  # type: ignore[arg-type]
    if (lags := WAYS[way]) is not None and (case.geometry.kernel or not lags):
        sums._by_lags = lambda geometry, shape, rows: lags  # type: ignore[method-assign]
    return sums


def inputs_of(case: Linear, seed: int) -> tuple[Array, Array]:
    """A sample as float and as quantized input."""
    x = case.input(seed)
    return (x, x + 0.2 * case.input(seed + 1000))


def close(one: Moments, other: Moments, rtol: float = 1e-5) -> None:
    """Equal but for float32 products; `rtol` of the largest entry, for means of the largest root mean square."""
    assert one.rows == other.rows
    loudest = np.sqrt(max(np.abs(other.a).max(), np.abs(other.c).max()) / max(other.rows, 1))
    for name in ("a", "b", "c", "mean", "mean_quantized"):
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == np.float64
        largest = loudest if name.startswith("mean") else np.abs(right).max()
        np.testing.assert_allclose(left, right, rtol=0, atol=rtol * max(largest, 1e-6), err_msg=name)


def by_hand(case: Linear, samples: list[tuple[Array, Array]]) -> Moments:
    """From all rows at once, in float64."""
    x, quantized = (
        np.concatenate([case.geometry.rows(sample[i]) for sample in samples], axis=1).astype(np.float64) for i in (0, 1)
    )
    return Moments.of_rows(case.layout, x, quantized)


def check_against_onnxruntime(case: Linear, way: str, seed: int) -> None:
    """Two samples: squared errors and mean errors of each output."""
    sums, weight, quantized = sums_of(case, way), case.constant(seed), case.constant(seed + 1)
    squares, errors, energy = np.zeros(()), np.zeros(()), 0.0
    for sample in range(2):
        x, other = inputs_of(case, seed + sample)
        y = case.run(x, weight).astype(np.float64)
        gap = y - case.run(other, quantized)
        squares, errors = squares + case.by_output(gap**2), errors + case.by_output(gap)
        energy += float((y**2 + gap**2).sum())
        sums.add(x, other, sample=sample)
    found, matrices = sums.moments(), (case.layout.matrices(weight), case.layout.matrices(quantized))
    total, mean = found.error(*matrices) * found.rows, found.means.mean_error(*matrices) * found.rows
    np.testing.assert_allclose(total, squares, rtol=1e-4, atol=1e-5 * energy)
    np.testing.assert_allclose(mean, errors, rtol=1e-4, atol=1e-5 * np.sqrt(energy * max(found.rows, 1)))


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FIXED)
def test_the_corners_say_what_onnxruntime_says(name: str, way: str) -> None:
    check_against_onnxruntime(FIXED[name], way, 5)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(linear_ops(), st.sampled_from(list(WAYS)), st.integers(0, 2**16))
def test_moments_say_what_onnxruntime_says(case: Linear, way: str, seed: int) -> None:
    check_against_onnxruntime(case, way, seed)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(linear_ops(), st.sampled_from(list(WAYS)), st.integers(0, 2**16), st.integers(1, 40), st.integers(1, 2000))
def test_chunks_do_not_matter(case: Linear, way: str, seed: int, rows: int, size: int) -> None:
    """Waiting, products and copies of any size; the reference is unfolded at once."""
    samples = [inputs_of(case, seed + i) for i in range(4)]
    limits: dict[str, Any] = {"CHUNK": 4 * size, "WAITING": max(rows // 3, 1), "ROWS": rows}
    with patch.multiple(products, **limits):
        sums = sums_of(case, way)
        for number, (x, quantized) in enumerate(samples):
            sums.add(x, quantized, sample=number)
        close(sums.moments(), by_hand(case, samples))


@settings(max_examples=50, deadline=None)
@given(linear_ops(), st.sampled_from(list(WAYS)), st.integers(0, 5), st.randoms(use_true_random=False))
def test_merged_in_any_order(case: Linear, way: str, cut: int, order: st.DataObject) -> None:
    samples = [inputs_of(case, i) for i in range(5)]
    numbers = list(range(5))
    order.shuffle(numbers)  # type: ignore[attr-defined]
    one, other = sums_of(case, way), sums_of(case, way)
    for position, number in enumerate(numbers):
        (one if position < cut else other).add(*samples[number], sample=number)
    one.merge(other)
    close(one.moments(), by_hand(case, samples))
    assert one.moments().observed == by_hand(case, samples).observed


@pytest.mark.parametrize("name", FIXED)
def test_one_stream_is_half_of_two(name: str) -> None:
    case = FIXED[name]
    sums = sums_of(case, two_streams=False)
    x = case.input(0)
    sums.add(x, sample=0)
    found = sums.moments()
    assert found.is_one_stream
    assert found.b is found.a
    assert found.c is found.a
    close(found, by_hand(case, [(x, x)]))


@pytest.mark.sampled
@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("way", WAYS)
def test_compact_sums_of_two_sets(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32 and of errors, whose products have one matrix for both sets; panels of three rows."""
    monkeypatch.setattr("sbonnx.moments.sums.WIDE", 0)
    monkeypatch.setattr("sbonnx.moments.products.PANEL", 3)
    case = FIXED[name]
    samples = [inputs_of(case, seed) for seed in range(4)]
    one, other = (sums_of(case, way, compact=True) for _ in range(2))
    other.share_errors(one)
    for number, (x, quantized) in enumerate(samples):
        (other if number == 2 else one).add(x, quantized, sample=number)
    parts = one.moments(), other.moments()
    assert all(part.of_errors for part in parts)
    assert {np.asarray(total).dtype for part in parts for total in (part.a, part.cross)} == {np.dtype(np.float32)}
    assert parts[0].square is parts[1].square
    wanted = [by_hand(case, [samples[at] for at in some]) for some in ((0, 1, 3), (2,))]
    for part, expected in zip(parts, wanted, strict=True):
        for symmetric in (part.a, np.asarray(part.square)):
            np.testing.assert_array_equal(symmetric, symmetric.swapaxes(1, 2))
        for key in ("a", "b", "mean", "mean_quantized"):
            left, right = getattr(part, key), getattr(expected, key)
            np.testing.assert_allclose(left, right, rtol=0, atol=1e-5 * max(np.abs(right).max(), 1.0), err_msg=key)
    joined, whole = parts[0].merged(parts[1], in_place=True), by_hand(case, samples)
    np.testing.assert_allclose(joined.c, whole.c, rtol=0, atol=1e-5 * max(np.abs(whole.c).max(), 1.0))
    assert joined.observed == whole.observed


@settings(max_examples=50, deadline=None)
@given(linear_ops(), st.integers(1, 6), st.integers(0, 3))
def test_picks(case: Linear, rows: int, seed: int) -> None:
    """So many rows of each sample, as their number and the seed have it, whatever the order of samples."""
    samples = [inputs_of(case, i) for i in range(3)]
    kept, count = [], case.geometry.count(samples[0][0].shape)
    for number, sample in enumerate(samples):
        random = np.random.default_rng((seed, number))
        chosen = random.choice(count, rows, replace=False, shuffle=False) if rows < count else np.arange(count)
        kept.append(tuple(case.geometry.rows(stream, chosen).astype(np.float64) for stream in sample))
    x, quantized = (np.concatenate([sample[i] for sample in kept], axis=1) for i in (0, 1))
    sums = sums_of(case, "by rows", rows_a_sample=rows, seed=seed)
    for number in (2, 0, 1):
        sums.add(*samples[number], sample=number)
    found = sums.moments()
    assert found.rows == 3 * min(rows, count)
    np.testing.assert_allclose(found.b, x.swapaxes(1, 2) @ quantized, rtol=0, atol=1e-5 * max(np.abs(found.b).max(), 1))
    np.testing.assert_allclose(found.mean, x.mean(axis=1), rtol=0, atol=1e-5)


@settings(max_examples=40)
@given(linear_ops(), st.sampled_from([None, 1, 3]))
def test_samples_side_by_side(case: Linear, rows: int | None) -> None:
    """Samples that lie along the leading axis are taken as if they came one by one, with the same picks."""
    samples = [inputs_of(case, i) for i in range(3)]
    assume(case.op in ("Conv", "ConvTranspose", "Gemm") and not case.layout.trans_a)
    apart, together = (sums_of(case, "by rows", rows_a_sample=rows, seed=1) for _ in range(2))
    for number, sample in enumerate(samples):
        apart.add(*sample, sample=number)
    together.add(*(np.concatenate([sample[i] for sample in samples]) for i in (0, 1)), sample=[0, 1, 2])
    one, other = apart.moments(), together.moments()
    assert one.rows == other.rows
    for name in ("a", "b", "c", "mean", "mean_quantized"):
        expected = getattr(one, name)
        np.testing.assert_allclose(
            getattr(other, name), expected, rtol=1e-5, atol=1e-5 * max(np.abs(expected).max(), 1)
        )


def test_all_rows_are_taken_where_lags_are_less_work_than_a_few() -> None:
    """49 windows of 512 channels: half of them unfolded would be several times the work of all by lags."""
    case = Linear("Conv", (1, 512, 7, 7), (4, 512, 3, 3), {"pads": [1] * 4})
    sums = sums_of(case, rows_a_sample=24, two_streams=False)
    assert sums._by_lags(case.geometry, case.reads, 24)
    assert not sums._by_lags(case.geometry, case.reads, 1)


@pytest.mark.parametrize("way", WAYS)
def test_samples_of_several_sizes(way: str) -> None:
    case = FIXED["conv"]
    sizes = [(1, 4, 9, 7), (2, 4, 5, 5), (1, 4, 9, 7), (1, 4, 3, 1)]
    cases = [Linear(case.op, size, case.weight, case.attributes) for size in sizes]
    samples = [inputs_of(one, number) for number, one in enumerate(cases)]
    sums = sums_of(case, way)
    for number, sample in enumerate(samples):
        sums.add(*sample, sample=number)
    close(sums.moments(), by_hand(case, samples))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["conv", "gemm", "matmul"])
def test_arrays_may_be_reused(name: str, way: str) -> None:
    case = FIXED[name]
    samples = [inputs_of(case, i) for i in range(3)]
    sums, x, quantized = sums_of(case, way), np.empty_like(samples[0][0]), np.empty_like(samples[0][1])
    for number, sample in enumerate(samples):
        x[...], quantized[...] = sample
        sums.add(x, quantized, sample=number)
    x[...] = quantized[...] = 0
    close(sums.moments(), by_hand(case, samples))


def test_float16_is_multiplied_in_float32() -> None:
    """Squares of 300 are beyond half precision."""
    case = FIXED["conv"]
    x = (300 * case.input(0)).astype(np.float16)
    sums = sums_of(case, two_streams=False)
    sums.add(x, sample=0)
    wide = x.astype(np.float32)
    close(sums.moments(), by_hand(case, [(wide, wide)]))


def test_long_sums_keep_their_digits() -> None:
    """400,000 rows far from zero: what is left about the mean is right to a thousandth."""
    case = Linear("MatMul", (8000, 3), (3, 2))
    sums, random = sums_of(case, two_streams=False), np.random.default_rng(0)
    kept = []
    for number in range(50):
        x = random.normal(20.0, 1.0, (8000, 3)).astype(np.float32)
        kept.append(x.astype(np.float64))
        sums.add(x, sample=number)
    x = np.concatenate(kept)
    centred = sums.moments().centred().a[0] / len(x)
    np.testing.assert_allclose(centred, np.cov(x.T, bias=True), rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by lags", "by rows"])
@pytest.mark.parametrize("two", [False, True])
def test_memory_does_not_grow_with_samples(way: str, two: bool) -> None:
    case = Linear("Conv", (1, 64, 14, 14), (8, 64, 3, 3), {"pads": [1] * 4})
    streams = inputs_of(case, 0) if two else (case.input(0),)
    peaks = []
    for count in (6, 24):
        tracemalloc.start()
        sums = sums_of(case, way, two_streams=two)
        for number in range(count):
            sums.add(*streams, sample=number)
        sums.moments()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.05 * peaks[0]
    assert peaks[1] <= bytes_for(case.layout, two)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FIXED)
def test_the_same_by_torch(name: str, way: str) -> None:
    """The arrays of a GPU, here on the CPU; merged with sums of numpy."""
    pytest.importorskip("torch")
    case = FIXED[name]
    samples = [inputs_of(case, i) for i in range(3)]
    with patch.object(Arrays, "on", staticmethod(torch_arrays)):
        sums = sums_of(case, way, device="cpu")
    other = sums_of(case, way)
    for number, sample in enumerate(samples):
        (sums if number < 2 else other).add(*sample, sample=number)
    sums.merge(other)
    close(sums.moments(), by_hand(case, samples))


@pytest.mark.sampled
@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FIXED)
def test_the_same_on_a_gpu(name: str, way: str) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no GPU here")
    case = FIXED[name]
    samples = [inputs_of(case, i) for i in range(3)]
    sums = sums_of(case, way, device="cuda")
    assert sums._arrays.zeros((1,), "float64").is_cuda
    for number, sample in enumerate(samples):
        sums.add(*sample, sample=number)
    close(sums.moments(), by_hand(case, samples))


def test_moments_are_handed_over_once() -> None:
    case = FIXED["gemm"]
    sums = sums_of(case)
    sums.add(*inputs_of(case, 0), sample=0)
    assert sums.moments() is sums.moments()
    with pytest.raises(ValueError, match="taken"):
        sums.add(*inputs_of(case, 1), sample=1)
    with pytest.raises(ValueError, match="cannot be added"):
        sums_of(case).merge(sums)


def test_streams_that_do_not_fit() -> None:
    case = FIXED["gemm"]
    x = case.input(0)
    with pytest.raises(ValueError):
        sums_of(case).add(x, sample=0)
    with pytest.raises(ValueError):
        sums_of(case, two_streams=False).add(x, x, sample=0)
    with pytest.raises(ValueError):
        sums_of(case).add(x, x[:1], sample=0)
    with pytest.raises(ValueError, match="cannot be added"):
        sums_of(case).merge(sums_of(FIXED["matmul"]))


def test_nothing_and_not_a_number() -> None:
    """No rows are no moments; NaN stays visible."""
    case = FIXED["conv"]
    empty = sums_of(case).moments()
    assert empty.rows == 0
    assert not empty.a.any()
    x = case.input(0)
    x[0, 0, 2, 2] = np.nan
    sums = sums_of(case)
    sums.add(x, x, sample=0)
    assert np.isnan(sums.moments().a).any()


@settings(max_examples=60, deadline=None)
@given(linear_ops(), st.sampled_from(list(WAYS)), st.lists(st.floats(0.01, 100), min_size=3, max_size=3))
def test_weighted_samples(case: Linear, way: str, weights: list[float]) -> None:
    """Products, means and the number of rows are weighted sums over the samples."""
    samples = [inputs_of(case, i) for i in range(3)]
    sums, each = sums_of(case, way), case.geometry.count(samples[0][0].shape)
    for number, (sample, weight) in enumerate(zip(samples, weights, strict=True)):
        sums.add(*sample, sample=number, weights=np.array([weight]))
    found, total = sums.moments(), sum(weights)
    alone = [by_hand(case, [sample]) for sample in samples]
    expected = Moments(
        case.layout,
        found.rows,
        *(sum(w * getattr(one, name) for w, one in zip(weights, alone, strict=True)) for name in "abc"),
        *(
            sum(w / total * getattr(one, name) for w, one in zip(weights, alone, strict=True))
            for name in ("mean", "mean_quantized")
        ),
    )
    np.testing.assert_allclose(found.rows, total * each, rtol=1e-6)
    assert found.observed == 3 * each
    close(found, expected)


def test_weights_of_stacked_samples() -> None:
    """One call with two samples is two calls, and their weights are the inverse of their mean squared errors."""
    case = next(iter(FIXED.values()))
    x, quantized = (np.concatenate([inputs_of(case, i)[place] for i in range(2)]) for place in (0, 1))
    quantized[: len(x) // 2] += 3
    weights = sample_weights(x, quantized, 2, 0.5)
    errors = np.square(x - quantized).reshape(2, -1).mean(axis=1) + 0.25
    np.testing.assert_allclose(weights, 1 / errors, rtol=1e-5)


def test_one_bad_sample_does_not_decide() -> None:
    """A weighted fit is not changed by one sample with a large error; an unweighted fit is."""
    random, case = np.random.default_rng(0), Linear("Gemm", (50, 8), (8, 4))
    weight, drift = random.standard_normal((4, 8)), np.eye(8) + 0.05 * random.standard_normal((8, 8))
    good = [(x, x @ drift) for x in random.standard_normal((20, 50, 8)).astype(np.float32)]
    bad = 30 * random.standard_normal((50, 8)).astype(np.float32)
    errors = []
    for resolution, samples in ((0.01, good), (0.01, [*good, (bad, -bad)]), (None, [*good, (bad, -bad)])):
        sums = sums_of(case)
        for number, (x, quantized) in enumerate(samples):
            weights = None if resolution is None else sample_weights(x, quantized, 1, resolution)
            sums.add(x, quantized.astype(np.float32), sample=number, weights=weights)
        found = sums.moments()
        fitted = weight @ np.linalg.solve(found.a[0], found.b[0].T).T
        errors.append(sum(np.square(x @ weight.T - quantized @ fitted.T).sum() for x, quantized in good))
    assert errors[1] < 1e-3 * errors[2]


@pytest.mark.parametrize("way", WAYS)
def test_inputs_of_several_convolutions_with_one_weight(way: str) -> None:
    """Other strides, pads and sizes: the rows of all."""
    some = Linear("Conv", (1, 3, 9, 8), (4, 3, 3, 3), {"pads": [1, 1, 1, 1]})
    others = Linear("Conv", (2, 3, 7, 9), (4, 3, 3, 3), {"strides": [2, 2], "dilations": [2, 1]})
    sums = sums_of(some, way, two_streams=False)
    rows = []
    for sample in range(3):
        for case in (some, others):
            x = case.input(sample)
            sums.add(x, sample=sample, geometry=case.geometry)
            rows.append(case.geometry.rows(x).astype(np.float64))
    joined = np.concatenate(rows, axis=1)
    close(sums.moments(), Moments.of_rows(some.layout, joined, joined))

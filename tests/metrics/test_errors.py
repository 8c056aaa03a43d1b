"""Energies of errors: which values count, and which ratio they give."""

from __future__ import annotations

import math

import numpy as np

from sbonnx.metrics import CosineSum, ErrorSum, errors_by_feed

REFERENCE = np.array([[3.0, 4.0], [0.0, 1.0]], np.float32)


def test_energies_are_summed_over_feeds_and_known_of_each() -> None:
    sums = ErrorSum()
    sums.add(REFERENCE, REFERENCE + 1)
    sums.add(REFERENCE, REFERENCE)
    assert (sums.signal, sums.noise, sums.count) == (52.0, 4.0, 8)
    assert sums.parts == [(26.0, 4.0), (26.0, 0.0)]
    assert sums.relative == 4 / 52 and sums.sqnr_db == 10 * math.log10(13)


def test_ratios_without_energy() -> None:
    zero, one = np.zeros(3), np.ones(3)
    for reference, value, ratio, decibels in (
        (zero, zero, 0.0, math.inf),
        (one, one, 0.0, math.inf),
        (zero, one, math.inf, -math.inf),
    ):
        sums = ErrorSum()
        sums.add(reference, value)
        assert (sums.relative, sums.sqnr_db) == (ratio, decibels)
    assert math.isnan(ErrorSum().sqnr_db)


def test_other_shapes_are_counted_and_left_out_of_the_sums() -> None:
    sums = ErrorSum()
    assert sums.add(REFERENCE, REFERENCE[:1]) is None
    assert sums.add(REFERENCE, None) is None
    assert (sums.mismatched, sums.count, sums.signal, sums.noise) == (2, 0, 0.0, 0.0)
    assert sums.parts == [(26.0, math.inf)] * 2
    assert (sums.relative, sums.sqnr_db) == (math.inf, -math.inf)


def test_values_that_are_not_finite() -> None:
    reference, value = np.array([1.0, 2.0, math.nan, 4.0]), np.array([1.0, math.inf, 3.0, 5.0])
    sums = ErrorSum()
    compared = sums.add(reference, value)
    assert compared is not None and [array.tolist() for array in compared] == [[1.0, 4.0], [1.0, 5.0]]
    assert (sums.signal, sums.noise, sums.count, sums.not_finite) == (17.0, 1.0, 4, 1)
    assert (sums.lost, sums.relative, sums.sqnr_db) == (True, math.inf, -math.inf)
    assert sums.parts == [(17.0, math.inf)]


def test_values_that_are_not_finite_in_both_are_no_error() -> None:
    masked = np.array([1.0, -math.inf, math.nan])
    sums = ErrorSum()
    sums.add(masked, masked)
    assert (sums.lost, sums.relative, sums.parts) == (False, 0.0, [(1.0, 0.0)])


def test_cosine_of_both_tensors_over_feeds() -> None:
    sums = CosineSum()
    sums.add(REFERENCE, -2 * REFERENCE)
    assert sums.cosine == -1.0
    sums.add(REFERENCE, 2 * REFERENCE)
    assert sums.cosine == 0.0
    empty = CosineSum()
    empty.add(np.zeros(2), np.zeros(2))
    assert empty.cosine == 1.0


def test_error_of_a_feed_is_relative_to_the_mean_signal() -> None:
    first, second, silent = ErrorSum(), ErrorSum(), ErrorSum()
    for scale in (1.0, 3.0):
        first.add(scale * np.ones(2), scale * np.ones(2) + 1)
        second.add(np.ones(2), np.ones(2) * math.nan if scale == 3.0 else np.ones(2))
        silent.add(np.zeros(2), np.ones(2))
    errors = errors_by_feed([first, second, silent])
    assert errors is not None and errors.tolist() == [(2 / 10 + 0) / 2, math.inf]
    assert errors_by_feed([silent]) is None

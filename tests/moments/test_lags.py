"""Plans of sums by lags: how few sums there are, and that each pair of taps gets its own box."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.moments.lags import LagPlan, lag_plan, tap_sums, volume
from sbonnx.spec import Array
from tests.support.linear_ops import FIXED, Linear, convolutions, transposed


def plan_of(case: Linear, *, same: bool) -> tuple[LagPlan, list[Array]]:
    tables = case.geometry.sources(case.reads)
    return lag_plan(tables, case.reads[2:], same=same), tables


def meetings(tables: list[Array], space: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...]) -> Array:
    """How often two places are multiplied by a pair of taps: counted position by position, (*space, *space)."""
    counts = np.zeros((*space, *space), np.int64)
    for position in itertools.product(*(range(len(table)) for table in tables)):
        here = tuple(int(table[p, tap]) for table, p, tap in zip(tables, position, left, strict=True))
        there = tuple(int(table[p, tap]) for table, p, tap in zip(tables, position, right, strict=True))
        if all(place < size for place, size in zip(here + there, space + space, strict=True)):
            counts[here + there] += 1
    return counts


@settings(max_examples=60, deadline=None)
@given(st.one_of(convolutions(), transposed()), st.booleans())
def test_boxes_and_strips_are_the_positions(case: Linear, same: bool) -> None:
    """Pieces added and taken off leave every meeting of two places exactly as often as it happens."""
    plan, tables = plan_of(case, same=same)
    space = case.reads[2:]
    taps = list(itertools.product(*(range(table.shape[1]) for table in tables)))
    for (k, left), (number, right) in list(itertools.product(enumerate(taps), repeat=2))[:60]:
        expected = meetings(tables, space, left, right)
        if same and k > number:
            assert (k, number) not in plan.entries
            continue
        found = np.zeros_like(expected)
        places = np.indices(space)
        for piece, sign in plan.entries.get((k, number), {}).items():
            for here, there in plan.pieces[piece].slices(3):
                one, other = (
                    np.stack([axis[part] for axis in places]).reshape(len(space), -1) for part in (here, there)
                )
                np.add.at(found, (*one, *other), sign)
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("case", "pieces", "whole"),
    [
        (Linear("Conv", (1, 1, 28, 28), (1, 1, 3, 3), {"pads": [1] * 4}), 29, 13),
        (Linear("Conv", (1, 1, 28, 28), (1, 1, 1, 1)), 1, 1),
        (Linear("Conv", (1, 1, 64), (1, 1, 5), {"pads": [2, 2]}), 11, 5),
        (Linear("ConvTranspose", (1, 1, 14, 14), (1, 1, 4, 4), {"strides": [2, 2], "pads": [1] * 4}), 17, 5),
    ],
)
def test_most_pairs_share_a_sum(case: Linear, pieces: int, whole: int) -> None:
    """One whole sum a distance, up to its sign; the rest are strips."""
    plan = plan_of(case, same=True)[0]
    assert len(plan.pieces) == pieces
    largest = max(piece.volume for piece in plan.pieces)
    assert sum(piece.volume > largest / 2 for piece in plan.pieces) == whole
    assert plan.pieces[0].volume == volume(plan.pieces[0].box)


@pytest.mark.parametrize("name", ["conv", "depthwise", "volume", "far padding", "transposed", "transposed, holes"])
def test_sums_of_what_a_tap_reads(name: str) -> None:
    case = FIXED[name]
    x = case.input(0)[:1]
    found = tap_sums(x[0].astype(np.float64), case.geometry.sources(x.shape))
    rows = case.geometry.rows(x).astype(np.float64).sum(axis=1)
    np.testing.assert_allclose(found.reshape(rows.shape), rows, rtol=0, atol=1e-4)


def test_layers_with_the_same_windows_share_a_plan() -> None:
    """Planning takes longer than the sums of a small image; channels and memory of the tables do not matter."""
    narrow, wide = (Linear("Conv", (1, count, 9, 9), (count, count, 3, 3), {"pads": [1] * 4}) for count in (1, 2))
    plan = plan_of(narrow, same=True)[0]
    assert plan_of(wide, same=True)[0] is plan
    assert plan_of(wide, same=False)[0] is not plan

"""Sketches against numpy on the same values: exact where they say so, within a bin elsewhere, whatever the split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sbonnx.calib.sketches import Panel, Sketch, kernels
from sbonnx.calib.sketches.sketch import CHANNEL_MANTISSA, EXACT, MANTISSA
from sbonnx.errors import NumericError
from sbonnx.spec import Array

VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_nan=False),
)

both = pytest.mark.parametrize("compiled", [True, False])


def normal(*shape: int, seed: int = 0) -> Array:
    """Random values of all signs and sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))).astype(np.float32)


def same(one: Sketch, other: Sketch) -> bool:
    """Whether two sketches hold the same, bit for bit."""
    mine, theirs = one.to_arrays(), other.to_arrays()
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and mine[name].tobytes() == theirs[name].tobytes() for name in mine
    )


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the compiled loops are missing."""
    monkeypatch.setattr(kernels, "native", None)


def seen(parts: list[Array], axis: int | None = None, *, track: bool = False) -> Sketch:
    """One sketch fed with all parts."""
    sketch = Sketch(axis=axis, track=track)
    for index, part in enumerate(parts):
        sketch.observe(part, index)
    return sketch


def test_the_compiled_loops_are_there_where_they_were_built() -> None:
    """Otherwise the comparisons below would compare numpy with numpy."""
    if kernels.native is None:
        pytest.skip("installed without a C compiler")
    assert {"extremes", "count", "panel"} <= set(dir(kernels.native))


@pytest.mark.parametrize("axis", [None, 0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_compiled_and_numpy_agree(axis: int | None, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [normal(8, 5, 601, seed=seed) * np.float32(scale) for seed in range(3)]
    parts[1][:, 2] = 0
    parts[2][3] = -0.0
    fast = seen(parts, axis, track=True)
    monkeypatch.setattr(kernels, "native", None)
    assert same(fast, seen(parts, axis, track=True))


@given(st.lists(VALUES, min_size=1, max_size=4), st.sampled_from([None, 1]), st.randoms(use_true_random=False))
def test_neither_order_nor_split_matters(parts: list[Array], axis: int | None, random: object) -> None:
    if axis is not None:
        parts = [part[:, :1] for part in parts]
    whole = seen(parts, axis)
    halves = [seen(parts[1::2], axis), seen(parts[::2], axis)]
    halves[0].merge(halves[1])
    assert same(whole, halves[0])
    assert same(whole, seen(parts[::-1], axis))
    if axis is None:
        assert np.array_equal(
            seen([np.concatenate([p.ravel() for p in parts])]).distribution().left, whole.distribution().left
        )


@pytest.mark.parametrize("axis", [None, 1])
def test_folding_early_or_late_is_the_same(axis: int | None) -> None:
    parts = [normal(1, 4, 1500, seed=seed) for seed in range(6)]
    assert sum(part.size for part in parts) > EXACT > parts[0].size
    whole = seen(parts, axis)
    merged = Sketch(axis=axis)
    for some in (parts[4:], parts[:1], parts[1:4]):
        merged.merge(seen(some, axis))
    assert same(whole, merged)
    assert whole.pages is not None


@pytest.mark.parametrize(("axis", "mantissa"), [(None, MANTISSA), (1, CHANNEL_MANTISSA)])
def test_bins_hold_the_values_within_their_edges(axis: int | None, mantissa: int) -> None:
    x = normal(30, 3, 700)
    x[:, 1] = np.maximum(x[:, 1], 0)
    found = seen([x], axis).distribution()
    assert not found.exact
    rows = [x.ravel()] if axis is None else [x[:, channel].ravel() for channel in range(3)]
    width = (found.right - found.left)[0]
    assert (width <= np.maximum(abs(found.left), abs(found.right))[0] * 2.0**-mantissa).all()
    for row, values in enumerate(rows):
        left, right = (
            np.broadcast_to(found.left, found.counts.shape)[row],
            np.broadcast_to(found.right, found.counts.shape)[row],
        )
        assert found.counts[row].sum() == len(values) == found.total[row]
        assert found.lo[row] == values.min()
        assert found.hi[row] == values.max()
        for a, b, count in zip(left, right, found.counts[row], strict=True):
            if count:
                assert ((values >= a) & (values <= b)).sum() >= count
        cumulated = np.cumsum(found.counts[row])
        for edge, below in list(zip(right, cumulated, strict=True))[::97]:
            assert (values < edge).sum() <= below <= (values <= edge).sum() + (values == edge).sum()


@given(VALUES)
def test_few_values_are_exact(x: Array) -> None:
    found = seen([x]).distribution()
    assert found.exact
    assert np.array_equal(found.left[0], np.sort(x.ravel()))
    assert found.lo[0] == x.min()
    assert found.hi[0] == x.max()


def test_a_constant_of_any_size_is_exact() -> None:
    x = normal(3, 20_000)
    found = Sketch.of(x, 0).distribution()
    assert found.exact
    assert np.array_equal(found.left, np.sort(x, axis=1))


@both
@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("size", [100, 9000])
def test_what_is_not_finite_is_counted_and_left_out(
    compiled: bool, axis: int | None, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "native", None)
    x = normal(2, 3, size)
    whole = seen([x], axis)
    x[0, 1, :5], x[1, 2, 3], x[1, 0, 7] = np.nan, np.inf, -np.inf
    sketch = seen([x], axis)
    fine = np.where(np.isfinite(x), x, np.nan)
    over = None if axis is None else (0, 2)
    assert (sketch.nan, sketch.inf, sketch.finite) == (5, 2, x.size - 7)
    assert np.array_equal(sketch.lo, np.nanmin(fine, axis=over))
    assert np.array_equal(sketch.hi, np.nanmax(fine, axis=over))
    assert int(sketch.distribution().total.sum()) == x.size - 7
    sketch.merge(whole)
    assert int(sketch.distribution().total.sum()) == 2 * x.size - 7


def test_nothing_seen() -> None:
    for axis in (None, 1):
        empty = Sketch(axis=axis, track=True)
        assert empty.finite == 0
        assert empty.track()[0].shape[0] == 0
    empty = Sketch()
    assert (float(empty.lo), float(empty.hi)) == (0.0, 0.0)
    assert empty.distribution().total[0] == 0
    empty.observe(np.zeros((2, 0), np.float32))
    assert (float(empty.lo), empty.elements, empty.samples) == (0.0, 0, 1)


@pytest.mark.parametrize("axis", [None, 1])
def test_tracks_are_in_the_order_of_the_data(axis: int | None) -> None:
    parts = [normal(2, 3, 5, seed=seed) for seed in range(4)]
    one, other = Sketch(axis=axis, track=True), Sketch(axis=axis, track=True)
    for index in (3, 0):
        one.observe(parts[index], index)
    for index in (2, 1):
        other.observe(parts[index], index)
    one.merge(other)
    rows = np.concatenate(parts)
    over = (1, 2) if axis is None else 2
    lo, hi = one.track()
    assert np.array_equal(lo, rows.min(axis=over))
    assert np.array_equal(hi, rows.max(axis=over))


@pytest.mark.parametrize("axis", [None, 1])
@pytest.mark.parametrize("size", [10, 9000])
def test_arrays_bring_it_back(axis: int | None, size: int) -> None:
    sketch = seen([normal(2, 2, size), normal(2, 2, size, seed=1)], axis, track=True)
    back = Sketch.from_arrays(sketch.to_arrays())
    assert same(sketch, back)
    more = normal(1, 2, 8000, seed=2)
    sketch.observe(more, 9)
    back.observe(more, 9)
    assert same(sketch, back)


def test_axis_and_detail_are_held_to() -> None:
    sketch = Sketch(axis=1)
    sketch.observe(np.zeros((2, 3), np.float32))
    with pytest.raises(NumericError, match="had 3 channels and now has 4"):
        sketch.observe(np.zeros((2, 4), np.float32))
    with pytest.raises(NumericError, match="needs that axis"):
        sketch.observe(np.zeros(3, np.float32))
    with pytest.raises(ValueError, match="cannot merge"):
        sketch.merge(Sketch())
    with pytest.raises(ValueError, match="extremes only"):
        Sketch(detail="range").distribution()
    with pytest.raises(ValueError, match="does not remember samples"):
        Sketch().track()


@both
def test_a_panel_is_its_sketches(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(kernels, "native", None)
    shapes = [(1, 3, 40, 50), (1, 7), (2, 3, 60, 60), (), (1, 4, 99), (1, 0)]

    def fresh() -> list[Sketch]:
        made = [Sketch(), Sketch(track=True), Sketch(track=True), Sketch(detail="range"), Sketch(axis=1)]
        return [*made, Sketch(detail="range", track=True)]

    panel, alone = Panel(fresh()), fresh()
    buffers = [np.zeros(shape, np.float32) for shape in shapes]
    for index in range(12):
        for buffer in buffers:
            buffer[...] = normal(*buffer.shape, seed=index) * np.float32(10.0 ** (index % 5))
        if index == 7:
            buffers[4] = buffers[4][..., ::2]
        if index == 9:
            buffers[0][0, 0, 0, 0] = np.nan
        assert panel.observe(buffers, index) == ([0] if index == 9 else [])
        if index == 5:
            panel.settle()
        for sketch, buffer in zip(alone, buffers, strict=True):
            sketch.observe(np.array(buffer), index)
    panel.settle()
    panel.settle()
    for mine, theirs in zip(panel.sketches, alone, strict=True):
        assert same(mine, theirs)


def test_half_precision_and_double_are_read_as_single() -> None:
    x = normal(4, 5)
    assert same(seen([x.astype(np.float16)]), seen([x.astype(np.float16).astype(np.float32)]))
    assert same(seen([x.astype(np.float64)]), seen([x]))


def test_the_state_is_bounded() -> None:
    sketch, rng = Sketch(), np.random.default_rng(0)
    for _ in range(50):
        bits = rng.integers(0, 2**32, 20_000, dtype=np.uint64).astype(np.uint32)
        x = bits.view(np.float32)
        sketch.observe(x[np.isfinite(x)])
    assert sum(array.nbytes for array in sketch.to_arrays().values()) < 1 << 20

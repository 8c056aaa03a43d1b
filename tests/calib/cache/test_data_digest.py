"""The digest of a data set: of what calibration sees, whatever it comes from."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.calib.cache.data_digest import data_digest
from sbonnx.calib.data import InputSpec
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.data.objects import Source
from sbonnx.errors import DataError
from sbonnx.spec import Array

X = InputSpec("x", np.dtype(np.float32), ("N", 3))
MASK = InputSpec("mask", np.dtype(np.int64), ("N", 2), optional=True)
ROWS = np.arange(24, dtype=np.float32).reshape(8, 3)
FEEDS: list[dict[str, Array]] = [{"x": ROWS[2 * n : 2 * n + 2], "mask": np.full((2, 2), n, np.int64)} for n in range(4)]


def of(feeds: Any, **how: Any) -> str:
    return data_digest(read(feeds, [X, MASK], **how))


def test_what_it_comes_from_does_not_count(tmp_path: Path) -> None:
    for number, feed in enumerate(FEEDS):
        np.savez(tmp_path / f"{number}.npz", x=feed["x"], mask=feed["mask"])
    first = of(FEEDS)
    assert of(tmp_path) == first == of(iter(FEEDS)) == of(read(FEEDS, [X, MASK]))
    assert of([{"mask": feed["mask"].astype(np.int32), "x": feed["x"].astype(np.float64)} for feed in FEEDS]) == first
    assert of([(np.asfortranarray(feed["x"]), feed["mask"]) for feed in FEEDS]) == first
    whole = {name: np.concatenate([feed[name] for feed in FEEDS]) for name in ("x", "mask")}
    assert of(whole, split=2) == first and of([*FEEDS, FEEDS[0]], limit=4) == first
    assert len(first) == 32


def test_what_calibration_sees_counts() -> None:
    bit = [{**feed, "x": feed["x"].copy()} for feed in FEEDS]
    bit[3]["x"][1, 2] = np.nextafter(bit[3]["x"][1, 2], np.float32(1e9))
    others: list[Any] = [
        FEEDS[:3],
        [*FEEDS, FEEDS[0]],
        FEEDS[::-1],
        bit,
        [{"x": feed["x"]} for feed in FEEDS],
        [ROWS],
        [ROWS[:3], ROWS[3:]],
        [ROWS[:4], ROWS[4:]],
    ]
    found = [of(FEEDS), *map(of, others), of(FEEDS, split=1), of(FEEDS, limit=2)]
    assert len(set(found)) == len(found)


def test_the_name_and_type_of_an_input_count() -> None:
    feed = [{"x": np.ones((1, 3), np.float32)}]
    first = data_digest(read(feed, [X]))
    assert data_digest(read([np.ones((1, 3), np.float32)], [InputSpec("y", X.dtype, X.shape)])) != first
    assert data_digest(read(feed, [InputSpec("x", np.dtype(np.float16), X.shape)])) != first


@pytest.mark.slow
@given(st.lists(st.lists(st.text(max_size=3), min_size=1, max_size=3), min_size=2, max_size=2, unique_by=tuple))
def test_texts_count_one_by_one(pair: list[list[str]]) -> None:
    spec = [InputSpec("x", np.dtype(object), ("N",))]
    first, second = (data_digest(read([np.array(texts, object)], spec)) for texts in pair)
    assert first != second


def test_a_feed_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(DataError, match="input 'x' of feed 1 holds 1 NaN"):
        of([FEEDS[0], {"x": np.array([[1, np.nan, 2]], np.float32)}])


@pytest.mark.slow
def test_data_are_never_all_in_memory() -> None:
    def feeds() -> Iterator[tuple[str, Any]]:
        for number in range(300):
            yield f"feed {number}", np.full((1 << 18, 3), number, np.float32)  # 3 MiB, 900 MiB in all

    data = Dataset(Source("made up", feeds, 300), [X])
    tracemalloc.start()
    try:
        data_digest(data)
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()

"""Spans that come and go, against a list of who holds which bytes."""

from __future__ import annotations

import errno
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbonnx.calib.storage.arena import REGION, Arena, Span

SIZES = st.sampled_from([1, 64, 65, 4096, 1 << 20, REGION // 2, REGION, REGION + 1])


@given(st.lists(st.tuples(SIZES, st.integers(0, 5)), max_size=40), st.sampled_from([0, REGION, 3 * REGION]))
def test_spans_never_overlap_and_all_come_back(steps: list[tuple[int, int]], limit: int) -> None:
    arena = Arena(limit)
    held: list[tuple[Span, int]] = []
    for size, drop in steps:
        span = arena.take(size)
        if span is not None:
            region, start, length = span
            assert length >= size
            for (other, first, room), _ in held:
                assert other != region or start >= first + room or first >= start + length
            held.append((span, size))
        assert arena.taken <= limit
        if drop < len(held):
            arena.give(held.pop(drop)[0])
    for span, _ in held:
        arena.give(span)
    whole = [arena.take(REGION) for _ in range(arena.taken // REGION)]
    assert None not in whole, "what was given back did not join again"


def test_arrays_keep_their_values_and_their_memory() -> None:
    arena = Arena(2 * REGION)
    spans = [arena.take(4 * 1000) for _ in range(3)]
    arrays = []
    for number, span in enumerate(spans):
        assert span is not None
        array = arena.array(span, np.dtype(np.float32), (10, 100), 4000)
        array[...] = number
        arrays.append(array)
    first = spans[1]
    assert first is not None
    arena.give(first)
    assert arena.take(4000) == first, "the same place is used again"
    del arena
    assert [float(array.mean()) for array in arrays] == [0.0, 1.0, 2.0]


def test_no_room_is_said_and_nothing_is_taken() -> None:
    arena = Arena(1000)
    assert arena.take(1001) is None
    assert arena.taken == 0
    assert arena.take(900) is not None
    assert arena.take(900) is None


def test_a_system_without_memory_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array without room in memory goes to disk; other errors are raised."""
    arena = Arena(2 * REGION)
    kept = arena.take(64)
    for code in (errno.ENOMEM, errno.EINVAL):

        def refuse(*_: object, code: int = code) -> None:
            raise OSError(code, "refused")

        monkeypatch.setattr(mmap, "mmap", refuse)
        if code == errno.ENOMEM:
            assert arena.take(REGION) is None
            assert arena.taken == REGION and kept is not None
        else:
            with pytest.raises(OSError, match="refused"):
                arena.take(REGION)

"""`Arena`: allocator for thousands of short-lived arrays that takes memory from the system once."""

from __future__ import annotations

import errno
import mmap
from bisect import bisect_left, insort
from typing import Final

import numpy as np

from sbonnx.spec import Array

REGION: Final = 64 << 20
"""Bytes taken from the system at a time."""

ALIGNMENT: Final = 64

Span = tuple[int, int, int]
"""(region, first byte, bytes)."""


class Arena:
    """Allocates spans of a few large regions, first fit; adjacent free spans are joined.

    Newly mapped memory costs a page fault per 4 KiB, which for activations takes longer than computing some of them,
    and threads block each other in it. The arena reuses freed memory instead. Not thread-safe: the caller holds a lock.

    Args:
        limit: maximum bytes to take from the system. They are freed with the arena and the last array in it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._regions: list[Array] = []
        self._free: list[list[tuple[int, int]]] = []  # by region: (first byte, bytes), ascending, never adjacent

    def take(self, size: int) -> Span | None:
        """Allocate a span of `size` bytes; None if there is no contiguous room."""
        length = -(-size // ALIGNMENT) * ALIGNMENT
        for number, spans in enumerate(self._free):
            for at, (start, room) in enumerate(spans):
                if room >= length:
                    if room == length:
                        del spans[at]
                    else:
                        spans[at] = (start + length, room - length)
                    return number, start, length
        if not self._grow(max(REGION, length)) and not (length < REGION and self._grow(length)):
            return None
        return self.take(size)

    def give(self, span: Span) -> None:
        """Free a span; its array must not be read any more."""
        number, start, length = span
        spans = self._free[number]
        at = bisect_left(spans, (start, 0))
        if at < len(spans) and start + length == spans[at][0]:
            length += spans.pop(at)[1]
        if at and sum(spans[at - 1]) == start:
            start, before = spans.pop(at - 1)
            length += before
        insort(spans, (start, length))

    def array(self, span: Span, dtype: np.dtype[np.generic], shape: tuple[int, ...], size: int) -> Array:
        """View the span as an array of `size` bytes, not initialised."""
        number, start, _ = span
        found: Array = self._regions[number][start : start + size].view(dtype).reshape(shape)
        return found

    def _grow(self, size: int) -> bool:
        """Take one more region, if the limit and the system allow it."""
        if self.taken + size > self.limit:
            return False
        try:
            region = mmap.mmap(-1, size)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            return False  # less memory than the limit is available: arrays without room are spilled to disk
        if hasattr(mmap, "MADV_HUGEPAGE"):
            region.madvise(mmap.MADV_HUGEPAGE)  # one page fault per 2 MiB instead of 4 KiB
        self._regions.append(np.frombuffer(region, np.uint8))
        self._free.append([(0, size)])
        self.taken += size
        return True

"""Work on several samples at a time, results in the order of the samples."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """The items, so many at a time."""
    while some := list(islice(items, size)):
        yield some


def in_order(work: Callable[[T], R], items: Iterator[T], threads: int) -> Iterator[tuple[T, R]]:
    """`work` on every item by several threads, results in the order of the items, few items under way at once."""
    if threads == 1:
        yield from ((item, work(item)) for item in items)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="sbonnx-calib") as pool:
        under_way: deque[tuple[T, Future[R]]] = deque()
        try:
            for item in items:
                under_way.append((item, pool.submit(work, item)))
                if len(under_way) > 2 * threads:
                    first, result = under_way.popleft()
                    yield first, result.result()
            while under_way:
                first, result = under_way.popleft()
                yield first, result.result()
        finally:
            for _, result in under_way:
                result.cancel()

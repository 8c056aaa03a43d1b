"""Runs several samples at a time and returns results in the order of the samples."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from typing import Final, TypeVar

from threadpoolctl import threadpool_limits

TRIED: Final = 8
"""Number of items used to measure the time per item."""

T = TypeVar("T")
R = TypeVar("R")


def chunks(items: Iterator[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`."""
    while some := list(islice(items, size)):
        yield some


def within(items: Iterable[T], size: Callable[[T], int], budget: int) -> Iterator[list[T]]:
    """Yield consecutive items in groups of at most `budget` in total, or of a single item."""
    group: list[T] = []
    taken = 0
    for item in items:
        needed = size(item)
        if group and taken + needed > budget:
            yield group
            group, taken = [], 0
        group.append(item)
        taken += needed
    if group:
        yield group


def in_order(work: Callable[[T], R], items: Iterator[T], threads: int, *, least: float = 0.0) -> Iterator[tuple[T, R]]:
    """Run `work` on every item in several threads; yield results in the order of the items, with few items in flight.

    Args:
        least: seconds. If an item takes less (mean of the first ones, which run in this thread), all run in this
            thread: Python runs one thread at a time, and threads would mostly wait for each other.
    """
    taken = 0.0
    for item in islice(items, TRIED) if least and threads > 1 else ():
        start = time.perf_counter()
        done = work(item)
        taken += time.perf_counter() - start
        yield item, done
    if threads == 1 or taken < least * TRIED:
        yield from ((item, work(item)) for item in items)
        return
    with pool_of(threads) as pool:
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


@contextmanager
def pool_of(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Give a pool of threads, each of which computes its matrix products alone."""
    with one_blas_thread(), ThreadPoolExecutor(threads, thread_name_prefix="sbonnx") as pool:
        yield pool


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Compute matrix products on one thread, so that sums do not depend on the number of cores.

    BLAS threads that spin until the next small product use as much time as they save: half of all CPU time while a
    ResNet-20 was rounded, six times the wall time while another process had a core. Products that start in several
    threads wait for each other's BLAS threads as well: 20 times the CPU time for layers of 128 x 384.
    """
    with threadpool_limits(limits=1, user_api="blas"):
        yield


def limit_threads(count: int) -> None:
    """Limit BLAS and OpenMP of this process to `count` threads."""
    threadpool_limits(limits=count)

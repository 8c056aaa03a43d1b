"""Compiled rounding loops, if available, distributed over threads by rows."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from sbonnx.cpu import cores
from sbonnx.native import compiled

loops = compiled("sbonnx.rounding._search")

WORTH: Final = 1 << 22
"""Numbers to read below which a single thread is used."""


def over_rows(
    name: str, before: tuple[int, ...], rows: int, after: tuple[int, ...], reads: int, *, first: int = 0
) -> None:
    """Call the loop `name` as ``(*before, first, last, *after)`` on chunks of rows, with threads.

    Args:
        reads: total number of values read, which decides about threads.
    """
    loop = getattr(loops, name)
    threads = min(cores(), rows - first) if reads >= WORTH else 1
    if threads == 1:
        loop(*before, first, rows, *after)
        return
    edges = [first + (rows - first) * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads, thread_name_prefix="sbonnx-rounding") as pool:
        parts = [pool.submit(loop, *(*before, begin, end, *after)) for begin, end in itertools.pairwise(edges)]
    for part in parts:
        part.result()

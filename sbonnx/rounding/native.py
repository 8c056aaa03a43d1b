"""The compiled loops of rounding, where they could be compiled, and their rows shared out to threads."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import ModuleType
from typing import Final

from sbonnx.cpu import cores
from sbonnx.spec import Array

try:
    loops: ModuleType | None = import_module("sbonnx.rounding._search")
except ImportError:  # installed where there was no C compiler
    loops = None

WORTH: Final = 1 << 22
"""Numbers to be read below which one thread does it all."""


def address(x: Array) -> int:
    """Where the values of an array begin.

    Raises:
        ValueError: they are not one after another.
    """
    if not x.flags.c_contiguous:
        raise ValueError("an array for the compiled loops must be contiguous")
    place: int = x.__array_interface__["data"][0]
    return place


def over_rows(
    name: str, before: tuple[int, ...], rows: int, after: tuple[int, ...], reads: int, *, first: int = 0
) -> None:
    """The loop `name` called with ``(*before, first, last, *after)`` for parts of the rows from `first` to `rows`.

    Args:
        reads: how many numbers are read in all.
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

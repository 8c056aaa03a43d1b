"""Loops in C: found where they were compiled, and called with the addresses of arrays.

Each has its like in numpy, which runs where there was no compiler when the package was installed.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from numpy.typing import NDArray


def compiled(name: str) -> ModuleType | None:
    """A module in C by its full name; None where it was not compiled."""
    try:
        return import_module(name)
    except ImportError:
        return None


def address(x: NDArray[Any]) -> int:
    """Where the values of an array begin.

    Raises:
        ValueError: they are not one after another.
    """
    if not x.flags.c_contiguous:
        raise ValueError("an array for the compiled loops must be contiguous")
    place: int = x.__array_interface__["data"][0]
    return place

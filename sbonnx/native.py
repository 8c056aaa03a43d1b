"""Loops in C: found where they were compiled, and called with the addresses of arrays.

Each has its like in numpy, which gives the same numbers, bit for bit, and runs where there was no compiler when the
package was installed, or where the environment variable `SBONNX_COMPILED` is 0.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray


SWITCH: Final = "SBONNX_COMPILED"
"""Environment variable: 0 leaves everything to numpy. Read when the modules are imported."""

MODULES: Final = ("sbonnx.calib.sketches._kernels", "sbonnx.moments._lags", "sbonnx.rounding._search")


def missing() -> list[str]:
    """The modules in C that are not there, or not to be used."""
    return [name for name in MODULES if compiled(name) is None]


def notes() -> tuple[str, ...]:
    """A sentence for the report where numpy stands in for some of them."""
    absent = missing()
    if not absent:
        return ()
    which = "the compiled loops" if len(absent) == len(MODULES) else ", ".join(absent)
    why = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else "no C compiler at installation"
    return (f"numpy ran in place of {which} ({why}): slower, with the same result",)


def compiled(name: str) -> ModuleType | None:
    """A module in C by its full name; None where it was not compiled, or is not to be used."""
    if os.environ.get(SWITCH) == "0":
        return None
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

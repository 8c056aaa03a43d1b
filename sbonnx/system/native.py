"""C extension modules: import of the compiled loops, and addresses of arrays for them.

Each loop has a numpy implementation that gives bit-identical results. It runs if no compiler was available at
installation, or if the environment variable `SBONNX_COMPILED` is 0.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from numpy.typing import NDArray


SWITCH: Final = "SBONNX_COMPILED"
"""Environment variable: 0 disables the C loops, numpy runs instead. Read when the modules are imported."""

MODULES: Final = ("sbonnx.calib.sketches._kernels", "sbonnx.moments._lags", "sbonnx.rounding._search")

VERSIONS: Final = {"sbonnx.rounding._search": 2}
"""Constant VERSION of modules whose functions have changed: a module of older sources is not used."""


def missing() -> list[str]:
    """Return the names of the C modules that were not compiled or are disabled."""
    return [name for name in MODULES if compiled(name) is None]


def notes() -> tuple[str, ...]:
    """Return a note for the report if numpy replaces any of the C modules."""
    absent = missing()
    if not absent:
        return ()
    which = "the compiled loops" if len(absent) == len(MODULES) else ", ".join(absent)
    why = f"{SWITCH}=0" if os.environ.get(SWITCH) == "0" else "not compiled at installation, or from older sources"
    return (f"numpy ran in place of {which} ({why}): slower, with the same result",)


def compiled(name: str) -> ModuleType | None:
    """Import a C module by its full name; None if it was not compiled, from older sources, or is disabled."""
    if os.environ.get(SWITCH) == "0":
        return None
    try:
        module = import_module(name)
    except ImportError:
        return None
    return module if name not in VERSIONS or getattr(module, "VERSION", None) == VERSIONS[name] else None


def address(x: NDArray[Any]) -> int:
    """Return the address of the first element of an array.

    Raises:
        ValueError: the array is not C-contiguous.
    """
    if not x.flags.c_contiguous:
        raise ValueError("an array for the compiled loops must be contiguous")
    place: int = x.__array_interface__["data"][0]
    return place

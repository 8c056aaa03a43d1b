"""Weight rounding methods: nearest, GPTQ, AdaRound, AdaQuant.

To add a method: a module in this package and an entry in `ROUNDERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sbonnx import plugins
from sbonnx.errors import RecipeError
from sbonnx.plugins.registry import Registry, subclass_of
from sbonnx.rounding.adaquant import AdaQuant
from sbonnx.rounding.adaround import AdaRound
from sbonnx.rounding.base import Grid, Nearest, Rounded, Rounder
from sbonnx.rounding.gptq import Gptq

ROUNDERS: Final[Registry[type[Rounder]]] = Registry(
    plugins.ROUNDINGS,
    subclass_of(Rounder, "sbonnx.rounding.Rounder"),
    {
        "nearest": Nearest,
        "adaround": AdaRound,
        "adaquant": AdaQuant,
        "gptq": Gptq,
    },
)
"""Every rounding by its recipe name, those of installed packages included."""


def make_rounder(name: str, arguments: Mapping[str, Any]) -> Rounder:
    """Create the rounding method called `name`.

    Raises:
        RecipeError: there is no method of that name.
    """
    if name not in ROUNDERS:
        raise RecipeError(f"there is no rounding '{name}': there are {', '.join(sorted(ROUNDERS))}")
    return ROUNDERS[name](**arguments)


__all__ = ["ROUNDERS", "Grid", "Rounded", "Rounder", "make_rounder"]

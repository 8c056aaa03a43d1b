"""Observers: each derives the range to represent from a sketch of a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sbonnx import plugins
from sbonnx.calib.observers.aciq import Aciq
from sbonnx.calib.observers.auto import Auto
from sbonnx.calib.observers.base import Observer
from sbonnx.calib.observers.kl_histogram import KlHistogram
from sbonnx.calib.observers.minmax import MinMax
from sbonnx.calib.observers.moving_average import MovingAverage
from sbonnx.calib.observers.mse import Mse
from sbonnx.calib.observers.percentile import Percentile
from sbonnx.calib.observers.quantization_error import quantization_error
from sbonnx.errors import RecipeError
from sbonnx.plugins.registry import Registry, subclass_of

_BUILT_IN: Final[dict[str, type[Observer]]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
    "percentile": Percentile,
    "mse": Mse,
    "kl_histogram": KlHistogram,
    "aciq": Aciq,
    "auto": Auto,
}
"""To add one, add a file here and a row."""

OBSERVERS: Final[Registry[type[Observer]]] = Registry(
    plugins.OBSERVERS, subclass_of(Observer, "sbonnx.calib.observers.Observer"), _BUILT_IN
)
"""Every observer by its recipe name, those of installed packages included."""


def make_observer(name: str, arguments: Mapping[str, Any] | None = None) -> Observer:
    """Create the observer with this name.

    Raises:
        RecipeError: no such observer, or an invalid argument.
    """
    kind = OBSERVERS.get(name)
    if kind is None:
        raise RecipeError(f"there is no observer '{name}'; there are {', '.join(OBSERVERS)}")
    try:
        return kind(**dict(arguments or {}))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"observer '{name}': {error}") from error


__all__ = [
    "OBSERVERS",
    "Aciq",
    "Auto",
    "KlHistogram",
    "MinMax",
    "MovingAverage",
    "Mse",
    "Observer",
    "Percentile",
    "make_observer",
    "quantization_error",
]

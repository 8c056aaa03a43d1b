"""Observers: each sees a tensor batch by batch and says which range to represent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sbonnx.calib.observers.base import Observer
from sbonnx.calib.observers.minmax import MinMax
from sbonnx.calib.observers.moving_average import MovingAverage
from sbonnx.errors import RecipeError

OBSERVERS: Final[dict[str, type[Observer]]] = {
    "minmax": MinMax,
    "moving_average": MovingAverage,
}
"""Every observer by its recipe name. To add one: a file here and a row."""


def make_observer(name: str, axis: int | None, arguments: Mapping[str, Any] | None = None) -> Observer:
    """The observer called `name`, watching channels of `axis`.

    Raises:
        RecipeError: no such observer, or an argument it does not take or allow.
    """
    kind = OBSERVERS.get(name)
    if kind is None:
        raise RecipeError(f"there is no observer '{name}'; there are {', '.join(OBSERVERS)}")
    try:
        return kind(axis=axis, **dict(arguments or {}))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"observer '{name}': {error}") from error


__all__ = ["OBSERVERS", "MinMax", "MovingAverage", "Observer", "make_observer"]

"""How weights become codes. A new rounding: a file beside these and a line in `ROUNDERS`."""

from __future__ import annotations

from typing import Final

from sbonnx.rounding.base import Rounder
from sbonnx.rounding.nearest import Nearest

ROUNDERS: Final[dict[str, Rounder]] = {
    "nearest": Nearest(),
}

__all__ = ["ROUNDERS", "Rounder"]

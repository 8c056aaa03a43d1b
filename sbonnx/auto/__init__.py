"""AUTO: a sensible stack per target and width, tried on the data and kept where it helps."""

from __future__ import annotations

from sbonnx.auto.search import Attempt, Found, search

__all__ = ["Attempt", "Found", "search"]

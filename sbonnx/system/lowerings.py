"""Rewrites of models that onnxruntime does not load; they are added by modules that know ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

lowerings: Final[list[Callable[[str | bytes], bytes | None]]] = []
"""Functions from a model, a path or serialized, to one that loads; None if they have nothing to rewrite."""

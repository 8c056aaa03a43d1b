"""Keys with two spellings: Sparsebit's, and that of sbonnx."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sbonnx.recipe.problem import Wrong, key_path
from sbonnx.recipe.resolve import overlay

TWINS: Final = (("A", "QADD", "ENABLE_QUANT"), ("QUANTIZE_INPUTS_OF", "ADD"))
"""Two spellings of one key: Sparsebit's, and that of sbonnx."""


def look_up(data: Any, path: Sequence[str]) -> Any:
    """Return the value at `path` in nested mappings, or None."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def planted(path: Sequence[str], value: Any) -> dict[str, Any]:
    """Return nested mappings with `value` at `path` and nothing else."""
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def one_spelling(data: dict[str, Any]) -> dict[str, Any]:
    """Set both spellings of ADD in `data` if one is set."""
    (first, theirs), (second, ours) = ((path, look_up(data, path)) for path in TWINS)
    if theirs is None and ours is None:
        return data
    if theirs is not None and ours is not None:
        if isinstance(theirs, bool) and isinstance(ours, bool) and theirs != ours:
            raise Wrong(f"contradicts {key_path(second)}, another spelling of it: drop one", path=first, value=theirs)
        return data
    known, missing = (theirs, second) if ours is None else (ours, first)
    return overlay(data, planted(missing, known))

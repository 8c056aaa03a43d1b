"""Keys with two spellings: the ancestor's, and ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from sbonnx.recipe.problem import Wrong, key_path
from sbonnx.recipe.resolve import overlay

TWINS: Final = (("A", "QADD", "ENABLE_QUANT"), ("QUANTIZE_INPUTS_OF", "ADD"))
"""Two spellings of one wish: the ancestor's, and ours."""


def look_up(data: Any, path: Sequence[str]) -> Any:
    """The value at `path` in nested mappings, or None."""
    for part in path:
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def planted(path: Sequence[str], value: Any) -> dict[str, Any]:
    """`value` at `path`, as nested mappings with nothing else in them."""
    for part in reversed(path):
        value = {part: value}
    return dict(value)


def one_spelling(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with both spellings of ADD set, if one is."""
    (first, theirs), (second, ours) = ((path, look_up(data, path)) for path in TWINS)
    if theirs is None and ours is None:
        return data
    if theirs is not None and ours is not None:
        if isinstance(theirs, bool) and isinstance(ours, bool) and theirs != ours:
            raise Wrong(f"contradicts {key_path(second)}, another spelling of it: drop one", path=first, value=theirs)
        return data
    known, missing = (theirs, second) if ours is None else (ours, first)
    return overlay(data, planted(missing, known))

"""Recognition of recipes written for Sparsebit, and where the defaults they get differ from its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

from sbonnx.backends import BACKENDS
from sbonnx.recipe.defaults import SPARSEBIT, TWINS, value_at
from sbonnx.recipe.documentation import maker_by_key
from sbonnx.recipe.problem import key_path
from sbonnx.recipe.schema import Recipe, key_paths
from sbonnx.report.codes import Note

REQUIRED: Final = frozenset({"W.QSCHEME", "W.QUANTIZER.BIT", "A.QSCHEME", "A.QUANTIZER.BIT"})
"""Keys without a default in Sparsebit: each of its configurations sets them."""


def is_for_sparsebit(recipe: Recipe) -> bool:
    """Whether a recipe was written for Sparsebit: its source sets all `REQUIRED` keys, and none that Sparsebit lacks.

    Keywords and flags do not count.
    """
    makers = maker_by_key()
    written = {key for key in recipe.decided & makers.keys() if key.lower() not in recipe.origin.overridden}
    return written >= REQUIRED and all(makers[key] == "ancestor" for key in written)


def _others(recipe: Recipe) -> Iterator[str]:
    """Yield ``KEY: value`` for each key that the recipe leaves at a default other than Sparsebit's."""
    resolved = recipe.to_dict()
    backend, idle = BACKENDS[recipe.backend], {key_path(TWINS[1])}  # keys without effect
    idle |= {"KERNEL_COSTS"} if backend.costs is None else set()
    idle |= set() if backend.numbers.saturates else {"REDUCE_RANGE"}
    for key in sorted(key_paths(SPARSEBIT) - recipe.decided - idle):
        ours, theirs = (value_at(values, key.split(".")) for values in (resolved, SPARSEBIT))
        if ours != theirs and not isinstance(theirs, dict):
            yield f"{key}: {theirs if isinstance(theirs, str) else json.dumps(theirs)}"


def empty_file(recipe: Recipe) -> Note | None:
    """Return a note if the recipe is a file that sets no key, so that all values are those of a run without it."""
    if not recipe.origin.name or recipe.origin.lines:
        return None
    return Note(
        "empty-recipe", f"{recipe.origin.name} sets no key: all keys have their defaults (sbonnx recipe lists them)"
    )


def other_defaults(recipe: Recipe) -> Note | None:
    """Return a note with Sparsebit's defaults that differ from those that a recipe written for it gets here.

    None: nothing differs, or the recipe was not written for Sparsebit.
    """
    others = ", ".join(_others(recipe)) if is_for_sparsebit(recipe) else ""
    if not others:
        return None
    name = recipe.origin.name or "the recipe"
    return Note(
        "other-defaults",
        f"keys that {name} does not set have the defaults of sbonnx; 'DEFAULTS: sparsebit' gives {others}",
    )

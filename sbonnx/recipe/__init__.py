"""Recipes: the user's settings, from YAML, dict, keywords or flags, as one validated and frozen `Recipe`.

`docs/recipe.md` has the table of all keys. The names are loaded on first use: `sections` and `names` need no other
package, and the help of the command line is made from them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sbonnx.recipe.ancestor import empty_file, other_defaults
    from sbonnx.recipe.backend_limits import limits_table
    from sbonnx.recipe.documentation import annotated_default, as_yaml, json_schema, key_facts, table
    from sbonnx.recipe.loading import AUTO, backend_of, load, parse_qconfig, parse_sconfig, update_config
    from sbonnx.recipe.resolve import TensorSettings
    from sbonnx.recipe.schema import Recipe

__all__ = [
    "AUTO",
    "Recipe",
    "TensorSettings",
    "annotated_default",
    "as_yaml",
    "backend_of",
    "empty_file",
    "json_schema",
    "key_facts",
    "limits_table",
    "load",
    "other_defaults",
    "parse_qconfig",
    "parse_sconfig",
    "table",
    "update_config",
]

_HOMES: Final = {
    "ancestor": ("empty_file", "other_defaults"),
    "backend_limits": ("limits_table",),
    "documentation": ("annotated_default", "as_yaml", "json_schema", "key_facts", "table"),
    "loading": ("AUTO", "backend_of", "load", "parse_qconfig", "parse_sconfig", "update_config"),
    "resolve": ("TensorSettings",),
    "schema": ("Recipe",),
}
"""Names by module."""


if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> Any:
        for module, names in _HOMES.items():
            if name in names:
                globals()[name] = value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
                return value
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")

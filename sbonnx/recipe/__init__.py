"""Recipes: the user's settings, from YAML, dict, keywords or flags, as one validated and frozen `Recipe`.

Floor 1. `docs/recipe.md` has the table of all keys.
"""

from __future__ import annotations

from sbonnx.recipe.ancestor import other_defaults
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

"""Documentation of the recipe: table of keys, annotated default, JSON schema for editors."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any, Final

import yaml

from sbonnx.backends import BACKENDS
from sbonnx.recipe import yaml_text
from sbonnx.recipe.backend_limits import allowed_text, default_text
from sbonnx.recipe.loading import load
from sbonnx.recipe.schema import Recipe
from sbonnx.recipe.sections.base import KeyRow, Section, children, keys_of, schema_of
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS

_WIDTH: Final = 110

_HEAD: Final = """\
# A recipe for the backend {backend}: every key with its default. Keep the lines you change, drop the rest;
# a key that is absent or empty keeps its default. Keys and names may be in any case.
#
# Patterns: conv* (nodes by name, wildcards), op:Conv (by operator type), re:REGEX (the whole node name),
# tensor:NAME (tensors by name), after:NODE, before:NODE, between:FIRST..LAST (nodes by data flow), stem, head, tail
# (regions). Names are those of the model as it was given.
"""

_TYPES: Final = {"boolean": "true/false", "integer": "whole number", "number": "number", "string": "text"}


def _type(schema: dict[str, Any]) -> str:
    kind = schema.get("type")
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    if kind == "array":
        return "list"
    if kind == "object":
        return "mapping"
    inner = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    return "list" if any(item.get("type") == "array" for item in inner) else _type(inner[0]) if inner else "text"


def _keys(section: type[Section], prefix: str = "") -> Iterator[tuple[str, KeyRow]]:
    """Yield every key that is not a section, in the order of the schema."""
    for name, row in keys_of(section).items():
        path = f"{prefix}{name}"
        if row.is_section:
            yield from _keys(row.kind, f"{path}.")
        else:
            yield path, row


def maker_by_key() -> dict[str, str]:
    """Return who introduced each key that is not a section: "ancestor" (Sparsebit) or "new"."""
    return {path: row.key.maker for path, row in _keys(Recipe)}


def _default(path: str, row: KeyRow) -> str:
    value = row.key.default
    if isinstance(value, tuple | dict) and not value:
        return "none"
    return default_text(path, row.key.shown or (value if isinstance(value, str) else json.dumps(value)))


def _allowed(path: str, row: KeyRow) -> str:
    return allowed_text(path, row.key.allowed)


def _find(schema: dict[str, Any], key: str) -> dict[str, Any]:
    part = schema
    for name in key.split("."):
        part = part["properties"][name]
        reference = part.get("$ref") or next((item["$ref"] for item in part.get("anyOf", ()) if "$ref" in item), None)
        if reference:
            part = schema["$defs"][reference.rsplit("/", 1)[1]]
            part = next((item for item in part.get("anyOf", ()) if "properties" in item), part)
    return part


def table() -> str:
    """Format the keys as a Markdown table, as in docs/recipe.md."""
    schema = json_schema()
    lines = ["| key | type | default | allowed | meaning | origin |", "|---|---|---|---|---|---|"]
    for path, row in _keys(Recipe):
        kind, text = _type(_find(schema, path)), row.key
        cells = (f"`{path}`", kind, _default(path, row), _allowed(path, row), text.meaning, text.maker)
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def key_facts(name: str) -> dict[str, Any] | None:
    """Return what a key or section of the recipe means, as plain values; None if there is no such key.

    Args:
        name: key path in any case, or a short form.
    """
    path = SHORT_FORMS.get(name.lower(), name).upper()
    keys = [key for key in KEYS if key == path or key.startswith(f"{path}.")]
    if path not in keys:
        return None
    section: type[Section] = Recipe
    *outer, last = path.split(".")
    for part in outer:
        section = children(section)[part]
    forms = [form for form, key in SHORT_FORMS.items() if key == path]
    if last in children(section):
        return {"key": path, "short_forms": forms, "keys": keys[1:]}
    row = keys_of(section)[last]
    return {
        "key": path,
        "short_forms": forms,
        "description": row.key.meaning,
        "values": _allowed(path, row),
        "default": _default(path, row),
        "example": row.key.example,
    }


def annotated_default(backend: str) -> str:
    """Return the default recipe as YAML with a comment on every key.

    Raises:
        RecipeError: no such backend.
    """
    recipe = load(None, backend=backend)
    lines = [_HEAD.format(backend=recipe.backend), *_annotated(Recipe, recipe.to_dict(), "", "")]
    return "\n".join(lines) + "\n"


def as_yaml(recipe: Recipe) -> str:
    """Format the resolved recipe as YAML that `load` reads back to an equal recipe."""
    return yaml_text.dump(recipe.to_dict())


def _annotated(section: type[Section], data: dict[str, Any], prefix: str, indent: str) -> Iterator[str]:
    for name, row in keys_of(section).items():
        path = f"{prefix}{name}"
        if row.is_section:
            yield f"{indent}{name}:"
            yield from _annotated(row.kind, data.get(name, {}), f"{path}.", f"{indent}  ")
            continue
        comment = f"{row.key.meaning} ({_allowed(path, row)})"
        yield from textwrap.wrap(
            comment, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}#   ", break_long_words=False
        )
        yield f"{indent}{_line(name, path, data.get(name), row)}"


def _line(name: str, path: str, value: Any, row: KeyRow) -> str:
    """Format ``KEY: value``, commented out if there is no value."""
    if value is None:
        example = row.key.example or ("8" if "_BITS" in path else "true")
        return f"# {name}: {example}  # default: {_default(path, row)}"
    written = yaml.safe_dump(value, default_flow_style=True, width=_WIDTH).splitlines()[0]
    return f"{name}: {written}" + (f"  # such as {row.key.example}" if not value and row.key.example else "")


_PAIRS: Final = {"type": "array", "description": "the ancestor's form: [KEY, value, KEY, value, ...]"}
_WIDTHS: Final = [{"type": "integer"}, {"type": "string", "pattern": "^[wW][0-9]+([aA][0-9]+)?$|^[0-9]+$"}]


def json_schema() -> dict[str, Any]:
    """Return a JSON schema (2020-12) of the recipe file, for editors: keys in upper case, names with explanations.

    It is stricter on spelling than `load` (no dotted or lower-case keys at the top), and does not include the limits of
    single backends.
    """
    schema = schema_of(Recipe)
    definitions: dict[str, Any] = schema["$defs"]
    entries = definitions["Sparse"]["properties"]["SPECIFIC"]
    entries["anyOf"] = [{"type": entries.pop("type"), "items": entries["items"]}, entries.pop("items")]
    definitions["SparseChange"] = {"anyOf": [definitions["SparseChange"], _PAIRS]}
    for name in ("WeightChange", "ActivationChange"):
        mapping = definitions[name]
        dotted = {"^(QUANTIZER|OBSERVER)\\.[A-Z_.]+$": {"type": ["string", "number", "boolean"]}}
        definitions[name] = {"anyOf": [mapping | {"patternProperties": dotted}, _PAIRS]}
    definitions["SideBits"] = {"anyOf": [definitions["SideBits"], *_WIDTHS]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "sbonnx recipe",
        "description": f"How to quantize a model, for the backends {', '.join(BACKENDS)}.",
    }

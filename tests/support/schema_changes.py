"""Comparison of two JSON schemas of outputs: what breaks the readers of the old one.

The rules are those of docs/stability.md: keys may be added, and so may values of an enumeration. A key that is removed,
is no longer always there, or has another type needs a new version.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]


def breaking_changes(old: Schema, new: Schema) -> list[str]:
    """Return what a new schema takes away from the readers of an old one: path and change, one line each."""
    return list(_Comparison(old, new).changes(old, new, "$", frozenset()))


def without_texts(schema: Any) -> Any:
    """Return a schema without titles and descriptions, which promise nothing."""
    if isinstance(schema, list):
        return [without_texts(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("properties"), schema.get("$defs")  # keys in them are names, such as a key `description`
    return {
        key: {name: without_texts(item) for name, item in value.items()}
        if any(value is one for one in named)
        else without_texts(value)
        for key, value in schema.items()
        if key not in ("title", "description")
    }


class _Comparison:
    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new

    def changes(self, old: Schema, new: Schema, path: str, open_refs: frozenset[tuple[Any, Any]]) -> Iterator[str]:
        """Yield the changes below a path.

        Args:
            open_refs: references whose definitions are being compared, since definitions may be recursive.
        """
        refs = old.get("$ref"), new.get("$ref")
        if refs in open_refs:
            return
        if any(refs):
            open_refs |= {refs}
        before, after = _branches(old, self._old), _branches(new, self._new)
        if not before:  # any value
            return
        if not after:
            yield f"{path}: any value, was {_kinds(before)}"
        for branch in after:
            same = [one for one in before if _kind(one) == _kind(branch) or (_kind(one), _kind(branch)) == NUMBERS]
            found = [list(self._inside(one, branch, path, open_refs)) for one in same]
            if not found:
                yield f"{path}: may be {_kind(branch)}, was {_kinds(before)}"
            elif all(found):
                yield from min(found, key=len)

    def _inside(self, old: Schema, new: Schema, path: str, open_refs: frozenset[tuple[Any, Any]]) -> Iterator[str]:
        """Yield the changes of the keys and items of two schemas of one type."""
        keys, now = old.get("properties", {}), new.get("properties", {})
        for key, value in keys.items():
            if key not in now:
                yield f"{path}.{key}: removed"
                continue
            if key in old.get("required", ()) and key not in new.get("required", ()):
                yield f"{path}.{key}: not always there any more"
            yield from self.changes(value, now[key], f"{path}.{key}", open_refs)
        for part, name in (("items", "[]"), ("additionalProperties", ".*")):
            if isinstance(old.get(part), dict) and not now and new.get(part) is not False:
                yield from self.changes(old[part], new.get(part) or {}, f"{path}{name}", open_refs)
        places, here = old.get("prefixItems", ()), new.get("prefixItems", ())
        if len(places) != len(here):
            yield f"{path}: has {len(here)} items, had {len(places)}"
        for index, (one, other) in enumerate(zip(places, here, strict=False)):
            yield from self.changes(one, other, f"{path}[{index}]", open_refs)


NUMBERS = ("number", "integer")
"""An integer is a number: the first may become the second."""


def _branches(schema: Schema, root: Schema) -> list[Schema]:
    """Return the alternatives of a schema, each of one type; none if it allows every value."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _branches(root["$defs"][name], root)
    if "anyOf" in schema:
        return [branch for one in schema["anyOf"] for branch in _branches(one, root)]
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return [{"type": kind} for kind in dict.fromkeys(_type_of(value) for value in values)]
    kinds = schema.get("type", [])
    return [{**schema, "type": kind} for kind in ([kinds] if isinstance(kinds, str) else kinds)]


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return names[type(value)]


def _kind(schema: Schema) -> str:
    return str(schema["type"])


def _kinds(branches: list[Schema]) -> str:
    return " or ".join(dict.fromkeys(map(_kind, branches)))

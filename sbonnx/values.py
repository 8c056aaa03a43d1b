"""Results as plain values: a result has one description, its class, of which `sbonnx.cli.schemas` derives the schema.

The keys of a dataclass in JSON are its fields, in their order. The class variable ``json_keys`` gives another order,
and adds properties: ``("ok", ..., "text")`` is the property `ok`, then the fields that are not named, then `text`;
without ``...``, the other fields are left out. Metadata of a field says what differs: `INTERNAL`, `OPTIONAL`, `OBJECT`,
`INLINE`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

Form = Literal["field", "property", "optional", "object", "inline"]
"""Form of a key in JSON."""

INTERNAL: Final = MappingProxyType({"json": "internal"})
"""Metadata of a field that is not in JSON. Such a field has a default."""

OPTIONAL: Final = MappingProxyType({"json": "optional"})
"""Metadata of a field whose key is left out if it is None."""

OBJECT: Final = MappingProxyType({"json": "object"})
"""Metadata of a field that is an object without keys if it is None."""

INLINE: Final = MappingProxyType({"json": "inline"})
"""Metadata of a field whose keys are keys of the result itself; none if it is None."""


class Key(NamedTuple):
    """A key in JSON: the name of the field or property, and its form."""

    name: str
    form: Form


@cache
def keys_of(kind: type) -> tuple[Key, ...]:
    """Return the keys of a class in JSON, in order."""
    forms: dict[str, Form] = {
        row.name: row.metadata.get("json", "field")
        for row in dataclasses.fields(kind)
        if row.metadata.get("json") != "internal"
    }
    order: Sequence[Any] = getattr(kind, "json_keys", (...,))
    others = [name for name in forms if name not in order]
    names = [name for entry in order for name in (others if entry is ... else [entry])]
    return tuple(Key(name, forms.get(name, "property")) for name in names)


class JsonValue:
    """Result that is converted to plain values by its keys."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        return dict(_items(self))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    kind: type = type(value)
    for name, form in keys_of(kind):
        item = getattr(value, name)
        if item is None and form in ("optional", "inline"):
            continue
        if form == "inline":
            yield from _items(item)
        else:
            yield name, {} if item is None and form == "object" else plain(item)


def plain(value: Any) -> Any:
    """Convert dataclasses in a value to dictionaries by key; other values stay as they are."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_items(value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value)) if type(value) in (list, tuple) else tuple(map(plain, value))
    return value


def json_values(value: Any) -> Any:
    """Convert a value to JSON types; non-finite numbers become the strings "inf", "-inf" or "nan"."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): json_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [json_values(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: json_values(item) for name, item in _items(value)}
    return json_values(value.tolist()) if hasattr(value, "tolist") else str(value)  # NumPy, without importing it


__all__ = ["INLINE", "INTERNAL", "OBJECT", "OPTIONAL", "JsonValue", "json_values", "keys_of", "plain"]

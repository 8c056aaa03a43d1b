"""Results as plain values: the keys of their JSON objects, of which `sbonnx.cli.schemas` derives the JSON schemas."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import EllipsisType
from typing import Any, ClassVar, Final


@dataclass(frozen=True)
class Keys:
    """Keys of the JSON object of a dataclass: its fields, in order, unless said otherwise.

    Attributes:
        names: fields and properties; ``...`` stands for all fields that are not named.
        without: fields left out.
        optional: keys left out if their value is None.
        empty: keys whose value is an object without keys if it is None.
        flat: fields whose keys replace their own, none if it is None.
    """

    names: tuple[str | EllipsisType, ...] = (...,)
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    empty: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()


FIELDS: Final = Keys()


class JsonObject:
    """Base of dataclasses that are written as JSON objects with other keys than their fields, or by `to_dict`."""

    KEYS: ClassVar[Keys] = FIELDS

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        return dict(_items(self))


def keys_of(kind: type) -> Keys:
    """Return the keys of a dataclass."""
    return kind.KEYS if issubclass(kind, JsonObject) else FIELDS


@cache
def key_names(kind: type) -> tuple[str, ...]:
    """Return the keys of a dataclass in order, with those of `Keys.flat` as they are."""
    keys = keys_of(kind)
    others = [field.name for field in fields(kind) if field.name not in (*keys.names, *keys.without)]
    return tuple(name for key in keys.names for name in ([key] if isinstance(key, str) else others))


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a dataclass with their plain values."""
    kind: type = type(value)
    keys = keys_of(kind)
    for name in key_names(kind):
        item = getattr(value, name)
        if name in keys.flat:
            yield from () if item is None else _items(item)
        elif item is not None or name not in keys.optional:
            yield name, {} if item is None and name in keys.empty else plain(item)


def plain(value: Any) -> Any:
    """Return a value with all dataclasses in it as dictionaries, by their `Keys`."""
    if is_dataclass(value) and not isinstance(value, type):
        return dict(_items(value))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(plain, value)
        return list(items) if isinstance(value, list) else tuple(items)
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
    if is_dataclass(value) and not isinstance(value, type):
        return {name: json_values(item) for name, item in _items(value)}
    return json_values(value.tolist()) if hasattr(value, "tolist") else str(value)  # NumPy, without importing it


__all__ = ["JsonObject", "Keys", "json_values", "key_names", "keys_of", "plain"]

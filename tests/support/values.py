"""Values of results for tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from sbonnx.report.comparison import Comparison
from sbonnx.report.reading import read

Value = TypeVar("Value")

EMPTY: dict[Any, Any] = {str: "", int: 0, float: 0.0, bool: False, tuple: (), dict: {}, Mapping: {}}


def some(value: Value | None) -> Value:
    """Return a value that is not None."""
    assert value is not None
    return value


def built(kind: type[Value], values: Any) -> Value:
    """Return a result of which only some values are given; others are empty."""
    return read(kind, _filled(kind, values))


def compared(values: Mapping[str, Any]) -> Comparison:
    """Return a comparison of which only some values are given, the size ratio among them."""
    ratio = values.get("size_ratio")
    sizes = {} if ratio is None else {"bytes_float": 1_000_000, "bytes_quantized": round(1_000_000 * ratio)}
    return built(Comparison, {**sizes, **values})


def _filled(hint: Any, value: Any) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        classes = [arg for arg in args if dataclasses.is_dataclass(arg) or get_origin(arg) is tuple]
        return _filled(classes[0], value) if classes and value else value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        hints = get_type_hints(hint)
        rows = [row for row in dataclasses.fields(hint) if row.init]
        given = {row.name: _filled(hints[row.name], value[row.name]) for row in rows if row.name in value}
        needed = {
            row.name: _empty(hints[row.name])
            for row in rows
            if row.name not in value
            and row.default is row.default_factory is dataclasses.MISSING
            and row.metadata.get("json") != "inline"
        }
        return {**value, **needed, **given}
    if origin is tuple and args[-1] is ...:
        return tuple(_filled(args[0], item) for item in value)
    if origin in (dict, Mapping):
        return {key: _filled(args[1], item) for key, item in value.items()}
    return value


def _empty(hint: Any) -> Any:
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        return None if type(None) in args else _empty(args[0])
    if origin is Literal:
        return args[0]
    return _filled(hint, {}) if dataclasses.is_dataclass(hint) else EMPTY.get(origin, "")

"""Results from JSON: dataclasses rebuilt from the plain values that `sbonnx.values` wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from sbonnx.report.codes import Coded
from sbonnx.values import keys_of

NOT_FINITE: Final = ("inf", "-inf", "nan")
"""Numbers that are texts in JSON."""

Result = TypeVar("Result")


def read(kind: type[Result], values: Any) -> Result:
    """Rebuild a result from its plain values, also after a round trip through JSON.

    Keys that the class does not have are left out, and fields without a key have their defaults. Sentences whose codes
    are not given are codes themselves; metadata "codes" of their field is the key of the codes.

    Raises:
        ValueError: a key without default is missing, or a value does not fit; the message names it.
    """
    result: Result = _read(kind, values, kind.__name__)
    return result


def _read(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _read_union(args, value, where)
    if dataclasses.is_dataclass(hint):
        if isinstance(hint, type) and isinstance(value, hint):
            return value
        return hint(**dict(_arguments(hint, _of(value, Mapping, where), where)))  # type: ignore[operator]
    if origin is tuple:
        items = _of(value, (list, tuple), where)
        hints = [args[0]] * len(items) if args[-1] is ... else args
        if len(hints) != len(items):
            raise ValueError(f"{where} has {len(items)} values, and {len(hints)} belong there")
        return tuple(_read(*pair, f"{where}[{index}]") for index, pair in enumerate(zip(hints, items, strict=True)))
    if origin in (dict, Mapping):
        return {key: _read(args[1], item, f"{where}.{key}") for key, item in _of(value, Mapping, where).items()}
    return _read_scalar(hint, value, where)


def _read_scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any or not isinstance(hint, type):
        return value  # Any, Literal
    if issubclass(hint, Coded):
        return hint(value.code if isinstance(value, Coded) else value, value)
    if hint is float and (isinstance(value, (int, float)) or value in NOT_FINITE):
        return float(value)
    return _of(value, hint, where)


def _read_union(hints: Sequence[Any], value: Any, where: str) -> Any:
    if value is None:
        return None
    options = [hint for hint in hints if hint is not type(None)]
    classes: list[Any] = [hint for hint in options if dataclasses.is_dataclass(hint)]
    if classes and isinstance(value, Mapping):
        fitting = [hint for hint in classes if value.keys() <= {key.name for key in keys_of(hint)}]
        closest = min(fitting or classes[:1], key=lambda hint: len(keys_of(hint)))
        return _read(closest, value, where)
    if float in options and (type(value) is int or value in NOT_FINITE):
        return value if type(value) is int else float(value)
    return _read(next((hint for hint in options if hint is type(value)), options[0]), value, where)


def _arguments(kind: Any, values: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a class by name."""
    hints = _hints(kind)
    for row in dataclasses.fields(kind):
        name, form, place = row.name, row.metadata.get("json"), f"{where}.{row.name}"
        if not row.init or form == "internal":
            continue
        if form == "inline":
            (inner,) = (hint for hint in get_args(hints[name]) or (hints[name],) if hint is not type(None))
            if {key.name for key in keys_of(inner)} & values.keys():
                yield name, _read(inner, values, place)
        elif name in values and (values[name] or form != "object"):
            codes = values.get(row.metadata.get("codes", ""))
            yield name, _read(hints[name], _coded(values[name], codes) if codes else values[name], place)
        elif row.default is dataclasses.MISSING and row.default_factory is dataclasses.MISSING:
            raise ValueError(f"{place} is missing")


def _coded(value: Any, codes: Any) -> Any:
    """Return a sentence with its code, or sentences with theirs; further ones stay without."""
    if isinstance(value, str):
        return Coded(codes, value)
    return [*map(Coded, codes, value), *value[len(codes) :]]


def _of(value: Any, kinds: Any, where: str) -> Any:
    if not isinstance(value, kinds):
        raise ValueError(f"{where} is {value!r:.60}")
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)

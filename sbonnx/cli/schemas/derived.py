"""JSON schemas of dataclasses: a property for each key of their JSON objects, described by their docstrings.

Fields are numbers, texts, literals, sequences, tuples, mappings, dataclasses, and unions of them. Classes derived from
str, and paths, are texts.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Collection, Iterator, Mapping
from dataclasses import is_dataclass
from os import PathLike
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from sbonnx.values import keys_of

Schema = dict[str, Any]

NOT_FINITE: Final = ("inf", "-inf", "nan")
"""Numbers that are not finite are these strings in JSON."""

SIMPLE: Final[Mapping[Any, Schema]] = {
    Any: {},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]},
    type(None): {"type": "null"},
}

NOTHING: Final[Schema] = {
    "description": "An object without keys, where there is no result.",
    "properties": {},
    "type": "object",
    "additionalProperties": False,
}

ATTRIBUTE: Final = re.compile(r"    (\w[\w, ]*): (.*(?:\n {8,}.*)*)")
"""An entry of the section *Attributes* of a docstring: names, text."""


class Derivation:
    """Schemas of types.

    Attributes:
        definitions: schemas of the dataclasses that they contain, by name.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._classes: dict[str, type] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type; dataclasses are references to `definitions`."""
        origin, arguments = get_origin(kind) or kind, get_args(kind)
        if kind in SIMPLE:
            return dict(SIMPLE[kind])
        if origin is Literal:
            return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
        if origin in (Union, types.UnionType):
            return _any_of([self.of(argument) for argument in arguments])
        if isinstance(origin, type) and is_dataclass(origin):
            return self._reference(origin)
        if issubclass(origin, (str, PathLike)):
            return {"type": "string"}
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1]) or True}
        if issubclass(origin, tuple) and arguments[-1] is not Ellipsis:
            count = len(arguments)
            items = [self.of(argument) for argument in arguments]
            return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}
        if issubclass(origin, Collection):
            return {"type": "array", "items": self.of(arguments[0])}
        raise TypeError(f"no JSON schema for {kind}")

    def _reference(self, kind: type) -> Schema:
        name = kind.__name__
        if self._classes.setdefault(name, kind) is not kind:
            raise TypeError(f"two classes '{name}' in one JSON schema: {kind.__module__}, {self._classes[name]}")
        if name not in self.definitions:
            self.definitions[name] = {}  # its own fields may refer to it
            self.definitions[name] = self.object(kind)
        return {"$ref": f"#/$defs/{name}"}

    def object(self, kind: type) -> Schema:
        """Return the schema of a dataclass itself."""
        rows = list(self._keys(kind))
        return {
            "description": " ".join(_documentation(kind)[0].split()),
            "type": "object",
            "properties": {name: schema for name, schema, _ in rows},
            "required": [name for name, _, required in rows if required],
        }

    def _keys(self, kind: type) -> Iterator[tuple[str, Schema, bool]]:
        """Yield name and schema of each key, and whether it is always there."""
        texts = dict(_descriptions(kind))
        hints = get_type_hints(kind)
        for name, form in keys_of(kind):
            hint = get_type_hints(getattr(kind, name).fget)["return"] if form == "property" else hints[name]
            branches = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
            some = [branch for branch in branches if branch is not type(None)]
            if form == "inline":
                for key, schema, always in self._inline(some, always=len(some) == len(branches)):
                    yield key, {**schema, **texts.get(key, {})}, always
                continue
            schemas = [self.of(branch) for branch in (some if form in ("optional", "object") else branches)]
            if form == "object":
                self.definitions["Nothing"] = NOTHING
                schemas.append({"$ref": "#/$defs/Nothing"})
            yield name, {**_any_of(schemas), **texts.get(name, {})}, form != "optional"

    def _inline(self, kinds: list[Any], *, always: bool) -> Iterator[tuple[str, Schema, bool]]:
        """Yield the keys of one of several dataclasses; those that not all have are optional."""
        rows = [row for kind in kinds for row in self._keys(kind)]
        for name in dict.fromkeys(row[0] for row in rows):
            same = [row for row in rows if row[0] == name]
            schema = same[0][1]
            if len(same) > 1:  # with other descriptions
                schema = _any_of(
                    [{key: value for key, value in row[1].items() if key != "description"} for row in same]
                )
            yield name, schema, always and len(same) == len(kinds) and all(row[2] for row in same)


def _any_of(schemas: list[Schema]) -> Schema:
    """Return the schema of a union, without repetitions and nested unions."""
    flat: list[Schema] = []
    for schema in schemas:
        branches = schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]
        flat += [branch for branch in branches if branch not in flat]
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def _documentation(kind: type) -> tuple[str, str]:
    """Split the docstring of a class from its attributes, those of the classes that it extends first."""
    text, _, attributes = (inspect.getdoc(kind) or "").partition("\nAttributes:\n")
    bases = (_documentation(base)[1] for base in kind.__bases__ if is_dataclass(base))
    return text, "\n".join([*bases, attributes])


def _descriptions(kind: type) -> Iterator[tuple[str, Schema]]:
    """Yield the descriptions of keys: of properties their docstrings, unless they are among the attributes."""
    for name, value in inspect.getmembers(kind, lambda member: isinstance(member, property)):
        if value.__doc__:
            yield name, _description(value.__doc__.partition("\n\n")[0])
    for names, text in ATTRIBUTE.findall(_documentation(kind)[1]):
        for name in names.split(", "):
            yield name, _description(text)


def _description(text: str) -> Schema:
    """Return a description: one line, with the values of JSON."""
    return {"description": re.sub(r"\bNone\b", "null", " ".join(text.split()))}

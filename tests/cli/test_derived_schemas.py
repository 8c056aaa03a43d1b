"""JSON schemas follow the classes of results, and what is written fits them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from jsonschema import Draft202012Validator

from sbonnx.cli.schemas.derived import Derivation
from sbonnx.report import Note
from sbonnx.values import INLINE, INTERNAL, OBJECT, OPTIONAL, JsonValue, json_values
from tests.support.json_schemas import closed

NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}


@dataclass(frozen=True)
class First:
    """One of two values.

    Attributes:
        error: its error; None if unknown.
        name: of the first.
    """

    error: float | None
    name: str


@dataclass(frozen=True)
class Second:
    """The other value."""

    error: float
    rank: int


@dataclass(frozen=True)
class Tree(JsonValue):
    """Each form of a key.

    Attributes:
        children: trees below it.
        notes, path: texts.
        error: of the inline value.
    """

    json_keys: ClassVar = ("depth", ...)

    children: tuple[Tree, ...] = ()
    notes: tuple[Note, ...] = ()
    path: Path | None = None
    pair: tuple[int, float] = (0, math.inf)
    kind: Literal["a", "b"] = "a"
    counts: Mapping[str, int] = field(default_factory=dict)
    any: Any = None
    value: First | Second = field(default=Second(1.0, 2), metadata=INLINE)
    empty: First | None = field(default=None, metadata=OBJECT)
    command: str | None = field(default=None, metadata=OPTIONAL)
    source: object = field(default=None, metadata=INTERNAL)

    @property
    def depth(self) -> int:
        """Number of levels.

        Not in the schema.
        """
        return 1 + max((child.depth for child in self.children), default=0)


def test_keys_types_and_descriptions() -> None:
    derivation = Derivation()
    schema = derivation.object(Tree)
    keys = schema["properties"]
    assert list(keys) == [
        *("depth", "children", "notes", "path", "pair", "kind", "counts", "any", "error", "name", "rank", "empty"),
        "command",
    ]
    assert set(keys) - set(schema["required"]) == {"name", "rank", "command"}
    assert keys["depth"] == {"type": "integer", "description": "Number of levels."}
    assert keys["children"]["items"] == {"$ref": "#/$defs/Tree"}
    assert keys["notes"] == {"type": "array", "items": {"type": "string"}, "description": "texts."}
    assert keys["path"]["anyOf"] == [{"type": "string"}, {"type": "null"}]
    assert keys["pair"] == {"type": "array", "prefixItems": [{"type": "integer"}, NUMBER], "minItems": 2, "maxItems": 2}
    assert keys["kind"] == {"enum": ["a", "b"]} and keys["any"] == {}
    assert keys["error"] == {"anyOf": [*NUMBER["anyOf"], {"type": "null"}], "description": "of the inline value."}
    assert keys["empty"]["anyOf"] == [{"$ref": "#/$defs/First"}, {"$ref": "#/$defs/Nothing"}]
    assert keys["command"] == {"type": "string"}
    first = derivation.definitions["First"]["properties"]
    assert first["error"]["description"] == "its error; null if unknown."


@pytest.mark.parametrize(
    "value",
    [
        Tree(),
        Tree((Tree(command="c"),), (Note("k", "n"),), Path("p"), value=First(None, "n"), empty=First(math.nan, "e")),
    ],
)
def test_values_fit(value: Tree) -> None:
    derivation = Derivation()
    schema = closed({**derivation.object(Tree), "$defs": derivation.definitions})
    Draft202012Validator(schema).validate(json_values(value))
    assert json_values(value.to_dict()) == json_values(value)


def test_types_without_a_schema() -> None:
    @dataclass(frozen=True)
    class Second:
        rank: int

    derivation = Derivation()
    derivation.of(globals()["Second"])
    with pytest.raises(TypeError, match="two classes 'Second' in one JSON schema"):
        derivation.of(Second)
    with pytest.raises(TypeError, match="no JSON schema for <class 'complex'>"):
        derivation.of(complex)

"""Within a version, the JSON outputs lose nothing that the last release has."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from sbonnx.cli.schemas.published import json_schema
from sbonnx.system.terminal import SCHEMA_VERSIONS
from tests.cli.released_schemas import released
from tests.support.schema_changes import breaking_changes, without_texts

OLD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "ratio": {"anyOf": [{"type": "number"}, {"enum": ["inf", "nan"]}]},
        "advice": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "state": {"enum": ["done", "failed"]},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/Row"}},
        "by_name": {"type": "object", "additionalProperties": {"type": "number"}},
        "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
        "extra": {"type": "string"},
    },
    "required": ["name", "ratio", "advice", "state", "rows", "by_name", "pair"],
    "$defs": {
        "Row": {
            "type": "object",
            "properties": {"node": {"type": "string"}, "inner": {"type": "array", "items": {"$ref": "#/$defs/Row"}}},
            "required": ["node", "inner"],
        }
    },
}

NEVER_WRITTEN = {("simplify", "$.output: may be null, was string")}
"""Changes that no output has: a simplification in memory."""

Change = Callable[[dict[str, Any], dict[str, Any], list[str]], object]
"""Changes properties, properties of the row, and required keys of `OLD`, in place."""

COMPATIBLE: dict[str, Change] = {
    "nothing": lambda keys, row, required: None,
    "an added key": lambda keys, row, required: keys.update(more={"type": "string"}),
    "an added key of a row": lambda keys, row, required: row.update(more={"type": "string"}),
    "another order": lambda keys, row, required: keys.update(name=keys.pop("name")),
    "an optional key that is always there": lambda keys, row, required: required.append("extra"),
    "null no longer": lambda keys, row, required: keys.update(advice={"type": "string"}),
    "an integer for a number": lambda keys, row, required: keys.update(ratio={"type": "integer"}),
    "a further value": lambda keys, row, required: keys["state"]["enum"].append("skipped"),
    "no keys by name": lambda keys, row, required: keys.update(
        by_name={"type": "object", "properties": {}, "additionalProperties": False}
    ),
    "a description": lambda keys, row, required: keys["name"].update(description="of the model"),
}

BREAKING: dict[str, tuple[Change, str]] = {
    "a removed key": (lambda keys, row, required: keys.pop("name"), "$.name: removed"),
    "a removed optional key": (lambda keys, row, required: keys.pop("extra"), "$.extra: removed"),
    "a renamed key of a row": (lambda keys, row, required: row.update(layer=row.pop("node")), "$.rows[].node: removed"),
    "a key that may be absent": (
        lambda keys, row, required: required.remove("advice"),
        "$.advice: not always there any more",
    ),
    "another type": (
        lambda keys, row, required: keys.update(name={"type": "array", "items": {"type": "string"}}),
        "$.name: may be array, was string",
    ),
    "a further type": (
        lambda keys, row, required: keys.update(name={"anyOf": [{"type": "string"}, {"type": "null"}]}),
        "$.name: may be null, was string",
    ),
    "another type of a row": (
        lambda keys, row, required: row.update(node={"type": "integer"}),
        "$.rows[].node: may be integer, was string",
    ),
    "another type of values": (
        lambda keys, row, required: keys.update(by_name={"type": "object", "additionalProperties": {"type": "string"}}),
        "$.by_name.*: may be string, was number",
    ),
    "any value": (lambda keys, row, required: keys.update(name={}), "$.name: any value, was string"),
    "a longer tuple": (
        lambda keys, row, required: keys["pair"]["prefixItems"].append({"type": "number"}),
        "$.pair: has 3 items, had 2",
    ),
}


def changed(change: Change) -> dict[str, Any]:
    new = copy.deepcopy(OLD)
    change(new["properties"], new["$defs"]["Row"]["properties"], new["required"])
    return new


@pytest.mark.parametrize("kind", COMPATIBLE)
def test_a_compatible_change(kind: str) -> None:
    assert breaking_changes(OLD, changed(COMPATIBLE[kind])) == []


@pytest.mark.parametrize("kind", BREAKING)
def test_a_breaking_change(kind: str) -> None:
    change, says = BREAKING[kind]
    assert breaking_changes(OLD, changed(change)) == [says]


def test_texts_are_not_compared_and_names_are_kept() -> None:
    schema = {"title": "T", "properties": {"title": {"type": "string", "description": "d"}}, "$defs": {}}
    assert without_texts(schema) == {"properties": {"title": {"type": "string"}}, "$defs": {}}


@pytest.mark.parametrize("name", released())
def test_a_released_schema(name: str) -> None:
    """A change that breaks programs needs a higher version in `SCHEMA_VERSIONS`, and a line in the changelog."""
    old, new = released()[name], json.loads(json.dumps(json_schema(name)))
    before, now = (schema["properties"]["schema_version"]["const"] for schema in (old, new))
    assert now >= before
    found = [text for text in breaking_changes(old, new) if (name, text) not in NEVER_WRITTEN]
    assert now > before or not found, f"raise SCHEMA_VERSIONS['{name}']: {'; '.join(found)}"


def test_every_released_schema_is_there() -> None:
    assert SCHEMA_VERSIONS.keys() <= released().keys()

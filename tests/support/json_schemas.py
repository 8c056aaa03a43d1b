"""Validation of JSON outputs against the published schemas, which must name every key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from sbonnx.cli.schemas.published import json_schema


def check(output: Mapping[str, Any]) -> None:
    """Validate an output, the name of whose schema is its key `schema`."""
    error = next(validator(output["schema"]).iter_errors(output), None)
    assert error is None, f"{output['schema']} at {error.json_path}: {error.message[:400]}"


@cache
def validator(name: str) -> Draft202012Validator:
    """Return the validator of a schema that also refuses keys without a description."""
    return Draft202012Validator(closed(json_schema(name)))


def closed(schema: Any) -> Any:
    """Return a schema whose objects have no other keys than those it names."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: closed(item) for key, item in schema.items()}
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        found["additionalProperties"] = False
    return found


def objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield the schemas of all objects with named keys."""
    if isinstance(schema, dict) and isinstance(schema.get("properties"), dict):
        yield schema
    for item in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from objects(item)

"""JSON schemas of the last release. `python -m tests.cli.released_schemas` stores those of this tree, at a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from sbonnx.cli.schemas.published import SCHEMAS, json_schema
from tests.support.schema_changes import without_texts

FILE: Final = Path(__file__).with_name("released_schemas.json")


def released() -> dict[str, Any]:
    """Return the stored schemas by name."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


if __name__ == "__main__":
    rows = {name: without_texts(json_schema(name)) for name in SCHEMAS}
    lines = (f"{json.dumps(name)}: {json.dumps(schema, separators=(',', ':'))}" for name, schema in rows.items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")

"""``sbonnx schema``: print the JSON schema of an output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments, CommandOption
from sbonnx.errors import RecipeError
from sbonnx.present.text.printer import Printer
from sbonnx.system.terminal import to_json

HELP: Final = "Print the JSON schema of the output of a command (--json). Without a name: the schemas and versions."


def _names(_: str) -> Iterable[str]:
    from sbonnx.cli.schemas.published import OF_COMMANDS, SCHEMAS

    return (*SCHEMAS, *OF_COMMANDS)


NAME: Final[CommandOption[list[str] | None]] = CommandOption(
    "name",
    (),
    list[str] | None,
    "Name of the schema, which is the key `schema` of an output; or the command.",
    "NAME",
    choices=_names,
)

OPTIONS: Final = (NAME, *options.COMMON)


def run(given: Arguments) -> int:
    from sbonnx.cli.schemas.published import OF_COMMANDS, SCHEMAS, SchemaOutput, json_schema
    from sbonnx.recipe.problem import suggestion
    from sbonnx.system.terminal import versioned

    printer, words = given.printer(), given[NAME]
    if not words:
        versions = {name: versioned(name, {})["schema_version"] for name in SCHEMAS}
        printer.value("schema", SchemaOutput(versions))
        printer.table("schemas", ("name", "version"), list(versions.items()))
        return 0
    typed = "-".join(words)
    name = OF_COMMANDS.get(typed, typed)
    if name not in SCHEMAS:
        close = suggestion(typed, (*SCHEMAS, *OF_COMMANDS), count=3)
        raise RecipeError(f"there is no schema '{typed}'. {close or '`sbonnx schema` lists them'}")
    Printer().text(to_json(json_schema(name)))
    return 0

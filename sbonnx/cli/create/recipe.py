"""``sbonnx recipe``: print the annotated default recipe, or check a recipe and print it resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.errors import RecipeError
from sbonnx.present.text.printer import Printer
from sbonnx.system.terminal import to_json

HELP: Final = "Print the default recipe with comments. With FILE, check that recipe and print it resolved."


FILE: Final = options.optional_argument("file", "FILE", "A recipe to check.")
SCHEMA: Final = options.switch("--schema", "Print the JSON schema, for editors.")

OPTIONS: Final = (FILE, options.BACKEND, options.BITS, options.SET, SCHEMA, *options.COMMON)


@dataclass(frozen=True)
class RecipeOutput:
    """Output of recipe.

    Attributes:
        recipe: the resolved recipe, whose own schema `sbonnx recipe --schema` prints.
    """

    recipe: dict[str, Any]


def run(given: Arguments) -> int:
    from sbonnx import recipe as recipes
    from sbonnx.stages.state import read_recipe

    printer, file = given.printer(), given[FILE]
    if given[SCHEMA]:
        if file is not None:
            raise RecipeError("the schema is the same for every recipe: leave FILE or --schema out")
        Printer().text(to_json(recipes.json_schema()))
        return 0
    overrides = given.overrides()
    recipe, _ = read_recipe(file, given[options.BACKEND], overrides)
    printer.value("recipe", RecipeOutput(recipe.to_dict()))
    if file is None and not overrides:
        printer.text(recipes.annotated_default(recipe.backend).rstrip())
    else:
        printer.text(recipes.as_yaml(recipe).rstrip())
    return 0

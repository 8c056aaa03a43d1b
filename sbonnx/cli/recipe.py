"""``sbonnx recipe``: print the annotated default recipe, or check a recipe and print it resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.show import Show
from sbonnx.errors import RecipeError

HELP: Final = "Print the default recipe, explained. With FILE, check that recipe and print what it resolves to."


def run(
    file: Annotated[Path | None, typer.Argument(help="A recipe to check.", show_default=False)] = None,
    backend: options.Backend = None,
    bits: options.Bits = None,
    sets: options.Sets = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema, for editors.")] = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx recipe`` and return the exit code."""
    from sbonnx import recipe as recipes
    from sbonnx.stages.state import read_recipe

    show = Show(as_json=as_json, quiet=quiet)
    if schema:
        if file is not None:
            raise RecipeError("the schema is the same for every recipe: leave FILE or --schema out")
        Show(as_json=True).value(recipes.json_schema())
        return 0
    wishes, _ = read_recipe(file, backend, options.overrides(sets, bits=bits))
    show.value(wishes.to_dict())
    if file is None and not sets and bits is None:
        show.text(recipes.annotated_default(wishes.backend).rstrip())
    else:
        show.text(recipes.as_yaml(wishes).rstrip())
    return 0

"""``plan``: what would be quantized, by which rule, and the refusals with reasons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.api.arguments import File, reading
from sbonnx.planning.types import Plan
from sbonnx.stages.state import Prepared, Source, read_recipe
from sbonnx.system.terminal import to_json

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.recipe.keywords import RecipeKeywords


def plan(
    model: Source,
    *,
    backend: str | None = None,
    recipe: Any = None,
    output: File | None = None,
    force: bool = False,
    **overrides: Unpack[RecipeKeywords],
) -> Plan:
    """Return what would be quantized and why, and what would not. No data is needed.

    Args:
        model: path, ModelProto or serialized model. It is never modified.
        backend, recipe: see `sbonnx.quantize`.
        output, force: path of a JSON file with the plan, and whether to overwrite a file; None: none is written.
        overrides: recipe keys by keyword, such as ``bits="w4a8"``.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    return planned(model, backend=backend, recipe=recipe, output=output, force=force, **overrides).plan


def planned(
    model: Source,
    *,
    backend: str | None = None,
    recipe: Any = None,
    output: File | None = None,
    force: bool = False,
    **overrides: Unpack[RecipeKeywords],
) -> Prepared:
    """Plan a model, see `plan`; return the graph and the refusals of simplification as well."""
    resolved, rules = read_recipe(recipe, backend, overrides)
    with reading(model, recipe):
        if output is not None:
            graphs.check_target(Path(output), inputs=(), force=force)
        prepared = pipeline.prepare(model, resolved, rules)
        if output is not None:
            graphs.write_text(Path(output), to_json(prepared.plan.to_dict()) + "\n")
    return prepared

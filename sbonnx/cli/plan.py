"""``sbonnx plan``: show what would be quantized, by which rule, and the refusals with reasons. Needs no data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from sbonnx.cli import options
from sbonnx.cli.output.show import Show, to_json

if TYPE_CHECKING:
    from sbonnx.plan import Site

HELP: Final = "Show what would be quantized and why. Every refusal comes with its reason; no data is needed."


def run(
    model: options.Model,
    backend: options.Backend = None,
    recipe: options.RecipePath = None,
    bits: options.Bits = None,
    block_size: options.BlockSize = None,
    mode: options.Mode = None,
    form: options.Format = None,
    sets: options.Sets = None,
    requantize: options.Requantize = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file, as JSON.", show_default=False)
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> int:
    """Run ``sbonnx plan`` and return the exit code."""
    from sbonnx import graph as graphs
    from sbonnx.pipeline import prepare
    from sbonnx.plan import to_dict
    from sbonnx.stages.state import read_recipe

    show = Show(as_json=as_json, quiet=quiet)
    flags = options.overrides(sets, bits=bits, block_size=block_size, requantize=requantize, mode=mode, format=form)
    wishes, rules = read_recipe(recipe, backend, flags)
    if output is not None:
        graphs.check_target(output, inputs=[model], force=force)
    prepared = prepare(model, wishes, rules)
    plan = prepared.plan
    value: dict[str, Any] = to_dict(plan)
    if output is not None:
        graphs.write_text(output, to_json(value) + "\n")
    show.value(value)
    groups = _shared(plan.sites)
    show.table(
        f"{model} for {plan.backend}: {len(plan.sites)} tensors to quantize",
        ("tensor", "role", "type", "shares scale with", "read by", "rule", "why"),
        [
            (site.tensor, site.role, _type(site), groups.get(site.key), _readers(site), site.rule, site.why)
            for site in plan.sites
        ],
    )
    refusals = [(refusal.what, refusal.where, refusal.why) for refusal in prepared.refusals]
    show.table("not done", ("what", "where", "why"), refusals)
    if output is not None:
        show.line(f"written: {output}")
    return 0


def _shared(sites: tuple[Site, ...]) -> dict[str, str]:
    """Map site keys to the tensor that names their group, for groups with more than one site."""
    counts: dict[str, int] = {}
    for site in sites:
        counts[site.group] = counts.get(site.group, 0) + 1
    tensors = {site.key: site.tensor for site in sites}
    return {site.key: tensors.get(site.group, site.group) for site in sites if counts[site.group] > 1}


def _type(site: Site) -> str:
    """Return the integer type in the exported file; a bias is int32, the type of the accumulator."""
    return "int32" if site.role == "bias" else site.spec.label()


def _readers(site: Site) -> str:
    return ", ".join(f"{reader.node}[{reader.index}]" for reader in site.readers)

"""``sbonnx plan``: show what would be quantized, by which rule, and the refusals with reasons. Needs no data."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.tables import reasons_of, show_refusals

if TYPE_CHECKING:
    from sbonnx.planning import Plan, Site

HELP: Final = "Show what would be quantized and why. Refusals are listed with their reasons; no data is needed."


ROWS: Final = 6
"""Rows of both tables, unless all are asked for."""

MOST_REASONS: Final = 3
"""Rows of what is not done."""

OUTPUT: Final = replace(options.OUTPUT, help="Write the plan to this file, as JSON.")

OPTIONS: Final = (
    options.MODEL,
    *options.BASIC,
    options.BLOCK_SIZE,
    options.MODE,
    options.FORMAT,
    options.SET,
    *options.NODES,
    options.OVERRIDES,
    options.REQUANTIZE,
    OUTPUT,
    options.FORCE,
    options.VERBOSE,
    *options.COMMON,
)


def run(given: Arguments) -> int:
    from sbonnx.api.model_plan import planned

    printer, model, output = given.printer(), given[options.MODEL], given[OUTPUT]
    prepared = given.call(planned, recipe=given.recipe(), backend=None)
    plan = prepared.plan
    printer.value("plan", plan)
    refusals = list(prepared.refusals)
    printer.line(_summary(str(model), plan, len(refusals)))
    reasons = min(len(reasons_of(refusals)), MOST_REASONS)
    _show_sites(printer, plan, most=ROWS - reasons, verbose=given[options.VERBOSE])
    show_refusals(printer, refusals, most=MOST_REASONS, verbose=given[options.VERBOSE])
    if output is not None:
        printer.line(f"written: {output}")
    return 0


def _summary(model: str, plan: Plan, refusals: int) -> str:
    """Return one line: how many tensors of which type, and how many refusals."""
    types = Counter((site.role, _type(site)) for site in plan.sites)
    listed = ", ".join(f"{count} x {role} {kind}" for (role, kind), count in types.most_common())
    left = f"; {refusals} not done" if refusals else ""
    return f"{model} for {plan.backend}: {len(plan.sites)} tensors to quantize ({listed}){left}"


def _type(site: Site) -> str:
    return "int32" if site.role == "bias" else site.spec.label()  # a bias has the type of the accumulator


def _show_sites(printer: Printer, plan: Plan, *, most: int, verbose: bool) -> None:
    """Show each tensor, or, unless `verbose`, one row for those of equal role, type and rule with the first.

    Args:
        most: number of these rows.
    """
    if verbose:
        counts = Counter(site.group for site in plan.sites)
        tensors = {site.key: site.tensor for site in plan.sites}
        printer.table(
            "tensors",
            ("tensor", "role", "type", "shares its scale with", "read by", "rule", "why"),
            [
                (
                    site.tensor,
                    site.role,
                    _type(site),
                    tensors.get(site.group, site.group) if counts[site.group] > 1 else None,
                    ", ".join(f"{reader.node}[{reader.index}]" for reader in site.readers),
                    site.rule,
                    site.why,
                )
                for site in plan.sites
            ],
        )
        return
    kinds = Counter((site.role, _type(site), site.rule, site.why) for site in plan.sites)
    first = {(site.role, _type(site), site.rule, site.why): site.tensor for site in reversed(plan.sites)}
    counted = "" if len(kinds) <= most else f"the first {most} of {len(kinds)} kinds; "
    printer.table(
        f"tensors ({counted}each: -v)",
        ("times", "role", "type", "rule", "why", "first tensor"),
        [(count, *kind, first[kind]) for kind, count in kinds.most_common(most)],
    )

"""Short output of `quantize`: the verdict, a few facts, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from sbonnx.cli.output.printer import Printer
from sbonnx.terminal import LINE_LENGTH, one_line

if TYPE_CHECKING:
    from sbonnx.report import Report

Fact = tuple[str, str]
"""Name and text of a row."""

INDENT: Final = "      "
"""Space of the mark, for rows without one."""

NAME_WIDTH: Final = 14
"""Width of the names of facts."""


def show_summary(printer: Printer, report: Report, facts: Sequence[Fact]) -> None:
    """Print one line for the files, one for each clause of the verdict with its mark, and one for each fact."""
    from sbonnx.html_report.network import bits_of

    bits = bits_of({"settings": report.settings, "sites": report.sites, "search": report.search})
    printer.line(one_line(f"{report.model} -> {report.output} ({', '.join(filter(None, (report.backend, bits)))})"))
    for row in report.verdict.rows:
        printer.line(f"  {row.mark:<2}  {one_line(row.text, LINE_LENGTH)}")
    for name, text in facts:
        printer.line(f"{INDENT}{name:<{NAME_WIDTH}}  {one_line(text, LINE_LENGTH)}")


def facts_of(report: Report) -> list[Fact]:
    """Return the facts that differ from what is expected."""
    facts = []
    weights = _weights(report)
    if weights:
        facts.append(("weights", weights))
    left = left_in_float(report)
    if left:
        facts.append(("left in float", left))
    if report.pruning:
        from sbonnx.cli.output.tables import pruned_text

        facts.append(("pruned", pruned_text(report.pruning) or ""))
    return facts


def _weights(report: Report) -> str:
    """Say that weights are a bit narrower than asked for, and how many of all weights stay float; "" without either."""
    from sbonnx.cli.output.tables import float_weights

    asked = ((report.settings.get("W") or {}).get("QUANTIZER") or {}).get("BIT")
    narrow = asked == FULL and any(site["role"] == "weight" and site["bits"] == FULL - 1 for site in report.sites)
    cpu = report.metrics.get("cpu") or "the CPU that runs the file"
    parts = [f"7 bits, because products of 8 bits saturate on {cpu}; for other CPUs: --cpu"] if narrow else []
    kernels = report.metrics.get("kernels") or {}
    stays = float_weights(kernels) if kernels and not kernels.get("skipped") else ""
    return "; ".join([*parts, *([f"some stay float: {stays}"] if stays else [])])


FULL: Final = 8
"""Bits of weights that have one less where products would saturate."""


def left_in_float(report: Report) -> str:
    """Return how many operators or tensors were not quantized, with the most frequent reason; "" without any."""
    from sbonnx.report.verdict import without_names

    left = [one for one in report.refusals if one.what.startswith(("quantize", "integer kernel"))]
    if not left:
        return ""
    counts = Counter(without_names(one.why) for one in left)
    kind, times = counts.most_common(1)[0]
    first = next(one for one in left if without_names(one.why) == kind)
    others = f"; {len(counts) - 1} other reason{'s' * (len(counts) != 2)}" if len(counts) > 1 else ""
    many = f", {times} times: " if len(counts) > 1 else ": "
    return f"{len(left)} place{'s' * (len(left) != 1)}, such as '{first.where}'{many}{first.why}{others}"

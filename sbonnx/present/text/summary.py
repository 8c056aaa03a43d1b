"""Short output of `quantize`: the verdict, a few facts, and what to do next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final

from sbonnx.present.text.printer import Printer
from sbonnx.system.terminal import LINE_LENGTH, one_line

if TYPE_CHECKING:
    from sbonnx.report import Report, Verdict

Fact = tuple[str, str]
"""Name and text of a row."""

INDENT: Final = "      "
"""Space of the mark, for rows without one."""

NAME_WIDTH: Final = 14
"""Width of the names of facts."""

NOTES: Final = {"empty-recipe": "recipe", "input-filled": "inputs", "not-trained": "training"}
"""Names of facts by the codes of the notes that they are."""


def show_summary(printer: Printer, report: Report, facts: Sequence[Fact]) -> None:
    """Print one line for the files, one for each clause of the verdict with its mark, and one for each fact."""
    from sbonnx.present.html.network import bits_of

    types = ", ".join(filter(None, (report.backend, bits_of(report))))
    printer.line(one_line(f"{report.model} -> {report.output} ({types})"))
    show_verdict(printer, report.verdict)
    show_facts(printer, facts)


def show_verdict(printer: Printer, verdict: Verdict) -> None:
    """Print one line for each clause of a verdict, with its mark."""
    for row in verdict.rows:
        printer.line(f"  {row.mark:<2}  {one_line(row.text, LINE_LENGTH)}")


def show_facts(printer: Printer, facts: Iterable[Fact]) -> None:
    """Print one line for each fact that has a text."""
    for name, text in facts:
        if text:
            printer.line(f"{INDENT}{name:<{NAME_WIDTH}}  {one_line(text, LINE_LENGTH)}")


def first_of(texts: Collection[str], most: int) -> str:
    """Join the first texts, and say how many there are besides; "" without any."""
    further = len(texts) - most
    return ", ".join([*islice(texts, most), *([f"{further} more"] if further > 0 else [])])


def facts_of(report: Report) -> list[Fact]:
    """Return the facts that differ from what is expected."""
    facts = []
    if report.causes and report.verdict.repairable:
        cause = report.causes[0]
        facts.append(("worst layer", cause.text))
        if report.advice is None or not report.advice.tested:
            options = f": {cause.options}" if cause.overrides else ""
            facts.append(("try" if cause.gain_db is None else "tried", f"{cause.remedy} ({cause.measured}){options}"))
    weights = _weights(report)
    if weights:
        facts.append(("weights", weights))
    prices = _prices(report)
    if prices:
        facts.append(("kernel costs", prices))
    left = left_in_float(report)
    if left:
        facts.append(("left in float", left))
    if report.tuning is not None:
        facts.append(("tuned", report.tuning.text))
    if report.pruning is not None:
        from sbonnx.present.text.tables import pruned_text

        facts.append(("pruned", pruned_text(report.pruning) or ""))
    if report.portability is not None:
        facts.append(("runtimes", report.portability.text))
    facts += [(NOTES[note.code], note) for note in report.notes if note.code in NOTES]
    return facts


def _weights(report: Report) -> str:
    """Say for which CPUs the weights are, and how many of all weights float operators read; "" without either."""
    from sbonnx.backends import BACKENDS
    from sbonnx.present.text.tables import float_weights

    kernels = None if report.metrics is None else report.metrics.kernels
    backend = BACKENDS.get(report.backend)
    runs_here = backend is not None and (backend.files.integer_operators or backend.runtime is not None)
    stays = float_weights(kernels) if runs_here and kernels is not None and not kernels.skipped else ""
    parts = [_for_cpu(report), f"some in float operators: {stays}" if stays else ""]
    return "; ".join(filter(None, parts))


def _for_cpu(report: Report) -> str:
    """Say how the CPU that will run the file decided the weights; "" if it did not."""
    from sbonnx.system.cpu import CPUS, THIS

    bits = {site.bits for site in report.sites if site.role == "weight"} & {FULL, FULL - 1}
    if not report.cpu or not bits:
        return ""
    own = f"this CPU ({report.cpu})" if report.settings.get("CPU") == THIS else CPUS[report.cpu].title
    if CPUS[report.cpu].exact:
        return f"for CPUs with exact 8-bit products, as {own}; for older x86 CPUs: --cpu avx2"
    how = "7 bits" if FULL not in bits else "8 bits, sums of two products fit into 16"
    how = "8 bits, sums of two products saturate" if report.settings.get("REDUCE_RANGE") is False else how
    return f"{how}: {own} has no 8-bit dot products; for other CPUs: --cpu vnni"


def _prices(report: Report) -> str:
    """Say where the costs of kernels are from that decided what stays float; "" for those of a CPU that was named."""
    from sbonnx.backends.kernel_costs import DIGEST
    from sbonnx.system.cpu import CPUS, THIS

    table, cpu = report.settings.get("KERNEL_COSTS"), str(report.settings.get("CPU", THIS))
    if not report.kernel_costs.startswith(DIGEST):
        bundled = report.kernel_costs in CPUS and cpu == THIS
        return f"of {report.kernel_costs} CPUs; to measure those of this one: sbonnx tune" if bundled else ""
    where = table if table != "bundled" else "this machine (sbonnx tune)" if cpu == THIS else cpu
    return f"of {where}, table {report.kernel_costs}"


FULL: Final = 8
"""Bits of weights whose products may saturate; those of REDUCE_RANGE have one less."""


def left_in_float(report: Report) -> str:
    """Return how many operators or tensors were not quantized, with the most frequent reason; "" without any."""
    from sbonnx.report.codes import most_frequent

    left = [refusal for refusal in report.refusals if refusal.leaves_float]
    if not left:
        return ""
    counts, first = Counter(refusal.code for refusal in left), most_frequent(left)
    times = counts[first.code]
    others = f"; {len(counts) - 1} other reason{'s' * (len(counts) != 2)}" if len(counts) > 1 else ""
    many = f", {times} times: " if len(counts) > 1 < times else ": "
    return f"{len(left)} place{'s' * (len(left) != 1)}, such as '{first.where}'{many}{first.why}{others}"

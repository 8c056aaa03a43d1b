"""View model of a pruning: what remains, the dimensions that lost channels, sparse layers, fine-tuning."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sbonnx.present.html import formatting
from sbonnx.present.html.formatting import percent, text
from sbonnx.report.outcome import Report
from sbonnx.report.pruned import BUDGETS, PrunedDimension, PruningReport, SparseLayer
from sbonnx.report.verdict import ON_CPU


@dataclass(frozen=True)
class DimensionRow:
    """A dimension: the layers that write and read it, its channels, and the SQNR of the outputs if only it is pruned.

    Attributes:
        sqnr_db: in dB; None without curves, or if nothing was removed.
    """

    writers: str
    readers: str
    before: int
    after: int
    sqnr_db: float | None


@dataclass(frozen=True)
class PruningView:
    """View model of a pruning.

    Attributes:
        facts: what was asked for, what remains, fine-tuning; one sentence each.
        dimensions: those that lost channels, largest loss first.
        unchanged: number of dimensions that kept all channels.
        sparse: layers with sparse weights.
    """

    facts: tuple[str, ...]
    dimensions: tuple[DimensionRow, ...]
    unchanged: int
    sparse: tuple[SparseLayer, ...]


def pruning_view(report: PruningReport | None) -> PruningView | None:
    """Build the view of a pruning; None without one."""
    if report is None:
        return None
    rows = [_dimension_row(row) for row in report.dimensions if row.after < row.before]
    rows.sort(key=lambda row: math.inf if row.sqnr_db is None else row.sqnr_db)
    unchanged = len(report.dimensions) - len(rows)
    return PruningView(tuple(_facts(report)), tuple(rows), unchanged, report.sparse)


def report_of_pruning(pruned: PruningReport) -> Report:
    """Return a pruning as the report of a file in which nothing is quantized, for the sections they share."""
    return Report(
        model=pruned.model,
        output=pruned.output,
        backend=ON_CPU,
        metrics=pruned.metrics,
        refusals=pruned.refusals,
        notes=pruned.notes,
        problems=pruned.problems,
        pruning=pruned,
    )


def _dimension_row(row: PrunedDimension) -> DimensionRow:
    sqnr = -10 * math.log10(row.error) if row.error else None
    return DimensionRow(_names(row.writers), _names(row.readers), row.before, row.after, sqnr)


def _names(layers: Sequence[str]) -> str:
    return ", ".join(map(text, layers))


def _facts(report: PruningReport) -> Iterable[str]:
    for name, limit in report.asked.items():
        what = f"of the {BUDGETS[name]}" if name in BUDGETS else "of loss"
        yield f"asked for: at most {limit:g} {what}; reached: {formatting.plain(report.reached[name], 3)}"
    yield from (f"{percent(share)} of the {name} remain" for name, share in report.remaining.items() if share < 1)
    tuned = report.tuned
    if tuned is not None:
        epochs = f"fine-tuned for {tuned.epochs} epochs, weights of epoch {tuned.epoch}"
        before, after = (formatting.plain(error, 3) for error in (tuned.before, tuned.after))
        yield f"{epochs}: relative squared error of the outputs on hold-out samples {after}, before {before}"

"""``sbonnx diff``: differences of two quantized models of the same network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.present.text.printer import Printer
from sbonnx.present.text.summary import first_of
from sbonnx.system.terminal import BELOW_QUALITY, DONE

if TYPE_CHECKING:
    from sbonnx.qdq.difference import ModelDifference

NAMED: Final = 3
"""Tensors that are named, unless tables are asked for."""

HELP: Final = (
    "Show what differs in two quantized models. Placement, types, scales, weights; exit code 1 if they differ."
)

FIRST: Final = options.argument("first", "A", "A quantized model.")
SECOND: Final = options.argument("second", "B", "Another quantized model of the same network.")
TOP: Final = options.option(
    "--top N", int, "Tables of the first N rows; the JSON has all.", shown="no tables, all with -v"
)

OPTIONS: Final = (FIRST, SECOND, TOP, options.VERBOSE, *options.COMMON)


def run(given: Arguments) -> int:
    from sbonnx.api.file_difference import diff

    printer, files = given.printer(), (given[FIRST], given[SECOND])
    result = given.call(diff)
    printer.value("diff", result)
    top: int | None = given[TOP]
    if given[options.VERBOSE] or top is not None:
        _show_tables(printer, files, result.difference, None if top is None else max(top, 0))
    else:
        _show_summary(printer, files, result.difference)
    return DONE if result.difference.equal else BELOW_QUALITY


def _show_summary(printer: Printer, files: tuple[Path, Path], differences: ModelDifference) -> None:
    """Print one line for each kind of difference, with the first tensors."""
    printer.line(_sentence(files, differences))
    for file, pairs in zip(files, (differences.first_pairs, differences.second_pairs), strict=True):
        if pairs:
            printer.line(f"quantized in {file} only: {len(pairs)}: {first_of(pairs, NAMED)}")
    for what, rows, equal in (
        ("quantized differently", differences.pairs, f"{differences.equal_pairs} equally"),
        ("constants with other values", differences.constants, f"{differences.equal_constants} equal"),
    ):
        if rows:
            printer.line(f"{what}: {len(rows)} ({equal}): {first_of([row.tensor for row in rows], NAMED)}")
    for file, names in zip(files, (differences.first_constants, differences.second_constants), strict=True):
        if names:
            printer.line(f"constants in {file} only: {len(names)}: {first_of(names, NAMED)}")
    if differences.operators:
        counts = [f"{name} {first} and {second}" for name, (first, second) in differences.operators.items()]
        printer.line(f"operators: {first_of(counts, NAMED)}")
    if not differences.equal:
        printer.line("details: -v")


def _sentence(files: tuple[Path, Path], differences: ModelDifference) -> str:
    return "equal" if differences.equal else f"{files[0]} and {files[1]} differ"


def _show_tables(printer: Printer, files: tuple[Path, Path], differences: ModelDifference, top: int | None) -> None:
    for file, pairs in zip(files, (differences.first_pairs, differences.second_pairs), strict=True):
        printer.table(f"quantized in {file} only: {len(pairs)}", ("tensor", "type"), list(pairs.items())[:top])
    printer.table(
        f"quantized differently: {len(differences.pairs)} ({differences.equal_pairs} equally)",
        ("tensor", "type in A", "type in B", "scale B / A", "other zero points"),
        [
            (
                row.tensor,
                *row.types,
                "other shape" if row.scale_ratio is None else _range(*row.scale_ratio),
                row.zero_points or None,
            )
            for row in differences.pairs[:top]
        ],
    )
    printer.table(
        f"constants with other values: {len(differences.constants)} ({differences.equal_constants} equal)",
        ("tensor", "in A", "in B", "changed", "of", "largest difference"),
        [(row.tensor, *row.types, row.changed, row.count, row.largest) for row in differences.constants[:top]],
    )
    for file, names in zip(files, (differences.first_constants, differences.second_constants), strict=True):
        printer.table(f"constants in {file} only: {len(names)}", ("tensor",), [(name,) for name in names[:top]])
    printer.table(
        "operators", ("op", "in A", "in B"), [(name, *counts) for name, counts in differences.operators.items()]
    )
    printer.line(_sentence(files, differences))


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"

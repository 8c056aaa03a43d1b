"""``sbonnx diff``: differences of two quantized models of the same network."""

from __future__ import annotations

from typing import Final

from sbonnx.cli import options
from sbonnx.cli.options import Arguments
from sbonnx.system.terminal import BELOW_QUALITY, DONE

HELP: Final = (
    "Show what differs in two quantized models. Placement, types, scales, weights; exit code 1 if they differ."
)

FIRST: Final = options.argument("first", "A", "A quantized model.")
SECOND: Final = options.argument("second", "B", "Another quantized model of the same network.")
TOP: Final = options.setting("--top N", 20, "Rows of each table; the JSON has all.")

OPTIONS: Final = (FIRST, SECOND, TOP, *options.COMMON)


def run(given: Arguments) -> int:
    from sbonnx.api.file_difference import diff

    printer, files, top = given.printer(), (given[FIRST], given[SECOND]), max(given[TOP], 0)
    result = given.call(diff)
    differences = result.difference
    printer.value("diff", result)
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
    printer.line("equal" if differences.equal else f"{files[0]} and {files[1]} differ")
    return DONE if differences.equal else BELOW_QUALITY


def _range(low: float, high: float) -> str:
    return f"{low:.4g}" if f"{low:.4g}" == f"{high:.4g}" else f"{low:.4g} to {high:.4g}"

"""Times of kernels at all sizes, and the mean of the tables of two machines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sbonnx.backends.kernel_costs import KINDS
from sbonnx.tuning.cost_fit import Row
from sbonnx.tuning.kernel_timing import KernelCase, time_case

REFERENCE: Final = ("Conv", "3x3 blocked", "float")
"""Kernel by whose multiply-accumulate the speed of two machines is compared."""


def timed(cases: Iterable[KernelCase], seconds: float, threads: int = 1) -> list[Row]:
    """Measure each case and return its row; if this onnxruntime refuses it, with the reason instead of ns."""
    found: list[Row] = []
    for case in cases:
        row: Row = {**case.row, "shape": [list(values.shape) for values in case.activations.values()]}
        try:
            row["ns"] = round(time_case(case, seconds, threads), 1)
        except Exception as error:
            row["refused"] = str(error).splitlines()[0][:200]
        found.append(row)
    return found


def mean_of(here: Sequence[Row], other: Mapping[str, Any]) -> list[Row]:
    """Return the mean of two tables, the other one scaled to the speed of this machine.

    The scale makes a multiply-accumulate of the float convolution of 3 x 3 cost the same in both. Kernels that the
    other table does not have keep their costs.

    Args:
        here: fits of this machine.
        other: table as `cost_table` writes it.
    """
    others = {_key(row): row for row in other["fits"]}
    scale = next(row["mac_ns"] / others[_key(row)]["mac_ns"] for row in here if _key(row) == REFERENCE)
    return [_averaged(row, others.get(_key(row), row), scale) for row in here]


def _averaged(row: Row, other: Row, scale: float) -> Row:
    if other is row:
        return row
    means = {name: float(f"{(row[name] + scale * other[name]) / 2:.4g}") for name in KINDS}
    return {**row, **means, "worst": max(row["worst"], other["worst"])}


def _key(row: Row) -> tuple[str, str, str]:
    return row["kernel"], row["variant"], row["type"]

"""Costs of kernels: measured sizes, one fitted formula for each kernel, and the table of `KERNEL_COSTS`."""

from __future__ import annotations

import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime

from benchmarks.kernels.cases import MAPS, block, convolutions, products
from benchmarks.kernels.elementwise import FAMILIES, rows
from benchmarks.kernels.timing import COLUMNS, Case, fit, time_case
from sbonnx.system.cpu import target_cpu

Row = dict[str, Any]

REFERENCE: Final = ("Conv", "3x3 blocked", "float")
"""Kernel by whose multiply-accumulate the speed of two machines is compared."""

SATURATING_MARGIN: Final = 1.2
"""`KernelCosts.margin` without 8-bit dot products: integer convolutions take about half the time of float
ones there, and depthwise ones more."""


def every_case() -> Iterator[Case]:
    """Yield all kernels at all sizes."""
    yield from convolutions()
    yield from products()
    for make in FAMILIES:
        for size in MAPS:
            yield from make(size)
    yield from rows()


def timed(cases: Iterable[Case], seconds: float, threads: int = 1) -> list[Row]:
    """Measure each case and return its row; if this onnxruntime refuses it, with the reason instead of ns."""
    found: list[Row] = []
    for case in cases:
        row: Row = {
            "kernel": case.kernel,
            "variant": case.variant,
            "type": case.dtype,
            "domain": case.domain,
            "shape": [list(values.shape) for values in case.activations.values()],
            "macs": case.macs,
            "reads": case.reads,
            "writes": case.writes,
            "weights": case.weights,
            "pieces": case.pieces,
        }
        try:
            row["ns"] = round(time_case(case, seconds, threads), 1)
        except Exception as error:
            row["refused"] = str(error).splitlines()[0][:200]
        found.append(row)
    return found


def fits(measured: Sequence[Row]) -> list[Row]:
    """Fit one cost formula for each kernel, variant and type."""
    together: Mapping[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in measured:
        if row.get("ns"):
            together[tuple(row[key] for key in ("kernel", "variant", "type", "domain"))].append(row)
    found = []
    for (kernel, variant, dtype, domain), sizes in together.items():
        row = {"kernel": kernel, "variant": variant, "type": dtype, "domain": domain, "sizes": len(sizes)}
        found.append({**row, **{name: float(f"{value:.4g}") for name, value in fit(sizes).items()}})
    return found


def machine(threads: int) -> dict[str, Any]:
    """Return the machine and versions that the figures are valid for."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    said = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    return {
        "cpu": said.get("model name", platform.processor()),
        "architecture": platform.machine(),
        "class": target_cpu().name,
        "dot_product": target_cpu().exact,
        "margin": 1.0 if target_cpu().exact else SATURATING_MARGIN,
        "onnxruntime": onnxruntime.__version__,
        "block": block(),
        "threads": threads,
    }


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
    means = {name: float(f"{(row[name] + scale * other[name]) / 2:.4g}") for name in COLUMNS}
    return {**row, **means, "worst": max(row["worst"], other["worst"])}


def _key(row: Row) -> tuple[str, str, str]:
    return row["kernel"], row["variant"], row["type"]


def cost_table(where: Row, costs: Sequence[Row]) -> str:
    """Return the table of `KERNEL_COSTS` as JSON: the machine, and one line for each kernel."""
    kept = ["kernel", "variant", "type", *COLUMNS, "worst"]
    lines = [json.dumps({key: row[key] for key in kept}) for row in costs]
    rows = ",\n  ".join(lines)
    return f'{{\n "machine": {json.dumps(where)},\n "fits": [\n  {rows}\n ]\n}}\n'

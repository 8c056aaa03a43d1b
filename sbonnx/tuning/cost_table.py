"""Form of a table of kernel costs: the machine, and one formula for each kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sbonnx.backends.kernel_costs import KINDS
from sbonnx.system.cpu import target_cpu
from sbonnx.system.machine_costs import fingerprint
from sbonnx.tuning.kernel_cases import block

SATURATING_MARGIN: Final = 1.2
"""`KernelCosts.margin` without 8-bit dot products: integer convolutions take about half the time of float
ones there, and depthwise ones more."""


def machine(threads: int) -> dict[str, Any]:
    """Return the machine and versions that the figures are valid for."""
    own, kind = fingerprint(), target_cpu()
    return {
        "cpu": own.cpu,
        "architecture": own.architecture,
        "class": kind.name,
        "dot_product": kind.exact,
        "margin": 1.0 if kind.exact else SATURATING_MARGIN,
        "onnxruntime": own.onnxruntime,
        "block": block(),
        "threads": threads,
    }


def cost_table(where: Mapping[str, Any], costs: Sequence[Mapping[str, Any]], more: Sequence[str] = ("worst",)) -> str:
    """Return a table of kernel costs as JSON: the machine, and one line for each kernel.

    Args:
        where: see `machine`.
        costs: kernel, variant, type, and the coefficients of the formula.
        more: further keys of the rows.
    """
    names = ("kernel", "variant", "type", *KINDS, *more)
    rows = ",\n  ".join(json.dumps({name: row[name] for name in names if name in row}) for row in costs)
    return f'{{\n "machine": {json.dumps(where)},\n "fits": [\n  {rows}\n ]\n}}\n'

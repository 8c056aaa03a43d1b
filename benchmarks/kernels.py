"""What onnxruntime's CPU kernels cost on this machine, one by one and in quantized chains.

    python -m benchmarks.kernels [--output FILE] [--table FILE] [--mean-with FILE] [--seconds 0.15] [--only TEXT]

One thread, CPU time, medians. The file of --output holds a row for each kernel and size, a fit for each kernel
(fixed + per multiply-accumulate + per element), and a row for each chain: Q/DQ graph against the float graph.
The bundled table is the mean of the tables of two machines (--table NEW --mean-with OLD): what pays on one machine by
a few percent costs that much on another, and the mean leaves such layers in float.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnxruntime

from benchmarks.kernel_cases import MAPS, block, convolutions, products
from benchmarks.kernel_chain_cases import CHAINS, SINGLES
from benchmarks.kernel_chains import measured
from benchmarks.kernel_elementwise import FAMILIES, rows
from benchmarks.kernel_timing import COLUMNS, MEASURES, Case, fit, time_case
from benchmarks.results import table, write_section
from sbonnx.system.cpu import target_cpu

Row = dict[str, Any]

REFERENCE: Final = ("Conv", "3x3 blocked", "float")
"""Kernel by whose multiply-accumulate the speed of two machines is compared."""


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
        "dot_product": target_cpu().exact,
        "onnxruntime": onnxruntime.__version__,
        "block": block(),
        "threads": threads,
    }


def shown(costs: Sequence[Row]) -> str:
    """Format the fits as a table, in ns."""
    header = ["kernel", "variant", "type", "fixed", *(f"1000 {name}" for name in MEASURES), "worst"]
    lines = []
    for row in costs:
        figures = [row["fixed_ns"], *(1000 * row[name] for name in COLUMNS[1:])]
        name = [row["kernel"], row["variant"], row["type"]]
        lines.append([*name, *(f"{figure:.4g}" for figure in figures), f"{row['worst']:.0%}"])
    return table(header, lines)


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


def chain_table(rows: Iterable[Row]) -> str:
    """Return the table of chains: their kernels, nodes that stay float, CPU time relative to float."""
    header = ["chain", "placement", "activations", "÷ float", "kernels", "left float"]
    return table(
        header,
        [
            [
                row["chain"],
                row["placement"],
                row["activation"],
                f"{row['ratio']:.2f}",
                " ".join(row["kernels"]),
                " ".join(row["float"]) or "nothing",
            ]
            for row in rows
        ],
    )


def text(where: Row, costs: Sequence[Row], chains: Sequence[Row]) -> str:
    """Return the section of docs/results/."""
    return (
        "## Kernels of onnxruntime on CPU\n\n"
        f"`python -m benchmarks.kernels --write`; onnxruntime {where['onnxruntime']}, {where['cpu']}, "
        f"{'with' if where['dot_product'] else 'without'} 8-bit dot products, {where['threads']} thread(s). "
        "Times are medians, on one thread of CPU time. "
        "`--output FILE` keeps all figures as JSON.\n\n"
        "### Chains and single ops\n\nQ/DQ graph ÷ float graph, both optimised; below 1 is faster. `*n`: n of them. "
        "Single ops carry the cost of the Q and DQ at their edges.\n\n"
        f"{chain_table(chains)}\n\n"
        "### Cost of one kernel\n\nA sum in ns, fitted to several sizes by least squares of the relative error with "
        "no negative term: once, and for 1,000 multiply-accumulates, elements read, elements written, weights, and "
        "pieces of memory that are gathered one by one. Blocked kernels count their "
        f"channels in blocks of {where['block']}. Worst: the largest relative error of the formula.\n\n"
        f"{shown(costs)}"
    )


def main() -> int:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument("--seconds", type=float, default=0.15, help="CPU time for each kernel and size")
    parser.add_argument("--only", default="", help="kernels and chains whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="with 2 and more: kernels by wall time, no chains")
    parser.add_argument("--table", type=Path, help="JSON file for the table that KERNEL_COSTS reads, one kernel a line")
    parser.add_argument("--mean-with", type=Path, help="table of another machine: --table holds the mean of both")
    parser.add_argument("--write", action="store_true", help="put the tables into their page of docs/results/")
    options = parser.parse_args()
    kernels = timed((case for case in every_case() if options.only in case.kernel), options.seconds, options.threads)
    for row in kernels:
        if "refused" in row:
            print(f"{row['kernel']} {row['variant']} {row['type']}: {row['refused']}", file=sys.stderr)
    chosen = [chain for chain in (*CHAINS, *SINGLES) if options.only in chain.name and options.threads == 1]
    costs, chains = fits(kernels), list(measured(chosen, options.seconds))
    where = machine(options.threads)
    section = text(where, costs, chains)
    print(section)
    if options.output:
        kept = {"machine": where, "fits": costs, "chains": chains, "kernels": kernels}
        options.output.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    if options.table:
        other = json.loads(options.mean_with.read_text(encoding="utf-8")) if options.mean_with else None
        shared = {**where, "mean_with": other["machine"]} if other else where
        mean = mean_of(costs, other) if other else costs
        options.table.write_text(cost_table(shared, mean), encoding="utf-8")
    if options.write:
        write_section("kernels", section)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

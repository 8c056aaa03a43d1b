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
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.kernels.chain_cases import CHAINS, SINGLES
from benchmarks.kernels.chains import measured
from benchmarks.kernels.costs import mean_of, timed
from benchmarks.results import table, write_section
from sbonnx.backends.kernel_costs import KINDS
from sbonnx.tuning.cost_fit import MEASURES, Row, fits
from sbonnx.tuning.cost_table import cost_table, machine
from sbonnx.tuning.elementwise_cases import every_case


def shown(costs: Sequence[Row]) -> str:
    """Format the fits as a table, in ns."""
    header = ["kernel", "variant", "type", "fixed", *(f"1000 {name}" for name in MEASURES), "worst"]
    lines = []
    for row in costs:
        figures = [row["fixed_ns"], *(1000 * row[name] for name in KINDS[1:])]
        name = [row["kernel"], row["variant"], row["type"]]
        lines.append([*name, *(f"{figure:.4g}" for figure in figures), f"{row['worst']:.0%}"])
    return table(header, lines)


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

"""CPU seconds of the whole default command beside onnxruntime's quantize_static with MinMax, by channel.

    python -m benchmarks.w8a8.cost [--rungs fast default] [--models NAME ...] [--repeats 3] [--write]

Needs the environment of onnxruntime (`make peers`), and Linux.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.accuracy import load_pack
from benchmarks.calibration.table import Cell, Target
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import METRICS
from benchmarks.w8a8.runs import Bench, process
from benchmarks.w8a8.ways import PEERS, Way, ours
from sbonnx.recipe.defaults import EFFORTS

LIMITS: Final[Mapping[str, float]] = {"fast": 1.0, "default": 2.0}
"""Largest ratio to the peer's CPU seconds that each value of EFFORT is to have."""
PEER: Final = "onnxruntime MinMax u8s8 channel"
"""The cheapest setting of quantize_static that quantizes weights by channel."""
CORE: Final = max(os.sched_getaffinity(0))
"""Core that both run on."""
SECONDS: Final = 1200.0
"""Time limit of one run."""
STORING: Final = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""Environment in which Python stores bytecode, as it does by default."""

ABOUT: Final = """`python -m benchmarks.w8a8.cost --write`. CPU seconds, user and system, of whole processes, each \
on one core with one thread: `sbonnx quantize MODEL --data DATA -o OUT`, from its start to the verified file, and a \
script with onnxruntime's `quant_pre_process` and `quantize_static` (MinMax, u8s8, by channel) on the same feeds, \
which verifies nothing. Python stores its bytecode. Runs alternate; {repeats} pairs. Ratio: median of the pairs with \
the smallest and the largest."""


def pairs(bench: Bench, name: str, ways: Mapping[str, Way], repeats: int) -> dict[str, list[float]]:
    """Run each setting in turns; returns its CPU seconds by run."""
    seconds: dict[str, list[float]] = {row: [] for row in ways}
    for _ in range(repeats):
        for row, way in ways.items():
            output = bench.folder / f"{name}.cost.onnx"
            output.unlink(missing_ok=True)
            seconds[row].append(
                process(bench.command(name, way, output), output, SECONDS, environment=STORING, core=CORE)
            )
    return seconds


def verdict(cells: Mapping[str, Mapping[str, Cell]]) -> str:
    """Say for each value of EFFORT on how many models the limit is met.

    Args:
        cells: ratio by value of EFFORT and model.
    """
    said = []
    for rung, by_model in cells.items():
        met = sum(cell.met for cell in by_model.values())
        middle = statistics.median(cell.value for cell in by_model.values())
        limit = f", at most {LIMITS[rung]:g} on {met} of {len(by_model)} models" if rung in LIMITS else ""
        said.append(f"EFFORT {rung}: {middle:.2f} times the CPU of quantize_static (median){limit}")
    return f"**{'; '.join(said)}.**"


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/. Exit code 1 if a limit is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(METRICS), choices=list(METRICS))
    parser.add_argument("--rungs", nargs="*", default=list(LIMITS), choices=list(EFFORTS), help="values of EFFORT")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--peers", type=Path, default=environments.FOLDER, help="folder of the peers' environments")
    options = parser.parse_args()
    mine = ours(tuple(options.rungs))
    lines: list[list[str]] = []
    cells: dict[str, dict[str, Cell]] = {rung: {} for rung in options.rungs}
    with tempfile.TemporaryDirectory(prefix="w8a8-cost-") as folder:
        bench = Bench(load_pack(options.pack), Path(folder), options.peers, threads=1)
        for name in options.models:
            seconds = pairs(bench, name, {**mine, PEER: PEERS[PEER]}, options.repeats)
            peer = seconds[PEER]
            for rung, own in zip(options.rungs, mine, strict=True):
                ratios = tuple(a / b for a, b in zip(seconds[own], peer, strict=True))
                cells[rung][name] = Cell(ratios, Target(LIMITS.get(rung)))
            lines.append(_line(name, seconds, [cells[rung][name] for rung in options.rungs]))
            print("  ".join(lines[-1]), file=sys.stderr, flush=True)
    header = ["model", "quantize_static, CPU s"]
    for rung in options.rungs:
        header += [f"{rung}, CPU s", f"{rung} ÷ quantize_static"]
    about = ABOUT.format(repeats=options.repeats)
    text = f"## CPU seconds of the whole command\n\n{verdict(cells)}\n\n{about}\n\n{table(header, lines)}"
    print(text)
    if options.write:
        write_section("w8a8 cost", text)
    return int(not all(cell.met for by_model in cells.values() for cell in by_model.values()))


def _line(name: str, seconds: Mapping[str, Sequence[float]], ratios: Sequence[Cell]) -> list[str]:
    cells_of_row = [name, f"{statistics.median(seconds[PEER]):.1f}"]
    for own, ratio in zip((key for key in seconds if key != PEER), ratios, strict=True):
        cells_of_row += [f"{statistics.median(seconds[own]):.1f}", str(ratio)]
    return cells_of_row


if __name__ == "__main__":
    raise SystemExit(main())

"""Accuracy, time and memory at low widths, beside the live peers that run on a CPU.

    python -m benchmarks.lowbit [--tables w4a8 time ...] [--models NAME ...] [--quick] [--write]

`make peers` builds the peers' environments first. Each table is a section of its own in docs/results/, so that one
can be measured again without the others.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.accuracy import HEADLINE, load_pack
from benchmarks.kept import Kept
from benchmarks.lowbit import adaround as lowbit_adaround
from benchmarks.lowbit import effort as lowbit_effort
from benchmarks.lowbit import vit as lowbit_vit
from benchmarks.lowbit.runs import FEWER, STEPPED, Bench, Effort
from benchmarks.lowbit.table import HEADER, RAW, Line, lost, metrics, missed, rows, shown
from benchmarks.lowbit.ways import ACCURACY, Table
from benchmarks.peers import environments
from benchmarks.results import arguments, table, with_command, write_section
from sbonnx.system.cpu import cores

TABLES: Final = (*ACCURACY, "time", "adaround", "memory", "vit")
COMMAND: Final = "python -m benchmarks.lowbit --tables {} --write"

ABOUT: Final = """Metrics 1 and 2 by model, the one that counts in bold: {metrics}. Loss: of that, against float, \
in points of a hundred ({raw}: as it is). All quantizers are given the same float file and the same calibration \
samples of the pack, and all files are evaluated by the same program in onnxruntime. Seconds and memory are those of a \
process each: from the file to the quantized file, imports not counted in seconds; MB are 10**6 bytes. Rows in bold \
are held against what is to be reached."""

PEERS: Final = """ Beside the peers: our metric less that of the best of theirs, and how many times our CPU seconds \
its own are; for the quick rows, which get as many samples as the peers that learn, that is to be no less, and where \
that peer learns at least 10 times. AIMET runs with each of its range schemes: min-max, SQNR (its `tf_enhanced`, for \
weights and activations), SQNR activations (weights by min-max). PPQ is evaluated by its exported \
Q/DQ file, which keeps float weights on the 4-bit grid; onnxsim's GPTQ stores 4-bit codes in 8-bit tensors. \
{versions}. Those that learn layer by layer run {iterations:,} iterations a layer (LSQ: 500 a block), on {learners}; \
on {fewer} they are given fewer samples than our other rows, for each run would otherwise take them far more than ten \
minutes."""


def accuracy_text(bench: Bench, one: Table, names: Sequence[str]) -> str:
    """Return an accuracy table with its explanation."""
    shown_models = [name for name in one.models if name in names]
    lines = []
    for line in bench.lines(one, names):
        lines.append(line)
        scores = " ".join(f"{score:.4f}" for score in line.scores) or line.note
        cost = f"{line.cost.cpu:.1f} CPU s, {line.cost.peak_mb:.0f} MB" if line.cost else ""
        print(f"{line.model:20s} {line.way:50s} {scores}  {cost}", file=sys.stderr, flush=True)
    text = f"## {one.title}\n\n{one.about} "
    text += ABOUT.format(metrics=metrics(shown_models), raw=", ".join(sorted(RAW)))
    if one.peers and bench.effort.peers is not None:
        text += PEERS.format(
            versions=versions(bench.effort.peers),
            iterations=bench.effort.iterations,
            fewer=" and ".join(FEWER),
            learners=", ".join(bench.effort.learn_on),
        )
    if any(line.by != "float" and line.scores and line.cost is None for line in lines):
        text += " Rows without seconds were measured while the machine was busy."
    left = bench.left_out(one, names)
    if left:
        text += f" Not run: {'; '.join(left)}."
    text += "\n\n" + table(HEADER, rows(lines, one.goals))
    return text + ahead_text(lines, one)


def versions(folder: Path) -> str:
    """Return the versions of the available peers, and the reasons why others are missing."""
    parts = []
    for name, peer in environments.PEERS.items():
        if not peer.quantizes:
            continue
        why = environments.absent(folder, name)
        parts.append(peer.versions if why is None else f"{name} cannot be had: {why}")
    return "; ".join(parts)


def ahead_text(lines: Sequence[Line], one: Table) -> str:
    """Describe whether one row is better than another on each model, if the table has such a goal."""
    if one.ahead is None:
        return ""
    found = {(line.model, line.way): line for line in lines}
    said = []
    for name in dict.fromkeys(line.model for line in lines):
        losses = [lost(found[name, way], found[name, "float"]) for way in one.ahead]
        better, plain = losses
        if better is None or plain is None:
            said.append(f"- {name}: **missed**: no file to compare")
            continue
        verdict = "met" if better < plain else "**missed**"
        said.append(
            f"- {name}: {one.ahead[0]} loses {shown(name, better)}, {one.ahead[1]} {shown(name, plain)}: {verdict}"
        )
    return "\n\n" + "\n".join(said)


def section(which: str, bench: Bench, options: argparse.Namespace) -> str:
    """Return one table with its heading."""
    if which == "vit":
        return lowbit_vit.text(bench, options.vit, options.repq_vit)
    if which == "time":
        return lowbit_effort.time_text(bench, cores())
    if which == "adaround":
        return lowbit_adaround.text(bench)
    if which == "memory":
        return lowbit_effort.memory_text(bench)
    return accuracy_text(bench, ACCURACY[which], options.models)


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/. Exit code 1 if a goal is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--tables", nargs="*", default=list(TABLES[:-1]), choices=TABLES)
    parser.add_argument("--models", nargs="*", default=list(HEADLINE), choices=list(HEADLINE))
    parser.add_argument("--repeats", type=int, default=3, help="processes whose wall is measured")
    parser.add_argument("--peers", type=Path, default=environments.FOLDER, help="folder of the peers' environments")
    parser.add_argument("--no-peers", action="store_true", help="leave the peers out")
    parser.add_argument("--peer-minutes", type=float, default=20.0, help="the longest that one run of a peer may take")
    parser.add_argument(
        "--learn-on", nargs="*", default=list(STEPPED), choices=STEPPED, help="models on which peers learn by layer"
    )
    parser.add_argument("--rows", nargs="*", default=[], help="names of the rows of quantizers to run; none: all")
    parser.add_argument("--kept", type=Path, help="file of rows measured before, which are not measured again")
    parser.add_argument("--no-times", action="store_true", help="the machine is busy: keep no seconds of these rows")
    parser.add_argument("--vit", type=Path, default=Path("build/vit"), help="output of benchmarks.lowbit.vit_network")
    parser.add_argument(
        "--repq-vit", type=Path, default=environments.FOLDER / "RepQ-ViT" / "classification", help="its code"
    )
    parser.add_argument("--quick", action="store_true", help="does it run at all: few samples and iterations")
    options = parser.parse_args()
    if options.quick and options.write:
        parser.error("--quick shows that the benchmark runs; its figures are not worth writing down")
    known = {
        row for which in options.tables if which in ACCURACY for row in (*ACCURACY[which].ways, *ACCURACY[which].peers)
    }
    unknown = sorted(set(options.rows) - known)
    if unknown:
        parser.error(f"--rows: no table of --tables has a row '{unknown[0]}'")
    if options.rows and options.write and options.kept is None:
        parser.error("--write replaces whole tables: with --rows it needs the others from --kept")
    peers = None if options.no_peers else options.peers
    effort = Effort(
        repeats=options.repeats,
        minutes=options.peer_minutes,
        peers=peers,
        learn_on=tuple(options.learn_on),
        only=tuple(options.rows),
        times=not options.no_times,
    )
    if options.quick:
        effort = replace(effort, count=16, limit=64, repeats=1, iterations=20)
    bad = False
    with tempfile.TemporaryDirectory(prefix="lowbit-") as folder:
        bench = Bench(load_pack(options.pack), Path(folder), effort, Kept(options.kept))
        for which in options.tables:
            start = time.monotonic()
            text = with_command(section(which, bench, options), COMMAND.format(which))
            print(f"{which}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            print(text, flush=True)
            bad = bad or missed(text)
            if options.write:
                write_section(f"lowbit {which}", text)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())

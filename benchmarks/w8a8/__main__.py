"""Accuracy at 8 bits beside the peers: the default of the command, and each value of EFFORT.

    python -m benchmarks.w8a8 [--only sbonnx] [--again] [--models NAME ...] [--rungs fast default best] [--write]

`make peers` builds the peers' environments first. Records are kept in a file, so an interrupted run continues;
``--only sbonnx --again`` measures the rows of sbonnx again and reads those of the peers from that file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers import environments
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import METRICS
from benchmarks.w8a8 import table as w8a8_table
from benchmarks.w8a8.runs import ITERATIONS, Bench
from benchmarks.w8a8.table import rows_of
from benchmarks.w8a8.ways import LEARNED_ON, OURS, OURS_TENSORRT, PEERS, TOOLS, Way, ours
from sbonnx.recipe.defaults import EFFORTS

DEFAULT: Final = "default"
TARGETS: Final = {"onnxruntime": "For onnxruntime", "tensorrt": "For TensorRT"}

ABOUT: Final = """`python -m benchmarks.w8a8 --write`. The command `sbonnx quantize` without a setting (with \
`--backend tensorrt` for TensorRT), and of each peer the documented setting with the highest SQNR. The same float file \
(for peers in opset 13 if it is older), the same calibration samples, and each written file executed in onnxruntime on \
the evaluation data: SQNR of the outputs against the float model, metric of the task, agreement with float, each with \
its 95 % interval (bootstrap over samples). CPU s: of the whole process, from its start to the file; ours verifies the \
file too; for ratios see [Cost of calibration](calibration.md), whose runs alternate. Metric and agreement: {metrics}. \
Peers that learn layer by layer run on {learned}, with 64 samples and {iterations} iterations a layer. Versions: \
{versions}."""

LADDER: Final = """`python -m benchmarks.w8a8 --only sbonnx --rungs {rungs} --write`. The values of `EFFORT` at W8A8, \
measured as in the table above."""


def peers_text(kept: Kept, models: Sequence[str], peers: Path) -> str:
    """Return the tables beside the peers."""
    versions = []
    for name in (name for name in TOOLS if name != OURS):
        why = environments.absent(peers, name)
        versions.append(environments.PEERS[name].versions if why is None else f"{TOOLS[name]} cannot be had: {why}")
    parts = ["## 8 bits beside the peers"]
    about = ABOUT.format(
        metrics=w8a8_table.metrics(models),
        learned=" and ".join(LEARNED_ON),
        iterations=ITERATIONS,
        versions="; ".join(versions),
    )
    for target, title in TARGETS.items():
        rows = rows_of(kept, {**ours((DEFAULT,)), **OURS_TENSORRT, **PEERS}, models, target)
        text = table(w8a8_table.HEADER, w8a8_table.lines(rows))
        parts += [f"### {title}", w8a8_table.verdict(rows, models), about + left_out(kept, models, target), text]
        about = "As above."
    return "\n\n".join(parts)


def left_out(kept: Kept, models: Sequence[str], target: str) -> str:
    """Return a sentence on the peers' settings that were not run, and on which models."""
    found = []
    for row, way in PEERS.items():
        missing = [name for name in way.only or models if name in models and kept.get(name, row) is None]
        if way.target == target and missing:
            found.append(row if len(missing) == len(way.only or models) else f"{row} on {', '.join(missing)}")
    return f" Not run: {'; '.join(found)}." if found else ""


def ladder_text(kept: Kept, models: Sequence[str], rungs: Sequence[str]) -> str:
    """Return the table of our settings by value of EFFORT."""
    named = dict(zip(rungs, ours(tuple(rungs)), strict=True))
    found = {(name, rung): kept.get(name, row) for name in models for rung, row in named.items()}
    held = {key: record for key, record in found.items() if record is not None}
    title = "## EFFORT at 8 bits"
    return f"{title}\n\n{w8a8_table.ladder(held, models, rungs)}\n\n{LADDER.format(rungs=' '.join(rungs))}"


def said(name: str, row: str, record: Record) -> str:
    """Format a record as a line of progress."""
    if record["note"]:
        return f"{name:20s} {row:40s} {record['note']}"
    figures = " ".join(f"{record[key]['value']:.4f}" for key in ("sqnr", "metric", "agreement"))
    return f"{name:20s} {row:40s} {figures}  {record['cpu']:.1f} CPU s"


def main() -> int:
    """Measure, print the tables and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(METRICS), choices=list(METRICS))
    parser.add_argument("--only", nargs="*", default=list(TOOLS), choices=list(TOOLS), help="quantizers to run")
    parser.add_argument("--again", action="store_true", help="measure the rows of --only again")
    parser.add_argument("--rungs", nargs="*", default=list(EFFORTS), choices=list(EFFORTS), help="values of EFFORT")
    parser.add_argument("--peers", type=Path, default=environments.FOLDER, help="folder of the peers' environments")
    parser.add_argument("--kept", type=Path, help="file of records; without it w8a8.jsonl in the folder of --peers")
    parser.add_argument("--minutes", type=float, default=20.0, help="the longest that one run may take")
    options = parser.parse_args()
    ways: Mapping[str, Way] = {**ours(tuple(options.rungs)), **OURS_TENSORRT, **PEERS}
    wanted = {row: way for row, way in ways.items() if way.quantizer in options.only}
    kept = Kept(options.kept or options.peers / "w8a8.jsonl", tuple(wanted) if options.again else ())
    with tempfile.TemporaryDirectory(prefix="w8a8-") as folder:
        bench = Bench(load_pack(options.pack), Path(folder), options.peers, kept, options.minutes)
        for row, way in wanted.items():
            for name in options.models:
                if not way.only or name in way.only:
                    print(said(name, row, bench.measure(name, row, way)), file=sys.stderr, flush=True)
        for name in options.models:
            bench.measure_float(name)
    texts = {"w8a8": peers_text(kept, options.models, options.peers)}
    if len(options.rungs) > 1:
        texts["effort"] = ladder_text(kept, options.models, options.rungs)
    for section, text in texts.items():
        print(f"{text}\n")
        if options.write:
            write_section(section, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Accuracy at 8 bits beside the peers: the default of the command, and each value of EFFORT.

    python -m benchmarks.w8a8 [--only sbonnx] [--again] [--models NAME ...] [--rungs default ...] [--write]

`make peers` builds the peers' environments first. Records are kept in a file, so an interrupted run continues;
``--only sbonnx --again`` measures our rows anew and takes the peers' from that file.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.lowbit_peers import environments
from benchmarks.results import arguments, write_section
from benchmarks.scores import METRICS
from benchmarks.w8a8_runs import Bench
from benchmarks.w8a8_ways import OURS_TENSORRT, PEERS, TOOLS, Way, ours


def said(name: str, row: str, record: Record) -> str:
    """Format a record as a line of progress."""
    if record["note"]:
        return f"{name:20s} {row:40s} {record['note']}"
    figures = " ".join(f"{record[key]['value']:.4f}" for key in ("sqnr", "metric", "agreement"))
    return f"{name:20s} {row:40s} {figures}  {record['cpu']:.1f} CPU s"


def main() -> int:
    """Measure, print the tables and, with --write, update docs/results.md."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(METRICS), choices=list(METRICS))
    parser.add_argument("--only", nargs="*", default=list(TOOLS), choices=list(TOOLS), help="quantizers to run")
    parser.add_argument("--again", action="store_true", help="measure the rows of --only again")
    parser.add_argument("--rungs", nargs="*", default=["default"], help="values of EFFORT")
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
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

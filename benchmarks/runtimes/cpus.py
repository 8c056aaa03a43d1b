"""Accuracy and time of 8-bit files on x86 CPUs with and without 8-bit dot products (VNNI).

    python -m benchmarks.runtimes.cpus [--models NAME ...] [--files FILE ...] [--rounds 40] [--write]

On a CPU with VNNI, the files for AVX2 are made and executed in a child process from which AVX-512 and VNNI are hidden
(`.ci/mask`; Linux). Records are kept in a file, so an interrupted run continues. OpenVINO's and numpy's instructions
are not hidden; neither computes a figure of this table.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.accuracy import load_pack
from benchmarks.kept import Kept, Record
from benchmarks.peers import environments
from benchmarks.results import ROOT, arguments, not_measured, table, write_section
from benchmarks.runtimes.default_latency import paired, runner
from benchmarks.scores import METRICS, Estimate
from benchmarks.w8a8.runs import Bench
from benchmarks.w8a8.table import DIGITS, FLOAT, metrics, shown
from benchmarks.w8a8.ways import OURS, Way
from sbonnx.system.cpu import CPUS, target_cpu
from sbonnx.system.runtime import EXACT_PRODUCTS
from sbonnx.tuning.kernel_timing import session

MASK: Final = ROOT / ".ci" / "mask" / "run.py"
VNNI, SHORT, PAIRS, EXACT = "VNNI", "AVX2, 7 bits", "AVX2, pair-safe", "AVX2, exact products"
CLOSE_DB: Final = 0.5
"""Largest loss of SQNR against the file for VNNI that counts as none."""


@dataclass(frozen=True)
class File:
    """A kind of file.

    Attributes:
        cpu: CPU that it is for, and that executes it.
        flags: flags of our command.
        entries: configuration of the session.
    """

    cpu: str
    flags: tuple[str, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)

    @property
    def way(self) -> Way:
        """The setting of our command."""
        return Way(OURS, flags=("--no-verify", "--cpu", self.cpu, *self.flags))


FILES: Final[Mapping[str, File]] = {
    VNNI: File("vnni"),
    SHORT: File("avx2", ("--set", "REDUCE_RANGE=true")),
    PAIRS: File("avx2"),
    EXACT: File("avx2", ("--set", "REDUCE_RANGE=false"), dict([EXACT_PRODUCTS])),
}

HEADER: Final = ("model", "file", "SQNR, dB", "metric", "agreement", "÷ float")

ABOUT: Final = """`python -m benchmarks.runtimes.cpus --write`. The command `sbonnx quantize` without a setting \
but the CPU, and files executed in onnxruntime on that CPU, on evaluation data that calibration did not see. VNNI: \
8-bit weights. AVX2, 7 bits: `REDUCE_RANGE: true`, the default of earlier versions; pair-safe: the default; exact \
products: 8-bit weights without limits (`REDUCE_RANGE: false`) in a session with `session.x64quantprecision`, which \
stores weights as uint8. SQNR of the outputs against the float model, metric of the task, agreement with float, each \
with its 95 % interval (bootstrap over samples). ÷ float: CPU time on one thread relative to the float model on that \
kind of CPU, one sample a run, {rounds} rounds in turn: median of the ratios with its 95 % interval. AVX2 is this \
machine with AVX-512 and VNNI hidden from onnxruntime. Metric and agreement: {metrics}."""


def measure(bench: Bench, name: str, row: str, rounds: int) -> Record:
    """Write a file of a model, evaluate it and measure its CPU time relative to float's, unless there is a record.

    Raises:
        ChildProcessError: the command failed.
    """
    file, model, output = FILES[row], Path(bench.pack.model_path(name)), bench.folder / f"{name}.onnx"

    def run() -> Record:
        output.unlink(missing_ok=True)
        bench.run(name, file.way, output)
        opened = session(output, optimise=True, entries=file.entries)
        (feed,) = bench.pack.load_calib(name, limit=1)
        _, ratio = paired(runner(session(model, optimise=True), feed), runner(opened, feed), rounds)
        return {**asdict(bench.evaluate(name, output, opened)), "ratio": asdict(ratio)}

    return bench.kept.record((name, row), run)


def lines(kept: Kept, models: Sequence[str]) -> list[list[str]]:
    """Return the rows of the table, each model's float metric first."""
    rows = []
    for name in models:
        if (record := kept.get(name, FLOAT)) is not None:
            rows.append([name, FLOAT, "", shown(Estimate(**record["metric"]), DIGITS["metric"]), "", "1"])
        for file in FILES:
            if (record := kept.get(name, file)) is not None:
                figures = [shown(Estimate(**record[what]), digits) for what, digits in {**DIGITS, "ratio": 2}.items()]
                rows.append([name, file, *figures])
    return rows


def verdict(kept: Kept, models: Sequence[str]) -> str:
    """Compare the default files for AVX2 with 7-bit weights and with the files for VNNI."""
    compared: dict[str, dict[str, Record]] = {}
    for name in models:
        records = {file: record for file in FILES if (record := kept.get(name, file)) is not None}
        if {VNNI, SHORT, PAIRS} <= records.keys():
            compared[name] = records
    if not compared:
        return "**No model was measured with all files.**"
    lost = [_value(each[VNNI], "sqnr") - _value(each[PAIRS], "sqnr") for each in compared.values()]
    gained = [_value(each[PAIRS], "sqnr") - _value(each[SHORT], "sqnr") for each in compared.values()]
    files = (PAIRS, SHORT, VNNI)
    close = {file: sum(_holds(each[file], kept.get(name, FLOAT)) for name, each in compared.items()) for file in files}
    times = {file: statistics.median(_value(each[file], "ratio") for each in compared.values()) for file in files}
    exact = [_value(e[EXACT], "ratio") / _value(e[PAIRS], "ratio") for e in compared.values() if EXACT in e]
    count = len(compared)
    said = (
        f"Pair-safe weights on AVX2: SQNR {statistics.median(gained):+.1f} dB against 7 bits (median; "
        f"{min(gained):+.1f} to {max(gained):+.1f}), at most {CLOSE_DB} dB below VNNI on "
        f"{sum(loss <= CLOSE_DB for loss in lost)} of {count} models. Float's metric is within the interval of "
        f"{', '.join(f'{file} on {hits} of {count}' for file, hits in close.items())}. CPU time relative to float "
        f"(median): {', '.join(f'{file} {time:.2f}' for file, time in times.items())}."
    )
    if exact:
        said += f" Exact products take {min(exact):.2f} to {max(exact):.2f} times that of pair-safe weights."
    return f"**{said}**"


def section(kept: Kept, models: Sequence[str], rounds: int) -> str:
    """Return the section of docs/results/."""
    missing = not_measured((name, file) for name in models for file in FILES if kept.get(name, file) is None)
    about = ABOUT.format(rounds=rounds, metrics=metrics(models)) + missing
    return (
        f"## 8 bits with and without VNNI\n\n{verdict(kept, models)}\n\n{about}\n\n{table(HEADER, lines(kept, models))}"
    )


def _value(record: Record, what: str) -> float:
    return float(record[what]["value"])


def _holds(record: Record, reference: Record | None) -> bool:
    """Whether the interval of the metric contains the metric of another record; without one: no."""
    metric = Estimate(**record["metric"])
    return reference is not None and metric.low <= _value(reference, "metric") <= metric.high


def command(cpu: str) -> list[str]:
    """Return how this process starts Python on a kind of CPU.

    Raises:
        LookupError: this CPU lacks its instructions.
    """
    if target_cpu().exact == CPUS[cpu].exact:
        return [sys.executable]
    if CPUS[cpu].exact:
        raise LookupError(f"this CPU has no instructions of '{cpu}'")
    return [sys.executable, str(MASK), sys.executable]


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(METRICS), choices=list(METRICS))
    parser.add_argument(
        "--files", nargs="*", default=list(FILES), choices=list(FILES), help="kinds of files to measure"
    )
    parser.add_argument("--rounds", type=int, default=40, help="measurements of CPU time")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "cpus.jsonl", help="file of records")
    cpus = tuple(dict.fromkeys(file.cpu for file in FILES.values()))
    parser.add_argument("--cpu", choices=cpus, help="only measure files for this CPU, in this process")
    options = parser.parse_args()
    rows = [row for row in options.files if FILES[row].cpu == options.cpu]
    with tempfile.TemporaryDirectory(prefix="cpus-") as folder:
        bench = Bench(load_pack(options.pack), Path(folder), environments.FOLDER, Kept(options.kept))
        for name in options.models if rows else ():
            bench.measure_float(name)
            for row in rows:
                record = measure(bench, name, row, options.rounds)
                figures = " ".join(f"{_value(record, what):.4f}" for what in (*DIGITS, "ratio"))
                print(f"{name:20s} {row:22s} {figures}", file=sys.stderr, flush=True)
    if options.cpu is not None:
        return 0
    for cpu in dict.fromkeys(FILES[row].cpu for row in options.files):
        try:
            start = command(cpu)
        except LookupError as error:
            print(error, file=sys.stderr)
            continue
        subprocess.run([*start, "-m", "benchmarks.runtimes.cpus", *sys.argv[1:], "--cpu", cpu], check=True, cwd=ROOT)
    text = section(Kept(options.kept), options.models, options.rounds)
    print(text)
    if options.write:
        write_section("cpus", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

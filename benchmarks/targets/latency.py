"""Latency on onnxruntime's CPU: float, sbonnx and each setting of the peer, in one process and by turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.accuracy import ours
from benchmarks.calibration.table import Cell, Measured, Target, alternate, ratio
from benchmarks.kernels.chains import counted, is_integer, kernels_of
from benchmarks.results import table
from benchmarks.targets.models import Feed, Subject, first_line, peers
from sbonnx.tuning.kernel_timing import optimised, session

THREADS = 2
LEAST_SECONDS = 0.02
"""Minimum duration of one measurement; the run is repeated until it is reached."""

GAIN = 1.1
"""Target speedup over the peer's best setting, as a geometric mean."""

HEADER = (
    "model",
    "batch",
    "float ms",
    "sbonnx ÷ float",
    "peer's best ÷ float",
    "sbonnx ÷ peer's best",
    "CPU: sbonnx ÷ float",
    "CPU: sbonnx ÷ peer's best",
    "sbonnx: integer kernels; left float",
    "peer's best: integer; left float",
)


@dataclass(frozen=True)
class Line:
    """One model at one batch size.

    Attributes:
        wall: wall seconds per run, 2 threads, by contestant.
        cpu: CPU seconds per run, 1 thread, by contestant.
        kernels: kernel counts, by contestant.
        failed: reasons of the contestants that failed.
    """

    name: str
    batch: int
    wall: Measured
    cpu: Measured
    kernels: Mapping[str, str]
    failed: Mapping[str, str]

    @property
    def best(self) -> str | None:
        """Fastest setting of the peer."""
        rivals = [label for label in self.wall if label not in ("float", "ours")]
        return min(rivals, key=lambda label: statistics.median(self.wall[label]), default=None)

    def cells(self) -> dict[str, Cell | None]:
        """Return the figures by column."""
        best = self.best or ""
        return {
            HEADER[3]: ratio(self.wall, "ours", "float", Target(1.0)),
            HEADER[4]: ratio(self.wall, best, "float"),
            HEADER[5]: ratio(self.wall, "ours", best, Target(1.0)),
            HEADER[6]: ratio(self.cpu, "ours", "float", Target(1.0)),
            HEADER[7]: ratio(self.cpu, "ours", best, Target(1.0)),
        }

    def row(self) -> list[str]:
        """Return the table row."""
        cells = {name: "–" if cell is None else str(cell) for name, cell in self.cells().items()}
        if self.best:
            cells[HEADER[4]] += f", {self.best}"
        if "ours" in self.failed:
            cells[HEADER[3]] = self.failed["ours"]
        ms = f"{statistics.median(self.wall['float']) * 1e3:.2f}"
        kernels = [self.kernels.get(label, "–") for label in ("ours", self.best or "")]
        return [self.name, str(self.batch), ms, *cells.values(), *kernels]


def contestants(one: Subject, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return files by contestant, "float" and "ours" first, and reasons of failures. Existing peer files are reused."""
    found, failed = {"float": one.model}, {}
    runs = {"ours": ours(one.model, one.feeds, "onnxruntime", verify=False), **peers(one, folder)}
    for label, run in runs.items():
        path = folder / f"{one.name} {label}.onnx"
        try:
            if label == "ours" or not path.exists():
                run(path)
            found[label] = path
        except Exception as error:
            failed[label] = first_line(error)
    return found, failed


def runner(path: Path, feed: Feed, threads: int) -> Callable[[], float]:
    """Return a function that measures the seconds of one run: CPU time for one thread, else wall time."""
    opened = session(path, threads=threads, optimise=True)
    given = {value.name: feed[value.name] for value in opened.get_inputs()}
    clock = time.process_time if threads == 1 else time.perf_counter

    def run() -> float:
        count, start = 0, clock()
        while (taken := clock() - start) < LEAST_SECONDS or not count:
            opened.run(None, given)
            count += 1
        return taken / count

    run()
    return run


def timed(files: Mapping[str, Path], feed: Feed, threads: int, repeats: int) -> Measured:
    """Measure the contestants alternately: seconds by contestant, one value per repeat."""
    runs = {label: runner(path, feed, threads) for label, path in files.items()}
    return alternate({label: lambda label=label: {label: runs[label]()} for label in runs}, repeats)  # type: ignore[misc]


def kernels(path: Path) -> str:
    """Describe the optimized graph: number of integer kernels, and the kernels that stay float."""
    whole, left = kernels_of(optimised(path))
    integers = sum(count for name, count in whole.items() if is_integer(name))
    floats = ", ".join(counted(*item) for item in left.most_common(4))
    more = "" if len(left) <= 4 else ", …"
    return f"{integers}; {left.total()}" + (f" ({floats}{more})" if left else "")


def measure(one: Subject, folder: Path, repeats: int) -> list[Line]:
    """Measure one model and return a line for each batch size."""
    files, failed = contestants(one, folder)
    shown = {label: kernels(path) for label, path in files.items() if label != "float"}
    lines = []
    for batch, feed in one.batches().items():
        wall = timed(files, feed, THREADS, repeats)
        cpu = timed(files, feed, 1, max(3, repeats // 3))
        lines.append(Line(one.name, batch, wall, cpu, shown, failed))
        print(" | ".join(lines[-1].row()), flush=True)
    return lines


def geometric(lines: Sequence[Line]) -> list[list[str]]:
    """Return the last row: geometric means of the medians over all lines that have the figure."""
    targets = {HEADER[3]: Target(1.0), HEADER[5]: Target(1 / GAIN), HEADER[7]: Target(1 / GAIN)}
    found = []
    for name in HEADER[3:8]:
        values = [cell.value for line in lines if (cell := line.cells()[name]) is not None]
        mean = float(np.exp(np.mean(np.log(values)))) if values else float("nan")
        found.append(str(Cell((mean,), targets.get(name, Target()))))
    return [["geometric mean", "", "", *found, "", ""]]


def text(lines: Sequence[Line], repeats: int) -> str:
    """Return the table with its explanation."""
    lost = [f"- {line.name}, {who}: {why}" for line in lines for who, why in line.failed.items()]
    return (
        "## Latency, onnxruntime on CPU\n\n"
        f'{THREADS} threads, all graph optimisations, no spinning; float, sbonnx (`backend="onnxruntime"`, defaults) '
        f"and the peer's settings take turns in one process, {repeats} times. A figure is the median of the ratios of "
        "one turn each, with the smallest and the largest. CPU: CPU time on one thread, which the load of the machine "
        "hardly moves. The peer is onnxruntime.quantization on the same data after its own preprocessing, min-max, "
        "QDQ; uint8 or int8 activations, weights per channel or per tensor, for minilm_l6 also dynamic; its best is "
        "the fastest of these for the model and batch.\n\n"
        + table(HEADER, [*(line.row() for line in lines), *geometric(lines)])
        + ("\n\nNot measured:\n\n" + "\n".join(sorted(set(lost))) if lost else "")
    )

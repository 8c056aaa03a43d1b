"""Takes the figures of one model: cells by name of the figure, and remarks for people."""

from __future__ import annotations

import gc
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.calibration import ways
from benchmarks.calibration.child import Outcome, spawn
from benchmarks.calibration.peer import METHODS
from benchmarks.calibration.profile import Watch, halves, parts
from benchmarks.calibration.subjects import Samples, Subject
from benchmarks.calibration.table import Cell, Measured, Target, alternate, difference, ratio
from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import Dataset
from sbonnx.stages.state import Prepared

FIGURES: Final = ("speed", "asym", "cache", "profile", "memory", "peer")

PROFILED: Final = ("minmax", "mse")
PARTS: Final = ("run", "statistics", "solve", "rest")

LONG: Final = 8
"""Factor of the number of samples for measuring memory growth: 1,024 for 128."""

AS_FAST: Final = Target(1.0)
SEARCHED: Final = {"resnet18": Target(1.6), "minilm_l6": Target(1.6), "mobilenetv2": Target(2.2)}
"""Targets for the wall time of a histogram observer ÷ wall time of the float loop; SqueezeNet has none."""

PEER_SPEED: Final = {"minmax": 2.0, "percentile": 5.0, "kl_histogram": 5.0}
EXTRA_MB: Final = 150.0
ASYM_MB: Final = round(512 * 2**20 / 1e6 + 250)
NOISE_MB: Final = 8.0
"""Run-to-run noise of peak memory; smaller differences are not growth."""

ENOUGH: Final = 3
"""Number of repeats for memory measurements, whose peaks hardly vary, and for profiles."""

QUIET: Final = 0.03
"""Largest CPU share of other processes during a measurement of wall time."""

SAME_RANGE: Final = 1e-3
"""Largest difference, relative to the width of the range, between two calibrations of the same tensor. The peer runs
without onnxruntime's optimizer, which changes sums in the last bits."""


@dataclass
class Findings:
    """Measurements of one model.

    Attributes:
        cells: table cells by name of the figure.
        remarks: notes that are printed outside of the table.
    """

    cells: dict[str, Cell | str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def add(self, name: str, cell: Cell | None) -> None:
        """Add a figure, unless it is None."""
        if cell is not None:
            self.cells[name] = cell


@dataclass(frozen=True)
class Effort:
    """Amount of measurement: repeats, samples, samples for the peer, and the selected `FIGURES`."""

    repeats: int
    count: int
    peer_count: int
    figures: tuple[str, ...]


def measure(subject: Subject, effort: Effort) -> Findings:
    """Measure the selected figures of one model."""
    findings = Findings()
    watch = Watch()
    in_process(subject, effort, findings)
    if "profile" in effort.figures:
        profile(subject, effort, findings)
    if watch.others() > QUIET:
        findings.remarks.append(
            f"other processes took {watch.others():.0%} of the processors during the runs in one process, which slows "
            "the float loop, whose threads wait for one another, more than ours: not to be relied on"
        )
    if "memory" in effort.figures:
        memory(subject, effort, findings)
    if "peer" in effort.figures:
        beside_peer(subject, effort, findings)
    return findings


def in_process(subject: Subject, effort: Effort, findings: Findings) -> None:
    """Measure the alternating timings in this process."""
    chosen = timed(subject, effort.count, effort.figures)
    if len(chosen) == 1:  # only the float loop: there is nothing to compare
        return
    alternate(timed(subject, 2, effort.figures), 1)  # warm-up: imports, page faults, thread creation
    found = alternate(chosen, effort.repeats)
    made = ways.prepared(subject.model, "minmax")
    values = ways.values_observed(made, subject.samples(1)) / 1e6
    findings.cells["observed tensors; values a sample"] = f"{len(ways.observed(made))}; {values:.2f} M"
    findings.cells["float loop, s"] = f"{statistics.median(found['float']):.2f}"
    for name in ("minmax", "moving_average", *ways.HISTOGRAM):
        target = AS_FAST if name == "minmax" else Target()
        if name in ("percentile", "mse", "kl_histogram", "auto"):
            target = SEARCHED.get(subject.name, Target())
        findings.add(f"{name} ÷ float loop", ratio(found, name, "float", target))
    findings.add("asym, layer granularity ÷ float loop", ratio(found, "asym", "float", Target(6.0)))
    for name in ("percentile", "mse", "auto"):
        findings.add(f"from the cache, {name} ÷ first run", ratio(found, f"then {name}", "first run", Target(0.05)))


def profile(subject: Subject, effort: Effort, findings: Findings) -> None:
    """Measure the CPU time of the parts of calibration relative to the float loop, and the speedup of two threads
    without observation.
    """
    session, samples = ways.float_session(subject.model), subject.samples(effort.count)
    two = halves(subject.model, samples)
    chosen: dict[str, Callable[[], ways.Seconds]] = {
        "float": lambda: _float(session, samples),
        "halves": lambda: {"halves": two()},
    }
    for name in PROFILED:
        made = ways.prepared(subject.model, name)
        chosen[name] = partial(_parts, name, made, ways.dataset(made.graph, samples))
    found = alternate({name: partial(_settled, way) for name, way in chosen.items()}, min(effort.repeats, ENOUGH))
    findings.add("float loop by two threads, one sample each ÷ float loop", ratio(found, "halves", "float"))
    floats = statistics.median(found["float CPU"])
    for name in PROFILED:
        shares = {part: statistics.median(found[f"{name} {part}"]) / floats for part in PARTS}
        text = ", ".join(f"{part} {share:.2f}" for part, share in shares.items())
        findings.cells[f"{name}, CPU ÷ CPU of the float loop"] = f"{sum(shares.values()):.2f}: {text}"


def _parts(name: str, made: Prepared, data: Dataset) -> ways.Seconds:
    return {f"{name} {part}": seconds for part, seconds in parts(made, data).items()}


def timed(subject: Subject, count: int, figures: tuple[str, ...]) -> dict[str, Callable[[], ways.Seconds]]:
    """Return the methods to time, by name, over `count` samples."""
    session, samples = ways.float_session(subject.model), subject.samples(count)
    made = {name: ways.prepared(subject.model, name) for name in ("minmax", "moving_average", "mse")}
    data = ways.dataset(made["mse"].graph, samples)
    found: dict[str, Callable[[], ways.Seconds]] = {"float": lambda: _float(session, samples)}
    if "speed" in figures:
        for name in ("minmax", "moving_average"):
            found[name] = lambda name=name: {name: ways.ranges(made[name].graph, made[name].plan, data)[0]}  # type: ignore[misc]
        found["histogram"] = lambda: ways.histogram_ranges(made["mse"], data)
    if "asym" in figures:
        found["asym"] = lambda: {"asym": ways.asym(made["minmax"], data)}
    if "cache" in figures:
        found["cache"] = lambda: ways.cached(subject.model, samples)
    return {name: partial(_settled, way) for name, way in found.items()}


def _float(session: Any, samples: Samples) -> ways.Seconds:
    """Measure wall and CPU time of the float loop; the CPU time includes its spinning threads."""
    begin = time.process_time()
    wall = ways.float_pass(session, samples)
    return {"float": wall, "float CPU": time.process_time() - begin}


def _settled(way: Callable[[], ways.Seconds]) -> ways.Seconds:
    """Run after a pause, when the threads of earlier runs are idle."""
    gc.collect()
    time.sleep(ways.SETTLE)
    return way()


def memory(subject: Subject, effort: Effort, findings: Findings) -> None:
    """Measure the peak memory of processes: float loop and calibration, on the samples and on `LONG` times as many."""
    few, many = effort.count, effort.count * LONG
    kinds = {"float": "float", "minmax": "ours:minmax", "mse": "ours:mse"}

    def peaks(count: int, names: Sequence[str], repeats: int) -> Measured:
        return alternate({n: partial(_peak, subject, kinds[n], count, f"{n} {count}") for n in names}, repeats)

    repeats = min(effort.repeats, ENOUGH)
    found = peaks(few, list(kinds), repeats)
    found |= {name: values * repeats for name, values in peaks(many, ["float", "mse"], 1).items()}
    findings.add("float loop, peak", Cell(tuple(found[f"float {few}"]), unit="MB"))
    for name in ("minmax", "mse"):
        extra = difference(found, f"{name} {few}", f"float {few}", Target(EXTRA_MB))
        findings.add(f"{name}, peak − that of the float loop", extra)
    growth = difference(found, f"mse {many}", f"mse {few}", Target(NOISE_MB))
    findings.add(f"mse, growth of the peak from {few:,} to {many:,} samples", growth)
    growth = difference(found, f"float {many}", f"float {few}")
    findings.add(f"float loop, growth of the peak from {few:,} to {many:,} samples", growth)
    if "asym" in effort.figures:
        found = alternate({"asym": partial(_peak, subject, "asym", few, "asym")}, repeats)
        findings.add("asym under 512 MiB, peak", Cell(tuple(found["asym"]), Target(ASYM_MB), "MB"))


def _peak(subject: Subject, way: str, count: int, name: str) -> dict[str, float]:
    return {name: spawn(subject, way, count).peak_mb}


def beside_peer(subject: Subject, effort: Effort, findings: Findings) -> None:
    """Compare with onnxruntime.quantization: separate processes that calibrate the same fused graph."""
    with tempfile.TemporaryDirectory(prefix="calibration-") as folder:
        graph, plan = Path(folder) / "fused.onnx", Path(folder) / "plan.pickle"
        plain = alternate({"float": partial(_seconds, subject, effort.peer_count)}, effort.repeats)
        for name in METHODS:
            made = ways.prepared(subject.model, name)
            graphs.save(made.graph, graph, force=True)
            plan.write_bytes(pickle.dumps(made.plan))
            last: dict[str, Outcome] = {}
            sides = {
                "ours": partial(spawn, subject, "planned", effort.peer_count, graph=str(graph), plan=str(plan)),
                "peer": partial(
                    spawn, subject, f"peer:{name}", effort.peer_count, graph=str(graph), tensors=ways.observed(made)
                ),
            }
            try:
                found = alternate(
                    {side: partial(_both, side, run, last) for side, run in sides.items()}, effort.repeats
                )
            except ChildProcessError as error:  # most likely, the peer ran out of memory
                findings.remarks.append(f"no figures beside the peer's {METHODS[name]}: {error}")
                continue
            if name == "minmax":
                findings.cells["peer: largest difference of a min-max range"] = _agreement(last["ours"], last["peer"])
            target = Target(PEER_SPEED[name], "at least")
            findings.add(f"peer's {METHODS[name]} s ÷ {name}", ratio(found, "peer s", "ours s", target))
            findings.add(f"peer's {METHODS[name]} s ÷ float loop", ratio(found | plain, "peer s", "float s"))
            memory_used = ratio(found, "ours MB", "peer MB", AS_FAST)
            findings.add(f"{name}, peak ÷ peak of the peer's {METHODS[name]}", memory_used)
            findings.add(f"peer's {METHODS[name]}, peak", Cell(tuple(found["peer MB"]), unit="MB"))


def _seconds(subject: Subject, count: int) -> dict[str, float]:
    return {"float s": spawn(subject, "float", count).seconds}


def _both(side: str, run: Callable[[], Outcome], last: dict[str, Outcome]) -> dict[str, float]:
    """Return seconds and memory of a side and store its outcome in `last`."""
    last[side] = run()
    return {f"{side} s": last[side].seconds, f"{side} MB": last[side].peak_mb}


def _agreement(ours: Outcome, theirs: Outcome) -> str:
    """Describe the difference of the min-max ranges, as a check that both sides observed the same values.

    Raises:
        SystemExit: the ranges differ by more than `SAME_RANGE`.
    """
    if ours.ranges.keys() != theirs.ranges.keys():
        odd = sorted(ours.ranges.keys() ^ theirs.ranges.keys())
        raise SystemExit(f"the peer observes other tensors: '{odd[0]}' and {len(odd) - 1} more are on one side only")
    worst = max(apart(ours.ranges[name], theirs.ranges[name]) for name in ours.ranges)
    if worst > SAME_RANGE:
        raise SystemExit(f"the peer's min-max ranges differ from ours by up to {worst:.1e} of their width")
    return f"{worst:.0e} of its width"


def apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the largest difference of the bounds, relative to the width of the first range."""
    width = max(one[1] - one[0], sys.float_info.min)
    return max(abs(one[0] - other[0]), abs(one[1] - other[1])) / width

"""One job in a process of its own, whose peak of memory is the answer.

    python -m benchmarks.calibration_child '{"way": "float", "model": "m.onnx", "data": "d.npz", "count": 128}'

The last line on stdout is JSON: peak_mb and start_mb (the peak before the work began, imports done and samples read),
seconds, and for calibration the ranges by tensor. Ways: float; ours:OBSERVER and asym, from the model's file on;
planned, from a fused graph and a plan on; peer:OBSERVER, from a fused graph and the names of the tensors on.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.calibration_subjects import Subject

ROOM = 14 << 30
"""Bytes of addresses that a peer may take: it keeps all activations of all samples, and the machine has others."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """What a child says.

    Attributes:
        peak_mb: most memory that its process ever had, in units of 10**6 bytes.
        start_mb: the same before the work began: interpreter, imports and samples.
        seconds: of the work.
        ranges: by tensor, where it calibrated.
    """

    peak_mb: float
    start_mb: float
    seconds: float
    ranges: dict[str, Range] = field(default_factory=dict)


def spawn(subject: Subject, way: str, count: int, **more: str | Sequence[str]) -> Outcome:
    """Run a way in a process of its own.

    Args:
        more: what the way needs besides: "graph", a file; "plan", a file with a pickled `Plan`; "tensors", names.

    Raises:
        ChildProcessError: it failed; with the last line that it said.
    """
    job = {"way": way, "model": str(subject.model), "data": str(subject.data), "count": count, **more}
    command = [sys.executable, "-m", "benchmarks.calibration_child", json.dumps(job)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ChildProcessError(f"{subject.name}, {way}, {count} samples: {said[-1][:200]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    ranges = {name: (float(lo), float(hi)) for name, (lo, hi) in told.pop("ranges").items()}
    return Outcome(**told, ranges=ranges)


def peak_mb() -> float:
    """Most memory this process ever had. Not ru_maxrss: that begins with what the parent had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("/proc/self/status has no VmHWM: memory can be measured on Linux only")


def main() -> int:
    """Do the job and say how it went."""
    job = json.loads(sys.argv[1])
    kind, _, observer = job["way"].partition(":")
    subject = Subject("", Path(job["model"]), Path(job["data"]))
    work = {"float": _float, "ours": _ours, "asym": _asym, "planned": _planned, "peer": _peer}[kind]
    start, seconds, ranges = work(subject, observer, job)
    print(json.dumps({"peak_mb": peak_mb(), "start_mb": start, "seconds": seconds, "ranges": ranges}))
    return 0


def _float(subject: Subject, _: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """The plain loop: nothing of ours is imported."""
    import time

    import onnxruntime

    samples = subject.samples(job["count"])
    before = peak_mb()
    session = onnxruntime.InferenceSession(str(subject.model), providers=["CPUExecutionProvider"])
    start = time.perf_counter()
    for feed in samples:
        session.run(None, feed)
    return before, time.perf_counter() - start, {}


def _ours(subject: Subject, observer: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """From the file to ranges: reading, simplifying, fusing and planning too."""
    import time

    from benchmarks import calibration_ways as ways

    samples = subject.samples(job["count"])
    before, start = peak_mb(), time.perf_counter()
    made = ways.prepared(subject.model, observer)
    _, found = ways.ranges(made.graph, made.plan, ways.dataset(made.graph, samples))
    return before, time.perf_counter() - start, ways.by_tensor(made.plan, found)


def _planned(subject: Subject, way: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """From a fused graph in its file to ranges: what a peer does in its process."""
    import pickle
    import time

    import onnxruntime  # noqa: F401  # the peer has it already when its time begins

    from benchmarks import calibration_ways as ways
    from sbonnx.graph import load

    samples = subject.samples(job["count"])
    plan = pickle.loads(Path(job["plan"]).read_bytes())
    before, start = peak_mb(), time.perf_counter()
    graph = load(Path(job["graph"]))
    _, found = ways.ranges(graph, plan, ways.dataset(graph, samples))
    return before, time.perf_counter() - start, ways.by_tensor(plan, found)


def _asym(subject: Subject, _: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """Both streams, layer by layer."""
    from benchmarks import calibration_ways as ways

    samples = subject.samples(job["count"])
    before = peak_mb()
    made = ways.prepared(subject.model, "minmax")
    return before, ways.asym(made, ways.dataset(made.graph, samples)), {}


def _peer(subject: Subject, observer: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """onnxruntime.quantization, from the file to ranges."""
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    from benchmarks import calibration_peer as peer

    samples = subject.samples(job["count"])
    before = peak_mb()
    peer.observe_only(job["tensors"])
    return before, *peer.ranges(Path(job["graph"]), peer.METHODS[observer], samples)


if __name__ == "__main__":
    raise SystemExit(main())

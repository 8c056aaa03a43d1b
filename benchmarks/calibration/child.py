"""One job in a process of its own, whose peak of memory is the answer.

    python -m benchmarks.calibration.child '{"way": "float", "model": "m.onnx", "data": "d.npz", "count": 128}'

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

from benchmarks.calibration.subjects import Subject

ROOM = 14 << 30
"""Address space limit of a peer in bytes. A peer keeps all activations of all samples in memory, and the machine is
shared."""

Range = tuple[float, float]


@dataclass(frozen=True)
class Outcome:
    """Measurements of a child process.

    Attributes:
        peak_mb: peak memory of the process, in units of 10**6 bytes.
        start_mb: peak memory before the work: interpreter, imports and samples.
        seconds: duration of the work.
        ranges: ranges by tensor, if it calibrated.
    """

    peak_mb: float
    start_mb: float
    seconds: float
    ranges: dict[str, Range] = field(default_factory=dict)


def spawn(subject: Subject, way: str, count: int, **more: str | Sequence[str]) -> Outcome:
    """Run one calibration method in a child process.

    Args:
        subject: model and data.
        way: method, such as "ours:minmax".
        count: number of samples.
        more: further arguments of the method: "graph", a file; "plan", a file with a pickled `Plan`; "tensors", names.

    Raises:
        ChildProcessError: the process failed; with its last line of output.
    """
    job = {"way": way, "model": str(subject.model), "data": str(subject.data), "count": count, **more}
    command = [sys.executable, "-m", "benchmarks.calibration.child", json.dumps(job)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, check=False, cwd=root, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ChildProcessError(f"{subject.name}, {way}, {count} samples: {said[-1][:200]}")
    told = json.loads(done.stdout.strip().splitlines()[-1])
    ranges = {name: (float(lo), float(hi)) for name, (lo, hi) in told.pop("ranges").items()}
    return Outcome(**told, ranges=ranges)


def peak_mb() -> float:
    """Return the peak memory of this process. Not from ru_maxrss, which starts with the memory of the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit("/proc/self/status has no VmHWM: memory can be measured on Linux only")


def main() -> int:
    """Run the job and print its outcome as JSON."""
    job = json.loads(sys.argv[1])
    kind, _, observer = job["way"].partition(":")
    subject = Subject("", Path(job["model"]), Path(job["data"]))
    work = {"float": _float, "ours": _ours, "asym": _asym, "planned": _planned, "peer": _peer}[kind]
    start, seconds, ranges = work(subject, observer, job)
    print(json.dumps({"peak_mb": peak_mb(), "start_mb": start, "seconds": seconds, "ranges": ranges}))
    return 0


def _float(subject: Subject, _: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """Run the plain float loop, without importing sbonnx."""
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
    """Calibrate from the model file, including reading, simplification, fusion and planning."""
    import time

    from benchmarks.calibration import ways

    samples = subject.samples(job["count"])
    before, start = peak_mb(), time.perf_counter()
    made = ways.prepared(subject.model, observer)
    _, found = ways.ranges(made.graph, made.plan, ways.dataset(made.graph, samples))
    return before, time.perf_counter() - start, ways.by_tensor(made.plan, found)


def _planned(subject: Subject, way: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """Calibrate from the file of a fused graph, the same task as a peer in its process."""
    import pickle
    import time

    import onnxruntime  # noqa: F401  # the peer has it already when its time begins

    from benchmarks.calibration import ways
    from sbonnx.graph import load

    samples = subject.samples(job["count"])
    plan = pickle.loads(Path(job["plan"]).read_bytes())
    before, start = peak_mb(), time.perf_counter()
    graph = load(Path(job["graph"]))
    _, found = ways.ranges(graph, plan, ways.dataset(graph, samples))
    return before, time.perf_counter() - start, ways.by_tensor(plan, found)


def _asym(subject: Subject, _: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """Calibrate layer by layer with quantized inputs: float and quantized stream."""
    from benchmarks.calibration import ways

    samples = subject.samples(job["count"])
    before = peak_mb()
    made = ways.prepared(subject.model, "minmax")
    return before, ways.asym(made, ways.dataset(made.graph, samples)), {}


def _peer(subject: Subject, observer: str, job: dict[str, Any]) -> tuple[float, float, dict[str, Range]]:
    """Calibrate from the model file with onnxruntime.quantization."""
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    from benchmarks.calibration import peer

    samples = subject.samples(job["count"])
    before = peak_mb()
    peer.observe_only(job["tensors"])
    return before, *peer.ranges(Path(job["graph"]), peer.METHODS[observer], samples)


if __name__ == "__main__":
    raise SystemExit(main())

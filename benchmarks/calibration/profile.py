"""Where the time of calibration goes, in seconds of processors, and what two cores can gain at all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.calibration.subjects import Samples
from benchmarks.calibration.ways import Seconds
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine import samples as calibration
from sbonnx.calib.engine.session import Bound
from sbonnx.calib.sketches import Panel
from sbonnx.stages.state import Prepared


def parts(made: Prepared, data: Dataset) -> Seconds:
    """Measure the CPU seconds of calibration by part.

    Parts: "run", the graph with its observed tensors as outputs; "statistics"; "solve", the ranges; and "rest", which
    is mostly the creation of sessions.
    """
    taken: Seconds = {}
    begin = time.process_time()
    with _timed(Bound, "run", "run", taken), _timed(Panel, "observe", "statistics", taken):
        with Calibrator(made.graph, made.plan) as calibrator:
            calibrator.observe_all(calibration.Samples.of(data, made.graph))
            solving = time.process_time()
            calibrator.ranges()
            taken["solve"] = time.process_time() - solving
        taken["rest"] = time.process_time() - begin - sum(taken.values())
    return taken


def halves(model: Path, samples: Samples) -> Callable[[], float]:
    """Return a float loop as in calibration: two threads with half of the samples each, one intra-op thread.

    Returns:
        function that runs the loop and returns its wall time in seconds.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    feeds = list(samples)

    def loop(first: int) -> None:
        for feed in feeds[first::2]:
            session.run(None, feed)

    def run() -> float:
        threads = [threading.Thread(target=loop, args=(first,)) for first in (0, 1)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    return run


class Watch:
    """Load of the machine by other processes since the creation of the object. Linux only: reads /proc/stat."""

    def __init__(self) -> None:
        self._start = self._now()

    def others(self) -> float:
        """Return the share of CPU time that other processes, and other virtual machines on the host, used."""
        ours, busy, whole = (now - then for now, then in zip(self._now(), self._start, strict=True))
        return max(0.0, busy - ours) / max(whole, 1e-9)

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Return CPU seconds: of this process and its finished children; of all processes; and the total available."""
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, idle, waiting, irq, softirq, stolen = (ticks / os.sysconf("SC_CLK_TCK") for ticks in fields)
        busy = user + nice + system + irq + softirq + stolen
        return sum(os.times()[:4]), busy, busy + idle + waiting


@contextmanager
def _timed(kind: type[Any], method: str, part: str, taken: Seconds) -> Iterator[None]:
    """Add the CPU seconds of a method, in any thread, to a part."""
    plain = getattr(kind, method)
    lock = threading.Lock()

    def timed(*arguments: Any, **named: Any) -> Any:
        start = time.thread_time()
        try:
            return plain(*arguments, **named)
        finally:
            with lock:
                taken[part] = taken.get(part, 0.0) + time.thread_time() - start

    setattr(kind, method, timed)
    try:
        yield
    finally:
        setattr(kind, method, plain)

"""Calibration that goes on for long, and calibration of more activations than the machine has memory.

    python -m benchmarks.calibration.soak [--write] [--samples 10000] [--gigabytes 0]

Two figures, each in a process of its own:

- MobileNetV2 at 224 px over `--samples` samples: resident memory after a tenth of them and at the end.
- Layer by layer under `memory="512 MiB"`: a small net over so many samples that its activations, all layers taken
  together, are `--gigabytes` (0: twice the memory of the machine). Peak memory, what was spilled, what was made again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import table, write_section
from sbonnx.options import RunOptions

MIB = 1 << 20
BUDGET = 512 * MIB


def resident(what: str) -> float:
    """Return the memory of this process in MB: VmRSS (current) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1000


class Cycle:
    """Data set of `count` samples that repeats a few feeds and records the resident memory."""

    def __init__(self, feeds: list[dict[str, Any]], count: int, notes: list[float]) -> None:
        self.feeds, self.count, self.notes = feeds, count, notes

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(self.count):
            if index in (self.count // 10, self.count - 1):
                self.notes.append(resident("VmRSS"))
            yield self.feeds[index % len(self.feeds)]


def long_run(samples: int) -> dict[str, float]:
    """Calibrate MobileNetV2 with histograms of every observed tensor."""
    from benchmarks.models import mobilenet
    from sbonnx.calib.calibrator import Calibrator
    from sbonnx.calib.data.dataset import read
    from sbonnx.calib.engine.samples import Samples
    from sbonnx.pipeline import prepare
    from sbonnx.stages.state import read_recipe

    prepared = prepare(mobilenet(), *read_recipe(None, None, {"observer": "mse"}))
    rng = np.random.default_rng(0)
    feeds = [{"image": rng.standard_normal((1, 3, 224, 224)).astype(np.float32)} for _ in range(16)]
    notes: list[float] = []
    began = time.perf_counter()
    with Calibrator(prepared.graph, prepared.plan) as calibrator:
        data = read(Cycle(feeds, samples, notes), prepared.graph)
        notes.clear()
        calibrator.observe_all(Samples.of(data, prepared.graph))
        calibrator.ranges()
    seconds = time.perf_counter() - began
    return {"samples": samples, "early": notes[0], "late": notes[-1], "peak": resident("VmHWM"), "seconds": seconds}


SMALL = """
small (float[64, 8, 24, 24] t0) => (float[64, 8, 24, 24] y) {
    t1 = Conv<kernel_shape=[1,1]>(t0, w1) r1 = Relu(t1)
    t2 = Conv<kernel_shape=[1,1]>(r1, w2) r2 = Relu(t2)
    t3 = Conv<kernel_shape=[1,1]>(r2, w3) r3 = Relu(t3)
    t4 = Conv<kernel_shape=[1,1]>(r3, w4) y = Relu(t4)
}
"""
BATCH = 64
TENSOR_BYTES = 8 * 24 * 24 * 4
TENSORS = 5


def large_run(gigabytes: float) -> dict[str, float]:
    """Calibrate the small network layer by layer."""
    import onnx

    from sbonnx.calib.calibrator import Calibrator
    from sbonnx.calib.engine.samples import Samples
    from sbonnx.calib.storage.tensor_store import StoreCounters, TensorStore
    from sbonnx.pipeline import prepare
    from sbonnx.stages.state import read_recipe

    rng = np.random.default_rng(0)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]>{SMALL}')
    for number in range(1, 5):
        weight = rng.standard_normal((8, 8, 1, 1)).astype(np.float32) / 3
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{number}"))
    prepared = prepare(proto, *read_recipe(None, "virtual", {}))
    samples = int(gigabytes * 1e9 / (TENSOR_BYTES * TENSORS))
    feeds = [{"t0": rng.standard_normal((BATCH, 8, 24, 24)).astype(np.float32)} for _ in range(4)]
    counters: list[StoreCounters] = []
    close = TensorStore.close

    def closing(self: TensorStore) -> None:
        counters.append(self.counters)
        close(self)

    TensorStore.close = closing  # type: ignore[method-assign]
    before = resident("VmHWM")
    began = time.perf_counter()
    with Calibrator(prepared.graph, prepared.plan, RunOptions(granularity="layer", memory=BUDGET)) as calibrator:
        calibrator.observe_all(Samples.of(Cycle(feeds, samples // BATCH, []), prepared.graph))
        calibrator.ranges()
    seconds = time.perf_counter() - began
    last = counters[0]
    return {
        "gigabytes": samples // BATCH * BATCH * TENSOR_BYTES * TENSORS / 1e9,
        "before": before,
        "peak": resident("VmHWM"),
        "spilled": last.peak_spilled / 1e9,
        "recomputed": last.recomputed,
        "seconds": seconds,
    }


ABOUT = """## Long runs and more activations than memory

`python -m benchmarks.calibration.soak --write`; each row in its own process. MB and GB are 10**6 and 10**9 bytes.

"""


def apart(what: str, amount: float) -> dict[str, float]:
    """Measure one figure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.calibration.soak", "--only", what, "--amount", str(amount)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run the soak tests and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the table into its page of docs/results/")
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=0.0, help="0: twice the memory of the machine")
    parser.add_argument("--only", choices=["long", "large"], help=argparse.SUPPRESS)
    parser.add_argument("--amount", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        print(json.dumps(long_run(int(options.amount)) if options.only == "long" else large_run(options.amount)))
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    long = apart("long", options.samples)
    large = apart("large", options.gigabytes or 2 * memory)
    rows = [
        (
            f"MobileNetV2, histograms, {long['samples']:.0f} samples",
            f"resident {long['early']:.0f} MB after a tenth, {long['late']:.0f} MB at the end, "
            f"peak {long['peak']:.0f} MB",
            f"{long['seconds']:.0f} s",
        ),
        (
            f"small net layer by layer, {large['gigabytes']:.1f} GB of activations, "
            f"machine {memory:.1f} GB, budget {BUDGET / 1e6:.0f} MB",
            f"peak {large['peak']:.0f} MB ({large['before']:.0f} before), {large['spilled']:.1f} GB on disk at most, "
            f"{large['recomputed']:.0f} arrays made again",
            f"{large['seconds']:.0f} s",
        ),
    ]
    text = ABOUT + table(("run", "memory", "time"), rows)
    print(text)
    if options.write:
        write_section("soak", text)


if __name__ == "__main__":
    main()

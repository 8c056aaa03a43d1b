"""Time and memory of roundings: whole models within a limit, the loss of each layer, and peaks by samples."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.calibration.table import Cell, Target
from benchmarks.lowbit.runs import Bench, run
from benchmarks.lowbit.ways import Overrides
from benchmarks.results import table

SECONDS: Final[Mapping[str, float]] = {"cifar_resnet20": 15.0, "squeezenet11": 60.0}
"""Targets for the wall time of the default at W4A8, including statistics, on two cores."""

FLOAT_INPUTS: Final = {"w_bit": 4, "a_bit": 8, "CALIBRATION.MOMENTS.INPUTS": "float"}
"""Settings with float input activations for each layer, regardless of earlier layers, so that losses are comparable."""

COUNTS: Final = (64, 256, 1024)
ROUNDINGS: Final[Mapping[str, Overrides]] = {
    "gptq": {"rounding": "gptq"},
    "adaround by moments": {"rounding": "adaround"},
}
MEMORY: Final = "4 MiB"
"""Memory budget below half of one tensor of the smallest number of samples, so that caches have the same size in all
runs."""
FLAT: Final = 1.1
"""Largest ratio of the peaks with most and with fewest samples that counts as constant memory; run-to-run noise is a
few percent."""

Gains = Mapping[str, Sequence[float]]


def child(bench: Bench, name: str, overrides: Overrides, **more: Any) -> dict[str, Any]:
    """Run sbonnx once in a child process; see `benchmarks.lowbit.child`."""
    data, count = bench.data(name)
    output = str(bench.folder / f"{name}.effort.onnx")
    job = {"model": str(bench.pack.model_path(name)), "data": str(data), "count": count, "output": output}
    command = [
        sys.executable,
        "-m",
        "benchmarks.lowbit.child",
        json.dumps({**job, "overrides": dict(overrides), **more}),
    ]
    return run(command, None)


# --- time --------------------------------------------------------------------------------------------


def time_text(bench: Bench, cores: int) -> str:
    """Return the table of time and of losses by layer."""
    found = []
    for name, limit in SECONDS.items():
        runs = [child(bench, name, {"w_bit": 4, "a_bit": 8}) for _ in range(bench.effort.repeats)]
        wall = Cell(tuple(one["wall"] for one in runs), Target(limit), "s")
        losses = by_layer(bench, name)
        found.append(
            [
                name,
                str(wall),
                f"{statistics.median(one['cpu'] for one in runs):.1f}",
                f"{statistics.median(one['peak_mb'] for one in runs):.0f}",
                compared(losses["gptq"], losses["adaround"]),
                compared(losses["gptq"], losses["adaround from gptq"], judged=False),
            ]
        )
        print("  ".join(found[-1]), file=sys.stderr, flush=True)
    header = ("model", "wall of the default", "CPU s", "peak MB", "layers not above AdaRound", "from gptq's codes")
    return (
        "## Time and loss by layer\n\n"
        "The default at W4A8 (gptq with coordinate descent), from the file to the quantized file, statistics included, "
        f"on {cores} cores; median of {bench.effort.repeats} processes with the smallest and the largest. Then how "
        f"many layers have no larger squared error of their output than after {bench.effort.iterations:,} iterations "
        "of AdaRound by moments, begun at the nearest codes as in its paper; on the same inputs and scales; with the "
        "largest ratio and the mean over the layers, each layer's error divided by that of its nearest codes. The "
        "last column: AdaRound begun at gptq's codes, which can only improve on them.\n\n" + table(header, found)
    )


def by_layer(bench: Bench, name: str) -> dict[str, Gains]:
    """Measure the losses of each rounding method by layer, on float inputs."""
    plain = {
        "rounding": "adaround",
        "W.ROUNDING.ADAROUND.START": "nearest",
        "W.ROUNDING.ADAROUND.SWEEPS": 0,
        "W.ROUNDING.ADAROUND.ITERATIONS": bench.effort.iterations,
    }
    ways: dict[str, Overrides] = {
        "gptq": {"rounding": "gptq"},
        "adaround": plain,
        "adaround from gptq": {"rounding": "adaround", "W.ROUNDING.ADAROUND.ITERATIONS": bench.effort.iterations},
    }
    return {who: child(bench, name, {**FLOAT_INPUTS, **way}, gains=True)["gains"] for who, way in ways.items()}


def compared(ours: Gains, other: Gains, *, judged: bool = True) -> str:
    """Count the layers whose loss is not above that of the other method; losses are relative to nearest rounding.

    Raises:
        ValueError: the layers, or their losses of nearest rounding, differ.
    """
    if ours.keys() != other.keys() or any(abs(ours[key][1] / other[key][1] - 1) > SAME for key in ours):
        raise ValueError("the roundings did not look at the same inputs: their losses cannot be compared")
    ratios = {key: ours[key][0] / max(other[key][0], 1e-300) for key in ours}
    fine = sum(ratio <= 1 + SAME for ratio in ratios.values())
    sums = [sum(loss / nearest for loss, nearest in gains.values()) / len(ours) for gains in (ours, other)]
    met = "" if not judged else ": met" if fine == len(ratios) else ": **missed**"
    return f"{fine} of {len(ratios)}{met}; largest ÷ {max(ratios.values()):.3f}; mean {sums[0]:.4f} and {sums[1]:.4f}"


SAME: Final = 1e-6
"""Relative difference of losses due to rounding errors of the sums."""


# --- memory ------------------------------------------------------------------------------------------


def memory_text(bench: Bench) -> str:
    """Return the table of peak memory by number of samples."""
    name = "cifar_resnet20"
    counts = COUNTS if bench.effort.count is None else tuple(count // 16 for count in COUNTS)
    wishes = {"w_bit": 4, "a_bit": 8, "memory": MEMORY}
    found = []
    for who, way in ROUNDINGS.items():
        iterations = {} if who == "gptq" else {"W.ROUNDING.ADAROUND.ITERATIONS": min(bench.effort.iterations, 200)}
        peaks = [child(bench, name, {**wishes, **way, **iterations}, count=count)["peak_mb"] for count in counts]
        growth = Cell((peaks[-1] / peaks[0],), Target(FLAT))
        found.append([who, *(f"{peak:.0f}" for peak in peaks), str(growth)])
        print("  ".join(found[-1]), file=sys.stderr, flush=True)
    header = ("rounding", *(f"{count} samples, MB" for count in counts), "last ÷ first")
    return (
        "## Memory by samples\n\n"
        f"Peak of the whole process at W4A8 on {name} with `CALIBRATION.MEMORY: {MEMORY}`, imports and samples "
        "included (512 images, met over and over: more of them take no more memory). AdaRound by few iterations, "
        f"which memory does not depend on. Flat: at most {FLAT:g} times.\n\n" + table(header, found)
    )

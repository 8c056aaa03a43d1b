"""Is the default file for onnxruntime's CPU never slower than float? Real models, and small detectors.

    python -m benchmarks.runtimes.default_latency [--models NAME ...] [--rounds 40] [--write]

Each model is quantized with the defaults (W8A8). The float model and the file run in turn on one thread; the figure is
the median of the ratios of CPU time, round by round, with its 95 % confidence interval.
"""

from __future__ import annotations

import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnxruntime import InferenceSession

import sbonnx
from benchmarks.accuracy import load_pack
from benchmarks.detectors import DETECTORS, SIDE
from benchmarks.results import arguments, table, write_section
from benchmarks.scores import Estimate
from benchmarks.w8a8.table import shown
from sbonnx.pipeline import solve
from sbonnx.planning import Plan, costs_of, plan_times
from sbonnx.stages.state import Request, read_recipe
from sbonnx.system.cpu import target_cpu
from sbonnx.tuning.kernel_timing import session
from sbonnx.verify.intervals import of_median

PACKED: Final = (
    *("cifar_resnet20", "mobilenetv2_tin200", "mobilenetv1_tin200", "squeezenet11", "minilm_l6"),
    *("fastestdet", "ultraface_rfb320", "silero_vad"),
)
NAMES: Final = (*PACKED, *DETECTORS)
KINDS: Final = {True: "x86 with 8-bit dot products", False: "x86 with AVX2 alone"}
"""Titles by whether products of the CPU are exact; ``.ci/mask/run.py`` hides what this CPU has beyond AVX2."""
SAMPLES: Final = 12

LEAST_SECONDS: Final = 0.01
"""Minimum duration of one measurement; the run is repeated until it is reached."""

HEADER: Final = ("model", "float ms", "÷ float", "estimated", "layers in integers", "verdict")


@dataclass(frozen=True)
class Row:
    """One model: CPU ms of a run in float, the ratio with its interval, and the estimated ratio."""

    name: str
    ms: float
    ratio: Estimate
    estimated: float | None
    layers: tuple[int, int]

    def cells(self) -> list[str]:
        """Return the cells of the table."""
        verdict = "**slower**" if self.ratio.low > 1 else "faster" if self.ratio.high < 1 else "as fast"
        estimated = "–" if self.estimated is None else f"{self.estimated:.2f}"
        return [self.name, f"{self.ms:.2f}", shown(self.ratio, 2), estimated, "{} of {}".format(*self.layers), verdict]


def subject(name: str, pack: Any, folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    """Return the float model and its samples, one each."""
    if name in PACKED:
        return Path(pack.model_path(name)), pack.load_calib(name, limit=SAMPLES, batch=1)
    path = folder / f"{name}.float.onnx"
    onnx.save(DETECTORS[name](), str(path))
    rng = np.random.default_rng(0)
    return path, [{"image": rng.normal(0, 1, (1, 3, SIDE, SIDE)).astype(np.float32)} for _ in range(SAMPLES)]


def runner(opened: InferenceSession, feed: Mapping[str, Any]) -> Callable[[], float]:
    """Return a function that measures the CPU seconds of one run."""
    given = {value.name: feed[value.name] for value in opened.get_inputs()}

    def run() -> float:
        count, start = 0, time.process_time()
        while (taken := time.process_time() - start) < LEAST_SECONDS or not count:
            opened.run(None, given)
            count += 1
        return taken / count

    run()
    return run


def paired(reference: Callable[[], float], measured: Callable[[], float], rounds: int) -> tuple[float, Estimate]:
    """Measure in turn, in alternating order; returns the median of the reference, and the ratio with its interval."""
    taken: list[list[float]] = [[], []]
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[which].append((reference, measured)[which]())
    ratios = np.array(taken[1]) / np.array(taken[0])
    return float(np.median(taken[0])), Estimate(float(np.median(ratios)), *of_median(ratios))


def measure(name: str, pack: Any, folder: Path, rounds: int) -> Row:
    """Quantize one model with the defaults and measure it."""
    model, feeds = subject(name, pack, folder)
    path = folder / f"{name}.onnx"
    report = sbonnx.quantize(model, feeds, backend="onnxruntime", output=path, verify=False)
    float_run, run = (runner(session(file, optimise=True), feeds[0]) for file in (model, path))
    seconds, ratio = paired(float_run, run, rounds)
    linear = {site.node for site in report.sites if site.role == "weight"}
    float_layers = {refusal.where for refusal in report.refusals if refusal.what == "quantize"}
    return Row(
        name,
        1000 * seconds,
        ratio,
        estimated_ratio(model, feeds),
        (len(linear), len(linear) + len(float_layers - linear)),
    )


def estimated_ratio(model: Path, feeds: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the time of the plan over that of float, by the table of kernel costs; None if it covers nothing."""
    recipe, backend = read_recipe(None, "onnxruntime", {})
    prepared = solve(Request(model, recipe, backend, data=list(feeds))).prepared
    time_of = plan_times(prepared.graph, costs_of(recipe, backend))
    floats = time_of(Plan(()))
    return time_of(prepared.plan) / floats if floats else None


def text(rows: Sequence[Row], rounds: int) -> str:
    """Return the section of docs/results/ of the kind of CPU that this is."""
    return (
        f"## Default files beside float on onnxruntime's CPU, {KINDS[target_cpu().exact]}\n\n"
        "`python -m benchmarks.runtimes.default_latency --write`; W8A8 by default, one thread, CPU time, "
        f"{rounds} rounds in turn: the median of the ratios with its 95 % confidence interval. "
        "Estimated: the plan over float by the table of kernel costs, without what has no price. "
        "Detectors of random weights have 16 to 64 channels at "
        f"{SIDE} x {SIDE}.\n\n" + table(HEADER, [row.cells() for row in rows])
    )


def main() -> int:
    """Measure, print the table and, with --write, update docs/results/."""
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--rounds", type=int, default=40, help="measurements of each model")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    pack, rows = load_pack(options.pack), []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models:
            rows.append(measure(name, pack, Path(folder), options.rounds))
            print(" | ".join(rows[-1].cells()), flush=True)
    if options.write:
        write_section(f"default latency{'' if target_cpu().exact else ' avx2'}", text(rows, options.rounds))
    return int(any(row.ratio.low > 1 for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())

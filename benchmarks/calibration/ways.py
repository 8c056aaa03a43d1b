"""What is timed: the plain float loop, and calibration in its several ways. Seconds are of the clock on the wall."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.calibration.subjects import Samples
from sbonnx.calib.calibrator import Calibrator, calibrate
from sbonnx.calib.data.dataset import Dataset, read
from sbonnx.calib.engine import samples as calibration
from sbonnx.calib.observers import make_observer
from sbonnx.graph import Graph
from sbonnx.options import RunOptions
from sbonnx.pipeline import prepare
from sbonnx.planning.types import Plan
from sbonnx.reconstruct.solution import QuantizedInputs, reconstruct
from sbonnx.spec import Bounds
from sbonnx.stages.state import Prepared, read_recipe, rounding_of

BACKEND = "onnxruntime"
HISTOGRAM = ("percentile", "mse", "kl_histogram", "auto", "aciq")
"""Observers that use the same statistics, which one pass over the data collects for all."""

ASYM_MEMORY = "512 MiB"

SETTLE = 0.1
"""Pause between runs in seconds, because the threads of a default session keep spinning for a while."""

Seconds = dict[str, float]


def prepared(model: Path, observer: str) -> Prepared:
    """Prepare the model with the default plan of the onnxruntime backend and the given activation observer."""
    recipe, backend = read_recipe(None, BACKEND, {"observer": observer})
    return prepare(model, recipe, backend)


def dataset(graph: Graph, samples: Samples) -> Dataset:
    """Return the samples as a calibration dataset."""
    return read(samples, graph)


def float_session(model: Path) -> Any:
    """Create a default session, with one intra-op thread per core."""
    import onnxruntime

    return onnxruntime.InferenceSession(str(model), providers=["CPUExecutionProvider"])


def float_pass(session: Any, samples: Samples) -> float:
    """Measure the plain float loop, without the creation of the session."""
    start = time.perf_counter()
    for feed in samples:
        session.run(None, feed)
    return time.perf_counter() - start


def ranges(graph: Graph, plan: Plan, data: Dataset, **options: Any) -> tuple[float, Mapping[str, Bounds]]:
    """Calibrate the range of every activation of a plan: (seconds, ranges by site key)."""
    start = time.perf_counter()
    found = calibrate(graph, plan, calibration.Samples.of(data, graph, RunOptions(**options))).bounds
    return time.perf_counter() - start, found


def by_tensor(plan: Plan, found: Mapping[str, Bounds]) -> dict[str, tuple[float, float]]:
    """Convert ranges by site key to ranges by tensor, for per-tensor ranges only."""
    tensors = {site.key: site.tensor for site in plan.sites}
    return {tensors[key]: (bounds.lo.item(), bounds.hi.item()) for key, bounds in found.items()}


def histogram_ranges(made: Prepared, data: Dataset) -> Seconds:
    """Measure the seconds to the ranges of each observer of `HISTOGRAM`: the shared pass plus its own solve."""
    start = time.perf_counter()
    taken: Seconds = {}
    with Calibrator(made.graph, made.plan) as calibrator:
        calibrator.observe_all(calibration.Samples.of(data, made.graph))
        sketches = calibrator.sketches()
        passed = time.perf_counter() - start
        for name in HISTOGRAM:
            start = time.perf_counter()
            observer = make_observer(name)
            for site in made.plan.of_role("activation"):
                observer.bounds(sketches[site.tensor, site.spec.axis], site.spec, made.plan.scale_rule)
            taken[name] = passed + time.perf_counter() - start
    return taken


def asym(made: Prepared, data: Dataset) -> float:
    """Measure layer-wise calibration with quantized inputs, with an activation cache of `ASYM_MEMORY`."""
    rounding = replace(rounding_of(made), inputs=QuantizedInputs())
    options = RunOptions(granularity="layer", memory=ASYM_MEMORY)
    samples = calibration.Samples.of(data, made.graph, options)
    start = time.perf_counter()
    reconstruct(made.graph, made.plan, samples, calibrate(made.graph, made.plan, samples), rounding)
    return time.perf_counter() - start


def cached(model: Path, samples: Samples) -> Seconds:
    """Measure a first run that fills a new calibration cache, then runs with other methods, including the digests."""
    taken: Seconds = {}
    with tempfile.TemporaryDirectory(prefix="calibration-cache-") as folder:
        for name, observer in (
            ("first run", "minmax"),
            *((f"then {name}", name) for name in ("percentile", "mse", "auto")),
        ):
            made = prepared(model, observer)  # a new object, so that only the folder holds cached results
            taken[name] = ranges(made.graph, made.plan, dataset(made.graph, samples), cache=Path(folder) / "cache")[0]
    return taken


def observed(made: Prepared) -> list[str]:
    """Return the tensors whose ranges are calibrated."""
    return sorted({site.tensor for site in made.plan.of_role("activation") if site.fixed is None})


def values_observed(made: Prepared, sample: Samples) -> int:
    """Count the observed values per sample."""
    with Calibrator(made.graph, made.plan) as calibrator:
        calibrator.observe_all(calibration.Samples.of(dataset(made.graph, sample), made.graph))
        return sum(sketch.elements for sketch in calibrator.sketches().values())

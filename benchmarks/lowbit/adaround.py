"""AdaRound by moments beside its batch form: the same layers, scales, first codes and iterations, in one process."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.calibration.table import Cell, Target
from benchmarks.lowbit.batches import BATCH, on_batches
from benchmarks.lowbit.runs import Bench
from benchmarks.results import table
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import MOST, Samples
from sbonnx.calib.engine.segments import Segment
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.calib.quantized.stream_state import QuantState
from sbonnx.graph.query import tensors_by_name
from sbonnx.moments import Moments, MomentSums
from sbonnx.pipeline import prepare
from sbonnx.reconstruct.layer_inputs import Layer, layers_of
from sbonnx.rounding.adaround import AdaRound
from sbonnx.spec import Array, QParams
from sbonnx.stages.state import Prepared, read_recipe

MOST_INPUTS: Final = 1152
FASTER: Final = 20.0
SAMPLES: Final = 256
"""Samples for both forms; the batch form holds them in memory."""

REPEATS: Final = 3
"""Runs of the form by second moments, whose median is reported, because it takes only 0.05 s on small layers."""

LAYERS: Final = {"cifar_resnet20": None, "squeezenet11": 4}
"""Number of layers of a model, evenly distributed; None: all."""


@dataclass(frozen=True)
class Form:
    """Result of one form of AdaRound for a layer.

    Attributes:
        seconds: wall time.
        error: mean squared error of the layer's output relative to that of nearest rounding, by the second moments of
            all rows.
    """

    seconds: float
    error: float


@dataclass(frozen=True)
class Pair:
    """Results of both forms on one layer; `sums`: seconds for summing the moments, included in those of `moments`."""

    model: str
    layer: str
    outputs: int
    inputs: int
    moments: Form
    batches: Form
    sums: float


def text(bench: Bench) -> str:
    """Return the table, with one row per layer, and the sums over all layers."""
    pairs = [pair for name, some in LAYERS.items() for pair in measure(bench, name, some)]
    lines = [row(pair) for pair in pairs]
    iterations = bench.effort.iterations
    total = Pair(
        "all",
        "",
        0,
        0,
        Form(sum(pair.moments.seconds for pair in pairs), float(np.mean([pair.moments.error for pair in pairs]))),
        Form(sum(pair.batches.seconds for pair in pairs), float(np.mean([pair.batches.error for pair in pairs]))),
        sum(pair.sums for pair in pairs),
    )
    header = ("model", "layer", "outputs × inputs", "by moments, s", "of it sums, s", "on batches, s")
    errors = ("error by moments", "error on batches", "time, on batches ÷ by moments", "error not above")
    return (
        "## AdaRound by moments and on batches\n\n"
        f"Layers of 4-bit weights with at most {MOST_INPUTS:,} inputs of an output; {iterations:,} iterations of both, "
        f"begun at the nearest codes; {SAMPLES} samples. On batches: {BATCH} samples a step through the convolution "
        "in torch, forward and backward, as in the paper; inputs and targets lie in memory. By moments: summing them "
        f"over all rows, then the iterations; median of {REPEATS}. Seconds on the clock, one form after the other in "
        "one process. Error: mean squared error of the layer's output over all rows; that of the nearest codes: 1.\n\n"
        + table((*header, *errors), [*lines, row(total)])
    )


def row(pair: Pair) -> list[str]:
    """Format one row of the table, with verdicts."""
    times = Cell((pair.batches.seconds / max(pair.moments.seconds, 1e-9),), Target(FASTER, "at least"))
    error = "met" if pair.moments.error <= pair.batches.error * (1 + 1e-6) else "**missed**"
    return [
        pair.model,
        pair.layer,
        f"{pair.outputs} × {pair.inputs}" if pair.outputs else "",
        *(f"{seconds:.2f}" for seconds in (pair.moments.seconds, pair.sums, pair.batches.seconds)),
        f"{pair.moments.error:.4f}",
        f"{pair.batches.error:.4f}",
        str(times),
        error,
    ]


def measure(bench: Bench, name: str, some: int | None) -> Iterator[Pair]:
    """Measure both forms on the layers of a model."""
    recipe, backend = read_recipe(None, "onnxruntime", {"w_bit": 4, "rounding": "adaround"})
    made = prepare(Path(bench.pack.model_path(name)), recipe, backend)
    feeds = bench.pack.load_calib(name, limit=min(SAMPLES, bench.effort.count or SAMPLES))
    for layer, inputs, weight, qparams in cases(made, feeds, some):
        pair = both(name, layer, inputs, weight, qparams, bench.effort.iterations)
        print("  ".join(row(pair)), file=sys.stderr, flush=True)
        yield pair


def cases(
    made: Prepared, feeds: Sequence[dict[str, Any]], some: int | None
) -> Iterator[tuple[Layer, list[Array], Array, QParams]]:
    """Yield layers that both forms support, with their float input activations by sample, weight and qparams."""
    graph = made.graph
    with Calibrator(graph, made.plan) as calibrator:
        calibrator.observe_all(Samples.of(list(feeds[:1]), graph))
        ranges = calibrator.ranges().bounds
    numbers = QuantState(graph, made.plan, ranges, lambda site, weight, qparams: (qparams.quantize(weight), qparams))
    found = [layer for layer in layers_of(graph, made.plan, correct=False)[0] if fits(layer)]
    if some is not None:
        found = [found[int(at)] for at in np.linspace(0, len(found) - 1, min(some, len(found))).round()]
    made_here = {tensor.name for node in graph.nodes for tensor in node.outputs}
    for layer in found:
        if layer.tensor in made_here:
            names = (layer.tensor,)
            piece = Segment(tuple(tensor.name for tensor in graph.inputs), names, names)
            with LayerRunner(piece.model(graph, tensors_by_name(graph)), name="the model") as runner:
                inputs = [np.array(runner.run(feed, names, where="a sample")[layer.tensor]) for feed in feeds]
        else:
            inputs = [np.asarray(feed[layer.tensor]) for feed in feeds]
        qparams = numbers.params(layer.site)
        if qparams is not None:
            yield layer, inputs, numbers.weight(layer.site), qparams


def fits(layer: Layer) -> bool:
    """Return whether torch's convolution or product with the same arguments computes the node."""
    if layer.layout.inputs > MOST_INPUTS or layer.layout.groups != 1:
        return False
    return (layer.node.op == "Conv" and layer.node.attrs.get("auto_pad", "NOTSET") == "NOTSET") or (
        layer.node.op == "Gemm" and not layer.node.attrs.get("transA", 0)
    )


def both(model: str, layer: Layer, inputs: Sequence[Array], weight: Array, qparams: QParams, iterations: int) -> Pair:
    """Run both forms on a layer; the errors of both are computed by the same second moments of all rows."""
    runs = [_by_moments(layer, inputs, weight, qparams, iterations) for _ in range(REPEATS)]
    taken, summed = (float(np.median(seconds)) for seconds in zip(*(run[:2] for run in runs), strict=True))
    moments, codes = runs[0][2:]
    nearest = error_of(moments, weight, qparams, qparams.quantize(weight))
    by_moments = Form(taken, error_of(moments, weight, qparams, codes) / nearest)
    codes, seconds = on_batches(layer, inputs, weight, qparams, iterations)
    by_batches = Form(seconds, error_of(moments, weight, qparams, codes) / nearest)
    where = layer.layout
    return Pair(model, layer.node.name, where.outputs, where.inputs, by_moments, by_batches, summed)


def _by_moments(
    layer: Layer, inputs: Sequence[Array], weight: Array, qparams: QParams, iterations: int
) -> tuple[float, float, Moments, Array]:
    """Run the form by second moments: total seconds, seconds for the sums, moments, codes."""
    start = time.perf_counter()
    with one_blas_thread():  # as in layer-wise calibration
        sums = MomentSums(layer.geometry, two_streams=False)
        for first in range(0, len(inputs), MOST):
            some = inputs[first : first + MOST]
            sums.add(np.concatenate(some), sample=range(first, first + len(some)))
        moments = sums.moments()
        summed = time.perf_counter() - start
        codes = AdaRound(iterations=iterations, start="nearest").round(weight, qparams, moments).codes
    return time.perf_counter() - start, summed, moments, codes


def error_of(moments: Moments, weight: Array, qparams: QParams, codes: Array) -> float:
    """Compute the mean squared error of the layer's output, summed over outputs."""
    matrices = moments.layout.matrices
    wanted = matrices(np.asarray(weight, np.float64))
    return float(moments.error(wanted, matrices(qparams.dequantize(codes).astype(np.float64))).sum())

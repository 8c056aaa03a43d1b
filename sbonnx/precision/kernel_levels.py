"""Accuracy levels of products with block-wise weights (MatMulNBits), by measured errors of their layers.

At level 4 the kernel rounds the input of a product to int8, block by block along the summed axis:

    x' = s round(x / s),    s = max |x| of the block / 127

One large channel gives its block a large step, in which the other channels vanish. Weights of 4 bits have a kernel in
float32 (level 1), so a layer gets it if this rounding adds more error to its output than its weights do:

    ||(x' - x) V||² > ||x (V - W)||²,    V the dequantized weight of W

Weights of 2 and 8 bits have no fast float kernel and stay at level 4. Source: onnxruntime, MatMulNBits, accuracy_level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

import numpy as np

from sbonnx.backends.onnxruntime.ort_nbits import stored_bits
from sbonnx.calib.engine.samples import Samples
from sbonnx.graph import Graph
from sbonnx.linear.layer import LinearLayer
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.profiling.pieces import StepSession
from sbonnx.profiling.walk import LayerSample, Walk, WalkOptions
from sbonnx.report.codes import Note
from sbonnx.spec import Array

FEEDS: Final = 8
"""Feeds on which layers are compared."""

FLOAT32: Final = 1
"""Accuracy level at which the kernel computes in float32."""

WITH_FLOAT_KERNEL: Final = 4
"""Width in the file whose float32 kernel is fast."""

LARGEST: Final = 127


@dataclass(frozen=True)
class LevelErrors:
    """Energies of the errors at the output of a layer: by rounding its input to int8, and by its weights."""

    inputs: float
    weights: float

    def __add__(self, other: LevelErrors) -> LevelErrors:
        return LevelErrors(self.inputs + other.inputs, self.weights + other.weights)


def with_accuracy_levels(solution: Solution, graph: Graph, plan: Plan, samples: Samples) -> Solution:
    """Return the solution with `levels`, and a note if there are any.

    Raises:
        DataError, ModelError: the float model cannot run on the data.
    """
    layer_errors = level_errors(graph, plan, solution, samples)
    lost = {name: errors for name, errors in layer_errors.items() if errors.inputs > errors.weights}
    if not lost:
        return solution
    worst = max(lost, key=lambda name: lost[name].inputs / max(lost[name].weights, np.finfo(np.float64).tiny))
    note = Note(
        "accuracy-level",
        f"{len(lost)} of {len(layer_errors)} products with 4-bit weights compute in float32 (accuracy level 1): "
        f"rounding their inputs to int8 would add more error than their weights have, most at '{worst}'",
    )
    return replace(solution, levels=dict.fromkeys(lost, FLOAT32), notes=(*solution.notes, note))


def level_errors(graph: Graph, plan: Plan, solution: Solution, samples: Samples) -> dict[str, LevelErrors]:
    """Measure both errors of each layer whose block-wise weight the file holds in 4 bits, on its float inputs.

    Args:
        graph: the prepared float graph; not changed.

    Raises:
        DataError, ModelError: the float model cannot run on the data.
    """
    sites = {
        reader: site
        for site in plan.of_role("weight")
        if site.spec.block_size and site.key in solution.codes and stored_bits(site.spec.bits) == WITH_FLOAT_KERNEL
        for reader in site.readers
    }
    by_layer = {reader.node: (reader, site) for reader, site in sites.items() if reader.index == 1}
    options = samples.options
    resources = WalkOptions(FEEDS, options.device, options.memory, options.threads)
    walk: Walk[LevelErrors] = Walk(graph, by_layer, options=resources)
    weights: dict[str, _WrittenWeight | None] = {}
    filling = Lock()  # threads of several samples would each hold the weight of the layer

    def look(piece: StepSession, sample: LayerSample) -> LevelErrors | None:
        layer = piece.step.layer
        with filling:
            if layer not in weights:
                weights[layer] = _written_weight(piece, *by_layer[layer], solution)
        weight = weights[layer]
        return None if weight is None or piece.node is None else weight.errors(sample.inputs[piece.node.inputs[0].name])

    errors: dict[str, LevelErrors] = {}

    def take(piece: StepSession, added: LevelErrors) -> None:
        errors[piece.step.layer] = errors.get(piece.step.layer, LevelErrors(0.0, 0.0)) + added

    for _ in walk(samples.data, look, take):
        weights.clear()
    return errors


@dataclass(frozen=True)
class _WrittenWeight:
    """Weight of a layer as the file holds it.

    Attributes:
        written: the dequantized weight, float32 (K, N).
        error: `written` minus the float weight.
        block: values along K that share a scale.
    """

    written: Array
    error: Array
    block: int

    def errors(self, inputs: Array) -> LevelErrors:
        """Return the errors of the layer on its inputs, float (..., K)."""
        rows = inputs.reshape(-1, self.written.shape[0]).astype(np.float32, copy=False)
        return LevelErrors(
            _energy((rounded_rows(rows, self.block) - rows) @ self.written),
            _energy(rows @ self.error),
        )


def _written_weight(piece: StepSession, reader: Reader, site: Site, solution: Solution) -> _WrittenWeight | None:
    """Return the weight of a layer; None for operators that are no product of rows with a matrix."""
    weight, node = piece.constants()[reader.index], piece.node
    if node is None or weight.ndim != 2:
        return None
    layer = LinearLayer.of_shape(node.op, node.attrs, weight.shape)
    written = solution.dequantized(site, np.float32)
    if isinstance(layer, str) or written is None or layer.trans_a:
        return None
    matrix, exact = (layer.matrices(values.astype(np.float32, copy=False))[0].T for values in (written, weight))
    return _WrittenWeight(matrix, matrix - exact, site.spec.block_size or len(matrix))


def rounded_rows(rows: Array, block: int) -> Array:
    """Round rows to int8 by block, as the kernel does at level 4.

    Args:
        rows: float32, (R, K).
        block: values that share a scale.

    Returns:
        float32, (R, K).
    """
    count, width = rows.shape
    blocks = np.pad(rows, ((0, 0), (0, -width % block))).reshape(count, -1, block)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / LARGEST
    scale[scale == 0] = 1
    return np.asarray((np.round(blocks / scale) * scale).reshape(count, -1)[:, :width], np.float32)


def _energy(values: Array) -> float:
    return float(np.square(values, dtype=np.float64).sum())

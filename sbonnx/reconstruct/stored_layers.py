"""Rounded layers in the calibration cache: a killed weight reconstruction continues there, with the same bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from sbonnx.calib.cache.rounded_weights import RoundedWeights
from sbonnx.calib.cache.sketch_cache import CalibrationCache
from sbonnx.calib.calibrator import MeasuredRanges
from sbonnx.calib.engine.runner import settings
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.quantized.stream_state import QuantState
from sbonnx.graph import Graph
from sbonnx.graph.digests import array_digests, combined, text
from sbonnx.graph.storage.weights import spill_large
from sbonnx.planning.types import Gain, Plan
from sbonnx.reconstruct.layer_inputs import Layer
from sbonnx.spec import Array, Bounds, QParams
from sbonnx.version import __version__


def rounded_weights(
    graph: Graph, plan: Plan, samples: Samples, ranges: MeasuredRanges, settled: Any
) -> RoundedWeights | None:
    """Open the layers of an interrupted run with the same model, data, plan, ranges and settings; None without a cache.

    Args:
        settled: settings of the rounding, with a `repr` that names all values.

    Raises:
        DataError, OutputError: see `SketchCache`.
    """
    options = samples.options
    if options.cache is None:
        return None
    cache = CalibrationCache(options.cache, graph, samples.data, settings(options.device))
    ends = [np.asarray(end) for bounds in ranges.bounds.values() for end in (bounds.lo, bounds.hi)]
    run = combined(
        "rounding",
        *(part.encode() for part in (__version__, np.__version__, repr(settled), repr(options.memory_bytes))),
        json.dumps(asdict(plan), sort_keys=True, default=repr).encode(),
        json.dumps(list(ranges.bounds)).encode(),
        *array_digests(ends),
    )
    return RoundedWeights(cache, text(run))


def stored_layer(numbers: QuantState, gains: Mapping[str, Gain], layer: Layer) -> dict[str, Array]:
    """Return what rounding and bias correction of a layer computed, as arrays by name; empty if its weight is float."""
    key = layer.site.key
    if key not in numbers.codes:
        return {}
    arrays = {"codes": np.asarray(numbers.codes[key]), "scales": numbers.scales[key]}
    if key in numbers.bounds:
        arrays |= {"lo": numbers.bounds[key].lo, "hi": numbers.bounds[key].hi}
    if key in numbers.moved:
        arrays |= {"scale": numbers.moved[key].scale, "zero_point": numbers.moved[key].zero_point}
    if key in gains:
        arrays["gain"] = np.asarray([gains[key].loss, gains[key].nearest])
        arrays["rounding"] = np.frombuffer(gains[key].rounding.encode(), np.uint8)
    if layer.bias is not None and layer.bias.name in numbers.constants:
        arrays["bias"] = numbers.constants[layer.bias.name]
    return arrays


def restore_layer(numbers: QuantState, gains: dict[str, Gain], layer: Layer, found: Mapping[str, Array]) -> None:
    """Set what `stored_layer` returned, as if the layer had been rounded now."""
    site = layer.site
    if "lo" in found:
        numbers.limit(site, Bounds(found["lo"], found["hi"]))
    if "scale" in found:
        numbers.moved[site.key] = QParams(found["scale"], found["zero_point"], site.spec)
    if "gain" in found:
        loss, nearest = map(float, found["gain"])
        gains[site.key] = Gain(found["rounding"].tobytes().decode(), loss, nearest)
    if "bias" in found and layer.bias is not None:
        numbers.constants[layer.bias.name] = found["bias"]
    numbers.codes[site.key], numbers.scales[site.key] = spill_large(found["codes"]), found["scales"]

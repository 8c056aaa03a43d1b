"""AWQ calibration: measures second moments of matrix product inputs, then scales them by `sbonnx.equalize.awq`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.layerwise import run_float
from sbonnx.calib.engine.samples import SampleSplitter, canonical_samples
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.calib.qparams.solve import weight_bounds
from sbonnx.equalize.awq import Aware, Scaled, awq
from sbonnx.graph import Graph
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.options import RunOptions
from sbonnx.plan.types import Plan, RoundingChoice, Site
from sbonnx.reconstruct.layer_inputs import Layer, Watched, in_budget, layers_of, watched
from sbonnx.report import Refusal
from sbonnx.spec import Array, ScaleRule, params_from_bounds

LOOKS: Final = RoundingChoice("gptq")
"""Any rounding that uses inputs, so that `layers_of` returns the layers of all weights."""

ROWS: Final = 256
"""Maximum number of rows per sample and product: scales depend on means over all rows."""


def scale_by_activations(
    graph: Graph,
    plan: Plan,
    data: Dataset,
    options: RunOptions | None = None,
) -> tuple[list[Scaled], list[Refusal]]:
    """Scale the inputs of the matrix products that `plan` rounds, by their input activations on the data, in place.

    The data are processed once, or several times if the moments of all products exceed the memory budget. A Mul is
    inserted before products only if no activation is quantized, because the plan fixes the position of Q/DQ pairs. See
    `awq`.

    Args:
        graph, plan: a graph and its plan; the plan remains valid.
        data: calibration samples.
        options: see `RunOptions`.

    Returns:
        The scaled tensors; refusals with the reason for all others.

    Raises:
        DataError, ModelError, DeviceError: see `LayerRunner`.
    """
    sites = tuple(
        replace(site, rounding=replace(LOOKS, scale=site.rounding.scale)) if site.role == "weight" else site
        for site in plan.sites
    )
    layers, _ = layers_of(graph, replace(plan, sites=sites), correct=False)
    layers = [layer for layer in layers if layer.node.op in MATRIX_PRODUCTS and layer.layout.groups == 1]
    options = options or RunOptions()
    budget = options.memory_bytes
    layers, refusals = in_budget(layers, budget, two_streams=False)
    scaled: list[Scaled] = []
    if not layers:
        return scaled, refusals
    samples = SampleSplitter(graph, device=options.device).units(data.items())
    with one_blas_thread(), canonical_samples(samples, budget) as units:
        for number, some in enumerate(_passes(layers, budget)):
            options.progress.start(f"scaling by activations, pass {number + 1}", data.count)
            seen = watched(some, two_streams=False, rows=lambda layer: ROWS, seed=0)
            sums = [one for one in seen if isinstance(one, Watched)]
            _run(graph, units, sums, options)
            aware = {layer.node.name: _aware(one, layer, plan.scale_rule) for one in sums for layer in one.layers}
            done, declined = awq(graph, aware, multiply=not plan.of_role("activation"))
            scaled += done
            refusals += declined
    return scaled, refusals


def _aware(one: Watched, layer: Layer, rule: ScaleRule) -> Aware:
    """Create the inputs of `awq` for one layer: second moments, and fake quantization as in the exported file."""
    return Aware(one.moments(layer), _fake_quant(layer.site, rule))


def _fake_quant(site: Site, rule: ScaleRule) -> Callable[[Array], Array]:
    def fake_quant(weight: Array) -> Array:
        return params_from_bounds(weight_bounds(site, weight, rule), site.spec, rule=rule).fake_quant(weight)

    return fake_quant


def _run(graph: Graph, units: Iterable[Sample], sums: Sequence[Watched], options: RunOptions) -> None:
    """Run all samples through the float network and accumulate the inputs of the layers."""
    tensors = [one.tensor for one in sums]
    for unit, known in run_float(graph, tensors, units, options, lambda _, known: known):
        for one in sums:
            if one.tensor in known:
                one.add(np.asarray(known[one.tensor]), None, [unit.rank])


def _passes(layers: Sequence[Layer], memory: int) -> Iterator[list[Layer]]:
    """Yield groups of layers whose moments fit into `memory` together. Layers that read one tensor stay together."""
    by_tensor: dict[str, list[Layer]] = {}
    for layer in layers:
        by_tensor.setdefault(layer.tensor, []).append(layer)
    some: list[Layer] = []
    used = 0
    for group in by_tensor.values():
        size = max(layer.bytes_of_moments(two_streams=False) for layer in group)
        if some and used + size > memory:
            yield some
            some, used = [], 0
        some += group
        used += size
    if some:
        yield some

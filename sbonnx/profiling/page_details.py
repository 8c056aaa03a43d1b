"""Details of a result for its page: losses of layers by weights and inputs, histograms, the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

from sbonnx.graph import Graph
from sbonnx.planning.types import Plan, Role, Site, Solution
from sbonnx.profiling.checkers import Profile
from sbonnx.profiling.histograms import histograms
from sbonnx.profiling.layer_losses import losses
from sbonnx.profiling.node_rows import node_rows, tensor_row
from sbonnx.profiling.variants import sites_by_layer, uses_of
from sbonnx.profiling.walk import WalkOptions
from sbonnx.report import Note, Refusal
from sbonnx.report.details import Details, LayerLoss
from sbonnx.spec import Array

MOST_LAYERS: Final = 500
"""Quantized layers above which their losses are not measured for a page: each takes about 10 ms of CPU time."""

DEFAULTS: Final = WalkOptions(limit=8)


def details(
    graph: Graph,
    plan: Plan,
    solution: Solution | None,
    data: Iterable[Mapping[str, Array]] | None,
    *,
    refusals: Iterable[Refusal] = (),
    options: WalkOptions = DEFAULTS,
    profiled: Callable[..., Profile] = losses,
) -> Details:
    """Measure what a page shows beside the figures of a report.

    The network runs once in float and once quantized, each quantized layer three times more (all of it, its weights and
    its inputs quantized), and the float network once more for the histograms: about 10 ms of CPU time for each layer
    and 8 feeds of a small convolutional network.

    Args:
        graph: the prepared float graph; not changed.
        plan, solution: the quantized sites and their parameters; None: nothing was calibrated, and only the graph is
            described.
        data: feeds; None: only the graph is described.
        refusals: shown at the nodes that they name.
        options: see `losses`; `limit` is the number of feeds, `histograms` that of tensors with a histogram.
        profiled: called as `losses`; for a file, `file_losses` with both files.

    Raises:
        DataError: there are no feeds, or the model cannot run on one.
    """
    described = Details(
        node_rows(graph, plan, solution, refusals),
        inputs=tuple(map(tensor_row, graph.inputs)),
        outputs=tuple(str(tensor.name) for tensor in graph.outputs),
    )
    if solution is None or data is None:
        return described
    layers = {reader.node for reader in uses_of(plan, solution)}
    if not layers:
        return described
    if len(layers) > MOST_LAYERS:
        why = f"{len(layers)} quantized layers are more than {MOST_LAYERS}"
        message = f"losses by weights and inputs were not measured: {why}; use sbonnx profile"
        return replace(described, notes=(Note("losses-not-measured", message),))
    feeds = list(islice(iter(data), options.limit))
    profile = profiled(graph, plan, solution, feeds, options=options)
    sites = worst_sites(plan, solution, profile.layers)[: options.histograms]
    rows = histograms(graph, solution, sites, feeds, device=options.device)
    return replace(described, profile=profile.figures, histograms=rows, notes=profile.notes)


def worst_sites(plan: Plan, solution: Solution, layers: Sequence[LayerLoss]) -> list[Site]:
    """Return the sites of the main graph by the loss that they alone cause at the outputs of a layer, worst first.

    Of several activations that a layer reads, which its figure does not tell apart, the one with fewest bits is taken.
    """
    read = sites_by_layer(plan, solution)
    costs: dict[str, tuple[float, Site]] = {}
    for layer in layers:
        figures: dict[Role, float | None] = {"weight": layer.weights, "activation": layer.activations}
        for role, value in figures.items():
            site_read = next(iter(read.get((layer.node, role), ())), None)
            if site_read is not None and value is not None and math.isfinite(value):
                costs[site_read.key] = min(
                    costs.get(site_read.key, (math.inf, site_read)), (value, site_read), key=lambda pair: pair[0]
                )
    return [site for _, site in sorted(costs.values(), key=lambda pair: pair[0])]

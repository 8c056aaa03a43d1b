"""The pruning stage: from a float graph and data to a smaller float graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.samples import CanonicalSamples, SampleSplitter, canonical_samples
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.correct import give_biases
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort, sweep
from sbonnx.options import RunOptions
from sbonnx.pruning.allocate import CountLimits, allocate
from sbonnx.pruning.budget import Budget, NetworkSize, network_size
from sbonnx.pruning.criteria import CRITERIA
from sbonnx.pruning.curves import SensitivityCurve, curves, data_of, kept_columns, removal_order
from sbonnx.pruning.fit_layers import FitLayer, fit_layers
from sbonnx.pruning.float_pass import OutputErrors, float_moments
from sbonnx.pruning.groups.channel_removal import mask, remove
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension, dependencies
from sbonnx.pruning.groups.pruning_plan import LayerSide, PruningPlan
from sbonnx.pruning.two_streams import LayerRefit, Remains, refit_pruned
from sbonnx.report import Refusal
from sbonnx.spec import Array


@dataclass(frozen=True)
class Pruning:
    """Settings of structured pruning.

    Attributes:
        strategy: name in `CRITERIA`; "auto": obs with data, l1norm without.
        macs, weights: share of the multiplications, or of the stored values, that may remain; None: no limit.
        ratio: share of each dimension to remove; None: by sensitivity curves. One of `macs`, `weights` and `ratio` is
            given.
        multiple: remaining groups of a dimension are a multiple of this, or all of them.
        least: share of each dimension that always remains.
        refit: refit the remaining weights on inputs from the pruned network.
        seed: of random choices.
    """

    strategy: str = "auto"
    macs: float | None = None
    weights: float | None = None
    ratio: float | None = None
    multiple: int = 1
    least: float = 0.1
    refit: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            RecipeError: a value is out of range, or there is not exactly one goal.
        """
        given = {"macs": self.macs, "weights": self.weights, "ratio": self.ratio}
        goals = [name for name, value in given.items() if value is not None]
        if len(goals) != 1:
            raise RecipeError(f"pruning needs one of macs, weights and ratio; given: {', '.join(goals) or 'none'}")
        for name, value in given.items():
            if value is not None and not 0 < value < 1:
                raise RecipeError(f"pruning: {name} is {value}; write a share between 0 and 1, such as 0.5")
        if self.strategy != "auto" and self.strategy not in CRITERIA:
            raise RecipeError(f"pruning: strategy must be one of auto, {', '.join(CRITERIA)}, got '{self.strategy}'")
        if self.multiple < 1 or not 0 <= self.least < 1:
            raise RecipeError(f"pruning: multiple {self.multiple} is below 1, or least {self.least} not in [0, 1)")


@dataclass(frozen=True)
class PrunedDimension:
    """Outcome for one dimension.

    Attributes:
        writers, readers: its layers.
        before, after: number of groups.
        error: of the outputs if this dimension alone is pruned so, by its curve; None without curves.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    before: int
    after: int
    error: float | None


@dataclass(frozen=True)
class Pruned:
    """Result of pruning.

    Attributes:
        plan: removed channels.
        masked: the graph with unchanged shapes: removed channels are not read.
        graph: the graph without the channels.
        dimensions: one row per dimension.
        layers: one row per refitted layer.
        refusals: pinned layers, and layers that were not refitted.
        macs, weights: remaining share of the multiplications and of the stored values.
    """

    plan: PruningPlan
    masked: Graph
    graph: Graph
    dimensions: tuple[PrunedDimension, ...]
    layers: tuple[LayerRefit, ...]
    refusals: tuple[Refusal, ...]
    macs: float
    weights: float


def prune_graph(graph: Graph, data: Dataset | None, settings: Pruning, options: RunOptions | None = None) -> Pruned:
    """Prune a float graph.

    Channels of each dimension are ordered by a criterion; the numbers that remain follow from measured sensitivity
    curves and the budget, or from one ratio; the remaining weights are refitted layer by layer.

    Args:
        graph: simplified and fused; biases are added to layers without one, and unused nodes are removed, in place.
        data: calibration data; None: no refit, and only a ratio with a strategy that needs no data.
        settings: see `Pruning`.
        options: see `RunOptions`.

    Raises:
        RecipeError: the budget cannot be met, or nothing can be removed.
        DataError: a budget or the strategy needs data.
        ModelError, DeviceError: see `LayerRunner`.
    """
    options = options or RunOptions()
    sweep(graph)
    sort(graph)
    give_biases(graph)
    found = dependencies(graph)
    if not found.dimensions:
        reasons = "; ".join(f"{one.where}: {one.why}" for one in found.pinned()[:3]) or "it has no linear layers"
        raise RecipeError(f"pruning: no channels of the model can be removed: {reasons}")
    listed, refusals = fit_layers(graph, found, options.memory_bytes, two_streams=True)
    layers = {layer.name: layer for layer in listed}
    strategy = settings.strategy if settings.strategy != "auto" else "l1norm" if data is None else "obs"
    if data is None:
        return _without_data(graph, found, layers, settings, strategy)
    units = SampleSplitter(graph, device=options.device).units(data.items())
    with canonical_samples(units, options.memory_bytes) as samples, one_blas_thread():
        return _with_data(graph, found, layers, settings, strategy, samples, options, refusals)


def _without_data(
    graph: Graph, found: Dependencies, layers: dict[str, FitLayer], settings: Pruning, strategy: str
) -> Pruned:
    if settings.ratio is None:
        raise DataError("pruning to a budget measures the network: give calibration data, or a ratio")
    if strategy in ("output", "obs"):
        raise DataError(f"the pruning strategy '{strategy}' reads activations: give calibration data, or take l1norm")
    orders = [removal_order(strategy, data_of(dimension, layers, {}, settings.seed)) for dimension in found.dimensions]
    size = network_size(graph, found, found.dimensions, {})
    plan, removed = _plan(found, orders, _by_ratio(found.dimensions, settings))
    masked = graphs.copy(graph)
    mask(masked, plan)
    return _finish(masked, found, plan, size, removed, [], [], found.pinned())


def _with_data(
    graph: Graph,
    found: Dependencies,
    layers: dict[str, FitLayer],
    settings: Pruning,
    strategy: str,
    samples: CanonicalSamples,
    options: RunOptions,
    refusals: Sequence[Refusal],
) -> Pruned:
    pairs, missing = float_moments(graph, _readers(found, layers), samples, options)
    orders = [
        removal_order(strategy, data_of(dimension, layers, pairs, settings.seed)) for dimension in found.dimensions
    ]
    size = network_size(graph, found, found.dimensions, {name: pair.rows_a_sample for name, pair in pairs.items()})
    measured: list[SensitivityCurve] = []
    if settings.ratio is not None:
        counts = _by_ratio(found.dimensions, settings)
    else:
        judge = OutputErrors.of(graph, samples, options)
        measured = curves(graph, found, orders, layers, pairs, judge, options)
        counts = _by_budget(found.dimensions, measured, size, settings)
    del pairs
    plan, removed = _plan(found, orders, counts)
    masked = graphs.copy(graph)
    mask(masked, plan)
    rows: list[LayerRefit] = []
    more: list[Refusal] = []
    if settings.refit:
        kept = {name: _remains(layer, plan) for name, layer in layers.items()}
        rows, more = refit_pruned(graph, masked, list(layers.values()), kept, samples, options)
    every = dict.fromkeys([*found.pinned(), *refusals, *missing, *more])
    return _finish(masked, found, plan, size, removed, measured, rows, list(every))


def _readers(found: Dependencies, layers: dict[str, FitLayer]) -> list[FitLayer]:
    """Return the layers that read a dimension, in order."""
    names = {name for dimension in found.dimensions for name in dimension.readers}
    return [layer for name, layer in layers.items() if name in names]


def _by_ratio(dimensions: Sequence[Dimension], settings: Pruning) -> Array:
    """Return int(n * ratio) removed groups for each dimension, fewer where multiples ask for it."""
    assert settings.ratio is not None
    limits = CountLimits((settings.multiple,) * len(dimensions), settings.least)
    counts = []
    for place, dimension in enumerate(dimensions):
        wanted = int(dimension.size * settings.ratio + 1e-9)
        counts.append(max(count for count in limits.counts(place, dimension.size) if count <= wanted))
    return np.array(counts, np.int64)


def _by_budget(
    dimensions: Sequence[Dimension], measured: Sequence[SensitivityCurve], size: NetworkSize, settings: Pruning
) -> Array:
    """Return the removed groups of each dimension that meet the budget.

    Raises:
        RecipeError: it cannot be met.
    """
    kind: Budget = "macs" if settings.macs is not None else "weights"
    share = settings.macs if settings.macs is not None else settings.weights
    assert share is not None
    limits = CountLimits((settings.multiple,) * len(dimensions), settings.least)
    whole = size.total(kind, np.zeros(len(dimensions)))
    sizes = [dimension.size for dimension in dimensions]
    removed = allocate(measured, sizes, limits, lambda counts: size.total(kind, counts), share * whole)
    if removed is None:
        most = np.array([max(limits.counts(place, count)) for place, count in enumerate(sizes)])
        least = size.total(kind, most) / whole
        raise RecipeError(
            f"pruning cannot reach a share of {share:g} of the {kind}: with {settings.least:g} of each dimension kept, "
            f"{least:.3f} remains; set {kind} to {np.ceil(least * 1000) / 1000:g} or more, or lower least"
        )
    return removed


def _plan(found: Dependencies, orders: Sequence[Sequence[int]], counts: Array) -> tuple[PruningPlan, Array]:
    """Return the plan that removes the first groups of each order, and how many it removes."""
    chosen = [
        (dimension, dimension.first(order, int(count)))
        for dimension, order, count in zip(found.dimensions, orders, counts, strict=True)
    ]
    return found.plan_of(chosen), np.array([len(groups) for _, groups in chosen], np.int64)


def _remains(layer: FitLayer, plan: PruningPlan) -> Remains:
    """Return the columns and outputs of a layer that remain."""
    outputs = np.ones(layer.layout.out_channels, bool)
    outputs[list(plan.removed.get(LayerSide(layer.name, "out"), ()))] = False
    gone = plan.removed.get(LayerSide(layer.name, "in"), ())
    if layer.sides.is_depthwise or not gone:
        return Remains(np.ones((layer.layout.groups, layer.layout.inputs), bool), outputs)
    each, group = layer.layout.in_channels // layer.layout.group, layer.layout.group
    first = [channel for channel in gone if channel < each]
    groups = np.array([[channel + part * each for part in range(group)] for channel in first], np.int64)
    return Remains(kept_columns(layer, groups), outputs)


def _finish(
    masked: Graph,
    found: Dependencies,
    plan: PruningPlan,
    size: NetworkSize,
    removed: Array,
    measured: Sequence[SensitivityCurve],
    rows: Sequence[LayerRefit],
    refusals: Sequence[Refusal],
) -> Pruned:
    small = graphs.copy(masked)
    remove(small, plan)
    none = np.zeros(len(removed))
    shares = {kind: size.total(kind, removed) / (size.total(kind, none) or 1.0) for kind in ("macs", "weights")}
    dimensions = tuple(
        PrunedDimension(
            dimension.writers,
            dimension.readers,
            dimension.size,
            dimension.size - int(count),
            measured[place].at(int(count)) if measured else None,
        )
        for place, (dimension, count) in enumerate(zip(found.dimensions, removed, strict=True))
    )
    return Pruned(plan, masked, small, dimensions, tuple(rows), tuple(refusals), shares["macs"], shares["weights"])

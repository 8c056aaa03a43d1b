"""The pruning stage: from a float graph and data to a smaller float graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sbonnx import graph as graphs
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.engine.runner import LayerRunner
from sbonnx.calib.engine.samples import CanonicalSamples, Samples
from sbonnx.calib.engine.threads import one_blas_thread
from sbonnx.correct import give_biases
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.edit import sort, sweep
from sbonnx.graph.query import constant_bytes
from sbonnx.metrics import loss_kind
from sbonnx.planning import Plan, plan_times
from sbonnx.pruning.budgets.allocate import CountLimits, allocate
from sbonnx.pruning.budgets.budget import Budget, Cost, NetworkSize, SizeCost, network_size
from sbonnx.pruning.budgets.channel_counts import multiples_of
from sbonnx.pruning.budgets.loss_limit import LossTrial, smallest_within
from sbonnx.pruning.budgets.pruned_times import PrunedTimes
from sbonnx.pruning.curves import RemovedBefore, SensitivityCurve, curves, data_of, kept_columns, removal_order
from sbonnx.pruning.fine_tuning import fine_tune, require_fine_tuning
from sbonnx.pruning.fit_layers import FitLayer, MomentPair, fit_layers
from sbonnx.pruning.float_pass import OutputErrors, float_moments, measured_sizes
from sbonnx.pruning.groups.channel_removal import mask, remove
from sbonnx.pruning.groups.dimensions import Dependencies, dependencies
from sbonnx.pruning.groups.pruning_plan import LayerSide, PruningPlan
from sbonnx.pruning.measurement import Measurement, MeasurementCache
from sbonnx.pruning.settings import DimensionPruning, LayerPruning, Pruning, settings_of
from sbonnx.pruning.sparsity.stage import sparsify
from sbonnx.pruning.two_streams import Remains, refit_pruned
from sbonnx.report import Refusal
from sbonnx.report.pruned import FineTuneRow, LayerRefit, PrunedDimension, SparseLayer
from sbonnx.spec import Array
from sbonnx.verify.judge import Judge


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
        macs, size: remaining share of the multiplications, and of the bytes of all constants.
        latency: remaining share of the time of a sample, estimated; None without kernel costs.
        loss: on hold-out samples; None without MAX_LOSS.
        unaligned: dimensions whose channels do not fill whole blocks of the backend's kernels.
        sparse: one row per layer whose weight became sparse.
        tuned: outcome of fine-tuning; None without.
    """

    plan: PruningPlan
    masked: Graph
    graph: Graph
    dimensions: tuple[PrunedDimension, ...]
    layers: tuple[LayerRefit, ...]
    refusals: tuple[Refusal, ...]
    macs: float
    size: float
    latency: float | None
    loss: float | None
    unaligned: tuple[PrunedDimension, ...]
    sparse: tuple[SparseLayer, ...] = ()
    tuned: FineTuneRow | None = None

    def of(self, budget: Budget) -> float | None:
        """Return the remaining share of a cost."""
        return {"macs": self.macs, "size": self.size, "latency": self.latency}[budget]


def prune_graph(
    graph: Graph,
    samples: Samples | None,
    settings: Pruning,
    judged: Dataset | None = None,
) -> Pruned:
    """Prune a float graph.

    Channels of each dimension are ordered by a criterion; the numbers that remain follow from measured sensitivity
    curves and the budget, or from one ratio; the remaining weights are refitted layer by layer, and fine-tuned if
    `settings.finetune` is set. With a pattern of zeros, see `sparsify`.

    Args:
        graph: simplified and fused; biases are added to layers without one, and unused nodes are removed, in place.
        samples: of the graph; None: no refit, and only a ratio with a strategy that needs no data.
        settings: see `Pruning`.
        judged: hold-out samples for MAX_LOSS; None: those of `samples`.

    Returns:
        If the budget or the loss cannot be met: the nearest network.

    Raises:
        RecipeError: nothing can be removed.
        DataError: a budget, the strategy or fine-tuning needs data.
        ModelError, DeviceError: see `LayerRunner` and `require_fine_tuning`.
    """
    if settings.finetune is not None:
        if samples is None:
            raise DataError("fine-tuning needs samples: give calibration data")
        require_fine_tuning(graph, settings.finetune)
    if settings.pattern is not None:
        sparse = sparsify(graph, samples, settings.pattern, settings)
        same = (PruningPlan({}), sparse.graph, sparse.graph)
        done = Pruned(*same, (), sparse.layers, sparse.refusals, 1.0, 1.0, None, None, (), sparse.sparse)
        return _fine_tuned(done, graph, samples, settings)
    original = _finished(graph)
    if samples is None:
        return _without_data(graph, settings, original)
    with _pruner_of(graph, samples, settings) as pruner:
        done = _with_data(pruner, judged or samples.data, original)
    return _fine_tuned(done, graph, samples, settings)


def measure_graph(graph: Graph, samples: Samples, settings: Pruning) -> None:
    """Measure what `prune_graph` reads from the cache of the samples: it is the same for budgets of different size.

    Sparse weights have no such measurement. Args and Raises: see `prune_graph`.
    """
    if settings.pattern is None:
        _finished(graph)
        with _pruner_of(graph, samples, settings) as pruner:
            pruner.measure()


def _finished(graph: Graph) -> int:
    """Remove unused nodes and add missing biases, in place; return the bytes of the constants without those biases."""
    sweep(graph)
    sort(graph)
    size = constant_bytes(graph)
    give_biases(graph)
    return size


def _traced(
    graph: Graph, settings: Pruning, samples: Samples | None, strategy: str
) -> tuple[Dependencies, dict[str, FitLayer], list[DimensionPruning], list[Refusal]]:
    """Return the dimensions, the layers that can be refitted, the settings of each dimension, and refusals.

    Args:
        strategy: in place of "auto".
    """
    traced = dependencies(graph)
    if not traced.dimensions:
        reasons = (
            "; ".join(f"{refusal.where}: {refusal.why}" for refusal in traced.pinned()[:3]) or "it has no linear layers"
        )
        raise RecipeError(f"pruning: no channels of the model can be removed: {reasons}")
    listed, refusals = fit_layers(graph, traced, samples, two_streams=True)
    strategy = settings.strategy if settings.strategy != "auto" else strategy
    layer_settings = [settings_of(traced, dimension, settings, strategy) for dimension in traced.dimensions]
    return traced, {layer.name: layer for layer in listed}, layer_settings, refusals


@contextmanager
def _pruner_of(graph: Graph, samples: Samples, settings: Pruning) -> Iterator[_Pruner]:
    """Order the samples by their contents, and yield what is pruned."""
    traced, layers, layer_settings, refusals = _traced(graph, settings, samples, "obs")
    cache = MeasurementCache(samples)
    with samples.canonical() as units, one_blas_thread():
        yield _Pruner(graph, traced, layers, settings, layer_settings, units, cache, tuple(refusals))


def _fine_tuned(done: Pruned, graph: Graph, samples: Samples | None, settings: Pruning) -> Pruned:
    if settings.finetune is None or samples is None:
        return done
    small, masked, tuned = fine_tune(graph, done.plan, done.graph, done.masked, samples, settings)
    return replace(done, graph=small, masked=masked, tuned=tuned)


def _without_data(graph: Graph, settings: Pruning, original: int) -> Pruned:
    traced, layers, layer_settings, _ = _traced(graph, settings, None, "l1norm")
    if settings.budget is not None:
        raise DataError("pruning to a budget measures the network: give calibration data, or a ratio")
    measured = [row.strategy for row in layer_settings if row.strategy in ("output", "obs")]
    if measured:
        raise DataError(
            f"the pruning strategy '{measured[0]}' reads activations: give calibration data, or take l1norm"
        )
    orders = _orders(traced, layers, {}, settings, layer_settings)
    size = network_size(graph, traced, traced.dimensions, {})
    removed = _by_ratio(traced, orders, settings, layer_settings)
    plan = _plan(traced, orders, removed)
    masked = graphs.copy(graph)
    mask(masked, plan)
    network = _Network(removed, plan, masked)
    return _finish(graph, traced, settings, _Measured(orders, [], size, ()), network, original)


@dataclass(frozen=True)
class _Network:
    """A masked and refitted network: number of removed groups of each dimension, rows of refitted layers."""

    removed: Array
    plan: PruningPlan
    masked: Graph
    rows: tuple[LayerRefit, ...] = ()
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class _Measured:
    """Orders of removal, sensitivity curves (empty without a budget) and size of the network."""

    orders: Sequence[tuple[int, ...]]
    curves: Sequence[SensitivityCurve]
    size: NetworkSize
    refusals: tuple[Refusal, ...]


@dataclass(frozen=True)
class _Pruner:
    """A float network and samples, from which pruned networks are made."""

    graph: Graph
    found: Dependencies
    layers: dict[str, FitLayer]
    settings: Pruning
    each: Sequence[DimensionPruning]
    samples: CanonicalSamples
    cache: MeasurementCache
    refusals: tuple[Refusal, ...]

    @cached_property
    def judge(self) -> OutputErrors:
        """Outputs of the float network on hold-out samples."""
        return OutputErrors.of(self.graph, self.samples)

    def measure(self) -> _Measured:
        """Measure the float network."""
        return self._measured(self.graph, self.found, self.layers, None, ())

    def measure_again(self, network: _Network, orders: Sequence[Sequence[int]]) -> _Measured:
        """Measure what remains of a network of which the first groups of each order are removed."""
        removed = network.removed
        traced = dependencies(network.masked)
        listed, _ = fit_layers(network.masked, traced, self.samples, two_streams=True)
        kept = {layer.name: _remains(layer, network.plan).columns for layer in listed}
        first = [tuple(order[:count]) for order, count in zip(orders, removed.tolist(), strict=True)]
        layers = {layer.name: layer for layer in listed}
        return self._measured(network.masked, traced, layers, RemovedBefore(removed, kept), first)

    def _measured(
        self,
        graph: Graph,
        found: Dependencies,
        layers: dict[str, FitLayer],
        before: RemovedBefore | None,
        first: Sequence[tuple[int, ...]],
    ) -> _Measured:
        def measure() -> Measurement:
            pairs, missing = float_moments(graph, _readers(found, layers), self.samples)
            orders = _orders(found, layers, pairs, self.settings, self.each, before, first)
            measured: list[SensitivityCurve] = []
            if self.settings.budget is not None:
                measured = curves(graph, found, orders, layers, pairs, self.judge, before)
            sizes = measured_sizes(graph, found, self.samples)
            return Measurement(tuple(orders), tuple(measured), sizes, tuple(missing))

        strategies = tuple(row.strategy for row in self.each)
        has_curves = self.settings.budget is not None
        depends_on = (strategies, self.settings.seed, has_curves, self.samples.options.memory_bytes, tuple(first))
        cached = self.cache.get(graph, depends_on, measure)
        size = network_size(graph, found, found.dimensions, cached.sizes)
        return _Measured(cached.orders, cached.curves, size, cached.refusals)

    def cost(self, measured: _Measured) -> Cost:
        """Return the cost that the budget limits."""
        budget, costs = self.settings.budget, self.settings.costs
        assert budget is not None
        if budget != "latency":
            return SizeCost(measured.size, budget)
        assert costs is not None
        return PrunedTimes(self.graph, self.found, measured.orders, costs)

    def limits(self, measured: _Measured) -> CountLimits:
        """Return the limits of a budget; a dimension with its own ratio keeps to it."""
        own = enumerate(_by_ratio(self.found, measured.orders, self.settings, self.each).tolist())
        limits = _limits(self.found, measured.orders, self.settings, self.settings.least)
        return replace(limits, fixed={place: count for place, count in own if count >= 0})

    def allocated(self, measured: _Measured, cost: Cost, target: float, start: Array | None = None) -> Array:
        """Return the removed groups of each dimension that meet a target."""
        sizes = [dimension.groups for dimension in self.found.dimensions]
        return allocate(measured.curves, sizes, self.limits(measured), cost, target, start)

    def build(self, measured: _Measured, removed: Array) -> _Network:
        """Mask the first groups of each order and refit the remaining weights."""
        plan = _plan(self.found, measured.orders, removed)
        masked = graphs.copy(self.graph)
        mask(masked, plan)
        if not self.settings.refit:
            return _Network(removed, plan, masked)
        own = self.settings.layers
        fitted = [layer for name, layer in self.layers.items() if not own.get(name, LayerPruning()).skip]
        kept = {layer.name: _remains(layer, plan) for layer in fitted}
        rows, refusals = refit_pruned(self.graph, masked, fitted, kept, self.samples)
        return _Network(removed, plan, masked, tuple(rows), tuple(refusals))


def _with_data(pruner: _Pruner, judged: Dataset, original: int) -> Pruned:
    settings, traced, loss = pruner.settings, pruner.found, None
    measured = pruner.measure()
    if settings.budget is None:
        network = pruner.build(measured, _by_ratio(traced, measured.orders, settings, pruner.each))
    elif settings.max_loss is not None:
        network, loss = _by_loss(pruner, measured, judged)
    else:
        measured, network = _by_budget(pruner, measured, original)
    measured = replace(measured, refusals=(*pruner.refusals, *measured.refusals))
    return replace(_finish(pruner.graph, traced, settings, measured, network, original), loss=loss)


def _by_budget(pruner: _Pruner, measured: _Measured, original: int) -> tuple[_Measured, _Network]:
    """Prune to a budget, in rounds: each removes the same share of what the one before left."""
    share, rounds = pruner.settings.share, pruner.settings.rounds
    assert share is not None
    removed = np.zeros(len(pruner.found.dimensions), np.int64)
    cost = pruner.cost(measured)
    whole = original if pruner.settings.budget == "size" else cost(removed)
    removed = pruner.allocated(measured, cost, share ** (1 / rounds) * whole)
    network = pruner.build(measured, removed)
    for number in range(1, rounds):
        measured = pruner.measure_again(network, measured.orders)
        target = share ** ((number + 1) / rounds) * whole
        removed = pruner.allocated(measured, pruner.cost(measured), target, removed)
        network = pruner.build(measured, removed)
    return measured, network


def _by_loss(pruner: _Pruner, measured: _Measured, judged: Dataset) -> tuple[_Network, float]:
    """Remove as many multiplications as MAX_LOSS allows."""
    settings, cost = pruner.settings, pruner.cost(measured)
    assert settings.max_loss is not None
    kind = "metric" if settings.metric is not None else loss_kind(settings.loss, pruner.graph)
    device = pruner.samples.options.device
    judge = Judge(pruner.graph, judged, kind, settings.metric, settings.labelled, device)
    whole = cost(np.zeros(len(pruner.found.dimensions), np.int64))

    def trial(share: float) -> LossTrial[_Network]:
        network = pruner.build(measured, pruner.allocated(measured, cost, share * whole))
        with LayerRunner(network.masked, device=device, threads=1, name="the pruned model") as pruned:
            return LossTrial(share, judge.loss(pruned), network)

    least = cost(pruner.allocated(measured, cost, 0.0)) / whole
    best = smallest_within(trial, least, settings.max_loss)
    return best.result, best.loss


def _readers(found: Dependencies, layers: dict[str, FitLayer]) -> list[FitLayer]:
    """Return the layers that read a dimension, in order."""
    names = {name for dimension in found.dimensions for name in dimension.readers}
    return [layer for name, layer in layers.items() if name in names and layer.can_refit]


def _orders(
    found: Dependencies,
    layers: Mapping[str, FitLayer],
    pairs: Mapping[str, MomentPair],
    settings: Pruning,
    each: Sequence[DimensionPruning],
    before: RemovedBefore | None = None,
    first: Sequence[tuple[int, ...]] = (),
) -> list[tuple[int, ...]]:
    """Return the groups of each dimension that can be removed together, in the order of removal.

    Args:
        before, first: what is removed already, and the groups of each dimension that are.
    """
    kept = None if before is None else before.kept
    orders = []
    for place, (dimension, row) in enumerate(zip(found.dimensions, each, strict=True)):
        order = removal_order(row.strategy, data_of(dimension, layers, pairs, settings.seed, kept))
        gone = first[place] if first else ()
        orders.append(dimension.removable([*gone, *(group for group in order if group not in gone)]))
    return orders


def _limits(found: Dependencies, orders: Sequence[Sequence[int]], settings: Pruning, least: float) -> CountLimits:
    if settings.multiple == "auto":
        multiples = multiples_of(found, settings.backend, integers=settings.integers)
    else:
        multiples = tuple(dimension.multiple(settings.multiple) for dimension in found.dimensions)
    return CountLimits(multiples, tuple(map(len, orders)), least)


def _by_ratio(
    found: Dependencies,
    orders: Sequence[Sequence[int]],
    settings: Pruning,
    each: Sequence[DimensionPruning],
) -> Array:
    """Return int(n * ratio) removed groups for each dimension, fewer where multiples ask for it; -1: by the budget.

    Raises:
        RecipeError: nothing of a dimension would remain.
    """
    limits, counts = _limits(found, orders, settings, 0.0), []
    for place, (dimension, row) in enumerate(zip(found.dimensions, each, strict=True)):
        wanted = -1 if row.ratio is None else int(dimension.groups * row.ratio)
        if wanted == dimension.groups:
            raise RecipeError(
                f"pruning: a ratio of {row.ratio:g} leaves no channels of '{dimension.name}'; set a ratio below 1, in "
                "SPARSE.SPECIFIC for this layer alone"
            )
        counts.append(max((count for count in limits.counts(place, dimension.groups) if count <= wanted), default=-1))
    return np.array(counts, np.int64)


def _plan(found: Dependencies, orders: Sequence[Sequence[int]], removed: Array) -> PruningPlan:
    """Return the plan that removes the first groups of each order."""
    chosen = [
        (dimension, sorted(order[:count]))
        for dimension, order, count in zip(found.dimensions, orders, removed.tolist(), strict=True)
    ]
    return found.plan_of(chosen)


def _remains(layer: FitLayer, plan: PruningPlan) -> Remains:
    """Return the columns and outputs of a layer that remain."""
    outputs = np.ones(layer.layout.out_channels, bool)
    outputs[list(plan.removed.get(LayerSide(layer.name, "out"), ()))] = False
    gone = plan.removed.get(LayerSide(layer.name, "in"), ())
    if layer.sides.passes_on or not gone:
        return Remains(np.ones((layer.layout.groups, layer.layout.inputs), bool), outputs)
    group_channels, group = layer.layout.in_channels // layer.layout.group, layer.layout.group
    first = [channel for channel in gone if channel < group_channels]
    groups = np.array([[channel + part * group_channels for part in range(group)] for channel in first], np.int64)
    return Remains(kept_columns(layer, groups), outputs)


def _finish(
    graph: Graph, found: Dependencies, settings: Pruning, measured: _Measured, network: _Network, original: int
) -> Pruned:
    """Remove the masked channels. `original`: bytes of the constants of the float network."""
    size, removed = measured.size, network.removed
    small = graphs.copy(network.masked)
    remove(small, network.plan)
    dimensions = tuple(
        PrunedDimension(
            dimension.writers,
            dimension.readers,
            dimension.groups,
            dimension.groups - int(count),
            measured.curves[place].at(int(count)) if measured.curves else None,
        )
        for place, (dimension, count) in enumerate(zip(found.dimensions, removed, strict=True))
    )
    multiples = multiples_of(found, settings.backend, integers=settings.integers)
    counts = zip(dimensions, multiples, strict=True)
    unaligned = (row for row, many in counts if row.after < row.before and row.before > many and row.after % many)
    return Pruned(
        plan=network.plan,
        masked=network.masked,
        graph=small,
        dimensions=dimensions,
        layers=network.rows,
        refusals=tuple(dict.fromkeys([*found.pinned(), *measured.refusals, *network.refusals])),
        macs=float(size.total("macs", removed) / (size.total("macs", np.zeros(len(removed))) or 1.0)),
        size=constant_bytes(small) / (original or 1),
        latency=None
        if settings.costs is None
        else _time(small, settings.costs) / (_time(graph, settings.costs) or 1.0),
        loss=None,
        unaligned=tuple(unaligned),
    )


def _time(graph: Graph, costs: KernelCosts) -> float:
    """Estimate the time of one sample in float in ns."""
    return plan_times(graph, costs)(Plan(()))

"""Settings of pruning, and what a recipe says about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sbonnx.backends import BACKENDS, Backend, backend_for
from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph
from sbonnx.linear.zero_patterns import SparsityPattern
from sbonnx.metrics import Metric
from sbonnx.ops import LINEAR
from sbonnx.pruning.budgets.budget import Budget
from sbonnx.pruning.groups.dimensions import Dependencies, Dimension
from sbonnx.recipe import Recipe
from sbonnx.recipe.defaults import BACKEND
from sbonnx.recipe.problem import Path, Wrong, key_path, one_of
from sbonnx.recipe.sections.base import parameter
from sbonnx.recipe.sections.sparsity import GOALS, SparseChange, SparseFinetune
from sbonnx.recipe.sections.whole import KEYS
from sbonnx.system.cpu import THIS
from sbonnx.verify import LabelledLoss

GOAL_FLAGS: Final = tuple(flag.usage.split()[0] for flag in (KEYS[f"SPARSE.{goal}"].flag for goal in GOALS) if flag)
"""Options of the command line for `GOALS`."""


class LayerPruning(SparseChange):
    """Other settings for the output channels of one layer: an entry of SPARSE.SPECIFIC, and its key."""

    why: str = parameter("")


@dataclass(frozen=True)
class Pruning:
    """Settings of structured pruning, see the section SPARSE in docs/recipe.md, which checks the values.

    Attributes:
        strategy: name in `CRITERIA`; "auto": obs with data, l1norm without.
        macs, size, latency: share of the multiplications, of the bytes of all constants, or of the estimated time that
            may remain; None: no limit.
        max_loss: loss on hold-out samples up to which multiplications are removed; None: no limit.
        ratio: share of each dimension to remove; None: by sensitivity curves. At most one of `macs`, `size`, `latency`,
            `max_loss` and `ratio` is given; with none, only `layers` are pruned.
        loss: what `max_loss` is of: "auto", "top1" or "relative", see `sbonnx.metrics.loss_kind`.
        metric: loss of one feed, in place of `loss`.
        labelled: loss in a task metric on labelled data, in place of both.
        multiple: remaining channels of a dimension are a multiple of this in each layer, or all of them; "auto": the
            blocks of the backend's kernels.
        rounds: number of measurements, each on the network that the round before left.
        backend: runtime whose kernels `multiple` and times are for.
        kernel_costs, cpu: table of its kernel costs, see `Backend.kernel_costs`.
        integers: the network will be quantized.
        least: share of each dimension that always remains, with a budget.
        refit: refit the remaining weights on inputs from the pruned network.
        seed: of random choices.
        layers: other settings by name of a layer.
        pattern: of zeros in the weights, whose shapes do not change; None: channels are removed.
        finetune: training of the remaining weights; None: no training.
    """

    strategy: str = "auto"
    macs: float | None = None
    size: float | None = None
    latency: float | None = None
    max_loss: float | None = None
    ratio: float | None = None
    loss: str = "auto"
    metric: Metric | None = None
    labelled: LabelledLoss | None = None
    multiple: int | Literal["auto"] = 1
    rounds: int = 1
    backend: Backend = BACKENDS[BACKEND]
    kernel_costs: str = "bundled"
    cpu: str = THIS
    integers: bool = False
    least: float = 0.1
    refit: bool = True
    seed: int = 0
    layers: Mapping[str, LayerPruning] = field(default_factory=dict)
    pattern: SparsityPattern | None = None
    finetune: SparseFinetune | None = None

    @property
    def costs(self) -> KernelCosts | None:
        """Table of kernel costs; None: times are not estimated."""
        return self.backend.kernel_costs(self.kernel_costs, self.cpu)

    @property
    def budget(self) -> Budget | None:
        """Cost that the numbers of channels follow from; None: from ratios."""
        shares: dict[Budget, float | None] = {"macs": self.macs, "size": self.size, "latency": self.latency}
        given = [name for name, share in shares.items() if share is not None]
        return given[0] if given else "macs" if self.max_loss is not None else None

    @property
    def share(self) -> float | None:
        """Share of the cost that may remain; None: as `max_loss` allows."""
        return next((share for share in (self.macs, self.size, self.latency) if share is not None), None)


@dataclass(frozen=True)
class DimensionPruning:
    """Settings of one dimension.

    Attributes:
        strategy: name in `CRITERIA`.
        ratio: share of the groups to remove; None: by the budget.
    """

    strategy: str
    ratio: float | None


def pruning_of(recipe: Recipe, graph: Graph, *, integers: bool = False, metric: Metric | None = None) -> Pruning:
    """Return the pruning settings of a recipe for one model.

    Args:
        recipe: with patterns resolved for the model, see `Recipe.for_model`.
        graph: simplified and fused.
        integers: the network will be quantized.
        metric: loss of one feed, for MAX_LOSS.

    Raises:
        RecipeError: the recipe has no goal or several, a pattern of SPARSE.SPECIFIC matches no layer with weights, or
            BUDGET.LATENCY is set for a backend without kernel costs.
    """
    section = recipe.sparse
    if section.problem is not None:
        raise recipe.origin.error(section.problem)
    if not section.wanted:
        zero = "; SPARSE.RATIO is 0" if section.ratio == 0 else ""
        raise RecipeError(f"pruning needs a goal: {one_of(GOAL_FLAGS)}, or its key in SPARSE of the recipe{zero}")
    layers: dict[str, LayerPruning] = {}
    linear = [node for node in graph.nodes if node.op in LINEAR]
    for index, pattern, change in section.entries():
        path: Path = ("SPARSE", "SPECIFIC", index, pattern)
        names = [node.name for node in linear if recipe.sparse_pattern_hits(pattern, node.name, node.op)]
        if not names:
            hint = "Conv, ConvTranspose, Gemm and MatMul of the main graph have channels to remove"
            raise recipe.origin.error(Wrong("matches no layer that can be pruned", hint, path=path))
        for name in names:
            layers.setdefault(name, LayerPruning.of(change, why=key_path(path)))
    backend = backend_for(recipe.backend, recipe.version)
    budget = section.budget
    if budget.latency is not None and backend.kernel_costs(recipe.kernel_costs, recipe.cpu) is None:
        none = f"backend {backend.name} has no table of kernel costs"
        why = none if backend.costs is None else "KERNEL_COSTS is none"
        hint = "set BACKEND: onnxruntime and KERNEL_COSTS, or BUDGET.MACS"
        raise recipe.origin.error(Wrong(f"cannot be estimated: {why}", hint, path=("SPARSE", "BUDGET", "LATENCY")))
    if metric is not None and section.max_loss is None:
        raise RecipeError("a metric says what max_loss is of: give max_loss as well")
    return Pruning(
        strategy=section.strategy,
        macs=budget.macs,
        size=budget.size,
        latency=budget.latency,
        max_loss=section.max_loss,
        ratio=section.ratio,
        loss=section.loss,
        metric=metric,
        multiple=section.multiple or (1 if budget.latency is None else "auto"),
        rounds=section.rounds,
        backend=backend,
        kernel_costs=recipe.kernel_costs,
        cpu=recipe.cpu,
        integers=integers,
        least=section.least,
        refit=section.refit == "pruned",
        seed=recipe.calibration.seed,
        layers=layers,
        pattern=section.pattern,
        finetune=section.finetune if section.finetune.epochs else None,
    )


def settings_of(found: Dependencies, dimension: Dimension, settings: Pruning, strategy: str) -> DimensionPruning:
    """Return the settings of a dimension: those of the layers that write it, the least ratio if they differ.

    If no layer writes it, those that read it decide. Depthwise convolutions pass channels on: one with its own ratio
    counts as a layer that writes. If a layer on any side is skipped, the ratio is 0.

    Args:
        strategy: of layers without their own.

    Raises:
        RecipeError: layers that write it have different strategies.
    """
    between = [name for name in _passing_layers(found, dimension) if name in settings.layers]
    deciding = [*(dimension.writers or dimension.readers), *between]
    own = [settings.layers.get(name, LayerPruning()) for name in deciding]
    strategies = {row.strategy: row.why for row in own if row.strategy is not None}
    if len(strategies) > 1:
        raise RecipeError(
            f"pruning: '{dimension.name}' write channels that are removed together, and have different strategies: "
            + ", ".join(f"{name} by {why}" for name, why in sorted(strategies.items()))
        )
    ratios = [settings.ratio if row.ratio is None else row.ratio for row in own]
    ratio = min((share for share in ratios if share is not None), default=None if settings.budget is not None else 0.0)
    sides = (*deciding, *dimension.readers)
    if any(name in settings.layers and settings.layers[name].skip for name in sides):
        ratio = 0.0
    return DimensionPruning(next(iter(strategies), strategy), ratio)


def _passing_layers(found: Dependencies, dimension: Dimension) -> tuple[str, ...]:
    """Return the layers, depthwise or by whole groups, that pass on channels of a dimension."""
    side, channels = next(iter(dimension.channels.items()))
    groups = set(found.groups.of[found.sides[side][channels.reshape(-1)]].tolist())
    return tuple(
        linear.node.name
        for linear in found.linears
        if linear.passes_on and groups & set(found.groups.of[linear.outputs].tolist())
    )

"""Changes of a recipe that may improve a result: the steps of a search, and the repairs that advice tries."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any, Final

from sbonnx.graph import Graph, query
from sbonnx.ops import LINEAR, MATRIX_PRODUCTS
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT, FULL_BITS, NEAREST, is_per_channel
from sbonnx.recipe.node_patterns import pattern_of
from sbonnx.report.searched import Cause, override_texts
from sbonnx.search.error_sources import Side, blame, sensitive_layers, width_of
from sbonnx.stages.state import PipelineState

BATCH_NORM: Final = "BatchNormalization"
LOW_BITS: Final = 4
"""Largest width at which learned scales and soft rounding (AdaQuant, AdaRound) may beat GPTQ."""


@dataclass(frozen=True)
class Situation:
    """Facts about recipe and model that decide which steps apply.

    Attributes:
        recipe: the given recipe.
        batch_norms: whether the file has BatchNormalization nodes.
        products: whether it has matrix products.
        depthwise: whether it has depthwise convolutions.
        side: which quantized values make the larger error, if that was measured.
    """

    recipe: Recipe
    batch_norms: bool
    ops: frozenset[str]
    depthwise: bool = False
    side: Side = "both"

    @staticmethod
    def of(recipe: Recipe, graph: Graph, side: Side = "both") -> Situation:
        """Collect the facts of a recipe and of the model as stored in the file."""
        ops = {node.op for node in query.all_nodes(graph)}
        depthwise = any(query.is_depthwise(node) for node in query.all_nodes(graph))
        return Situation(recipe, BATCH_NORM in ops, frozenset(ops & LINEAR.keys()), depthwise, side)

    @property
    def products(self) -> bool:
        """Whether the model has matrix products."""
        return bool(self.ops & MATRIX_PRODUCTS)

    @property
    def weights(self) -> bool:
        """Whether weights are quantized."""
        return self.recipe.w.quantizer.bit != FLOAT and not self.recipe.w.quantizer.disable

    @property
    def low(self) -> bool:
        """Whether weights have fewer than 8 bits, so that their rounding dominates the error."""
        return self.weights and self.recipe.w.quantizer.bit < FULL_BITS

    @property
    def searched(self) -> bool:
        """Whether scales of weights are searched by default."""
        return self.weights and self.recipe.weight_settings.scale_name == "search"

    @property
    def nearest(self) -> bool:
        """Whether weights are rounded to nearest, "auto" at their width included."""
        rounding, quick = self.recipe.w.rounding.type, self.recipe.effort == "fast"
        return rounding == "nearest" or (rounding == "auto" and quick and self.recipe.w.quantizer.bit >= FULL_BITS)

    @property
    def by_inputs(self) -> bool:
        """Whether weights are rounded by the inputs of their layers by default."""
        whole = self.recipe.weight_settings
        return all(replace(whole, op=op).rounding_name != NEAREST for op in self.ops)

    @property
    def corrected(self) -> bool:
        """Whether biases are corrected by default, on quantized inputs."""
        return self.recipe.corrects_biases(self.ops, depthwise=self.depthwise)

    @property
    def inputs(self) -> bool:
        """Whether activations are quantized by measured ranges."""
        quantizer = self.recipe.a.quantizer
        return self.recipe.mode == "static" and quantizer.bit != FLOAT and not quantizer.disable

    @property
    def per_channel(self) -> bool:
        """Whether weights have one scale per channel."""
        return is_per_channel(self.recipe.w.qscheme)


@dataclass(frozen=True)
class RecipeChange:
    """Change of a recipe that may improve a result.

    Attributes:
        name: what it does, in words.
        keys: values by key path or short form.
        when: whether it can help at all.
        causes: of the losses that it reduces; () if it is against no known cause.
    """

    name: str
    keys: Mapping[str, Any]
    when: Callable[[Situation], bool] = lambda _: True
    causes: tuple[Cause, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The keys as ``KEY=VALUE``, for ``--set``."""
        return override_texts(self.keys)


def _can_use_inputs(here: Situation) -> bool:
    return here.weights and here.recipe.w.quantizer.dtype == "int" and here.recipe.mode != "dynamic"


STEPS: Final = (
    RecipeChange(
        "cross-layer equalization",
        {"EQUALIZE.CROSS_LAYER": True},
        lambda here: here.weights and here.inputs and not here.per_channel,
    ),
    RecipeChange(
        "absorbed biases",
        {"EQUALIZE.CROSS_LAYER": True, "EQUALIZE.ABSORB_BIAS": True},
        lambda here: here.weights and here.inputs and not here.per_channel,
    ),
    RecipeChange("ranges of activations: min-max", {"A.OBSERVER.TYPE": "minmax"}, lambda here: here.inputs),
    RecipeChange(
        "gptq for all layers", {"W.ROUNDING.TYPE": "gptq"}, lambda here: _can_use_inputs(here) and not here.by_inputs
    ),
    RecipeChange(
        "ranges of weights: least error of the output",
        {"W.ROUNDING.SCALE": "search"},
        lambda here: _can_use_inputs(here) and not here.searched,
    ),
    RecipeChange(
        "bias correction: measured",
        {"BIAS_CORRECTION": "empirical"},
        lambda here: _can_use_inputs(here) and not here.corrected,
    ),
    RecipeChange(
        "smoothed inputs (SmoothQuant)",
        {"EQUALIZE.SMOOTH_QUANT": True},
        lambda here: here.weights and here.inputs and here.per_channel and here.products,
    ),
    RecipeChange(
        "weights scaled by input activations (AWQ)",
        {"EQUALIZE.AWQ": True},
        lambda here: here.low and here.products and here.per_channel,
    ),
    RecipeChange(
        "adaround",
        {"W.ROUNDING.TYPE": "adaround"},
        lambda here: _can_use_inputs(here) and here.recipe.w.quantizer.bit <= LOW_BITS,
    ),
    RecipeChange(
        "adaquant",
        {"W.ROUNDING.TYPE": "adaquant"},
        lambda here: _can_use_inputs(here) and here.recipe.w.quantizer.bit <= LOW_BITS,
    ),
    RecipeChange(
        "tuned batch norms",
        {"SCHEDULE.BN_TUNING": True},
        lambda here: here.batch_norms and here.weights and here.per_channel,
    ),
    RecipeChange("bias correction: none", {"BIAS_CORRECTION": "none"}, lambda here: here.weights and here.corrected),
    RecipeChange(
        "ranges measured on quantized inputs",
        {"CALIBRATION.ASYM.ENABLE": True},
        lambda here: here.inputs and here.weights and not here.corrected,
    ),
)
"""Changes that a search tries, those that gain most often first. A change that gains is kept for the next ones."""

REPAIRS: Final = (
    RecipeChange(
        "scale weights per channel",
        {"w_qscheme": "per-channel-symmetric"},
        lambda here: here.side != "activations" and here.weights and not here.per_channel,
    ),
    RecipeChange(
        "choose ranges of activations by least squared error",
        {"a_observer": "mse"},
        lambda here: here.side != "weights" and here.inputs and here.recipe.a.observer.type != "mse",
    ),
    RecipeChange(
        "round weights by second moments of their inputs",
        {"rounding": "gptq"},
        lambda here: here.side != "activations" and here.weights and here.nearest and here.recipe.mode != "dynamic",
    ),
)
"""Changes at the same widths that advice tries, the cheapest first."""


def steps_for(here: Situation, decided: frozenset[str]) -> list[RecipeChange]:
    """Return the applicable steps, without those that would change a decided key.

    Args:
        decided: key paths, upper case, that the call or the recipe sets.
    """
    steps = []
    for step in STEPS:
        given = any(key in decided or key.rpartition(".")[0] in decided for key in step.keys)
        in_recipe = all(attrgetter(key.lower())(here.recipe) == value for key, value in step.keys.items())
        if step.when(here) and not given and not in_recipe:
            steps.append(step)
    return steps


def repairs(state: PipelineState) -> Iterator[RecipeChange]:
    """Yield the changes that may repair a result, the cheapest first."""
    recipe = state.prepared.recipe
    weights, activations = width_of(recipe, "w"), width_of(recipe, "a")
    side, hopeless = blame(state, weights, activations)
    if hopeless:  # each side alone loses too much: other numbers at the same widths do not help
        yield from wider(recipe, side, weights, activations)
        return
    yield from islice(remedies(state.report.causes), 1)
    here = Situation.of(recipe, state.prepared.graph, side)
    yield from (change for change in REPAIRS if change.when(here))
    names = sensitive_layers(state)
    if names:
        yield left_in_float(recipe, names, "sensitive")
    yield from wider(recipe, side, weights, activations)


def remedies(causes: Sequence[Cause]) -> Iterator[RecipeChange]:
    """Yield the changes against the causes of the worst layers: those of all together, then that of the worst alone.

    More samples are left out: their calibration takes longer than the run.
    """
    remedied = [(cause, changes) for cause in causes if (changes := _lists_of(cause))]
    if len({cause.overrides for cause, _ in remedied}) > 1:
        merged: dict[str, list[Any]] = {}
        for _, changes in remedied:
            for key, entries in changes.items():
                before = merged.get(key, [])  # of specific settings, new entries precede those of the recipe
                merged[key] = [*(entry for entry in entries if entry not in before), *before]
        words = " and ".join(dict.fromkeys(cause.remedy for cause, _ in remedied))
        together = tuple(cause for cause, _ in remedied)
        yield RecipeChange(f"{words} ({len(remedied)} layers)", merged, causes=together)
    if remedied:
        cause, changes = remedied[0]
        yield RecipeChange(f"{cause.remedy} ('{cause.node}')", changes, causes=(cause,))


def _lists_of(cause: Cause) -> dict[str, list[Any]]:
    """Return the changes of a remedy that extend lists of the recipe, by key."""
    return {key: value for key, value in cause.keywords.items() if isinstance(value, list)}


def left_in_float(recipe: Recipe, names: Collection[str], which: str) -> RecipeChange:
    """Return the change that leaves further layers in float; `which` says in a word which ones."""
    patterns = [*recipe.exclude, *(pattern_of(name, "node") for name in names)]
    return RecipeChange(f"leave {len(names)} {which} layer{'s' * (len(names) != 1)} in float", {"EXCLUDE": patterns})


def wider(recipe: Recipe, side: Side, weights: int, activations: int) -> Iterator[RecipeChange]:
    """Yield wider codes: the side to blame first, in steps of 4 (weights), 8 and 16 bits (activations)."""
    steps: list[tuple[int, int]] = []
    w, a = weights, activations
    if side != "weights" and 0 < a < FULL_BITS:
        steps.append((w, FULL_BITS))
        if side == "both" and 0 < w < FULL_BITS:
            steps.pop()
    if side == "both" and 0 < w < 4 and a:
        steps.append((4, max(a, FULL_BITS)))
    if side == "weights" and 0 < w < 4:
        steps.append((4, a))
    if 0 < w < FULL_BITS:
        steps.append((FULL_BITS, max(a, FULL_BITS) if side == "both" and a else a))
    if a and recipe.mode == "static":
        steps.append((max(w, FULL_BITS) if side != "activations" and w else w, 2 * FULL_BITS))
    for new_w, new_a in dict.fromkeys(steps):
        if (new_w, new_a) != (w, a):
            yield RecipeChange(
                f"use {new_w}-bit weights and {new_a}-bit activations" if new_a else f"use {new_w}-bit weights",
                {"bits": f"w{new_w or 32}a{new_a or 32}"} if new_a else {"w_bit": new_w},
            )

"""Steps of the recipe search, by target and bit width, cheap ones first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sbonnx.graph import Graph, query
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT, FULL_BITS, is_per_channel

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
    """

    recipe: Recipe
    batch_norms: bool
    products: bool
    depthwise: bool = False

    @staticmethod
    def of(recipe: Recipe, graph: Graph) -> Situation:
        """Collect the facts of a recipe and of the model as stored in the file."""
        ops = {node.op for node in query.all_nodes(graph)}
        depthwise = any(query.is_depthwise(node) for node in query.all_nodes(graph))
        return Situation(recipe, BATCH_NORM in ops, bool(ops & MATRIX_PRODUCTS), depthwise)

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
        return self.low and self.recipe.w.block_size is None

    @property
    def corrected(self) -> bool:
        """Whether biases are corrected by default, on quantized inputs."""
        return self.recipe.corrects_biases(depthwise=self.depthwise)

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
class Step:
    """One candidate change: keys of the recipe, and a condition.

    Attributes:
        name: display name.
        keys: values by key path.
        when: whether the step can help at all.
    """

    name: str
    keys: Mapping[str, Any]
    when: Callable[[Situation], bool]


def _by_inputs(here: Situation) -> bool:
    return here.weights and here.recipe.w.quantizer.dtype == "int" and here.recipe.mode != "dynamic"


STEPS: Final = (
    Step("ranges of activations: min-max", {"A.OBSERVER.TYPE": "minmax"}, lambda here: here.inputs),
    Step("ranges of activations: percentile", {"A.OBSERVER.TYPE": "percentile"}, lambda here: here.inputs),
    Step(
        "ranges of weights: least error of the output",
        {"W.ROUNDING.SCALE": "search"},
        lambda here: _by_inputs(here) and not here.searched,
    ),
    Step("gptq at 8 bits", {"W.ROUNDING.TYPE": "gptq"}, lambda here: _by_inputs(here) and not here.low),
    Step(
        "bias correction: measured",
        {"BIAS_CORRECTION": "empirical"},
        lambda here: _by_inputs(here) and not here.corrected,
    ),
    Step("bias correction: none", {"BIAS_CORRECTION": "none"}, lambda here: here.weights and here.corrected),
    Step(
        "cross-layer equalization",
        {"EQUALIZE.CROSS_LAYER": True},
        lambda here: here.weights and here.inputs and not here.per_channel,
    ),
    Step(
        "absorbed biases",
        {"EQUALIZE.CROSS_LAYER": True, "EQUALIZE.ABSORB_BIAS": True},
        lambda here: here.weights and here.inputs and not here.per_channel,
    ),
    Step(
        "smoothed inputs (SmoothQuant)",
        {"EQUALIZE.SMOOTH_QUANT": True},
        lambda here: here.weights and here.inputs and here.per_channel,
    ),
    Step(
        "inputs scaled by what they meet (AWQ)",
        {"EQUALIZE.AWQ": True},
        lambda here: here.low and here.products and here.per_channel,
    ),
    Step(
        "tuned batch norms",
        {"SCHEDULE.BN_TUNING": True},
        lambda here: here.batch_norms and here.weights and here.per_channel,
    ),
    Step(
        "ranges behind quantized layers",
        {"CALIBRATION.ASYM.ENABLE": True},
        lambda here: here.inputs and here.weights and not here.corrected,
    ),
    Step(
        "adaquant",
        {"W.ROUNDING.TYPE": "adaquant"},
        lambda here: _by_inputs(here) and here.recipe.w.quantizer.bit <= LOW_BITS,
    ),
    Step(
        "adaround",
        {"W.ROUNDING.TYPE": "adaround"},
        lambda here: _by_inputs(here) and here.recipe.w.quantizer.bit <= LOW_BITS,
    ),
)
"""Cheap ones first. The settings of a step that gains are kept for later steps."""


def steps_for(here: Situation, decided: frozenset[str]) -> list[Step]:
    """Return the applicable steps, without those that would change a decided key.

    Args:
        decided: key paths, upper case, that the call or the recipe sets.
    """
    found = []
    for step in STEPS:
        mine = any(key in decided or key.rpartition(".")[0] in decided for key in step.keys)
        if step.when(here) and not mine and not _holds(here.recipe, step):
            found.append(step)
    return found


def _holds(recipe: Recipe, step: Step) -> bool:
    """Return whether a recipe already has the values of a step."""
    return all(_value(recipe, key) == value for key, value in step.keys.items())


def _value(recipe: Recipe, key: str) -> Any:
    found: Any = recipe
    for part in key.lower().split("."):
        found = getattr(found, part)
    return found

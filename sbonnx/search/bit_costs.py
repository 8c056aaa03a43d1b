"""Cost models of bit widths: bits, bytes, bit operations, latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sbonnx.backends import Backend
from sbonnx.errors import RecipeError
from sbonnx.graph import Graph, query
from sbonnx.planning import costs_of as kernel_costs_of
from sbonnx.planning.times import GraphTimes
from sbonnx.recipe import Recipe
from sbonnx.recipe.names import FLOAT
from sbonnx.report import Reason, Refusal

CostName = Literal["bits", "size", "bit_operations", "latency"]

FLOAT_BITS: Final = 32
BYTE: Final = 8
KERNEL_BITS: Final = 8
"""Largest width of onnxruntime's integer kernels. All widths up to it run at the same speed, as 8-bit integers."""


@dataclass(frozen=True)
class LayerCounts:
    """Layer with a quantized weight, for cost models: node, values of its weight, multiplications for one feed."""

    name: str
    weights: int
    multiplies: float


Cost = Callable[[LayerCounts, int, int], float]
"""(layer, bits of its weight, bits of its input) -> cost; 0 bits is float."""


@dataclass(frozen=True)
class Costs:
    """A cost model, and the normalization of its budget.

    Attributes:
        name: key of MIXED.BUDGET in lower case.
        of: cost of one layer; costs are additive.
        whole: denominator of the budget's ratio or average.
        fixed: cost of everything that cannot be chosen, in the same unit.
        refusals: layers without a known cost.
    """

    name: CostName
    of: Cost
    whole: float
    fixed: float = 0.0
    refusals: tuple[Refusal, ...] = ()

    def limit(self, budget: float) -> float:
        """Return the total cost allowed for the layers to choose."""
        return budget * self.whole - self.fixed

    def figure(self, cost: float) -> float:
        """Convert a sum of costs to the unit of the budget."""
        return (cost + self.fixed) / self.whole


def stored_bits(bits: int) -> int:
    """Return the bits of one stored value: 4 for up to 4 bits, 8 for up to 8, else 16; 32 for float."""
    if bits == FLOAT:
        return FLOAT_BITS
    return 4 if bits <= 4 else BYTE if bits <= BYTE else 2 * BYTE


COSTS: Final[dict[CostName, Cost]] = {
    "bits": lambda layer, weight, _: float(layer.weights * (weight or FLOAT_BITS)),
    "size": lambda layer, weight, _: layer.weights * stored_bits(weight) / BYTE,
    "bit_operations": lambda layer, weight, act: layer.multiplies * (weight or FLOAT_BITS) * (act or FLOAT_BITS),
}


def costs_of(
    name: CostName,
    graph: Graph,
    layers: Sequence[LayerCounts],
    kept: Mapping[str, tuple[LayerCounts, int, int]],
    recipe: Recipe,
    backend: Backend,
) -> Costs:
    """Return the cost model for a budget.

    Args:
        layers: the layers to choose widths for.
        kept: the other layers with quantized weights, with their bits (weight, input), which the recipe fixes.

    Raises:
        RecipeError: "latency" is requested, and the backend has no kernel costs.
    """
    everything = [*layers, *(layer_size for layer_size, _, _ in kept.values())]
    if name == "latency":
        return _latency(graph, layers, kept, recipe, backend)
    of = COSTS[name]
    fixed = sum(of(*kept_layer) for kept_layer in kept.values())
    if name == "bits":
        whole = float(sum(layer.weights for layer in everything))
    elif name == "bit_operations":
        whole = sum(of(layer, 8, 8) for layer in everything)
    else:
        whole = float(query.constant_bytes(graph))
        fixed += whole - sum(of(layer, FLOAT, FLOAT) for layer in everything)
    return Costs(name, of, whole, fixed)


def _latency(
    graph: Graph,
    layers: Sequence[LayerCounts],
    kept: Mapping[str, tuple[LayerCounts, int, int]],
    recipe: Recipe,
    backend: Backend,
) -> Costs:
    """Latency of the layers in ns from the kernel cost table; Q/DQ pairs between float and integer ops are ignored."""
    table = kernel_costs_of(recipe, backend)
    if table is None:
        why = "its kernels were not measured" if backend.costs is None else "KERNEL_COSTS is none"
        raise RecipeError(
            f"MIXED.BUDGET.LATENCY: no times are known for the backend {backend.name}, {why}: "
            "use BIT_OPERATIONS, or BACKEND: onnxruntime with a table of kernel costs"
        )
    nodes = query.node_by_name(graph)
    times = GraphTimes.of(query.all_nodes(graph), query.output_names(graph), table)
    prices = {
        layer.name: times.prices.get(layer.name)
        for layer in [*layers, *(layer_size for layer_size, _, _ in kept.values())]
    }

    def of(layer: LayerCounts, weight: int, activation: int) -> float:
        price = prices[layer.name]
        if price is None:
            return 0.0
        integers = 0 < weight <= KERNEL_BITS and 0 < activation <= KERNEL_BITS
        return price.integers if integers else price.floats

    refusals = tuple(
        Refusal(
            "count time",
            name,
            Reason("not-in-costs", f"the table of kernel costs has no {nodes[name].op} of this kind: it counts 0"),
        )
        for name, price in prices.items()
        if price is None
    )
    whole = sum(price.floats for price in prices.values() if price is not None)
    return Costs("latency", of, whole, sum(of(*kept_layer) for kept_layer in kept.values()), refusals)

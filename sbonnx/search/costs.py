"""What widths cost: bits, bytes, bit operations, time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal

from sbonnx.backends import Backend
from sbonnx.errors import RecipeError
from sbonnx.graph import Constant, Graph, query
from sbonnx.recipe import Recipe
from sbonnx.recipe.limits import FLOAT
from sbonnx.report import Refusal

CostName = Literal["bits", "size", "bit_operations", "latency"]

FLOAT_BITS: Final = 32
BYTE: Final = 8
KERNEL_BITS: Final = 8
"""Widths of up to so many bits run in onnxruntime's integer kernels, all at the same speed: codes are bytes there."""


@dataclass(frozen=True)
class Weighted:
    """One layer with a quantized weight, as far as costs are concerned.

    Attributes:
        name: of its node.
        weights: values of its weight.
        multiplies: multiplications on one feed.
    """

    name: str
    weights: int
    multiplies: float


Cost = Callable[[Weighted, int, int], float]
"""Of a layer with so many bits for its weight and its input; 0 is float."""


@dataclass(frozen=True)
class Costs:
    """A way to count, and what a budget of it leaves.

    Attributes:
        name: key of MIXED.BUDGET in lower case.
        of: the cost of a layer; they add up.
        whole: what the ratio or average of a budget is of.
        fixed: what costs and cannot be chosen, in the same unit.
        refusals: layers of which nothing is known.
    """

    name: CostName
    of: Cost
    whole: float
    fixed: float = 0.0
    refusals: tuple[Refusal, ...] = ()

    def limit(self, budget: float) -> float:
        """What the layers to choose for may cost together."""
        return budget * self.whole - self.fixed

    def figure(self, cost: float) -> float:
        """A sum of costs in the unit of the budget."""
        return (cost + self.fixed) / self.whole


def stored_bits(bits: int) -> int:
    """Bits that a code takes in the file: int4 holds up to 4, bytes up to 8 (`export.packed`)."""
    if bits == FLOAT:
        return FLOAT_BITS
    return 4 if bits <= 4 else BYTE if bits <= BYTE else 2 * BYTE


def costs_of(
    name: CostName,
    graph: Graph,
    layers: Sequence[Weighted],
    kept: Mapping[str, tuple[Weighted, int, int]],
    recipe: Recipe,
    backend: Backend,
) -> Costs:
    """How to count.

    Args:
        layers: those that are chosen for.
        kept: the other layers with quantized weights, and their bits, which the recipe fixes.

    Raises:
        RecipeError: times are asked for, and the backend knows none.
    """
    everything = [*layers, *(one for one, _, _ in kept.values())]
    if name == "latency":
        return _latency(graph, layers, kept, recipe, backend)
    if name == "bits":
        of: Cost = _bits
        whole = float(sum(layer.weights for layer in everything))
        fixed = sum(of(*one) for one in kept.values())
    elif name == "bit_operations":
        of = _operations
        whole = sum(of(layer, 8, 8) for layer in everything)
        fixed = sum(of(*one) for one in kept.values())
    else:
        of = _bytes
        whole = float(constant_bytes(graph))
        fixed = whole - sum(of(layer, FLOAT, FLOAT) for layer in everything) + sum(of(*one) for one in kept.values())
    return Costs(name, of, whole, fixed)


def _bits(layer: Weighted, weight: int, _: int) -> float:
    return float(layer.weights * (weight or FLOAT_BITS))


def _bytes(layer: Weighted, weight: int, _: int) -> float:
    return layer.weights * stored_bits(weight) / BYTE


def _operations(layer: Weighted, weight: int, activation: int) -> float:
    return layer.multiplies * (weight or FLOAT_BITS) * (activation or FLOAT_BITS)


def constant_bytes(graph: Graph) -> int:
    """Bytes of all constants of a graph, those of branches as well; each once."""
    found: dict[int, int] = {}
    for tensor in query.all_tensors(graph):
        kind = query.dtype(tensor)
        if isinstance(tensor, Constant) and kind is not None:
            found[id(tensor)] = int(prod(tensor.shape)) * kind.itemsize
    return sum(found.values())


def _latency(
    graph: Graph,
    layers: Sequence[Weighted],
    kept: Mapping[str, tuple[Weighted, int, int]],
    recipe: Recipe,
    backend: Backend,
) -> Costs:
    """Nanoseconds of the layers by the table of kernel costs; pairs between float and integer ops are not counted."""
    if backend.costs is None or recipe.kernel_costs == "none":
        why = "its kernels were not measured" if backend.costs is None else "KERNEL_COSTS is none"
        raise RecipeError(
            f"MIXED.BUDGET.LATENCY: no times are known for the backend {backend.name}, {why}: "
            "use BIT_OPERATIONS, or BACKEND: onnxruntime with a table of kernel costs"
        )
    table = backend.costs(None if recipe.kernel_costs == "bundled" else recipe.kernel_costs)
    nodes = query.node_by_name(graph)
    prices = {layer.name: table.of(nodes[layer.name]) for layer in [*layers, *(one for one, _, _ in kept.values())]}

    def of(layer: Weighted, weight: int, activation: int) -> float:
        price = prices[layer.name]
        if price is None:
            return 0.0
        integers = 0 < weight <= KERNEL_BITS and 0 < activation <= KERNEL_BITS
        return price.integers if integers else price.floats

    refusals = tuple(
        Refusal("count time", name, f"the table of kernel costs holds no {nodes[name].op} of this kind: it counts 0")
        for name, price in prices.items()
        if price is None
    )
    whole = sum(price.floats for price in prices.values() if price is not None)
    return Costs("latency", of, whole, sum(of(*one) for one in kept.values()), refusals)


__all__ = ["Cost", "CostName", "Costs", "Weighted", "constant_bytes", "costs_of", "stored_bits"]

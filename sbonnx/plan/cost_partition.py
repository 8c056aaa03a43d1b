"""Minimum-cut partition of a graph into float and integer kernels: finds integer kernels that cost more than they save.

Each op has a cost in float and one in integers. Each tensor has a cost for a QuantizeLinear or DequantizeLinear if it
passes from one side to the other. The partition of least cost is a minimum cut between source (integers) and sink
(float); see Greig, Porteous and Seheult 1989 (MAP estimation for binary images), whose energy has the same form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import networkx

from sbonnx.backends.onnxruntime.costs import KernelCosts, Price
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import BLOCKED_POOLS, CONVOLUTIONS, LINEAR, MATRIX_PRODUCTS, MOVES_DATA
from sbonnx.plan.survey import Survey

INTEGERS: Final = "integers"
FLOATS: Final = "floats"

SLACK_SHARE: Final = 0.005
"""Share of the whole model's time that an op in integers may lose before it is moved to float.

Smaller losses are within the error of the cost table, and integer weights also save space.
"""

SLACK_NS: Final = 3000.0
"""Absolute counterpart of `SLACK_SHARE` in nanoseconds: smaller losses are not noticeable."""

BLOCKED: Final = CONVOLUTIONS | BLOCKED_POOLS
"""Ops whose float kernels work on blocks of channels."""


@dataclass
class MinCut:
    """Flow network whose minimum cut is the cheapest partition into integers and float."""

    costs: KernelCosts
    survey: Survey
    able: set[str]
    folds: frozenset[str]
    network: Any = field(default_factory=networkx.DiGraph)
    prices: dict[str, Price] = field(default_factory=dict)

    def build(self) -> None:
        """Add nodes for the ops and for both halves of each possible Q/DQ pair."""
        for node in self._nodes():
            price = self.costs.of(node)
            if price is not None and node.name in self.able:
                self.prices[node.name] = price
        slack = max(SLACK_NS, SLACK_SHARE * sum(price.floats for price in self.prices.values()))
        for name, price in self.prices.items():
            self._edge(INTEGERS, name, price.floats + slack)  # cut if the op ends up in float
            self._edge(name, FLOATS, price.integers)
        for node in self._nodes():
            self._follow(node)
        for node in self._nodes():
            for tensor in node.outputs:
                self._passages(tensor, node)
        for tensor in self._inputs():
            self._passages(tensor, None)

    def _nodes(self) -> Iterable[Node]:
        return (place.node for place in self.survey.places)

    def _inputs(self) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        for node in self._nodes():
            for tensor in node.inputs:
                if not isinstance(tensor, Constant) and not tensor.is_empty() and query.producer(tensor) is None:
                    found[id(tensor)] = tensor
        return list(found.values())

    def _edge(self, one: Any, other: Any, capacity: float | None) -> None:
        """Add an edge that costs `capacity` when it is cut; with None, it cannot be cut."""
        if self.network.has_edge(one, other):
            before = self.network[one][other].get("capacity")
            capacity = None if before is None or capacity is None else before + capacity
        if capacity is None:
            self.network.add_edge(one, other)
        else:
            self.network.add_edge(one, other, capacity=capacity)
        if capacity is None and "capacity" in self.network[one][other]:
            del self.network[one][other]["capacity"]

    def _follow(self, node: Node) -> None:
        """Link data movement to the cheaper side, and a folded activation to the op before it."""
        if node.op in MOVES_DATA and node.name not in self.prices:
            price = self.costs.of(node)
            if price is not None:
                self.prices[node.name] = price
                self._edge(INTEGERS, node.name, price.floats)
                self._edge(node.name, FLOATS, price.integers)
        elif self._folds(node):
            before = query.producer(node.inputs[0])
            if before is not None:
                self._edge(node.name, self._label(before), None)
                self._edge(self._label(before), node.name, None)

    def _folds(self, node: Node) -> bool:
        if node.op not in self.folds or not node.inputs:
            return False
        before = query.producer(node.inputs[0])
        return before is not None and before.name in self.able and len(query.readers(node.inputs[0])) == 1

    def _label(self, node: Node | None) -> Any:
        """Return the network node that represents `node` as a reader: its own, or a fixed side if it has no price."""
        if node is None:
            return FLOATS
        if node.name in self.prices or self._folds(node):
            return node.name
        return (
            INTEGERS if node.name in self.able else FLOATS
        )  # ops without a price stay on the side where the rules put them

    def _passages(self, tensor: Tensor, producer: Node | None) -> None:
        """Add a QuantizeLinear where integers read float, and a DequantizeLinear where float reads integers."""
        readers = [node for node, index in query.readers(tensor) if not _is_weight(node, index)]
        if self.survey.quantizable(tensor) is not None:
            return
        # a matrix product in integers writes float
        written = FLOATS if producer is None or producer.op in MATRIX_PRODUCTS else self._label(producer)
        ends = {self._label(node) for node in readers}
        if tensor.name in self.survey.outputs:
            ends.add(FLOATS)
        if not ends or ends == {written}:
            return
        cost = self.costs.quantize(tensor, reorder=producer is not None and producer.op in BLOCKED)
        first = ("quantize", tensor.name)
        self._edge(first, written, cost)
        cost = self.costs.dequantize(tensor, reorder=any(node.op in BLOCKED for node in readers))
        second = ("dequantize", tensor.name)
        self._edge(written, second, cost)
        for end in ends:
            self._edge(end, first, None)
            self._edge(second, end, None)

    def floats(self) -> set[str]:
        """Return the names of the ops that could run in integers but are cheaper in float."""
        if INTEGERS not in self.network or FLOATS not in self.network:
            return set()
        # Most ops are decided by the two edges of their own, so short augmenting paths come first.
        _, (integers, _) = networkx.minimum_cut(
            self.network, INTEGERS, FLOATS, flow_func=networkx.algorithms.flow.shortest_augmenting_path
        )
        return {name for name in self.prices if name in self.able and name not in integers}


def _is_weight(node: Node, index: int) -> bool:
    kind = LINEAR.get(node.op)
    return kind is not None and index in (kind.weight, kind.bias) and isinstance(node.inputs[index], Constant)


def slower_in_integers(survey: Survey, able: set[str], folds: frozenset[str], costs: KernelCosts) -> dict[str, str]:
    """Find the ops that would be slower in integers than in float, with the reason.

    Args:
        survey: the graph.
        able: names of the nodes that have integer kernels and planned pairs.
        folds: op types that onnxruntime folds into the preceding op.
        costs: table of kernel costs.
    """
    cut = MinCut(costs, survey, able, folds)
    cut.build()
    found = {}
    for name in cut.floats():
        price = cut.prices[name]
        found[name] = (
            f"it would be slower in integers: about {price.integers / 1000:.0f} µs a sample, in float "
            f"{price.floats / 1000:.0f}, without the pairs at its edges"
        )
    return found

"""Which integer kernels do not pay for their edges: the cheapest division of a graph into float and integers.

Each op has a price in float and one in integers, each tensor one for a QuantizeLinear or DequantizeLinear where it
passes from one to the other. The division of least price is a minimum cut between source (integers) and sink (float);
see Greig, Porteous and Seheult 1989 (MAP estimation for binary images), whose energy has the same form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import networkx

from sbonnx.backends.onnxruntime.costs import Costs, Price
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import BLOCKED_POOLS, CONVOLUTIONS, LINEAR, MATRIX_PRODUCTS, MOVES_DATA
from sbonnx.plan.survey import Survey

INTEGERS: Final = "integers"
FLOATS: Final = "floats"

SLACK_SHARE: Final = 0.005
"""Part of the whole model's time that an op may lose before it is taken out of integers: less is within the error of
the table, and integer weights are smaller too."""

SLACK_NS: Final = 3000.0
"""The same as time: less is not noticed."""

BLOCKED: Final = CONVOLUTIONS | BLOCKED_POOLS
"""Ops whose float kernels work on blocks of channels."""


@dataclass
class Division:
    """The network whose minimum cut is the cheapest division."""

    costs: Costs
    survey: Survey
    able: set[str]
    folds: frozenset[str]
    network: Any = field(default_factory=networkx.DiGraph)
    prices: dict[str, Price] = field(default_factory=dict)

    def build(self) -> None:
        """Nodes for ops and for both halves of each possible pair."""
        for node in self._nodes():
            price = self.costs.of(node)
            if price is not None and node.name in self.able:
                self.prices[node.name] = price
        slack = max(SLACK_NS, SLACK_SHARE * sum(price.floats for price in self.prices.values()))
        for name, price in self.prices.items():
            self._edge(INTEGERS, name, price.floats + slack)  # cut where the op ends up in float
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
        """An edge that costs `capacity` when it is cut; None: it cannot be."""
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
        """Data movement goes with what is cheaper; an activation that folds goes with the op before."""
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
        """The end of the network that stands for what a node reads: its own, or one of both for good."""
        if node is None:
            return FLOATS
        if node.name in self.prices or self._folds(node):
            return node.name
        return INTEGERS if node.name in self.able else FLOATS  # what has no price stays where the rules put it

    def _written(self, node: Node | None) -> Any:
        """The same for what it writes: a matrix product in integers writes float."""
        return FLOATS if node is None or node.op in MATRIX_PRODUCTS else self._label(node)

    def _passages(self, tensor: Tensor, producer: Node | None) -> None:
        """A QuantizeLinear where float is read as integers, a DequantizeLinear where integers are read as float."""
        readers = [node for node, index in query.readers(tensor) if not _is_weight(node, index)]
        if self.survey.quantizable(tensor) is not None:
            return
        written = self._written(producer)
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
        """Names of the ops that are able, and cheaper in float."""
        if INTEGERS not in self.network or FLOATS not in self.network:
            return set()
        _, (integers, _) = networkx.minimum_cut(
            self.network, INTEGERS, FLOATS, flow_func=networkx.algorithms.flow.boykov_kolmogorov
        )
        return {name for name in self.prices if name in self.able and name not in integers}


def _is_weight(node: Node, index: int) -> bool:
    kind = LINEAR.get(node.op)
    return kind is not None and index in (kind.weight, kind.bias) and isinstance(node.inputs[index], Constant)


def unpaid(survey: Survey, able: set[str], folds: frozenset[str], costs: Costs) -> dict[str, str]:
    """Ops that would be slower in integers than in float, with the reason.

    Args:
        survey: the graph.
        able: names of the nodes for which there are integer kernels and pairs are planned.
        folds: op types that onnxruntime folds into the op before.
        costs: the table of kernels.
    """
    division = Division(costs, survey, able, folds)
    division.build()
    found = {}
    for name in division.floats():
        price = division.prices[name]
        found[name] = (
            f"it would be slower in integers: about {price.integers / 1000:.0f} µs a sample, in float "
            f"{price.floats / 1000:.0f}, without the pairs at its edges"
        )
    return found

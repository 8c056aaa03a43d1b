"""Minimum-cut partition of a graph into float and integer kernels: finds integer kernels that cost more than they save.

Each op has a cost in float and one in integers. Each tensor has a cost for a QuantizeLinear or DequantizeLinear if it
passes from one side to the other. The partition of least cost is a minimum cut between source (integers) and sink
(float); see Greig, Porteous and Seheult 1989 (MAP estimation for binary images), whose energy has the same form.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from sbonnx.graph import Node, query
from sbonnx.ops import MOVES_DATA
from sbonnx.planning.flow_network import FlowNetwork
from sbonnx.planning.survey import Survey
from sbonnx.planning.times import Crossing, GraphTimes, Side
from sbonnx.report.codes import Reason

INTEGERS: Final = Side.INTEGERS
FLOATS: Final = Side.FLOATS

SLACK_SHARE: Final = 0.005
"""Share of the whole model's time that an op in integers may lose before it is moved to float.

Smaller losses are within the error of the cost table, and integer weights also save space.
"""

SLACK_NS: Final = 10_000.0
"""Absolute counterpart of `SLACK_SHARE` in nanoseconds: about the time that calling a session takes."""

MODEL_SLACK_NS: Final = 0.0
"""Estimated loss of the whole model against float, in nanoseconds, from which no op may lose anything."""


@dataclass
class MinCut:
    """Flow network whose minimum cut is the cheapest partition into integers and float.

    Attributes:
        times: terms of the estimated time.
        survey: the graph.
        able: names of the nodes that have integer kernels and planned pairs.
        folds: op types that the runtime folds into the preceding op.
        continues: names of the nodes that the rules make integer only behind integer kernels.
    """

    times: GraphTimes
    survey: Survey
    able: set[str]
    folds: frozenset[str]
    continues: frozenset[str] = frozenset()
    network: FlowNetwork = field(default_factory=FlowNetwork)
    free: set[str] = field(default_factory=set)

    def build(self, slack: float) -> None:
        """Add nodes for the ops and for both halves of each possible Q/DQ pair.

        Args:
            slack: ns that each op in integers may lose.
        """
        for node in self.times.nodes:
            price = self.times.prices.get(node.name)
            if node.name in self.able and price is not None:
                self.free.add(node.name)
                self._edge(INTEGERS, node.name, price.floats + slack)  # cut if the op ends up in float
                self._edge(node.name, FLOATS, price.integers)
            elif node.op in MOVES_DATA and price is not None:
                self.free.add(node.name)  # on the cheaper side
                self._edge(INTEGERS, node.name, price.floats)
                self._edge(node.name, FLOATS, price.integers)
            elif self._folds(node):
                before = self._label(query.producer(node.inputs[0]))
                self._edge(node.name, before, None)
                self._edge(before, node.name, None)
        for name in sorted(self.continues & self.free):
            self._edge(name, self._label(self._before(self.survey.nodes[name])), None)
        for number, crossing in enumerate(self.times.crossings):
            self._cross(number, crossing)

    def _edge(self, one: Any, other: Any, capacity: float | None) -> None:
        """Add an edge that costs `capacity` (ns) when it is cut; with None, it cannot be cut.

        Capacities are whole picoseconds: sums of floats would depend on the order of the flows.
        """
        self.network.add(one, other, None if capacity is None else round(1000 * capacity))

    def _before(self, node: Node) -> Node | None:
        """Return the producer of the first input, before moves of data."""
        before = query.producer(node.inputs[0])
        while before is not None and before.op in MOVES_DATA:
            before = query.producer(before.inputs[0])
        return before

    def _folds(self, node: Node) -> bool:
        if node.op not in self.folds or not node.inputs:
            return False
        before = query.producer(node.inputs[0])
        return before is not None and before.name in self.able and len(query.readers(node.inputs[0])) == 1

    def _label(self, node: Node | None) -> Any:
        """Return the network node of an op: its own name, or a fixed side if it cannot be chosen.

        Ops without a price stay on the side where the rules put them.
        """
        if node is None:
            return FLOATS
        if node.name in self.free or self._folds(node):
            return node.name
        return INTEGERS if node.name in self.able else FLOATS

    def _end(self, end: str | Side) -> Any:
        return end if isinstance(end, Side) else self._label(self.survey.nodes.get(end))

    def _cross(self, number: int, crossing: Crossing) -> None:
        """Add a QuantizeLinear where integers read float, and a DequantizeLinear where float reads integers."""
        written, ends = self._end(crossing.writer), {self._end(reader) for reader in crossing.readers}
        if ends == {written}:
            return
        first, second = ("quantize", number), ("dequantize", number)
        self._edge(first, written, crossing.quantize)
        self._edge(written, second, crossing.dequantize)
        for end in ends:
            self._edge(end, first, None)
            self._edge(second, end, None)

    def floats(self) -> set[str]:
        """Return the names of the ops that could run in integers but are cheaper in float."""
        floats = self.network.sink_side(INTEGERS, FLOATS)
        return {name for name in self.free if name in self.able and name in floats}


def slower_in_integers(
    survey: Survey,
    able: set[str],
    folds: frozenset[str],
    times: GraphTimes,
    continues: frozenset[str] = frozenset(),
) -> dict[str, Reason]:
    """Find the ops that would be slower in integers than in float, with the reason.

    Args:
        survey: the graph.
        able: names of the nodes that have integer kernels and planned pairs.
        folds: op types that onnxruntime folds into the preceding op.
        times: terms of its estimated time.
        continues: names of the nodes that the rules make integer only behind integer kernels.
    """
    everything_float = times.of_division(())
    slack = max(SLACK_NS, SLACK_SHARE * sum(price.floats for name, price in times.prices.items() if name in able))
    for allowed in (slack, 0.0):
        cut = MinCut(times, survey, able, folds, continues)
        cut.build(allowed)
        floats = cut.floats()
        if times.of_division(able - floats) <= everything_float + MODEL_SLACK_NS:
            break  # else small losses of many ops add up
    reasons = {}
    for name in sorted(floats):
        price = times.prices[name]
        reasons[name] = Reason(
            "slower-in-integers",
            f"it would be slower in integers: its kernel takes about {_microseconds(price.integers)} a sample and the "
            f"conversions at its edges more, in float it takes {_microseconds(price.floats)}",
        )
    return reasons


def _microseconds(ns: float) -> str:
    return f"{ns / 1000:.{0 if ns >= 1000 else 1}f} µs"

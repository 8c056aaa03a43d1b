"""Minimum cut of a flow network, by Dinic's algorithm on lists of integers.

E. A. Dinic 1970, Algorithm for Solution of a Problem of Maximum Flow in Networks with Power Estimation: shortest
augmenting paths, all of one length before longer ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass
class FlowNetwork:
    """Directed graph with integer capacities.

    Attributes:
        capacities: by (tail, head); None: the edge cannot be cut.
    """

    capacities: dict[tuple[Hashable, Hashable], int | None] = field(default_factory=dict)

    def add(self, tail: Hashable, head: Hashable, capacity: int | None) -> None:
        """Add an edge; capacities of equal edges are summed. An edge from a node to itself has no effect."""
        before = self.capacities.get((tail, head), 0)
        self.capacities[tail, head] = None if before is None or capacity is None else before + capacity

    def sink_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the nodes on the side of the sink of the minimum cut with the fewest of them.

        They are the same for every maximum flow: those from which the sink can be reached after it. The capacity of
        every path from source to sink must be finite. The result is empty if the network lacks the source or the sink.
        """
        nodes: dict[Hashable, int] = {}
        for edge in self.capacities:
            for node in edge:
                nodes.setdefault(node, len(nodes))
        if source not in nodes or sink not in nodes:
            return set()
        flow = _Residual(len(nodes))
        uncut = 1 + sum(capacity for capacity in self.capacities.values() if capacity is not None)
        for (tail, head), capacity in self.capacities.items():
            flow.add(nodes[tail], nodes[head], uncut if capacity is None else capacity)
        distances = flow.saturate(nodes[source], nodes[sink])
        return {node for node, number in nodes.items() if distances[number] >= 0}


class _Residual:
    """Residual network; edge ``e`` and its reverse ``e ^ 1`` have consecutive numbers."""

    def __init__(self, nodes: int) -> None:
        self.heads: list[int] = []
        self.room: list[int] = []
        self.edges: list[list[int]] = [[] for _ in range(nodes)]

    def add(self, tail: int, head: int, capacity: int) -> None:
        self.edges[tail].append(len(self.heads))
        self.edges[head].append(len(self.heads) + 1)
        self.heads += (head, tail)
        self.room += (capacity, 0)

    def saturate(self, source: int, sink: int) -> list[int]:
        """Send a maximum flow. Return the number of edges from each node to the sink after it; -1: unreachable."""
        while True:
            distances = self._distances(sink)
            if distances[source] < 0:
                return distances
            self._send(source, sink, distances)

    def _distances(self, sink: int) -> list[int]:
        heads, room = self.heads, self.room
        distances = [-1] * len(self.edges)
        distances[sink] = 0
        front = [sink]
        for node in front:
            beyond = distances[node] + 1
            for edge in self.edges[node]:
                tail = heads[edge]
                if distances[tail] < 0 and room[edge ^ 1]:
                    distances[tail] = beyond
                    front.append(tail)
        return distances

    def _send(self, source: int, sink: int, distances: list[int]) -> None:
        """Send flow along all shortest paths, found depth first. `distances` of dead ends become -1."""
        heads, room = self.heads, self.room
        places = [0] * len(self.edges)  # edges before these lead nowhere
        path: list[int] = []
        node = source
        while True:
            edges, nearer, place = self.edges[node], distances[node] - 1, places[node]
            while place < len(edges) and not (room[edges[place]] and distances[heads[edges[place]]] == nearer):
                place += 1
            places[node] = place
            if place == len(edges):
                if not path:
                    return
                distances[node] = -1
                node = heads[path.pop() ^ 1]
                continue
            path.append(edges[place])
            node = heads[edges[place]]
            if node == sink:
                amount = min(room[edge] for edge in path)
                for edge in path:
                    room[edge] -= amount
                    room[edge ^ 1] += amount
                full = next(number for number, edge in enumerate(path) if not room[edge])
                node = heads[path[full] ^ 1]
                del path[full:]

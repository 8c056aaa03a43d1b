"""Division of a graph into nested blocks: by modules, by resolutions, and where tensors are few.

A block has at most `MOST` children, so that each level is laid out quickly and fits a screen. The blocks of a level
never depend on each other in a cycle.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

MOST: Final = 32
"""Maximum number of nodes and blocks directly in a block."""


@dataclass(frozen=True)
class GraphNode:
    """A node to divide.

    Attributes:
        name: its name.
        path: titles of the modules that contain it, outermost first.
        makers: positions of the nodes that it reads, which are smaller than its own.
        size: spatial size of its output, such as "56 × 56"; "" if it has none.
    """

    name: str
    path: tuple[str, ...] = ()
    makers: tuple[int, ...] = ()
    size: str = ""


@dataclass(frozen=True)
class GraphBlock:
    """A block: its title, and the position of the block that contains it; -1 for the graph."""

    title: str
    parent: int


@dataclass(frozen=True)
class _Item:
    """Nodes that belong together: a module, a run of one, or a single node without title."""

    title: str
    nodes: tuple[int, ...]


def blocks_of(nodes: Sequence[GraphNode]) -> tuple[list[GraphBlock], list[int]]:
    """Divide nodes, given in execution order.

    Returns:
        The blocks, outer ones first, and for each node the position of the block that contains it; -1: none.
    """
    division = _Division(nodes)
    division.divide(tuple(range(len(nodes))), -1, 0)
    return division.blocks, division.block_of


@dataclass
class _Division:
    nodes: Sequence[GraphNode]
    blocks: list[GraphBlock] = field(default_factory=list)
    block_of: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.block_of = [-1] * len(self.nodes)

    def divide(self, nodes: Sequence[int], parent: int, depth: int) -> None:
        """Place nodes, whose first `depth` modules are the same, into a block."""
        pending = [(nodes, parent, depth)]
        while pending:
            nodes, parent, depth = pending.pop()
            items = self._modules(nodes, depth)
            while len(items) == 1 and len(nodes) > 1:  # all nodes are in one more module
                depth += 1
                items = self._modules(nodes, depth)
            for item, block in self._placed(self._ordered(items), parent):
                pending.append((item.nodes, block, depth + 1))

    def _modules(self, nodes: Sequence[int], depth: int) -> list[_Item]:
        modules: dict[str, list[int]] = defaultdict(list)
        single = []
        for node in nodes:
            path = self.nodes[node].path
            if len(path) > depth:
                modules[path[depth]].append(node)
            else:
                single.append(_Item("", (node,)))
        return [*(_Item(title, tuple(inside)) for title, inside in modules.items()), *single]

    def _ordered(self, items: list[_Item]) -> list[_Item]:
        """Order items by their dependencies. Modules that depend on each other are cut into runs of their nodes."""
        while True:
            reads = self._edges(items)
            order, rest = _peeled(items, reads)
            if not rest:
                return order
            position = {node: index for index, node in enumerate(sorted(node for item in items for node in item.nodes))}
            _, cyclic = _peeled(rest, _reversed(self._edges(rest)))
            cut = set(map(id, cyclic))
            items = [run for item in items for run in (_runs(item, position) if id(item) in cut else [item])]

    def _edges(self, items: Sequence[_Item]) -> list[set[int]]:
        """Return for each item the positions of the others that it reads."""
        item_of = {node: index for index, item in enumerate(items) for node in item.nodes}
        return [
            {item_of[maker] for node in item.nodes for maker in self.nodes[node].makers if maker in item_of} - {index}
            for index, item in enumerate(items)
        ]

    def _placed(self, items: Sequence[_Item], parent: int) -> Iterable[tuple[_Item, int]]:
        """Add items to a block, in further blocks if there are too many; yield new blocks of modules."""
        if len(items) <= MOST:
            for item in items:
                if len(item.nodes) == 1:
                    self.block_of[item.nodes[0]] = parent
                else:
                    yield item, self._add(item.title, parent)
            return
        for title, part in self._parts(items):
            yield from self._placed(part, parent if len(part) == 1 else self._add(title, parent))

    def _add(self, title: str, parent: int) -> int:
        self.blocks.append(GraphBlock(title, parent))
        return len(self.blocks) - 1

    def _parts(self, items: Sequence[_Item]) -> list[tuple[str, Sequence[_Item]]]:
        """Divide ordered items: single nodes between modules, stages of one resolution, or where few tensors pass."""
        between = [(is_module, list(run)) for is_module, run in groupby(items, lambda item: len(item.nodes) > 1)]
        parts = [part for is_module, run in between for part in ([[item] for item in run] if is_module else [run])]
        if len(between) > 1 and len(parts) <= MOST:
            return [(self._title(part), part) for part in parts]
        sizes, last = [], ""
        for item in items:
            last = self.nodes[item.nodes[-1]].size or last
            sizes.append(last)
        first = next(filter(None, sizes), "")
        stages = [
            (size, list(run)) for size, run in groupby(zip(sizes, items, strict=True), lambda pair: pair[0] or first)
        ]
        if 1 < len(stages) <= MOST:
            return [(size, [item for _, item in run]) for size, run in stages]
        cuts = self._cuts(items)
        parts = [list(items[start:stop]) for start, stop in zip([0, *cuts], [*cuts, len(items)], strict=True)]
        return [(self._title(part), part) for part in parts]

    def _cuts(self, items: Sequence[_Item]) -> list[int]:
        """Return positions at which items are cut into at most `MOST` parts."""
        passing = [0] * (len(items) + 2)  # number of items before a position that are read behind it
        last = list(range(len(items)))
        for index, makers in enumerate(self._edges(items)):
            for maker in makers:
                last[maker] = max(last[maker], index)
        for index, end in enumerate(last):
            passing[index + 1] += 1
            passing[end + 1] -= 1
        for index in range(1, len(passing)):
            passing[index] += passing[index - 1]
        size = max(-(-len(items) // (MOST // 2)), MOST // 2)
        cuts = [0]
        while len(items) - cuts[-1] > size * 3 // 2:
            target = cuts[-1] + size
            cuts.append(
                min(range(target - size // 2, target + size // 2), key=lambda at: (passing[at], abs(at - target)))
            )
        return cuts[1:]

    def _title(self, items: Sequence[_Item]) -> str:
        ends = [item.title or self.nodes[item.nodes[0]].name.rpartition("/")[2] for item in (items[0], items[-1])]
        return " … ".join(dict.fromkeys(ends))


def _peeled(items: Sequence[_Item], reads: Sequence[set[int]]) -> tuple[list[_Item], list[_Item]]:
    """Order items after those that they read, by their first nodes; return also those that cycles keep back."""
    readers = _reversed(reads)
    missing = [len(makers) for makers in reads]
    ready = [(item.nodes[0], index) for index, item in enumerate(items) if not missing[index]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(items[index])
        for reader in readers[index]:
            missing[reader] -= 1
            if not missing[reader]:
                heapq.heappush(ready, (items[reader].nodes[0], reader))
    return order, [item for index, item in enumerate(items) if missing[index]]


def _reversed(edges: Sequence[Iterable[int]]) -> list[set[int]]:
    readers: list[set[int]] = [set() for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            readers[target].add(source)
    return readers


def _runs(item: _Item, position: Mapping[int, int]) -> list[_Item]:
    """Cut an item into runs of neighbouring nodes."""
    runs = [
        tuple(node for _, node in run)
        for _, run in groupby(enumerate(item.nodes), lambda pair: position[pair[1]] - pair[0])
    ]
    return [
        _Item(item.title if number == 0 else f"{item.title} ({number + 1})", run) for number, run in enumerate(runs)
    ]

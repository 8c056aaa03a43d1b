"""Regions of a network by its data flow: what follows or precedes a node, paths, stem, head and tail.

The terms are those of detection networks. A *prediction layer* is a linear layer (convolution or product with a
constant weight) that no other linear layer follows, apart from the fixed weights of a box decoder.

- **stem**: the linear layers that no linear layer precedes, and the nodes before them.
- **head**: the nodes between the last feature that several prediction layers share and the graph outputs: the nodes
  from which at most one prediction layer is reached. With a single prediction layer, that layer and all nodes after it.
- **tail**: the nodes after the prediction layers: box decoding, scores, concatenation, NMS.

Nodes that compute integers, such as sizes and indices, belong to no stem, head or tail, and paths do not lead through
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Final

from sbonnx.ops import MOVES_DATA
from sbonnx.recipe.torch_modules import NodeInfo

Neighbours = Mapping[str, Sequence[str]]

REGIONS: Final = ("stem", "head", "tail")
"""Names of the regions that `Flow.region` returns."""


class Flow:
    """Data flow between the nodes of a network.

    Args:
        nodes: every node, of all scopes. A node with bodies reads the tensors that its bodies return.
    """

    def __init__(self, nodes: Iterable[NodeInfo]) -> None:
        self._nodes = {node.name: node for node in nodes}
        makers = {tensor: node.name for node in self._nodes.values() for tensor in node.outputs}
        self._before: dict[str, list[str]] = {
            node.name: list(dict.fromkeys(makers[tensor] for tensor in node.inputs if tensor in makers))
            for node in self._nodes.values()
        }
        self._after: dict[str, list[str]] = {name: [] for name in self._nodes}
        for name, sources in self._before.items():
            for source in sources:
                self._after[source].append(name)

    def after(self, names: Iterable[str]) -> frozenset[str]:
        """Return the nodes that a path leads to from one of `names`; not `names` themselves."""
        names = frozenset(names)
        return _reached(names, self._after) - names

    def before(self, names: Iterable[str]) -> frozenset[str]:
        """Return the nodes from which a path leads to one of `names`; not `names` themselves."""
        names = frozenset(names)
        return _reached(names, self._before) - names

    def between(self, first: Iterable[str], last: Iterable[str]) -> frozenset[str]:
        """Return the nodes on the paths from one of `first` to one of `last`, ends included; empty without a path."""
        first, last = frozenset(first), frozenset(last)
        return (_reached(first, self._after) | first) & (_reached(last, self._before) | last)

    def first_of(self, names: Collection[str]) -> frozenset[str]:
        """Return those of `names` that no path from another of them leads to."""
        return frozenset(names) - _reached(names, self._after)

    def last_of(self, names: Collection[str]) -> frozenset[str]:
        """Return those of `names` from which no path leads to another of them."""
        return frozenset(names) - _reached(names, self._before)

    def is_linear(self, name: str) -> bool:
        """Return whether a node is a linear layer."""
        return self._nodes[name].linear

    def region(self, name: str) -> frozenset[str]:
        """Return the nodes of the region `name`, one of `REGIONS`; empty if the network has no linear layer."""
        return {"stem": self.stem, "head": self.head, "tail": self.tail}[name]

    @cached_property
    def stem(self) -> frozenset[str]:
        """Nodes up to the first linear layers."""
        linear = [name for name, node in self._nodes.items() if node.linear]
        following = _reached(linear, self._float_after)
        first = frozenset(name for name in linear if name not in following)
        return first | _reached(first, self._float_before)

    @cached_property
    def predictions(self) -> tuple[str, ...]:
        """Prediction layers, in the order of the nodes."""
        linear = [name for name, node in self._nodes.items() if node.linear and not self._decodes(name)]
        followed = _reached(linear, self._float_before)
        return tuple(name for name in linear if name not in followed)

    @cached_property
    def head(self) -> frozenset[str]:
        """Nodes from the last shared feature to the outputs."""
        return self.tail.union(*self.branches.values())

    @cached_property
    def tail(self) -> frozenset[str]:
        """Nodes after the prediction layers."""
        return _reached(self.predictions, self._float_after)

    @cached_property
    def branches(self) -> Mapping[str, frozenset[str]]:
        """By prediction layer: that layer, and the nodes before it that lead to no other one."""
        if len(self.predictions) == 1:
            return {self.predictions[0]: frozenset(self.predictions)}
        leads = {name: _reached({name}, self._float_before) for name in self.predictions}
        counts: dict[str, int] = {}
        for names in leads.values():
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        return {
            name: frozenset({name, *(single for single in names if counts[single] == 1)})
            for name, names in leads.items()
        }

    def _decodes(self, name: str) -> bool:
        """Return whether a linear layer has one output that weighs a Softmax: the expected value of a box edge (DFL).

        Source: Li et al. 2020, Generalized Focal Loss, equation 5.
        """
        before = self._float_before[name]
        while before and self._nodes[before[0]].op in MOVES_DATA:
            before = self._float_before[before[0]]
        return self._nodes[name].channels == 1 and bool(before) and self._nodes[before[0]].op == "Softmax"

    @cached_property
    def _float_before(self) -> Neighbours:
        return self._without_integers(self._before)

    @cached_property
    def _float_after(self) -> Neighbours:
        return self._without_integers(self._after)

    def _without_integers(self, neighbours: Neighbours) -> Neighbours:
        integers = {name for name, node in self._nodes.items() if node.integer}
        return {
            name: [] if name in integers else [neighbour for neighbour in names if neighbour not in integers]
            for name, names in neighbours.items()
        }


def _reached(names: Collection[str], neighbours: Neighbours) -> frozenset[str]:
    """Return the nodes that are reached from `names` in one step or more."""
    reached: set[str] = set()
    waiting = [neighbour for name in names for neighbour in neighbours[name]]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            waiting.extend(neighbours[name])
    return frozenset(reached)

"""Cuts a graph into the pieces that calibration runs, each as a separate model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any, Literal

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, Variable
from sbonnx.graph.extract import extract
from sbonnx.graph.query import dependencies, dtype, shape
from sbonnx.linear.layer import weight_index


@dataclass(frozen=True)
class Segment:
    """One piece to run.

    Attributes:
        inputs: tensors from outside that its nodes read.
        outputs: computed tensors that are observed or read elsewhere; none if there is nothing to run.
        observed: tensors to observe after the run: computed here, or passed through (a graph input).
        nodes: names of its nodes, in order.
        scope: "" or the path of its branch.
        conditions: outer booleans and the values under which it runs, outermost first.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    observed: tuple[str, ...]
    nodes: tuple[str, ...] = field(default=(), repr=False)
    scope: str = ""
    conditions: tuple[tuple[str, bool], ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """Every tensor that it reads from outside: inputs, conditions and observed tensors that are passed through."""
        passing = [name for name in self.observed if name not in self.outputs]
        return tuple(dict.fromkeys([*(name for name, _ in self.conditions), *self.inputs, *passing]))

    def runs_with(self, known: Mapping[str, Any]) -> bool:
        """Return whether all conditions are among the known tensors and hold."""
        return all(name in known and bool(np.asarray(known[name]).item()) == value for name, value in self.conditions)

    def model(self, graph: Graph, index: Mapping[str, Tensor] | None = None) -> Graph:
        """Extract the piece as a model; `graph` is not changed. `index`: `tensors_by_name(graph)`, if available."""
        return extract(graph, self.inputs, self.outputs, scope=self.scope, index=index)


def produced(body: Body) -> dict[str, Node]:
    """Map each tensor computed in a graph or body to its node; nested bodies are excluded."""
    return {tensor.name: node for node in body.nodes for tensor in node.outputs if tensor.name}


def needed(body: Body, targets: Iterable[str]) -> list[Node]:
    """Return the nodes of a graph or body upstream of `targets`, in the order of the graph."""
    makers = produced(body)
    stack = [makers[name] for name in targets if name in makers]
    needed_nodes: set[int] = set()
    while stack:
        node = stack.pop()
        if id(node) in needed_nodes:
            continue
        needed_nodes.add(id(node))
        stack.extend(makers[tensor.name] for tensor in dependencies(node) if tensor.name in makers)
    return [node for node in body.nodes if id(node) in needed_nodes]


def reads_of(node: Node) -> list[str]:
    """Return the names of the variables that a node, or a body inside it, reads."""
    return [tensor.name for tensor in dependencies(node) if tensor.name and isinstance(tensor, Variable)]


def inputs_of(piece: Sequence[Node], makers: Mapping[str, Node], untyped: Collection[str]) -> tuple[str, ...]:
    """Return the tensors that a piece reads from outside; a tensor without a type is replaced by its own inputs."""
    outputs = {tensor.name for node in piece for tensor in node.outputs}
    inputs: dict[str, None] = {}
    stack = [name for node in reversed(piece) for name in reversed(reads_of(node))]
    while stack:
        name = stack.pop()
        if name in inputs or name in outputs:
            continue
        if name in untyped:
            stack.extend(reversed(reads_of(makers[name])))
        else:
            inputs[name] = None
    return tuple(inputs)


def bytes_of(body: Body, dims: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each computed tensor of a graph or body; unknown dimensions are taken from `dims`, else 1."""
    sizes = {}
    for node in body.nodes:
        for tensor in node.outputs:
            size = getattr(dtype(tensor), "itemsize", 4)
            for dim in shape(tensor) or ():
                size *= dim if isinstance(dim, int) else dims.get(str(dim), 1)
            sizes[tensor.name] = size
    return sizes


def bytes_of_constant(tensor: Constant) -> int:
    """Return the bytes of a weight without reading it."""
    return int(prod(tensor.shape) * getattr(dtype(tensor), "itemsize", 4))


def cut(
    graph: Graph,
    observed: Sequence[str],
    granularity: Literal["whole", "budget", "layer"] = "whole",
    *,
    kept: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    budget: int = 0,
) -> list[Segment]:
    """Cut the main graph into pieces that together compute `observed` and `kept`, in the order to run them.

    Args:
        observed: tensors to observe; each is observed in the piece that computes it (a graph input: in the first).
        granularity: "whole": one piece; "layer": a piece per linear op, with the nodes after it; "budget": the fewest
            pieces whose observed outputs take at most `budget` bytes each, cut where the fewest bytes cross. No cut
            crosses a tensor of unknown type, which could not be the input of a model.
        kept: further tensors to compute.
        sizes: bytes of each tensor, for "budget".
    """
    targets = list(dict.fromkeys([*observed, *kept]))
    nodes = needed(graph, targets)
    untyped = crossing(nodes, {t.name: 1 for node in nodes for t in node.outputs if dtype(t) is None})
    if granularity == "layer":
        starts = [i for i, node in enumerate(nodes) if i and weight_index(node) == 1 and not untyped[i]]
    elif granularity == "budget":
        allowed = [not count for count in untyped]
        starts = _narrow_cuts(nodes, set(targets), sizes or {}, budget, allowed)
    else:
        starts = []
    edges = [0, *starts, len(nodes)]
    pieces = [nodes[start:stop] for start, stop in pairwise(edges)]
    order = list(dict.fromkeys(observed))
    segments = segments_of(pieces, targets, lambda computed, _: [name for name in order if name in computed])
    computed = {tensor.name for node in nodes for tensor in node.outputs}
    passing = tuple(name for name in observed if name not in computed)  # graph inputs
    segments[0] = replace(segments[0], observed=(*passing, *segments[0].observed))
    return segments


def segments_of(
    pieces: Sequence[Sequence[Node]],
    targets: Collection[str],
    observed: Callable[[Mapping[str, None], Sequence[str]], Iterable[str]],
) -> list[Segment]:
    """Build the segments of consecutive runs of nodes.

    Args:
        targets: outputs, in addition to the tensors that later pieces read.
        observed: returns the observed tensors, given those that a piece computes and those that it outputs.
    """
    last = {name: number for number, piece in enumerate(pieces) for node in piece for name in reads_of(node)}
    wanted = set(targets)
    segments = []
    for number, piece in enumerate(pieces):
        computed = dict.fromkeys(tensor.name for node in piece for tensor in node.outputs if tensor.name)
        inputs = dict.fromkeys(name for node in piece for name in reads_of(node) if name not in computed)
        outputs = tuple(name for name in computed if name in wanted or last.get(name, -1) > number)
        nodes = tuple(node.name for node in piece)
        segments.append(Segment(tuple(inputs), outputs, tuple(observed(computed, outputs)), nodes))
    return segments


def _narrow_cuts(
    nodes: Sequence[Node], targets: Collection[str], sizes: Mapping[str, int], budget: int, allowed: Sequence[bool]
) -> list[int]:
    """Return allowed cut positions so that the targets between two cuts stay within `budget` if possible."""
    widths = crossing(nodes, sizes)
    starts: list[int] = []
    start = total = 0
    costs = [sum(sizes.get(t.name, 0) for t in node.outputs if t.name in targets) for node in nodes]
    i = 0
    while i < len(nodes):
        total += costs[i]
        places = [p for p in range(start + 1, i + 1) if allowed[p]] if total > budget else []
        if places:
            at = min(places, key=lambda p: (widths[p], -p))
            starts.append(at)
            start, total, i = at, 0, at
            continue
        i += 1
    return starts


def crossing(nodes: Sequence[Node], sizes: Mapping[str, int]) -> list[int]:
    """Compute the bytes of tensors computed before each position and read at or after it."""
    makers = {tensor.name: i for i, node in enumerate(nodes) for tensor in node.outputs}
    last = {name: i for i, node in enumerate(nodes) for name in reads_of(node) if name in makers}
    change = [0] * (len(nodes) + 2)
    for name, end in last.items():
        change[makers[name] + 1] += sizes.get(name, 0)
        change[end + 1] -= sizes.get(name, 0)
    return list(accumulate(change))

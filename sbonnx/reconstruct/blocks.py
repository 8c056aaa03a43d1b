"""Blocks of a graph: what lies between two places where one tensor carries all that was computed.

A residual block comes out whole, since until its addition two tensors are under way; a plain layer is a block of its
own, with the activation behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final, Literal

from sbonnx.calib.engine.segments import Segment, needed, reads_of
from sbonnx.graph import Graph, Node
from sbonnx.graph.query import dtype

Scope = Literal["block", "layer"]

MOST_LAYERS: Final = 12
"""Layers of a block: one with more (a net with connections across all of it) is taken layer by layer."""


def blocks(graph: Graph, layers: Collection[str], scope: Scope = "block", *, most: int = MOST_LAYERS) -> list[Segment]:
    """The main graph up to its last layer and what follows that, in pieces of at least one layer each.

    A cut is where one tensor, of all those that depend on a layer, is read on its other side. What depends on none
    (inputs of the model, masks, shapes) may pass beside it. Nodes without layers belong to the block before them, but
    those in front, which belong to the first.

    Args:
        layers: names of the nodes whose weights are rounded.
        scope: "block", or "layer": a piece for each layer, with what follows it up to the next one; several tensors
            may lead from one to the next.
        most: layers of a block, see `MOST_LAYERS`.

    Returns:
        Pieces in the order to run them. Each gives what later ones read, what the model gives, and, the last one, what
        nothing reads; `observed` is what depends on a layer among those: what is to be reconstructed.
    """
    nodes = needed(graph, [tensor.name for tensor in graph.outputs])
    heavy = _heavy(nodes, layers)
    widths, untyped = _crossing(nodes, heavy), _crossing(nodes, _untyped(nodes))
    firsts = [at for at, node in enumerate(nodes) if node.name in layers]
    if not firsts:
        return []
    narrow = [at for at in range(1, len(nodes)) if widths[at] <= 1 and not untyped[at]]
    allowed = [at for at in range(1, len(nodes)) if not untyped[at]]
    starts: list[int] = []
    for begin, end in pairwise([0, *_merged(narrow, firsts), len(nodes)]):
        inside = [at for at in firsts if begin <= at < end]
        starts.append(begin)
        if scope == "layer" or len(inside) > most:
            starts.extend(_merged([at for at in allowed if begin < at < end and at in inside], inside))
    pieces = [nodes[begin:end] for begin, end in pairwise([*starts, len(nodes)])]
    return _segments(pieces, heavy, {tensor.name for tensor in graph.outputs})


def _heavy(nodes: Sequence[Node], layers: Collection[str]) -> set[str]:
    """Tensors that depend on a layer."""
    found: set[str] = set()
    for node in nodes:
        if node.name in layers or any(name in found for name in reads_of(node)):
            found.update(tensor.name for tensor in node.outputs if tensor.name)
    return found


def _untyped(nodes: Sequence[Node]) -> set[str]:
    """Tensors that could not be inputs of a model."""
    return {tensor.name for node in nodes for tensor in node.outputs if tensor.name and dtype(tensor) is None}


def _crossing(nodes: Sequence[Node], counted: Collection[str]) -> list[int]:
    """How many of these tensors are computed before each position and read at or after it."""
    made = {tensor.name: at for at, node in enumerate(nodes) for tensor in node.outputs if tensor.name in counted}
    last = {name: at for at, node in enumerate(nodes) for name in reads_of(node) if name in made}
    change = [0] * (len(nodes) + 1)
    for name, end in last.items():
        change[made[name] + 1] += 1
        change[end + 1] -= 1
    widths, width = [], 0
    for step in change:
        width += step
        widths.append(width)
    return widths


def _merged(cuts: Sequence[int], layers: Sequence[int]) -> list[int]:
    """The cuts that begin a piece with a layer: of those between two layers the last, and none before the first."""
    found: dict[int, int] = {}
    for cut in cuts:
        before = sum(at < cut for at in layers)
        if 0 < before < len(layers):
            found[before] = cut
    return [found[count] for count in sorted(found)]


def _segments(pieces: Sequence[Sequence[Node]], heavy: Collection[str], outputs: Collection[str]) -> list[Segment]:
    """What each piece reads from before, and gives."""
    last = {name: number for number, piece in enumerate(pieces) for node in piece for name in reads_of(node)}
    segments = []
    for number, piece in enumerate(pieces):
        made = dict.fromkeys(tensor.name for node in piece for tensor in node.outputs if tensor.name)
        inputs = dict.fromkeys(name for node in piece for name in reads_of(node) if name not in made)
        given = tuple(name for name in made if name in outputs or last.get(name, -1) > number)
        target = tuple(name for name in given if name in heavy)
        segments.append(Segment(tuple(inputs), given, target, tuple(node.name for node in piece)))
    return segments


__all__ = ["MOST_LAYERS", "Scope", "blocks"]

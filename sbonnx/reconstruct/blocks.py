"""Partition of a graph into blocks: pieces between cuts at single tensors that carry all intermediate results.

A residual block stays in one piece, because two tensors are live until its addition. A plain layer is a block by
itself, together with the following activation function.
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
"""Maximum number of layers in a block. Larger blocks (e.g. with skip connections across the net) are split by layer."""


def blocks(graph: Graph, layers: Collection[str], scope: Scope = "block", *, most: int = MOST_LAYERS) -> list[Segment]:
    """Partition the main graph, up to its last layer and the nodes after it, into pieces with at least one layer each.

    A cut is a position that only one of the tensors that depend on a layer crosses. Tensors that depend on no layer
    (model inputs, masks, shapes) may also cross it. Nodes without layers belong to the preceding block, or to the first
    block if none precedes.

    Args:
        layers: names of the nodes whose weights are rounded.
        scope: "block", or "layer": one piece for each layer with the nodes up to the next layer; several tensors may
            lead from one piece to the next.
        most: maximum number of layers in a block, see `MOST_LAYERS`.

    Returns:
        Pieces in execution order. The outputs of a piece are tensors that later pieces read, model outputs, and, for
        the last piece, unused tensors; `observed` are those that depend on a layer: the targets of reconstruction.
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
    """Return the tensors that depend on a layer."""
    found: set[str] = set()
    for node in nodes:
        if node.name in layers or any(name in found for name in reads_of(node)):
            found.update(tensor.name for tensor in node.outputs if tensor.name)
    return found


def _untyped(nodes: Sequence[Node]) -> set[str]:
    """Return tensors that cannot be model inputs, because their type is unknown."""
    return {tensor.name for node in nodes for tensor in node.outputs if tensor.name and dtype(tensor) is None}


def _crossing(nodes: Sequence[Node], counted: Collection[str]) -> list[int]:
    """Count, for each position, the tensors that are computed before it and read at or after it."""
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
    """Select one cut between each two layers, the last one, so that every piece has a layer. None before the first."""
    found: dict[int, int] = {}
    for cut in cuts:
        before = sum(at < cut for at in layers)
        if 0 < before < len(layers):
            found[before] = cut
    return [found[count] for count in sorted(found)]


def _segments(pieces: Sequence[Sequence[Node]], heavy: Collection[str], outputs: Collection[str]) -> list[Segment]:
    """Create segments from pieces, with their inputs, outputs and targets."""
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

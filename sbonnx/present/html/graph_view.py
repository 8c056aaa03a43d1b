"""The graph of a network as rows with lanes, like a log of version control: one row a node, lines for tensors.

Rows are in execution order. A lane is a vertical line from the node that computes a tensor to the last node that reads
it. Large graphs are collapsed to blocks of consecutive nodes with a common prefix of their names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from sbonnx.present.html.charts import shade
from sbonnx.present.html.formatting import decibel, plain, text
from sbonnx.report.details import Details, LayerLoss, NodeRow, QuantizedRead

MOST_ROWS: Final = 200
"""Maximum number of nodes that are shown without collapsing blocks."""

MOST_NODES: Final = 3000
"""Maximum number of nodes with rows of their own; of larger graphs, blocks are shown without their nodes."""

BLOCK: Final = 40
"""Largest number of nodes in a block whose name has no prefix in common with others."""

MOST_LANES: Final = 10
"""Maximum number of lanes; further tensors share the last one."""

LANE: Final = 12
"""Width of a lane in pixels."""

HEIGHT: Final = 30
"""Height of a row in units of its drawing, which is stretched to the height of the row."""


@dataclass(frozen=True)
class Lanes:
    """Drawing of the lanes beside one row: width in pixels, SVG path of the lines, position of the node."""

    width: int
    lines: str
    dot: int


@dataclass(frozen=True)
class ReadRow:
    """A quantized input of a node, as texts."""

    role: str
    tensor: str
    label: str
    covered: str


@dataclass(frozen=True)
class GraphRow:
    """One node, or one block with its nodes.

    Attributes:
        name, op: of a block, its prefix and the number of its nodes.
        shape: of the output; "" if unknown.
        types: quantized types of inputs and weights, such as "uint8 × int8 axis 0"; "" for a float node.
        shade: shade of the loss, 0 to 6; None without a figure.
        loss: isolated SQNR at the outputs in dB, of a block that of its worst node; "" without a figure.
        figures: (name, text) of the losses.
        reads: quantized inputs.
        refusals: what was not quantized and why.
        lanes: the drawing.
        children: nodes of a block, or of the branches of a node.
    """

    name: str
    op: str
    shape: str
    types: str
    shade: int | None
    loss: str
    figures: tuple[tuple[str, str], ...]
    reads: tuple[ReadRow, ...]
    refusals: tuple[str, ...]
    lanes: Lanes
    children: tuple[GraphRow, ...] = ()


@dataclass(frozen=True)
class GraphView:
    """View model of a graph.

    Attributes:
        rows: nodes, or blocks if `collapsed`.
        total: number of nodes, those of branches included.
        quantized: number of nodes with a quantized input.
        refused: number of nodes with a refusal.
        collapsed: whether rows are blocks.
        omitted: whether the nodes of blocks are left out.
        measured: whether any node has a loss.
    """

    rows: tuple[GraphRow, ...]
    total: int
    quantized: int
    refused: int
    collapsed: bool
    omitted: bool
    measured: bool


def graph_view(details: Details) -> GraphView | None:
    """Build the view of the nodes; None without nodes."""
    nodes = details.nodes
    if not nodes:
        return None
    losses = {} if details.profile is None else {row.node: row for row in details.profile.layers}
    inner: dict[str, list[NodeRow]] = defaultdict(list)
    for node in nodes:
        inner[node.scope].append(node)
    collapsed = len(nodes) > MOST_ROWS
    omitted = len(nodes) > MOST_NODES
    rows = _Rows(losses, inner)
    main = inner[""]
    return GraphView(
        rows=rows.blocks(main, omitted=omitted) if collapsed else rows.nodes(main),
        total=len(nodes),
        quantized=sum(bool(node.reads) for node in nodes),
        refused=sum(bool(node.refusals) for node in nodes),
        collapsed=collapsed,
        omitted=omitted,
        measured=bool(losses),
    )


class _Rows:
    """Builder of rows from nodes.

    Args:
        losses: rows of a profile by node name.
        inner: nodes by scope.
    """

    def __init__(self, losses: Mapping[str, LayerLoss], inner: Mapping[str, Sequence[NodeRow]]) -> None:
        self._losses, self._inner = losses, inner

    def nodes(self, nodes: Sequence[NodeRow]) -> tuple[GraphRow, ...]:
        """Return one row for each node of a scope, with the nodes of its branches as children."""
        drawn = lanes([node.name for node in nodes], [node.inputs for node in nodes])
        return tuple(self._node(node, lane) for node, lane in zip(nodes, drawn, strict=True))

    def _node(self, node: NodeRow, lane: Lanes) -> GraphRow:
        alone = self._alone(node.name)
        start = f"{node.scope}/{node.name}/" if node.scope else f"{node.name}/"
        branches = [scope for scope in self._inner if scope.startswith(start) and "/" not in scope[len(start) :]]
        reads = tuple(map(_read, node.reads))
        labels = dict.fromkeys(row.label for row in reads if row.role != "bias")
        return GraphRow(
            name=text(node.name),
            op=text(node.op),
            shape=_shape(node.shape),
            types=" × ".join(labels),
            shade=shade(alone),
            loss="" if alone is None else decibel(alone),
            figures=tuple(_figures(self._losses[node.name])) if node.name in self._losses else (),
            reads=reads,
            refusals=tuple(map(text, node.refusals)),
            lanes=lane,
            children=tuple(row for scope in branches for row in self.nodes(self._inner[scope])),
        )

    def _alone(self, node: str) -> float | None:
        return self._losses[node].alone if node in self._losses else None

    def blocks(self, nodes: Sequence[NodeRow], *, omitted: bool) -> tuple[GraphRow, ...]:
        """Return one row for each block of consecutive nodes."""
        blocks = blocks_of([text(node.name) for node in nodes])
        block_of = {nodes[place].name: index for index, (_, places) in enumerate(blocks) for place in places}
        reads = [
            tuple(
                str(block_of[maker])
                for place in places
                for maker in nodes[place].inputs
                if maker in block_of and block_of[maker] != index
            )
            for index, (_, places) in enumerate(blocks)
        ]
        drawn = lanes([str(index) for index in range(len(blocks))], reads)
        return tuple(
            self._block(title, self.nodes([nodes[place] for place in places]), lane, omitted=omitted)
            for (title, places), lane in zip(blocks, drawn, strict=True)
        )

    def _block(self, title: str, rows: tuple[GraphRow, ...], lane: Lanes, *, omitted: bool) -> GraphRow:
        if len(rows) == 1:
            (row,) = rows
            return GraphRow(**{**vars(row), "lanes": lane})
        everything = tuple(_flat(rows))
        losses = [self._alone(row.name) for row in everything]
        worst = min((loss for loss in losses if loss is not None), default=None)
        refused = sum(bool(row.refusals) for row in everything)
        return GraphRow(
            name=title,
            op=f"{len(everything)} nodes",
            shape=rows[-1].shape,
            types=", ".join(dict.fromkeys(row.types for row in everything if row.types)),
            shade=shade(worst),
            loss="" if worst is None else decibel(worst),
            figures=(),
            reads=(),
            refusals=(f"{refused} nodes with something that was not done",) if refused else (),
            lanes=lane,
            children=() if omitted else rows,
        )


def _flat(rows: Iterable[GraphRow]) -> Iterable[GraphRow]:
    for row in rows:
        yield row
        yield from _flat(row.children)


def _figures(loss: LayerLoss) -> Iterable[tuple[str, str]]:
    """Yield title and text of the figures that were measured."""
    titles = {
        "isolated": loss.alone,
        "by weights": loss.weights,
        "by inputs": loss.activations,
        "accumulated": loss.gathered,
    }
    yield from ((title, f"{decibel(value)} dB") for title, value in titles.items() if value is not None)


def _read(row: QuantizedRead) -> ReadRow:
    covered = "" if row.low is None or row.high is None else f"{plain(row.low, 3)} to {plain(row.high, 3)}"
    return ReadRow(text(row.role), text(row.tensor), text(row.label), covered)


def _shape(shape: Sequence[Any] | None) -> str:
    return "" if shape is None else " × ".join("?" if size is None else text(size) for size in shape)


def blocks_of(names: Sequence[str]) -> list[tuple[str, range]]:
    """Divide consecutive nodes into blocks: (title, positions).

    Names are paths of modules in most exports. The longest prefixes are used that give at most `MOST_ROWS` / 2 blocks;
    if even single parts give more, blocks have `BLOCK` nodes.
    """
    paths = [tuple(part for part in name.split("/") if part)[:-1] for name in names]
    for depth in range(max(map(len, paths), default=0), 0, -1):
        keys = [path[:depth] for path in paths]
        runs = [(key, [place for place, _ in run]) for key, run in groupby(enumerate(keys), itemgetter(1))]
        if len(runs) <= MOST_ROWS // 2:
            titles = ["/" + "/".join(key) if key else "" for key, _ in runs]
            parts = [range(places[0], places[-1] + 1) for _, places in runs]
            return [block for title, part in zip(titles, parts, strict=True) for block in _chunks(title, part)]
    return _chunks("", range(len(names)))


def _chunks(title: str, places: range) -> list[tuple[str, range]]:
    """Divide a run without a common prefix into blocks of `BLOCK` nodes, with their positions as titles."""
    if title:
        return [(title, places)]
    parts = [range(start, min(start + BLOCK, places.stop)) for start in range(places.start, places.stop, BLOCK)]
    return [(f"nodes {part.start + 1} to {part.stop}", part) for part in parts]


def lanes(names: Sequence[str], inputs: Sequence[Sequence[str]]) -> list[Lanes]:
    """Assign lanes to the nodes of a scope, in execution order, and draw the lines beside each row.

    Args:
        names: of the nodes.
        inputs: names of the nodes that each reads; others than `names` are ignored.
    """
    place = {name: index for index, name in enumerate(names)}
    makers = [
        sorted({place[name] for name in row if place.get(name, index) < index}) for index, row in enumerate(inputs)
    ]
    last: dict[int, int] = {}
    for index, row in enumerate(makers):
        for maker in row:
            last[maker] = index
    held: list[int | None] = []  # by lane, the node whose output it carries
    lane_of: dict[int, int] = {}
    rows = []
    for index, row in enumerate(makers):
        for lane, carried in enumerate(held):
            if carried is not None and last[carried] <= index:
                held[lane] = None
        freed = [lane_of[maker] for maker in row if held[lane_of[maker]] is None]
        own = freed[0] if freed else held.index(None) if None in held else len(held)
        if own == len(held):
            held.append(None)
        through = [lane for lane, carried in enumerate(held) if carried is not None]
        reading = [lane_of[maker] for maker in row]
        goes_on = index in last
        if goes_on:
            held[own] = index
            lane_of[index] = own
        while held and held[-1] is None:
            held.pop()
        rows.append((own, through, reading, goes_on))
    widest = max((max(own, *through, *reading, 0) + 1 for own, through, reading, _ in rows), default=1)
    width = min(widest, MOST_LANES) * LANE + 4
    return [_drawn(width, own, through, reading, goes_on) for own, through, reading, goes_on in rows]


def _drawn(width: int, own: int, through: Sequence[int], reading: Sequence[int], goes_on: bool) -> Lanes:
    middle, parts = HEIGHT // 2, []
    dot = _x(own)
    for lane in dict.fromkeys(map(_x, through)):
        parts.append(f"M{lane} 0V{HEIGHT}")
    for lane in dict.fromkeys(map(_x, reading)):
        parts.append(f"M{lane} 0V{middle}" if lane == dot else f"M{lane} 0C{lane} {middle} {dot} 0 {dot} {middle}")
    if goes_on:
        parts.append(f"M{dot} {middle}V{HEIGHT}")
    return Lanes(width, "".join(parts), dot)


def _x(lane: int) -> int:
    return 8 + min(lane, MOST_LANES - 1) * LANE

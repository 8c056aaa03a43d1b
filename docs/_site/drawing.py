"""Drawings of the small models on the pages of lint rules, as SVG in the colours of the page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Final

import onnx

WIDTH, HEIGHT, COLUMN, ROW, MARGIN = 168, 40, 184, 66, 6
"""Pixels of a box, and from one box to the next."""

SWEEPS: Final = 4
"""Rounds in which the boxes of each row are sorted by the places of their neighbours."""


@dataclass
class Box:
    """A node, an input or an output; without a label, the bend of an edge that passes a row."""

    label: str = ""
    name: str = ""
    kind: str = "bend"
    row: int = 0
    place: float = 0.0
    before: list[Box] = field(default_factory=list)
    after: list[Box] = field(default_factory=list)


def drawing(model: onnx.ModelProto, marked: Collection[str]) -> str:
    """Return the graph from top to bottom: a box for each node, input and output, and a line for each tensor.

    Args:
        marked: names of nodes or tensors; their boxes stand out.
    """
    boxes = _boxes(model.graph, marked)
    _assign_rows(boxes)
    rows = _with_bends(boxes)
    _order(rows)
    columns = max(map(len, rows))
    size = (columns * COLUMN - (COLUMN - WIDTH) + 2 * MARGIN, (len(rows) - 1) * ROW + HEIGHT + 2 * MARGIN)
    for row in rows:
        for index, box in enumerate(row):
            box.place = MARGIN + WIDTH / 2 + (index + (columns - len(row)) / 2) * COLUMN
    placed = [box for row in rows for box in row]
    lines = [_line(source, reader) for source in placed for reader in source.after]
    parts = [*lines, *(_rectangle(box) for box in placed if box.label)]
    title = " ".join(node.op_type for node in model.graph.node)
    return (
        f'<svg class="model" viewBox="0 0 {size[0]} {size[1]}" style="width:{size[0]}px" role="img" '
        f'aria-label="Graph: {escape(title)}">{"".join(parts)}</svg>'
    )


def _boxes(graph: onnx.GraphProto, marked: Collection[str]) -> list[Box]:
    """Return boxes with their edges; constants have none."""
    stored = {tensor.name for tensor in graph.initializer}
    boxes = [Box("input", value.name, "side") for value in graph.input if value.name not in stored]
    sources = {box.name: box for box in boxes}
    for node in graph.node:
        hit = bool({node.name, *node.output} & set(marked))
        box = Box(node.op_type, node.name or node.output[0], "marked" if hit else "node")
        boxes.append(box)
        for name in dict.fromkeys(node.input):
            if name in sources:
                _connect(sources[name], box)
        sources |= dict.fromkeys(node.output, box)
    for value in graph.output:
        box = Box("output", value.name, "side")
        boxes.append(box)
        if value.name in sources:
            _connect(sources[value.name], box)
    return boxes


def _connect(source: Box, reader: Box) -> None:
    source.after.append(reader)
    reader.before.append(source)


def _assign_rows(boxes: Sequence[Box]) -> None:
    """Put each box below all that it reads, and a node that reads constants alone just above its first reader."""
    for box in boxes:
        box.row = 1 + max((source.row for source in box.before), default=-1)
    for box in boxes:
        if not box.before and box.after:
            box.row = max(0, min(reader.row for reader in box.after) - 1)


def _with_bends(boxes: Sequence[Box]) -> list[list[Box]]:
    """Return the rows, with a bend in each row that an edge passes."""
    rows: dict[int, list[Box]] = defaultdict(list)
    for box in boxes:
        rows[box.row].append(box)
    for box in boxes:
        readers, box.after = box.after, []
        for reader in readers:
            reader.before.remove(box)
            source = box
            for row in range(box.row + 1, reader.row):
                bend = Box(row=row)
                rows[row].append(bend)
                _connect(source, bend)
                source = bend
            _connect(source, reader)
    return [rows[row] for row in sorted(rows)]


def _order(rows: Sequence[list[Box]]) -> None:
    """Sort each row by the mean place of the neighbours in the row before, then in the row after."""
    for sweep in range(SWEEPS):
        for row in rows if sweep % 2 == 0 else rows[::-1]:
            for index, box in enumerate(row):
                near = box.before if sweep % 2 == 0 else box.after
                box.place = sum(other.place for other in near) / len(near) if near else float(index)
            row.sort(key=lambda box: box.place)
            for index, box in enumerate(row):
                box.place = index - (len(row) - 1) / 2


def _top(box: Box) -> float:
    return MARGIN + box.row * ROW


def _line(source: Box, reader: Box) -> str:
    start, end = _top(source) + HEIGHT, _top(reader)
    middle = (start + end) / 2
    low = "" if reader.label else f" V{end + HEIGHT}"
    path = f"M{source.place},{start} C{source.place},{middle} {reader.place},{middle} {reader.place},{end}{low}"
    return f'<path d="{path}"/>'


def _rectangle(box: Box) -> str:
    left, top = box.place - WIDTH / 2, _top(box)
    return (
        f'<g class="{box.kind}"><rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
        f'<text x="{box.place}" y="{top + 17}">{escape(box.label)}</text>'
        f'<text class="name" x="{box.place}" y="{top + 33}">{escape(box.name)}</text></g>'
    )

"""Graphs as Mermaid flow charts, which Markdown viewers display."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from sbonnx.graph import Body, Graph, query

INTERFACE_COLOUR = "#cafe02"
"""Fill of graph inputs and outputs, the same as in Sparsebit."""

NOTHING_LOST: Final = (255, 255, 255)
MOST_LOST: Final = (229, 57, 53)
"""RGB colours of a node without loss and of the node with the largest loss."""


def mermaid(graph: Graph, losses: Mapping[str, float] | None = None) -> str:
    """Draw the graph: a box per node (name, op), input and output, an arrow per edge; bodies are subgraphs.

    Args:
        losses: by node name, 0 for no loss, larger is worse. The box shows the number and a colour between white and
            red. Names that are not in the graph are ignored; boxes without a number keep the default fill.
    """
    lines = ["graph TD"]
    ids: dict[str, str] = {}
    _nodes(graph, "", lines, ids, losses or {})
    for side, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in tensors:
            name = f"{side}{len(ids)}"
            ids[f"{side}:{tensor.name}"] = name
            shape = query.shape(tensor)
            lines.append(f'{name}["{_text(tensor.name)}<br/>{_text(str(list(shape or ())))}"]')
            lines.append(f"style {name} fill:{INTERFACE_COLOUR}")
    _edges(graph, lines, ids)
    return "\n".join(lines) + "\n"


def colours(losses: Mapping[str, float]) -> dict[str, str]:
    """Return a fill ``#rrggbb`` for each name: white for 0, red for the largest loss, interpolated by the square root.

    The square root keeps medium losses distinguishable from zero. Infinite values and NaN are red.
    """
    largest = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    fills = {}
    for name, loss in losses.items():
        share = 1.0 if not math.isfinite(loss) else math.sqrt(max(loss, 0.0) / largest) if largest > 0 else 0.0
        mixed = [round(a + share * (b - a)) for a, b in zip(NOTHING_LOST, MOST_LOST, strict=True)]
        fills[name] = "#" + "".join(f"{part:02x}" for part in mixed)
    return fills


def _text(text: str) -> str:
    """Return the text with the characters that have a meaning in Mermaid replaced."""
    return text.replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")


def _nodes(body: Body, scope: str, lines: list[str], ids: dict[str, str], losses: Mapping[str, float]) -> None:
    fills = colours(losses)
    for node in body.nodes:
        name = f"n{len(ids)}"
        ids[f"node:{node.name}"] = name
        lost = f"<br/>{losses[node.name]:.3g}" if node.name in losses else ""
        lines.append(f'{name}["{_text(node.name)}<br/>({_text(node.op)}){lost}"]')
        if lost:
            lines.append(f"style {name} fill:{fills[node.name]},color:#000000")
        for attribute, inner in query.bodies(node):
            path = f"{scope}/{node.name}/{attribute}"
            lines.append(f'subgraph s{len(ids)} ["{_text(path)}"]')
            _nodes(inner, path, lines, ids, losses)
            lines.append("end")


def _edges(graph: Graph, lines: list[str], ids: dict[str, str]) -> None:
    inputs = {tensor.name for tensor in graph.inputs}
    for _, body in query.scopes(graph):
        for node in body.nodes:
            for tensor in node.inputs:
                source = query.producer(tensor)
                if source is not None:
                    lines.append(f"{ids[f'node:{source.name}']} --> {ids[f'node:{node.name}']}")
                elif tensor.name in inputs:
                    lines.append(f"{ids[f'input:{tensor.name}']} --> {ids[f'node:{node.name}']}")
    for tensor in graph.outputs:
        source = query.producer(tensor)
        if source is not None:
            lines.append(f"{ids[f'node:{source.name}']} --> {ids[f'output:{tensor.name}']}")

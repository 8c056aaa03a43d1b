"""A graph as a Mermaid flow chart, for a look in any Markdown viewer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from sbonnx.graph import Body, Graph, query

INTERFACE_COLOUR = "#cafe02"
"""Fill of graph inputs and outputs, as the ancestor draws them."""

NOTHING_LOST: Final = (255, 255, 255)
MOST_LOST: Final = (229, 57, 53)
"""Red, green and blue of a node that loses nothing, and of the one that loses the most."""


def mermaid(graph: Graph, losses: Mapping[str, float] | None = None) -> str:
    """The chart: a box a node (name, op), a box an input and output, an arrow an edge; bodies as subgraphs.

    Args:
        losses: by node name, 0 for nothing, more is worse: the box shows the number, and a colour between white and
            red. Names that are not in the graph are left out; boxes without a number stay as they are.
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
    """A fill by name, ``#rrggbb``: white for 0, red for the largest, by the square root between them.

    The root keeps middling losses apart from none. What is infinite or not a number is red.
    """
    largest = max((loss for loss in losses.values() if math.isfinite(loss)), default=0.0)
    found = {}
    for name, loss in losses.items():
        share = 1.0 if not math.isfinite(loss) else math.sqrt(max(loss, 0.0) / largest) if largest > 0 else 0.0
        mixed = [round(a + share * (b - a)) for a, b in zip(NOTHING_LOST, MOST_LOST, strict=True)]
        found[name] = "#" + "".join(f"{part:02x}" for part in mixed)
    return found


def _text(text: str) -> str:
    """Text without the characters that mean something to Mermaid."""
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

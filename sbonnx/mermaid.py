"""A graph as a Mermaid flow chart, for a look in any Markdown viewer."""

from __future__ import annotations

from sbonnx.graph import Body, Graph, query

INTERFACE_COLOUR = "#cafe02"
"""Fill of graph inputs and outputs, as the ancestor draws them."""


def mermaid(graph: Graph) -> str:
    """The chart: a box a node (name, op), a box an input and output, an arrow an edge; bodies as subgraphs."""
    lines = ["graph TD"]
    ids: dict[str, str] = {}
    _nodes(graph, "", lines, ids)
    for side, tensors in (("input", graph.inputs), ("output", graph.outputs)):
        for tensor in tensors:
            name = f"{side}{len(ids)}"
            ids[f"{side}:{tensor.name}"] = name
            shape = query.shape(tensor)
            lines.append(f'{name}["{_text(tensor.name)}<br/>{_text(str(list(shape or ())))}"]')
            lines.append(f"style {name} fill:{INTERFACE_COLOUR}")
    _edges(graph, lines, ids)
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Text without the characters that mean something to Mermaid."""
    return text.replace('"', "'").replace("<", "&lt;").replace(">", "&gt;")


def _nodes(body: Body, scope: str, lines: list[str], ids: dict[str, str]) -> None:
    for node in body.nodes:
        name = f"n{len(ids)}"
        ids[f"node:{node.name}"] = name
        lines.append(f'{name}["{_text(node.name)}<br/>({_text(node.op)})"]')
        for attribute, inner in query.bodies(node):
            path = f"{scope}/{node.name}/{attribute}"
            lines.append(f'subgraph s{len(ids)} ["{_text(path)}"]')
            _nodes(inner, path, lines, ids)
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

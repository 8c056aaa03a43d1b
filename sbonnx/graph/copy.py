"""Copies of graphs for editing."""

from __future__ import annotations

from dataclasses import replace

from sbonnx.graph.extract import extract
from sbonnx.graph.model import Graph


def copy(graph: Graph) -> Graph:
    """Copy a graph: all nodes that lead to the outputs. Weights are shared, everything else is copied.

    Inputs, outputs, names and the data in `graph.info` (metadata, doc strings, notes) are kept.
    """
    copied = extract(graph, [tensor.name for tensor in graph.inputs], [tensor.name for tensor in graph.outputs])
    info = graph.info
    copied.name = graph.name
    copied.info = replace(
        info,
        metadata=dict(info.metadata),
        notes=list(info.notes),
        nodes=dict(info.nodes),
        tensors=dict(info.tensors),
        values=dict(info.values),
        graphs=dict(info.graphs),
        defaults=dict(info.defaults),
        normals=dict(info.normals),
    )
    return copied

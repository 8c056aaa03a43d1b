"""Decomposed GELUs as one operator, for runtimes that have no Erf."""

from __future__ import annotations

from typing import Final

from sbonnx.graph import Graph, edit, query
from sbonnx.ops import CONTRIB

from . import find_blocks

GELU_OPSET: Final = 20
"""First opset with Gelu; before it, onnxruntime's own operator of this name computes the same."""


def contract_gelus(graph: Graph) -> list[str]:
    """Write each GELU that is decomposed by Erf as one Gelu. In place; return what was done."""
    done, names = [], edit.Names(graph)
    for block in find_blocks(graph):
        bodies = dict(query.scopes(graph))
        nodes = query.node_by_name(bodies[block.scope])
        inner = [nodes[name] for name in block.nodes]
        if block.kind != "gelu" or len(block.inputs) != 1 or not any(node.op == "Erf" for node in inner):
            continue
        tensors = {tensor.name: tensor for node in inner for tensor in node.inputs}
        root, output = inner[-1], inner[-1].outputs[0]
        stem, data = root.name, tensors[block.inputs[0]]
        added = edit.add_node(bodies[block.scope], "Gelu", [data], names=names, stem=f"{stem}_gelu")
        added.domain = None if graph.opset >= GELU_OPSET else CONTRIB
        added.outputs[0].dtype, added.outputs[0].shape = output.dtype, output.shape
        edit.replace_all_uses(output, added.outputs[0], graph=bodies[block.scope])
        done.append(f"{stem}: its GELU as one operator")
    if done:
        edit.sweep(graph)
        edit.sort(graph)
    return done

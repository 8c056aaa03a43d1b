"""Edits that several tests of graphs make."""

from __future__ import annotations

from collections.abc import Sequence

from sbonnx.graph import Body, Tensor
from sbonnx.graph.edit import Names, add_node, replace_all_uses


def insert_after(tensor: Tensor, op: str, *, graph: Body, names: Names, inputs: Sequence[Tensor] = ()) -> Tensor:
    """In place. Insert a node `op(tensor, *inputs)` between a tensor and all its readers; return its output."""
    node = add_node(graph, op, [tensor, *inputs], names=names, stem=f"{tensor.name}/{op}")
    node.outputs[0].dtype, node.outputs[0].shape = tensor.dtype, tensor.shape
    replace_all_uses(tensor, node.outputs[0], graph=graph, keep=(node,))
    return node.outputs[0]

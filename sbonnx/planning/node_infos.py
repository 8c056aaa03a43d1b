"""Facts about the nodes of a graph by which patterns of recipes are resolved."""

from __future__ import annotations

from sbonnx import graph as graphs
from sbonnx.graph import Constant, Graph, Node, query
from sbonnx.linear.layer import channel_axes, weight_index
from sbonnx.ops import EMBEDDING
from sbonnx.recipe.torch_modules import NodeInfo


def node_infos(graph: Graph) -> list[NodeInfo]:
    """Collect, for every node of all scopes, its names and tensors, and the metadata that names torch modules."""
    return [_info(graph, node) for _, body in query.scopes(graph) for node in body.nodes]


def _info(graph: Graph, node: Node) -> NodeInfo:
    held = node.inputs[0 if node.op in EMBEDDING else 1 :][:1]
    weight = held[0].name if held and isinstance(held[0], Constant) else ""
    kind = query.dtype(node.outputs[0]) if node.outputs else None
    returned = [tensor for _, body in query.bodies(node) for tensor in body.outputs]
    return NodeInfo(
        node.name,
        node.op,
        graphs.node_metadata(graph, node.name),
        weight if weight.endswith(".weight") else "",
        integer=kind is not None and kind.kind in "iub",
        inputs=tuple(tensor.name for tensor in [*query.dependencies(node), *returned]),
        outputs=tuple(tensor.name for tensor in node.outputs),
        channels=_channels(node),
    )


def _channels(node: Node) -> int:
    """Return the number of output channels of a constant weight (1 for a vector); 0 if the node is no linear layer."""
    index = weight_index(node)
    if index is None:
        return 0
    shape = node.inputs[index].shape
    outputs, _ = channel_axes(node.op, node.attrs, len(shape), index)
    groups = int(node.attrs.get("group", 1)) if node.op == "ConvTranspose" else 1
    return 1 if outputs is None else int(shape[outputs]) * groups

"""Recognition of heads: regions of a network that may be sensitive to quantization, and the tensors to judge by.

A network has a head if several prediction layers share features (branches for boxes and classes, scales of a pyramid),
or if a single one is followed by a box decoder: edge distributions (DFL), parts that are computed differently and
joined again, or the selection of boxes (NMS). Classifiers, encoders and networks with one dense output have none.

The term *head* is that of `sbonnx.recipe.regions`; the *stem* here includes the activations and pools after its layers.
The *neck* begins at the first upsampling of a feature.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.graph import Constant, Graph, Node, Tensor, query
from sbonnx.ops import CONCATS, MOVES_DATA, RESIZES, SELECTS, SPLITS
from sbonnx.planning.node_infos import node_infos
from sbonnx.recipe.regions import Flow

MOST_BRANCHES: Final = 16
"""Maximum number of branches that are measured one by one; of more, only the whole head is."""

LAYERS_BEFORE: Final = 3
"""Layers before the neck in the largest region: a bottleneck block."""


@dataclass(frozen=True)
class HeadRegion:
    """Nodes of the main graph that stay float together.

    Attributes:
        name: for messages, such as "head" or "branch of Conv_257".
        nodes: their names.
    """

    name: str
    nodes: frozenset[str]


@dataclass(frozen=True)
class HeadLayout:
    """Structure of a network with a head.

    Attributes:
        kind: description of the head, for messages.
        regions: candidates to stay float, those at the outputs first.
        ends: names of float tensors by which the outputs are judged: the outputs, or what is joined or selected there.
        flow: data flow of the graph.
    """

    kind: str
    regions: tuple[HeadRegion, ...]
    ends: tuple[str, ...]
    flow: Flow


def head_layout(graph: Graph) -> HeadLayout | None:
    """Recognise the head of a network, or return None if it has none.

    Args:
        graph: simplified and fused; not changed.
    """
    infos = node_infos(graph)
    flow = Flow(infos)
    nodes = {node.name: node for node in graph.nodes}
    predictions = [name for name in flow.predictions if name in nodes]
    if not predictions or len(predictions) < len(flow.predictions):
        return None  # prediction layers in branches of If are alternatives
    kind = _kind(flow, predictions, nodes)
    ends = _ends(graph)
    if kind is None or not ends:
        return None
    regions = [HeadRegion("head", flow.head)]
    if 1 < len(predictions) <= MOST_BRANCHES:
        regions += [HeadRegion(f"branch of {name}", nodes_of) for name, nodes_of in flow.branches.items()]
    neck = _neck(flow, nodes)
    if neck:
        regions.append(HeadRegion("neck and head", neck | flow.head))
        regions.append(
            HeadRegion("neck and head with the layers before", _with_layers_before(neck | flow.head, flow, nodes))
        )
    regions += _stems(flow, nodes)
    inside = [HeadRegion(region.name, region.nodes & nodes.keys()) for region in regions]
    return HeadLayout(kind, tuple(region for region in inside if region.nodes), ends, flow)


def float_outputs(graph: Graph) -> tuple[str, ...]:
    """Return the names of the outputs in float32 that nodes compute."""
    return tuple(
        tensor.name
        for tensor in graph.outputs
        if query.producer(tensor) is not None and query.dtype(tensor) == np.dtype(np.float32)
    )


def _kind(flow: Flow, predictions: list[str], nodes: dict[str, Node]) -> str | None:
    """Describe the head; None if there is none."""
    if len(predictions) > 1:
        shared = frozenset.intersection(*(flow.before([name]) for name in predictions))
        linear = {name for name in shared if name in nodes and flow.is_linear(name)}
        return f"{len(predictions)} prediction layers on shared features" if linear else None
    tail = [nodes[name] for name in flow.tail if name in nodes]
    if any(node.op in SELECTS for node in tail):
        return "a prediction layer before a selection of boxes"
    if any(flow.is_linear(node.name) for node in tail):
        return "a prediction layer of edge distributions"
    return "a prediction layer with a box decoder" if _decodes_parts(predictions[0], tail, nodes) else None


def _decodes_parts(name: str, tail: list[Node], nodes: dict[str, Node]) -> bool:
    """Return whether parts of a prediction are computed differently and joined again, such as centers and sizes."""
    members = {node.name for node in tail}
    parts = [
        tensor
        for node in tail
        if node.op in SPLITS and _moved_from(node.inputs[0], name)
        for tensor in node.outputs
        if query.readers(tensor)
    ]
    computed = [{reader.op for reader, _ in query.readers(tensor)} - MOVES_DATA - CONCATS for tensor in parts]
    joined = any(node.op in CONCATS and node.name in members for node in tail)
    return joined and len(parts) > 1 and len({tuple(sorted(ops)) for ops in computed}) > 1


def _moved_from(tensor: Tensor, name: str) -> bool:
    """Return whether a tensor holds the values that the node `name` computes, moved or activated at most."""
    producer = query.producer(tensor)
    while producer is not None and producer.name != name:
        if producer.op not in MOVES_DATA | {"Sigmoid"}:
            return False
        producer = query.producer(producer.inputs[0])
    return producer is not None


def _neck(flow: Flow, nodes: dict[str, Node]) -> frozenset[str]:
    """Return the nodes from the first upsampling between two layers on; empty if there is none."""
    ups = [
        name
        for name, node in nodes.items()
        if (node.op in RESIZES or node.op == "ConvTranspose")
        and any(flow.is_linear(linear) for linear in flow.before([name]))
        and any(flow.is_linear(linear) for linear in flow.after([name]))
    ]
    return flow.after(ups).union(ups) if ups else frozenset()


def _with_layers_before(region: frozenset[str], flow: Flow, nodes: dict[str, Node]) -> frozenset[str]:
    """Return a region with the `LAYERS_BEFORE` linear layers on each path into it, and the nodes between."""
    for _ in range(LAYERS_BEFORE):
        linear = {name for name in flow.before(region) - region if name in nodes and flow.is_linear(name)}
        region = region | flow.between(flow.last_of(linear), region)
    return region


def _stems(flow: Flow, nodes: dict[str, Node]) -> Iterator[HeadRegion]:
    """Yield the stem, and the stem with the next linear layers, each with everything up to the linear layers after."""
    layers = {name for name in flow.stem if flow.is_linear(name)}
    linear = {name for name in nodes if flow.is_linear(name)}
    for name in ("stem", "stem with the layers after"):
        rest = linear - layers
        region = flow.stem | layers | (flow.after(layers) - flow.after(rest) - rest)
        yield HeadRegion(name, region)
        layers |= flow.first_of(rest)


def _ends(graph: Graph) -> tuple[str, ...]:
    """Return the float tensors by which the outputs are judged.

    A Concat at an output is replaced by what it joins, as boxes and scores differ by orders of magnitude; what was
    selected by NMS or TopK is replaced by what the selection reads.
    """
    picked: set[str] = set()
    for node in graph.nodes:
        if node.op in SELECTS or any(tensor.name in picked for tensor in query.dependencies(node)):
            picked.update(tensor.name for tensor in node.outputs)
    tensors: dict[str, None] = {}
    seen: set[str] = set()
    waiting = list(reversed(graph.outputs))
    while waiting:
        tensor = waiting.pop()
        if tensor.name in seen or isinstance(tensor, Constant) or tensor.is_empty():
            continue
        seen.add(tensor.name)
        before = list(_joined(tensor, picked))
        if before:
            waiting.extend(reversed(before))
        elif query.dtype(tensor) == np.dtype(np.float32) and query.producer(tensor) is not None:
            tensors[tensor.name] = None
    return tuple(tensors)


def _joined(tensor: Tensor, picked: set[str]) -> Iterator[Tensor]:
    """Yield the tensors that take the place of `tensor`; none if it is judged itself."""
    producer = query.producer(tensor)
    if producer is None:
        return
    if tensor.name in picked:
        yield from query.dependencies(producer)
    elif producer.op in CONCATS:
        yield from producer.inputs
    elif producer.op in MOVES_DATA and _ends_in_concat(producer):
        yield producer.inputs[0]


def _ends_in_concat(node: Node) -> bool:
    """Return whether only data movement lies between a node and a Concat before it."""
    producer = query.producer(node.inputs[0])
    while producer is not None and producer.op in MOVES_DATA:
        producer = query.producer(producer.inputs[0])
    return producer is not None and producer.op in CONCATS

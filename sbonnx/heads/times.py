"""Estimated time of a planned network: from the backend's table of kernel costs, or from its multiplications."""

from __future__ import annotations

from math import prod
from typing import Final

from sbonnx.backends.onnxruntime.costs import KernelCosts, elements
from sbonnx.graph import Constant, Graph, Node, Tensor, query
from sbonnx.linear.layer import channel_axes, weight_index
from sbonnx.ops import BLOCKED_POOLS, CONVOLUTIONS, LINEAR, MOVES_DATA, PICKS_MAX, RECTIFIERS
from sbonnx.plan.types import Plan

FLOAT_TIMES: Final = 2.0
"""Time of a multiplication in float (half precision) relative to int8, for runtimes without a table of kernel costs:
the ratio of peak throughputs of NVIDIA's tensor cores."""

BLOCKED: Final = CONVOLUTIONS | BLOCKED_POOLS
"""Ops whose float kernels work on blocks of channels."""

PASSED: Final = RECTIFIERS | MOVES_DATA | PICKS_MAX


def planned_time(graph: Graph, plan: Plan, costs: KernelCosts | None) -> float:
    """Estimate the time of one sample: nanoseconds by the table of kernel costs, else multiplications in int8.

    Nodes without an entry in the table count 0. Nodes in bodies are not counted.
    """
    weights = {reader.node for site in plan.of_role("weight") for reader in site.readers}
    read = {reader.node for site in plan.of_role("activation") for reader in site.readers}
    nodes = list(graph.nodes)
    integers = {node.name for node in nodes if node.name in read and (node.op not in LINEAR or node.name in weights)}
    if costs is None:
        return sum(_multiplications(node) * (1 if node.name in integers else FLOAT_TIMES) for node in nodes)
    total = 0.0
    quantized = {site.tensor for site in plan.of_role("activation")}
    for node in nodes:
        price = costs.of(node)
        if price is not None:
            total += price.integers if node.name in integers else price.floats
        if node.op == "MaxPool" and node.name not in integers and node.outputs[0].name in quantized:
            # onnxruntime moves the QuantizeLinear before the pool, which then runs on codes in the layout of float ops
            total += costs.ns("MaxPool", "3x3", "u8", write=elements(node.outputs[0]))
    return total + _crossings(nodes, integers, quantized, costs)


def _crossings(nodes: list[Node], integers: set[str], quantized: set[str], costs: KernelCosts) -> float:
    """Return the time of the Q and DQ at the edges between float and integer kernels."""
    total = 0.0
    tensors = {tensor.name: tensor for node in nodes for tensor in [*node.inputs, *node.outputs]}
    for name, tensor in tensors.items():
        readers = [node for node, _ in query.readers(tensor)]
        if name not in quantized or isinstance(tensor, Constant) or not readers:
            continue
        producer, written = query.producer(tensor), _is_written(tensor, integers)
        if not written and any(node.name in integers for node in readers):
            total += costs.quantize(tensor, reorder=producer is not None and producer.op in BLOCKED)
        if written and any(node.name not in integers for node in readers):
            total += costs.dequantize(tensor, reorder=any(node.op in BLOCKED for node in readers))
    return total


def _is_written(tensor: Tensor, integers: set[str]) -> bool:
    """Return whether an integer kernel writes a tensor, directly or through ops that fold into it or move values."""
    producer = query.producer(tensor)
    while producer is not None and producer.name not in integers and producer.op in PASSED:
        producer = query.producer(producer.inputs[0])
    return producer is not None and producer.name in integers


def _multiplications(node: Node) -> float:
    index = weight_index(node)
    if index is None:
        return 0.0
    shape = node.inputs[index].shape
    outputs, _ = channel_axes(node.op, node.attrs, len(shape), index)
    each = prod(shape) / (1 if outputs is None else shape[outputs])
    source = node.inputs[1 - index] if node.op == "ConvTranspose" else node.outputs[0]
    return float(elements(source) * each)

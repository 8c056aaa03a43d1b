"""Estimated time of a graph, divided into float and integer kernels: the one model that every decision uses.

The time is a sum over nodes (in float or in integers) and over tensors (a QuantizeLinear or DequantizeLinear where
kernels of one kind read what those of the other kind write, and conversions of the layout). The minimum cut finds the
division of least time (`cost_partition`), `GraphTimes.of_plan` is the time of a plan, and the search of widths reads
the prices of layers. The backend knows its kernels (`backends.kernel_costs`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Final

from sbonnx.backends.kernel_costs import KernelCosts, Price, elements
from sbonnx.graph import Constant, Graph, Node, Tensor, query
from sbonnx.linear.layer import channel_axes, weight_index
from sbonnx.ops import LINEAR, MATRIX_PRODUCTS, MOVES_DATA, RECTIFIERS
from sbonnx.planning.survey import FLOATS
from sbonnx.planning.types import Plan

FLOAT_TIMES: Final = 2.0
"""Time of a multiplication in float (half precision) relative to int8, for runtimes without a table of kernel costs:
the ratio of peak throughputs of NVIDIA's tensor cores."""


class Side(Enum):
    """Kind of the kernel that computes a node."""

    INTEGERS = "integers"
    FLOATS = "floats"


@dataclass(frozen=True)
class Crossing:
    """Costs of a tensor between kernels of different kinds, in ns.

    Attributes:
        tensor: its name.
        writer: name of the node that writes it, or the side that does in any case.
        readers: names of the nodes that read it, and sides.
        quantize: if the writer is in float, and a reader in integers.
        dequantize: if the writer is in integers, and a reader in float.
    """

    tensor: str
    writer: str | Side
    readers: frozenset[str | Side]
    quantize: float
    dequantize: float


@dataclass(frozen=True)
class GraphTimes:
    """Terms of the estimated time of a graph.

    Attributes:
        nodes: all nodes, bodies included, in topological order.
        prices: by name of the node; nodes without a measurement are missing, and count 0.
        crossings: at tensors.
    """

    nodes: tuple[Node, ...]
    prices: Mapping[str, Price]
    crossings: tuple[Crossing, ...]

    @classmethod
    def of(cls, nodes: Iterable[Node], outputs: Collection[str], costs: KernelCosts) -> GraphTimes:
        """Return the terms of a graph.

        Args:
            nodes: all nodes, bodies included, in topological order.
            outputs: names of the graph's outputs.
            costs: table of kernel costs.
        """
        nodes = tuple(nodes)
        prices = {node.name: price for node in nodes if (price := costs.of(node)) is not None}
        blocked = costs.blocked(nodes)
        crossings: list[Crossing] = []
        for tensor in _activations(nodes):
            readers = [(node, index) for node, index in query.readers(tensor) if not _is_weight(node, index)]
            names: set[str | Side] = {node.name for node, _ in readers}
            names |= {Side.FLOATS} if tensor.name in outputs else set()
            if not names:
                continue
            producer = query.producer(tensor)
            in_float = producer is None or costs.writes_float(producer)
            writer = Side.FLOATS if producer is None or in_float else producer.name
            blocks = {node.name for node, index in readers if costs.reads_blocks(node, index, blocked)}
            written = tensor.name in blocked
            leaves = written and names != blocks  # the float tensor is needed with channels first in any case
            if leaves and producer is not None:
                _add(prices, folded_into(producer).name, costs.reorder_output(tensor))
            if blocks and not written:
                moved = costs.reorder_input(tensor)
                crossings.append(Crossing(tensor.name, Side.INTEGERS, frozenset(blocks), 0.0, moved))
            quantize = costs.quantize(tensor, reorder=written and not leaves)
            dequantize = costs.dequantize(tensor, reorder=bool(blocks) and written)
            crossings.append(Crossing(tensor.name, writer, frozenset(names), quantize, dequantize))
        return cls(nodes, prices, tuple(crossings))

    def of_division(self, integers: Collection[str]) -> float:
        """Compute the time in ns if the named nodes run in integers, and the others in float.

        Folded activations follow the op before them, and moves of data the integers that they read, or that all their
        readers want.
        """
        sides = self._sides(integers)

        def runs_in_integers(end: str | Side) -> bool:
            return end is Side.INTEGERS if isinstance(end, Side) else sides.get(end, False)

        total = sum(price.integers if sides[name] else price.floats for name, price in self.prices.items())
        for crossing in self.crossings:
            readers = {runs_in_integers(reader) for reader in crossing.readers}
            if runs_in_integers(crossing.writer):
                total += crossing.dequantize if False in readers else 0.0
            else:
                total += crossing.quantize if True in readers else 0.0
        return total

    def of_plan(self, plan: Plan) -> float:
        """Estimate the time of one sample of a planned graph in ns."""
        return self.of_division(integer_nodes(self.nodes, plan))

    def _sides(self, integers: Collection[str]) -> dict[str, bool]:
        """Return whether each node runs in integers."""
        sides = {node.name: node.name in integers for node in self.nodes}
        for node in self.nodes:
            before = query.producer(node.inputs[0]) if node.inputs else None
            if before is not None and node.op in RECTIFIERS | MOVES_DATA and not sides[node.name]:
                sides[node.name] = sides.get(before.name, False) and before.op not in MATRIX_PRODUCTS
        for node in reversed(self.nodes):
            readers = [sides.get(reader.name, False) for tensor in node.outputs for reader, _ in query.readers(tensor)]
            if node.op in MOVES_DATA and readers and all(readers):
                sides[node.name] = True
        return sides


def integer_nodes(nodes: Iterable[Node], plan: Plan) -> set[str]:
    """Return the names of the nodes that a plan computes in integers: they read pairs, and have quantized weights."""
    weights = {reader.node for site in plan.of_role("weight") for reader in site.readers}
    read = {reader.node for site in plan.of_role("activation") for reader in site.readers}
    return {node.name for node in nodes if node.name in read and (node.op not in LINEAR or node.name in weights)}


def folded_into(node: Node) -> Node:
    """Return the op that an activation without a separate kernel is folded into, or the node itself."""
    before = query.producer(node.inputs[0]) if node.op in RECTIFIERS and node.inputs else None
    return node if before is None else before


def _add(prices: dict[str, Price], name: str, floats: float) -> None:
    """Add to the float price of a node, if it has one."""
    if name in prices:
        prices[name] = replace(prices[name], floats=prices[name].floats + floats)


def _activations(nodes: Sequence[Node]) -> Iterator[Tensor]:
    """Yield every float tensor that is no constant, once, in the order of the nodes."""
    seen: set[int] = set()
    for node in nodes:
        for tensor in (*node.inputs, *node.outputs):
            if id(tensor) not in seen and not isinstance(tensor, Constant) and query.dtype(tensor) in FLOATS:
                seen.add(id(tensor))
                yield tensor


def _is_weight(node: Node, index: int) -> bool:
    kind = LINEAR.get(node.op)
    return kind is not None and index in (kind.weight, kind.bias) and isinstance(node.inputs[index], Constant)


def plan_times(graph: Graph, costs: KernelCosts | None) -> Callable[[Plan], float]:
    """Return a function that estimates the time of one sample of a planned graph.

    In ns by the table of kernel costs; without a table, in multiplications of int8. Bodies of If, Loop and Scan do not
    count.
    """
    if costs is not None:
        return GraphTimes.of(graph.nodes, query.output_names(graph), costs).of_plan
    nodes = tuple(graph.nodes)

    def multiplications(plan: Plan) -> float:
        integers = integer_nodes(nodes, plan)
        return sum(_multiplications(node) * (1 if node.name in integers else FLOAT_TIMES) for node in nodes)

    return multiplications


def _multiplications(node: Node) -> float:
    index = weight_index(node)
    if index is None:
        return 0.0
    shape = node.inputs[index].shape
    outputs, _ = channel_axes(node.op, node.attrs, len(shape), index)
    macs_of_element = prod(shape) / (1 if outputs is None else shape[outputs])
    source = node.inputs[1 - index] if node.op == "ConvTranspose" else node.outputs[0]
    return float(elements(source) * macs_of_element)

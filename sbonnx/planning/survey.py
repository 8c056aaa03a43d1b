"""Graph properties that planning needs in advance: order, scopes, blocks, first and last layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sbonnx.graph import Body, Constant, Graph, Node, Tensor, query
from sbonnx.linear.embedding import constant_tables
from sbonnx.linear.layer import channel_axes, weight_index
from sbonnx.ops import (
    ADDS,
    CARRIES_INFINITY,
    DEQUANTIZE,
    EXPERTS,
    LINEAR,
    MATRIX_PRODUCTS,
    MOVES_DATA,
    RESHAPES,
    SOFTMAX,
)
from sbonnx.patterns import Block, find_blocks, spectra
from sbonnx.report.codes import Reason

FLOATS: Final = (np.dtype(np.float32), np.dtype(np.float16))
"""Types of weights and activations that are quantized."""

INFINITE: Final = Reason("infinite-values", "it holds infinite numbers of a constant, which have no code")


@dataclass(frozen=True)
class Place:
    """A node and its scope ("" for the main graph)."""

    node: Node
    scope: str


@dataclass(frozen=True)
class LinearInputs:
    """A linear op with a constant weight: input indices of weight, data and bias, and the output-channel axis."""

    weight: int
    data: int
    axis: int | None
    bias: int | None


class Survey:
    """Read-only view of one graph for planning. Built once, in time linear in the number of nodes."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.places: list[Place] = []
        self.in_loop: dict[str, str] = {}
        self.scope_of: dict[str, str] = {}
        self.enclosing: dict[str, tuple[str, ...]] = {}
        self.inputs: frozenset[str] = frozenset(tensor.name for tensor in graph.inputs)
        self.outputs: set[str] = query.output_names(graph)
        self._visit(graph, ("",), None)
        self.blocks: tuple[Block, ...] = find_blocks(graph)
        self.block_of: dict[str, Block] = {name: block for block in self.blocks for name in block.nodes}
        self.place_by_name: dict[str, Place] = {place.node.name: place for place in self.places}
        self.nodes: dict[str, Node] = {name: place.node for name, place in self.place_by_name.items()}
        self.depth: dict[str, int] = {}
        self._measure_depth()
        self.infinite: set[str] = self._infinite()
        inputs = ((name, weighted(node)) for name, node in self.nodes.items())
        self.linear: dict[str, LinearInputs] = {name: at for name, at in inputs if at is not None}
        self.spectra: dict[str, Reason] = spectra(self.nodes.values(), self.linear)
        self.feeds_linear: set[str] = self._before_linear()
        self.first, self.last = self._ends()
        self.heads, self.vocabulary = self._vocabulary()
        self.routers: frozenset[str] = frozenset(self._routers())

    def _visit(self, body: Body, scopes: tuple[str, ...], loop: str | None) -> None:
        scope = scopes[-1]
        self.enclosing[scope] = scopes
        for tensor in body.inputs:
            self.scope_of[tensor.name] = scope
        for node in body.nodes:
            if loop is not None:
                self.in_loop[node.name] = loop
            for tensor in node.outputs:
                self.scope_of[tensor.name] = scope
            for attribute, inner in query.bodies(node):
                path = f"{scope}/{node.name}/{attribute}" if scope else f"{node.name}/{attribute}"
                self._visit(inner, (*scopes, path), loop if node.op == "If" else node.name)
            self.places.append(Place(node, scope))  # after its bodies: they compute its outputs

    def scope_of_readers(self, tensor: Tensor) -> str:
        """Return the innermost scope that encloses all readers of a constant."""
        places = [self.enclosing[self.place_by_name[node.name].scope] for node, _ in query.readers(tensor)]
        shared = [scopes[0] for scopes in zip(*places, strict=False) if len(set(scopes)) == 1]
        scope: str = shared[-1]
        return scope

    def reads_model_input(self, tensor: Tensor) -> bool:
        """Return whether only data movement is between a tensor and an input of the model."""
        while (producer := query.producer(tensor)) is not None and producer.op in MOVES_DATA:
            tensor = producer.inputs[0]
        return tensor.name in self.inputs

    def reads_features(self, node: Node) -> bool:
        """Return whether a product computes features or reads them: a matrix product of the model's input, or of a Log.

        Features differ in scale by orders of magnitude, as bands of a spectrum do before their logarithm is taken.
        """
        if node.op in MATRIX_PRODUCTS and any(self.reads_model_input(tensor) for tensor in node.inputs):
            return True
        return node.name in self.spectra

    def place_of(self, node: Node) -> Literal["", "first", "last"]:
        """Return whether a node is a first or last linear layer; a node that is both counts as last."""
        if node.name in self.last:
            return "last"
        return "first" if node.name in self.first else ""

    def _measure_depth(self) -> None:
        """Compute the length of the longest path from the inputs to each tensor, in nodes."""
        for place in self.places:
            depth = 1 + max((self.depth.get(tensor.name, 0) for tensor in place.node.inputs), default=0)
            for tensor in place.node.outputs:
                self.depth[tensor.name] = depth

    def _infinite(self) -> set[str]:
        """Return the names of the tensors that hold infinite numbers of constants, as paddings and masks do."""
        names: set[str] = set()
        for place in self.places:
            node = place.node
            if node.op in CARRIES_INFINITY and any(
                tensor.name in names or (node.op not in MOVES_DATA and _holds_infinity(tensor))
                for tensor in node.inputs
            ):
                names.update(tensor.name for tensor in node.outputs)
        return names

    def _ends(self) -> tuple[set[str], set[str]]:
        """Return the names of the linear nodes without a linear node before them, and of those without one after."""
        first: set[str] = set()
        behind_linear: set[str] = set()  # tensors to which a path leads from a linear node
        for place in self.places:
            node = place.node
            inner = (tensor for _, body in query.bodies(node) for tensor in body.outputs)
            behind = any(tensor.name in behind_linear for tensor in (*node.inputs, *inner))
            if node.name in self.linear and not behind:
                first.add(node.name)
            if node.name in self.linear or behind:
                behind_linear.update(tensor.name for tensor in node.outputs)
        last = {
            name for name in self.linear if not any(out.name in self.feeds_linear for out in self.nodes[name].outputs)
        }
        return first, last

    def _vocabulary(self) -> tuple[frozenset[str], frozenset[int]]:
        """Return the heads of a language model, by node name, and the sizes of their vocabularies.

        A head is a last linear op that gives one output for each row of an embedding table of its input channels.
        """
        sizes = set()
        for _, table in constant_tables(self.graph):
            width = table.matrix.shape[table.row_axis]
            sizes.add((table.matrix.shape[1 - table.row_axis], width))
        heads, rows = set(), set()
        for name in self.last if sizes else ():
            node = self.nodes[name]
            at = self.linear[name]
            weight = node.inputs[at.weight]
            if len(weight.shape) != 2 or at.axis is None:
                continue
            size = weight.shape[at.axis], weight.shape[1 - at.axis]
            if node.op in MATRIX_PRODUCTS and size in sizes:
                heads.add(name)
                rows.add(size[0])
        return frozenset(heads), frozenset(rows)

    def _routers(self) -> Iterator[str]:
        """Yield the names of the products whose outputs choose experts: the scores of MoE, or of a TopK over them."""
        for node in self.nodes.values():
            if node.op not in EXPERTS and node.op != "TopK":
                continue
            scores = node.inputs[1 if node.op in EXPERTS else 0]
            sizes, maker = query.shape(scores), query.producer(scores)
            while maker is not None and maker.op in SOFTMAX | RESHAPES | ADDS | {"Cast", "Sigmoid"}:
                maker = query.producer(maker.inputs[0])
            at = None if maker is None else self.linear.get(maker.name)
            if maker is None or at is None or at.axis is None or maker.op not in MATRIX_PRODUCTS:
                continue
            if node.op in EXPERTS or (sizes and sizes[-1] == maker.inputs[at.weight].shape[at.axis]):
                yield maker.name

    def _before_linear(self) -> set[str]:
        """Return the names of the tensors from which a path leads to a linear op."""
        names: set[str] = set()
        for place in reversed(self.places):  # a node before its bodies: they compute its outputs
            node = place.node
            if node.name in self.linear or any(tensor.name in names for tensor in node.outputs):
                names.update(tensor.name for tensor in node.inputs)
                names.update(tensor.name for _, body in query.bodies(node) for tensor in body.outputs)
        return names

    def quantizable(self, tensor: Tensor) -> Reason | None:
        """Return the reason why an activation cannot be quantized, or None."""
        if tensor.is_empty():
            return Reason("input-absent", "the input is absent")
        if isinstance(tensor, Constant):
            return Reason("input-constant", "it is a constant")
        kind = query.dtype(tensor)
        if kind is None:
            return Reason("type-unknown", "its type is unknown")
        if kind not in FLOATS:
            return Reason("type-not-float", f"its type is {kind}")
        if tensor.name in self.infinite:
            return INFINITE
        producer = query.producer(tensor)
        if producer is not None and producer.op in DEQUANTIZE:
            return Reason("already-quantized", "the model quantizes it already")
        if producer is not None and producer.op == "AveragePool" and set(producer.attrs.get("dilations", ())) - {1}:
            return Reason(
                "no-integer-kernel", f"onnxruntime has no integer kernel for the dilations of '{producer.name}'"
            )
        return None


def _holds_infinity(tensor: Tensor) -> bool:
    values = query.constant(tensor) if query.dtype(tensor) in FLOATS else None
    return values is not None and bool(np.isinf(values).any())


def weighted(node: Node) -> LinearInputs | None:
    """Locate the constant weight of a linear op; None if it has none or is not a linear op."""
    index = weight_index(node)
    if index is None or node.inputs[index].dtype not in FLOATS:
        return None
    axis, _ = channel_axes(node.op, node.attrs, len(node.inputs[index].shape), index)
    bias = LINEAR[node.op].bias
    bias = None if query.optional_input(node, bias) is None else bias
    return LinearInputs(weight=index, data=1 - index, axis=axis, bias=bias)

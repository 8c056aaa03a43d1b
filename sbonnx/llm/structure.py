"""Structure of a decoder's graph: embedding, transformer blocks, head, and the weights of their linear operators.

Blocks are cut at the residual stream: nodes through which every path from the embedding to the logits passes. Names of
nodes are not used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import onnx
from onnx import NodeProto, TensorProto

from sbonnx.ops import EMBEDDING, KEEPS_VALUES, LINEAR, QDQ, RESHAPES

ATTENTION: Final = frozenset({"Softmax", "Attention", "MultiHeadAttention", "GroupQueryAttention", "PagedAttention"})
"""Operators that mark a block of a decoder without a cache."""

ONE_ROW: Final = frozenset({"GroupQueryAttention"})
"""Operators whose CPU kernel takes several tokens after a past for one sequence only."""

MOVES: Final = RESHAPES | (KEEPS_VALUES - QDQ)
"""Operators between a table and its stored values, or between token ids and the embedding."""

STORED_BITS: Final[dict[int, int]] = {
    TensorProto.FLOAT: 32,
    TensorProto.FLOAT16: 16,
    TensorProto.BFLOAT16: 16,
    TensorProto.INT8: 8,
    TensorProto.UINT8: 8,
    TensorProto.INT4: 4,
    TensorProto.UINT4: 4,
}
"""Bits of an element, by the type of the stored tensor."""

FLOAT_BITS: Final = 16
"""Fewest bits of a float weight."""


@dataclass(frozen=True)
class DecoderWeight:
    """Weight of a linear operator or table.

    Attributes:
        node: name of the node.
        op: its operator.
        table: name of the stored tensor.
        rows, columns: summed axis and outputs of a linear operator; tokens and width of an embedding.
        bits: bits of an element in the file; 16 and 32 are float.
        block: values that share a scale; 0 for float weights and scales per channel or tensor.
    """

    node: str
    op: str
    table: str
    rows: int
    columns: int
    bits: int
    block: int = 0

    @property
    def quantized(self) -> bool:
        return self.bits < FLOAT_BITS

    def label(self) -> str:
        """Format the stored type: "4 bits g32", "8 bits", "float16"."""
        if not self.quantized:
            return f"float{self.bits}"
        return f"{self.bits} bits" + (f" g{self.block}" if self.block else "")


@dataclass(frozen=True)
class DecoderBlock:
    """A transformer block.

    Attributes:
        layer: its number, from 0.
        stream: tensor of the residual stream at its input.
        weights: weights of its linear operators, in graph order.
    """

    json_keys: ClassVar = ("layer", "stream")

    layer: int
    stream: str
    weights: tuple[DecoderWeight, ...]


@dataclass(frozen=True)
class DecoderStructure:
    """Embedding, blocks and head.

    Attributes:
        embedding, head: None if they are not found: inputs are not token ids of a table, or the logits are computed by
            no linear operator with a constant weight.
        blocks: in order.
        tied: embedding and head read one stored table.
        one_row: several tokens after a past run for one sequence only.
    """

    embedding: DecoderWeight | None
    blocks: tuple[DecoderBlock, ...]
    head: DecoderWeight | None
    tied: bool
    one_row: bool

    @property
    def hidden(self) -> int | None:
        """Width of the residual stream; None without an embedding."""
        return None if self.embedding is None else self.embedding.columns

    @property
    def weights(self) -> tuple[DecoderWeight, ...]:
        """Return all weights; embedding first, head last."""
        ends = ((self.embedding,), (self.head,))
        inner = tuple(weight for block in self.blocks for weight in block.weights)
        first, last = (tuple(weight for weight in end if weight is not None) for end in ends)
        return (*first, *inner, *last)

    @property
    def quantized(self) -> bool:
        """Whether a weight is quantized already."""
        return any(weight.quantized for weight in self.weights)


class _DecoderGraph:
    """Nodes in topological order with the branch that computes the logits from a past, and stored tensors by name."""

    def __init__(self, graph: onnx.GraphProto, logits: str, past: Iterable[str]) -> None:
        self.nodes: list[NodeProto] = []
        self.stored: dict[str, TensorProto] = {}
        self.logits = logits
        read = frozenset(past)
        self._add(graph)
        while (node := self.producers.get(self.logits)) is not None and node.op_type == "If":
            bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
            reading = (body for body in bodies if any(name in read for inner in body.node for name in inner.input))
            body = next(reading, bodies[0])
            self.logits = body.output[list(node.output).index(self.logits)].name
            self._add(body)

    def _add(self, graph: onnx.GraphProto) -> None:
        self.stored |= {tensor.name: tensor for tensor in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                self.stored.update(
                    (node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value"
                )
            else:
                self.nodes.append(node)
        self.producers = {name: node for node in self.nodes for name in node.output if name}

    def table(self, name: str) -> tuple[TensorProto | None, NodeProto | None]:
        """Return the stored tensor behind a weight, and the DequantizeLinear on the way to it."""
        dequantize = None
        while (node := self.producers.get(name)) is not None:
            if node.op_type == "DequantizeLinear":
                dequantize = node
            elif node.op_type not in MOVES:
                return None, None
            name = node.input[0]
        return self.stored.get(name), dequantize


def read_structure(graph: onnx.GraphProto, tokens: str, logits: str, layers: Mapping[str, int]) -> DecoderStructure:
    """Find embedding, blocks and head of a decoder.

    Args:
        graph: of the model, nodes in topological order.
        tokens, logits: input and output by role.
        layers: layer by the name of the past input.
    """
    scope = _DecoderGraph(graph, logits, layers)
    weights = {id(node): weight for node in scope.nodes if (weight := _linear(scope, node)) is not None}
    source, embedding = _embedding(scope, tokens)
    path = _path(scope, source)
    linear = [weights[id(node)] for node in path if id(node) in weights]
    head = linear[-1] if linear else None
    anchors = _anchors(scope, path, layers)
    cuts = list(_cuts(path, source))
    starts = [max((at for at, _ in cuts if at < anchor), default=-1) for _, anchor in anchors]
    streams = dict(cuts)
    blocks = []
    for number, ((layer, _), start) in enumerate(zip(anchors, starts, strict=True)):
        end = starts[number + 1] if number + 1 < len(starts) else len(path)
        inner = (weights[id(node)] for node in path[max(start, 0) : end] if id(node) in weights)
        blocks.append(DecoderBlock(layer, streams.get(start, source), tuple(w for w in inner if w is not head)))
    return DecoderStructure(
        embedding,
        tuple(blocks),
        head,
        tied=embedding is not None and head is not None and embedding.table == head.table,
        one_row=any(node.op_type in ONE_ROW for node in scope.nodes),
    )


def _linear(scope: _DecoderGraph, node: NodeProto) -> DecoderWeight | None:
    """Return the weight of a linear operator; None for other nodes, and products of two activations."""
    if node.op_type == "MatMulNBits":
        return DecoderWeight(
            node.name,
            node.op_type,
            node.input[1],
            _int(node, "K"),
            _int(node, "N"),
            _int(node, "bits", 4),
            _int(node, "block_size"),
        )
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    name = node.input[LINEAR[node.op_type].weight]
    table, dequantize = scope.table(name)
    if table is None or len(table.dims) != 2:
        return None
    rows, columns = table.dims
    turned = sum(node_of_chain.op_type == "Transpose" for node_of_chain in _chain(scope, name)) + _int(node, "transB")
    if turned % 2:
        rows, columns = columns, rows
    block = _int(dequantize, "block_size") if dequantize is not None else 0
    return DecoderWeight(node.name, node.op_type, table.name, rows, columns, _bits(table), block)


def _chain(scope: _DecoderGraph, name: str) -> Iterator[NodeProto]:
    """Yield the nodes between a weight and its stored tensor."""
    while (node := scope.producers.get(name)) is not None:
        yield node
        name = node.input[0]


def _embedding(scope: _DecoderGraph, tokens: str) -> tuple[str, DecoderWeight | None]:
    """Return the output of the embedding, and its table; `tokens` and None if there is none."""
    ids = {tokens}
    for node in scope.nodes:
        if node.op_type in MOVES and node.input[0] in ids:
            ids.update(node.output)
            continue
        is_table = node.op_type in EMBEDDING or node.op_type == "GatherBlockQuantized"
        if not is_table or node.input[1] not in ids:
            continue
        table, dequantize = scope.table(node.input[0])
        if table is None or len(table.dims) < 2:
            continue
        bits, block, rows, columns = _bits(table), 0, table.dims[0], table.dims[-1]
        if sum(node_of_chain.op_type == "Transpose" for node_of_chain in _chain(scope, node.input[0])) % 2:
            rows, columns = columns, rows
        if node.op_type == "GatherBlockQuantized":
            bits, block = _int(node, "bits", 4), _int(node, "block_size", 128)
            scales = scope.stored.get(node.input[2])
            columns = block * scales.dims[-1] if scales is not None else columns * (8 // bits)
        elif dequantize is not None:
            block = _int(dequantize, "block_size")
        name = table.name
        return node.output[0], DecoderWeight(node.name, node.op_type, name, rows, columns, bits, block)
    return tokens, None


def _path(scope: _DecoderGraph, source: str) -> list[NodeProto]:
    """Return the nodes on paths from the tensor `source` to the logits, without those that depend on its shape only."""
    after = {source}
    forward = []
    for node in scope.nodes:
        if node.op_type != "Shape" and any(name in after for name in node.input):
            after.update(name for name in node.output if name)
            forward.append(node)
    needed = {scope.logits}
    path = []
    for node in reversed(forward):
        if needed.intersection(node.output):
            needed.update(node.input)
            path.append(node)
    return path[::-1]


def _anchors(scope: _DecoderGraph, path: Sequence[NodeProto], layers: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return (layer, position in `path`) of the first node of each attention, in order of position."""
    anchors: dict[int, int] = {}
    if layers:
        behind = {name: {layer} for name, layer in layers.items()}
        for node in scope.nodes:  # casts and dequantization of caches
            if node.op_type in (*MOVES, "DequantizeLinear") and node.input[0] in behind:
                behind |= dict.fromkeys(node.output, behind[node.input[0]])
        for at, node in enumerate(path):
            for name in node.input:
                for layer in behind.get(name, ()):
                    anchors.setdefault(layer, at)
    else:
        for at, node in enumerate(path):
            if node.op_type in ATTENTION:
                anchors[len(anchors)] = at
    return sorted(anchors.items(), key=lambda item: item[1])


def _cuts(path: Sequence[NodeProto], source: str) -> Iterator[tuple[int, str]]:
    """Yield (position, stream) of nodes that all paths pass; the stream is the output that is read last."""
    last = {source: -1}
    last |= {name: at for at, node in enumerate(path) for name in node.input}
    farthest = last[source]
    for at, node in enumerate(path):
        if farthest <= at:
            yield at, max((name for name in node.output if name), key=lambda name: last.get(name, -1))
        farthest = max([farthest, *(last.get(name, -1) for name in node.output if name)])


def _bits(tensor: TensorProto) -> int:
    return STORED_BITS.get(tensor.data_type, 32)


def _int(node: NodeProto, name: str, default: int = 0) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)

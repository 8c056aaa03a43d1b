"""Models that are cut at inner tensors: each piece reads given values, so that its own error is measured."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper

from sbonnx.ops import LINEAR
from sbonnx.spec import Array

PAIR: Final = ("QuantizeLinear", "DequantizeLinear")
INTEGER_OPERATORS: Final = ("QLinear", "QGemm")
"""Beginnings of the names of operators whose outputs are integers with a scale."""
EVEN: Final = 2.0**-10
"""Part of the largest scale below which a channel's bias is left out, as it would not fit the largest scale."""
READS_CODES: Final = ("DynamicQuantizeLinear", "MatMulNBits")
"""Operators that round their own input."""


@dataclass(frozen=True)
class Piece:
    """Nodes between cuts.

    Attributes:
        output: tensor that they compute.
        nodes: in the order of the file.
    """

    output: str
    nodes: tuple[NodeProto, ...]

    @property
    def computing(self) -> tuple[NodeProto, ...]:
        """Nodes other than Q/DQ pairs; all if there are no others."""
        return tuple(node for node in self.nodes if node.op_type not in PAIR) or self.nodes

    @property
    def is_pair(self) -> bool:
        """Whether it has Q/DQ nodes alone."""
        return all(node.op_type in PAIR for node in self.nodes)

    @property
    def named(self) -> NodeProto:
        """The node that stands for all: the first one with products of weights, else the first that computes."""
        products = (node for node in self.computing if node.op_type in LINEAR)
        return next(products, self.computing[0])


class CutModel:
    """Model to be cut at tensors of its main graph.

    Attributes:
        proto: the model, which is not changed.
    """

    def __init__(self, proto: onnx.ModelProto) -> None:
        self.proto = proto
        self._maker = {name: node for node in proto.graph.node for name in node.output if name}
        self._stored = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._varying = self._from_inputs()

    def _from_inputs(self) -> set[str]:
        varying = {value.name for value in self.proto.graph.input} - self._stored.keys()
        for node in self.proto.graph.node:
            if varying & set(node.input) or any(attribute.HasField("g") for attribute in node.attribute):
                varying.update(name for name in node.output if name)
        return varying

    def edges(self) -> list[str]:
        """Return the tensors at the edges of quantized operators, in the order of the file.

        A DequantizeLinear that reads no QuantizeLinear is none: its reader would get floats, and compute in float.
        """
        edges: dict[str, None] = {}
        for node in self.proto.graph.node:
            if node.op_type in READS_CODES:
                edges.setdefault(node.input[0])
            paired = node.op_type == PAIR[1] and self.pair_of(node.output[0]) is not None
            quantized = node.op_type.startswith(INTEGER_OPERATORS) or node.op_type == "MatMulNBits" or paired
            if quantized and self._varying & set(node.input[:1] if node.op_type == PAIR[1] else node.input):
                edges.setdefault(node.output[0])
        inputs = {value.name for value in self.proto.graph.input}
        return [name for name in edges if name in self._varying and name not in inputs]

    def inside(self, piece: Piece) -> list[str]:
        """Return the tensors between the nodes of a piece."""
        return [name for node in piece.nodes for name in node.output if name and name in self._varying]

    def pair_of(self, name: str) -> tuple[NodeProto, NodeProto] | None:
        """Return the Q/DQ pair that computes a tensor, or None."""
        last = self._maker.get(name)
        first = None if last is None or last.op_type != PAIR[1] else self._maker.get(last.input[0])
        return None if last is None or first is None or first.op_type != PAIR[0] else (first, last)

    def step(self, name: str) -> float | None:
        """Return the scale of a tensor of a Q/DQ pair with one scale, or None."""
        pair = self.pair_of(name)
        stored = None if pair is None else self._stored.get(pair[1].input[1])
        values = None if stored is None else numpy_helper.to_array(stored)
        return None if values is None or values.size != 1 else float(values.reshape(())[()])

    def piece(self, output: str, cuts: Collection[str]) -> Piece:
        """Return the nodes that compute a tensor from the cuts before it."""
        needed, waiting = set(), [output]
        while waiting:
            name = waiting.pop()
            node = self._maker.get(name)
            if node is None or id(node) in needed or name not in self._varying:
                continue
            needed.add(id(node))
            waiting += [source for source in node.input if source not in cuts]
        return Piece(output, tuple(node for node in self.proto.graph.node if id(node) in needed))

    def with_outputs(self, names: Iterable[str]) -> bytes:
        """Return the model with these tensors as outputs."""
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        present = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in present)
        return bytes(model.SerializeToString())

    def with_halved_weights(self) -> CutModel:
        """Return the model with half of each 8-bit code of weights."""
        return self._with({name: values // 2 for name, values in self._codes() if values.itemsize == 1})

    def with_even_scales(self) -> CutModel:
        """Return the model with one scale for all channels of a weight, the largest; its other biases are 0."""
        changed: dict[str, Array] = {}
        codes = dict(self._codes())
        for node in self.proto.graph.node:
            stored = self._stored.get(node.input[1]) if node.op_type == PAIR[1] and node.input[0] in codes else None
            scale = np.ones(()) if stored is None else numpy_helper.to_array(stored)
            if scale.ndim == 1:
                changed[node.input[1]] = np.full_like(scale, scale.max())
                bias = codes[node.input[0]]
                if bias.dtype == np.int32 and bias.shape == scale.shape:
                    changed[node.input[0]] = np.where(scale < scale.max() * EVEN, 0, bias).astype(bias.dtype)
        return self._with(changed)

    def _codes(self) -> Iterator[tuple[str, Array]]:
        """Yield name and values of each stored tensor that a DequantizeLinear reads."""
        for name in dict.fromkeys(node.input[0] for node in self.proto.graph.node if node.op_type == PAIR[1]):
            if name in self._stored:
                yield name, numpy_helper.to_array(self._stored[name])

    def _with(self, values: Mapping[str, Array]) -> CutModel:
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        for tensor in model.graph.initializer:
            if tensor.name in values:
                tensor.CopyFrom(numpy_helper.from_array(values[tensor.name], tensor.name))
        return CutModel(model)

    def cut(self, cuts: Sequence[str], values: Mapping[str, Array]) -> tuple[bytes, dict[str, Array]]:
        """Return the model in which each cut is an input for its readers and an output of its node, and those feeds.

        A tensor of a Q/DQ pair is quantized and dequantized again after the input, so that readers still see a pair.
        """
        model = onnx.ModelProto()
        model.CopyFrom(self.proto)
        given = {name: f"{name}/given" for name in cuts}
        pairs, readers = [], dict(given)
        for name in cuts:
            pair = self.pair_of(name)
            if pair is not None:
                readers[name] = f"{name}/pair"
                pairs += _copied_pair(*pair, given[name], readers[name])
        for node in model.graph.node:
            node.input[:] = [readers.get(name, name) for name in node.input]
        nodes = [*pairs, *model.graph.node]
        del model.graph.node[:]
        model.graph.node.extend(nodes)
        model.graph.input.extend(_info(given[name], values[name]) for name in cuts)
        present = {value.name for value in model.graph.output}
        model.graph.output.extend(_info(name, values[name]) for name in cuts if name not in present)
        return model.SerializeToString(), {given[name]: values[name] for name in cuts}


def _copied_pair(first: NodeProto, last: NodeProto, source: str, result: str) -> list[NodeProto]:
    quantize, dequantize = NodeProto(), NodeProto()
    quantize.CopyFrom(first)
    dequantize.CopyFrom(last)
    quantize.name, dequantize.name = f"{result}/quantize", f"{result}/dequantize"
    quantize.input[0], quantize.output[0] = source, f"{result}/codes"
    dequantize.input[0], dequantize.output[0] = f"{result}/codes", result
    return [quantize, dequantize]


def _info(name: str, values: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)

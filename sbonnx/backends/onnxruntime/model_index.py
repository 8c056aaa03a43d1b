"""Bodies of a model as stored in the file: producers and readers of each tensor, and tensors that hold codes."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import onnx

from sbonnx.graph.protos import body_protos, needs
from sbonnx.ops import DECODES, DEQUANTIZE, QDQ, QUANTIZE, STANDARD_DOMAINS

CODES: Final = frozenset(
    getattr(onnx.TensorProto, name)
    for name in ("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "INT16", "UINT16")
    if hasattr(onnx.TensorProto, name)
)
"""Element types of quantized values."""

INTEGER_KERNELS: Final = ("QLinear", "Nhwc")
"""Name prefixes of onnxruntime's own kernels that write codes if they read codes."""

QGEMM_INPUTS: Final = 9
"""QGemm writes codes if its last input, the zero point of its output, is present; else float."""


@dataclass(frozen=True)
class Body:
    """The main graph, or the body of an If, Loop or Scan.

    Attributes:
        nodes: in the order of the file.
        makers: node by the tensor that it writes, including those of the enclosing bodies.
        constants: initializers and Constants by name, including those of the enclosing bodies.
        readers: nodes of this body that read a tensor, directly or in one of their bodies.
        outputs: outputs of the body.
        codes: tensors that hold codes, including those of the enclosing bodies.
        opset: version of the standard operators.
    """

    nodes: tuple[onnx.NodeProto, ...]
    makers: Mapping[str, onnx.NodeProto]
    constants: Mapping[str, onnx.TensorProto]
    readers: Mapping[str, Sequence[onnx.NodeProto]]
    outputs: frozenset[str]
    codes: Mapping[str, bool] = field(repr=False)
    opset: int = 0

    def kinds(self, node: onnx.NodeProto) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the type names of a node's inputs and outputs, as `kinds` does; empty for nodes of other domains."""
        return kinds(node.op_type, self.opset) if node.domain in STANDARD_DOMAINS else ((), ())

    def pair(self, tensor: str) -> onnx.NodeProto | None:
        """Return the DequantizeLinear that writes `tensor`, or None."""
        maker = self.makers.get(tensor)
        return maker if maker is not None and maker.op_type in DEQUANTIZE else None

    def stored(self, pair: onnx.NodeProto) -> onnx.TensorProto | None:
        """Return the constant of a DequantizeLinear, or None: its codes, also packed, or floats of a QuantizeLinear."""
        maker = self.makers.get(pair.input[0])
        name = maker.input[0] if maker is not None and maker.op_type in QUANTIZE else pair.input[0]
        while (maker := self.makers.get(name)) is not None and maker.op_type in DECODES:
            name = maker.input[0]
        return self.constants.get(name)

    def activation(self, tensor: str) -> bool:
        """Return whether `tensor` is a dequantized activation."""
        pair = self.pair(tensor)
        return pair is not None and self.stored(pair) is None

    def zero_point(self, pair: onnx.NodeProto) -> onnx.TensorProto | None:
        """Return the constant zero point of a Q or DQ node, or None."""
        return self.constants.get(pair.input[2]) if len(pair.input) > 2 else None

    def reads_codes(self, node: onnx.NodeProto) -> bool:
        """Return whether a node computes on codes: False for Q, DQ, Cast and nodes with bodies."""
        if node.op_type in QDQ or node.op_type in ("Cast", "DynamicQuantizeLinear") or any(body_protos(node)):
            return False
        return any(name in self.codes for name in node.input)


def bodies(model: onnx.ModelProto) -> Iterator[Body]:
    """Iterate over every body of a model, outer ones first. External data is not needed."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), 0)
    yield from _walk(model.graph, opset, ChainMap(), ChainMap(), ChainMap())


def _walk(
    graph: onnx.GraphProto,
    opset: int,
    makers: ChainMap[str, onnx.NodeProto],
    constants: ChainMap[str, onnx.TensorProto],
    codes: ChainMap[str, bool],
) -> Iterator[Body]:
    makers, constants, codes = makers.new_child(), constants.new_child(), codes.new_child()
    readers: dict[str, list[onnx.NodeProto]] = {}
    for tensor in graph.initializer:
        constants[tensor.name] = tensor
        _mark(codes, tensor.name, tensor.data_type)
    for value in graph.input:
        _mark(codes, value.name, value.type.tensor_type.elem_type)
    nodes = tuple(graph.node)
    for node in nodes:
        makers.update(dict.fromkeys(filter(None, node.output), node))
        for name in set(needs(node)):
            readers.setdefault(name, []).append(node)
        for attribute in node.attribute:
            if node.op_type == "Constant" and attribute.name == "value":
                constants[node.output[0]] = attribute.t
                _mark(codes, node.output[0], attribute.t.data_type)
        codes.update(dict.fromkeys(_written(node, codes, opset), True))
    outputs = frozenset(value.name for value in graph.output)
    yield Body(nodes, makers, constants, readers, outputs, codes, opset)
    for node in nodes:
        for _, body in body_protos(node):
            yield from _walk(body, opset, makers, constants, codes)


def _mark(codes: MutableMapping[str, bool], name: str, kind: int) -> None:
    if kind in CODES:
        codes[name] = True


def _written(node: onnx.NodeProto, codes: Mapping[str, bool], opset: int) -> list[str]:
    """Return the outputs of a node that hold codes: by its schema, or by the names of onnxruntime's own kernels."""
    if node.op_type in QUANTIZE:
        return list(node.output)
    if node.domain in STANDARD_DOMAINS:
        inputs, outputs = kinds(node.op_type, opset)
        if not outputs:
            return []
        bound = {inputs[min(i, len(inputs) - 1)] for i, name in enumerate(node.input) if inputs and name in codes}
        bound |= {"tensor(uint8)", "tensor(int8)"}
        return [name for i, name in enumerate(node.output) if outputs[min(i, len(outputs) - 1)] in bound]
    if not any(name in codes for name in node.input):
        return []
    writes = node.op_type == "QGemm" and len(node.input) == QGEMM_INPUTS and bool(node.input[-1])
    return list(node.output) if writes or node.op_type.startswith(INTEGER_KERNELS) else []


@lru_cache(maxsize=1024)
def kinds(op: str, opset: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the type names of an ONNX op's inputs and outputs ("T", "tensor(int64)"); the last may be repeated.

    Empty for an op that is not in the standard.
    """
    if not onnx.defs.has(op, max_inclusive_version=opset):
        return (), ()
    schema = onnx.defs.get_schema(op, opset)
    return tuple(parameter.type_str for parameter in schema.inputs), tuple(
        parameter.type_str for parameter in schema.outputs
    )

"""Type and shape inference by onnx, with rules for operators of onnxruntime, which onnx has no schema for.

An operator with a rule is replaced, in a copy of the model, by standard operators whose outputs have the same types and
shapes; onnx infers the copy in one pass, and what it finds for the outputs of the operator is taken over.

Source of the rules: the shape inference of onnxruntime's contrib operators (docs/ContribOperators.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from sbonnx.graph.protos import body_protos, copied, domain_of, graph_protos, node_protos, replace_entries
from sbonnx.ops import CONTRIB, RUNTIME_OPS

STEM: Final = "sbonnx.inferred/"
"""Prefix of the names of tensors and nodes that exist during inference only."""


def infer_shapes(model: ModelProto, *, strict_mode: bool = False, data_prop: bool = False) -> ModelProto:
    """Infer the types and shapes of all tensors, as `onnx.shape_inference.infer_shapes` does.

    Args:
        strict_mode, data_prop: see onnx. Operators without schema or rule leave their outputs as they are.

    Raises:
        RuntimeError, onnx.shape_inference.InferenceError: as onnx does (`ONNX_ERRORS`).
    """
    options = {"strict_mode": strict_mode, "data_prop": data_prop}
    if not any(_rule_of(node) is not None for node in node_protos(model.graph)):
        return onnx.shape_inference.infer_shapes(model, **options)
    standard = copied(model)
    _replace(standard.graph, _VisibleConstants())
    inferred = onnx.shape_inference.infer_shapes(standard, **options)
    result = copied(model)
    for scope, typed in zip(graph_protos(result.graph), graph_protos(inferred.graph), strict=True):
        replace_entries(scope.value_info, [value for value in typed.value_info if not value.name.startswith(STEM)])
        replace_entries(scope.output, typed.output)
    return result


@dataclass(frozen=True)
class _VisibleConstants:
    """Initializers visible in a scope, by name."""

    constants: dict[str, TensorProto] = field(default_factory=dict)

    def inside(self, graph: GraphProto) -> _VisibleConstants:
        constants = {**self.constants, **{tensor.name: tensor for tensor in graph.initializer}}
        for node in graph.node:
            if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
                constants[node.output[0]] = node.attribute[0].t
        return _VisibleConstants(constants)

    def sizes(self, name: str) -> list[int] | None:
        """Return the shape of a constant, or None."""
        return list(self.constants[name].dims) if name in self.constants else None


def _replace(graph: GraphProto, outer: _VisibleConstants) -> None:
    """Replace every operator that has a rule, in this scope and the bodies inside it. In place.

    Outputs that a rule leaves out have no type, as those of an operator without schema.
    """
    scope = outer.inside(graph)
    nodes: list[NodeProto] = []
    for node in graph.node:
        for _, body in body_protos(node):
            _replace(body, scope)
        rule = _rule_of(node)
        if rule is None:
            nodes.append(node)
        else:
            writer = _Writer(node, graph, scope)
            rule(writer)
            nodes += writer.nodes
    replace_entries(graph.node, nodes)


@dataclass
class _Writer:
    """Standard operators in place of one node."""

    node: NodeProto
    graph: GraphProto
    scope: _VisibleConstants
    nodes: list[NodeProto] = field(default_factory=list)

    def input(self, index: int) -> str:
        """Return the name of an input; "" if it is absent."""
        return self.node.input[index] if index < len(self.node.input) else ""

    def output(self, index: int) -> str:
        """Return the name of an output; "" if it is absent."""
        return self.node.output[index] if index < len(self.node.output) else ""

    def attribute(self, name: str, default: int = 0) -> int:
        """Return an integer attribute."""
        return next((entry.i for entry in self.node.attribute if entry.name == name), default)

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Add a node; return its output, a new one by default."""
        name = f"{STEM}{self.node.name}/{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, inputs, [output or name], name=name, **attributes))
        return output or name

    def integers(self, *values: int) -> str:
        """Add a constant of int64 values, and return its name."""
        value = onnx.helper.make_tensor("", TensorProto.INT64, [len(values)], values)
        return self.add("Constant", [], value=value)

    def like(self, source: str, output: str) -> None:
        """Give an output the type and shape of a tensor."""
        if source and output:
            self.add("Identity", [source], output)

    def ranked(self, source: str, output: str) -> None:
        """Give an output the type and rank of a tensor."""
        if source and output:
            bound = self.add("NonZero", [source])  # of unknown size, so that no dimension is known
            ends = self.add("Reshape", [bound, self.integers(-1)])
            self.add("Slice", [source, ends, ends], output)


def _normalization(writer: _Writer) -> None:
    """(Skip)(Simplified)LayerNormalization: the output, and the sum with the skip connection, are as the input."""
    writer.like(writer.input(0), writer.output(0))
    if writer.node.op_type.startswith("Skip"):
        writer.like(writer.input(0), writer.output(3))


def _first(writer: _Writer) -> None:
    """Operators whose first output is as their first input."""
    writer.like(writer.input(0), writer.output(0))


def _group_query_attention(writer: _Writer) -> None:
    """GroupQueryAttention: output as the query; of packed q, k, v of (B, S, (heads + 2 kv) * size), the first heads."""
    query, heads, kv = writer.input(0), writer.attribute("num_heads"), writer.attribute("kv_num_heads")
    if writer.input(1) or not heads:
        writer.like(query, writer.output(0))
    else:
        split = writer.add("Reshape", [query, writer.integers(0, 0, heads + 2 * kv, -1)])
        parts = (writer.integers(0), writer.integers(heads), writer.integers(2))
        writer.add("Reshape", [writer.add("Slice", [split, *parts]), writer.integers(0, 0, -1)], writer.output(0))
    writer.ranked(writer.input(3), writer.output(1))
    writer.ranked(writer.input(4), writer.output(2))


def _multi_head_attention(writer: _Writer) -> None:
    """MultiHeadAttention: (B, S, hidden size of the values) for a query of rank 3; present keys and values."""
    if writer.input(1):
        writer.ranked(writer.input(0), writer.output(0))
    writer.ranked(writer.input(6), writer.output(1))
    writer.ranked(writer.input(7), writer.output(2))


def _matmul_nbits(writer: _Writer) -> None:
    """MatMulNBits: as MatMul with a (K, N) matrix of the type of the input."""
    sizes = writer.integers(writer.attribute("K"), writer.attribute("N"))
    matrix = writer.add("CastLike", [writer.add("ConstantOfShape", [sizes]), writer.input(0)])
    writer.add("MatMul", [writer.input(0), matrix], writer.output(0))


def _gather_block_quantized(writer: _Writer) -> None:
    """GatherBlockQuantized: as Gather of the dequantized table, whose type is that of the scales."""
    sizes = _table_sizes(writer)
    if sizes is None:
        return
    table = writer.add("CastLike", [writer.add("ConstantOfShape", [writer.integers(*sizes)]), writer.input(2)])
    axis = writer.attribute("gather_axis")
    writer.add("Gather", [table, writer.input(1)], writer.output(0), axis=axis)


def _table_sizes(writer: _Writer) -> list[int] | None:
    """Return the shape of the dequantized table: that of the data, unpacked; else the scales, times the block size."""
    data, scales = (writer.scope.sizes(writer.input(index)) for index in (0, 2))
    if data is not None:
        packed = writer.scope.constants[writer.input(0)].data_type == TensorProto.UINT8
        count = 8 // writer.attribute("bits", 4) if packed else 1
        return [*data[:-1], data[-1] * count]
    if scales is None or len(scales) < 2:
        return None
    axis = writer.attribute("quantize_axis", 1) % len(scales)
    block = writer.attribute("block_size", 128)
    return [size * block if at == axis else size for at, size in enumerate(scales)]


Rule = Callable[[_Writer], None]

RULES: Final[dict[str, Rule]] = {
    "SkipSimplifiedLayerNormalization": _normalization,
    "SkipLayerNormalization": _normalization,
    "SimplifiedLayerNormalization": _normalization,
    "RotaryEmbedding": _first,
    "Gelu": _first,
    "FastGelu": _first,
    "BiasGelu": _first,
    "QuickGelu": _first,
    "MoE": _first,
    "QMoE": _first,
    "GroupQueryAttention": _group_query_attention,
    "MultiHeadAttention": _multi_head_attention,
    "MatMulNBits": _matmul_nbits,
    "GatherBlockQuantized": _gather_block_quantized,
}
"""Rules by operator type: of onnxruntime's domain, and of those that it registers in ONNX's own."""


def _rule_of(node: NodeProto) -> Rule | None:
    """Return the rule of a node, or None if onnx can infer its outputs itself, or nobody can."""
    domain = domain_of(node)
    own = domain == CONTRIB or (not domain and node.op_type in RUNTIME_OPS)
    return RULES.get(node.op_type) if own else None

"""Insertion of integer nodes into a graph, in place of float nodes between pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from sbonnx.export.read import Codes
from sbonnx.export.sinks import Sink
from sbonnx.graph import Body, Graph, Node, Tensor, Variable, edit
from sbonnx.spec import Array

CONTRIB: Final = "com.microsoft"
"""Domain of onnxruntime's own operators."""


class Writer:
    """State of one conversion: used names, and the number of written nodes by op type."""

    def __init__(self, graph: Graph) -> None:
        self.names = edit.Names(graph)
        self.done: Counter[str] = Counter()

    def constant(self, body: Body, stem: str, value: Array) -> Tensor:
        """Add a constant."""
        made: Tensor = edit.add_constant(body, stem, value, self.names)
        return made

    def numbers(self, body: Body, codes: Codes | Sink) -> list[Tensor]:
        """Return scale and zero point as tensors: those of the Q or DQ node; an absent zero point is added."""
        node = codes.node if isinstance(codes, Codes) else codes.quantizers[0]
        if len(node.inputs) > 2 and not node.inputs[2].is_empty():
            return [node.inputs[1], node.inputs[2]]
        return [node.inputs[1], self.constant(body, f"{node.name}_zero_point", codes.zero)]

    def add(
        self,
        body: Body,
        node: Node,
        op: str,
        inputs: Sequence[Tensor],
        *,
        attrs: Mapping[str, Any] | None = None,
        domain: str | None = None,
        outputs: Sequence[Tensor] = (),
        kind: Any = np.float32,
    ) -> Tensor:
        """Add a node of `op` in place of `node`; return its output. Without `outputs`, a new one of type `kind`."""
        stem = f"{node.name}_{op}"
        outputs = list(outputs) or [Variable(self.names.fresh(f"{stem}_output"), np.dtype(kind))]
        edit.add_node(body, op, inputs, names=self.names, stem=stem, attrs=attrs, outputs=outputs).domain = domain
        self.done[op] += 1
        return outputs[0]

    def written(self, body: Body, sink: Sink) -> Tensor:
        """Return the tensor of codes for a new node to write, rewired so that all readers of `sink`'s codes read it."""
        first, *others = sink.quantizers
        tensor: Tensor = first.outputs[0]
        edit.replace_output(first, 0, Variable(self.names.fresh(f"{first.name}_replaced"), tensor.dtype, tensor.shape))
        for node in others:
            edit.replace_all_uses(node.outputs[0], tensor, graph=body)
        return tensor

    def given(self, node: Node, kind: Any) -> Tensor:
        """Detach and return the output of a node, for another node to write."""
        tensor: Tensor = node.outputs[0]
        spare = Variable(self.names.fresh(f"{node.name}_replaced"), np.dtype(kind), tensor.shape)
        edit.replace_output(node, 0, spare)
        return tensor

    def behind(self, body: Body, node: Node, index: int, codes: Codes) -> Tensor:
        """Return a new tensor of codes, followed by a DequantizeLinear that writes output `index` of `node`."""
        tensor: Tensor = node.outputs[index]
        stem = f"{tensor.name}_codes"
        made = Variable(self.names.fresh(stem), codes.zero.dtype, tensor.shape)
        edit.replace_output(node, index, Variable(self.names.fresh(f"{stem}_replaced"), tensor.dtype, tensor.shape))
        inputs = [made, *self.numbers(body, codes)]
        edit.add_node(
            body, "DequantizeLinear", inputs, names=self.names, stem=f"{stem}_DequantizeLinear", outputs=[tensor]
        )
        return made

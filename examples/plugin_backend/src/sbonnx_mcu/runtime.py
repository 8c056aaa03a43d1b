"""Execution of files, for verification: by the reference implementation of the onnx package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import helper, version_converter
from onnx.reference import ReferenceEvaluator

from sbonnx.backends import Entry, ExecutedLayer, Runtime
from sbonnx.errors import ModelError

OPSET = 21
"""The reference implementation has QuantizeLinear and DequantizeLinear from opset 19 on."""


class ReferenceSession:
    """Opened model, with the methods of an onnxruntime session that verification calls."""

    def __init__(self, model: Path | bytes, threads: int | None = None) -> None:
        try:
            self._model = onnx.load(model) if isinstance(model, Path) else onnx.load_from_string(model)
            self._evaluator = ReferenceEvaluator(_readable(self._model))
        except Exception as error:  # the evaluator raises any exception for an op that it does not have
            raise ModelError(f"the reference implementation refuses the model: {error}") from error

    def get_inputs(self) -> Sequence[Entry]:
        """Return the inputs; initializers of old files are none."""
        stored = {tensor.name for tensor in self._model.graph.initializer}
        return [_entry(value) for value in self._model.graph.input if value.name not in stored]

    def get_outputs(self) -> Sequence[Entry]:
        """Return the outputs."""
        return [_entry(value) for value in self._model.graph.output]

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Run the model and return the named outputs, or all."""
        return list(self._evaluator.run(None if names is None else list(names), dict(feeds)))

    def layers(self) -> list[ExecutedLayer]:
        """Return one kernel for each node; it computes between pairs in float, as the reference does."""
        nodes = self._model.graph.node
        return [ExecutedLayer(node.op_type, frozenset({node.name, *node.output}), integer=False) for node in nodes]

    def fallback(self) -> tuple[str, ...]:
        """Return no nodes: all run here."""
        return ()


def _readable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in an opset that the evaluator has, without the attributes that only record the bit width."""
    converted: onnx.ModelProto = version_converter.convert_version(model, OPSET)
    for node in converted.graph.node:
        for attribute in [one for one in node.attribute if one.name.startswith("__")]:
            node.attribute.remove(attribute)
    return converted


def _entry(value: onnx.ValueInfoProto) -> Entry:
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    name = {"float32": "float", "float64": "double"}.get(str(kind), str(kind))
    shape = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in value.type.tensor_type.shape.dim)
    return Entry(value.name, f"tensor({name})", shape)


REFERENCE = Runtime("onnx reference", lambda: None, ReferenceSession)

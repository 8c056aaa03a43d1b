"""Small Q/DQ models, built node by node, so that a test can seed one mistake."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.spec import Array

CHANNELS = 4


class Net:
    """A model in the making: input ``x`` (N, 4, 8, 8). Each method returns the name of the tensor that it made."""

    def __init__(self, shape: tuple[Any, ...] = ("N", CHANNELS, 8, 8), half: bool = False) -> None:
        self.float = TensorProto.FLOAT16 if half else TensorProto.FLOAT
        self.dtype = np.dtype(np.float16 if half else np.float32)
        self.inputs = [helper.make_tensor_value_info("x", self.float, list(shape))]
        self.nodes: list[onnx.NodeProto] = []
        self.stored: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(0)

    def keep(self, value: Any, kind: Any = np.float32) -> str:
        """A constant."""
        name = f"c{len(self.stored)}"
        self.stored.append(numpy_helper.from_array(np.asarray(value).astype(kind), name))
        return name

    def op(self, kind: str, *inputs: str, name: str = "", **attrs: Any) -> str:
        """A node."""
        name = name or f"{kind.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"{name}_out"], name, **attrs))
        return f"{name}_out"

    def pair(
        self, tensor: str, scale: Any = 0.05, zero: int = 0, kind: Any = "uint8", behind: Any = None, **attrs: Any
    ) -> str:
        """A QuantizeLinear and a DequantizeLinear, which has another scale where `behind` says so."""
        zero_point = self.keep(np.full(np.shape(scale), zero), kind)
        first = self.keep(scale, self.dtype)
        second = first if behind is None else self.keep(behind, self.dtype)
        codes = self.op("QuantizeLinear", tensor, first, zero_point, **attrs)
        return self.op("DequantizeLinear", codes, second, zero_point, **attrs)

    def codes(self, value: Array, scale: Any = 0.01, zero: Any = 0, kind: Any = "int8", axis: int = 0) -> str:
        """A constant behind a DequantizeLinear."""
        along: dict[str, Any] = {"axis": axis} if np.ndim(scale) else {}
        zero_point = np.broadcast_to(zero, np.shape(scale))
        numbers = [self.keep(scale, self.dtype), self.keep(zero_point, kind)]
        return self.op("DequantizeLinear", self.keep(value, kind), *numbers, **along)

    def weight(self, *shape: int, most: int = 60) -> Array:
        """Codes between -`most` and `most`, one of them `most`."""
        found = self.rng.integers(-most, most, shape)
        found.reshape(-1)[0] = most
        return found

    def bias(self, scale: Any = 0.0005, code: int = 100) -> str:
        """An int32 bias; the default scale is that of the default pair times that of the default weight."""
        values = np.broadcast_to(np.float32(scale), CHANNELS)
        return self.codes(np.full(CHANNELS, code), values, 0, "int32")

    def conv(self, x: str, w: str = "", *bias: str, **attrs: Any) -> str:
        """A convolution of 1 x 1 with per-channel int8 weights."""
        w = w or self.codes(self.weight(CHANNELS, CHANNELS, 1, 1), np.full(CHANNELS, 0.01))
        return self.op("Conv", x, w, *bias, **attrs)

    def done(self, *outputs: str) -> onnx.ModelProto:
        """The model."""
        results = [helper.make_tensor_value_info(name, self.float, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", self.inputs, results, self.stored)
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
        return onnx.shape_inference.infer_shapes(model)

"""Whisper out of CTranslate2's files as ONNX."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from io import BytesIO
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES: Final = (np.float32, np.int8, np.int16, np.int32, np.float16)
"""Types of values by their number in the file; it has bfloat16 as well."""

OPSET: Final = 20
"""The first that has Gelu."""


def variables(content: bytes) -> dict[str, Any]:
    """Return the arrays of a file of version 6, halves as float32."""
    stream = BytesIO(content)

    def number(form: str) -> int:
        (value,) = struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))
        return int(value)

    def text() -> str:
        return stream.read(number("H"))[:-1].decode()

    version, _, _ = number("I"), text(), number("I")
    assert version == 6, version
    arrays: dict[str, Any] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = np.dtype(TYPES[number("B")]), number("I")
        values = np.frombuffer(stream.read(size), kind).reshape(shape)
        arrays[name] = values.astype(np.float32) if kind == np.float16 else values
    return arrays


class _Builder:
    """Nodes of a graph, with the arrays that they read."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Any] = {}

    def constant(self, name: str, transposed: bool = False) -> str:
        """Return the name of an array, which becomes an initializer."""
        values = self._arrays[name]
        self.constants[name] = np.ascontiguousarray(values.T if transposed else values)
        return name

    def numbers(self, *values: int) -> str:
        """Return the name of an initializer of integers."""
        name = "numbers_" + "_".join(map(str, values))
        self.constants[name] = np.array(values, np.int64)
        return name

    def add(self, operator: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Append a node and return its output."""
        name = name or f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
        return name

    def dense(self, x: str, layer: str) -> str:
        product = self.add("MatMul", x, self.constant(f"{layer}/weight", transposed=True))
        return self.add("Add", product, self.constant(f"{layer}/bias"))

    def norm(self, x: str, layer: str) -> str:
        return self.add("LayerNormalization", x, *(self.constant(f"{layer}/{name}") for name in ("gamma", "beta")))

    def first(self, values: str, x: str, axes: tuple[int, ...]) -> str:
        """Return as many of the first values along axes as x has steps."""
        steps = self.add("Shape", x, start=1, end=2)
        ends = self.add("Concat", *[steps] * len(axes), axis=0) if len(axes) > 1 else steps
        return self.add("Slice", values, self.numbers(*(0 for _ in axes)), ends, self.numbers(*axes))

    def heads(self, x: str, count: int) -> str:
        return self.add("Transpose", self.add("Reshape", x, self.numbers(0, 0, count, -1)), perm=[0, 2, 1, 3])

    def split(self, x: str, parts: int) -> list[str]:
        names = [f"{x}_{part}" for part in range(parts)]
        self.nodes.append(helper.make_node("Split", [x], names, f"{x}_split", axis=2, num_outputs=parts))
        return names

    def attention(self, x: str, layer: str, count: int, memory: str = "", mask: str = "") -> str:
        """Return x plus the attention of its normalized values to themselves, or to a memory."""
        inner = self.norm(x, f"{layer}/layer_norm")
        if memory:
            queries = self.dense(inner, f"{layer}/linear_0")
            keys, values = self.split(self.dense(memory, f"{layer}/linear_1"), 2)
        else:
            queries, keys, values = self.split(self.dense(inner, f"{layer}/linear_0"), 3)
        width = self._arrays[f"{layer}/layer_norm/gamma"].size // count
        self.constants["scale"] = np.array(width**-0.5, np.float32)
        queries, keys, values = (self.heads(part, count) for part in (queries, keys, values))
        scores = self.add("MatMul", self.add("Mul", queries, "scale"), self.add("Transpose", keys, perm=[0, 1, 3, 2]))
        shares = self.add("Softmax", self.add("Add", scores, mask) if mask else scores, axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", shares, values), perm=[0, 2, 1, 3])
        joined = self.add("Reshape", mixed, self.numbers(0, 0, -1))
        return self.add("Add", x, self.dense(joined, f"{layer}/linear_{2 if memory else 1}"))

    def feed_forward(self, x: str, layer: str) -> str:
        """Return x plus two dense layers of its normalized values."""
        inner = self.add("Gelu", self.dense(self.norm(x, f"{layer}/layer_norm"), f"{layer}/linear_0"))
        return self.add("Add", x, self.dense(inner, f"{layer}/linear_1"))


def whisper(content: bytes) -> bytes:
    """Return Whisper as a model of ``mel`` (1, bands, frames) and ``tokens`` (1, N) with ``logits`` (1, N, tokens).

    The encoder passes ``memory`` (1, frames / 2, width) to the decoder.
    """
    arrays = variables(content)
    length = len(arrays["decoder/position_encodings/encodings"])
    arrays["mask"] = np.triu(np.full((length, length), -1e9, np.float32), 1)
    build, layers = _Builder(arrays), {side: _count(arrays, side) for side in ("encoder", "decoder")}
    x = "mel"
    for number, stride in ((1, 1), (2, 2)):
        weights = [build.constant(f"encoder/conv{number}/{kind}") for kind in ("weight", "bias")]
        x = build.add("Gelu", build.add("Conv", x, *weights, pads=[1, 1], strides=[stride]))
    x = build.add("Transpose", x, perm=[0, 2, 1])
    x = build.add("Add", x, build.first(build.constant("encoder/position_encodings/encodings"), x, (0,)))
    for layer in range(layers["encoder"]):
        x = build.attention(x, f"encoder/layer_{layer}/self_attention", int(arrays["encoder/num_heads"]))
        x = build.feed_forward(x, f"encoder/layer_{layer}/ffn")
    memory = build.norm(x, "encoder/layer_norm")
    build.nodes[-1].output[0] = memory = "memory"
    table = build.constant("decoder/embeddings/weight")
    x = build.add("Gather", table, "tokens")
    x = build.add("Add", x, build.first(build.constant("decoder/position_encodings/encodings"), x, (0,)))
    mask = build.first(build.constant("mask"), x, (0, 1))
    for layer in range(layers["decoder"]):
        count = int(arrays["decoder/num_heads"])
        x = build.attention(x, f"decoder/layer_{layer}/self_attention", count, mask=mask)
        x = build.attention(x, f"decoder/layer_{layer}/attention", count, memory=memory)
        x = build.feed_forward(x, f"decoder/layer_{layer}/ffn")
    x = build.norm(x, "decoder/layer_norm")
    build.add("MatMul", x, build.add("Transpose", table, perm=[1, 0]), name="logits")
    bands, (tokens, width) = arrays["encoder/conv1/weight"].shape[1], arrays["decoder/embeddings/weight"].shape
    edges: list[tuple[str, int, list[Any]]] = [
        ("mel", TensorProto.FLOAT, [1, bands, "frames"]),
        ("tokens", TensorProto.INT64, [1, "N"]),
        ("logits", TensorProto.FLOAT, [1, "N", tokens]),
        ("memory", TensorProto.FLOAT, [1, "half", width]),
    ]
    values = [helper.make_tensor_value_info(*edge) for edge in edges]
    tensors = [numpy_helper.from_array(array, name) for name, array in build.constants.items()]
    graph = helper.make_graph(build.nodes, "whisper", values[:2], values[2:3], tensors, value_info=values[3:])
    opsets = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opsets)
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=version).SerializeToString())


def _count(arrays: Mapping[str, Any], side: str) -> int:
    return len({name.split("/")[1] for name in arrays if name.startswith(f"{side}/layer_") and "/ffn/" in name})

"""Models with batch norms of every kind, whose statistics are those of the data that come with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx.spec import Array
from tests.support.models import model, run

ZOO = """
agraph (float[N,3,12,12] x) => (float[N,5] y) {
    c1 = Conv <pads = [1,1,1,1]> (x, w1, b1)
    n1 = BatchNormalization (c1, g1, t1, m1, v1)
    r1 = Relu (n1)
    c2 = Conv <group = 8, pads = [1,1,1,1]> (r1, w2)
    n2 = BatchNormalization (c2, g2, t2, m2, v2)
    s2 = Mul (n2, k2)
    r2 = Relu (s2)
    c3 = Conv <group = 2> (r2, w3, b3)
    n3 = BatchNormalization (c3, g3, t3, m3, v3)
    a3 = Add (n3, r1)
    n4 = BatchNormalization <epsilon = 0.001> (a3, g4, t4, m4, v4)
    r4 = Relu (n4)
    c5 = ConvTranspose <strides = [2,2]> (r4, w5, b5)
    n5 = BatchNormalization (c5, g5, t5, m5, v5)
    r5 = LeakyRelu (n5)
    p = GlobalAveragePool (r5)
    f = Flatten (p)
    c6 = Gemm <transB = 1> (f, w6)
    n6 = BatchNormalization (c6, g6, t6, m6, v6)
    r6 = Relu (n6)
    y = Gemm <transB = 1> (r6, w7, b7)
}"""
"""Conv with bias, depthwise without, grouped, a residual sum that is normalised by itself, ConvTranspose, Gemm."""

SHAPES: dict[str, Any] = {
    "w1": (8, 3, 3, 3),
    "b1": 8,
    "w2": (8, 1, 3, 3),
    "k2": (8, 1, 1),
    "w3": (8, 4, 1, 1),
    "b3": 8,
    "w5": (8, 6, 3, 3),
    "b5": 6,
    "w6": (8, 6),
    "w7": (5, 8),
    "b7": 5,
}

NORMS = {"1": 8, "2": 8, "3": 8, "4": 8, "5": 6, "6": 8}
"""Batch norms by the end of their names, and their channels."""


def images(count: int, seed: int = 5) -> Array:
    noise = np.random.default_rng(seed).standard_normal((count, 3, 12, 12))
    return np.asarray(noise + 0.5, np.float32)


def zoo(x: Array, *, dead: bool = False) -> onnx.ModelProto:
    """The model; mean and variance of each batch norm are those of what it reads on `x`.

    Some gammas are negative. `dead`: one of gamma 0, one whose input is always 0.
    """
    rng = np.random.default_rng(2)
    weights: dict[str, Any] = dict(SHAPES)
    for end, channels in NORMS.items():
        gamma = rng.uniform(0.5, 1.5, channels) * np.where(rng.uniform(size=channels) < 0.3, -1, 1)
        weights |= {f"g{end}": gamma.astype(np.float32), f"t{end}": channels}
        weights |= {f"m{end}": np.zeros(channels, np.float32), f"v{end}": np.ones(channels, np.float32)}
    if dead:
        weights["g1"][2] = 0.0
        weights["w3"] = rng.standard_normal(SHAPES["w3"]).astype(np.float32)
        weights["w3"][5] = 0.0
    return settled(model(ZOO, **weights), x)


def settled(proto: onnx.ModelProto, x: Array) -> onnx.ModelProto:
    """`proto` with the statistics of its batch norms taken, one after the other, from what they read on `x`."""
    for node in [node for node in proto.graph.node if node.op_type == "BatchNormalization"]:
        read = inner(proto, x, node.input[0])
        axes = tuple(axis for axis in range(read.ndim) if axis != 1)
        put(proto, node.input[3], read.mean(axis=axes))
        put(proto, node.input[4], read.var(axis=axes))
    return proto


def put(proto: onnx.ModelProto, name: str, values: Array) -> None:
    """In place. New values of an initializer."""
    (held,) = [tensor for tensor in proto.graph.initializer if tensor.name == name]
    held.CopyFrom(numpy_helper.from_array(values.astype(np.float32), name))


def inner(proto: onnx.ModelProto, x: Array, *names: str) -> Array:
    """An inner tensor of a model as onnxruntime computes it, nothing optimised."""
    shown = onnx.ModelProto()
    shown.CopyFrom(proto)
    del shown.graph.output[:]
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    values: Array = run(shown, {"x": x})[names[0]]
    return values

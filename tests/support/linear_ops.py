"""Single linear nodes of every kind, drawn at random, and what onnxruntime computes for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from sbonnx.linear.im2col import Geometry, geometry_of
from sbonnx.linear.layer import LinearLayer
from sbonnx.spec import Array


def layer_of(op: str, attributes: Mapping[str, Any], shape: tuple[int, ...]) -> LinearLayer:
    """The layer of a weight, which has one."""
    layer = LinearLayer.of_shape(op, attributes, shape)
    assert isinstance(layer, LinearLayer)
    return layer


@dataclass(frozen=True)
class Linear:
    """A node that reads `reads` (a shape) and a constant of shape `weight`."""

    op: str
    reads: tuple[int, ...]
    weight: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> LinearLayer:
        return layer_of(self.op, self.attributes, self.weight)

    @property
    def geometry(self) -> Geometry:
        return geometry_of(self.layout, self.attributes)

    def input(self, seed: int) -> Array:
        """Random, with a mean."""
        return np.random.default_rng(seed).normal(0.3, 1.0, self.reads).astype(np.float32)

    def constant(self, seed: int) -> Array:
        return np.random.default_rng(seed).normal(size=self.weight).astype(np.float32)

    def run(self, x: Array, weight: Array) -> Array:
        """The node in onnxruntime."""
        ort = pytest.importorskip("onnxruntime")
        kind = helper.np_dtype_to_tensor_dtype(x.dtype)
        graph = helper.make_graph(
            [helper.make_node(self.op, ["x", "w"], ["y"], **self.attributes)],
            "one",
            [helper.make_tensor_value_info("x", kind, x.shape)],
            [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
            [numpy_helper.from_array(weight, "w")],
        )
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": x})[0])

    def by_output(self, y: Array) -> Array:
        """An output summed to one number for each output of each group, (G, O)."""
        y, layout = y.astype(np.float64), self.layout
        if self.op in ("Conv", "ConvTranspose"):
            return np.asarray(y.sum(axis=(0, *range(2, y.ndim))).reshape(layout.groups, layout.outputs))
        if self.op == "Gemm":
            return np.asarray(y.sum(axis=0)[None])
        y = y[..., None, :] if len(self.reads) == 1 else y
        batch = y.shape[:-2]
        weight = (1,) * (len(batch) - len(self.weight[:-2])) + self.weight[:-2]
        alone = tuple(axis for axis, size in enumerate(weight) if size == 1)
        return np.asarray(
            y.reshape(*batch, -1, layout.outputs).sum(axis=(*alone, len(batch))).reshape(layout.groups, -1)
        )


FIXED: dict[str, Linear] = {
    "conv": Linear("Conv", (2, 4, 9, 7), (6, 4, 3, 3), {"pads": [1, 1, 1, 1]}),
    "pointwise": Linear("Conv", (2, 4, 5, 7), (6, 4, 1, 1)),
    "pointwise, strides": Linear("Conv", (2, 4, 5, 7), (6, 4, 1, 1), {"strides": [2, 3]}),
    "depthwise": Linear("Conv", (2, 6, 9, 7), (6, 1, 3, 3), {"pads": [1, 1, 1, 1], "group": 6, "strides": [2, 1]}),
    "upper": Linear("Conv", (1, 2, 9, 8), (3, 2, 4, 3), {"auto_pad": "SAME_UPPER", "strides": [2, 3]}),
    "lower": Linear("Conv", (1, 2, 9, 8), (3, 2, 4, 3), {"auto_pad": "SAME_LOWER", "strides": [2, 3]}),
    "valid": Linear("Conv", (1, 2, 9), (3, 2, 4), {"auto_pad": "VALID"}),
    "volume": Linear("Conv", (1, 2, 4, 5, 6), (4, 1, 3, 2, 3), {"pads": [1] * 6, "group": 2}),
    "far padding": Linear("Conv", (1, 2, 2, 2), (3, 2, 3, 3), {"pads": [4, 3, 4, 5], "dilations": [2, 1]}),
    "transposed": Linear("ConvTranspose", (2, 4, 5, 6), (4, 3, 4, 4), {"strides": [2, 2], "pads": [1, 1, 1, 1]}),
    "transposed, upper": Linear(
        "ConvTranspose", (1, 2, 5, 6), (2, 3, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_UPPER"}
    ),
    "transposed, lower": Linear(
        "ConvTranspose", (1, 2, 5, 6), (2, 3, 3, 4), {"strides": [2, 2], "auto_pad": "SAME_LOWER"}
    ),
    "transposed, to a shape": Linear(
        "ConvTranspose", (1, 2, 5, 6), (2, 3, 3, 4), {"strides": [2, 2], "output_shape": [9, 13]}
    ),
    "transposed, holes": Linear("ConvTranspose", (1, 2, 4), (2, 3, 2), {"strides": [4]}),
    "transposed, all cut off": Linear("ConvTranspose", (1, 1, 2), (1, 1, 1), {"strides": [2], "pads": [1, 1]}),
    "gemm": Linear("Gemm", (5, 6), (6, 4), {"alpha": 0.5}),
    "gemm, transposed": Linear("Gemm", (6, 5), (4, 6), {"transA": 1, "transB": 1}),
    "matmul": Linear("MatMul", (2, 3, 5, 6), (6, 4)),
    "matmul, vector": Linear("MatMul", (6,), (6, 4)),
    "matmul, batches": Linear("MatMul", (2, 3, 5, 6), (3, 6, 4)),
    "matmul, more batches": Linear("MatMul", (3, 5, 6), (2, 1, 6, 4)),
    "matmul, one for all": Linear("MatMul", (5, 6), (2, 3, 6, 4)),
}
"""The corners of every kind; `linear_ops` draws what lies between."""


@st.composite
def convolutions(draw: st.DrawFn) -> Linear:
    """Conv: any dimension, strides, dilations, padding and groups."""
    space = draw(st.integers(1, 3))
    several = st.lists(st.integers(1, 3), min_size=space, max_size=space)
    kernel, strides = draw(several), draw(several)
    auto_pad = draw(st.sampled_from(["NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    dilations = draw(several) if auto_pad in ("NOTSET", "VALID") else [1] * space
    attributes: dict[str, Any] = {"strides": strides, "dilations": dilations, "auto_pad": auto_pad}
    if auto_pad == "NOTSET":
        attributes["pads"] = draw(st.lists(st.integers(0, 2), min_size=2 * space, max_size=2 * space))
    windows = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    sizes = [window + draw(st.integers(0, 4)) for window in windows]
    groups, channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    shape = (draw(st.integers(1, 2)), groups * channels, *sizes)
    return Linear("Conv", shape, (groups * outputs, channels, *kernel), attributes | {"group": groups})


@st.composite
def transposed(draw: st.DrawFn) -> Linear:
    """ConvTranspose: likewise, with output padding."""
    space = draw(st.integers(1, 3))
    several = st.lists(st.integers(1, 3), min_size=space, max_size=space)
    kernel, strides, dilations = draw(several), draw(several), draw(several)
    sizes = draw(st.lists(st.integers(2, 4), min_size=space, max_size=space))
    more = [draw(st.integers(0, stride - 1)) for stride in strides]  # what onnxruntime takes; ONNX: or the dilation
    whole = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(sizes, strides, kernel, dilations, strict=True)]
    pads = [draw(st.integers(0, min(2, (size - 1) // 2))) for size in (*whole, *whole)]
    groups, channels, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    attributes = {"strides": strides, "dilations": dilations, "pads": pads, "output_padding": more, "group": groups}
    shape = (draw(st.integers(1, 2)), groups * channels, *sizes)
    return Linear("ConvTranspose", shape, (groups * channels, outputs, *kernel), attributes)


@st.composite
def products(draw: st.DrawFn) -> Linear:
    """Gemm and MatMul."""
    rows, inputs, outputs = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        trans_a, trans_b = draw(st.booleans()), draw(st.booleans())
        reads = (inputs, rows) if trans_a else (rows, inputs)
        weight = (outputs, inputs) if trans_b else (inputs, outputs)
        attributes = {"transA": int(trans_a), "transB": int(trans_b), "alpha": draw(st.sampled_from([1.0, 0.5, -2.0]))}
        return Linear("Gemm", reads, weight, attributes)
    batch = draw(st.lists(st.integers(1, 3), max_size=3))
    reads_batch = [size if draw(st.booleans()) else 1 for size in batch][draw(st.integers(0, len(batch))) :]
    weight_batch = [size if draw(st.booleans()) else 1 for size in batch][draw(st.integers(0, len(batch))) :]
    return Linear("MatMul", (*reads_batch, rows, inputs), (*weight_batch, inputs, outputs))


def linear_ops() -> st.SearchStrategy[Linear]:
    """Any of them."""
    return st.one_of(convolutions(), transposed(), products())

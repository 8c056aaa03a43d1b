"""Tiny Q/DQ graphs that show the rules of OpenVINO's CPU: each with the op that runs in integers, or does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from tests.lint.qdq_models import Net

C: Final = 16
"""Channels."""


@dataclass(frozen=True)
class Shown:
    """A graph, and the op that it is about.

    Attributes:
        text: row of docs/openvino.md.
        make: builds the model.
        node: output of the op.
        integer: whether it runs in integers; None: OpenVINO does not compile the model.
    """

    text: str
    make: Callable[[], onnx.ModelProto]
    node: str
    integer: bool | None


def net() -> Net:
    return Net((1, C, 8, 8))


def weight(
    it: Net, *shape: int, axis: int = 0, channels: bool = True, zero: Any = 0, kind: str = "int8", offset: int = 0
) -> str:
    """Codes, with one scale a channel or one for all."""
    count = shape[axis]
    scale = np.linspace(0.004, 0.008, count).astype(np.float32) if channels else np.float32(0.006)
    return it.codes(it.weight(*shape) + offset, scale, zero, kind, axis)


def conv(
    it: Net, x: str, name: str, *, inputs: int = C, outputs: int = C, kernel: int = 3, w: str = "", **at: Any
) -> str:
    """A named convolution that keeps the size."""
    w = w or weight(it, outputs, inputs // int(at.get("group", 1)), kernel, kernel)
    bias = it.keep(np.linspace(-1, 1, outputs))
    return it.op("Conv", x, w, bias, name=name, pads=[kernel // 2] * 4, **at)


def single(**pair: Any) -> Callable[[], onnx.ModelProto]:
    """Pair, convolution."""

    def make() -> onnx.ModelProto:
        it = net()
        return it.done(conv(it, it.pair("x", **pair), "op"))

    return make


def weighted(**how: Any) -> Callable[[], onnx.ModelProto]:
    """Pair, convolution with a weight of some kind."""

    def make() -> onnx.ModelProto:
        it = net()
        x = it.pair("x", zero=128)
        return it.done(conv(it, x, "op", w=weight(it, C, C, 3, 3, **how)))

    return make


def packed(*, cast: bool) -> Callable[[], onnx.ModelProto]:
    """Pair, convolution with an int4 weight, after a Cast to int8 or not."""

    def make() -> onnx.ModelProto:
        it = net()
        codes = it.rng.integers(-8, 8, (C, C, 3, 3))
        it.stored.append(onnx.helper.make_tensor("codes", onnx.TensorProto.INT4, codes.shape, codes.ravel().tolist()))
        w = it.op("Cast", "codes", to=onnx.TensorProto.INT8) if cast else "codes"
        w = it.op("DequantizeLinear", w, it.keep(np.linspace(0.04, 0.08, C)), axis=0)
        return it.done(conv(it, it.pair("x", zero=128), "op", w=w))

    return make


def grouped(groups: int) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        it = net()
        return it.done(conv(it, it.pair("x", zero=128), "op", group=groups))

    return make


def transposed(**pair: Any) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        it = net()
        w = weight(it, C, C, 2, 2, axis=1)
        return it.done(it.op("ConvTranspose", it.pair("x", **pair), w, name="op", strides=[2, 2]))

    return make


def product(*, axis: int = 1, zero: int = 0, channels: bool = True, pair: bool = True) -> Callable[[], onnx.ModelProto]:
    """MatMul of 32 rows with a constant of 64 x 64."""

    def make() -> onnx.ModelProto:
        it = Net((1, 32, 64))
        x = it.pair("x", zero=128) if pair else "x"
        w = weight(it, 64, 64, axis=axis, zero=zero, channels=channels)
        return it.done(it.op("MatMul", x, w, name="op"))

    return make


def of_activations(one: dict[str, Any], other: dict[str, Any]) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        it = Net((1, 4, 32, 32))
        turned = it.op("Transpose", "x", perm=[0, 1, 3, 2])
        return it.done(it.op("MatMul", it.pair("x", **one), it.pair(turned, **other), name="op"))

    return make


def behind(*ops: tuple[str, dict[str, Any]]) -> Callable[[], onnx.ModelProto]:
    """Convolution, activations, pair, convolution: the activations are fused into the first."""

    def make() -> onnx.ModelProto:
        it = net()
        y = conv(it, it.pair("x", zero=128), "op")
        for kind, attributes in ops:
            y = it.op(kind, y, **attributes)
        return it.done(conv(it, it.pair(y, zero=20), "last", kernel=1))

    return make


def concat(one: float, other: float, *, last: float | None = None, groups: int = 1) -> Callable[[], onnx.ModelProto]:
    """Two convolutions, pairs of two scales, Concat, [pair,] the convolution that the graph is about."""

    def make() -> onnx.ModelProto:
        it = net()
        x = it.pair("x", zero=128)
        parts = [it.pair(conv(it, x, name), scale, 128) for name, scale in (("left", one), ("right", other))]
        y = it.op("Concat", *parts, axis=1, name="joined")
        y = y if last is None else it.pair(y, last, 128)
        return it.done(conv(it, y, "op", inputs=2 * C, outputs=2 * C if groups > 1 else C, group=groups))

    return make


def between(kind: str, *, before: bool = True, after: bool = False, **attributes: Any) -> Callable[[], onnx.ModelProto]:
    """Convolution, [pair,] op, [pair,] convolution."""

    def make() -> onnx.ModelProto:
        it = net()
        y = conv(it, it.pair("x", zero=128), "first")
        y = it.pair(y, zero=128) if before else y
        extra = ["", it.keep(np.array([1, 1, 2, 2]))] if kind == "Resize" else []
        y = it.op(kind, y, *extra, name="op", **attributes)
        y = it.pair(y, zero=128) if after else y
        return it.done(conv(it, y, "last", kernel=1) if before or after else y)

    return make


def residual(*, first: bool, second: bool) -> Callable[[], onnx.ModelProto]:
    """Two convolutions, pairs on none, one or both, Add, pair, convolution."""

    def make() -> onnx.ModelProto:
        it = net()
        x = it.pair("x", zero=128)
        one, other = conv(it, x, "left"), conv(it, x, "right")
        y = it.op(
            "Add", it.pair(one, zero=128) if first else one, it.pair(other, zero=128) if second else other, name="op"
        )
        return it.done(conv(it, it.pair(y, zero=128), "last", kernel=1))

    return make


def softmax() -> onnx.ModelProto:
    it = net()
    return it.done(it.op("Softmax", it.pair("x", zero=128), name="op", axis=1))


def recurrent(*, quantized: bool) -> Callable[[], onnx.ModelProto]:
    def make() -> onnx.ModelProto:
        it = Net((8, 1, 32))
        shapes = [(1, 256, 32), (1, 256, 64)]
        parts = [weight(it, *shape, axis=1) if quantized else it.keep(it.rng.normal(0, 0.1, shape)) for shape in shapes]
        x = it.pair("x", zero=128) if quantized else "x"
        it.nodes.append(onnx.helper.make_node("LSTM", [x, *parts], ["op_out"], "op", hidden_size=64))
        return it.done("op_out")

    return make


def blocks(bits: int, size: int) -> Callable[[], onnx.ModelProto]:
    """MatMul of one row with a constant of 256 x 64 in blocks."""

    def make() -> onnx.ModelProto:
        it = Net((1, 256))
        kind = onnx.TensorProto.INT4 if bits == 4 else onnx.TensorProto.INT8
        codes = it.rng.integers(-(1 << bits - 1), 1 << bits - 1, (256, 64))
        it.stored.append(onnx.helper.make_tensor("codes", kind, codes.shape, codes.ravel().tolist()))
        scale = it.keep(it.rng.uniform(0.005, 0.01, (256 // size, 64)))
        w = it.op("DequantizeLinear", "codes", scale, axis=0, block_size=size)
        return it.done(it.op("MatMul", "x", w, name="op"))

    return make


NEAREST: Final[dict[str, Any]] = {
    "mode": "nearest",
    "coordinate_transformation_mode": "asymmetric",
    "nearest_mode": "floor",
}
POOL: Final[dict[str, Any]] = {"kernel_shape": [2, 2], "strides": [2, 2]}
I8: Final[dict[str, Any]] = {"kind": "int8"}

SHOWN: Final[dict[str, Shown]] = {
    "u8": Shown("uint8 activations with any zero point", single(zero=100), "op_out", True),
    "i8": Shown("int8 activations, zero point 0", single(kind="int8"), "op_out", True),
    "i8 zero": Shown("int8 activations with a zero point", single(kind="int8", zero=5), "op_out", True),
    "u16": Shown("uint16 activations", single(kind="uint16", zero=32768, scale=1e-4), "op_out", False),
    "channels": Shown("int8 weights, one scale a channel", weighted(), "op_out", True),
    "tensor": Shown("int8 weights, one scale", weighted(channels=False), "op_out", True),
    "weight zero": Shown("int8 weights with a zero point", weighted(zero=3), "op_out", False),
    "weight u8": Shown("uint8 weights, zero point 128", weighted(zero=128, kind="uint8", offset=128), "op_out", False),
    "weight int4": Shown("int4 weights, read by the DequantizeLinear", packed(cast=False), "op_out", False),
    "weight cast": Shown("int4 weights, a Cast to int8 before the DequantizeLinear", packed(cast=True), "op_out", True),
    "depthwise": Shown("depthwise convolutions", grouped(C), "op_out", True),
    "grouped": Shown("grouped convolutions", grouped(4), "op_out", True),
    "transposed": Shown("ConvTranspose, input uint8 with zero point 0", transposed(zero=0), "op_out", True),
    "transposed i8": Shown("ConvTranspose, input int8 with zero point 0", transposed(kind="int8"), "op_out", True),
    "transposed zero": Shown("ConvTranspose, input with a zero point", transposed(zero=128), "op_out", False),
    "product": Shown("MatMul with a constant, one scale a column", product(), "op_out", True),
    "product tensor": Shown("MatMul with a constant, one scale", product(channels=False), "op_out", True),
    "product zero": Shown("MatMul, weight with a zero point", product(zero=5), "op_out", False),
    "activations i8": Shown("MatMul of two activations, int8, zero point 0", of_activations(I8, I8), "op_out", True),
    "activations u8": Shown(
        "MatMul of two activations, uint8 with a zero point",
        of_activations({"zero": 128}, {"zero": 128}),
        "op_out",
        False,
    ),
    "relu": Shown("Relu before the pair", behind(("Relu", {})), "op_out", True),
    "leaky": Shown("LeakyRelu before the pair", behind(("LeakyRelu", {"alpha": 0.1})), "op_out", True),
    "hardswish": Shown("HardSwish before the pair", behind(("HardSwish", {})), "op_out", True),
    "concat same": Shown("Concat of inputs with one scale", concat(0.05, 0.05), "op_out", True),
    "concat scales": Shown("Concat of inputs with two scales", concat(0.05, 0.03), "op_out", False),
    "concat behind": Shown(
        "Concat of inputs with two scales, pair behind it", concat(0.05, 0.03, last=0.05), "op_out", True
    ),
    "concat depthwise": Shown(
        "Concat of inputs with two scales, depthwise convolution behind it",
        concat(0.05, 0.03, groups=2 * C),
        "op_out",
        True,
    ),
    "max": Shown("MaxPool behind a pair", between("MaxPool", **POOL), "op_out", True),
    "max before": Shown("MaxPool before a pair", between("MaxPool", before=False, after=True, **POOL), "op_out", False),
    "average": Shown("AveragePool between pairs", between("AveragePool", after=True, **POOL), "op_out", True),
    "average before": Shown(
        "AveragePool before a pair", between("AveragePool", before=False, after=True, **POOL), "op_out", False
    ),
    "global": Shown("GlobalAveragePool between pairs", between("GlobalAveragePool", after=True), "op_out", True),
    "nearest": Shown("nearest Resize behind a pair", between("Resize", **NEAREST), "op_out", True),
    "linear": Shown("linear Resize between pairs", between("Resize", after=True, mode="linear"), "op_out", False),
    "add": Shown(
        "Add, both inputs between pairs: fused into a convolution", residual(first=True, second=True), "op_out", True
    ),
    "softmax": Shown("Softmax behind a pair", softmax, "op_out", False),
    "recurrent": Shown("LSTM with float weights", recurrent(quantized=False), "op_out", False),
    "recurrent weights": Shown(
        "LSTM with dequantized weights, in a model with activation pairs", recurrent(quantized=True), "op_out", None
    ),
    "blocks 4": Shown("MatMul, int4 weight in blocks of 64, float input", blocks(4, 64), "op_out", False),
    "blocks 8": Shown("MatMul, int8 weight in blocks of 128, float input", blocks(8, 128), "op_out", False),
}
"""Graphs by name. Weight-only products compute in float, and read the codes: see `reads_codes` in the tests."""

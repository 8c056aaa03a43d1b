"""Tiny Q/DQ graphs that show the rules of OpenVINO's CPU: each with the op that runs in integers, or does not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.system.cpu import target_cpu
from tests.support.qdq_models import Net

IS_AMX: Final = target_cpu().name == "amx"
AMX: Final = "on a CPU with AMX" if IS_AMX else "on a CPU without AMX"

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
        wrong: it runs, with other results than the file describes.
    """

    text: str
    make: Callable[[], onnx.ModelProto]
    node: str
    integer: bool | None
    wrong: bool = False


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


def recurrent(kind: str = "LSTM", *, zero: int | None, data: bool = True, **attributes: Any) -> Callable[[], Any]:
    """LSTM or GRU with float weights (`zero` None), or with dequantized ones and a pair on its input."""

    def make() -> onnx.ModelProto:
        it = Net((16, 1, 32))
        gates = {"LSTM": 4, "GRU": 3}[kind]
        shapes = [(1, gates * 64, 32), (1, gates * 64, 64)]
        floats = zero is None
        values = [it.rng.normal(0, 1 / np.sqrt(shape[-1]), shape) for shape in shapes]
        scales = [np.abs(part).max((0, 2)).astype(np.float32) / 127 for part in values]
        parts = [
            it.keep(part) if floats else it.codes(np.rint(part / scale[:, None]), scale, 0, "int8", 1)
            for part, scale in zip(values, scales, strict=True)
        ]
        x = "x" if zero is None else it.pair("x", 1 / 127, zero, "int8" if zero == 0 else "uint8")
        it.nodes.append(
            onnx.helper.make_node(kind, [x if data else "x", *parts], ["op_out"], "op", hidden_size=64, **attributes)
        )
        return it.done("op_out") if data or zero is None else it.done("op_out", it.op("Sin", x))

    return make


def normalized() -> onnx.ModelProto:
    it = Net((1, 32, 64))
    x = it.pair("x", zero=128)
    return it.done(it.op("LayerNormalization", x, it.keep(np.ones(64)), it.keep(np.zeros(64)), name="op"))


def attention(*, pairs: bool) -> Callable[[], onnx.ModelProto]:
    """Softmax(x x') x, with int8 pairs at both factors of both products or without pairs."""

    def make() -> onnx.ModelProto:
        it = Net((1, 4, 32, 32))

        def factor(tensor: str, scale: float = 0.05) -> str:
            return it.pair(tensor, scale, 0, "int8") if pairs else tensor

        turned = it.op("Transpose", "x", perm=[0, 1, 3, 2])
        scores = it.op("Mul", it.op("MatMul", factor("x"), factor(turned)), it.keep(0.17))
        shares = it.op("Softmax", scores, name="shares", axis=-1)
        return it.done(it.op("MatMul", factor(shares, 1 / 127), factor("x"), name="op"))

    return make


def read_twice(kind: str) -> Callable[[], onnx.ModelProto]:
    """Convolution that is read by a convolution behind a pair, and by a float op, behind that pair, or by another."""

    def make() -> onnx.ModelProto:
        it = net()
        y = it.op("Relu", conv(it, it.pair("x", zero=128), "op"))
        pair = it.pair(y, 0.05, 20)
        last = conv(it, pair, "last", kernel=1)
        if kind == "scales":
            return it.done(last, conv(it, it.pair(y, 0.03, 10), "other", kernel=1))
        return it.done(last, it.op("Sin", pair if kind == "pair" else y))

    return make


def block(*, both: bool) -> Callable[[], onnx.ModelProto]:
    """Residual block without a convolution in its short branch; its long branch has a pair at its end or not."""

    def make() -> onnx.ModelProto:
        it = net()
        x = it.pair(it.op("Relu", conv(it, it.pair("x", zero=128), "first")), 0.04)
        y = it.pair(it.op("Relu", conv(it, x, "left")), 0.04)
        y = conv(it, y, "right")
        y = it.op("Add", it.pair(y, zero=128) if both else y, x, name="op")
        return it.done(conv(it, it.pair(y, zero=128), "last", kernel=1))

    return make


def input_channels() -> onnx.ModelProto:
    it = net()
    scale = np.linspace(0.004, 0.008, C).astype(np.float32)
    return it.done(conv(it, it.pair("x", zero=128), "op", w=it.codes(it.weight(C, C, 3, 3), scale, 0, "int8", 1)))


def integer_bias() -> onnx.ModelProto:
    it = net()
    w = it.codes(it.weight(C, C, 3, 3), 0.006)
    bias = it.codes(np.arange(C), 0.05 * 0.006, 0, "int32")
    return it.done(it.op("Conv", it.pair("x", zero=128), w, bias, name="op", pads=[1] * 4))


def blocks(bits: int, size: int, *, zero: bool = False) -> Callable[[], onnx.ModelProto]:
    """MatMul of one row with a constant of 256 x 64, with a scale for each block of rows, or each column (`size` 0)."""

    def make() -> onnx.ModelProto:
        it = Net((1, 256))
        kind = {4: onnx.TensorProto.INT4, 8: onnx.TensorProto.INT8}[bits]
        kind = onnx.TensorProto.UINT4 if zero else kind
        low = 0 if zero else -(1 << bits - 1)
        codes = it.rng.integers(low, low + (1 << bits), (256, 64))
        it.stored.append(onnx.helper.make_tensor("codes", kind, codes.shape, codes.ravel().tolist()))
        shape = (256 // size, 64) if size else (64,)
        numbers = [it.keep(it.rng.uniform(0.005, 0.01, shape))]
        if zero:
            points = it.rng.integers(6, 10, shape)
            it.stored.append(onnx.helper.make_tensor("zero", kind, shape, points.ravel().tolist()))
            numbers.append("zero")
        along: dict[str, Any] = {"axis": 0, "block_size": size} if size else {"axis": 1}
        return it.done(it.op("MatMul", "x", it.op("DequantizeLinear", "codes", *numbers, **along), name="op"))

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
    "i8 zero": Shown(f"int8 activations with a zero point, {AMX}", single(kind="int8", zero=5), "op_out", not IS_AMX),
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
    "normalized": Shown("LayerNormalization behind a pair", normalized, "op_out", False),
    "add projection": Shown(
        "Add of two convolutions, a pair on one input: fused into the other",
        residual(first=True, second=False),
        "op_out",
        True,
    ),
    "add none": Shown("Add of two convolutions, no pair", residual(first=False, second=False), "op_out", False),
    "add block": Shown("Add of a residual block, both inputs between pairs", block(both=True), "op_out", True),
    "input channels": Shown("int8 weights, one scale an input channel", input_channels, "op_out", False),
    "product rows": Shown("MatMul with a constant, one scale a row", product(axis=0), "op_out", False),
    "integer bias": Shown("int32 bias behind a DequantizeLinear", integer_bias, "op_out", True),
    "attention": Shown("attention, int8 pairs at both products", attention(pairs=True), "op_out", True),
    "attention float": Shown("attention without pairs", attention(pairs=False), "op_out", False),
    "read in float": Shown("convolution read by a pair and by a float op", read_twice("float"), "op_out", True),
    "pair in float": Shown("convolution whose pair a float op reads as well", read_twice("pair"), "op_out", True),
    "read in scales": Shown("convolution with two pairs of different scales", read_twice("scales"), "op_out", True),
    "recurrent": Shown("LSTM with float weights", recurrent(zero=None), "op_out", False),
    "recurrent weights": Shown(
        "LSTM with dequantized weights, input with a zero point", recurrent(zero=128), "op_out", None
    ),
    "recurrent float": Shown(
        "LSTM with dequantized weights, float input, in a model with activation pairs",
        recurrent(zero=128, data=False),
        "op_out",
        None,
    ),
    "recurrent i8": Shown(
        "LSTM with dequantized weights, input int8 with zero point 0", recurrent(zero=0), "op_out", True, wrong=True
    ),
    "gru i8": Shown(
        "GRU with dequantized weights, input int8 with zero point 0",
        recurrent("GRU", zero=0),
        "op_out",
        True,
        wrong=True,
    ),
    "gru linear": Shown(
        "GRU with linear_before_reset, dequantized weights, input int8 with zero point 0",
        recurrent("GRU", zero=0, linear_before_reset=1),
        "op_out",
        None,
    ),
    "blocks 4": Shown("MatMul, int4 weight in blocks of 64, float input", blocks(4, 64), "op_out", False),
    "blocks 4 small": Shown("MatMul, int4 weight in blocks of 16, float input", blocks(4, 16), "op_out", False),
    "blocks 4 zero": Shown(
        "MatMul, uint4 weight in blocks of 32 with zero points, float input", blocks(4, 32, zero=True), "op_out", False
    ),
    "columns 4": Shown("MatMul, int4 weight, one scale a column, float input", blocks(4, 0), "op_out", False),
    "blocks 8": Shown("MatMul, int8 weight in blocks of 128, float input", blocks(8, 128), "op_out", False),
    "columns 8": Shown("MatMul, int8 weight, one scale a column, float input", blocks(8, 0), "op_out", False),
}
"""Graphs by name. Weight-only products compute in float, and read the codes: see `PACKED` in the tests."""

PACKED: Final = ("blocks 4", "blocks 4 small", "blocks 4 zero", "columns 4", "blocks 8", "columns 8")
"""Graphs of weight-only products."""

"""Kernels without weights that are timed: arithmetic, activations, poolings, movement of data, quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from onnx import TensorProto

from sbonnx.tuning.kernel_cases import (
    MAPS,
    TOKENS,
    Map,
    Values,
    block,
    bytes_of,
    convolutions,
    floats,
    pair,
    products,
    scales,
)
from sbonnx.tuning.kernel_timing import MICROSOFT, NCHWC, KernelCase

UNARY: Final = ("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Erf", "Identity", "Sqrt", "Elu")
UNARY_MICROSOFT: Final = ("QuickGelu", "Gelu", "FastGelu")
INTEGER_UNARY: Final = ("QLinearSigmoid", "QLinearLeakyRelu")
BINARY: Final = ("Add", "Mul", "Sub", "Div")
INTEGER_BINARY: Final = ("QLinearAdd", "QLinearMul")


def flat(kernel: str, size: Map, *operands: str, dtype: str = "float", **more: Any) -> KernelCase:
    """Return a case of an element-wise kernel, whose cost does not depend on the shape."""
    batch, channels, side = size
    shape = (batch, side, side, channels)
    values = floats(*shape) if dtype == "float" else bytes_of(*shape)
    activations: Values = {name: values for name in ("x", "x2") if name in operands}
    variant = more.pop("variant", "")
    return KernelCase(kernel, variant, dtype, activations, operands, writes=values.size, **more)


def unary(size: Map) -> Iterator[KernelCase]:
    """Yield activation functions, float and integer."""
    for kernel in UNARY:
        yield flat(kernel, size, "x")
    for kernel in UNARY_MICROSOFT:
        yield flat(kernel, size, "x", domain=MICROSOFT)
    limits = {"low": np.array(0, np.float32), "high": np.array(6, np.float32)}
    yield flat("Clip", size, "x", "low", "high", constants=limits)
    yield flat("PRelu", size, "x", "slope", constants={"slope": floats(size[1])})
    for kernel in INTEGER_UNARY:
        edges = (*pair("x"), *pair("y"))
        given: dict[str, Any] = {"dtype": "u8", "constants": scales(x=0.05, y=0.01), "domain": MICROSOFT}
        if kernel == "QLinearLeakyRelu":
            given["attributes"] = {"alpha": 0.1}
        yield flat(kernel, size, "x", *edges, **given)


def binary(size: Map) -> Iterator[KernelCase]:
    """Yield binary ops on two maps of equal shape, or on a map and a gate per channel (squeeze-and-excitation)."""
    batch, channels, side = size
    names = scales(x=0.05, x2=0.04, y=0.1)
    edges = ("x", *pair("x"), "x2", *pair("x2"), *pair("y"))
    for kernel in BINARY:
        yield flat(kernel, size, "x", "x2")
    for kernel in INTEGER_BINARY:
        yield flat(kernel, size, *edges, dtype="u8", constants=names, domain=MICROSOFT)
    writes = batch * channels * side * side
    for kernel, variant, shape, gate in (
        ("Mul", "gate NCHW", (batch, channels, side, side), (batch, channels, 1, 1)),
        ("QLinearMul", "gate NCHW", (batch, channels, side, side), (batch, channels, 1, 1)),
        ("QLinearMul", "gate NHWC", (batch, side, side, channels), (batch, 1, 1, channels)),
    ):
        if kernel == "Mul":
            both = {"x": floats(*shape), "x2": floats(*gate)}
            yield KernelCase(kernel, variant, "float", both, ("x", "x2"), writes=writes)
        else:
            both = {"x": bytes_of(*shape), "x2": bytes_of(*gate)}
            yield KernelCase(kernel, variant, "u8", both, edges, names, {}, MICROSOFT, writes=writes)
    yield flat("Mul", size, "x", "c", variant="constant", constants={"c": np.array(0.5, np.float32)})
    yield flat("Add", size, "x", "c", variant="per channel", constants={"c": floats(channels)})


def edges(size: Map) -> Iterator[KernelCase]:
    """Yield QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear."""
    names = scales(x=0.05)
    yield flat("QuantizeLinear", size, "x", *pair("x"), variant="u8", constants=names)
    yield flat("DequantizeLinear", size, "x", *pair("x"), dtype="u8", constants=names)
    signed: Values = {"s_x": names["s_x"], "z_x": np.array(0, np.int8)}
    yield flat("QuantizeLinear", size, "x", *pair("x"), variant="s8", constants=signed)
    yield flat("DynamicQuantizeLinear", size, "x", outputs=3)
    yield flat("Cast", size, "x", variant="to fp16", attributes={"to": TensorProto.FLOAT16})


def planes(batch: int, channels: int, side: int, dtype: str) -> np.ndarray:
    """Return a feature map, NCHW."""
    shape = (batch, channels, side, side)
    return floats(*shape) if dtype == "float" else bytes_of(*shape)


def movement(size: Map) -> Iterator[KernelCase]:
    """Yield data movement ops in both types, NCHW, and the layout conversions around convolutions."""
    batch, channels, side = size
    for dtype in ("float", "u8"):
        x = planes(*size, dtype)
        common: dict[str, Any] = {"activations": {"x": x}, "writes": x.size}
        last = {**common, "activations": {"x": x.reshape(batch, side, side, channels)}}
        grouped = {**common, "activations": {"x": x.reshape(batch, 2, channels // 2, side, side)}}
        shape = np.array([batch, 2, channels // 2, side, side], np.int64)
        half = {**common, "writes": x.size // 2}
        cut = {"a": np.array([0]), "b": np.array([channels // 2]), "c": np.array([1])}
        evens = {"i": np.arange(0, channels, 2)}
        pads = {"p": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
        padded = {**common, "writes": batch * channels * (side + 2) ** 2}
        order: dict[str, Any] = {"pieces": batch * side * side, "operands": ("x",)}
        yield KernelCase("Transpose", "NCHW to NHWC", dtype, attributes={"perm": [0, 2, 3, 1]}, **order, **common)
        yield KernelCase("Transpose", "NHWC to NCHW", dtype, attributes={"perm": [0, 3, 1, 2]}, **order, **last)
        yield KernelCase(
            "Transpose", "channel shuffle", dtype, operands=("x",), attributes={"perm": [0, 2, 1, 3, 4]}, **grouped
        )
        yield KernelCase("Reshape", "", dtype, operands=("x", "s"), constants={"s": shape}, **common)
        yield KernelCase("Slice", "channels", dtype, operands=("x", "a", "b", "c"), constants=cut, **half)
        yield KernelCase(
            "Split", "channels", dtype, operands=("x",), attributes={"axis": 1, "num_outputs": 2}, outputs=2, **common
        )
        yield KernelCase(
            "Gather", "channels", dtype, operands=("x", "i"), constants=evens, attributes={"axis": 1}, **half
        )
        yield KernelCase("Pad", "1", dtype, operands=("x", "p"), constants=pads, **padded)
        yield KernelCase("DepthToSpace", "", dtype, operands=("x",), attributes={"blocksize": 2}, **common)


def concat(size: Map) -> Iterator[KernelCase]:
    """Yield concatenations of two halves of the channels: NCHW (axis 1), and NHWC for integers."""
    batch, channels, side = size
    half = (batch, channels // 2, side, side)
    writes = batch * channels * side * side
    for dtype, make in (("float", floats), ("u8", bytes_of)):
        both = {"x": make(*half), "x2": make(*half)}
        yield KernelCase("Concat", "", dtype, both, ("x", "x2"), attributes={"axis": 1}, writes=writes)
    names = scales(x=0.05, x2=0.04, y=0.1)
    operands = (*pair("y"), "x", *pair("x"), "x2", *pair("x2"))
    for variant, axis, shape in (("NCHW", 1, half), ("NHWC", 3, (batch, side, side, channels // 2))):
        both = {"x": bytes_of(*shape), "x2": bytes_of(*shape)}
        pieces = 2 * batch * side * side if axis == 3 else 2 * batch
        given: dict[str, Any] = {"pieces": pieces, "writes": writes}
        yield KernelCase("QLinearConcat", variant, "u8", both, operands, names, {"axis": axis}, MICROSOFT, **given)
        if axis == 1:
            names_equal = scales(x=0.1, x2=0.1, y=0.1)
            yield KernelCase(
                "QLinearConcat",
                "NCHW one scale",
                "u8",
                both,
                operands,
                names_equal,
                {"axis": 1},
                MICROSOFT,
                writes=writes,
            )


def pooling(size: Map) -> Iterator[KernelCase]:
    """Yield max and average pooling over 2x2 and 3x3 windows, and over the whole map."""
    batch, channels, side = size
    x, u, last = planes(*size, "float"), planes(*size, "u8"), bytes_of(batch, side, side, channels)
    names, both = scales(x=0.05, y=0.05), ("x", *pair("x"), *pair("y"))
    for side_of in (3, 2):
        window, half = f"{side_of}x{side_of}", (side - 1) // 2 + 1 if side_of == 3 else side // 2
        attributes: dict[str, Any] = {"kernel_shape": [side_of] * 2, "strides": [2, 2], "pads": [side_of - 2] * 4}
        writes = batch * channels * half**2
        given: dict[str, Any] = {"macs": writes * side_of**2, "writes": writes}
        gathers = {**given, "pieces": batch * half**2 * side_of**2}
        yield KernelCase("MaxPool", window, "float", {"x": x}, ("x",), {}, attributes, **given)
        yield KernelCase("MaxPool", window, "u8", {"x": u}, ("x",), {}, attributes, **given)
        yield KernelCase("NhwcMaxPool", window, "u8", {"x": last}, ("x",), {}, attributes, MICROSOFT, **gathers)
        yield KernelCase("AveragePool", window, "float", {"x": x}, ("x",), {}, attributes, **given)
        shuffled = {**attributes, "channels_last": 1}
        kernel = "QLinearAveragePool"
        yield KernelCase(kernel, window, "u8", {"x": last}, both, names, shuffled, MICROSOFT, **gathers)
        yield KernelCase(kernel, f"{window} NCHW", "u8", {"x": u}, both, names, attributes, MICROSOFT, **given)
        if block() > 1 and channels % block() == 0:
            yield from blocked_pools(x, window, attributes, given)
    whole = batch * channels
    yield KernelCase("GlobalAveragePool", "", "float", {"x": x}, ("x",), writes=whole)
    for variant, channels_last, values in (("", 1, last), ("NCHW", 0, u)):
        attributes = {"channels_last": channels_last}
        yield KernelCase(
            "QLinearGlobalAveragePool", variant, "u8", {"x": values}, both, names, attributes, MICROSOFT, writes=whole
        )
    if block() > 1 and channels % block() == 0:
        yield from blocked(x)


def blocked_pools(
    x: np.ndarray, window: str, attributes: dict[str, Any], given: dict[str, Any]
) -> Iterator[KernelCase]:
    """Yield pooling in the blocked float layout of convolutions."""
    blocks: dict[str, Any] = {"activations": {"x": x}, "operands": ("x",), "domain": NCHWC, **given}
    yield KernelCase("MaxPool", f"{window} blocked", "float", attributes=attributes, **blocks)
    yield KernelCase(
        "AveragePool", f"{window} blocked", "float", attributes={**attributes, "count_include_pad": 0}, **blocks
    )


def blocked(x: np.ndarray) -> Iterator[KernelCase]:
    """Yield pooling over the whole map in the blocked float layout, and the conversions from and to it."""
    given: dict[str, Any] = {"activations": {"x": x}, "operands": ("x",), "domain": NCHWC}
    yield KernelCase("GlobalAveragePool", "blocked", "float", writes=x.shape[0] * x.shape[1], **given)
    yield KernelCase("ReorderInput", "", "float", writes=x.size, **given)
    yield KernelCase("ReorderOutput", "", "float", attributes={"channels": x.shape[1]}, writes=x.size, **given)


def resize(size: Map) -> Iterator[KernelCase]:
    """Yield resizing by factor 2, nearest and linear, if the result has less than a million elements."""
    batch, channels, side = size
    writes = 4 * batch * channels * side * side
    if writes > 1_000_000:
        return
    factors = {"r": np.empty(0, np.float32), "f": np.array([1, 1, 2, 2], np.float32)}
    for dtype in ("float", "u8"):
        for mode in ("nearest", "linear"):
            attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
            x = {"x": planes(*size, dtype)}
            yield KernelCase("Resize", mode, dtype, x, ("x", "r", "f"), factors, attributes, writes=writes)


def rows() -> Iterator[KernelCase]:
    """Yield kernels over the rows of an encoder: softmax and normalization."""
    for count, features in TOKENS:
        x, u = floats(count, features), bytes_of(count, features)
        names = scales(x=0.05, y=1 / 256)
        scaling = {"g": floats(features), "h": floats(features)}
        both = {"x": x, "x2": x}
        yield KernelCase("Softmax", "", "float", {"x": x}, ("x",), attributes={"axis": -1}, writes=x.size)
        yield KernelCase(
            "QLinearSoftmax",
            "",
            "u8",
            {"x": u},
            ("x", *pair("x"), *pair("y")),
            names,
            {"axis": -1, "opset": 13},
            MICROSOFT,
            writes=x.size,
        )
        yield KernelCase("LayerNormalization", "", "float", {"x": x}, ("x", "g", "h"), scaling, writes=x.size)
        yield KernelCase(
            "SkipLayerNormalization", "", "float", both, ("x", "x2", "g", "h"), scaling, {}, MICROSOFT, writes=x.size
        )
        yield KernelCase("BiasGelu", "", "float", {"x": x}, ("x", "h"), scaling, {}, MICROSOFT, writes=x.size)


FAMILIES: Final[tuple[Callable[[Map], Iterator[KernelCase]], ...]] = (
    binary,
    edges,
    unary,
    concat,
    movement,
    pooling,
    resize,
)
"""Generators of the cases of one map size; without rows(), whose sizes are not maps."""


def every_case() -> Iterator[KernelCase]:
    """Yield all kernels at all sizes, those with weights first."""
    yield from convolutions()
    yield from products()
    for make in FAMILIES:
        for size in MAPS:
            yield from make(size)
    yield from rows()

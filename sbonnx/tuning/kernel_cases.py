"""Convolutions and matrix products that are timed, at the sizes of ShuffleNet-like detectors, MobileNetV2 and ResNet.

Maps are (batch, channels, side). Integer kernels see them as onnxruntime runs them, channels last for convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx.backends.onnxruntime import kernel_variants
from sbonnx.system.cpu import target_cpu
from sbonnx.tuning.kernel_timing import MICROSOFT, KernelCase, optimised

Map = tuple[int, int, int]
Values = dict[str, np.ndarray]

MAPS: Final[tuple[Map, ...]] = (
    *((1, 16, 32), (1, 48, 44), (1, 192, 11), (1, 64, 56), (1, 144, 56), (8, 96, 22)),
    *((1, 4, 160), (1, 16, 160), (1, 32, 80), (1, 16, 8), (1, 64, 20)),
)
TOKENS: Final = ((32, 384), (256, 384), (32, 1536))
"""(rows, features) of a small encoder."""

CONVOLUTIONS: Final[tuple[tuple[int, int, int, int, int, int], ...]] = (
    # pointwise
    (48, 48, 44, 1, 1, 1),
    (24, 96, 44, 1, 1, 1),
    (96, 96, 22, 1, 1, 1),
    (192, 192, 11, 1, 1, 1),
    (24, 144, 56, 1, 1, 1),
    (144, 32, 28, 1, 1, 1),
    (96, 576, 14, 1, 1, 1),
    (576, 96, 14, 1, 1, 1),
    (320, 1280, 7, 1, 1, 1),
    (64, 128, 56, 1, 2, 1),
    (64, 16, 55, 1, 1, 1),
    (16, 16, 160, 1, 1, 1),
    (16, 48, 160, 1, 1, 1),
    (32, 32, 80, 1, 1, 1),
    (64, 64, 20, 1, 1, 1),
    (64, 6, 20, 1, 1, 1),
    (64, 18, 40, 1, 1, 1),
    (48, 6, 40, 1, 1, 1),
    (32, 8, 20, 1, 1, 1),
    (96, 255, 20, 1, 1, 1),
    (48, 4, 40, 1, 1, 1),
    (18, 18, 40, 1, 1, 1),
    (22, 32, 40, 1, 1, 1),
    (50, 30, 20, 1, 1, 1),
    (8, 8, 80, 1, 1, 1),
    (8, 32, 40, 1, 1, 1),
    (12, 24, 40, 1, 1, 1),
    (4, 16, 80, 1, 1, 1),
    (16, 16, 8, 1, 1, 1),
    (8, 8, 8, 1, 1, 1),
    # several taps
    (16, 16, 8, 3, 1, 1),
    (8, 8, 8, 3, 1, 1),
    (4, 4, 8, 3, 1, 1),
    (16, 8, 16, 3, 1, 1),
    (16, 16, 32, 3, 1, 1),
    (32, 32, 16, 3, 1, 1),
    (64, 64, 8, 3, 1, 1),
    (24, 24, 40, 3, 1, 1),
    (16, 64, 55, 3, 1, 1),
    (64, 64, 56, 3, 1, 1),
    (64, 128, 56, 3, 2, 1),
    (128, 128, 28, 3, 1, 1),
    (256, 256, 14, 3, 1, 1),
    (512, 512, 7, 3, 1, 1),
    (16, 16, 160, 3, 1, 1),
    (16, 32, 80, 3, 1, 1),
    (16, 24, 160, 3, 2, 1),
    (48, 48, 20, 3, 1, 1),
    (32, 32, 80, 3, 1, 1),
    (64, 6, 20, 3, 1, 1),
    (64, 18, 40, 3, 1, 1),
    (48, 8, 40, 3, 1, 1),
    (64, 84, 10, 3, 1, 1),
    (48, 2, 20, 3, 1, 1),
    (32, 4, 40, 3, 1, 1),
    (18, 18, 40, 3, 1, 1),
    (22, 32, 20, 3, 1, 1),
    (30, 30, 40, 3, 2, 1),
    (50, 50, 20, 3, 1, 1),
    (4, 16, 320, 3, 1, 1),
    (4, 16, 160, 3, 2, 1),
    (4, 24, 352, 3, 2, 1),
    (4, 32, 224, 3, 2, 1),
    (4, 64, 224, 3, 2, 1),
    (8, 16, 80, 3, 1, 1),
    (12, 16, 40, 3, 1, 1),
    (8, 24, 160, 3, 2, 1),
    (3, 16, 32, 3, 1, 1),
    (3, 24, 352, 3, 2, 1),
    (3, 32, 224, 3, 2, 1),
    (3, 16, 320, 3, 1, 1),
    (3, 64, 224, 7, 2, 1),
    (1, 16, 160, 3, 2, 1),
    (8, 8, 80, 3, 1, 1),
    (8, 8, 160, 3, 2, 1),
    (3, 8, 256, 3, 2, 1),
    # depthwise
    (16, 16, 8, 3, 1, 16),
    (6, 6, 8, 3, 1, 6),
    (48, 48, 44, 3, 1, 48),
    (96, 96, 22, 3, 1, 96),
    (192, 192, 11, 3, 1, 192),
    (144, 144, 56, 3, 1, 144),
    (96, 96, 112, 3, 2, 96),
    (384, 384, 14, 3, 1, 384),
    (960, 960, 7, 3, 1, 960),
    (16, 16, 80, 3, 1, 16),
    (16, 16, 160, 3, 2, 16),
    (32, 32, 40, 3, 1, 32),
    (64, 64, 20, 3, 1, 64),
    (64, 64, 10, 3, 2, 64),
    (96, 96, 22, 5, 1, 96),
    (192, 192, 28, 5, 1, 192),
    (96, 96, 11, 5, 1, 96),
    (16, 16, 80, 5, 1, 16),
    (32, 32, 40, 5, 2, 32),
    (4, 4, 80, 3, 1, 4),
    (6, 6, 40, 3, 1, 6),
    (18, 18, 40, 3, 1, 18),
    (50, 50, 20, 3, 1, 50),
    (30, 30, 40, 3, 2, 30),
    (20, 20, 40, 3, 1, 20),
    (40, 40, 20, 3, 1, 40),
    (24, 24, 40, 5, 1, 24),
    # grouped
    (128, 128, 14, 3, 1, 32),
    (128, 128, 28, 3, 1, 32),
    (64, 64, 28, 3, 1, 16),
    (64, 64, 56, 3, 1, 8),
    (128, 128, 28, 3, 1, 16),
    (128, 128, 14, 3, 1, 16),
    (128, 128, 28, 3, 1, 4),
    (128, 128, 14, 3, 1, 4),
    (256, 256, 14, 3, 1, 8),
)
"""(input channels, output channels, input side, kernel, stride, groups)."""

PRODUCTS: Final = ((32, 384, 384), (32, 384, 1536), (32, 1536, 384), (256, 384, 384), (1, 512, 1000), (1, 1280, 200))
"""(M, K, N) of matrix products with a constant right operand."""


@cache
def floats(*shape: int) -> np.ndarray:
    """Return reproducible normal random values, float32; equal shapes share one array, which is not written."""
    return np.random.default_rng(0).normal(0, 1, shape).astype(np.float32)


@cache
def bytes_of(*shape: int) -> np.ndarray:
    """Return reproducible uint8 values of the full range; equal shapes share one array, which is not written."""
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def release_values() -> None:
    """Release the shared arrays of cases."""
    floats.cache_clear()
    bytes_of.cache_clear()


def scales(**names: float) -> Values:
    """Return scale s_NAME and uint8 zero point z_NAME for each name."""
    edges: Values = {}
    for name, scale in names.items():
        edges[f"s_{name}"], edges[f"z_{name}"] = np.array(scale, np.float32), np.array(128, np.uint8)
    return edges


def pair(name: str) -> tuple[str, str]:
    """Return the names of a scale and its zero point."""
    return f"s_{name}", f"z_{name}"


def convolutions() -> Iterator[KernelCase]:
    """Yield convolutions: integer kernels, and the float kernels that onnxruntime uses."""
    for size in CONVOLUTIONS:
        yield integer_conv(size)
        if not target_cpu().exact:
            yield integer_conv(size, signed=False)
        yield float_conv(size)


def geometry(size: Sequence[int]) -> tuple[tuple[int, ...], dict[str, Any], int, int]:
    """Return shape of the weight, attributes, MACs and written elements of one size."""
    into, out, side, kernel, stride, groups = size
    weight = (out, into // groups, kernel, kernel)
    attributes = {
        "kernel_shape": [kernel] * 2,
        "pads": [kernel // 2] * 4,
        "strides": [stride] * 2,
        "group": groups,
        "dilations": [1, 1],
    }
    writes = out * ((side - 1) // stride + 1) ** 2
    return weight, attributes, writes * into // groups * kernel * kernel, writes


def quantized_weight(*shape: int, signed: bool = True) -> np.ndarray:
    """Return reproducible weights around their zero point: int8, or uint8 (`EXACT_PRODUCTS`)."""
    values = np.random.default_rng(1).integers(-127, 128, shape)
    return values.astype(np.int8) if signed else (values + 128).astype(np.uint8)


def integer_conv(size: Sequence[int], *, signed: bool = True) -> KernelCase:
    """Return an integer convolution: uint8 activations, per-channel weights, int32 bias, channels last."""
    weight, attributes, macs, writes = geometry(size)
    out = weight[0]
    constants = {
        **scales(x=0.05, y=0.1),
        "w": quantized_weight(*weight, signed=signed),
        "s_w": np.full(out, 0.01, np.float32),
        "z_w": np.zeros(out, np.int8) if signed else np.full(out, 128, np.uint8),
        "b": np.zeros(out, np.int32),
    }
    return KernelCase(
        kernel="QLinearConv",
        variant=kernel_variants.integer_conv(weight[1], out, int(np.prod(weight[2:])), size[5]),
        dtype="u8" if signed else "u8u8",
        activations={"x": bytes_of(1, size[2], size[2], size[0])},
        operands=("x", *pair("x"), "w", *pair("w"), *pair("y"), "b"),
        constants=constants,
        attributes={**attributes, "channels_last": 1},
        domain=MICROSOFT,
        macs=macs,
        pieces=writes // out * kernel_positions(attributes),
        writes=writes,
    )


def kernel_positions(attributes: dict[str, Any]) -> int:
    """Return the taps of a kernel that gathers its input by position: 0 for one tap, which reads rows as they are."""
    taps = int(np.prod(attributes["kernel_shape"]))
    return taps if taps > 1 else 0


def float_conv(size: Sequence[int]) -> KernelCase:
    """Return the float kernel that onnxruntime chooses on this CPU: blocked (com.microsoft.nchwc) or plain."""
    weight, attributes, macs, writes = geometry(size)
    x = floats(1, size[0], size[2], size[2])
    weights = {"w": floats(*weight), "b": floats(weight[0])}
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    kernel, constants = chosen(node, x, weights, "Conv")
    variant = kernel_variants.float_conv(weight[1], weight[0], int(np.prod(weight[2:])), size[5], block())
    if not kernel.domain:
        variant = variant.replace("blocked", "plain")
    shape = constants[kernel.input[1]].shape
    if shape != weight:  # padded to full channel blocks: the kernel reads, computes and writes the padding too
        groups = next(item.i for item in kernel.attribute if item.name == "group")
        x = floats(1, shape[1] * groups, size[2], size[2])
        macs, writes = macs * int(np.prod(shape)) // int(np.prod(weight)), writes * shape[0] // weight[0]
    return KernelCase(
        kernel=kernel.op_type,
        variant=variant,
        dtype="float",
        activations={"x": x},
        operands=("x", *list(kernel.input)[1:]),
        constants=constants,
        attributes={item.name: helper.get_attribute_value(item) for item in kernel.attribute},
        domain=kernel.domain,
        macs=macs,
        writes=writes,
    )


def chosen(node: onnx.NodeProto, x: np.ndarray, weights: Values, kind: str) -> tuple[onnx.NodeProto, Values]:
    """Optimize a one-node float model and return onnxruntime's node of that kind with its constants."""
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)],
        [numpy_helper.from_array(values, name) for name, values in weights.items()],
    )
    rewritten = optimised(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))
    kernel = next(item for item in rewritten.graph.node if item.op_type == kind)
    return kernel, {
        tensor.name: numpy_helper.to_array(tensor)
        for tensor in rewritten.graph.initializer
        if tensor.name in kernel.input
    }


@cache
def block() -> int:
    """Return the channels per block of the float layout on this CPU: 16 with AVX-512, 8 with AVX2, 1 without blocks."""
    weight, attributes, _, _ = geometry((3, 1, 8, 3, 1, 1))
    node = helper.make_node("Conv", ["x", "w", "b"], ["y"], **attributes)
    kernel, constants = chosen(node, floats(1, 3, 8, 8), {"w": floats(*weight), "b": floats(1)}, "Conv")
    return int(constants[kernel.input[1]].shape[0]) if kernel.domain else 1


def products() -> Iterator[KernelCase]:
    """Yield matrix products with constant weights: float, three integer forms, and 4- and 8-bit blocks."""
    for m, k, n in PRODUCTS:
        common: dict[str, Any] = {"macs": m * k * n, "writes": m * n}
        plain = {"activations": {"x": floats(m, k)}, **common}
        yield KernelCase("MatMul", "", "float", operands=("x", "w"), constants={"w": floats(k, n)}, **plain)
        yield KernelCase(
            "Gemm", "", "float", operands=("x", "w", "b"), constants={"w": floats(k, n), "b": floats(n)}, **plain
        )
        yield from integer_products(m, k, n)
        if not target_cpu().exact:
            yield from integer_products(m, k, n, signed=False)
        per_channel: Values = {
            "w": quantized_weight(k, n),
            "s_w": np.full(n, 0.01, np.float32),
            "z_w": np.zeros(n, np.int8),
        }
        yield KernelCase(
            "DynamicQuantizeMatMul",
            "",
            "float",
            operands=("x", "w", "s_w", "z_w", "b"),
            constants={**per_channel, "b": floats(n)},
            domain=MICROSOFT,
            **plain,
        )
        for bits in (4, 8):
            yield blockwise(m, k, n, bits)


def integer_products(m: int, k: int, n: int, *, signed: bool = True) -> Iterator[KernelCase]:
    """Yield the three integer forms of a product with a constant matrix."""
    weight, zero = quantized_weight(k, n, signed=signed), np.array(*((0, np.int8) if signed else (128, np.uint8)))
    whole: Values = {"w": weight, "s_w": np.array(0.01, np.float32), "z_w": zero}
    per_channel = {**whole, "s_w": np.full(n, 0.01, np.float32), "z_w": np.full(n, zero)}
    common: dict[str, Any] = {"activations": {"x": bytes_of(m, k)}, "macs": m * k * n, "writes": m * n}
    edges, dtype = ("x", *pair("x"), "w", *pair("w")), "u8" if signed else "u8u8"
    given = {**scales(x=0.05, y=0.1), **per_channel}
    yield KernelCase("QLinearMatMul", "", dtype, operands=(*edges, *pair("y")), constants=given, **common)
    yield KernelCase(
        "MatMulIntegerToFloat",
        "",
        dtype,
        operands=("x", "w", *("s_x", "s_w"), *("z_x", "z_w"), "b"),
        constants={**scales(x=0.05), **per_channel, "b": floats(n)},
        domain=MICROSOFT,
        **common,
    )
    yield KernelCase(
        "QGemm",
        "",
        dtype,
        operands=(*edges, "b", *pair("y")),
        constants={**scales(x=0.05, y=0.1), **whole, "b": np.zeros(n, np.int32)},
        domain=MICROSOFT,
        **common,
    )


def blockwise(m: int, k: int, n: int, bits: int, block: int = 32) -> KernelCase:
    """Return a product with weights in blocks of 32 along K and float activations."""
    count = -(-k // block)
    return KernelCase(
        kernel="MatMulNBits",
        variant=f"{bits} bits",
        dtype="float",
        activations={"x": floats(m, k)},
        operands=("x", "w", "s"),
        constants={
            "w": bytes_of(n, count, block * bits // 8),
            "s": np.full(n * count, 0.01, np.float32),
        },
        attributes={"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": 4},
        domain=MICROSOFT,
        macs=m * k * n,
        writes=m * n,
    )

"""TensorRT explicit quantization: symmetric, zero point 0, per-channel weights, float bias."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Final, Literal

from sbonnx.backends.base import Backend, Files, Numbers
from sbonnx.backends.mode_limits import FREE, SYMMETRIC, ModeLimits, SideLimits
from sbonnx.backends.placement_rules import ON_REQUEST, Placement, Rule
from sbonnx.backends.runtime_types import EngineInput
from sbonnx.backends.tensorrt.profiles import (
    FP8_WINDOW,
    INT4_BITS,
    INT4_BLOCKS,
    MAX_SCALE,
    MIN_SCALE,
    PROFILES,
    VersionProfile,
)
from sbonnx.backends.tensorrt.trtexec import engine_command
from sbonnx.errors import ModelError
from sbonnx.graph import Constant, Graph, Node, query
from sbonnx.linear.layer import LinearLayer
from sbonnx.ops import ADDS, CONVOLUTIONS, LINEAR, POOLS, QDQ
from sbonnx.report.codes import Reason
from sbonnx.schemes import VERSIONS
from sbonnx.small_floats import FLOATS
from sbonnx.spec import QuantSpec, ScaleLimits

RULES: Final = (
    Rule(
        "residual_add",
        ADDS,
        "skip",
        switch="add",
        why="the skip branch of a residual add, and it alone: the conv branch fuses with the add",
    ),
    Rule(
        "pool",
        POOLS,
        "first",
        when="output_read_quantized",
        switch="pool",
        why="an averaging pool is int8 only between two pairs",
    ),
    Rule("concat", frozenset({"Concat"}), "all", switch="concat", default=False, why="input of a concat"),
    *ON_REQUEST,
    Rule("resize", frozenset({"Resize"}), "first", switch="resize", default=False, why="input of a resize"),
)


GROUP_MULTIPLE: Final = 4
"""Multiple that the channels per group must have in TensorRT's grouped integer convolution."""

FEW_CHANNELS: Final = 16
CHANNEL_MULTIPLE: Final = 8
"""Integer kernels compute 32 channels at a time; fewer than 16 waste most of that unless a multiple of 8."""


FEW: Final = 16
"""Rows or columns of weights below which a product leaves its integer kernel mostly empty."""


def _small_product(node: Node) -> Reason | None:
    shape: tuple[int, ...] = next((tensor.shape for tensor in node.inputs[1::-1] if isinstance(tensor, Constant)), ())
    if len(shape) < 2 or min(shape[-2:]) >= FEW:
        return None
    return Reason(
        "small-weight",
        f"a weight of {shape[-2]} by {shape[-1]}; fewer than {FEW} rows or columns leave TensorRT's integer kernels "
        "mostly empty",
    )


def _unfit_for_fp8(node: Node) -> Reason | None:
    groups, area = node.attrs.get("group", 1), prod(node.inputs[1].shape[2:])
    if groups > 1:
        return Reason(
            "fp8-with-groups", f"it has {groups} groups; TensorRT has no optimised fp8 convolution with groups"
        )
    if area > FP8_WINDOW:
        return Reason(
            "fp8-large-filter", f"a filter of {area} values; TensorRT's fp8 convolutions take {FP8_WINDOW} at most"
        )
    return None


INTEGER_BLOCK: Final = 32
"""Channels that integer kernels compute at a time."""


ROUNDS_BIASES: Final = "WeightBiasQuantization"
"""onnxruntime's graph transformer that quantizes a float bias to int32, with a scale that underflows in float16.

TensorRT keeps float biases, so its files are verified without it.
"""


class TrtPlacement(Placement):
    """Integer kernels of tensor cores, which compute blocks of channels."""

    def slow_linear(self, node: Node) -> Reason | None:
        """Return the reason why TensorRT would not run a weighted op in integers, or would not run it faster.

        Few channels are typical of a stem that reads an image; there, symmetric quantization would also lose one bit.

        Source: the convolution layer's API notes for groups; the exclusions of NVIDIA's own quantizer for few channels
        and small products; user reports that depthwise int8 is slower than fp16.
        """
        if node.op not in CONVOLUTIONS:
            return _small_product(node)
        layer = LinearLayer.of_shape(node.op, node.attrs, tuple(node.inputs[1].shape or ()))
        if isinstance(layer, str):
            return Reason("weight-shape-not-known", "the shape of its weight is not known, or none of a convolution")
        groups, sizes = layer.group, (layer.in_channels // layer.group, layer.out_channels // layer.group)
        if groups > 1 and any(size % GROUP_MULTIPLE for size in sizes):
            return Reason(
                "few-channels-in-groups",
                f"a group has {sizes[0]} input and {sizes[1]} output channels; "
                f"TensorRT's integer kernels want multiples of {GROUP_MULTIPLE}, others are slower than fp16",
            )
        if groups == 1 and any(size < FEW_CHANNELS and size % CHANNEL_MULTIPLE for size in sizes):
            return Reason(
                "few-channels",
                f"it reads {sizes[0]} and writes {sizes[1]} channels; TensorRT's integer kernels compute 32 at a time, "
                f"and fewer than {FEW_CHANNELS} fill them only as a multiple of {CHANNEL_MULTIPLE}",
            )
        return None

    def blocks(self, op: str, *, integers: bool = False) -> tuple[int, ...]:
        """Return blocks of 8 channels in fp16; in int8 of 32, and of 8 for few channels.

        Source: NVIDIA's guide to performance of convolutions and matrix products on tensor cores.
        """
        return (INTEGER_BLOCK, CHANNEL_MULTIPLE) if integers else (CHANNEL_MULTIPLE,)


class TrtNumbers(Numbers):
    """Signed symmetric types; 4 bits for weights alone, in blocks."""

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return a signed symmetric type; recipe validation has excluded all others."""
        return QuantSpec(bits=bits, signed=True, symmetric=True, axis=axis)

    def unfit(self, node: Node, spec: QuantSpec) -> Reason | None:
        """Return the reason why TensorRT would not support weights of a type at a weighted op, or gain nothing by it.

        Source: the quantize layer's header for int4 (blocks of 64 or 128 along one of the last two dimensions, two
        codes per byte); NVIDIA's own quantizer for what it excludes from fp8.
        """
        shape = node.inputs[1].shape
        if spec.kind == "fp8":
            return _unfit_for_fp8(node) if node.op in CONVOLUTIONS else None
        if spec.bits > INT4_BITS:
            return None
        name = "FP4" if spec.is_float else "int4"
        if spec.block_size is None or spec.axis is None:
            return Reason(
                "int4-not-for-op",
                f"TensorRT takes {name} weights in blocks along the summed axis of MatMul and Gemm, not in {node.op}",
            )
        length = shape[spec.axis]
        if shape[-1] % 2:
            return Reason(
                "int4-odd-dimension",
                f"its weight has an odd last dimension, {shape[-1]}; TensorRT stores two {name} codes a byte",
            )
        supported = self.block_sizes(spec)
        if spec.block_size not in supported or length % spec.block_size:
            sizes = " or ".join(map(str, supported))
            asked = "" if spec.block_size in supported else f", not of {spec.block_size}"
            return Reason(
                "int4-block-size",
                f"it sums over {length} values; TensorRT takes {name} in whole blocks of {sizes}{asked}",
            )
        return None

    def block_sizes(self, spec: QuantSpec) -> tuple[int, ...]:
        """Return the block sizes of 4-bit weights; those of 8 bits and of fp8 have one scale per channel."""
        if spec.kind in FLOATS:
            return tuple(filter(None, (FLOATS[spec.kind].block,)))
        return INT4_BLOCKS if spec.bits <= INT4_BITS else ()


@dataclass(frozen=True)
class TrtFiles(Files):
    """Files for the parser of one version.

    Attributes:
        profile: the version.
    """

    profile: VersionProfile = PROFILES[VERSIONS[0]]

    def legalise(self, graph: Graph) -> list[str]:
        """Write explicitly what TensorRT's parser needs and ONNX leaves to defaults. In place; return what was done.

        The axis of a vector of scales is written out (ONNX takes 1 when absent, TensorRT's parser 0).
        """
        done = []
        for _, body in query.scopes(graph):
            for node in body.nodes:
                shape = query.shape(node.inputs[1]) if node.op in QDQ else None
                if shape is not None and len(shape) == 1 and "axis" not in node.attrs:
                    node.attrs["axis"] = 1
                    done.append(f"{node.name}: axis 1 written out")
        return done

    @property
    def version(self) -> str | None:
        """Version of the parser."""
        return self.profile.version

    def check_opset(self, model: str, opset: int, *, needed: int) -> None:
        """Check that the parser is documented for the opset of a result; see `Files.check_opset`."""
        newest = self.profile.newest_opset
        if max(opset, needed) <= newest:
            return
        what = f"has opset {opset}" if opset > newest else f"needs opset {needed} for the types of its Q/DQ"
        raise ModelError(
            f"{model} {what}; the parser of {self.profile.name} reads up to {newest}: export it with that opset or an "
            f"older one, or quantize for a newer version (such as tensorrt@{VERSIONS[0]})"
        )

    def engine_command(self, file: str, inputs: Iterable[EngineInput], *, types: Collection[str], strong: bool) -> str:
        """Return the command line of trtexec; see `sbonnx.backends.tensorrt.trtexec`."""
        return engine_command(file, self.profile, inputs, types=types, strong=strong)


FILES: Final = TrtFiles(judged_without=(ROUNDS_BIASES,), builds_engine=True)

TENSORRT: Final = Backend(
    name="tensorrt",
    placement=TrtPlacement(
        linear=frozenset(LINEAR),
        rules=RULES,
        folds=frozenset({"Relu", "Clip", "Sigmoid", "LeakyRelu", "Tanh"}),
        skips_zeros=True,
    ),
    numbers=TrtNumbers(
        joins_concat=True, scales=ScaleLimits(MIN_SCALE, MAX_SCALE), fp8="kernels", block_floats=("nvfp4",)
    ),
    files=FILES,
    modes={
        "static": ModeLimits(
            weights=SideLimits((4, 8), SYMMETRIC, "per-channel-symmetric"),
            activations=SideLimits((8,), ("per-tensor-symmetric",), "per-tensor-symmetric", observer="mse"),
        ),
        "weight_only": ModeLimits(
            weights=SideLimits((4,), ("per-channel-symmetric",), "per-channel-symmetric", 4, "mse"),
            activations=replace(FREE, scheme="per-tensor-symmetric"),
            smallest=32 * 32,
            why="read in 4 bits, computed in high precision",
        ),
    },
)


def of_version(version: str) -> Backend:
    """Return the backend for one version of `VERSIONS`."""
    return replace(TENSORRT, files=replace(FILES, profile=PROFILES[version]))

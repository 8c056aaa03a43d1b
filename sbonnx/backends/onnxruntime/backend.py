"""onnxruntime on CPU: uint8 activations, int8 per-channel weights, pairs where its kernels fuse them.

The rules follow measurements of which ops become integer kernels; all other ops stay float.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from sbonnx.backends.base import Backend, Files, Numbers
from sbonnx.backends.decoded_weights import decode_at_load, decode_rows, decode_weights
from sbonnx.backends.mode_limits import (
    BYTES,
    FREE,
    PER_CHANNEL,
    PER_TENSOR,
    SYMMETRIC,
    WEIGHT_SCHEMES,
    ModeLimits,
    SideLimits,
)
from sbonnx.backends.onnxruntime import dynamic_lstm
from sbonnx.backends.onnxruntime.convolutions import align
from sbonnx.backends.onnxruntime.costs import load_costs
from sbonnx.backends.onnxruntime.exact_biases import keep_rounded_biases, shield_convolutions
from sbonnx.backends.onnxruntime.kernel_variants import LANES
from sbonnx.backends.onnxruntime.paired_sums import safe_sums
from sbonnx.backends.onnxruntime.rewrites import (
    centre_weights,
    clip_codes,
    pad_codes,
    write_sums,
)
from sbonnx.backends.onnxruntime.stems import widen_stems
from sbonnx.backends.placement_rules import ON_REQUEST, Placement, Rule, fills_zero, interpolates
from sbonnx.graph import Graph, Node, query
from sbonnx.ops import (
    ADDS,
    CONCATS,
    CONVOLUTIONS,
    EMBEDDING,
    LINEAR,
    MULTIPLIES,
    PADS,
    PICKS_MAX,
    POOLS,
    RECTIFIERS,
    RECURRENT,
    RESIZES,
)
from sbonnx.report.codes import Reason
from sbonnx.schemes import BY_WIDTH
from sbonnx.spec import QuantSpec
from sbonnx.system.runtime import version


def fills_other(node: Node) -> Reason | None:
    """Return the reason why a Pad cannot work on integer codes, or None."""
    return None if fills_zero(node) else Reason("pads-with-another-value", "it fills with another value than zero")


RULES: Final = (
    Rule(
        "add",
        ADDS,
        "all",
        when="inputs_integer",
        output=True,
        switch="add",
        why="QLinearAdd reads integers on both sides and writes them",
    ),
    Rule(
        "concat",
        CONCATS,
        "all",
        when="between_linear",
        output=True,
        switch="concat",
        why="QLinearConcat reads and writes integers",
    ),
    Rule(
        "pool",
        POOLS,
        "first",
        when="input_written",
        output=True,
        switch="pool",
        why="QLinearAveragePool reads and writes integers",
    ),
    Rule(
        "max",
        PICKS_MAX & {"MaxPool"},
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="pool",
        why="MaxPool runs on integers when both sides have one scale",
    ),
    Rule(
        "pad",
        PADS,
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        unless=fills_other,
        why="Pad copies integers and fills with the code of zero",
    ),
    Rule(
        "multiply",
        MULTIPLIES,
        "all",
        when="between_linear",
        output=True,
        switch="elementwise",
        why="QLinearMul reads and writes integers",
    ),
    Rule(
        "activation",
        frozenset({"LeakyRelu", "Sigmoid"}),
        "first",
        when="between_linear",
        output=True,
        switch="elementwise",
        why="QLinearLeakyRelu and QLinearSigmoid read and write integers",
    ),
    Rule(
        "resize",
        RESIZES,
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="resize",
        unless=interpolates,
        why="a nearest Resize copies integers when both sides have one scale",
    ),
    *ON_REQUEST,
)


TWO_BITS_SINCE: Final = (1, 27)
"""First onnxruntime version whose CPU provider has 2-bit MatMulNBits and GatherBlockQuantized for any weights."""


def has_two_bits() -> bool:
    """Return whether the installed onnxruntime has kernels for 2-bit weights.

    Raises:
        DeviceError: onnxruntime is not installed.
    """
    return version() >= TWO_BITS_SINCE


EXPERTS_SINCE: Final = (1, 31)
"""First onnxruntime version with which QMoE was checked, with its attributes for accuracy and for two widths."""


def has_experts() -> bool:
    """Return whether the installed onnxruntime reads the attributes of QMoE that are written."""
    return version() >= EXPERTS_SINCE


STEPS: Final = (
    centre_weights,
    clip_codes,
    pad_codes,
    align,
    widen_stems,
    write_sums,
    shield_convolutions,
    keep_rounded_biases,
    decode_at_load,
    decode_rows,
)
"""Rewrites of ops that onnxruntime runs slowly, in order."""


class OrtPlacement(Placement):
    """Kernels of onnxruntime's CPU provider."""

    def slow_linear(self, node: Node) -> Reason | None:
        """Return the reason why a weighted op cannot run in integers, or None."""
        if query.dtype(node.outputs[0]) == np.dtype(np.float16):
            return Reason(
                "float16-model",
                "float16 has no integer kernels on onnxruntime's CPU, where pairs only cost; quantize the float32 "
                "model",
            )
        return None

    def blocks(self, op: str, *, integers: bool = False) -> tuple[int, ...]:
        """Return blocks of 16 channels, and of 8 for few channels, of convolutions; matrix products have no steps.

        16 is the block of AVX-512, in float and in integers, and of the bundled table of kernel costs. With AVX2 it is
        8, of which 16 is a multiple.
        """
        return (LANES, LANES // 2) if op in CONVOLUTIONS else (1,)


class OrtNumbers(Numbers):
    """Unsigned activations (signed ones run in float kernels) and signed weights."""

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return unsigned types for activations and signed types for weights.

        Affine weights are signed too, with a zero point: QLinearConv of onnxruntime 1.31 takes 3.5 times as long for
        unsigned ones (Conv 64x64x3x3 at 56x56), QLinearMatMul 1.7 times.
        """
        return QuantSpec(bits=bits, signed=side == "w", symmetric=symmetric, axis=axis)

    def safe_sums(self, node: Node, index: int, spec: QuantSpec) -> QuantSpec:
        """Return a type whose weights are bounded by pairs; see `sbonnx.backends.onnxruntime.paired_sums`."""
        return safe_sums(node, index, spec)


@dataclass(frozen=True)
class OrtFiles(Files):
    """Q/DQ that onnxruntime's graph transformers fuse.

    Attributes:
        steps: rewrites of ops that a build of onnxruntime runs slowly, in order.
    """

    steps: tuple[Callable[[Graph], list[str]], ...] = STEPS

    def legalise(self, graph: Graph) -> list[str]:
        """Rewrite ops that onnxruntime runs slowly, without changing the results. In place; return what was done."""
        return [change for step in self.steps for change in step(graph)]

    def quantize_recurrent(self, graph: Graph, nodes: Collection[str]) -> list[str]:
        """Write LSTM nodes as DynamicQuantizeLSTM."""
        return dynamic_lstm.quantize_recurrent(graph, nodes)

    def decode_weights(self, graph: Graph, nodes: Collection[str]) -> list[str]:
        """Let the named ops read their weights through a Cast and a Mul."""
        return decode_weights(graph, nodes)


MODES: Final[dict[str, ModeLimits]] = {
    "static": ModeLimits(
        weights=SideLimits(BYTES, WEIGHT_SCHEMES, BY_WIDTH),
        activations=SideLimits((*BYTES, 16), PER_TENSOR, "per-tensor-affine", observer="mse"),
    ),
    "dynamic": ModeLimits(
        weights=SideLimits((8,), SYMMETRIC, "per-channel-symmetric"),  # unsigned (affine) ones are as slow as float
        activations=SideLimits((8,), ("per-tensor-affine",), "per-tensor-affine", observer="mse"),
        smallest=128 * 128,
        why="the scale of the input is computed at run time",
        below="its kernel is slower than float",
    ),
    # at 4 bits a zero point gains 0.9 dB and an MSE-optimal range another 0.3, for an eighth of a bit per weight;
    # language models repeat themselves with a head of 4 bits, and a tied head shares the table of the embedding
    "weight_only": ModeLimits(
        weights=SideLimits(BYTES, PER_CHANNEL, "per-channel-affine", 4, "mse"),
        activations=FREE,
        defaults={"EMBEDDING_BITS": 8},
        smallest=32 * 32,
        block=32,
        why="MatMulNBits reads a fraction of the bytes",
        experts=True,
    ),
}
"""Times were measured on onnxruntime 1.31's CPU kernels, with AVX-512 VNNI.

dynamic is for speed: DynamicQuantizeMatMul is faster than float from 128 x 128 weights on (0.91 of its time at 8 rows,
0.63 at 64; 1.1 at 1). weight_only is for size, so nearly every matrix is quantized: 32 x 32 float weights are 4 kB.
MatMulNBits is also faster for one row from 256 x 256 on (0.89), and 5 times faster from 768 x 768 on; above 8 rows it
is slower than float at any size. In static mode, ranges of activations with the least squared error are closer to float
than those from min to max, on trained models.
"""

ONNXRUNTIME: Final = Backend(
    name="onnxruntime",
    placement=OrtPlacement(
        linear=frozenset({"Conv", "Gemm", "MatMul"}),
        rules=RULES,
        linear_output=frozenset({"Conv"}),
        folds=RECTIFIERS,
        stored=EMBEDDING | RECURRENT | frozenset(LINEAR),
        recurrent=dynamic_lstm.HIDDEN,
    ),
    numbers=OrtNumbers(int32_bias=True, saturates=True, only_channels=True, narrow_depthwise=True),
    files=OrtFiles(packs_weights=True, integer_operators=True),
    modes=MODES,
    costs=load_costs,
    tunable=True,
)

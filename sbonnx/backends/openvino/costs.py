"""Cost model of OpenVINO's CPU kernels, from a table of measurements that can be repeated on any machine.

``python -m benchmarks.kernels.openvino`` writes such a table. Float kernels of the bundled one are those of OpenVINO's
default on its machine, bfloat16: where they compute in float32, integers pay more often.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Final

from sbonnx.backends.kernel_costs import (
    Amounts,
    KernelCosts,
    Price,
    channels,
    conv_sizes,
    elements,
    file_digest,
    matrix_amounts,
    positions,
    read_table,
)
from sbonnx.graph import Node, Tensor
from sbonnx.ops import ADDS, CONCATS, CONVOLUTIONS, MATRIX_PRODUCTS, MOVES_DATA
from sbonnx.system.cpu import CPUS, TargetCpu

WINDOWED: Final = frozenset({"MaxPool", "AveragePool"})
"""Pools that have prices; global ones read their input once, in float and in integers."""

BUNDLED: Final = Path(__file__).with_name("kernel_costs.json")

COMMAND: Final = "python -m benchmarks.kernels.openvino --table FILE"
"""Writes a table."""

LANES: Final = 16
"""Channels that a kernel computes at a time; the last block is padded."""

DEPTH: Final = 32
"""Input channels of integer convolutions, of which there are whole blocks; the last one is padded."""


FEW: Final = 8
"""Input channels below which a convolution is that of an image, whose kernels differ."""


def conv_variant(inner: int, taps: int, groups: int) -> str:
    """Return the variant of a convolution.

    Args:
        inner: input channels per group.
        taps: size of the kernel in positions.
        groups: number of groups.
    """
    if groups > 1:
        return "depthwise" if inner == 1 else "grouped"
    if inner < FEW:
        return "few"
    return "1x1" if taps == 1 else "3x3"


def conv_amounts(node_sizes: tuple[int, int, int, int], places: int, read: int, *, integers: bool) -> Amounts:
    """Return the amounts of a convolution, with channels in whole blocks.

    Args:
        node_sizes: input channels per group, taps, output channels and groups.
        places: positions of the output.
        read: values of the input.
        integers: whether the kernel computes on integers.
    """
    inner, taps, outputs, groups = node_sizes
    if groups == 1:
        inner = -(-inner // DEPTH) * DEPTH if integers and inner >= FEW else inner
        outputs = -(-outputs // LANES) * LANES
    return Amounts(float(places * outputs * inner * taps), read, places * outputs, outputs * inner * taps)


POOL_LANES: Final = 64
"""Channels that an integer pool computes at a time; the last block is padded."""


def pool_amounts(channels: int, places: int, taps: int, *, integers: bool) -> Amounts:
    """Return the amounts of a pool.

    Args:
        channels: number of channels.
        places: positions of the output.
        taps: size of the window in positions.
        integers: whether the kernel computes on integers, with channels in whole blocks.
    """
    channels = -(-channels // POOL_LANES) * POOL_LANES if integers else channels
    return Amounts(float(places * channels * taps), 0, places * channels, 0)


def transposed_amounts(node_sizes: tuple[int, int, int, int], places: int, grown: int) -> Amounts:
    """Return the amounts of a ConvTranspose.

    Args:
        node_sizes: input channels, taps, output channels per group, and groups.
        places, grown: positions of the input and of the output.
    """
    inner, taps, outputs, groups = node_sizes
    return Amounts(float(places * inner * outputs * taps), 0, grown * outputs * groups, 0)


@dataclass(frozen=True)
class OpenVinoCosts(KernelCosts):
    """Table of the costs of OpenVINO's kernels.

    Activations, and the pairs behind them, are fused into the kernels before them and are not priced; nor are sums.
    """

    def of(self, node: Node) -> Price | None:
        """Return both costs of a node, or None for an op without measurements."""
        if node.op in MATRIX_PRODUCTS:
            amounts = matrix_amounts(node)
            return Price(*(self.ns("FullyConnected", "", kind, amounts) for kind in ("float", "u8")))
        if node.op in MOVES_DATA | CONCATS:
            moved = Amounts(write=elements(node.outputs[0]))
            return Price(*(self.ns("Move", "", kind, moved) for kind in ("float", "u8")))
        if node.op in ADDS:
            return Price(0.0, 0.0)  # fused into a convolution on both sides
        if node.op in WINDOWED:
            return self._pool(node)
        if node.op == "ConvTranspose":
            outputs, taps, inner, groups = conv_sizes(node)
            own = inner, taps, outputs, groups
            amounts = transposed_amounts(own, positions(node.inputs[0]), positions(node.outputs[0]))
            return Price(*(self.ns("ConvTranspose", "", kind, amounts) for kind in ("float", "u8")))
        if node.op not in CONVOLUTIONS:
            return None
        sizes = conv_sizes(node)
        places, read = positions(node.outputs[0]), elements(node.inputs[0])
        floats, integers = (
            self.ns("Convolution", conv_variant(sizes[0], sizes[1], sizes[3]), kind, amounts)
            for kind, amounts in (
                ("float", conv_amounts(sizes, places, read, integers=False)),
                ("u8", conv_amounts(sizes, places, read, integers=True)),
            )
        )
        return Price(floats, integers)

    def _pool(self, node: Node) -> Price | None:
        count = channels(node.inputs[0])
        if count is None:
            return None
        taps, places = prod(node.attrs.get("kernel_shape", ())), positions(node.outputs[0])
        return Price(
            self.ns(node.op, "", "float", pool_amounts(count, places, taps, integers=False)),
            self.ns(node.op, "", "u8", pool_amounts(count, places, taps, integers=True)),
        )

    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a QuantizeLinear that no kernel before it computes; `reorder` has no meaning."""
        size = elements(tensor)
        return self.ns("Quantize", "", "float", Amounts(read=size, write=size))

    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a DequantizeLinear that is a kernel of its own; `reorder` has no meaning."""
        size = elements(tensor)
        return self.ns("Dequantize", "", "u8", Amounts(read=size, write=size))


def load_costs(path: str | None = None, cpu: TargetCpu = CPUS["vnni"]) -> OpenVinoCosts:
    """Load the table from a file that ``benchmarks.kernels.openvino`` wrote; None: the bundled one.

    Raises:
        RecipeError: the file cannot be read, or is not such a table.
    """
    return _load(str(path or BUNDLED), "openvino" if path is None else file_digest(path, COMMAND))


@cache
def _load(path: str, source: str) -> OpenVinoCosts:
    fits, _ = read_table(path, COMMAND)
    return OpenVinoCosts(fits, source=source)

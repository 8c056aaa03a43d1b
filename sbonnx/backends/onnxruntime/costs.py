"""Cost model of onnxruntime's CPU kernels, from a table of measurements that can be repeated on any machine.

``python -m benchmarks.kernels`` writes such a table; `kernel_costs.json` is the table of a server with VNNI. Absolute
times differ between machines, but ratios of 2 and more hardly do (docs/decisions/0007).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, prod
from pathlib import Path
from typing import Final

from sbonnx.errors import RecipeError
from sbonnx.graph import Node, Tensor, query
from sbonnx.input_files import read_regular
from sbonnx.linear.layer import channel_axes
from sbonnx.ops import CONVOLUTIONS, MATRIX_PRODUCTS, MOVES_DATA

BUNDLED: Final = Path(__file__).with_name("kernel_costs.json")

LARGEST: Final = 16 << 20
"""Size limit of a table in bytes; the bundled one has 20 thousand."""

UNKNOWN: Final = 32
"""Assumed size of a dynamic dimension: makes an image large (32 x 32) and a sequence short. The batch counts as 1."""

SMALL_TAPS: Final = 9
MOST_TAPS: Final = 49
FEW_CHANNELS: Final = 4
IMAGE_RANK: Final = 4
GROUPED: Final = (4, 8, 32)
"""Channels per group for which grouped convolutions were measured."""

KINDS: Final = ("fixed_ns", "mac_ns", "read_ns", "write_ns", "weight_ns")


@dataclass(frozen=True)
class Fit:
    """Linear cost model of one kernel, in ns: fixed, and per multiplication, value read, value written and weight."""

    fixed_ns: float
    mac_ns: float
    read_ns: float
    write_ns: float
    weight_ns: float

    def ns(self, macs: float, read: float, write: float, weights: float) -> float:
        """Compute the time of one run in nanoseconds."""
        return (
            self.fixed_ns + self.mac_ns * macs + self.read_ns * read + self.write_ns * write + self.weight_ns * weights
        )


@dataclass(frozen=True)
class Price:
    """Cost of one node in nanoseconds per sample, in float and in integers."""

    floats: float
    integers: float


def elements(tensor: Tensor) -> int:
    """Count the values of a tensor for one sample; dynamic dimensions count as `UNKNOWN`."""
    shape = query.shape(tensor)
    if shape is None:
        return UNKNOWN
    sizes = [
        size if isinstance(size, int) and size > 0 else (1 if at == 0 else UNKNOWN) for at, size in enumerate(shape)
    ]
    return prod(sizes)


@dataclass(frozen=True)
class KernelCosts:
    """Table of kernel costs, by kernel, variant and input type ("float" or "u8")."""

    fits: Mapping[tuple[str, str, str], Fit]

    def ns(
        self,
        kernel: str,
        variant: str,
        kind: str,
        *,
        macs: float = 0,
        read: float = 0,
        write: float = 0,
        weights: float = 0,
    ) -> float:
        """Compute the time of a kernel in nanoseconds; 0 for one that is not in the table."""
        fit = self.fits.get((kernel, variant, kind))
        return 0.0 if fit is None else fit.ns(macs, read, write, weights)

    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a QuantizeLinear after a float kernel; `reorder`: it works on blocks of channels."""
        size = elements(tensor)
        found = self.ns("QuantizeLinear", "u8", "float", write=size)
        if query.rank(tensor) == IMAGE_RANK:
            found += self.ns("Transpose", "NCHW to NHWC", "u8", write=size)
            found += self.ns("ReorderOutput", "", "float", write=size) if reorder else 0.0
        return found

    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a DequantizeLinear before a float kernel; `reorder`: it works on blocks of channels."""
        size = elements(tensor)
        found = self.ns("DequantizeLinear", "", "u8", write=size)
        if query.rank(tensor) == IMAGE_RANK:
            found += self.ns("Transpose", "NHWC to NCHW", "u8", write=size)
            found += self.ns("ReorderInput", "", "float", write=size) if reorder else 0.0
        return found

    def of(self, node: Node) -> Price | None:
        """Return both costs of a node, or None for an op without measurements."""
        if node.op in CONVOLUTIONS:
            return self._conv(node)
        if node.op in MATRIX_PRODUCTS:
            return self._product(node)
        if node.op in MOVES_DATA:
            write = elements(node.outputs[0])
            return Price(*(self.ns("Slice", "channels", kind, write=write) for kind in ("float", "u8")))
        kernels = ELEMENTWISE_KERNELS.get(node.op)
        if kernels is None:
            return None
        floats, integers = kernels
        read, write = elements(node.inputs[0]), elements(node.outputs[0])
        return Price(self.ns(*floats, read=read, write=write), self.ns(*integers, read=read, write=write))

    def _conv(self, node: Node) -> Price | None:
        """Return None for unmeasured kernels: 1-D and 3-D convolutions, ConvTranspose and very large filters."""
        shape = query.shape(node.inputs[1]) or ()
        sizes = [size if isinstance(size, int) else UNKNOWN for size in shape]
        taps, groups = prod(sizes[2:]), int(node.attrs.get("group", 1))
        if node.op != "Conv" or len(sizes) != IMAGE_RANK or taps > MOST_TAPS:
            return None
        write = elements(node.outputs[0])
        amounts = {
            "macs": write * sizes[1] * taps,
            "read": elements(node.inputs[0]),
            "write": write,
            "weights": prod(sizes),
        }
        variant = _variant(sizes[1], taps, groups)
        plain = "plain" if variant in ("grouped by 4", "grouped by 8") else "blocked"
        return Price(
            self.ns("Conv", f"{variant} {plain}", "float", **amounts), self.ns("QLinearConv", variant, "u8", **amounts)
        )

    def _product(self, node: Node) -> Price:
        shape = query.shape(node.inputs[1]) or ()
        sizes = [size if isinstance(size, int) else UNKNOWN for size in shape]
        write = elements(node.outputs[0])
        _, axis = channel_axes(node.op, node.attrs, len(sizes))
        inner = 1 if axis is None else sizes[axis]
        amounts = {"macs": write * inner, "read": elements(node.inputs[0]), "write": write, "weights": prod(sizes)}
        kernel = "QGemm" if node.op == "Gemm" else "MatMulIntegerToFloat"
        return Price(self.ns(node.op, "", "float", **amounts), self.ns(kernel, "", "u8", **amounts))


def _variant(channels: int, taps: int, groups: int) -> str:
    """Return the table's variant name of a convolution; `channels`: input channels per group."""
    if groups > 1 and channels == 1:
        return "depthwise 3x3" if taps <= SMALL_TAPS else "depthwise 5x5"
    if groups > 1:
        return f"grouped by {min(GROUPED, key=lambda size: abs(size - channels))}"
    if channels < FEW_CHANNELS and taps > 1:
        return "3x3" if taps <= SMALL_TAPS else "stem"  # small kernels: `widen_stems` adds a fourth channel
    return "1x1" if taps == 1 else "3x3"


_Kernel = tuple[str, str, str]

ELEMENTWISE_KERNELS: Final[dict[str, tuple[_Kernel, _Kernel]]] = {
    "Add": (("Add", "", "float"), ("QLinearAdd", "", "u8")),
    "Mul": (("Mul", "", "float"), ("QLinearMul", "", "u8")),
    "Concat": (("Concat", "", "float"), ("QLinearConcat", "NHWC", "u8")),
    "Sigmoid": (("Sigmoid", "", "float"), ("QLinearSigmoid", "", "u8")),
    "LeakyRelu": (("LeakyRelu", "", "float"), ("QLinearLeakyRelu", "", "u8")),
    "MaxPool": (("MaxPool", "3x3 blocked", "float"), ("NhwcMaxPool", "3x3", "u8")),
    "AveragePool": (("AveragePool", "2x2 blocked", "float"), ("QLinearAveragePool", "2x2", "u8")),
    "GlobalAveragePool": (("GlobalAveragePool", "blocked", "float"), ("QLinearGlobalAveragePool", "", "u8")),
    "Resize": (("Resize", "nearest", "float"), ("Resize", "nearest", "u8")),
    "Pad": (("Pad", "1", "float"), ("Pad", "1", "u8")),
    "Softmax": (("Softmax", "", "float"), ("QLinearSoftmax", "", "u8")),
}
"""Kernels that onnxruntime has for an op, in float and in integers: name, variant and type as in the table."""


@cache
def load_costs(path: str | None = None) -> KernelCosts:
    """Load the table from a file that ``benchmarks.kernels`` wrote; None: the bundled one.

    Raises:
        RecipeError: the file cannot be read, or is not such a table.
    """
    try:
        rows = json.loads(read_regular(path or BUNDLED, LARGEST))["fits"]
        fits = {
            (row["kernel"], row["variant"], row["type"]): Fit(**{kind: _cost(row[kind]) for kind in KINDS})
            for row in rows
        }
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:100]}"
        raise RecipeError(
            f"KERNEL_COSTS: {path} is not a table of kernel costs ({reason}); write one with "
            "python -m benchmarks.kernels --output FILE"
        ) from error
    return KernelCosts(fits)


def _cost(value: object) -> float:
    """Convert a JSON value to nanoseconds; raise TypeError or ValueError if it is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a cost is a number, not {type(value).__name__}")
    if not 0 <= value < inf:
        raise ValueError(f"a cost is 0 or more, not {value}")
    return float(value)

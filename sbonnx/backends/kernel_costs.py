"""Costs of kernels, as plans read them: linear formulas by kernel, from a table of measurements.

Each runtime that has such a table adds which kernel computes a node, and what it costs to pass between integers and
float.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, prod
from os import PathLike
from typing import Final

from sbonnx.errors import RecipeError
from sbonnx.graph import Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.system.input_files import read_regular

LARGEST: Final = 16 << 20
"""Size limit of a table in bytes; the bundled one has 20 thousand."""

UNKNOWN: Final = 32
"""Assumed size of a dynamic dimension: makes an image large (32 x 32) and a sequence short. The batch counts as 1."""

IMAGE_RANK: Final = 4

KINDS: Final = ("fixed_ns", "mac_ns", "read_ns", "write_ns", "weight_ns", "piece_ns")


@dataclass(frozen=True)
class Amounts:
    """Properties of a node that the time of its kernel depends on.

    Attributes:
        macs: multiplications, or values compared or added by a pool.
        read, write, weights: values.
        pieces: runs of adjacent values that are gathered or copied one by one: positions times taps of a convolution.
    """

    macs: float = 0.0
    read: float = 0.0
    write: float = 0.0
    weights: float = 0.0
    pieces: float = 0.0


@dataclass(frozen=True)
class Fit:
    """Linear cost model of one kernel, in ns: fixed, and per unit of `Amounts`."""

    fixed_ns: float
    mac_ns: float
    read_ns: float
    write_ns: float
    weight_ns: float
    piece_ns: float

    def ns(self, amounts: Amounts) -> float:
        """Compute the time of one run in nanoseconds."""
        return (
            self.fixed_ns
            + self.mac_ns * amounts.macs
            + self.read_ns * amounts.read
            + self.write_ns * amounts.write
            + self.weight_ns * amounts.weights
            + self.piece_ns * amounts.pieces
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


def positions(tensor: Tensor) -> int:
    """Count the positions of a feature map (N, C, ...) for one sample: the product of all sizes after the channels."""
    shape = query.shape(tensor) or ()
    return prod(size if isinstance(size, int) and size > 0 else UNKNOWN for size in shape[2:])


def channels(tensor: Tensor) -> int | None:
    """Return the number of channels of a feature map, or None if it is none or has an unknown number."""
    shape = query.shape(tensor)
    size = shape[1] if shape is not None and len(shape) == IMAGE_RANK else None
    return size if isinstance(size, int) and size > 0 else None


@dataclass(frozen=True)
class KernelCosts(ABC):
    """Table of kernel costs of one runtime.

    Attributes:
        fits: by kernel, variant and types: "float", "u8" (int8 weights), or "u8u8" (uint8 weights).
        margin: factor by which kernels in integers count as slower when ops are placed. Where integers gain little,
            it keeps ops in float whose gain is within the error of the table.
        source: kind of CPU of a bundled table, or the digest of a file (`file_digest`).
    """

    fits: Mapping[tuple[str, str, str], Fit]
    margin: float = field(default=1.0, kw_only=True)
    source: str = field(default="", kw_only=True)

    def slowed(self, factor: float) -> KernelCosts:
        """Return the table with kernels on integers that take `factor` times as long."""
        fits = {
            key: Fit(*(factor * getattr(fit, kind) for kind in KINDS)) if key[2] == "u8" else fit
            for key, fit in self.fits.items()
        }
        return replace(self, fits=fits)

    def with_unsigned_weights(self) -> KernelCosts:
        """Return the table for sessions in which 8-bit products are exact (`EXACT_PRODUCTS`): weights are uint8 there.

        Kernels that were not measured with such weights keep their costs.
        """
        unsigned = {(*key[:2], "u8"): fit for key, fit in self.fits.items() if key[2] == "u8u8"}
        return replace(self, fits={**self.fits, **unsigned})

    def ns(self, kernel: str, variant: str, kind: str, amounts: Amounts) -> float:
        """Compute the time of a kernel in nanoseconds; 0 for one that is not in the table."""
        fit = self.fits.get((kernel, variant, kind))
        return 0.0 if fit is None else fit.ns(amounts)

    @abstractmethod
    def of(self, node: Node) -> Price | None:
        """Return both costs of a node, or None for an op without measurements."""

    @abstractmethod
    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a QuantizeLinear after a float kernel; `reorder`: from blocks of channels."""

    @abstractmethod
    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a DequantizeLinear before float kernels; `reorder`: into blocks of channels."""

    def writes_float(self, node: Node) -> bool:
        """Return whether the integer kernel of a node writes float in any case."""
        return False

    def reorder_input(self, tensor: Tensor) -> float:
        """Compute the time of a conversion from channels first to blocks of channels."""
        return 0.0

    def reorder_output(self, tensor: Tensor) -> float:
        """Compute the time of a conversion from blocks of channels to channels first."""
        return 0.0

    def blocked(self, nodes: Iterable[Node]) -> frozenset[str]:
        """Return the names of the tensors that float kernels write in blocks of channels; nodes are sorted."""
        return frozenset()

    def reads_blocks(self, node: Node, index: int, blocked: Collection[str]) -> bool:
        """Return whether the float kernel of a node reads an input in blocks of channels."""
        return False


def matrix_amounts(node: Node) -> Amounts:
    """Return the amounts of a product with a constant matrix."""
    shape = query.shape(node.inputs[1]) or ()
    sizes = [size if isinstance(size, int) else UNKNOWN for size in shape]
    write = elements(node.outputs[0])
    _, axis = channel_axes(node.op, node.attrs, len(sizes))
    inner = 1 if axis is None else sizes[axis]
    return Amounts(write * inner, elements(node.inputs[0]), write, prod(sizes))


def conv_sizes(node: Node) -> tuple[int, int, int, int]:
    """Return input channels per group, taps, output channels and groups of a convolution."""
    shape = query.shape(node.inputs[1]) or ()
    sizes = [max(size, 1) if isinstance(size, int) else UNKNOWN for size in shape]
    outputs, inner = (*sizes[:2], 1, 1)[:2]
    return inner, prod(sizes[2:]), outputs, max(int(node.attrs.get("group", 1)), 1)


DIGEST: Final = "sha256:"
"""Beginning of the digest of a table."""


def file_digest(path: str | PathLike[str], command: str = "") -> str:
    """Return the digest of a table of kernel costs, as reports and the metadata of files name it.

    Args:
        path: the file.
        command: see `read_table`.

    Raises:
        RecipeError: it cannot be read.
    """
    try:
        return f"{DIGEST}{hashlib.sha256(read_regular(path, LARGEST)).hexdigest()[:16]}"
    except OSError as error:
        raise _unreadable(path, error, command) from error


def _unreadable(path: str | PathLike[str], error: Exception, command: str) -> RecipeError:
    reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {str(error)[:100]}"
    return RecipeError(f"KERNEL_COSTS: {path} is not a table of kernel costs ({reason}); write one with {command}")


def read_table(
    path: str | PathLike[str], command: str, lowest: Mapping[str, float] | None = None
) -> tuple[dict[tuple[str, str, str], Fit], dict[str, float]]:
    """Read a table of kernel costs.

    Args:
        path: JSON with the keys "fits" and "machine".
        command: writes such a table; for messages.
        lowest: numbers of at least 1 that the machine has, with their defaults.

    Returns:
        The fits by kernel, variant and type, and the numbers of the machine.

    Raises:
        RecipeError: the file cannot be read, or is not such a table.
    """
    try:
        table = json.loads(read_regular(path, LARGEST))
        rows, machine = table["fits"], table.get("machine", {})
        fits = {
            (row["kernel"], row["variant"], row["type"]): Fit(**{kind: _cost(row[kind]) for kind in KINDS})
            for row in rows
        }
        numbers = {name: _cost(machine.get(name, default)) for name, default in (lowest or {}).items()}
        for name, number in numbers.items():
            if number < 1:
                raise ValueError(f"{name} is 1 or more, not {number}")
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, error, command) from error
    return fits, numbers


def _cost(value: object) -> float:
    """Convert a JSON value to nanoseconds; raise TypeError or ValueError if it is not a number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"a cost is a number, not {type(value).__name__}")
    if not 0 <= value < inf:
        raise ValueError(f"a cost is 0 or more, not {value}")
    return float(value)

"""Sums of products, while inputs come by: over rows, and over the windows of a convolution by their lags."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.moments.lags import LagPlan, lag_plan, tap_sums
from sbonnx.moments.planes import Boxes
from sbonnx.spec import Array

CHUNK: Final = 16 << 20
"""Bytes of inputs or rows that wait for their products; so many, too, are unfolded or copied for one product."""

WAITING: Final = 1024
"""Rows wait until they are so many: the float64 sums are seldom added to."""

ROWS: Final = 4096
"""At most so many rows are multiplied at a time: float32 sums stay short."""

SLAB: Final = 8 << 20
"""Bytes of moments that are put together at a time from sums by lags: they stay in the cache."""

Streams: TypeAlias = tuple[Array, ...]
"""The same thing of the float network and, where there are two, of the quantized one."""

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Which streams are multiplied with which: the left factor and the right one."""

_CHANNELS = (slice(None), slice(None))
"""All channels, of the whole batch."""

_SPACE = "nabcde"
"""Letters of the batch and the axes of space."""


@dataclass(frozen=True)
class Arrays:
    """Where sums lie and products are made: numpy's arrays, or torch's on a device.

    Attributes:
        zeros: float64 zeros of a shape.
        load: an array of numpy's as one of these.
        fetch: the inverse.
        einsum: as numpy's.
    """

    zeros: Callable[[tuple[int, ...]], Any]
    load: Callable[[Array], Any]
    fetch: Callable[[Any], Array]
    einsum: Callable[..., Any]

    @staticmethod
    def on(device: str) -> Arrays:
        """torch's on "cuda" where torch is installed and has a GPU; else numpy's."""
        if device == "cuda" and importlib.util.find_spec("torch") is not None:
            import torch

            if torch.cuda.is_available():
                return torch_arrays("cuda")
        return Arrays(np.zeros, np.asarray, np.asarray, np.einsum)


def torch_arrays(device: str) -> Arrays:
    """torch's, on a device that it has."""
    import torch

    return Arrays(
        lambda shape: torch.zeros(shape, dtype=torch.float64, device=device),
        lambda array: torch.tensor(array, device=device),
        lambda tensor: np.asarray(tensor.cpu().numpy()),
        torch.einsum,
    )


@final
class RowSums:
    """Sums of rows and of products of rows.

    Args:
        groups, inputs: G and K of the rows (G, n, K).
        pairs: the products wanted; (i, i) is symmetric.
        streams: how many come.
        arrays: where the sums lie.

    Attributes:
        matrices: float64 (G, K, K) for each pair.
        totals: float64 (G, K) for each stream.
    """

    def __init__(self, groups: int, inputs: int, pairs: Pairs, streams: int, arrays: Arrays) -> None:
        self._pairs, self._arrays, self._shape = pairs, arrays, (groups, inputs, inputs)
        self._matrices: list[Any] = []
        self.totals = [np.zeros((groups, inputs)) for _ in range(streams)]
        self._limit = rows_at_once(groups * inputs, WAITING)
        self._waiting: list[Array] = []
        self._count = 0

    @property
    def matrices(self) -> list[Any]:
        """Made when first asked for: where all is summed by lags, only then."""
        if not self._matrices:
            self._matrices = [self._arrays.zeros(self._shape) for _ in self._pairs]
        return self._matrices

    def add(self, rows: Streams) -> None:
        """Take in rows (G, n, K), float32; they are copied if they must wait."""
        count = rows[0].shape[1]
        if self._count + count > self._limit:
            self.flush()
        if count >= self._limit:
            self._multiply(rows)
            return
        if not self._waiting:
            groups, inputs, _ = self._shape
            self._waiting = [np.empty((groups, self._limit, inputs), np.float32) for _ in rows]
        for waiting, stream in zip(self._waiting, rows, strict=True):
            waiting[:, self._count : self._count + count] = stream
        self._count += count

    def flush(self) -> None:
        """Multiply what waits."""
        if self._count:
            self._multiply(tuple(waiting[:, : self._count] for waiting in self._waiting))
            self._count = 0

    def _multiply(self, rows: Streams) -> None:
        groups, inputs, _ = self._shape
        limit = rows_at_once(groups * inputs)
        for first in range(0, rows[0].shape[1], limit):
            some = [stream[:, first : first + limit] for stream in rows]
            ones = np.ones((1, some[0].shape[1]), np.float32)
            for total, stream in zip(self.totals, some, strict=True):
                total += (ones @ stream)[:, 0]
            loaded = [self._arrays.load(stream) for stream in some]
            for (left, right), matrix in zip(self._pairs, self.matrices, strict=True):
                matrix += loaded[left].swapaxes(1, 2) @ loaded[right]


def rows_at_once(width: int, most: int = ROWS) -> int:
    """How many rows of `width` float32 numbers fit into a chunk, at least 1 and at most `most`."""
    return max(min(most, CHUNK // (4 * width)), 1)


@final
class WindowSums:
    """Sums of products of a convolution's windows, by lags. Inputs of another size in space: see `fits`.

    Args:
        geometry: of the convolution.
        space: size of its inputs (N, C, *space).
        pairs, streams, arrays: as for `RowSums`.
    """

    def __init__(self, geometry: Geometry, space: tuple[int, ...], pairs: Pairs, streams: int, arrays: Arrays) -> None:
        self._layout, self._channels = geometry.layout, geometry.channels
        self._pairs, self._arrays, self._space = pairs, arrays, space
        channels = geometry.layout.groups * geometry.channels
        self._tables = geometry.sources((1, channels, *space))
        self._plans = [lag_plan(self._tables, space, same=left == right) for left, right in pairs]
        alone = geometry.channels == 1 and arrays.einsum is np.einsum
        self._boxes = [Boxes.of(plan, space) if alone else None for plan in self._plans]
        shape = (geometry.layout.groups, geometry.channels, geometry.channels)
        self._sums: list[Any] = [
            [arrays.zeros(shape) for _ in plan.pieces] if boxes is None else boxes.zeros(channels)
            for plan, boxes in zip(self._plans, self._boxes, strict=True)
        ]
        self._planes = [np.zeros((channels, *space)) for _ in range(streams)]
        self._waiting: list[Streams] = []
        self._count = 0

    def fits(self, space: tuple[int, ...]) -> bool:
        """Whether inputs of this size can be added."""
        return space == self._space

    def add(self, inputs: Streams) -> None:
        """Take in inputs (N, C, *space), float32; they are copied if they must wait."""
        places = inputs[0].size // self._planes[0].shape[0]
        limit = rows_at_once(self._planes[0].shape[0], WAITING)
        if self._count and self._count + places > limit:
            self.flush()
        if places >= limit:
            self._multiply(inputs)
        else:
            self._waiting.append(tuple(np.array(stream) for stream in inputs))
            self._count += places

    def flush(self) -> None:
        """Multiply what waits."""
        if self._waiting:
            waiting, self._waiting, self._count = self._waiting, [], 0
            self._multiply(tuple(np.concatenate(stream) for stream in zip(*waiting, strict=True)))

    def fold(self, rows: RowSums) -> None:
        """Add all to the sums over rows; these are given up."""
        self.flush()
        for (left, right), plan, sums, matrix in zip(self._pairs, self._plans, self._sums, rows.matrices, strict=True):
            _fold(plan, sums, matrix, same=left == right)
        for plane, total in zip(self._planes, rows.totals, strict=True):
            total += tap_sums(plane, self._tables).reshape(total.shape)
        self._sums, self._planes = [], []

    def _multiply(self, inputs: Streams) -> None:
        for plane, stream in zip(self._planes, inputs, strict=True):
            plane += stream.sum(axis=0, dtype=np.float64) if len(stream) > 1 else stream[0]
        loaded = [self._arrays.load(stream).swapaxes(0, 1) for stream in inputs]
        most = max(rows_at_once(self._planes[0].shape[0]) // len(inputs[0]), 1)
        for (left, right), plan, boxes, sums in zip(self._pairs, self._plans, self._boxes, self._sums, strict=True):
            if boxes is not None:
                boxes.add(sums, inputs[left], inputs[right])
                continue
            for piece, total in zip(plan.pieces, sums, strict=True):
                for here, there in piece.slices(most):
                    one, other = loaded[left][_CHANNELS + here], loaded[right][_CHANNELS + there]
                    total += self._product(one, other, same=left == right and here == there)

    def _product(self, one: Any, other: Any, *, same: bool) -> Any:
        """Sum over all but the first axis of products, (G, C/G, C/G); `same`: the factors are equal."""
        groups = self._layout.groups
        if self._channels == 1:
            axes = _SPACE[: one.ndim - 1]
            return self._arrays.einsum(f"g{axes},g{axes}->g", one, other)[:, None, None]
        wide = one.reshape(groups, self._channels, -1)
        # numpy knows a product of an array with itself, and does half of it
        return wide @ (wide if same else other.reshape(wide.shape)).swapaxes(1, 2)


def _fold(plan: LagPlan, sums: Sequence[Any], matrix: Any, *, same: bool) -> None:
    """Add sums (G, C/G, C/G) of the pieces of a plan to moments (G, K, K), in place.

    A few channels at a time: all pairs of taps write to the same lines of memory.
    """
    if len(sums) == 0:  # all that is read lies outside
        return
    groups, channels = matrix.shape[0], sums[0].shape[1]
    taps = matrix.shape[1] // channels
    wide = matrix.reshape(groups, channels, taps, channels, taps)
    step = max(SLAB // (8 * groups * taps * taps * channels), 1)
    for some in (slice(first, first + step) for first in range(0, channels, step)):
        for (k, number), terms in plan.entries.items():
            wide[:, some, k, :, number] += sum(sign * sums[piece][:, some] for piece, sign in terms.items())
            if same and k != number:
                across = sum(sign * sums[piece][:, :, some] for piece, sign in terms.items())
                wide[:, some, number, :, k] += across.swapaxes(1, 2)


def parts(count: int, width: int) -> Iterator[Array]:
    """Indices of `count` rows of `width` numbers, as many at a time as are multiplied together."""
    limit = rows_at_once(width)
    for first in range(0, count, limit):
        yield np.arange(first, min(first + limit, count))

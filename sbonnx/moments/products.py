"""Accumulators for sums of products: over rows, and over the windows of a convolution by lags."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

import numpy as np

from sbonnx.linear.im2col import Geometry
from sbonnx.moments.lags import LagPlan, PackedSums, lag_plan, tap_sums
from sbonnx.spec import Array

CHUNK: Final = 16 << 20
"""Bytes of inputs or rows that are buffered before they are multiplied; also the limit for one unfolding or copy."""

WAITING: Final = 1024
"""Rows that are buffered before they are multiplied, so that the float64 sums are updated rarely."""

PANEL: Final = 512
"""Rows of a float32 matrix whose products are computed at a time, so that no second matrix is allocated."""

ROWS: Final = 4096
"""Maximum number of rows in one product, which keeps float32 sums short."""

SLAB: Final = 8 << 20
"""Bytes of moments that are assembled at a time from sums by lags, so that they fit into the processor cache."""

Streams: TypeAlias = tuple[Array, ...]
"""Arrays of the float network and, if there are two streams, of the quantized network."""

Pairs: TypeAlias = tuple[tuple[int, int], ...]
"""Pairs of streams to multiply: left and right factor."""

_CHANNELS = (slice(None), slice(None))
"""Slices that select the whole batch and all channels."""

_SPACE = "nabcde"
"""Einsum letters of the batch and the spatial axes."""


@dataclass(frozen=True)
class Arrays:
    """Array backend for sums and products: numpy, or torch on a device.

    Attributes:
        zeros: creates zeros of a shape and a type, "float64" or "float32".
        load: converts a numpy array to an array of the backend.
        fetch: the inverse of `load`.
        einsum: as `numpy.einsum`.
    """

    zeros: Callable[[tuple[int, ...], str], Any]
    load: Callable[[Array], Any]
    fetch: Callable[[Any], Array]
    einsum: Callable[..., Any]

    @staticmethod
    def on(device: str) -> Arrays:
        """Return the torch backend for "cuda" if torch is installed and has a GPU, else the numpy backend."""
        if device == "cuda" and importlib.util.find_spec("torch") is not None:
            import torch

            if torch.cuda.is_available():
                return torch_arrays("cuda")
        return Arrays(np.zeros, np.asarray, np.asarray, np.einsum)


def torch_arrays(device: str) -> Arrays:
    """Return the torch backend on a device that torch supports."""
    import torch

    return Arrays(
        lambda shape, dtype: torch.zeros(shape, dtype=getattr(torch, dtype), device=device),
        lambda array: torch.tensor(array, device=device),
        lambda tensor: np.asarray(tensor.cpu().numpy()),
        torch.einsum,
    )


@final
class RowSums:
    """Accumulated rows and products of rows.

    Args:
        groups, inputs: G and K of the rows (G, n, K).
        pairs: the products to accumulate; (i, i) is symmetric.
        streams: number of streams.
        arrays: array backend of the sums.
        dtype: of the matrices; "float32": symmetric products are only computed below the diagonal, see `mirror`.

    Attributes:
        matrices: (G, K, K) for each pair, weighted.
        totals: float64 (G, K) for each stream, weighted.
    """

    def __init__(
        self, groups: int, inputs: int, pairs: Pairs, streams: int, arrays: Arrays, dtype: str = "float64"
    ) -> None:
        self._pairs, self._arrays, self._shape = pairs, arrays, (groups, inputs, inputs)
        self._dtype = dtype
        self._matrices: list[Any] = []
        self._shared: tuple[RowSums, int] | None = None
        self.totals = [np.zeros((groups, inputs)) for _ in range(streams)]
        self._limit = rows_at_once(groups * inputs, WAITING)
        self._waiting: list[Array] = []
        self._count = 0

    @property
    def matrices(self) -> list[Any]:
        """Sums of products; allocated on first access, so only when needed if everything is summed by lags."""
        if not self._matrices:
            own = self._pairs if self._shared is None else self._pairs[: self._shared[1]]
            self._matrices = [self._arrays.zeros(self._shape, self._dtype) for _ in own]
            if self._shared is not None:
                self._matrices += self._shared[0].matrices[self._shared[1] :]
        return self._matrices

    def share(self, other: RowSums, first: int) -> None:
        """Add the products from pair `first` on to the matrices of `other`, and keep none of them here."""
        self._shared = other, first

    def release(self) -> None:
        """Release matrices and buffered rows."""
        self._matrices, self._waiting, self._shared, self._count = [], [], None, 0

    def mirror(self) -> None:
        """Copy what is below the diagonal of symmetric float32 matrices above it."""
        if self._dtype == "float64":
            return
        for (left, right), matrix in zip(self._pairs, self.matrices, strict=True):
            for some in self._panels() if left == right else ():
                matrix[:, : some.start, some] = matrix[:, some, : some.start].swapaxes(1, 2)
                block = matrix[:, some, some]
                over = np.triu_indices(block.shape[1], 1)
                block[:, over[0], over[1]] = block[:, over[1], over[0]]

    def _panels(self) -> Iterator[slice]:
        inputs = self._shape[1]
        yield from (slice(first, min(first + PANEL, inputs)) for first in range(0, inputs, PANEL))

    def add(self, rows: Streams, weights: Array) -> None:
        """Add rows (G, n, K), float32, with their weights (n,). Rows are copied if they are buffered."""
        count = rows[0].shape[1]
        if self._count + count > self._limit:
            self.flush()
        if count >= self._limit:
            self._multiply(rows, weights)
            return
        if not self._waiting:
            groups, inputs, _ = self._shape
            self._waiting = [np.empty((groups, self._limit, inputs), np.float32) for _ in rows]
            self._weights = np.empty(self._limit)
        for waiting, stream in zip(self._waiting, rows, strict=True):
            waiting[:, self._count : self._count + count] = stream
        self._weights[self._count : self._count + count] = weights
        self._count += count

    def flush(self, *, last: bool = False) -> None:
        """Multiply and accumulate the buffered rows; `last`: and release their buffers."""
        if self._count:
            waiting = tuple(stream[:, : self._count] for stream in self._waiting)
            self._multiply(waiting, self._weights[: self._count])
            self._count = 0
        if last:
            self._waiting = []

    def _multiply(self, rows: Streams, weights: Array) -> None:
        groups, inputs, _ = self._shape
        limit = rows_at_once(groups * inputs)
        for first in range(0, rows[0].shape[1], limit):
            some = [stream[:, first : first + limit] for stream in rows]
            roots = np.sqrt(weights[None, first : first + limit]).astype(np.float32)
            if (roots != 1).any():
                some = [stream * roots[..., None] for stream in some]
            for total, stream in zip(self.totals, some, strict=True):
                total += (roots @ stream)[:, 0]
            loaded = [self._arrays.load(stream) for stream in some]
            for (left, right), matrix in zip(self._pairs, self.matrices, strict=True):
                if self._dtype == "float64":
                    matrix += loaded[left].swapaxes(1, 2) @ loaded[right]
                    continue
                for part in self._panels():
                    across = slice(0, part.stop if left == right else None)
                    matrix[:, part, across] += loaded[left][:, :, part].swapaxes(1, 2) @ loaded[right][:, :, across]


def rows_at_once(width: int, most: int = ROWS) -> int:
    """Return how many rows of `width` float32 numbers fit into a chunk, at least 1 and at most `most`."""
    return max(min(most, CHUNK // (4 * width)), 1)


@final
class WindowSums:
    """Accumulated products of a convolution's windows, by lags. All inputs need the same spatial size, see `fits`.

    Args:
        geometry: of the convolution.
        space: spatial size of its inputs (N, C, *space).
        pairs, streams, arrays: as for `RowSums`.
    """

    def __init__(self, geometry: Geometry, space: tuple[int, ...], pairs: Pairs, streams: int, arrays: Arrays) -> None:
        self._geometry, self._layout, self._channels = geometry, geometry.layer, geometry.channels
        self._pairs, self._arrays, self._space = pairs, arrays, space
        channels = geometry.layer.groups * geometry.channels
        self._tables = geometry.sources((1, channels, *space))
        self._plans = [lag_plan(self._tables, space, same=left == right) for left, right in pairs]
        alone = geometry.channels == 1 and arrays.einsum is np.einsum
        self._boxes = [PackedSums.of(plan, space) if alone else None for plan in self._plans]
        shape = (geometry.layer.groups, geometry.channels, geometry.channels)
        self._sums: list[Any] = [
            [arrays.zeros(shape, "float64") for _ in plan.pieces] if boxes is None else boxes.zeros(channels)
            for plan, boxes in zip(self._plans, self._boxes, strict=True)
        ]
        self._planes = [np.zeros((channels, *space)) for _ in range(streams)]
        self._waiting: list[Streams] = []
        self._count = 0

    def fits(self, geometry: Geometry, space: tuple[int, ...]) -> bool:
        """Return whether inputs of this spatial size can be added, which an op of this geometry reads."""
        return (geometry, space) == (self._geometry, self._space)

    def add(self, inputs: Streams, weights: Array) -> None:
        """Add inputs (N, C, *space), float32, with their weights (N,). They are copied if they are buffered."""
        places = inputs[0].size // self._planes[0].shape[0]
        limit = rows_at_once(self._planes[0].shape[0], WAITING)
        if self._count and self._count + places > limit:
            self.flush()
        if places >= limit:
            self._multiply(inputs, weights)
        else:
            self._waiting.append((*(np.array(stream) for stream in inputs), weights))
            self._count += places

    def flush(self) -> None:
        """Multiply and accumulate the buffered inputs."""
        if self._waiting:
            waiting, self._waiting, self._count = self._waiting, [], 0
            *inputs, weights = (np.concatenate(stream) for stream in zip(*waiting, strict=True))
            self._multiply(tuple(inputs), weights)

    def fold(self, rows: RowSums) -> None:
        """Add everything to the sums over rows and release these sums."""
        self.flush()
        for (left, right), plan, sums, matrix in zip(self._pairs, self._plans, self._sums, rows.matrices, strict=True):
            _fold(plan, sums, matrix, self._arrays.zeros, same=left == right)
        for plane, total in zip(self._planes, rows.totals, strict=True):
            total += tap_sums(plane, self._tables).reshape(total.shape)
        self._sums, self._planes = [], []

    def _multiply(self, inputs: Streams, weights: Array) -> None:
        roots = np.sqrt(weights).astype(np.float32)
        if (roots != 1).any():
            inputs = tuple(stream * roots.reshape(-1, *[1] * (stream.ndim - 1)) for stream in inputs)
            for plane, stream in zip(self._planes, inputs, strict=True):
                plane += np.einsum("n,n...->...", roots, stream, dtype=np.float64)
        else:
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
                    first, second = loaded[left][_CHANNELS + here], loaded[right][_CHANNELS + there]
                    total += self._product(first, second, same=left == right and here == there)

    def _product(self, one: Any, other: Any, *, same: bool) -> Any:
        """Sum products over all but the first axis, (G, C/G, C/G); `same`: the factors are equal."""
        groups = self._layout.groups
        if self._channels == 1:
            axes = _SPACE[: one.ndim - 1]
            return self._arrays.einsum(f"g{axes},g{axes}->g", one, other)[:, None, None]
        wide = one.reshape(groups, self._channels, -1)
        # numpy recognizes the product of an array with its own transpose and computes half of it
        return wide @ (wide if same else other.reshape(wide.shape)).swapaxes(1, 2)


def _fold(plan: LagPlan, sums: Sequence[Any], matrix: Any, zeros: Callable[..., Any], *, same: bool) -> None:
    """Add sums (G, C/G, C/G) of the pieces of a plan to moments (G, K, K), in place.

    Processes a few channels at a time. Their blocks are collected and added at once, because all pairs of taps write to
    the same cache lines.
    """
    if len(sums) == 0:  # all values that are read are padding
        return
    groups, channels = matrix.shape[0], sums[0].shape[1]
    taps = matrix.shape[1] // channels
    wide = matrix.reshape(groups, channels, taps, channels, taps)
    step = max(SLAB // (8 * groups * taps * taps * channels), 1)
    for first in range(0, channels, step):
        some = slice(first, min(first + step, channels))
        blocks = zeros((groups, some.stop - first, taps, taps, channels), "float64")
        for (k, number), terms in plan.entries.items():
            blocks[:, :, k, number] = sum(sign * sums[piece][:, some] for piece, sign in terms.items())
            if same and k != number:
                across = sum(sign * sums[piece][:, :, some] for piece, sign in terms.items())
                blocks[:, :, number, k] = across.swapaxes(1, 2)
        wide[:, some] += blocks.swapaxes(3, 4)


def parts(count: int, width: int) -> Iterator[Array]:
    """Yield indices of `count` rows of `width` numbers, in batches that are multiplied together."""
    limit = rows_at_once(width)
    for first in range(0, count, limit):
        yield np.arange(first, min(first + limit, count))

"""Beam search for rounding (Babai's nearest plane): columns are rounded one after another with several candidates."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from sbonnx.rounding import base
from sbonnx.rounding.base import Grid, over_rows
from sbonnx.rounding.search.factor import Factor
from sbonnx.spec import Array, QuantSpec
from sbonnx.system.native import address


@dataclass(frozen=True)
class Planes:
    """Rounding problem with its columns in the order of rounding: float32, (G, O, K) unless stated otherwise.

    Attributes:
        weight, scale, zero: of the grid.
        target: the weight, shifted to compensate quantized inputs.
        factor: M_jk / M_kk, (G, K, K), unit upper triangular.
        pivots: M_kk squared, (G, K).
        low, high: of the grid, see `limits_in`.
    """

    weight: Array
    scale: Array
    zero: Array
    target: Array
    factor: Array
    pivots: Array
    low: Array
    high: Array

    @staticmethod
    def of(grid: Grid, factor: Factor, right: Array | None = None) -> Planes:
        """Create the problem of `grid` by the `factor` of its moments, damped or not, with columns in its order.

        If quantized inputs differ from the float inputs, `right` is ``w F`` (`Moments.pull`), (G, O, K).
        """
        floats, scale, zero = (columns(part, factor.order) for part in (grid.weight, grid.scale, grid.zero))
        weight = target = floats.astype(np.float32, copy=False)
        if right is not None:
            target = (floats + factor.shift(columns(right, factor.order))).astype(np.float32)
        return Planes(
            weight,
            scale.astype(np.float32, copy=False),
            zero.astype(np.float32, copy=False),
            target,
            factor.unit,
            np.square(factor.pivots).astype(np.float32),
            limits_in(grid.qmin, factor.order),
            limits_in(grid.qmax, factor.order),
        )

    def part(self, groups: slice, outputs: slice) -> Planes:
        """Return the problem of some groups and outputs."""
        weight, scale = self.weight[groups, outputs], self.scale[groups, outputs]
        zero, target = self.zero[groups, outputs], self.target[groups, outputs]
        low, high = self.low[groups, outputs], self.high[groups, outputs]
        return replace(
            self,
            weight=weight,
            scale=scale,
            zero=zero,
            target=target,
            low=low,
            high=high,
            factor=self.factor[groups],
            pivots=self.pivots[groups],
        )


def columns(matrices: Array, order: Array) -> Array:
    """Permute the columns of each group of (G, O, K) to `order` (G, K)."""
    if len(order) == 1:
        return np.asarray(np.take(matrices, order[0], axis=2))
    return np.asarray(np.take_along_axis(matrices, order[:, None, :], axis=2))


def limits_in(ends: Array, order: Array) -> Array:
    """Return limits of codes (G, O, K) as float32 with the columns in `order`; a view if all are equal."""
    if ends.strides == (0, 0, 0):
        return np.broadcast_to(ends[:1, :1, :1].astype(np.float32), ends.shape)
    return columns(ends, order).astype(np.float32)


def search(planes: Planes, beams: int, block: int) -> tuple[Array, Array]:
    """Search codes (G, O, K), in the order of rounding, and return them with their cost, (G, O); float32.

    Each output keeps its `beams` best candidates. Every candidate is continued with its nearest and its second nearest
    code, and the best ones by ``sum over k of M_kk^2 (free_k - v_k)^2`` are kept. One beam is GPTQ. A block of columns
    is settled when the next block is done: candidates that differ from the best one in this block are dropped, so that
    all candidates share the codes of earlier blocks, and their error is propagated only once.

    Args:
        planes: the problem.
        beams: number of beams, at least 1.
        block: number of columns in a block, at least 1.

    Returns:
        codes; their squared output error by the factor's moments, summed over rows, up to a constant of the layer if
        quantized inputs shift the target.
    """
    groups, outputs, count = planes.weight.shape
    state = _Beams(groups, outputs, beams)
    codes, error = np.empty_like(planes.weight), np.empty_like(planes.weight)
    pending: tuple[slice, Array, Array] | None = None
    for start in range(0, count, block):
        part = slice(start, min(start + block, count))
        settled = pending[0].start if pending else start
        free = planes.target[:, :, part] + error[:, :, :settled] @ planes.factor[:, :settled, part]
        free = state.for_all(free)
        if pending:
            before = pending[0]
            free += pending[2] @ planes.factor[:, before, part]
        own, parents = state.round_block(planes, part, free)
        if pending:
            kept = state.settle(state.follow(pending[1], parents))
            before = pending[0]
            codes[:, :, before] = kept
            values = (kept - planes.zero[:, :, before]) * planes.scale[:, :, before]
            error[:, :, before] = planes.weight[:, :, before] - values
        pending = part, own, state.errors(planes, part, own)
    if pending:
        codes[:, :, pending[0]] = state.best(pending[1])
    return codes, state.cost.min(axis=1).reshape(groups, outputs)


def nearest_plane(planes: Planes, spec: QuantSpec, block: int) -> Array:
    """Compute codes (G, O, K) of small floats, float32, in the order of rounding, as `search` does with one beam."""
    codes, error = np.empty_like(planes.weight), np.empty_like(planes.weight)
    count = planes.weight.shape[2]
    for start in range(0, count, block):
        end = min(start + block, count)
        free = planes.target[:, :, start:end] + error[:, :, :start] @ planes.factor[:, :start, start:end]
        for k in range(start, end):
            scale = planes.scale[:, :, k]
            own = np.clip(free[:, :, k - start] / scale, spec.qmin, spec.qmax).astype(spec.dtype)
            codes[:, :, k] = own
            error[:, :, k] = planes.weight[:, :, k] - codes[:, :, k] * scale
            free[:, :, k + 1 - start :] += error[:, :, k, None] * planes.factor[:, None, k, k + 1 : end]
    return codes


class _Beams:
    """Current candidates: rows (G, O * beams), and their costs so far, (G * O, beams)."""

    def __init__(self, groups: int, outputs: int, beams: int) -> None:
        self.groups, self.outputs, self.beams = groups, outputs, beams
        self.cost = np.full((groups * outputs, beams), np.inf, np.float32)
        self.cost[:, 0] = 0.0
        self.first = (np.arange(groups * outputs) * beams)[:, None]

    def for_all(self, values: Array) -> Array:
        """Repeat (G, O, B) for every beam, (G, O * beams, B). Returns a new array."""
        return np.repeat(values, self.beams, axis=1)

    def follow(self, rows: Array, parents: Array) -> Array:
        """Select the rows (G, O * beams, B) of the parent beams; `parents` (G * O * beams,)."""
        return rows if self.beams == 1 else rows.reshape(len(parents), -1)[parents].reshape(rows.shape)

    def errors(self, planes: Planes, part: slice, own: Array) -> Array:
        """Return `_errors` of the codes of all beams, (G, O * beams, B)."""
        wide = own.reshape(self.groups, self.outputs, self.beams, -1)
        weight, zero, scale = (array[:, :, None, part] for array in (planes.weight, planes.zero, planes.scale))
        return np.asarray((weight - (wide - zero) * scale).reshape(own.shape))

    def best(self, rows: Array) -> Array:
        """Return the rows of the cheapest beam of each output, (G, O, B) of (G, O * beams, B)."""
        wide = rows.reshape(self.groups * self.outputs, self.beams, -1)
        kept = wide[np.arange(len(wide)), self.cost.argmin(axis=1)]
        return np.asarray(kept.reshape(self.groups, self.outputs, -1))

    def settle(self, rows: Array) -> Array:
        """Return the codes of the cheapest beam (G, O, B). Drop beams with other codes in `rows` (G, O * beams, B)."""
        kept = self.best(rows)
        if self.beams > 1:
            same = (rows.reshape(self.groups, self.outputs, self.beams, -1) == kept[:, :, None]).all(axis=3)
            self.cost[~same.reshape(self.cost.shape)] = np.inf
        return kept

    def round_block(self, planes: Planes, part: slice, free: Array) -> tuple[Array, Array]:
        """Round the columns `part`. `free` (G, O * beams, B) contains the optimal unrounded values and is overwritten.

        Returns:
            the codes of the remaining beams, (G, O * beams, B), and the rows (G * O * beams,) they started from.
        """
        width = free.shape[2]
        triangle = np.ascontiguousarray(planes.factor[:, part, part])
        pivots = np.ascontiguousarray(planes.pivots[:, part])
        weight, scale, zero, low, high = (
            np.ascontiguousarray(array[:, :, part])
            for array in (planes.weight, planes.scale, planes.zero, planes.low, planes.high)
        )
        if base.loops is not None:
            return self._compiled(free, (weight, scale, zero, low, high, pivots, triangle))
        weight, scale, zero, low, high = (
            np.moveaxis(array, 2, 0).reshape(width, -1, 1) for array in (weight, scale, zero, low, high)
        )
        pivots = np.repeat(pivots.T, self.outputs, axis=1)[:, :, None]
        free = free.reshape(-1, width)
        steps: list[tuple[Array, Array]] = []
        for k in range(width):
            at = free[:, k].reshape(self.cost.shape)
            code, parents = self._choose(at, scale[k], zero[k], pivots[k], low[k], high[k])
            steps.append((code.reshape(-1), parents))
            if k + 1 == width:
                break
            lost = (weight[k] - (code - zero[k]) * scale[k]).reshape(self.groups, -1, 1)
            rest = free[:, k + 1 :] if self.beams == 1 else free[parents, k + 1 :]
            wide = rest.reshape(self.groups, -1, width - k - 1)
            wide += lost * triangle[:, k, None, k + 1 :]
            free[:, k + 1 :] = rest
        return self._trace(steps)

    def _compiled(self, free: Array, block: tuple[Array, ...]) -> tuple[Array, Array]:
        """Run the compiled loop of `round_block`, one output after another."""
        codes, began = np.empty_like(free), np.empty(self.cost.size, np.int64)
        rows, width = len(self.cost), free.shape[2]
        arrays = tuple(address(array) for array in (free, *block, self.cost, codes, began))
        before = (*arrays, self.outputs, self.beams, width)
        over_rows("beam", before, rows, (), rows * self.beams * width * width // 2)
        return codes, began

    def _choose(
        self, free: Array, scale: Array, zero: Array, pivot: Array, low: Array, high: Array
    ) -> tuple[Array, Array]:
        """Choose the codes (G * O, beams) of one column; return them and their parent rows, (G * O * beams,)."""
        ratio = free / scale + zero
        near = np.rint(ratio)
        first = np.clip(near, low, high)
        weight = scale * scale * pivot
        better = self.cost + weight * np.square(ratio - first)
        if self.beams == 1:
            self.cost = better
            return first, self.first[:, 0]
        second = np.clip(near + np.where(ratio > near, 1, -1).astype(np.float32), low, high)
        worse = np.where(first == second, np.inf, self.cost + weight * np.square(ratio - second))
        costs = np.concatenate([better, worse], axis=1)
        picks = costs.argsort(axis=1, kind="stable")[:, : self.beams]
        self.cost = np.take_along_axis(costs, picks, axis=1)
        code = np.take_along_axis(np.concatenate([first, second], axis=1), picks, axis=1)
        return code, (picks % self.beams + self.first).reshape(-1)

    def _trace(self, steps: list[tuple[Array, Array]]) -> tuple[Array, Array]:
        """Trace back the codes of all columns of a block, and the rows that its beams started from."""
        codes = np.empty((self.cost.size, len(steps)), np.float32)
        row = np.arange(self.cost.size)
        for k in range(len(steps) - 1, -1, -1):
            code, parents = steps[k]
            codes[:, k] = code[row]
            row = parents[row]
        return codes.reshape(self.groups, -1, len(steps)), row

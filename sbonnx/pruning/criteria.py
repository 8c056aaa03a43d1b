"""Criteria: the order in which the groups of a dimension are removed, the least important first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sbonnx.spec import Array

DAMPING: Final = 1e-2
"""Share of the mean second moment that is added to the diagonal before it is inverted."""

STEPS: Final = 64
"""Groups are removed one at a time, or several if more than this many remain: this share of them."""


@dataclass(frozen=True)
class ReaderMoments:
    """A layer that reads a dimension.

    Attributes:
        weight: float64 (G, O, K).
        a: mean products of its inputs, float64 (G, K, K), centred if the layer has a bias.
        columns: that read each group of channels, int64 (groups, G, columns).
    """

    weight: Array
    a: Array
    columns: Array

    @property
    def energy(self) -> float:
        """Mean squared output."""
        return max(float(np.einsum("gok,gok->", self.weight @ self.a, self.weight)), 1e-300)


@dataclass(frozen=True)
class DimensionData:
    """Numbers of a dimension with n groups that criteria read.

    Attributes:
        size: n.
        writers: weights that write it, each (n, weights of a group); those that read it if nothing writes it.
        readers: layers that read it, with moments of their inputs; none without data.
        seed: for random choices.
    """

    size: int
    writers: tuple[Array, ...]
    readers: tuple[ReaderMoments, ...] = ()
    seed: int = 0


Criterion = Callable[[DimensionData], Array]
"""Returns the order of removal, a permutation of the groups, int64 (n,)."""


def random(data: DimensionData) -> Array:
    """Any order, repeatable."""
    return np.random.default_rng(data.seed).permutation(data.size)


def l1norm(data: DimensionData) -> Array:
    """Sum of the absolute weights that write a group (Li et al. 2017)."""
    return _ascending(sum(np.abs(weights).sum(axis=1) for weights in data.writers))


def l2norm(data: DimensionData) -> Array:
    """Sum of the squared weights that write a group."""
    return _ascending(sum(np.square(weights).sum(axis=1) for weights in data.writers))


def output(data: DimensionData) -> Array:
    """Output error of the readers without refit: tr(W_S A_SS W_S'), relative to their output energy."""
    if not data.readers:
        return l2norm(data)
    total = np.zeros(data.size)
    for reader in data.readers:
        places = np.arange(reader.weight.shape[0])[:, None]
        for group, columns in enumerate(reader.columns):
            a = reader.a[places[..., None], columns[:, :, None], columns[:, None, :]]
            shape = (*reader.weight.shape[:2], columns.shape[1])
            w = np.take_along_axis(reader.weight, np.broadcast_to(columns[:, None], shape), axis=2)
            total[group] += float(np.einsum("gok,gok->", w @ a, w)) / reader.energy
    return _ascending(total)


def obs(data: DimensionData) -> Array:
    """Output error of the readers after a refit of their other weights, group by group.

        cost of S = tr(W_S (H^-1_SS)^-1 W_S'),   H = A + damping

    After each removal, H^-1 and W are updated by block elimination, so that later costs include the refit (Hassibi &
    Stork 1993; Kwon et al. 2022 for structures). If more than `STEPS` groups remain, several are removed at a time.
    """
    if not data.readers:
        return l2norm(data)
    states = [_Elimination(reader, data.size) for reader in data.readers]
    left = np.arange(data.size)
    order: list[int] = []
    while len(left) > 1:
        costs = np.sum([state.costs(left) for state in states], axis=0)
        count = max(1, len(left) // STEPS)
        first = np.argsort(costs, kind="stable")[:count]
        gone = left[first]
        order.extend(gone.tolist())
        left = np.delete(left, first)
        for state in states:
            state.remove(gone)
    return np.array([*order, *left.tolist()], np.int64)


class _Elimination:
    """Inverse Hessian and weight of a reader while columns are eliminated; both shrink."""

    def __init__(self, reader: ReaderMoments, size: int) -> None:
        self._weight = reader.weight
        self._energy = reader.energy
        diagonal = np.einsum("gkk->gk", reader.a).mean(axis=1) * DAMPING
        damped = reader.a + (diagonal + (diagonal == 0))[:, None, None] * np.eye(reader.a.shape[-1])
        self._inverse = np.linalg.inv(damped)
        self._columns = reader.columns.copy()

    def costs(self, groups: Array) -> Array:
        """Return the cost of each of these groups alone, float64 (groups,)."""
        columns = self._columns[groups]  # (n, G, s)
        places = np.arange(columns.shape[1])[None, :, None]
        blocks = self._inverse[places[..., None], columns[..., None], columns[..., None, :]]
        wide = self._weight[places, :, columns]  # (n, G, s, O)
        solved = np.linalg.solve(blocks, wide)
        return np.asarray(np.einsum("ngso,ngso->n", wide, solved)) / self._energy

    def remove(self, groups: Array) -> None:
        """Eliminate the columns of these groups and compensate by the others."""
        columns = self._columns[groups]
        gone = columns.transpose(1, 0, 2).reshape(columns.shape[1], -1)  # (G, n s)
        places = np.arange(len(gone))[:, None]
        rows = self._inverse[places, gone]  # (G, s, K)
        blocks = rows[places[..., None], np.arange(gone.shape[1])[None, :, None], gone[:, None, :]]
        step = np.linalg.solve(blocks, rows)
        kept = np.ones((len(gone), self._inverse.shape[1]), bool)
        kept[places, gone] = False
        rest = np.nonzero(kept)[1].reshape(len(gone), -1)
        w = np.take_along_axis(
            self._weight, np.broadcast_to(gone[:, None], (*self._weight.shape[:2], gone.shape[1])), 2
        )
        weight = self._weight - w @ step
        inverse = self._inverse - rows.transpose(0, 2, 1) @ step
        self._weight = np.take_along_axis(weight, np.broadcast_to(rest[:, None], (*weight.shape[:2], rest.shape[1])), 2)
        self._inverse = inverse[places[..., None], rest[:, :, None], rest[:, None, :]]
        number = np.cumsum(kept, axis=1) - 1
        at = np.broadcast_to(np.arange(len(gone))[None, :, None], self._columns.shape)
        self._columns = number[at, self._columns]


def _ascending(values: Array | int) -> Array:
    return np.argsort(values, kind="stable")


CRITERIA: Final[dict[str, Criterion]] = {
    "l1norm": l1norm,
    "l2norm": l2norm,
    "output": output,
    "obs": obs,
    "random": random,
}
"""By name in recipes. Those that need data fall back to l2norm for dimensions without readers that have moments."""

NEEDS_DATA: Final[frozenset[str]] = frozenset({"output", "obs"})


def checked(order: Sequence[int] | Array, size: int) -> Array:
    """Return an order of removal as int64.

    Raises:
        ValueError: it is not a permutation; a criterion is wrong.
    """
    permutation = np.asarray(order, np.int64)
    if sorted(permutation.tolist()) != list(range(size)):
        raise ValueError(f"a criterion returned {permutation.tolist()}, which is no permutation of {size} groups")
    return permutation

"""Error metrics of quantized outputs against float outputs, accumulated feed by feed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np

from sbonnx.errors import DataError
from sbonnx.graph import Graph, query
from sbonnx.metrics.error_sums import CosineSum, errors_by_feed, ratio_db
from sbonnx.report.figures import OutputDifference
from sbonnx.spec import Array

Metric = Callable[[Mapping[str, Array], Mapping[str, Array]], float]
"""Loss of one feed from (changed, float) outputs by name; higher is worse."""

LossKind = Literal["top1", "relative", "metric"]

LOSS_TEXT: Final[dict[LossKind, str]] = {
    "top1": "share of samples whose largest class changes",
    "relative": "norm of the error over that of the output",
    "metric": "the metric given",
}

IMAGE_RANK = 4
"""From this rank on the class axis of an output is assumed to be 1 (NCHW), below it the last."""

NOISE = 1e-3
"""Samples whose outputs differ by less, relative to the largest value, count as equal."""


@dataclass
class _Sums:
    errors: CosineSum = field(default_factory=CosineSum)
    max_abs: float = 0.0
    same: int = 0
    votes: int = 0
    first: tuple[Array, Array] | None = None
    energies: list[Array] = field(default_factory=list)
    moves: list[bool] = field(default_factory=lambda: [False, False])
    ref_range: list[float] = field(default_factory=lambda: [math.inf, -math.inf])
    val_range: list[float] = field(default_factory=lambda: [math.inf, -math.inf])


class OutputDifferences:
    """Accumulates errors over feeds, for each output. Outputs that are not numeric tensors are left out.

    Attributes:
        losses: results of a metric, one per feed, see `sbonnx.metrics.pairs.run_pairs`.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.losses: list[float] = []
        self._sums = [(name, _Sums()) for name in names]  # a graph may list an output twice

    def add(self, reference: Sequence[Any], value: Sequence[Any]) -> None:
        """Add the outputs of one feed, in the order of the names."""
        for (_, sums), ref, val in zip(self._sums, reference, value, strict=True):
            if not isinstance(ref, np.ndarray) or ref.dtype.kind not in "fiub":
                sums.errors.parts.append((0.0, 0.0))
                continue
            pair = sums.errors.add(ref, val)
            if pair is not None and ref.size:
                _accumulate(sums, ref, val, *pair)

    def result(self) -> tuple[OutputDifference, ...]:
        """Return the errors of every output that had numeric values."""
        return tuple(_finish(name, sums) for name, sums in self._sums if sums.errors.count or sums.errors.mismatched)

    def by_feed(self) -> tuple[float, ...]:
        """Return the error of each feed, see `errors_by_feed`; () if all outputs are 0."""
        errors = errors_by_feed([sums.errors for _, sums in self._sums])
        return () if errors is None else tuple(errors.tolist())


def _compare_samples(sums: _Sums, ref: Array, val: Array) -> None:
    """Record whether any sample (row) differs from the first: float by more than noise, quantized at all."""
    if ref.ndim == 0:
        return
    if sums.first is None:
        sums.first = (ref[:1], val[:1])
    if ref.shape[1:] == sums.first[0].shape[1:]:
        with np.errstate(invalid="ignore"):  # inf - inf
            away = float(np.max(np.abs(ref - sums.first[0])))
        sums.moves[0] |= away > NOISE * float(np.max(np.abs(sums.first[0])))
        sums.moves[1] |= not np.array_equal(np.broadcast_to(sums.first[1], val.shape), val)


def _accumulate(sums: _Sums, reference: Array, value: Array, counted: Array, counted_value: Array) -> None:
    """Add what is no sum of energies; `counted`: the values that `ErrorSum` counts."""
    ref, val = reference.astype(np.float64), value.astype(np.float64)
    _compare_samples(sums, ref, val)
    if ref.ndim >= 2:
        axis = 1 if ref.ndim >= IMAGE_RANK else -1
        if ref.shape[axis] >= 2:
            equal = ref.argmax(axis) == val.argmax(axis)
            sums.same += int(equal.sum())
            sums.votes += equal.size
    good = np.isfinite(ref) & np.isfinite(val)
    sums.energies.append(_row_energies(np.where(good, ref, 0), np.where(good, val, 0)))
    if not counted.size:
        return
    sums.max_abs = max(sums.max_abs, float(np.abs(counted - counted_value).max()))
    for span, x in ((sums.ref_range, counted), (sums.val_range, counted_value)):
        span[0], span[1] = min(span[0], float(x.min())), max(span[1], float(x.max()))


def _row_energies(reference: Array, value: Array) -> Array:
    """Compute the energy of each row and of its error, shape (2, rows)."""
    rows = reference.shape[0] if reference.ndim else 1
    return np.stack([(values.reshape(rows, -1) ** 2).sum(1) for values in (reference, reference - value)])


def _spread_db(energies: Array) -> float:
    """Compute the standard error of a ratio of sums of samples, in dB: delta method (Cochran 1977, 2.11)."""
    signal, noise = energies
    ratio = noise.sum() / signal.sum() if signal.sum() else 0.0
    if len(signal) < 2 or not ratio:
        return math.inf
    residual = float(((noise - ratio * signal) ** 2).sum())
    return 10 / math.log(10) * math.sqrt(residual * len(signal) / (len(signal) - 1)) / float(noise.sum())


def _finish(name: str, sums: _Sums) -> OutputDifference:
    errors = sums.errors
    varies = sums.ref_range[1] > sums.ref_range[0]
    return OutputDifference(
        name=name,
        mse=errors.noise / max(errors.count, 1),
        max_abs=sums.max_abs,
        sqnr_db=-math.inf if errors.not_finite else ratio_db(errors.signal, errors.noise),
        cosine=errors.cosine,
        agreement=sums.same / sums.votes if sums.votes else None,
        not_finite=errors.not_finite,
        compared=errors.count,
        mismatched=errors.mismatched,
        constant=varies and sums.val_range[0] == sums.val_range[1],
        frozen=sums.moves == [True, False],
        low=sums.val_range[0],
        high=sums.val_range[1],
        spread_db=_spread_db(np.concatenate(sums.energies, axis=1)) if sums.energies else math.inf,
    )


def loss_kind(asked: str, graph: Graph) -> LossKind:
    """Resolve a LOSS of a recipe: "auto" is "top1" if the model has one output (N, C) with C > 1, else "relative"."""
    if asked in ("top1", "relative"):
        return "top1" if asked == "top1" else "relative"
    shape = query.shape(graph.outputs[0]) if len(graph.outputs) == 1 else None
    classes = shape[1] if shape is not None and len(shape) == 2 else None
    return "top1" if isinstance(classes, int) and classes > 1 else "relative"


def loss_of(outputs: Sequence[OutputDifference], kind: LossKind, losses: Sequence[float]) -> float:
    """Compute a loss.

    Args:
        outputs: errors of all outputs.
        kind: "top1": share of samples whose largest class changes; "relative": norm of the error divided by that of the
            output, for the worst output; "metric": mean of `losses`.
        losses: results of a metric, one per feed.

    Raises:
        DataError: the loss is "top1" and no output has classes, or a metric returned a non-finite value.
    """
    if kind == "metric":
        if not all(map(math.isfinite, losses)):
            raise DataError("the metric gave a loss that is not a finite number: it takes (changed, float) outputs")
        return float(np.mean(losses))
    if kind == "relative":
        return math.sqrt(max(output.relative for output in outputs))
    changed = changed_share(outputs)
    if changed is None:
        raise DataError("the loss is top1, and no output of the model holds classes: use relative")
    return changed


def changed_share(outputs: Sequence[OutputDifference]) -> float | None:
    """Return the share of samples whose largest class differs, of the worst output; None without classes."""
    votes = [output.agreement for output in outputs if output.agreement is not None]
    return 1 - min(votes) if votes else None

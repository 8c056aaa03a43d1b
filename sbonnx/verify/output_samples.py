"""Figures of one output sample by sample, in float and quantized, from which nature and quality are decided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.spec import Array
from sbonnx.verify.output_forms import UNKNOWN_FORM, OutputForm

FLOOR: Final = 1e-7
"""Smallest probability in a divergence: quantized probabilities are 0 below half a step."""

SUM_ERROR: Final = 0.02
"""Maximum distance of a sum of probabilities from 1."""


@dataclass
class OutputSamples:
    """Figures of one output, one entry a sample.

    Attributes:
        form: structure behind the output.
        shape: of one sample of the first feed, without the batch axis.
        array: shape of the whole output on the first feed.
        kind: kind of its type, as numpy's `dtype.kind`: "f", "i", "u" or "b".
        wide_integers: whether it is integers of more than 8 bits, which are numbers of something, not magnitudes.
        inputs: (name, is float, shape) of each input of the first feed, in order.
        varies: the float output has several shapes for inputs of one shape.
        energies: (energy of the float sample, energy of its error), rows.
        equal: share of equal values.
        same_shape: whether the quantized sample has the shape of the float one.
        agree: whether the top class is the same; empty if the shape is not that of classes.
        divergences: KL divergence of the probabilities, in nats.
        tops: top float class.
        peaks: probability of that class.
        probabilities: whether all float samples are probabilities, or logarithms of them.
        classes: number of classes; 0 if the shape is not that of classes.
    """

    form: OutputForm = UNKNOWN_FORM
    shape: tuple[int, ...] | None = None
    array: tuple[int, ...] = ()
    kind: str = "f"
    wide_integers: bool = False
    inputs: tuple[tuple[str, bool, tuple[int, ...]], ...] = ()
    varies: bool = False
    energies: list[tuple[float, float]] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)
    same_shape: list[bool] = field(default_factory=list)
    agree: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    probabilities: bool = True
    classes: int = 0
    spread: SampleSpread = field(default_factory=lambda: SampleSpread())  # noqa: PLW0108 - defined below
    _shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def add(self, reference: Any, value: Any, inputs: Mapping[str, Array]) -> None:
        """Add the output of one feed; outputs that are not numeric tensors are ignored.

        The rows of the output are samples if it has as many as the first input has, else it is one sample.
        """
        if not isinstance(reference, np.ndarray) or reference.dtype.kind not in "fiub":
            return
        rows = rows_of(inputs.values())
        split = bool(reference.ndim) and len(reference) == rows
        if self.shape is None:
            self._open(reference, inputs, split)
        before = self._shapes.setdefault(tuple(array.shape for array in inputs.values()), reference.shape)
        self.varies |= before != reference.shape
        if not isinstance(value, np.ndarray) or value.shape != reference.shape:
            self.same_shape.extend([False] * (rows if split else 1))
            return
        if not reference.size:
            return
        for ref, val in zip(reference, value, strict=True) if split else [(reference, value)]:
            self.same_shape.append(True)
            self._add_sample(np.asarray(ref), np.asarray(val))

    @property
    def one_class(self) -> bool:
        """Whether several samples have the same top class."""
        return len(self.tops) > 1 and len(set(self.tops)) == 1

    def _open(self, reference: Array, inputs: Mapping[str, Array], split: bool) -> None:
        self.shape = reference.shape[1:] if split else reference.shape
        self.array = reference.shape
        self.kind = reference.dtype.kind
        self.wide_integers = self.kind in "iu" and reference.dtype.itemsize > 1
        self.inputs = tuple((name, array.dtype.kind == "f", array.shape) for name, array in inputs.items())
        fits = self.kind == "f" and split and self.form.classes == int(np.prod(self.shape)) > 1
        self.classes = self.form.classes if fits else 0

    def _add_sample(self, ref: Array, val: Array) -> None:
        self.equal.append(float((ref == val).mean()))
        ref, val = ref.astype(np.float64), val.astype(np.float64)
        if self.classes == ref.size and np.isfinite(ref).all() and np.isfinite(val).all():
            self._add_classes(ref.reshape(1, -1), val.reshape(1, -1))
        known = np.isfinite(ref) & np.isfinite(val)
        ref, val = np.where(known, ref, 0), np.where(known, val, 0)
        self.energies.append((float((ref**2).sum()), float(((ref - val) ** 2).sum())))
        self.spread.add(ref)

    def _add_classes(self, ref: Array, val: Array) -> None:
        given = _is_probability(ref)
        self.probabilities &= given or _is_probability(np.exp(np.minimum(ref, 1.0)))
        p, q = (_probabilities(one, given) for one in (ref, val))
        top = p.argmax(1)
        self.agree.append(float((top == q.argmax(1)).mean()))
        self.divergences.append(float((p * (np.log(p) - np.log(q))).sum(1).mean()))
        self.tops.extend(top.tolist())
        self.peaks.extend(p.max(1).tolist())


def rows_of(inputs: Iterable[Array]) -> int:
    """Return the number of samples of a feed: the length of the first input that has axes."""
    return next((len(array) for array in inputs if array.ndim), 1)


class SampleSpread:
    """Variation between samples: energy around their mean, by position."""

    def __init__(self) -> None:
        self.count = 0
        self.energy = 0.0
        self._first: Array | None = None
        self._moved: Array | None = None
        self._moved_energy = 0.0
        self.several_shapes = False

    def add(self, sample: Array) -> None:
        """Add one sample, float64 of any shape; after one of another shape, the variation is unknown."""
        self.count += 1
        self.energy += float((sample**2).sum())
        if self._first is None:
            self._first, self._moved = sample, np.zeros_like(sample)
        if self.several_shapes or self._moved is None or self._first.shape != sample.shape:
            self.several_shapes, self._moved = True, None
            return
        away = sample - self._first
        self._moved += away
        self._moved_energy += float((away**2).sum())

    def variation(self) -> float:
        """Return the energy of the samples around their mean, summed; 0 if it is unknown.

        It is that of independent samples: n / (n - 1) times the sum of squares around the mean of n samples.
        """
        if self._moved is None or self.count < 2:
            return 0.0
        around = self._moved_energy - float((self._moved**2).sum()) / self.count
        return max(around, 0.0) * self.count / (self.count - 1)


def _is_probability(rows: Array) -> bool:
    """Return whether all rows are 0 or more and sum to 1."""
    return bool((rows >= 0).all() and (np.abs(rows.sum(1) - 1) < SUM_ERROR).all())


def _probabilities(rows: Array, given: bool) -> Array:
    """Return probabilities, at least `FLOOR`, of rows of probabilities, their logarithms, or logits."""
    if not given:
        rows = np.exp(rows - rows.max(1, keepdims=True))
    rows = np.maximum(rows, 0)
    rows = np.maximum(rows / np.maximum(rows.sum(1, keepdims=True), FLOOR), FLOOR)
    found: Array = rows / rows.sum(1, keepdims=True)
    return found

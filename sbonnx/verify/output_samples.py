"""Figures of one output sample by sample, in float and quantized, from which nature and quality are decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.spec import Array
from sbonnx.verify.output_forms import UNKNOWN_FORM, OutputForm

POSITIONS: Final = 16
"""Maximum number of class vectors of a sample, unless there is one for each token."""

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
        real: whether the output is floating point.
        inputs: (is float, shape) of each input of the first feed, in order.
        tokens: whether the first axis of a sample is that of an integer input.
        varies: the float output has several shapes for inputs of one shape.
        energies: (energy of the float sample, energy of its error), rows.
        cosines: cosine similarities.
        norms: Euclidean norms of the float sample.
        equal: share of equal values.
        same_shape: whether the quantized sample has the shape of the float one.
        agree: share of positions with the same top class; empty if the shape is not that of classes.
        divergences: mean KL divergence of a position, in nats.
        tops: top float class of each position.
        peaks: probability of that class.
        margins: logarithm of its ratio to the probability of the second class.
        probabilities: whether all float positions are probabilities, or logarithms of them.
        classes, positions: number of classes, and of class vectors of a sample; 0 if the shape is not that of classes.
    """

    form: OutputForm = UNKNOWN_FORM
    shape: tuple[int, ...] | None = None
    array: tuple[int, ...] = ()
    real: bool = True
    inputs: tuple[tuple[bool, tuple[int, ...]], ...] = ()
    tokens: bool = False
    varies: bool = False
    energies: list[tuple[float, float]] = field(default_factory=list)
    cosines: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    equal: list[float] = field(default_factory=list)
    same_shape: list[bool] = field(default_factory=list)
    agree: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    probabilities: bool = True
    classes: int = 0
    positions: int = 0
    _first: Array | None = None
    _moved: Array | None = None
    _moved_energy: float = 0.0
    _shapes: dict[Any, tuple[int, ...]] = field(default_factory=dict)

    def add(self, reference: Any, value: Any, inputs: Sequence[Array]) -> None:
        """Add the output of one feed; outputs that are not numeric tensors are ignored.

        The rows of the output are samples if it has as many as the first input has, else it is one sample.
        """
        if not isinstance(reference, np.ndarray) or reference.dtype.kind not in "fiub":
            return
        rows = next((len(array) for array in inputs if array.ndim), 1)
        split = bool(reference.ndim) and len(reference) == rows
        if self.shape is None:
            self._open(reference, inputs, split)
        before = self._shapes.setdefault(tuple(array.shape for array in inputs), reference.shape)
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
        """Whether several positions have the same top class."""
        return len(self.tops) > 1 and len(set(self.tops)) == 1

    def variation(self) -> float:
        """Return the energy of the float samples around their mean, summed; 0 if it is unknown.

        It is that of independent samples: n / (n - 1) times the sum of squares around the mean of n samples.
        """
        count = len(self.energies)
        if self._moved is None or count < 2:
            return 0.0
        around = self._moved_energy - float((self._moved**2).sum()) / count
        return max(around, 0.0) * count / (count - 1)

    def _open(self, reference: Array, inputs: Sequence[Array], split: bool) -> None:
        self.shape = reference.shape[1:] if split else reference.shape
        self.array = reference.shape
        self.real = reference.dtype.kind == "f"
        self.inputs = tuple((array.dtype.kind == "f", array.shape) for array in inputs)
        length = self.shape[0] if len(self.shape) == 2 else 0
        self.tokens = any(not real and shape[1:2] == (length,) for real, shape in self.inputs) and length > 0
        axis = self._class_axis()
        if axis is not None:
            self.classes = self.shape[axis]
            self.positions = int(np.prod(self.shape)) // max(self.classes, 1)

    def _class_axis(self) -> int | None:
        """Return the axis of a sample that may be one of classes, or None."""
        shape = self.shape or ()
        if not self.real or not shape:
            return None
        axis = self.form.axis
        flat = all(size == 1 for size in shape[1:])
        if axis is None and len(shape) > 2 and not flat:
            return None  # a map
        if axis is None:
            axis = 0 if flat else len(shape) - 1
        else:
            axis = axis + len(shape) if axis < 0 else axis - 1
            if not 0 <= axis < len(shape):
                return None
        positions = int(np.prod(shape)) // max(shape[axis], 1)
        binary = shape[axis] == 1 and self.form.end == "sigmoid"
        fits = positions <= POSITIONS or (self.tokens and axis == 1)
        return axis if fits and (shape[axis] > 1 or binary) else None

    def _add_sample(self, ref: Array, val: Array) -> None:
        self.equal.append(float((ref == val).mean()))
        if not self.real:
            return
        ref, val = ref.astype(np.float64), val.astype(np.float64)
        if self.classes and ref.shape == self.shape and np.isfinite(ref).all() and np.isfinite(val).all():
            self._add_classes(ref, val)
        known = np.isfinite(ref) & np.isfinite(val)
        ref, val = np.where(known, ref, 0), np.where(known, val, 0)
        signal, noise = float((ref**2).sum()), float(((ref - val) ** 2).sum())
        norms = float(np.sqrt(signal)), float(np.sqrt((val**2).sum()))
        self.energies.append((signal, noise))
        self.norms.append(norms[0])
        self.cosines.append(
            float((ref * val).sum()) / (norms[0] * norms[1]) if norms[0] * norms[1] else float(not noise)
        )
        self._add_variation(ref)

    def _add_variation(self, ref: Array) -> None:
        if len(self.energies) == 1:
            self._first, self._moved = ref, np.zeros_like(ref)
        if self._first is None or self._moved is None or self._first.shape != ref.shape:
            self._first = self._moved = None
            return
        away = ref - self._first
        self._moved += away
        self._moved_energy += float((away**2).sum())

    def _add_classes(self, ref: Array, val: Array) -> None:
        axis = self._class_axis()
        assert axis is not None
        rows = [np.moveaxis(one, axis, -1).reshape(-1, self.classes) for one in (ref, val)]
        if self.form.end == "sigmoid":
            self._add_decisions(rows[0], rows[1])
            return
        self.probabilities &= _is_probability(rows[0]) or _is_probability(np.exp(np.minimum(rows[0], 1.0)))
        given = _is_probability(rows[0])
        p, q = (_probabilities(one, given) for one in rows)
        top = p.argmax(1)
        self.agree.append(float((top == q.argmax(1)).mean()))
        self.divergences.append(float((p * (np.log(p) - np.log(q))).sum(1).mean()))
        self.tops.extend(top.tolist())
        self.peaks.extend(p.max(1).tolist())
        second, first = np.partition(np.log(p), -2, axis=1)[:, -2:].T
        self.margins.extend((first - second).tolist())

    def _add_decisions(self, ref: Array, val: Array) -> None:
        """Add independent probabilities: decisions at 0.5 for one, the top class for several."""
        p, q = (np.clip(one, FLOOR, 1 - FLOOR) for one in (ref, val))
        same = (p >= 0.5) == (q >= 0.5) if self.classes == 1 else p.argmax(1) == q.argmax(1)
        divergence = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        self.agree.append(float(same.mean()))
        self.divergences.append(float(divergence.sum(1).mean()))


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

"""Figures of one output sample by sample, in float and quantized, from which nature and quality are decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.metrics import ErrorSum
from sbonnx.metrics.error_sums import energy
from sbonnx.recipe.names import OutputTask
from sbonnx.spec import Array
from sbonnx.verify.output_forms import UNKNOWN_FORM, OutputForm

FLOOR: Final = 1e-7
"""Smallest probability in a divergence: quantized probabilities are 0 below half a step."""

SUM_ERROR: Final = 0.02
"""Maximum distance of a sum of probabilities from 1."""

AT_ONCE: Final = 1 << 20
"""Scores of classes that are converted to probabilities at a time: maps have many."""


@dataclass
class ClassSamples:
    """Decisions between classes, one entry a sample.

    A sample has one decision, or one at each position (pixel, step). Its figures are means over the classes that float
    decides for, each with the same weight, so that a background that is nearly everywhere does not hide the rest.

    Attributes:
        independent: scores are probabilities that do not exclude each other, as after a sigmoid; a single one is that
            of the second of two classes.
        agree: share of equal top classes.
        divergences: KL divergence of the probabilities, in nats.
        tops: top classes of float, of all samples.
        peaks: probability of the top class, of samples with one decision.
    """

    independent: bool = False
    agree: list[float] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    tops: set[int] = field(default_factory=set)
    peaks: list[float] = field(default_factory=list)

    def add(self, ref: Array, val: Array, given: bool) -> None:
        """Add a sample: scores in float and quantized, shape (positions, classes).

        Args:
            given: they are probabilities; else logits. Of independent ones, they always are.
        """
        step = max(1, AT_ONCE // ref.shape[1])
        parts = [self._compared(ref[at : at + step], val[at : at + step], given) for at in range(0, len(ref), step)]
        top, same, divergence, peak = (np.concatenate(part) for part in zip(*parts, strict=True))
        kinds, places, counts = np.unique(top, return_inverse=True, return_counts=True)
        weights = 1 / (len(kinds) * counts[places])
        self.agree.append(1.0 if same.all() else float((weights * same).sum()))  # not 1 - 1e-16: it is a hit
        self.divergences.append(float((weights * divergence).sum()))
        self.tops.update(kinds.tolist())
        if len(ref) == 1:
            self.peaks.append(float(peak[0]))

    def _compared(self, ref: Array, val: Array, given: bool) -> tuple[Array, Array, Array, Array]:
        """Return top classes of float, whether they are equal, divergences and top probabilities of positions."""
        if self.independent:
            p, q = (np.clip(rows, FLOOR, 1 - FLOOR) for rows in (ref, val))
            divergence = p * (np.log(p) - np.log(q)) + (1 - p) * (np.log1p(-p) - np.log1p(-q))
        else:
            p, q = (_probabilities(rows if rows.shape[1] > 1 else _two_classes(rows), given) for rows in (ref, val))
            divergence = p * (np.log(p) - np.log(q))
        if self.independent and p.shape[1] == 1:
            p, q = (np.concatenate([1 - rows, rows], 1) for rows in (p, q))
        top = p.argmax(1)
        return top, top == q.argmax(1), divergence.sum(1), p.max(1)


def _two_classes(logits: Array) -> Array:
    """Return logits of two classes, shape (rows, 2), from those of the second one."""
    return np.concatenate([np.zeros_like(logits), logits], 1)


@dataclass
class OutputSamples:
    """Figures of one output, one entry a sample.

    Attributes:
        form: structure behind the output.
        choose: returns what the output means, as the user says, from its shapes; None: its structure decides.
        task: what it returned.
        shape: of one sample of the first feed, without the batch axis.
        array: shape of the whole output on the first feed.
        kind: kind of its type, as numpy's `dtype.kind`: "f", "i", "u" or "b".
        wide_integers: whether it is integers of more than 8 bits, which are numbers of something, not magnitudes.
        inputs: (name, is float, shape) of each input of the first feed, in order.
        varies: the float output has several shapes for inputs of one shape.
        errors: energies of the float samples and of their errors.
        equal: share of equal values.
        same_shape: whether the quantized sample has the shape of the float one.
        scores: its decisions, if it may be logits or probabilities of classes that exclude each other.
        shares: its decisions, if it may be probabilities that do not.
        probabilities: whether all float samples are probabilities of classes that exclude each other, or logarithms of
            them.
        within: whether all float values are within 0 and 1.
        classes: number of classes; 0 if the shape is not that of classes.
        vectors: (float, quantized) vector of each sample, of embeddings.
    """

    form: OutputForm = UNKNOWN_FORM
    choose: Callable[[OutputSamples], OutputTask | None] = lambda samples: None
    task: OutputTask | None = None
    shape: tuple[int, ...] | None = None
    array: tuple[int, ...] = ()
    kind: str = "f"
    wide_integers: bool = False
    inputs: tuple[tuple[str, bool, tuple[int, ...]], ...] = ()
    varies: bool = False
    errors: ErrorSum = field(default_factory=ErrorSum)
    equal: list[float] = field(default_factory=list)
    same_shape: list[bool] = field(default_factory=list)
    scores: ClassSamples = field(default_factory=ClassSamples)
    shares: ClassSamples = field(default_factory=lambda: ClassSamples(independent=True))
    probabilities: bool = True
    within: bool = True
    classes: int = 0
    vectors: list[tuple[Array, Array]] = field(default_factory=list)
    spread: SampleSpread = field(default_factory=lambda: SampleSpread())  # noqa: PLW0108 - defined below
    _class_axis: int | None = None
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
    def decisions(self) -> ClassSamples:
        """The decisions between classes: of independent probabilities, if the task is given and values are such."""
        return self.shares if self.task is not None and self.within and not self.probabilities else self.scores

    @property
    def one_class(self) -> bool:
        """Whether several samples have the same top class."""
        return len(self.decisions.agree) > 1 and len(self.decisions.tops) == 1

    def _open(self, reference: Array, inputs: Mapping[str, Array], split: bool) -> None:
        self.shape = reference.shape[1:] if split else reference.shape
        self.array = reference.shape
        self.kind = reference.dtype.kind
        self.wide_integers = self.kind in "iu" and reference.dtype.itemsize > 1
        self.inputs = tuple((name, array.dtype.kind == "f", array.shape) for name, array in inputs.items())
        self.task = self.choose(self)
        self._class_axis = class_axis(self.task, reference.shape) if self.kind == "f" else None
        if self._class_axis is not None:
            self.classes = reference.shape[self._class_axis]
        elif self.task == "classification":
            self.classes = int(self.kind == "f")
        elif self.kind == "f" and split and self.form.classes == int(np.prod(self.shape)) > 1 and self.task is None:
            self.classes = self.form.classes

    def _add_sample(self, ref: Array, val: Array) -> None:
        self.equal.append(float((ref == val).mean()))
        ref, val = ref.astype(np.float64), val.astype(np.float64)
        fits = self.task is not None or self.classes == ref.size
        if self.classes and fits and np.isfinite(ref).all() and np.isfinite(val).all():
            self._add_classes(*(self._positions(values) for values in (ref, val)))
        if self.task == "embedding":
            self.vectors.append((ref.reshape(-1), val.reshape(-1)))
        self.errors.add(ref, val)
        self.spread.add(np.where(np.isfinite(ref), ref, 0))

    def _positions(self, sample: Array) -> Array:
        """Return scores of a sample by position, shape (positions, classes)."""
        axis = self._class_axis
        if axis is None or -axis > sample.ndim:
            return sample.reshape(1, -1)
        return np.moveaxis(sample, axis, -1).reshape(-1, sample.shape[axis])

    def _add_classes(self, ref: Array, val: Array) -> None:
        several = ref.shape[1] > 1
        given = several and _is_probability(ref)
        self.probabilities &= several and (given or _is_probability(np.exp(np.minimum(ref, 1.0))))
        self.scores.add(ref, val, given)
        if self.task is not None:
            self.within &= bool((ref >= 0).all() and (ref <= 1).all())
            self.shares.add(ref, val, True)


def class_axis(task: OutputTask | None, shape: Sequence[int]) -> int | None:
    """Return the axis of the classes of an output, counted from the end; None if its task has no classes.

    Args:
        shape: with the batch axis. Maps have their classes on axis 1 (NCHW), or on the last one if that is the shortest
            of all but the first. Vectors have them on the axis that is longer than 1, or one score a sample.
    """
    if task == "tokens":
        return -1
    if task == "segmentation":
        return -1 if shape[-1] < min(shape[1:-1]) else 1 - len(shape)
    if task == "classification":
        return next((axis for axis in range(1, len(shape)) if shape[axis] != 1), 1) - len(shape) if shape[1:] else None
    return None


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
        self.energy += energy(sample)
        if self._first is None:
            self._first, self._moved = sample, np.zeros_like(sample)
        if self.several_shapes or self._moved is None or self._first.shape != sample.shape:
            self.several_shapes, self._moved = True, None
            return
        away = sample - self._first
        self._moved += away
        self._moved_energy += energy(away)

    def variation(self) -> float:
        """Return the energy of the samples around their mean, summed; 0 if it is unknown.

        It is that of independent samples: n / (n - 1) times the sum of squares around the mean of n samples.
        """
        if self._moved is None or self.count < 2:
            return 0.0
        around = self._moved_energy - energy(self._moved) / self.count
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
    probabilities: Array = rows / rows.sum(1, keepdims=True)
    return probabilities

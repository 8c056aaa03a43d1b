"""Checks of outputs and labels that several task metrics share. Each message names cause and fix."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from sbonnx.errors import DataError
from sbonnx.spec import Array

LABEL_NAMES: Final = ("label", "labels", "y", "target", "targets")
"""Names of arrays that are taken as labels, in any case."""

SUM_ERROR: Final = 0.02
"""Maximum distance of a sum of probabilities from 1."""


class TaskMetric(Protocol):
    """A metric of outputs against labels. It accumulates figures of each sample, not the outputs.

    Attributes:
        count: number of samples so far.
    """

    @property
    def count(self) -> int: ...

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        """Add the outputs of one feed, by name, and its labels, by name.

        Raises:
            DataError: outputs or labels are not those of this metric.
        """

    def value(self, weights: Array | None = None) -> float:
        """Compute the metric; `weights`: how often each sample counts, shape (count,), None: once."""


def shown(array: Array) -> str:
    """Format dtype and shape: ``float32 (16, 10)``."""
    return f"{array.dtype} ({', '.join(map(str, array.shape))})"


def only_output(outputs: Mapping[str, Array], wanted: str | None, metric: str) -> Array:
    """Return the output that the metric is of, see `output_name`."""
    return np.asarray(outputs[output_name(outputs, wanted, metric)])


def output_name(outputs: Collection[str], wanted: str | None, metric: str) -> str:
    """Return the name of the output that the metric is of: that by name, or the only one.

    Raises:
        DataError: there is no such output, or there are several.
    """
    names = ", ".join(f"'{name}'" for name in outputs)
    if wanted is not None:
        if wanted not in outputs:
            raise DataError(f"{metric}: the model has no output '{wanted}': there are {names}")
        return wanted
    if len(outputs) != 1:
        example = next(iter(outputs), "NAME")
        raise DataError(f"{metric} is of one output and the model has {names}: choose one, as in {metric}:{example}")
    return next(iter(outputs))


def label_of(
    labels: Mapping[str, Any], wanted: str | None, metric: str, usual: Sequence[str] = LABEL_NAMES
) -> tuple[str, Any]:
    """Return name and values of the labels: those of a name, or of one of the usual names.

    Raises:
        DataError: there are none, or several.
    """
    names = ", ".join(f"'{name}'" for name in labels)
    if not labels:
        raise DataError(
            f"{metric} needs labels and the data has none: add an array 'label' to the .npz, class folders, labels.csv "
            "or (feed, label) pairs"
        )
    if wanted is not None and wanted not in labels:
        raise DataError(f"{metric}: the data has no labels '{wanted}': there are {names}")
    candidates = [wanted] if wanted is not None else [name for name in labels if name.lower() in usual]
    if len(candidates) != 1:
        state = f"are {names}" if not candidates else f"are several candidates, {', '.join(map(repr, candidates))}"
        raise DataError(f"{metric}: which array holds the labels? There {state}: name it with --labels")
    return candidates[0], labels[candidates[0]]


def only_label(labels: Mapping[str, Any], wanted: str | None, metric: str) -> Array:
    """Return the labels as an array: those of a name, or of one of `LABEL_NAMES`.

    Raises:
        DataError: there are none, several, or they are not numbers.
    """
    name, values = label_of(labels, wanted, metric)
    numbers = np.asarray(values)
    if numbers.dtype.kind not in "fiub":
        raise DataError(f"{metric}: the labels '{name}' are no numbers but {numbers.dtype}: give class numbers")
    return numbers


def class_scores(output: Array, metric: str) -> Array:
    """Return scores, shape (samples, classes); axes of length 1 after the classes are dropped.

    Raises:
        DataError: the output has another shape, or is not float.
    """
    scores = output.reshape(output.shape[:2]) if output.ndim > 2 and set(output.shape[2:]) == {1} else output
    if scores.ndim != 2 or scores.shape[1] < 2 or scores.dtype.kind != "f":
        raise DataError(
            f"{metric} takes class scores (samples, classes) and the output is {shown(output)}: choose another output, "
            "or convert it with --decode script.py:function"
        )
    return scores.astype(np.float64)


def class_numbers(labels: Array, samples: int, classes: int, metric: str) -> Array:
    """Return labels as int64, shape (samples,).

    Raises:
        DataError: they are float, of another number, or out of range.
    """
    flat = per_sample(labels, samples, metric)
    if flat.dtype.kind == "f":
        raise DataError(f"{metric} takes class numbers and the labels are {shown(labels)}: save them as int64")
    numbers = flat.astype(np.int64)
    if numbers.size and (numbers.min() < 0 or numbers.max() >= classes):
        wrong = int(numbers.min()) if numbers.min() < 0 else int(numbers.max())
        hint = "are the classes counted from 1?" if wrong == classes else "are they labels of this model?"
        raise DataError(f"{metric}: label {wrong} and the output has the classes 0 to {classes - 1}: {hint}")
    return numbers


def per_sample(labels: Array, samples: int, metric: str) -> Array:
    """Return one label for each sample, shape (samples,).

    Raises:
        DataError: they are of another shape.
    """
    flat = labels.reshape(-1) if labels.size == max(labels.shape, default=1) else labels
    if flat.shape != (samples,):
        raise DataError(
            f"{metric} takes one label for each of the {samples} samples of a feed, and the labels are {shown(labels)}"
        )
    return flat


def probabilities(rows: Array) -> Array:
    """Return rows that sum to 1 unchanged, other rows after softmax. Shape (rows, classes), float64."""
    given = (rows >= 0).all(1) & (np.abs(rows.sum(1) - 1) < SUM_ERROR)
    with np.errstate(invalid="ignore"):
        powers = np.exp(rows - rows.max(1, keepdims=True))
    shares: Array = np.where(given[:, None], rows, powers / powers.sum(1, keepdims=True))
    return shares


def joined(parts: list[Array]) -> Array:
    """Concatenate the figures of all feeds, and replace the list by the result, so that this is done once."""
    if len(parts) > 1:
        parts[:] = [np.concatenate(parts)]
    return parts[0] if parts else np.zeros(0)


def counts_of(weights: Array | None, count: int) -> Array:
    """Return how often each sample counts, float64."""
    return np.ones(count) if weights is None else np.asarray(weights, np.float64)

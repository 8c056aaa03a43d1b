"""Metrics of dense outputs: mean IoU of segmentations, MSE and PSNR of signals, perplexity of token scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import counts_of, joined, only_label, only_output, probabilities, shown
from sbonnx.spec import Array

IGNORED_PIXEL: Final = 255
"""Class number of pixels without a label (PASCAL VOC, Cityscapes)."""

IGNORED_TOKEN: Final = -100
"""Label of positions that do not count (torch.nn.CrossEntropyLoss)."""

SMALLEST: Final = 1e-38
"""Least probability of a token."""


@dataclass
class MeanIoU:
    """Mean over classes of intersection / union of pixels, over the whole data set.

    torchmetrics: `JaccardIndex(task="multiclass", average="macro", ignore_index=255)`. Classes that occur neither in
    labels nor in predictions are left out. Outputs: class scores (samples, classes, height, width), or class numbers
    (samples, height, width). Labels: class numbers (samples, height, width); 255: no label.

    Attributes:
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    output: str | None = None
    labels: str | None = None
    _sums: list[Array] = field(default_factory=list)
    _classes: int = 0

    @property
    def count(self) -> int:
        """Number of samples."""
        return sum(len(part) for part in self._sums)

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        output, given = only_output(outputs, self.output, "miou"), only_label(labels, self.labels, "miou")
        if output.ndim == 4 and output.dtype.kind == "f" and output.shape[1] > 1:
            predicted, classes = output.argmax(1), output.shape[1]
        elif output.dtype.kind in "iu" and (output.ndim == 3 or (output.ndim == 4 and output.shape[1] == 1)):
            predicted = output.reshape(len(output), *output.shape[-2:]).astype(np.int64)
            classes = int(predicted.max(initial=0)) + 1
        else:
            raise DataError(
                f"miou takes scores (samples, classes, height, width) or class numbers (samples, height, width), and "
                f"the output is {shown(output)}: choose another output, or convert it with --decode script.py:function"
            )
        truth = given[:, 0] if given.ndim == 4 and given.shape[1] == 1 else given
        if truth.dtype.kind not in "iu" or truth.shape != predicted.shape:
            size = ", ".join(map(str, predicted.shape))
            raise DataError(f"miou takes labels as integers ({size}) and they are {shown(given)}: resize them likewise")
        truth = truth.astype(np.int64)
        counted = truth != IGNORED_PIXEL
        least, most = int(truth[counted].min(initial=0)), int(truth[counted].max(initial=0))
        if least < 0 or (output.dtype.kind == "f" and most >= classes):
            wrong = least if least < 0 else most
            raise DataError(f"miou: label {wrong} and the output has the classes 0 to {classes - 1} (255: no label)")
        self._append(predicted, truth, counted, max(classes, most + 1))

    def _append(self, predicted: Array, truth: Array, counted: Array, classes: int) -> None:
        """Add intersection and union of each sample and class, shape (samples, 2, classes)."""
        sums = np.zeros((len(truth), 2, classes))
        for row, guess, true, use in zip(sums, predicted, truth, counted, strict=True):
            guess, true = guess[use], true[use]
            row[0] = np.bincount(true[guess == true], minlength=classes)
            row[1] = np.bincount(true, minlength=classes) + np.bincount(guess, minlength=classes) - row[0]
        self._classes = max(self._classes, classes)
        self._sums.append(sums)

    def value(self, weights: Array | None = None) -> float:
        pads = [(0, 0), (0, 0)]
        self._sums = [np.pad(part, [*pads, (0, self._classes - part.shape[2])]) for part in self._sums]
        same, union = np.tensordot(counts_of(weights, self.count), joined(self._sums), 1)
        occurs = union > 0
        return float((same[occurs] / union[occurs]).mean()) if occurs.any() else float("nan")


@dataclass
class SquaredError:
    """MSE, or PSNR, of outputs against labels of the same shape.

    MSE: mean over samples of the mean squared difference (scikit-learn: `mean_squared_error`), units of the output
    squared. PSNR: mean over samples of ``10 log10(peak^2 / mse)``, dB (scikit-image: `peak_signal_noise_ratio` of each
    image). The peak is the largest value of integer labels' type; for float labels it is 1 if all are 0 to 1, else 255.

    Attributes:
        ratio: PSNR instead of MSE.
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    ratio: bool
    output: str | None = None
    labels: str | None = None
    _errors: list[Array] = field(default_factory=list)
    _peak: float = 1.0

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._errors))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        name = "psnr" if self.ratio else "mse"
        output, given = only_output(outputs, self.output, name), only_label(labels, self.labels, name)
        shapes = [tuple(size for size in array.shape[1:] if size != 1) for array in (output, given)]
        if output.ndim == 0 or given.ndim == 0 or len(output) != len(given) or shapes[0] != shapes[1]:
            raise DataError(
                f"{name} takes labels of the output's shape: it is {shown(output)}, they are {shown(given)}"
            )
        if self.ratio:
            self._peak = max(self._peak, _peak(given))
        flat = [array.reshape(len(array), -1).astype(np.float64) for array in (output, given)]
        self._errors.append(((flat[0] - flat[1]) ** 2).mean(1))

    def value(self, weights: Array | None = None) -> float:
        errors = joined(self._errors)
        if self.ratio:
            with np.errstate(divide="ignore"):
                errors = 10 * np.log10(self._peak**2 / errors)
        used = errors if weights is None else np.repeat(errors, np.asarray(weights).astype(np.int64))
        return float(used.mean())


def _peak(labels: Array) -> float:
    if labels.dtype.kind in "iu":
        return float(np.iinfo(labels.dtype).max)
    least, most = float(labels.min(initial=0)), float(labels.max(initial=0))
    if least < 0 or most > 255:
        raise DataError(f"psnr takes float labels from 0 to 1 or 0 to 255, and they are {least:.4g} to {most:.4g}")
    return 1.0 if most <= 1 else 255.0


@dataclass
class Perplexity:
    """Perplexity ``exp(mean negative log likelihood of a token)`` over all tokens (torchmetrics: `Perplexity`).

    Outputs: scores (samples, tokens, vocabulary), logits or probabilities. Labels: token numbers (samples, tokens),
    those that each position predicts; -100: not counted.

    Attributes:
        output, labels: names, see `arrays.only_output` and `arrays.only_label`.
    """

    output: str | None = None
    labels: str | None = None
    _sums: list[Array] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._sums))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        output = only_output(outputs, self.output, "perplexity")
        given = only_label(labels, self.labels, "perplexity")
        if output.ndim != 3 or output.dtype.kind != "f":
            raise DataError(
                f"perplexity takes scores (samples, tokens, vocabulary) and the output is {shown(output)}: choose "
                "another output, as in perplexity:logits"
            )
        if given.dtype.kind not in "iu" or given.shape != output.shape[:2]:
            size = ", ".join(map(str, output.shape[:2]))
            raise DataError(f"perplexity takes labels as integers ({size}) and they are {shown(given)}")
        used = given != IGNORED_TOKEN
        if used.any() and (given[used].min() < 0 or given[used].max() >= output.shape[2]):
            wrong = int(given[used].min()) if given[used].min() < 0 else int(given[used].max())
            raise DataError(f"perplexity: label {wrong} and the vocabulary has 0 to {output.shape[2] - 1} (-100: none)")
        for scores, tokens, use in zip(output, given, used, strict=True):
            rows = probabilities(scores[use].astype(np.float64)) if use.any() else np.ones((0, 1))
            chances = rows[np.arange(len(rows)), tokens[use].astype(np.int64)]
            self._sums.append(np.array([[-np.log(np.maximum(chances, SMALLEST)).sum(), len(rows)]]))

    def value(self, weights: Array | None = None) -> float:
        loss, tokens = counts_of(weights, self.count) @ joined(self._sums)
        if not tokens:
            return float("nan")
        return math.exp(loss / tokens) if loss / tokens < 700 else math.inf

"""Metrics of texts and token sequences: word and character error rate, exact match, token accuracy."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import LABEL_NAMES, counts_of, joined, label_of, only_label, only_output, shown
from sbonnx.spec import Array

TEXT_NAMES: Final = ("text", "texts", "transcript", "transcription", "sentence", "reference", *LABEL_NAMES)
"""Names of labels that are taken as texts, in any case."""


def edit_distance(reference: Sequence[Hashable], hypothesis: Sequence[Hashable]) -> int:
    """Compute the Levenshtein distance: the least number of insertions, deletions and substitutions."""
    numbers: dict[Hashable, int] = {}
    first, second = (
        np.array([numbers.setdefault(item, len(numbers)) for item in items], np.int64)
        for items in (reference, hypothesis)
    )
    steps = np.arange(len(second) + 1)
    row = steps
    for place, item in enumerate(first, 1):
        best = np.minimum(row[1:] + 1, row[:-1] + (second != item))
        row = np.minimum.accumulate(np.concatenate([[place], best]) - steps) + steps  # insertions
    return int(row[-1])


def is_text(values: Any) -> bool:
    """Whether values are texts: an array or a list of str."""
    array = np.asarray(values)
    return array.dtype.kind == "U" or (
        array.dtype.kind == "O" and array.size > 0 and all(isinstance(item, str) for item in array.flat)
    )


def text_labels(labels: Mapping[str, Any], wanted: str | None, metric: str) -> list[str]:
    """Return the reference texts, one a sample: those of a name, or of one of `TEXT_NAMES`.

    Raises:
        DataError: there are none, several, or they are no texts.
    """
    texts = {name: values for name, values in labels.items() if is_text(values)}
    name, values = label_of(texts or labels, wanted, metric, TEXT_NAMES)
    if not is_text(values):
        raise DataError(
            f"{metric} takes reference texts and the labels '{name}' are {shown(np.asarray(values))}: add an array "
            "'text' of strings, or a file labels.csv with the columns file and text"
        )
    return [str(text) for text in np.asarray(values).reshape(-1)]


@dataclass
class _Ratio:
    """Ratio of sums over samples: a numerator and a denominator for each.

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

    def value(self, weights: Array | None = None) -> float:
        above, below = counts_of(weights, self.count) @ joined(self._sums)
        return float(above / below) if below else float("nan")


@dataclass
class ErrorRate(_Ratio):
    """Word or character error rate over all samples: the edit distances over the words of the references (jiwer).

    Words are separated by white space; spaces at the ends are no characters. Case and punctuation count.

    Attributes:
        characters: characters instead of words.
    """

    characters: bool = False

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        name = "cer" if self.characters else "wer"
        output = only_output(outputs, self.output, name)
        references = text_labels(labels, self.labels, name)
        if not is_text(output):
            raise DataError(
                f"{name} takes texts and the output is {shown(output)}: give --vocabulary tokens.txt, or convert it "
                "with --decode script.py:function"
            )
        texts = [str(text) for text in output.reshape(-1)]
        _check_length(len(references), len(texts), name)
        pairs = [(self._units(reference), self._units(text)) for reference, text in zip(references, texts, strict=True)]
        rows = [(edit_distance(reference, text), len(reference)) for reference, text in pairs]
        self._sums.append(np.array(rows, np.float64).reshape(-1, 2))

    def _units(self, text: str) -> Sequence[str]:
        return text.strip() if self.characters else text.split()


def _check_length(references: int, samples: int, metric: str) -> None:
    if references != samples:
        raise DataError(f"{metric}: the data has {references} references and the outputs {samples} samples")


@dataclass
class TokenAccuracy(_Ratio):
    """Share of equal tokens, over all that have a label (scikit-learn: `accuracy_score`).

    Outputs: token numbers (samples, tokens), or scores (samples, tokens, vocabulary). Labels: token numbers (samples,
    tokens); below 0: not counted.
    """

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        tokens, truth = _token_pair(outputs, labels, self.output, self.labels, "token_accuracy")
        if tokens.shape != truth.shape:
            raise DataError(
                f"token_accuracy takes labels of the tokens' shape: the tokens are {shown(tokens)}, the labels "
                f"{shown(truth)}"
            )
        counted = truth >= 0
        self._sums.append(np.stack([((tokens == truth) & counted).sum(1), counted.sum(1)], 1).astype(np.float64))


@dataclass
class ExactMatch(_Ratio):
    """Share of samples whose whole sequence equals the reference: of texts, without spaces at the ends, or of tokens.

    Tokens are those of `TokenAccuracy`, and positions without a label do not count. If labels and tokens have different
    lengths, numbers below 0 are padding in both.
    """

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        output = only_output(outputs, self.output, "exact")
        if is_text(output):
            texts, references = output.reshape(-1), text_labels(labels, self.labels, "exact")
            _check_length(len(references), len(texts), "exact")
            hits = [str(text).strip() == reference.strip() for text, reference in zip(texts, references, strict=True)]
        else:
            tokens, truth = _token_pair(outputs, labels, self.output, self.labels, "exact")
            if tokens.shape == truth.shape:
                hits = ((tokens == truth) | (truth < 0)).all(1).tolist()
            else:
                hits = [np.array_equal(row[row >= 0], true[true >= 0]) for row, true in zip(tokens, truth, strict=True)]
        self._sums.append(np.stack([np.array(hits, np.float64), np.ones(len(hits))], 1))


def _token_pair(
    outputs: Mapping[str, Array], labels: Mapping[str, Any], output: str | None, label: str | None, metric: str
) -> tuple[Array, Array]:
    """Return token numbers of outputs and labels, shapes (samples, tokens).

    Raises:
        DataError: they are of other types or shapes, or of different numbers of samples.
    """
    tokens, truth = only_output(outputs, output, metric), only_label(labels, label, metric)
    if tokens.dtype.kind == "f" and tokens.ndim == 3:
        tokens = tokens.argmax(-1)
    if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
        raise DataError(
            f"{metric} takes token numbers (samples, tokens) or scores (samples, tokens, vocabulary), and the output "
            f"is {shown(tokens)}: choose another output, or convert it with --decode script.py:function"
        )
    if truth.dtype.kind not in "iu" or truth.ndim not in (1, 2):
        raise DataError(f"{metric} takes labels as integers (samples, tokens) and they are {shown(truth)}")
    rows = [values.astype(np.int64).reshape(len(values), -1) for values in (tokens, truth)]
    _check_length(len(rows[1]), len(rows[0]), metric)
    return rows[0], rows[1]

"""Texts of token outputs: greedy decoding of CTC scores, and token numbers, with a vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from sbonnx.errors import DataError
from sbonnx.metrics.arrays import only_output, shown
from sbonnx.metrics.text_metrics import is_text
from sbonnx.spec import Array

BLANKS: Final = ("<blk>", "<blank>", "[blank]", "<ctc_blank>", "<eps>", "<pad>", "[PAD]")
"""Names of the blank of CTC, the first that a vocabulary has; padding is the blank of Wav2Vec2."""

SPECIAL: Final = re.compile(r"<(?!unk>|space>)[^<> ]+>|\[(?!UNK\])[A-Za-z_]+\]")
"""Tokens that are no text: ``<s>``, ``[CLS]``."""

WORD_START: Final = "\u2581"
"""Character of SentencePiece that begins a word."""

LENGTHS: Final = re.compile(r"(^|[._/])(\w*_)?(len|lens|length|lengths)$", re.IGNORECASE)
"""Names of outputs that hold the number of valid positions of each sample."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by number, and the number of the blank of CTC.

    Attributes:
        source: where it was read, for messages.
        tokens: token by number.
        blank: number of the blank; None: unknown.
        join: makes a text of token numbers; None: by the tokens' own marks of spaces.
    """

    source: str
    tokens: Mapping[int, str]
    blank: int | None = None
    join: Callable[[list[int]], str] | None = None

    @property
    def size(self) -> int:
        """Number of classes: the largest number + 1."""
        return max(self.tokens, default=-1) + 1

    def fitted(self, classes: int) -> Vocabulary | None:
        """Return the vocabulary of a model with so many classes; None if it is of another model.

        A model with one class more than a list without a blank has the blank at its number, and later tokens move up.
        """
        if classes == self.size:
            return self
        blank = self.blank
        if classes != self.size + 1 or blank is None or blank > self.size or self.tokens.get(blank) in BLANKS:
            return None
        tokens = {number + (number >= blank): token for number, token in self.tokens.items()}
        join = self.join
        shifted = None if join is None else lambda numbers: join([number - (number > blank) for number in numbers])
        return Vocabulary(self.source, {**tokens, blank: BLANKS[0]}, blank, shifted)

    def text(self, numbers: Sequence[int]) -> str:
        """Return the text of token numbers. Special tokens such as ``</s>`` and the blank are left out."""
        kept = [number for number in numbers if number != self.blank]
        if self.join is not None:
            return self.join(kept)
        tokens = [token for token in (self.tokens.get(number, "") for number in kept) if not SPECIAL.fullmatch(token)]
        pieces = set(self.tokens.values())
        if any(token.startswith("##") for token in pieces):
            return " ".join(tokens).replace(" ##", "")
        text = "".join(tokens).replace("<space>", " ").replace(WORD_START, " ")
        if "|" in pieces and " " not in pieces:
            text = text.replace("|", " ")
        return text.strip()


@dataclass(frozen=True)
class Transcriber:
    """Converts outputs to texts: scores (samples, steps, classes) greedily as of CTC, or token numbers.

    Attributes:
        vocabulary: the tokens.
        output: name of the output; None: the only one beside lengths.
    """

    vocabulary: Vocabulary
    output: str | None = None

    def texts(self, outputs: Mapping[str, Any], samples: int | None, metric: str) -> dict[str, Array]:
        """Return the texts of one feed by the name of the output, shape (samples,).

        Args:
            samples: number of references, which tells the axis of samples; None: the first axis.

        Raises:
            DataError: the output is of another form, or does not fit the vocabulary.
        """
        arrays = {name: np.asarray(value) for name, value in outputs.items()}
        lengths = {name for name in arrays if LENGTHS.search(name) and arrays[name].dtype.kind in "iu"}
        rest = {name: value for name, value in arrays.items() if name not in lengths or name == self.output}
        output = only_output(rest, self.output, metric)
        name = self.output or "text"
        if is_text(output):
            return {name: output}
        vocabulary, rows = self.vocabulary, output
        is_ctc = output.dtype.kind == "f" and output.ndim == 3
        if is_ctc:
            vocabulary, rows = self._greedy(output, samples, metric)
        elif output.dtype.kind not in "iu" or output.ndim not in (1, 2):
            raise DataError(
                f"{metric} takes scores (samples, steps, classes), token numbers (samples, tokens) or texts, and the "
                f"output is {shown(output)}: choose another output, as in {metric}:NAME"
            )
        rows = np.atleast_2d(rows).astype(np.int64)
        whole = np.full(len(rows), rows.shape[1])
        sizes = next((arrays[length].reshape(-1) for length in lengths if arrays[length].size == len(rows)), whole)
        texts = [_text(row[: int(size)], vocabulary, is_ctc, metric) for row, size in zip(rows, sizes, strict=True)]
        return {name: np.array(texts, object)}

    def _greedy(self, scores: Array, samples: int | None, metric: str) -> tuple[Vocabulary, Array]:
        """Return the vocabulary with the blank, and the class of the highest score at each step, (samples, steps)."""
        vocabulary = self.vocabulary
        if vocabulary.blank is None:
            raise DataError(
                f"{metric}: which class of the output is the blank of CTC? {vocabulary.source} does not name it: give "
                f"--blank 0, or --blank {vocabulary.size} if it follows the last token"
            )
        for axis in (2, 1):
            fitted = vocabulary.fitted(scores.shape[axis])
            if fitted is not None:
                classes: Array = scores.argmax(axis)
                return fitted, classes.T if len(classes) != samples and classes.shape[1] == samples else classes
        raise DataError(
            f"{metric}: {vocabulary.source} has {vocabulary.size} tokens, and no axis of the output {shown(scores)} "
            "has that many classes, nor one more for the blank: is it the vocabulary of this model?"
        )


def _text(row: Array, vocabulary: Vocabulary, is_ctc: bool, metric: str) -> str:
    """Return the text of one sample; of CTC, equal neighbours are one token. Numbers below 0 are padding."""
    if is_ctc and len(row):
        row = row[np.concatenate([[True], row[1:] != row[:-1]])]
    row = row[row >= 0]
    if row.size and row.max() >= vocabulary.size:
        raise DataError(
            f"{metric}: token {int(row.max())}, and {vocabulary.source} has 0 to {vocabulary.size - 1}: is it the "
            "vocabulary of this model?"
        )
    return vocabulary.text(row.tolist())

"""Scores of a decoder on windows of tokens, beside the float decoder, with one of the two open at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import IO, Final, final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.storage.spill_file import spill_folder
from sbonnx.errors import OutputError
from sbonnx.llm.decoding import DecoderSession, rows_of
from sbonnx.llm.layout import Decoder
from sbonnx.spec import Array

SCRATCH: Final = 8 << 30
"""Bytes of logits of the float decoder that are in a scratch file at a time.

Divergences need the whole distributions. If those of all windows are larger, the two sessions are opened in turn.
"""

LATE: Final = 4
"""The last quarter of a window shows whether errors of caches and states grow from token to token."""


@dataclass(frozen=True)
class TokenSums:
    """Sums over the positions of windows; sums of windows are added.

    Attributes:
        loss, float_loss: negative log likelihoods of the next tokens, in nats.
        predicted: number of next tokens.
        positions: number of predicted distributions.
        kl: Kullback-Leibler divergences from float, in nats.
        agreed: positions whose most likely token is that of float.
        late_kl, late: divergences in the last quarter of each window, and number of its positions.
    """

    loss: float = 0.0
    float_loss: float = 0.0
    predicted: int = 0
    positions: int = 0
    kl: float = 0.0
    agreed: int = 0
    late_kl: float = 0.0
    late: int = 0

    def __add__(self, other: TokenSums) -> TokenSums:
        return TokenSums(*(own + added for own, added in zip(astuple(self), astuple(other), strict=True)))

    @property
    def perplexity(self) -> float:
        """Exp of the mean negative log likelihood."""
        return float(np.exp(self.loss / self.predicted))

    @property
    def float_perplexity(self) -> float:
        """Perplexity of the float decoder."""
        return float(np.exp(self.float_loss / self.predicted))


def score_windows(
    ids: Array,
    decoder: Decoder,
    against: Decoder | None = None,
    *,
    threads: int | None = None,
    sources: Sequence[Feed] | None = None,
) -> Iterator[TokenSums]:
    """Yield the sums of each window. One session is open at a time, and logits of one piece are in memory.

    Args:
        ids: token ids, int64 (windows, length).
        decoder: the decoder that is scored.
        against: the float decoder, of the same vocabulary; None: its figures are 0.
        threads: threads inside operators; None: number of cores.
        sources: inputs of the encoder, by window; None without an encoder.

    Raises:
        ModelError: a model cannot be opened.
        DataError: a model cannot run the tokens.
        OutputError: the folder of temporary files has no room for the logits of float.
    """
    rows = list(rows_of(ids, sources))
    if against is None:
        session = DecoderSession(decoder, threads=threads)
        for row, source in rows:
            yield _score_window(row, source, session, None)
        return
    step = max(1, SCRATCH // (4 * ids.shape[1] * (against.vocabulary or 1)))
    for first in range(0, len(ids), step):
        some = rows[first : first + step]
        with _scratch() as file:
            logits = _Logits(file)
            session = DecoderSession(against, threads=threads, mapped=True)
            for row, source in some:
                for _, values in session.pieces(row, source=source):
                    logits.append(values)
            del session  # before the other is opened
            logits.rewind()
            session = DecoderSession(decoder, threads=threads)
            for row, source in some:
                yield _score_window(row, source, session, logits)
            del session


def _scratch() -> IO[bytes]:
    """Open a file that is removed when it is closed."""
    folder = spill_folder()
    try:
        return tempfile.TemporaryFile(dir=folder)
    except OSError as error:
        raise _no_room(error) from error


def _no_room(error: OSError) -> OutputError:
    return OutputError(
        f"the logits of the float decoder cannot be kept in '{spill_folder()}' ({error.strerror}): point TMPDIR to a "
        "larger disk, or evaluate fewer tokens"
    )


@final
class _Logits:
    """Logits in a file, float32 (positions, vocabulary), written and read in order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._width = 0

    def append(self, values: Array) -> None:
        """Write the logits of the next positions."""
        self._width = values.shape[1]
        try:
            self._file.write(np.ascontiguousarray(values, np.float32).data)
        except OSError as error:
            raise _no_room(error) from error

    def rewind(self) -> None:
        """Start reading at the first position."""
        try:
            self._file.seek(0)  # also writes what is buffered
        except OSError as error:
            raise _no_room(error) from error

    def read(self, positions: int) -> Array:
        """Return the logits of the next positions."""
        size = 4 * positions * self._width
        read = self._file.read(size)
        if len(read) != size:
            raise OutputError(f"the file of logits in '{spill_folder()}' was cut short: point TMPDIR to another disk")
        return np.frombuffer(read, np.float32).reshape(positions, self._width)


def _score_window(ids: Array, source: Feed | None, session: DecoderSession, floats: _Logits | None) -> TokenSums:
    total = TokenSums()
    for begin, logits in session.pieces(ids, source=source):
        compared = None if floats is None else log_softmax(floats.read(len(logits)))
        total += _sums(ids, begin, log_softmax(logits), compared)
    return total


def _sums(ids: Array, begin: int, log_p: Array, log_float: Array | None) -> TokenSums:
    following = ids[begin + 1 : begin + 1 + len(log_p)]
    rows = np.arange(len(following))
    sums = TokenSums(-float(log_p[rows, following].sum()), 0.0, len(following), len(log_p))
    if log_float is None:
        return sums
    kl = (np.exp(log_float) * (log_float - log_p)).sum(-1)
    late = kl[max(0, len(ids) - len(ids) // LATE - begin) :]
    return replace(
        sums,
        float_loss=-float(log_float[rows, following].sum()),
        kl=float(kl.sum()),
        agreed=int((log_p.argmax(-1) == log_float.argmax(-1)).sum()),
        late_kl=float(late.sum()),
        late=len(late),
    )


def log_softmax(logits: Array) -> Array:
    """Return log probabilities in float64, (positions, vocabulary)."""
    values = logits.astype(np.float64)
    values -= values.max(-1, keepdims=True)
    values -= np.log(np.exp(values).sum(-1, keepdims=True))
    return values

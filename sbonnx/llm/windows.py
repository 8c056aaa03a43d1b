"""Windows of tokens from texts, and the feeds of a decoder for them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.calib.data.objects import rank
from sbonnx.calib.data.stored_arrays import StoredArray, open_stored
from sbonnx.errors import DataError, RecipeError
from sbonnx.llm.decoding import DecoderSession, decoder_feed, rows_of
from sbonnx.llm.encoders.sources import read_sources
from sbonnx.llm.layout import Decoder
from sbonnx.llm.token_texts import Texts, TextTokenizer, read_documents
from sbonnx.spec import Array

WINDOW: Final = 512
TOKENS: Final = 1 << 16
"""Defaults of LLM.WINDOW (at most the context of the model) and LLM.TOKENS."""

HELD_OUT: Final = 8
"""Every eighth window is held out of calibration, for evaluation."""

SHORTEST: Final = 2
"""Fewest tokens of a window: one is predicted from the other."""

RANKS: Final = 1 << 64


@dataclass(frozen=True)
class TokenWindows:
    """Windows of token ids, in the order of the texts.

    Attributes:
        ids: int64, (windows, length); -1 after the end of a text that the float encoder-decoder generated.
        sources: inputs of the encoder, by window; None without an encoder.
    """

    ids: Array
    sources: tuple[Feed, ...] | None = None

    @property
    def divided(self) -> bool:
        """Whether there are enough windows to hold some out."""
        return len(self.ids) >= HELD_OUT

    @property
    def held_out(self) -> Array:
        """The windows for evaluation: every eighth, or all if there are fewer than eight."""
        return self.part(held_out=True).ids

    @property
    def calibration(self) -> Array:
        """The other windows, or all if there are fewer than eight."""
        return self.part(held_out=False).ids

    def part(self, *, held_out: bool) -> TokenWindows:
        """Return the windows that are held out for evaluation, or the other ones, with the inputs of the encoder."""
        if not self.divided:
            return self
        chosen = (np.arange(len(self.ids)) % HELD_OUT == HELD_OUT - 1) == held_out
        sources = None if self.sources is None else tuple(compress(self.sources, chosen))
        return TokenWindows(self.ids[chosen], sources)

    def digest(self) -> str:
        """Return the sha256 of shape and token ids, and of the inputs of the encoder."""
        digest = hashlib.sha256(f"{self.ids.shape}".encode() + np.ascontiguousarray(self.ids, "<i8").tobytes())
        for source in self.sources or ():
            for name, values in source.items():
                digest.update(f"{name} {values.dtype} {values.shape}".encode() + np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


def window_length(decoder: Decoder, window: int | None) -> int:
    """Return the length of windows: `window`, or the smaller of 512 and the context of the model.

    Raises:
        RecipeError: `window` is longer than the context, or has fewer than two tokens.
    """
    if window is None:
        window = min(WINDOW, decoder.context or WINDOW)
    if window < SHORTEST:
        raise RecipeError(f"LLM.WINDOW is {window} tokens: use at least {SHORTEST}")
    if decoder.context is not None and window > decoder.context:
        raise RecipeError(
            f"LLM.WINDOW is {window} tokens, and the context of '{decoder.model}' has {decoder.context}: "
            f"use at most {decoder.context}"
        )
    return window


def read_windows(
    decoder: Decoder, texts: Texts | Array, *, window: int | None = None, tokens: int = TOKENS
) -> TokenWindows:
    """Read texts into windows of tokens.

    Texts are joined by the end-of-text token and cut, in order; every window begins with the beginning-of-text token if
    the tokenizer adds one. A remainder that fills no window is dropped, unless it is the only one.

    An encoder-decoder gets a window for each sample of its encoder: the text that it generates, see `read_sources`.

    Args:
        texts: see `read_documents`; or windows of token ids: an integer array (windows, length), or an .npz file with
            such an array "ids"; of an encoder-decoder, data of the encoder.
        window: length in tokens; None: see `window_length`. Ignored for windows of token ids.
        tokens: use at most this many.

    Raises:
        DataError: the texts cannot be read, are too short, or have token ids that the model does not have.
        RecipeError: as `window_length`.
    """
    if decoder.encoder is not None:
        return TokenWindows(*read_sources(decoder, texts, window=window, tokens=tokens))
    ready = _ready(texts)
    if ready is not None:
        length = window_length(decoder, int(ready.shape[1]))
        count = max(1, tokens // length)
        ids = (ready.first(count) if isinstance(ready, StoredArray) else ready[:count]).astype(np.int64)
    else:
        length = window_length(decoder, window)
        tokenizer = TextTokenizer(decoder)
        ids = packed(read_documents(texts, tokenizer), tokenizer, length, tokens)
    if decoder.vocabulary is not None and ids.max() >= decoder.vocabulary:
        raise DataError(
            f"token {ids.max()} of the texts is not in the vocabulary of '{decoder.model}' ({decoder.vocabulary} "
            "tokens): the tokenizer belongs to another model"
        )
    if ids.min() < 0:
        raise DataError(f"token {ids.min()} of the windows is negative: token ids are 0 and above")
    return TokenWindows(ids)


def _ready(texts: Any) -> Array | StoredArray | None:
    """Return windows of token ids that are given as such; None for texts. Those of files are not read yet.

    Raises:
        DataError: they are not integers of shape (windows, length).
    """
    if isinstance(texts, (str, os.PathLike)) and Path(texts).suffix == ".npz":
        path, stored = texts, open_stored(Path(texts))
        texts = stored.get("ids") if isinstance(stored, Mapping) else None
        if texts is None:
            raise DataError(f"'{path}' has no array 'ids' of token windows: write it with numpy.savez(FILE, ids=...)")
    if not isinstance(texts, (np.ndarray, StoredArray)):
        return None
    if len(texts.shape) != 2 or texts.dtype.kind not in "iu" or texts.shape[0] < 1 or texts.shape[1] < SHORTEST:
        raise DataError(
            f"windows of tokens are integers of shape (windows, length), got {texts.dtype} of {texts.shape}"
        )
    return texts


def packed(documents: Iterable[Iterable[str]], tokenizer: TextTokenizer, length: int, tokens: int) -> Array:
    """Join documents by the end-of-text token and cut them into windows.

    Args:
        documents: each as pieces of text.
        length: tokens of a window, with the first token.
        tokens: of all windows, at most.

    Returns:
        int64, (windows, length).

    Raises:
        DataError: there are fewer than two tokens.
    """
    first = [] if tokenizer.bos is None else [tokenizer.bos]
    inner = length - len(first)
    if inner < 1:
        raise RecipeError(f"LLM.WINDOW is {length} tokens: use at least {SHORTEST}")
    count = max(1, tokens // length)
    stream = list(islice(_stream(documents, tokenizer), count * inner))
    full = len(stream) // inner
    if not full:
        if len(first) + len(stream) < SHORTEST:
            raise DataError(f"the texts have {len(stream)} tokens: at least {SHORTEST} are needed")
        return np.asarray([first + stream], np.int64)
    body = np.asarray(stream[: full * inner], np.int64).reshape(full, inner)
    return np.concatenate([np.full((full, len(first)), first or 0, np.int64), body], axis=1)


def _stream(documents: Iterable[Iterable[str]], tokenizer: TextTokenizer) -> Iterator[int]:
    for number, pieces in enumerate(documents):
        if number and tokenizer.eos is not None:
            yield tokenizer.eos
        for text in pieces:
            yield from tokenizer.encode(text)


@final
class DecoderFeeds:
    """Feeds of a decoder for windows, made one at a time.

    A window is one feed of all its tokens with empty caches (prefill). A share of the windows is, instead, one token
    with the caches of the float model for the tokens before it (decode): activation ranges and scales of caches need
    real caches, sums over tokens do not.

    Args:
        decoder: the float decoder.
        ids: int64, (windows, length).
        decode_share: share of the windows, 0 to 1.
        seed: of the choice of windows and positions.
        sources: inputs of the float encoder, by window, whose outputs the feeds have; None without an encoder.
    """

    def __init__(
        self,
        decoder: Decoder,
        ids: Array,
        *,
        decode_share: float = 0.0,
        seed: int = 0,
        sources: Sequence[Feed] | None = None,
    ) -> None:
        self._decoder = decoder
        self._ids = ids
        self._sources = sources
        self._share = decode_share if decoder.carried else 0.0
        self._seed = seed

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[Feed]:
        session = DecoderSession(self._decoder) if self._share or self._sources is not None else None
        for number, (ids, source) in enumerate(rows_of(self._ids, self._sources)):
            before = None if session is None else session.begin(source)
            split = self._split(number, len(ids))
            if session is None or split is None:
                yield decoder_feed(self._decoder, ids[None], before)
                continue
            cache = session.prefill(ids[None, :split], before)
            yield decoder_feed(self._decoder, ids[None, split : split + 1], cache)

    def _split(self, number: int, length: int) -> int | None:
        """Return the number of tokens before the decoded one; None for prefill."""
        if rank(self._seed, number) >= self._share * RANKS:
            return None
        return 1 + rank(self._seed + 1, number) % (length - 1)

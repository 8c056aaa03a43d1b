"""Running of decoders in onnxruntime: feeds, caches, logits piece by piece, greedy decoding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice, repeat
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from sbonnx.calib.data import Feed
from sbonnx.errors import DataError, ModelError
from sbonnx.llm.encoders.encoder import EncoderSession
from sbonnx.llm.layout import CACHE_LENGTH, Decoder
from sbonnx.spec import Array
from sbonnx.system.input_files import native_source
from sbonnx.system.runtime import onnxruntime, open_session, reason, session_options

PIECE_BYTES: Final = 32 << 20
"""Bytes of float32 logits that are in memory at a time, if the model has a cache."""

MAPPED: Final = 1 << 30
"""Bytes of a model above which its float weights stay in the mapped file.

Otherwise onnxruntime copies each of them into the layout of its kernels. In the file they are 10 % slower, results
differ in the last bits, and a decoder that is larger than the memory runs at the speed of the disk.
"""

Cache = Mapping[str, Array]
"""Caches and states by the name of the past input, and what the encoder computed by the name of the input."""

COUNT: Final = ""
"""Key of the number of tokens in a `Cache` that has states only, whose sizes do not tell it."""


def decoder_feed(decoder: Decoder, ids: Array, cache: Cache | None = None) -> dict[str, Array]:
    """Return the inputs for tokens after a cache.

    Args:
        ids: token ids, (batch, length).
        cache: of the tokens before; None: there are none, and the caches have length 0. With an encoder, it has at
            least what that computed, see `DecoderSession.begin`.
    """
    batch, length = ids.shape
    cache = {**{tensor.past: tensor.empty(batch) for tensor in decoder.carried}, **(cache or {})}
    done = _tokens_in(decoder, cache)
    feed = {decoder.tokens: ids if decoder.embedder is None else embedded(decoder.embedder, ids)}
    if decoder.mask is not None:
        feed[decoder.mask] = np.ones((batch, done + length), np.int64)
    if decoder.positions is not None:
        feed[decoder.positions] = np.tile(np.arange(done, done + length), (*decoder.position_axes, batch, 1))
    feed |= dict(decoder.constants)
    feed = {name: values.astype(decoder.types[name], copy=False) for name, values in feed.items()}
    if decoder.branch is not None:
        feed[decoder.branch] = np.array([done > 0], decoder.types[decoder.branch])
    return {**feed, **{name: values for name, values in cache.items() if name != COUNT}}


def embedded(model: Path, ids: Array) -> Array:
    """Compute the embeddings of token ids, (batch, length, width), without images or sounds.

    Raises:
        ModelError: onnxruntime rejects the model.
        DataError: it cannot run on token ids alone.
    """
    session = _embedder(model)
    first, *others = session.get_inputs()
    feed = {first.name: ids.astype(np.int32 if first.type == "tensor(int32)" else np.int64)}
    for features in others:
        sizes = [size if isinstance(size, int) else 0 for size in features.shape]
        feed[features.name] = np.zeros(sizes, np.float16 if features.type == "tensor(float16)" else np.float32)
    try:
        values: Array = session.run(None, feed)[0]
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise DataError(f"'{model}' cannot embed token ids: {reason(error)}") from error
    return values


@lru_cache(maxsize=2)
def _embedder(model: Path) -> Any:
    try:
        return open_session(native_source(model), session_options())
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise ModelError(f"onnxruntime refuses '{model}': {reason(error)}") from error


def _tokens_in(decoder: Decoder, cache: Cache) -> int:
    """Return the number of tokens before."""
    if decoder.cache:
        first = cache.get(decoder.cache[0].past)
        return 0 if first is None else int(first.shape[CACHE_LENGTH])
    return int(cache[COUNT]) if COUNT in cache else 0


class ActiveAdapter:
    """Run options in which an adapter is active.

    onnxruntime's options do not keep the adapter alive, so this object must live as long as they are used.

    Args:
        path: file of the adapter; None: no adapter.

    Attributes:
        options: for `InferenceSession.run`; None without an adapter.

    Raises:
        ModelError: onnxruntime cannot read the file.
    """

    def __init__(self, path: Path | None) -> None:
        self.options: Any = None
        if path is None:
            return
        ort = onnxruntime()
        self._loaded = ort.LoraAdapter()
        try:
            self._loaded.Load(native_source(path))
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise ModelError(f"'{path}' cannot be read as an adapter of onnxruntime: {reason(error)}") from error
        self.options = ort.RunOptions()
        self.options.add_active_adapter(self._loaded)


@final
class DecoderSession:
    """Session of a decoder.

    Attributes:
        decoder: its layout.
        piece: tokens whose logits fit `PIECE_BYTES`.

    Args:
        threads: threads inside operators; None: number of cores.
        mapped: keep float weights in the mapped file if the model has more than `MAPPED` bytes.

    Raises:
        ModelError: onnxruntime rejects the model or its adapter.
    """

    def __init__(self, decoder: Decoder, *, threads: int | None = None, mapped: bool = False) -> None:
        self.decoder = decoder
        self.piece = max(1, PIECE_BYTES // (4 * (decoder.vocabulary or 1)))
        options = session_options(threads=threads)
        if mapped and decoder.bytes > MAPPED:
            options.add_session_config_entry("session.disable_prepacking", "1")
        try:
            self._session = open_session(native_source(decoder.model), options)
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise ModelError(f"onnxruntime refuses '{decoder.model}': {reason(error)}") from error
        self._adapter = ActiveAdapter(decoder.adapter)
        self._encoder = None if decoder.encoder is None else EncoderSession(decoder.encoder, threads=threads)
        self._outputs = [decoder.logits, *(tensor.present for tensor in decoder.carried)]

    def __call__(self, ids: Array, cache: Cache | None = None) -> tuple[Array, Cache]:
        """Return logits, (batch, length, vocabulary), in the type of the model, and the caches after the tokens.

        Args:
            ids: token ids, (batch, length).
            cache: of the tokens before; None: there are none.

        Raises:
            DataError: the model cannot run on them.
        """
        logits, *caches = self._run(self._outputs, ids, cache)
        return logits, self._after(caches, ids, cache)

    def begin(self, source: Feed | None) -> Cache | None:
        """Return the cache before the first token: what the encoder computes; None without an encoder.

        Args:
            source: inputs of the encoder.
        """
        return None if self._encoder is None or source is None else self._encoder(source)

    def prefill(self, ids: Array, before: Cache | None = None) -> Cache:
        """Return the caches after tokens; `before` is what `begin` returns."""
        return self._after(self._run(self._outputs[1:], ids, before), ids, before)

    def _after(self, caches: list[Any], ids: Array, cache: Cache | None) -> Cache:
        """Return the caches and states after tokens."""
        decoder, cache = self.decoder, cache or {}
        after = {tensor.past: values for tensor, values in zip(decoder.carried, caches, strict=True)}
        if decoder.encoder is not None:
            first = _tokens_in(decoder, cache) == 0  # a merged decoder computes the others in its first run only
            names = decoder.encoder.inputs | (set() if first else {tensor.past for tensor in decoder.cross})
            after |= {name: cache[name] for name in names}
        if decoder.states and not decoder.cache:
            after[COUNT] = np.asarray(_tokens_in(decoder, cache) + ids.shape[1])
        return after

    def _run(self, outputs: list[str], ids: Array, cache: Cache | None) -> list[Any]:
        try:
            values: list[Any] = self._session.run(
                outputs, decoder_feed(self.decoder, ids, cache), self._adapter.options
            )
        except Exception as error:  # onnxruntime's own exceptions share no base class
            raise DataError(f"'{self.decoder.model}' cannot run {ids.shape[1]} tokens: {reason(error)}") from error
        return values

    def pieces(
        self, ids: Array, size: int | None = None, *, first: int | None = None, source: Feed | None = None
    ) -> Iterator[tuple[int, Array]]:
        """Yield (position, logits) for pieces of a window; the caches carry over from piece to piece.

        Args:
            ids: (length,).
            size: tokens of a piece; None: `piece`. Without a cache, the window is one
                piece.
            first: tokens of the first piece, if it differs.
            source: inputs of the encoder, if there is one.

        Returns:
            Position of the first token, and float32 logits, (tokens, vocabulary).
        """
        size = self.piece if size is None else size
        end = len(ids) if not self.decoder.carried else (first or size)
        begin, cache = 0, self.begin(source)
        while begin < len(ids):
            logits, cache = self(ids[None, begin:end], cache)
            yield begin, np.asarray(logits[0], np.float32)
            begin, end = end, end + size

    def greedy(self, prompt: Array, count: int, source: Feed | None = None) -> list[int]:
        """Return the next `count` tokens, each the most likely one.

        Args:
            prompt: (length,).
            source: inputs of the encoder, if there is one.
        """
        return list(islice(self.decode(prompt, source), count))

    def decode(self, prompt: Array, source: Feed | None = None) -> Iterator[int]:
        """Yield the next tokens without end, each the most likely one; see `greedy`."""
        ids, cache = prompt[None], self.begin(source)
        while True:
            logits, after = self(ids, cache)
            chosen = int(np.argmax(logits[0, -1]))
            yield chosen
            token = np.asarray([[chosen]], np.int64)
            if self.decoder.carried:
                ids, cache = token, after
            else:
                ids = np.concatenate([ids, token], axis=1)


def rows_of(ids: Array, sources: Iterable[Feed] | None) -> Iterator[tuple[Array, Feed | None]]:
    """Yield windows, (length,), without the padding at their ends, each with the inputs of the encoder, if any.

    Args:
        ids: (windows, length); padding is negative.
    """
    yield from zip((row[row >= 0] for row in ids), repeat(None) if sources is None else sources, strict=False)

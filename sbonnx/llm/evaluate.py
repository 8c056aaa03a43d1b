"""Evaluation of a decoder: perplexity, and distance from the float decoder on the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx

from sbonnx.calib.data import Feed
from sbonnx.errors import DataError, ModelError
from sbonnx.graph import read_proto
from sbonnx.llm.decoding import ActiveAdapter, DecoderSession, decoder_feed, rows_of
from sbonnx.llm.generation import generate_with_genai
from sbonnx.llm.layout import Decoder
from sbonnx.llm.scores import TokenSums, log_softmax, score_windows
from sbonnx.llm.speed import compare_speed, peak_memory
from sbonnx.report.codes import Note, Problem
from sbonnx.report.decoder import DecoderEvaluation, DecodingSpeed
from sbonnx.spec import Array
from sbonnx.system.runtime import open_session, reason, session_options

PROMPTS: Final = 16
"""Prompts of the greedy comparison, from as many windows."""

PROMPT_SHARE: Final = 4
"""A prompt is the first quarter of its window."""

CONTINUATION: Final = 32
"""Tokens that are generated from each prompt, at most; and at most what the context leaves."""

CACHED_WINDOWS: Final = 4
"""Windows that are also run token by token through the caches."""

CACHE_TOLERANCE: Final = 0.01
"""Relative difference of the perplexities with and without caches above which the caches are wrong.

Rounding gives 1e-6 in float32, 1e-4 in float16, and less than 1e-3 with int8 activations.
"""

Row = tuple[Array, Feed | None]
"""A window without padding, and the inputs of the encoder, if there is one."""


@dataclass(frozen=True)
class DecoderLimits:
    """Limits of an evaluation; None: no limit.

    Attributes:
        max_perplexity: increase of the perplexity, relative to float.
        min_agreement: share of positions whose most likely token is that of float.
    """

    max_perplexity: float | None = None
    min_agreement: float | None = None

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.max_perplexity is not None or self.min_agreement is not None


def evaluate_windows(
    decoder: Decoder,
    ids: Array,
    *,
    against: Decoder | None = None,
    limits: DecoderLimits | None = None,
    latency: bool = True,
    sources: Sequence[Feed] | None = None,
) -> DecoderEvaluation:
    """Evaluate a decoder on windows of token ids; see `sbonnx.llm.evaluate`.

    Args:
        ids: int64, (windows, length).
        sources: inputs of the encoder, by window; None without an encoder.

    Raises:
        DataError: vocabularies differ, or a model cannot run the tokens.
    """
    limits = limits or DecoderLimits()
    _require_alike(decoder, against)
    rows = list(rows_of(ids, sources))
    score = sum(score_windows(ids, decoder, against, sources=sources), TokenSums())
    greedy, continuation = ((), 0) if against is None else _divergence(rows, decoder, against)
    cached, uncached = _through_caches(rows[:CACHED_WINDOWS], decoder)
    problems = list(_problems(score, limits, against is not None, cached, uncached))
    if problems and against is not None and decoder.encoder is None:
        problems.extend(_begin(decoder, against, ids[0]))
    notes = (
        []
        if decoder.carried
        else [Note("decoder-without-caches", "the decoder has no caches: nothing was decoded token by token")]
    )
    speed: tuple[DecodingSpeed, ...] = ()
    memory: tuple[int | None, int | None] = (None, None)
    if latency:
        speed = compare_speed(decoder, against, *rows[0])
        if decoder.encoder is None:
            memory = (None if against is None else peak_memory(against, ids[0]), peak_memory(decoder, ids[0]))
    else:
        notes.append(Note("speed-not-measured", "speed and memory were not measured"))
    return DecoderEvaluation(
        model=str(decoder.model),
        against=None if against is None else str(against.model),
        windows=len(ids),
        tokens=score.predicted,
        perplexity=score.perplexity,
        float_perplexity=None if against is None else score.float_perplexity,
        kl=None if against is None else score.kl / score.positions,
        late_kl=None if against is None or not score.late else score.late_kl / score.late,
        agreement=None if against is None else score.agreed / score.positions,
        greedy=greedy,
        continuation=continuation,
        cached_perplexity=cached,
        uncached_perplexity=uncached,
        speed=speed,
        memory=memory,
        bytes=(None if against is None else against.bytes, decoder.bytes),
        cache_bytes=(None if against is None else against.token_bytes, decoder.token_bytes),
        genai=generate_with_genai(decoder, ids[0]) if decoder.format == "genai" and sources is None else None,
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _require_alike(decoder: Decoder, against: Decoder | None) -> None:
    if against is not None and decoder.vocabulary != against.vocabulary:
        raise DataError(
            f"'{decoder.model}' has {decoder.vocabulary} tokens and '{against.model}' {against.vocabulary}: only "
            "decoders of one vocabulary can be compared"
        )


def _divergence(rows: Sequence[Row], decoder: Decoder, against: Decoder) -> tuple[tuple[int, ...], int]:
    """Return tokens until the first difference by prompt, and the number of tokens generated.

    The windows of an encoder-decoder are what the float model generates, up to the end of the text: a prompt is the
    first token, and a text that ends without a difference counts as the number of tokens generated.
    """
    whole = decoder.encoder is not None
    length = 1 if whole else max(1, len(rows[0][0]) // PROMPT_SHARE)
    contexts = [model.context for model in (decoder, against) if model.context]
    count = min([CONTINUATION, *(context - length for context in contexts)])
    prompts = [
        (row[:length], source, min(count, len(row) - length) if whole else count) for row, source in rows[:PROMPTS]
    ]
    floats, tokens = (_greedy(model, prompts, mapped=model is against) for model in (against, decoder))
    lengths = []
    for pair in zip(tokens, floats, strict=True):
        pairs = zip(*pair, strict=True)
        lengths.append(next((at for at, (token, float_token) in enumerate(pairs) if token != float_token), count))
    return tuple(lengths), count


def _greedy(decoder: Decoder, prompts: Sequence[tuple[Array, Feed | None, int]], *, mapped: bool) -> list[list[int]]:
    """Return the tokens that follow each prompt. The session is closed before this returns."""
    session = DecoderSession(decoder, mapped=mapped)
    return [session.greedy(prompt, count, source) for prompt, source, count in prompts]


def _through_caches(rows: Sequence[Row], decoder: Decoder) -> tuple[float | None, float | None]:
    """Return the perplexities token by token after a prompt, and at once; (None, None) without caches."""
    if not decoder.carried:
        return None, None
    session = DecoderSession(decoder)
    losses = [0.0, 0.0]
    for row, source in rows:
        for which, (size, first) in enumerate(((1, max(1, len(row) // PROMPT_SHARE)), (len(row), None))):
            for begin, logits in session.pieces(row, size, first=first, source=source):
                following = row[begin + 1 : begin + 1 + len(logits)]
                losses[which] -= float(log_softmax(logits)[np.arange(len(following)), following].sum())
    count = sum(len(row) - 1 for row, _ in rows)
    return float(np.exp(losses[0] / count)), float(np.exp(losses[1] / count))


def _begin(decoder: Decoder, against: Decoder, ids: Array) -> Iterator[Problem]:
    """Yield the block in which the error begins, or why it is unknown; nothing for merged decoders."""
    try:
        begin = worst_block(decoder, against, ids)
    except ModelError as error:
        yield Problem("first-lost-block", f"the block in which it begins is unknown: {error}")
        return
    if begin is not None:
        yield Problem("first-lost-block", str(begin))


def _problems(
    score: TokenSums, limits: DecoderLimits, compared: bool, cached: float | None, uncached: float | None
) -> Iterator[Problem]:
    if not np.isfinite(score.perplexity):
        yield Problem("output-unusable", "the perplexity is not finite")
    if compared and limits.max_perplexity is not None:
        increase = score.perplexity / score.float_perplexity - 1
        if not increase <= limits.max_perplexity:
            yield Problem(
                "limit-missed",
                f"perplexity {score.perplexity:.4g} is {increase:.2%} above float ({score.float_perplexity:.4g}), and "
                f"VERIFY.MAX_PERPLEXITY is {limits.max_perplexity:.2%}",
            )
    if compared and limits.min_agreement is not None and not score.agreed / score.positions >= limits.min_agreement:
        yield Problem(
            "limit-missed",
            f"{score.agreed / score.positions:.2%} of the most likely tokens are those of float, and "
            f"VERIFY.MIN_AGREEMENT is {limits.min_agreement:.2%}",
        )
    if cached is not None and uncached is not None and not abs(cached / uncached - 1) <= CACHE_TOLERANCE:
        yield Problem(
            "caches-differ",
            f"perplexity is {cached:.4g} token by token through the caches and {uncached:.4g} at once: the caches are "
            "wrong, or the model treats decoding differently",
        )


DATA_FOLDER = "session.model_external_initializers_file_folder_path"
"""onnxruntime's option for the place of external data of a model that is not a file."""


@dataclass(frozen=True)
class BlockError:
    """Error that one block adds to the residual stream.

    Attributes:
        layer: number of the block.
        before, after: norm of the error over that of the float stream, at its input and output.
    """

    layer: int
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"it begins in block {self.layer}: the error of the residual stream is {self.before:.2%} at its input and "
            f"{self.after:.2%} at its output"
        )


def worst_block(decoder: Decoder, against: Decoder, ids: Array) -> BlockError | None:
    """Return the block that adds most to the error of the residual stream on a window.

    Args:
        ids: token ids, (length,).

    Returns:
        None for merged decoders, whose streams are inside an If, and for decoders with different blocks.

    Raises:
        ModelError: onnxruntime does not give the streams of a model.
    """
    streams = [[block.stream for block in model.structure.blocks] for model in (decoder, against)]
    alike = len(streams[0]) == len(streams[1]) > 0
    if not alike or "merged" in (decoder.format, against.format) or decoder.branch or against.branch:
        return None
    values, floats = (_streams(model, names, ids) for model, names in zip((decoder, against), streams, strict=True))
    errors = [
        float(np.linalg.norm(stream - float_stream) / max(np.linalg.norm(float_stream), np.finfo(np.float64).tiny))
        for stream, float_stream in zip(values, floats, strict=True)
    ]
    layers = [block.layer for block in decoder.structure.blocks]
    rows = [BlockError(*row) for row in zip(layers, errors, errors[1:], strict=False)]
    return max(rows, key=lambda row: row.after - row.before)


def _streams(decoder: Decoder, names: list[str], ids: Array) -> list[Array]:
    """Return the residual stream at the input of each block, then the logits, in float64."""
    model = read_proto(decoder.model)
    declared = {value.name for value in model.graph.output}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names) if name not in declared)
    options: Any = session_options()
    options.add_session_config_entry(DATA_FOLDER, str(decoder.model.parent))
    try:
        session = open_session(model.SerializeToString(), options)
        adapter = ActiveAdapter(decoder.adapter)
        arrays = session.run([*names, decoder.logits], decoder_feed(decoder, ids[None]), adapter.options)
    except Exception as error:  # onnxruntime's own exceptions share no base class
        raise ModelError(f"onnxruntime gives no residual stream of '{decoder.model}': {reason(error)}") from error
    return [np.asarray(values, np.float64) for values in arrays]

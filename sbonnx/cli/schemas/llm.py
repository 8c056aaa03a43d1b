"""JSON outputs of ``sbonnx llm``."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from sbonnx.llm.generation import GenAIRun
from sbonnx.llm.speed import DecodingSpeed


class DecoderCache(TypedDict):
    """Key/value caches of a decoder.

    Attributes:
        count: number of caches.
        type, bits: data type and bit width.
        token_bytes: bytes of all caches for one token.
        names: patterns of the names.
        heads, width: number of key/value heads and size of a head.
    """

    count: int
    type: str
    bits: int
    token_bytes: int
    names: str
    heads: int | None
    width: int | None


class DecoderSizes(TypedDict):
    """Sizes of a decoder; null if unknown."""

    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_size: int | None
    vocabulary: int | None
    context: int | None


class DecoderBlock(TypedDict):
    """A block.

    Attributes:
        layer: its number.
        stream: tensor of the residual stream.
    """

    layer: int
    stream: str


class DecoderPart(TypedDict):
    """Weights of a part.

    Attributes:
        part: embedding, block or head.
        operators: operators with a weight.
        weights: number of values.
        stored: how they are stored.
    """

    part: str
    operators: str
    weights: int
    stored: str


class LlmInspectOutput(TypedDict):
    """Output of llm inspect.

    Attributes:
        format: form of the folder.
        model, data: the file, and its external data.
        bytes: their size.
        inputs: names by role: tokens, mask, positions, cache_branch.
        logits: name of the output.
        sizes: sizes of the decoder.
        bos, eos: token ids.
        cache: caches; null without.
        quantized: whether weights are quantized.
        ties: how embedding and head share a weight.
        tokenizer: the tokenizer; null: none.
        blocks: the blocks.
        parts: weights by part.
    """

    format: str
    model: str
    data: list[str]
    bytes: int
    inputs: dict[str, str]
    logits: str
    sizes: DecoderSizes
    bos: int | None
    eos: Any
    cache: DecoderCache | None
    quantized: bool
    ties: str
    tokenizer: str | None
    blocks: list[DecoderBlock]
    parts: list[DecoderPart]


class LlmEvaluateOutput(TypedDict):
    """Output of llm evaluate.

    Attributes:
        ok: whether no limit is violated.
        problems: limits that are violated.
        model, against: paths; `against` is null without a comparison.
        windows, tokens: windows, and tokens that were predicted in them.
        perplexity, float_perplexity: exp of the mean negative log likelihood of the next token.
        kl: mean Kullback-Leibler divergence from the distribution of float, in nats.
        agreement: share of positions whose most likely token is that of float.
        greedy: tokens until the first difference from float under greedy decoding, by prompt.
        continuation: tokens generated from each prompt.
        cached_perplexity, uncached_perplexity: token by token through the caches, and at once; null without caches.
        speed: time to first token and tokens per second, by number of threads.
        memory: increase of the resident memory of a process that decodes, in bytes; (float, this).
        bytes: size of model and external data; (float, this).
        cache_bytes: bytes of the caches for one token; (float, this).
        genai: result of onnxruntime-genai; null if the folder is not in its form.
        notes: what was not measured.
    """

    ok: bool
    problems: list[str]
    model: str
    against: str | None
    windows: int
    tokens: int
    perplexity: float
    float_perplexity: float | None
    kl: float | None
    agreement: float | None
    greedy: list[int]
    continuation: int
    cached_perplexity: float | None
    uncached_perplexity: float | None
    speed: list[DecodingSpeed]
    memory: tuple[int | None, int | None]
    bytes: tuple[int | None, int]
    cache_bytes: tuple[int | None, int]
    genai: GenAIRun | None
    notes: list[str]

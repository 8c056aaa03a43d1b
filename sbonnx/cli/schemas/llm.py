"""JSON outputs of ``sbonnx llm``."""

from __future__ import annotations

from typing_extensions import TypedDict

from sbonnx.llm.generation import GenAIRun
from sbonnx.llm.speed import DecodingSpeed


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

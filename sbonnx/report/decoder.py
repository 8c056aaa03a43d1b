"""`DecoderEvaluation`: figures of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from sbonnx.report.codes import PROBLEMS, Note, Problem, WithProblems
from sbonnx.report.notebook import Result


@dataclass(frozen=True)
class DecodingSpeed:
    """Speed of a decoder with a number of threads, and of the float one.

    Attributes:
        threads: threads inside operators.
        prompt: tokens of the prompt.
        first_token, float_first_token: median time from the prompt to the first token, in milliseconds.
        tokens_per_second, float_tokens_per_second: tokens decoded one by one, by the median time of a token.
        ratio: median of the ratios of the times of a token, this over float, token by token; below 1 is faster.
        ratio_interval: its 95 % confidence interval; None if it is unknown.
        busy: whether other processes used the processors meanwhile.
        Figures of the float decoder, and the ratio, are None without one.
    """

    threads: int
    prompt: int
    first_token: float
    tokens_per_second: float
    float_first_token: float | None = None
    float_tokens_per_second: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    busy: bool = False


@dataclass(frozen=True)
class GenAIRun:
    """Result of onnxruntime-genai for a folder.

    Attributes:
        installed: whether the package is installed.
        tokens: token ids that it generated after the prompt.
        error: why it generated none; "" if it did.
    """

    installed: bool
    tokens: tuple[int, ...] = ()
    error: str = ""


@dataclass(frozen=True, repr=False)
class DecoderEvaluation(WithProblems, Result):
    """Figures of a decoder, and of the float one on the same tokens.

    Attributes:
        model, against: paths; `against` is None if there was no comparison.
        windows, tokens: windows, and tokens that were predicted in them.
        perplexity, float_perplexity: exp of the mean negative log likelihood of the next token.
        kl: mean Kullback-Leibler divergence of the predicted distribution from that of float, in nats.
        agreement: share of positions whose most likely token is that of float.
        greedy: tokens until the first difference from float under greedy decoding, by prompt.
        continuation: tokens generated from each prompt.
        cached_perplexity, uncached_perplexity: on a few windows, token by token through the caches, and at once; None
            without caches.
        speed: time to first token and tokens per second, by number of threads.
        memory: increase of the resident memory of a process that opens the model and decodes, in bytes; (float, this).
        bytes: size of model and external data; (float, this).
        cache_bytes: bytes of the caches for one token; (float, this). 0 without caches.
        genai: result of onnxruntime-genai; None if the folder is not in its form.
        problems: limits that are violated.
        notes: what was not measured.
        late_kl: `kl` in the last quarter of the windows; larger if errors of caches or states grow over the text.
    """

    json_keys: ClassVar = ("ok", "problems", ..., "problem_codes")
    frame_of: ClassVar = "speed"
    model: str
    against: str | None
    windows: int
    tokens: int
    perplexity: float
    float_perplexity: float | None = None
    kl: float | None = None
    agreement: float | None = None
    greedy: tuple[int, ...] = ()
    continuation: int = 0
    cached_perplexity: float | None = None
    uncached_perplexity: float | None = None
    speed: tuple[DecodingSpeed, ...] = ()
    memory: tuple[int | None, int | None] = (None, None)
    bytes: tuple[int | None, int] = (None, 0)
    cache_bytes: tuple[int | None, int] = (None, 0)
    genai: GenAIRun | None = None
    problems: tuple[Problem, ...] = field(default=(), metadata=PROBLEMS)
    notes: tuple[Note, ...] = ()
    late_kl: float | None = None

    @property
    def ok(self) -> bool:
        """Whether no limit is violated."""
        return not self.problems

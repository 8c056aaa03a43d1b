"""Types of the keywords of `sbonnx.quantize` and `QuantModel`: recipe keys, for editors and type checkers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict


class RecipeKeywords(TypedDict, total=False):
    """Short forms of recipe keys (`sections.whole.SHORT_FORMS`), ``bits``, and the top-level keys in lower case.

    Values are validated by the recipe, which accepts the same texts as a recipe file. ``docs/recipe.md`` has the keys.
    """

    bits: str | int
    w_bit: int
    a_bit: int
    w_qscheme: str
    a_qscheme: str
    w_quantizer: str
    a_quantizer: str
    w_observer: str
    a_observer: str
    observer: str
    block_size: int
    rounding: str
    weight_scale: str
    fuse_bn: bool
    bn_tuning: Any
    memory: int | str
    granularity: str
    threads: int | None
    cache: str | os.PathLike[str] | None
    asym: Any
    feedback: Mapping[str, str]
    pick: str
    seed: int
    cross_layer: Any
    absorb_bias: bool
    smooth_quant: Any
    awq: Any
    average_bits: float
    max_loss: float | str
    minimize: str
    held_out: Any
    min_sqnr: Any
    min_cosine: Any
    max_size: float
    max_latency: float
    min_integer: float
    task: str | Mapping[str, str]
    max_perplexity: Any
    min_agreement: Any
    window: int
    tokens: int
    defaults: str
    version: str
    device: str
    schedule: Mapping[str, Any]
    mode: str
    format: str
    accuracy_level: Any
    min_weight_size: int | None
    skip_trace_modules: Sequence[str]
    effort: str
    w: Mapping[str, Any]
    a: Mapping[str, Any]
    include: str | Sequence[str]
    exclude: str | Sequence[str]
    first_bits: Any
    last_bits: Any
    embedding_bits: int | None
    ranges: Mapping[str, Any]
    shared_scales: Any
    quantize_inputs_of: Mapping[str, bool]
    quantize_io: str
    scale_rule: str
    weights: str
    high_precision: str
    keep_io: bool
    kernel_costs: str | os.PathLike[str]
    tensor_overrides: str | os.PathLike[str] | None
    cpu: str
    reduce_range: bool | None
    simplify: bool
    requantize: bool
    samples: int | None
    calibration: Mapping[str, Any]
    sparse: Mapping[str, Any]
    equalize: Mapping[str, Any]
    bias_correction: str
    heads: str
    llm: Mapping[str, Any]
    auto: Mapping[str, Any]
    mixed: Mapping[str, Any]


class QuantizeKeywords(RecipeKeywords, total=False):
    """Keywords of `sbonnx.quantize` that decide the recipe."""

    backend: str | None
    recipe: Any

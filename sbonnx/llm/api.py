"""`quantize`, `adapt` and `evaluate`: a decoder and texts in; a folder, or figures, out. Settings and checks, then the
tuple of stages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypedDict

from sbonnx import pipeline
from sbonnx.backends import BACKENDS, backend_for
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.llm.adapt import ADAPT, NARROW, AdaptedDecoder, AdapterOptions, AdapterState, Form, train_weights
from sbonnx.llm.decoder_stages import (
    NO_FLOAT,
    NO_LIMITS,
    DecoderRequest,
    DecoderState,
    choose_recipe,
    copy_folder,
    evaluate_decoder,
    quantize_caches,
    quantize_encoder,
    read_texts,
    report_decoder,
    save_provenance,
)
from sbonnx.llm.evaluate import DecoderLimits
from sbonnx.llm.folder import check_folder, staged_folder
from sbonnx.llm.layout import read_decoder
from sbonnx.llm.token_texts import Texts
from sbonnx.llm.windows import TOKENS
from sbonnx.options import RunOptions
from sbonnx.progress import Progress, shown_by_default
from sbonnx.recipe import Recipe, load
from sbonnx.recipe.keywords import QuantizeKeywords
from sbonnx.report import Report
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.spec import Array, QuantSpec
from sbonnx.stages.contract import Stage
from sbonnx.stages.state import Request, run_options
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.qat import Adapters, Settings

DEFAULTS: Final[dict[str, Any]] = {
    "MODE": "weight_only",
    "W.QUANTIZER.BIT": 4,
    "ACCURACY_LEVEL": "auto",
    "VERIFY.HELD_OUT": 0.0,
}
"""Recipe of a decoder. Windows are held out by `read_texts`."""

INT4: Final = QuantSpec(bits=4)

BLOCK: Final = 32
NARROW_BLOCK: Final = 64
"""Default block size, and that of 2 bits, at which the kernels take half of the time."""
NARROW_ROUNDING: Final = {"W.ROUNDING.TYPE": "adaquant", "W.ROUNDING.SCALE": "search"}
"""Rounding of 2 bits with texts: scales and values fitted to each other. It gains nothing at 3 and 4 bits."""

WIDTH: Final = re.compile(r"w?(\d+)")

KEYS: Final = {"block_size": "W.BLOCK_SIZE", "average_bits": "MIXED.BUDGET.BITS", "kv_bits": "LLM.KV_BITS"}
"""Keys of the recipe by keyword of `quantize`; None is as the recipe says."""


DECODER: Final[tuple[Stage, ...]] = (
    quantize_encoder,  # of an encoder-decoder, by the stages below
    choose_recipe,  # AUTO, MIXED: a width for each layer
    *pipeline.STAGES,  # from the model to the quantized one, as of any model
    copy_folder,
    train_weights,  # EFFORT best: 2-bit weights of the written file, in torch
    quantize_caches,  # LLM.KV_BITS: of the written file
    evaluate_decoder,  # perplexity, and the limits of the recipe
    report_decoder,
    save_provenance,
)
"""From a decoder and windows of tokens (`read_texts`) to a folder for the same program, and its report."""

EVALUATE: Final[tuple[Stage, ...]] = (read_texts, evaluate_decoder)
"""From a decoder and texts to its evaluation."""


class TextKeywords(TypedDict, total=False):
    """Keywords of `read_decoder` and `read_windows`."""

    tokenizer: str | os.PathLike[str] | None
    past: str | None
    present: str | None
    window: int | None
    tokens: int


class DecoderKeywords(QuantizeKeywords, total=False):
    """Keywords of `quantize`: those of `sbonnx.quantize`, and of `read_decoder`."""

    kv_bits: int | None
    tokenizer: str | os.PathLike[str] | None
    past: str | None
    present: str | None


@shown_by_default
def quantize(
    source: str | os.PathLike[str],
    texts: Texts | Array | None = None,
    *,
    output: str | os.PathLike[str],
    force: bool = False,
    latency: bool = True,
    details: bool = False,
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    **keywords: Unpack[DecoderKeywords],
) -> Report:
    """Quantize the weights of an exported decoder, write a folder for the same program, and evaluate it.

    Feeds and recipe go through `sbonnx.quantize` with MODE weight_only: the same feeds as .npz files and the same
    recipe give the same model file.

    Args:
        source: a folder of onnxruntime-genai or optimum, or an .onnx file with `tokenizer`.
        texts: see `sbonnx.llm.windows.read_windows`; None: weights are rounded to nearest.
        output: the folder to write.
        force: replace a folder that an earlier run wrote.
        latency: measure speed and memory.
        details: with texts, measure what the page (``report.to_html()``) shows beyond the figures, see
            `sbonnx.quantize`.
        progress: receiver of progress updates.
        overrides: values by key, or texts "KEY=VALUE"; the last word.
        keywords: ``recipe``, a path or dict with settings such as LLM.TOKENS or W.SPECIFIC; recipe keys by keyword as
            of `sbonnx.quantize`, such as ``window=256`` or ``min_agreement=0.9``;
            ``tokenizer``, ``past`` and ``present`` as of `read_decoder`; and

            - backend: "onnxruntime" (default) for MatMulNBits; "tensorrt" or "tensorrt@VERSION" for blocks of int4
              with DequantizeLinear; "virtual".
            - bits: width of the weights, 4 or "w4" by default.
            - block_size: weights that share a scale; by default 32, with 2 bits 64, with tensorrt 128 or 64.
            - average_bits: choose the width of each layer, this many bits of a weight on average, embedding and head
              included and scales not; None: `bits` everywhere.
            - kv_bits: width of the key/value caches, 8 or 4; None: as they are. Needs texts.

    Returns:
        The report of `sbonnx.quantize`; ``report.metrics.llm`` is the `DecoderEvaluation`.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial folder is left.
    """
    values: dict[str, Any] = dict(keywords)
    tokenizer, past, present, recipe = (values.pop(name, None) for name in ("tokenizer", "past", "present", "recipe"))
    decoder = read_decoder(source, tokenizer=tokenizer, past=past, present=present)
    settings = recipe_for(values, recipe, overrides, texts=texts is not None)
    target = Path(output)
    with protecting(input_paths([texts, tokenizer], [recipe])):
        check_folder(target, decoder, force=force)
    limits = DecoderLimits(settings.verify.max_perplexity, settings.verify.min_agreement)
    decoding = DecoderRequest(decoder, texts, decoder, target, past, present, limits, latency)
    state = DecoderState(_request(decoding, settings, details=details), decoding=decoding)
    options = run_options(settings, progress)
    state = pipeline.run((read_texts,), state, options)
    with closing(options.progress), staged_folder(target, decoder, force=force) as folder:
        return pipeline.run(DECODER, state.staged(folder), options).report


def evaluate(
    source: str | os.PathLike[str],
    texts: Texts | Array,
    *,
    against: str | os.PathLike[str] | None = None,
    adapter: str | os.PathLike[str] | None = None,
    limits: DecoderLimits | None = None,
    latency: bool = True,
    **reading: Unpack[TextKeywords],
) -> DecoderEvaluation:
    """Evaluate a decoder on texts, and compare it with the float one.

    Args:
        source, against: folders or files, see `read_decoder`; `against` is the float decoder.
        texts: see `sbonnx.llm.windows.read_windows`; all windows are used.
        adapter: adapter of `source` that is active, see `read_decoder`.
        limits: None: no limits.
        latency: measure speed and memory.
        reading: ``tokenizer``, ``past`` and ``present`` of single files, see `read_decoder`; ``window`` and ``tokens``,
            see `read_windows`.

    Raises:
        ModelError: a model cannot be read or opened, or the two are not alike.
        DataError: the texts cannot be read, a model cannot run them, or there are limits and no float decoder.
    """
    if against is None and limits is not None and limits.any:
        raise DataError(NO_FLOAT)
    settings, names = _settings(**reading)
    decoder = read_decoder(source, **names, adapter=adapter)
    reference = None if against is None else read_decoder(against, **names)
    decoding = DecoderRequest(decoder, texts, reference, limits=limits or NO_LIMITS, latency=latency)
    state = DecoderState(_request(decoding, settings), decoding=decoding)
    evaluation = pipeline.run(EVALUATE, state, RunOptions()).evaluation
    assert evaluation is not None
    return evaluation


def adapt(  # noqa: PLR0913 - public entry point
    source: str | os.PathLike[str],
    texts: Texts | Array,
    *,
    output: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    adapters: Adapters | int = 16,
    form: Form = "branches",
    settings: Settings | None = None,
    device: str = "cpu",
    force: bool = False,
    latency: bool = True,
    progress: Progress | None = None,
    **reading: Unpack[TextKeywords],
) -> AdaptedDecoder:
    """Train low-rank adapters on a quantized decoder, and write a folder with the adapters as branches of its file.

    Except with form "merged", the quantized weights stay as they are, bit for bit. The adapters learn the distributions
    that the float decoder predicts, or the next token of the texts. Needs torch: ``pip install 'sbonnx[qat]'``.

    Args:
        source: the quantized decoder, with MatMulNBits or Q/DQ of weights: a folder, or an .onnx file with `tokenizer`.
        texts: texts to train on, see `sbonnx.llm.windows.read_windows`; every eighth window is held out.
        output: the folder to write.
        against: the float decoder, in the same form of export; None: the next token is learned.
        adapters: rank, or `sbonnx.qat.Adapters` with mode "outside", and "inside" for form "merged".
        form: "branches": float branches in the model. "merged": the adapters change quantized values and scales, and
            the model keeps its nodes and its size. "inputs": they are in a file ``adapter.onnx_adapter`` for
            onnxruntime's `LoraAdapter` and onnxruntime-genai's `Adapters`, and the model has optional inputs for them.
            The model without an adapter computes what the base does, and takes adapters of any rank. Norms and biases
            are then not trained.
        settings: settings of the training; see `sbonnx.qat.Settings`.
        device: torch device of the training.
        force: replace a folder that an earlier run wrote.
        latency: measure speed and memory.
        progress: receiver of progress updates.
        reading: see `evaluate`.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial folder is left.
    """
    recipe, names = _settings(**reading)
    decoder = read_decoder(source, **names)
    if decoder.encoder is not None:
        raise ModelError(
            f"adapters are trained for decoders alone, and '{decoder.model}' reads what an encoder computes"
        )
    reference = None if against is None else read_decoder(against, **names)
    adapting = AdapterOptions(adapters, form, settings, device)
    adapting.check()
    target = Path(output)
    with protecting(input_paths([texts, names["tokenizer"], against])):
        check_folder(target, decoder, force=force)
    decoding = DecoderRequest(decoder, texts, reference, target, names["past"], names["present"], latency=latency)
    state = AdapterState(_request(decoding, recipe), decoding=decoding, adapting=adapting)
    options = run_options(recipe, progress)
    state = pipeline.run((read_texts,), state, options)
    with staged_folder(target, decoder, force=force) as folder:
        return pipeline.run(ADAPT, state.staged(folder), options).adapted


def _settings(
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    past: str | None = None,
    present: str | None = None,
    window: int | None = None,
    tokens: int = TOKENS,
) -> tuple[Recipe, dict[str, Any]]:
    """Return the recipe that cuts texts into windows, and the arguments of `read_decoder`; see `TextKeywords`."""
    recipe = load(None, overrides={"LLM.WINDOW": window, "LLM.TOKENS": tokens})
    return recipe, {"tokenizer": tokenizer, "past": past, "present": present}


def _request(decoding: DecoderRequest, settings: Recipe, *, details: bool = False) -> Request:
    backend = backend_for(settings.backend, settings.version)
    return Request(decoding.decoder.model, settings, backend, details=details)


def recipe_keys(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of `quantize` as keys of the recipe, without those of `KEYS` that are None.

    Raises:
        RecipeError: the bits are no width.
    """
    keys = {KEYS.get(name, name): value for name, value in keywords.items() if value is not None or name not in KEYS}
    bits = keys.pop("bits", None)
    if bits is not None:
        width = WIDTH.fullmatch(str(bits).strip().lower())
        if width is None:
            raise RecipeError(f"the bits of a decoder's weights are a number such as 4 or w4, got '{bits}'")
        keys["W.QUANTIZER.BIT"] = int(width[1])
    return keys


def recipe_for(
    keywords: Mapping[str, Any],
    recipe: Any = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    texts: bool = False,
) -> Recipe:
    """Return the recipe of a decoder: the defaults, then `recipe`, then `keywords`, then `overrides`.

    Args:
        keywords: keywords of `quantize` that are keys of the recipe.
        texts: whether there are texts.

    Raises:
        RecipeError: a value is wrong, MODE is not weight_only, or caches are to be quantized for another runtime.
    """
    own = recipe_keys(keywords)
    settings = load(recipe, backend=own.pop("backend", None))
    if "MODE" in settings.decided:
        _require_weight_only(settings)
    keys = {key: value for key, value in DEFAULTS.items() if key not in settings.decided}
    settings = load(load(settings, overrides=keys | own), overrides=overrides)
    _require_weight_only(settings)
    if settings.llm.kv_bits is not None and BACKENDS[settings.backend].files.builds_engine:
        raise RecipeError("caches are quantized for kernels of onnxruntime: leave out --kv (LLM.KV_BITS)")
    return load(settings, overrides=_defaults_by_width(settings, texts=texts))


def _defaults_by_width(settings: Recipe, *, texts: bool) -> dict[str, Any]:
    """Return block size and rounding by the width of the weights, if the recipe does not decide them."""
    keys: dict[str, Any] = {}
    narrow = settings.w.quantizer.bit == NARROW and settings.mixed.budget.bits is None
    if "W.BLOCK_SIZE" not in settings.decided and not BACKENDS[settings.backend].numbers.block_sizes(INT4):
        keys["W.BLOCK_SIZE"] = NARROW_BLOCK if narrow else BLOCK
    if narrow and texts and settings.effort != "fast" and not settings.decided & NARROW_ROUNDING.keys():
        keys |= NARROW_ROUNDING
    return keys


def _require_weight_only(settings: Recipe) -> None:
    if settings.mode != "weight_only":
        raise RecipeError(f"decoders are quantized with MODE weight_only, and the recipe has MODE: {settings.mode}")

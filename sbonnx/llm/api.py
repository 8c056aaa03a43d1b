"""`quantize`: a decoder and texts in, a folder with the quantized decoder out."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx import api as quantization
from sbonnx.backends import BACKENDS
from sbonnx.errors import DataError, RecipeError
from sbonnx.input_files import protecting
from sbonnx.llm.evaluate import DecoderEvaluation, DecoderLimits, evaluate_windows
from sbonnx.llm.folder import check_folder, copy_rest, model_place, staged_folder, write_provenance
from sbonnx.llm.kv_cache import quantize_caches, read_attention
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.texts import Texts
from sbonnx.llm.windows import DecoderFeeds, TokenWindows, read_windows
from sbonnx.progress import Progress
from sbonnx.python_files import input_paths
from sbonnx.recipe import Recipe, load
from sbonnx.report import Note, Report
from sbonnx.spec import Array, QuantSpec
from sbonnx.version import __version__

DEFAULTS: Final[dict[str, Any]] = {
    "MODE": "weight_only",
    "W.QUANTIZER.BIT": 4,
    "ACCURACY_LEVEL": "auto",
    "VERIFY.HELD_OUT": 0.0,
}
"""Recipe of a decoder. Windows are held out here."""

INT4: Final = QuantSpec(bits=4)

BLOCK: Final = 32
NARROW_BLOCK: Final = 64
"""Default block size, and that of 2 bits, at which the kernels take half of the time."""
NARROW: Final = 2
NARROW_ROUNDING: Final = {"W.ROUNDING.TYPE": "adaquant", "W.ROUNDING.SCALE": "search"}
"""Rounding of 2 bits with texts: scales and values fitted to each other. It gains nothing at 3 and 4 bits."""


NO_TEXTS: Final = Note(
    "no-texts", "no texts were given: weights are rounded to nearest and the perplexity is not measured"
)
NO_CACHE_TEXTS: Final = "scales of caches (--kv, LLM.KV_BITS) are measured on texts, and none were given: give --text"
NO_LIMIT_TEXTS: Final = (
    "limits (VERIFY.MAX_PERPLEXITY, VERIFY.MIN_AGREEMENT) are measured on texts, and none were given: give --text"
)
FEW_WINDOWS: Final = (
    "the texts fill {count} windows of {length} tokens, too few to hold some out: perplexities are of the windows that "
    "were calibrated on"
)

WIDTH: Final = re.compile(r"w?(\d+)")


def quantize(  # noqa: PLR0913 - public entry point
    source: str | os.PathLike[str],
    texts: Texts | Array | None = None,
    *,
    output: str | os.PathLike[str],
    backend: str | None = None,
    bits: str | int | None = None,
    block_size: int | None = None,
    average_bits: float | None = None,
    kv_bits: int | None = None,
    recipe: Any = None,
    tokenizer: str | os.PathLike[str] | None = None,
    past: str | None = None,
    present: str | None = None,
    force: bool = False,
    latency: bool = True,
    details: bool = False,
    progress: Progress | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
) -> Report:
    """Quantize the weights of an exported decoder, write a folder for the same program, and evaluate it.

    Feeds and recipe go through `sbonnx.quantize` with MODE weight_only: the same feeds as .npz files and the same
    recipe give the same model file.

    Args:
        source: a folder of onnxruntime-genai or optimum, or an .onnx file with `tokenizer`.
        texts: see `sbonnx.llm.windows.read_windows`; None: weights are rounded to nearest.
        output: the folder to write.
        backend: "onnxruntime" (default) for MatMulNBits; "tensorrt" or "tensorrt@VERSION" for blocks of int4 with
            DequantizeLinear; "virtual".
        bits: width of the weights, 4 or "w4" by default.
        block_size: weights that share a scale; by default 32, with 2 bits 64, with tensorrt 128 or 64.
        average_bits: choose the width of each layer, this many bits of a weight on average, embedding and head
            included and scales not; None: `bits` everywhere.
        kv_bits: width of the key/value caches, 8 or 4; None: as they are. Needs texts.
        recipe: path or dict with further settings, such as LLM.TOKENS or W.SPECIFIC.
        tokenizer, past, present: see `read_decoder`.
        force: replace a folder that an earlier run wrote.
        latency: measure speed and memory.
        details: with texts, measure what the page (``report.to_html()``) shows beyond the figures, see
            `sbonnx.quantize`.
        progress: receiver of progress updates.
        overrides: values by key, or texts "KEY=VALUE"; the last word.

    Returns:
        The report of `sbonnx.quantize`; ``report.metrics["llm"]`` has the evaluation as in `DecoderEvaluation`.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial folder is left.
    """
    decoder = read_decoder(source, tokenizer=tokenizer, past=past, present=present)
    settings = recipe_for(
        bits,
        block_size,
        recipe,
        overrides,
        backend=backend,
        average_bits=average_bits,
        kv_bits=kv_bits,
        texts=texts is not None,
    )
    target = Path(output)
    with protecting(input_paths([texts, tokenizer], [recipe])):
        check_folder(target, decoder, force=force)
    if settings.llm.kv_bits is not None:
        read_attention(decoder)  # before the work begins
        if texts is None:
            raise DataError(NO_CACHE_TEXTS)
    if texts is None and limits_of(settings).any:
        raise DataError(NO_LIMIT_TEXTS)
    windows = None
    if texts is not None:
        windows = read_windows(decoder, texts, window=settings.llm.window, tokens=settings.llm.tokens)
    feeds = None if windows is None else calibration_feeds(decoder, windows, settings)
    with staged_folder(target, decoder, force=force) as stage:
        place = model_place(decoder, stage)
        # the evaluation compares with float by logits; without texts, the file is checked and opened
        verify = windows is None
        report = quantization.quantize(
            decoder.model, feeds, recipe=settings, output=place, verify=verify, progress=progress, details=details
        )
        if settings.llm.kv_bits is not None and windows is not None:
            quantize_caches(place, decoder, windows.calibration, settings.llm.kv_bits)
        report = replace(report, notes=(*report.notes, *copy_rest(decoder, stage)))
        evaluation = None
        if windows is not None:
            written = read_decoder(_entry(decoder, stage, place), past=past, present=present)
            evaluation = evaluate_windows(
                written, windows.held_out, against=decoder, limits=limits_of(settings), latency=latency
            )
        report = _with_evaluation(report, decoder, target, windows, evaluation)
        write_provenance(stage, _provenance(report, decoder, windows))
    return report


def calibration_feeds(decoder: Decoder, windows: TokenWindows, settings: Recipe) -> DecoderFeeds:
    """Return the feeds of the calibration windows."""
    section = settings.llm
    return DecoderFeeds(decoder, windows.calibration, decode_share=section.decode_share, seed=settings.calibration.seed)


def recipe_for(
    bits: str | int | None,
    block_size: int | None,
    recipe: Any,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    backend: str | None = None,
    average_bits: float | None = None,
    kv_bits: int | None = None,
    texts: bool = False,
) -> Recipe:
    """Return the recipe of a decoder: the defaults, then `recipe`, then the keywords, then `overrides`.

    Raises:
        RecipeError: a value is wrong, MODE is not weight_only, or caches are to be quantized for another runtime.
    """
    settings = load(recipe, backend=backend)
    if "MODE" in settings.decided:
        _require_weight_only(settings)
    keys = {key: value for key, value in DEFAULTS.items() if key not in settings.decided}
    if bits is not None:
        width = WIDTH.fullmatch(str(bits).strip().lower())
        if width is None:
            raise RecipeError(f"the bits of a decoder's weights are a number such as 4 or w4, got '{bits}'")
        keys["W.QUANTIZER.BIT"] = int(width[1])
    if block_size is not None:
        keys["W.BLOCK_SIZE"] = block_size
    if average_bits is not None:
        keys["MIXED.BUDGET.BITS"] = average_bits
    if kv_bits is not None:
        keys["LLM.KV_BITS"] = kv_bits
    settings = load(load(settings, overrides=keys), overrides=overrides)
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


def limits_of(settings: Recipe) -> DecoderLimits:
    """Return the limits that a recipe sets for the evaluation."""
    return DecoderLimits(settings.verify.max_perplexity, settings.verify.min_agreement)


def _entry(decoder: Decoder, stage: Path, place: Path) -> Path:
    """Return what a reader of the output opens: the folder, or the file."""
    return place if decoder.folder is None else stage


def _with_evaluation(
    report: Report, decoder: Decoder, target: Path, windows: TokenWindows | None, evaluation: DecoderEvaluation | None
) -> Report:
    notes = list(report.notes)
    if windows is None:
        notes.append(NO_TEXTS)
    elif not windows.divided:
        notes.append(Note("few-windows", FEW_WINDOWS.format(count=len(windows.ids), length=windows.ids.shape[1])))
    if decoder.structure.quantized:
        notes.append(Note("already-quantized", "the model was quantized already: the float model gives better results"))
    report = replace(report, output=str(target), notes=tuple(notes))
    if evaluation is None:
        return report
    figures = evaluation.to_dict() | {"model": str(target)}
    return replace(
        report,
        metrics={**report.metrics, "llm": figures},
        problems=(*report.problems, *evaluation.problems),
        notes=(*report.notes, *evaluation.notes),
    )


def _provenance(report: Report, decoder: Decoder, windows: TokenWindows | None) -> dict[str, Any]:
    figures = report.metrics.get("llm", {})
    names = ("perplexity", "float_perplexity", "kl", "agreement", "tokens", "windows")
    return {
        "program": f"sbonnx {__version__}",
        "model": decoder.model.name,
        "recipe": report.settings,
        "texts": None if windows is None else {"sha256": windows.digest(), "windows": list(windows.ids.shape)},
        "evaluation": {name: figures[name] for name in names if name in figures} or None,
        "problems": list(report.problems),
    }

"""`quantize`: a decoder and texts in, a folder with the quantized decoder out.

The stages of decoders: texts before those of `sbonnx.pipeline`; caches, the folder and the evaluation after them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from sbonnx import pipeline
from sbonnx.backends import BACKENDS, backend_for
from sbonnx.errors import DataError, RecipeError
from sbonnx.llm.evaluate import DecoderLimits, evaluate_windows
from sbonnx.llm.folder import check_folder, copy_rest, model_place, staged_folder, write_provenance
from sbonnx.llm.kv_cache import quantize_caches as write_caches
from sbonnx.llm.kv_cache import read_attention
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.texts import Texts
from sbonnx.llm.windows import DecoderFeeds, TokenWindows, read_windows
from sbonnx.options import RunOptions
from sbonnx.progress import Progress, shown_by_default
from sbonnx.recipe import Recipe, load
from sbonnx.report import Note, Report
from sbonnx.search import SearchResult, searched
from sbonnx.spec import Array, QuantSpec
from sbonnx.stages.contract import Stage, Value, stage
from sbonnx.stages.state import ABSENT, PipelineState, Request, run_options
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
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

WIDTH: Final = re.compile(r"w?(\d+)")

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

FIGURES: Final = ("perplexity", "float_perplexity", "kl", "agreement", "tokens", "windows")
"""Figures of the evaluation in the provenance of a folder."""


@dataclass(frozen=True)
class DecoderRequest:
    """One decoder to quantize, beside the `Request` of its model.

    Attributes:
        decoder: the float decoder.
        texts: see `sbonnx.llm.windows.read_windows`; None: weights are rounded to nearest.
        target: the folder to write.
        past, present: names of the caches, see `read_decoder`.
        latency: measure speed and memory.
    """

    decoder: Decoder
    texts: Texts | Array | None
    target: Path
    past: str | None = None
    present: str | None = None
    latency: bool = True


@dataclass(frozen=True)
class DecoderState(PipelineState):
    """State of the pipeline, and the values of a decoder.

    Attributes:
        decoding: what was asked for.
        windows: windows of tokens; None: there are no texts.
        folder: the staged folder.
        search: the search for the recipe; None: there was none.
    """

    decoding: DecoderRequest = ABSENT
    windows: TokenWindows | None = None
    folder: Path = ABSENT
    search: SearchResult | None = None

    @property
    def present(self) -> frozenset[Value]:
        """The values that are set, apart from those that can be None."""
        return super().present if self.folder is None else super().present | {"folder"}

    def staged(self, folder: Path) -> DecoderState:
        """Return the state with the folder to write to."""
        place = model_place(self.decoding.decoder, folder)
        return replace(self, folder=folder, request=replace(self.request, output=place))


def limits_of(settings: Recipe) -> DecoderLimits:
    """Return the limits that a recipe sets for the evaluation."""
    return DecoderLimits(settings.verify.max_perplexity, settings.verify.min_agreement)


@stage(sets=("texts",))
def read_texts(state: DecoderState, options: RunOptions) -> DecoderState:
    """Read texts into windows of tokens, and make the feeds of those that are not held out.

    With texts, logits are compared with float in place of the verification of the file.

    Raises:
        DataError: there are no texts, and the recipe needs some; see `read_windows`.
        ModelError, DeviceError: the caches are to be quantized and cannot be; see `read_attention`.
    """
    decoder, texts, recipe = state.decoding.decoder, state.decoding.texts, state.request.recipe
    section = recipe.llm
    if section.kv_bits is not None:
        read_attention(decoder)
    if texts is None:
        if section.kv_bits is not None:
            raise DataError(NO_CACHE_TEXTS)
        if limits_of(recipe).any:
            raise DataError(NO_LIMIT_TEXTS)
        return state
    windows = read_windows(decoder, texts, window=section.window, tokens=section.tokens)
    feeds = DecoderFeeds(decoder, windows.calibration, decode_share=section.decode_share, seed=recipe.calibration.seed)
    return replace(state, windows=windows, request=replace(state.request, data=feeds, verify=False))


@stage(needs=("texts",))
def choose_recipe(state: DecoderState, options: RunOptions) -> DecoderState:
    """Search for the recipe, such as the width of each layer, if the recipe asks for it; see `searched`."""
    request, search = searched(state.request, progress=options.progress)
    return replace(state, request=request, search=search)


@stage(needs=("texts", "folder", "report"))
def quantize_caches(state: DecoderState, options: RunOptions) -> DecoderState:
    """Quantize the caches of the written model, with scales from the float decoder, if the recipe asks for it."""
    bits = state.request.recipe.llm.kv_bits
    if bits is not None and state.windows is not None:
        decoder = state.decoding.decoder
        write_caches(model_place(decoder, state.folder), decoder, state.windows.calibration, bits)
    return state


@stage(needs=("folder", "report"), sets=("report",))
def copy_folder(state: DecoderState, options: RunOptions) -> DecoderState:
    """Copy or link the other files of the decoder. The report names the final folder, and the search."""
    decoder, target = state.decoding.decoder, state.decoding.target
    report = state.report if state.search is None else state.search.added_to(state.report)
    notes = (*report.notes, *copy_rest(decoder, state.folder))
    report = report.placed_at(str(model_place(decoder, target)))
    return replace(state, report=replace(report, output=str(target), notes=notes))


@stage(needs=("texts", "folder", "report"), sets=("report",))
def measure_perplexity(state: DecoderState, options: RunOptions) -> DecoderState:
    """Evaluate the written decoder on the windows that were held out, and check the limits of the recipe.

    Raises:
        DataError, ModelError: see `evaluate_windows`.
    """
    options.progress.close()  # its display takes time from what is measured
    asked, windows, notes = state.decoding, state.windows, list(state.report.notes)
    decoder = asked.decoder
    if windows is None:
        notes.append(NO_TEXTS)
    elif not windows.divided:
        notes.append(Note("few-windows", FEW_WINDOWS.format(count=len(windows.ids), length=windows.ids.shape[1])))
    if decoder.structure.quantized:
        notes.append(Note("already-quantized", "the model was quantized already: the float model gives better results"))
    report = replace(state.report, notes=tuple(notes))
    if windows is None:
        return replace(state, report=report)
    entry = state.folder if decoder.folder is not None else model_place(decoder, state.folder)
    written = read_decoder(entry, past=asked.past, present=asked.present)
    limits = limits_of(state.request.recipe)
    found = evaluate_windows(written, windows.held_out, against=decoder, limits=limits, latency=asked.latency)
    report = replace(
        report,
        metrics={**report.metrics, "llm": found.to_dict() | {"model": report.output}},
        problems=(*report.problems, *found.problems),
        notes=(*report.notes, *found.notes),
    )
    return replace(state, report=report)


@stage(needs=("texts", "folder", "report"))
def save_provenance(state: DecoderState, options: RunOptions) -> DecoderState:
    """Write recipe, digest of the texts and figures into the folder."""
    report, windows = state.report, state.windows
    figures: dict[str, Any] = report.metrics.get("llm", {})
    values = {
        "program": f"sbonnx {__version__}",
        "model": state.decoding.decoder.model.name,
        "recipe": report.settings,
        "texts": None if windows is None else {"sha256": windows.digest(), "windows": list(windows.ids.shape)},
        "evaluation": {name: figures[name] for name in FIGURES if name in figures} or None,
        "problems": list(report.problems),
    }
    write_provenance(state.folder, values)
    return state


DECODER: Final[tuple[Stage, ...]] = (
    choose_recipe,  # AUTO, MIXED: a width for each layer
    *pipeline.STAGES,  # from the model to the quantized one, as of any model
    quantize_caches,  # LLM.KV_BITS: of the written file
    copy_folder,
    measure_perplexity,  # and check the limits
    save_provenance,
)
"""From a decoder and windows of tokens (`read_texts`) to a folder for the same program, and its report."""


@shown_by_default
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
    widths = Widths(bits, block_size, average_bits, kv_bits)
    settings = recipe_for(widths, recipe, overrides, backend=backend, texts=texts is not None)
    target = Path(output)
    with protecting(input_paths([texts, tokenizer], [recipe])):
        check_folder(target, decoder, force=force)
    request = Request(decoder.model, settings, backend_for(settings.backend, settings.version), details=details)
    options = run_options(settings, progress)
    state = DecoderState(request, decoding=DecoderRequest(decoder, texts, target, past, present, latency))
    state = pipeline.run((read_texts,), state, options)
    with closing(options.progress), staged_folder(target, decoder, force=force) as folder:
        return pipeline.run(DECODER, state.staged(folder), options).report


@dataclass(frozen=True)
class Widths:
    """Bits and blocks of a decoder; None: as the recipe says. See `quantize`."""

    bits: str | int | None = None
    block_size: int | None = None
    average_bits: float | None = None
    kv_bits: int | None = None

    def keys(self) -> dict[str, Any]:
        """Return the values that are given, by key of the recipe.

        Raises:
            RecipeError: `bits` is no width.
        """
        width = None if self.bits is None else WIDTH.fullmatch(str(self.bits).strip().lower())
        if self.bits is not None and width is None:
            raise RecipeError(f"the bits of a decoder's weights are a number such as 4 or w4, got '{self.bits}'")
        values = {
            "W.QUANTIZER.BIT": None if width is None else int(width[1]),
            "W.BLOCK_SIZE": self.block_size,
            "MIXED.BUDGET.BITS": self.average_bits,
            "LLM.KV_BITS": self.kv_bits,
        }
        return {key: value for key, value in values.items() if value is not None}


def recipe_for(
    widths: Widths,
    recipe: Any = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    backend: str | None = None,
    texts: bool = False,
) -> Recipe:
    """Return the recipe of a decoder: the defaults, then `recipe`, then `widths`, then `overrides`.

    Raises:
        RecipeError: a value is wrong, MODE is not weight_only, or caches are to be quantized for another runtime.
    """
    settings = load(recipe, backend=backend)
    if "MODE" in settings.decided:
        _require_weight_only(settings)
    keys = {key: value for key, value in DEFAULTS.items() if key not in settings.decided}
    settings = load(load(settings, overrides=keys | widths.keys()), overrides=overrides)
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

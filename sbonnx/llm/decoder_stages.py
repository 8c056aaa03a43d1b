"""Stages of decoders: texts before those of `sbonnx.pipeline`; caches, the folder and the evaluation after them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sbonnx import pipeline
from sbonnx.errors import DataError
from sbonnx.llm.evaluate import DecoderLimits, evaluate_windows
from sbonnx.llm.folder import copy_rest, model_place, write_provenance
from sbonnx.llm.kv_cache import quantize_caches as write_caches
from sbonnx.llm.kv_cache import read_attention
from sbonnx.llm.layout import WITH_PAST, Decoder, read_decoder
from sbonnx.llm.token_texts import Texts
from sbonnx.llm.windows import DecoderFeeds, TokenWindows, read_windows
from sbonnx.options import RunOptions
from sbonnx.report import Note, Report
from sbonnx.report.comparison import DecoderFigures
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.search import SearchResult, searched
from sbonnx.spec import Array
from sbonnx.stages.contract import Value, stage
from sbonnx.stages.state import ABSENT, PipelineState
from sbonnx.version import __version__

if TYPE_CHECKING:
    from typing_extensions import Self

NO_TEXTS: Final = Note(
    "no-texts", "no texts were given: weights are rounded to nearest and the perplexity is not measured"
)
STEPS_STAY_FLOAT: Final = Note(
    "steps-stay-float",
    f"{WITH_PAST}, which computes all tokens after the first, stays float: export the merged decoder "
    "(decoder_model_merged.onnx)",
)
NO_CACHE_TEXTS: Final = "scales of caches (--kv, LLM.KV_BITS) are measured on texts, and none were given: give --text"
NO_LIMIT_TEXTS: Final = (
    "limits (VERIFY.MAX_PERPLEXITY, VERIFY.MIN_AGREEMENT) are measured on texts, and none were given: give --text"
)
NO_FLOAT: Final = "limits of perplexity and agreement are relative to float: give the float decoder with --against"
FEW_WINDOWS: Final = (
    "the texts fill {count} windows of {length} tokens, too few to hold some out: perplexities are of the windows that "
    "were calibrated on"
)

FIGURES: Final = ("perplexity", "float_perplexity", "kl", "agreement", "tokens", "windows")
"""Figures of the evaluation in the provenance of a folder."""


NO_LIMITS: Final = DecoderLimits()


@dataclass(frozen=True)
class DecoderRequest:
    """One decoder to quantize, adapt or evaluate, beside the `Request` of its model.

    Attributes:
        decoder: the decoder that is read.
        texts: see `sbonnx.llm.windows.read_windows`; None: weights are rounded to nearest.
        reference: the float decoder that the result is compared with; None: there is none.
        target: the folder to write; None: nothing is written, and all windows are for the evaluation.
        past, present: names of the caches, see `read_decoder`.
        limits: limits of the evaluation.
        latency: measure speed and memory.
    """

    decoder: Decoder
    texts: Texts | Array | None
    reference: Decoder | None
    target: Path | None = None
    past: str | None = None
    present: str | None = None
    limits: DecoderLimits = NO_LIMITS
    latency: bool = True

    @property
    def tokenized(self) -> Decoder:
        """The decoder whose tokenizer cuts the texts: the float one, if it has a tokenizer."""
        if self.reference is None or (self.reference.tokenizer is None and self.decoder.tokenizer is not None):
            return self.decoder
        return self.reference


@dataclass(frozen=True)
class DecoderState(PipelineState):
    """State of the pipeline, and the values of a decoder.

    Attributes:
        decoding: what was asked for.
        windows: windows of tokens; None: there are no texts.
        folder: the staged folder.
        encoded: the report of the encoder; None: there is none.
        search: the search for the recipe; None: there was none.
        adapter: the file of an adapter in the staged folder; None: there is none.
        copied: notes about files that were not copied.
        evaluation: the evaluation of the result; None: there are no texts.
    """

    decoding: DecoderRequest = ABSENT
    windows: TokenWindows | None = None
    folder: Path = ABSENT
    encoded: Report | None = None
    search: SearchResult | None = None
    adapter: Path | None = None
    copied: tuple[Note, ...] = ()
    evaluation: DecoderEvaluation | None = None

    @property
    def present(self) -> frozenset[Value]:
        """The values that are set, apart from those that can be None."""
        return super().present if self.folder is None else super().present | {"folder"}

    @property
    def place(self) -> Path:
        """The model file in the staged folder."""
        return model_place(self.decoding.decoder, self.folder)

    def written(self) -> Decoder:
        """Read the written decoder, whose folder is complete."""
        asked = self.decoding
        entry = self.place if asked.decoder.folder is None else self.folder
        return read_decoder(entry, past=asked.past, present=asked.present, adapter=self.adapter)

    def staged(self, folder: Path) -> Self:
        """Return the state with the folder to write to."""
        state = replace(self, folder=folder)
        return replace(state, request=replace(self.request, output=state.place))


@stage(sets=("texts",))
def read_texts(state: DecoderState, options: RunOptions) -> DecoderState:
    """Read texts into windows of tokens, and make the feeds of those that are not held out.

    With texts, logits are compared with float in place of the verification of the file.

    Raises:
        DataError: there are no texts, and the recipe needs some; see `read_windows`.
        ModelError, DeviceError: the caches are to be quantized and cannot be; see `read_attention`.
    """
    asked, recipe = state.decoding, state.request.recipe
    section = recipe.llm
    if section.kv_bits is not None:
        read_attention(asked.decoder)
    if asked.texts is None:
        if section.kv_bits is not None:
            raise DataError(NO_CACHE_TEXTS)
        if asked.limits.any:
            raise DataError(NO_LIMIT_TEXTS)
        return state
    windows = read_windows(asked.tokenized, asked.texts, window=section.window, tokens=section.tokens)
    share, seed = section.decode_share, recipe.calibration.seed
    part = windows.part(held_out=False)
    feeds = DecoderFeeds(asked.decoder, part.ids, decode_share=share, seed=seed, sources=part.sources)
    return replace(state, windows=windows, request=replace(state.request, data=feeds, verify=False))


@stage(needs=("texts", "folder"))
def quantize_encoder(state: DecoderState, options: RunOptions) -> DecoderState:
    """Quantize the encoder of the decoder by the same recipe, if there is one.

    Raises:
        SbonnxError: as the stages of `sbonnx.pipeline`.
    """
    decoder, windows = state.decoding.decoder, state.windows
    if decoder.encoder is None:
        return state
    path = decoder.encoder.model
    data = None if windows is None else windows.part(held_out=False).sources
    output = state.place.parent / path.relative_to(decoder.model.parent)
    request, _ = searched(
        replace(state.request, model=path, data=data, output=output, verify=False), progress=options.progress
    )
    report = pipeline.run(pipeline.STAGES, PipelineState.of(request), options).report
    return replace(state, encoded=report)


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
        write_caches(state.place, state.decoding.decoder, state.windows.calibration, bits)
    return state


@stage(needs=("folder",))
def copy_folder(state: DecoderState, options: RunOptions) -> DecoderState:
    """Copy or link the other files of the decoder."""
    decoder = state.decoding.decoder
    notes = copy_rest(decoder, state.folder)
    if decoder.encoder is not None and not decoder.carried and decoder.model.with_name(WITH_PAST).is_file():
        notes.append(STEPS_STAY_FLOAT)
    return replace(state, copied=tuple(notes))


@stage(needs=("texts",), sets=("evaluation",))
def evaluate_decoder(state: DecoderState, options: RunOptions) -> DecoderState:
    """Evaluate the written decoder on the windows that were held out, or the decoder itself on all of them.

    Raises:
        DataError, ModelError: see `evaluate_windows`.
    """
    options.progress.close()  # its display takes time from what is measured
    asked, windows = state.decoding, state.windows
    if windows is None:
        return state
    decoder = asked.decoder
    if asked.target is not None:
        decoder, windows = state.written(), windows.part(held_out=True)
    evaluation = evaluate_windows(
        decoder,
        windows.ids,
        against=asked.reference,
        limits=asked.limits,
        latency=asked.latency,
        sources=windows.sources,
    )
    return replace(state, evaluation=evaluation)


@stage(needs=("texts", "folder", "report", "evaluation"), sets=("report",))
def report_decoder(state: DecoderState, options: RunOptions) -> DecoderState:
    """Add the search, the evaluation and notes to the report, which names the final folder."""
    asked, windows = state.decoding, state.windows
    assert asked.target is not None
    report = state.report if state.search is None else state.search.added_to(state.report)
    report = report if state.encoded is None else report.joined(state.encoded)
    notes = [*report.notes, *state.copied]
    if windows is None:
        notes.append(NO_TEXTS)
    elif not windows.divided:
        notes.append(Note("few-windows", FEW_WINDOWS.format(count=len(windows.ids), length=windows.ids.shape[1])))
    if asked.decoder.structure.quantized:
        notes.append(Note("already-quantized", "the model was quantized already: the float model gives better results"))
    report = replace(report.placed_at(str(model_place(asked.decoder, asked.target))), output=str(asked.target))
    evaluation = state.evaluation
    if evaluation is not None:
        notes += evaluation.notes
        figures = DecoderFigures(llm=replace(evaluation, model=str(asked.target)))
        report = replace(report, metrics=figures, problems=(*report.problems, *evaluation.problems))
    return replace(state, report=replace(report, notes=tuple(notes)))


@stage(needs=("texts", "folder", "report"))
def save_provenance(state: DecoderState, options: RunOptions) -> DecoderState:
    """Write recipe, digest of the texts and figures into the folder."""
    report, windows = state.report, state.windows
    evaluation = None if report.metrics is None else report.metrics.llm
    values = {
        "program": f"sbonnx {__version__}",
        "model": state.decoding.decoder.model.name,
        "recipe": report.settings,
        "texts": None if windows is None else {"sha256": windows.digest(), "windows": list(windows.ids.shape)},
        "evaluation": None if evaluation is None else {name: getattr(evaluation, name) for name in FIGURES},
        "problems": list(report.problems),
    }
    write_provenance(state.folder, values)
    return state

"""Training of quantized decoders: stages of `sbonnx.llm.adapt`, and the training of 2-bit weights in `quantize`.

`adapt` trains low-rank adapters (QLoRA), as branches or inputs of the file. `train_weights` trains whole weights.

The factors of adapters that are inputs (multi-LoRA) are initializers of rank 0 that are also listed as inputs.
onnxruntime uses the initializer unless the run has an active adapter: without one, the decoder computes what its base
does. The values are in files of onnxruntime (.onnx_adapter).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Literal, get_args

import numpy as np
import onnx
from onnx import helper

from sbonnx import graph as graphs
from sbonnx.errors import ModelError, RecipeError
from sbonnx.graph import read_proto
from sbonnx.llm.decoder_stages import DecoderState, copy_folder, evaluate_decoder
from sbonnx.llm.decoding import decoder_feed
from sbonnx.llm.evaluate import evaluate_windows
from sbonnx.llm.folder import write_provenance
from sbonnx.llm.layout import Decoder
from sbonnx.llm.windows import TokenWindows
from sbonnx.options import RunOptions
from sbonnx.report import Note
from sbonnx.report.decoder import DecoderEvaluation
from sbonnx.report.notebook import Result
from sbonnx.spec import Array
from sbonnx.stages.contract import Stage, Value, stage
from sbonnx.stages.prepare import load
from sbonnx.stages.state import ABSENT
from sbonnx.system.runtime import onnxruntime
from sbonnx.system.sizes import size_text
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.qat import Adapters, Settings
    from sbonnx.qat.adapters import Mode


Form = Literal["branches", "merged", "inputs"]

FORMS: Final[tuple[str, ...]] = get_args(Form)

MODES: Final[dict[str, Mode]] = {"branches": "outside", "merged": "inside", "inputs": "outside"}
"""Mode of `sbonnx.qat.Adapters` by form."""


ADAPTER: Final = "adapter.onnx_adapter"
"""Name of the file in the output folder."""

VERSION: Final = 1
"""Version of the adapter and of the model in the file."""

RANK: Final = "rank"
"""Name of the dynamic axis."""


@dataclass(frozen=True, repr=False)
class AdaptedDecoder(Result):
    """Result of `sbonnx.llm.adapt`.

    Attributes:
        output: the folder that was written.
        adapter: the .onnx_adapter file in it; None for branches.
        weights: number of weights that have an adapter.
        losses: mean loss of each epoch.
        before, after: evaluations of the quantized decoder and of the written one, on the same held-out windows.
    """

    frame_of: ClassVar = "losses"

    output: str
    weights: int
    losses: tuple[float, ...]
    before: DecoderEvaluation
    after: DecoderEvaluation
    adapter: str | None = None


@dataclass(frozen=True)
class AdapterOptions:
    """Options of adapters and their training, see `sbonnx.llm.adapt`."""

    adapters: Adapters | int
    form: Form
    settings: Settings | None = None
    device: str = "cpu"

    @property
    def inputs(self) -> bool:
        """Whether the adapters are inputs of the decoder."""
        return self.form == "inputs"

    def check(self) -> None:
        """Check the form.

        Raises:
            RecipeError: there is no such form, or the adapters are of another.
        """
        form, adapters = self.form, self.adapters
        if form not in FORMS:
            raise RecipeError(f"the form of adapters must be {', '.join(FORMS[:-1])} or {FORMS[-1]}, got {form!r}")
        if isinstance(adapters, int):
            return
        if adapters.mode != MODES[form]:
            raise RecipeError(
                f"adapters of the form '{form}' need Adapters(mode='{MODES[form]}'), got '{adapters.mode}'"
            )
        if self.inputs and adapters.norms:
            raise RecipeError(
                "adapters as inputs share one base, whose norms stay as they are: use Adapters(norms=False)"
            )


@dataclass(frozen=True)
class TrainedAdapters:
    """Adapters after the training.

    Attributes:
        weights: number of weights that have an adapter.
        losses: mean loss of each epoch.
        factors: A (inputs, rank) and B (rank, outputs) of the adapters, by initializer.
    """

    weights: int
    losses: tuple[float, ...]
    factors: Mapping[str, Array]


@dataclass(frozen=True)
class AdapterState(DecoderState):
    """State of a decoder that gets adapters.

    Attributes:
        adapting: what was asked for.
        trained: the adapters.
        adapted: the result.
    """

    adapting: AdapterOptions = ABSENT
    trained: TrainedAdapters = ABSENT
    adapted: AdaptedDecoder = ABSENT

    @property
    def present(self) -> frozenset[Value]:
        """The values that are set, apart from those that can be None."""
        return super().present if self.trained is None else super().present | {"adapters"}


@stage(needs=("graph", "texts"), sets=("graph", "adapters"))
def train_adapters(state: AdapterState, options: RunOptions) -> AdapterState:
    """Train adapters on the windows that are not held out, and write them into the graph, in place.

    Raises:
        ModelError: an op cannot be trained, or the float decoder has other inputs.
        RecipeError: no weight can have an adapter.
    """
    from sbonnx.qat import decoder_adapters
    from sbonnx.qat.lora import low_ranks

    asked, adapting, graph = state.decoding, state.adapting, state.prepared.graph
    decoder, windows = asked.decoder, state.windows
    assert windows is not None
    fixed = {} if decoder.branch is None else {decoder.branch: np.array([False])}  # whole windows, without a past
    module = decoder_adapters.adapted(
        graph,
        adapting.adapters,
        device=adapting.device,
        fixed=fixed,
        mode=MODES[adapting.form],
        norms=not adapting.inputs,
    )
    trained = decoder_adapters.train_adapters(
        module,
        [decoder_feed(decoder, ids[None]) for ids in windows.calibration],
        tokens=decoder.tokens,
        logits=decoder.logits,
        teacher=None if asked.reference is None else graphs.load(asked.reference.model),
        fixed=fixed,
        settings=adapting.settings or decoder_adapters.DEFAULTS,
        progress=options.progress,
    )
    factors = decoder_adapters.write_adapters(graph, module, inputs=adapting.inputs)
    return replace(state, trained=TrainedAdapters(len(low_ranks(module)), tuple(trained.losses), factors))


@stage(needs=("graph", "folder", "adapters"))
def save_adapted(state: AdapterState, options: RunOptions) -> AdapterState:
    """Save the model, and the file of the adapters if they are inputs."""
    place, factors = state.place, state.trained.factors
    graphs.save(state.prepared.graph, place)
    if not state.adapting.inputs:
        return state
    list_inputs(place, factors)
    write_adapter(place.with_name(ADAPTER), factors)
    return replace(state, adapter=place.with_name(ADAPTER))


@stage(needs=("texts", "folder", "adapters", "evaluation"))
def compare_with_base(state: AdapterState, options: RunOptions) -> AdapterState:
    """Evaluate the decoder without adapters too, and write the provenance of the folder: the result is complete."""
    asked, trained, windows, after = state.decoding, state.trained, state.windows, state.evaluation
    assert windows is not None
    assert after is not None
    assert asked.target is not None
    before = evaluate_windows(asked.decoder, windows.held_out, against=asked.reference, latency=False)
    after = replace(after, notes=(*after.notes, *state.copied))
    file = None if state.adapter is None else str(asked.target / state.adapter.relative_to(state.folder))
    result = AdaptedDecoder(str(asked.target), trained.weights, trained.losses, before, after, file)
    figures = {
        name: {key: getattr(figures, key) for key in ("perplexity", "float_perplexity", "kl", "agreement", "windows")}
        for name, figures in (("before", before), ("after", after))
    }
    values = {
        "program": f"sbonnx {__version__}",
        "model": asked.decoder.model.name,
        "adapters": trained.weights,
        "losses": list(trained.losses),
        "texts": {"sha256": windows.digest()},
        "evaluation": figures,
    }
    write_provenance(state.folder, values)
    return replace(state, adapted=result)


ADAPT: Final[tuple[Stage, ...]] = (
    load,  # the quantized file as it is
    train_adapters,  # in torch
    save_adapted,
    copy_folder,
    evaluate_decoder,  # the written decoder
    compare_with_base,
)
"""From a quantized decoder and windows of tokens (`read_texts`) to a folder with its adapters."""


NARROW: Final = 2
"""Width of the weights that are trained. With 3 bits, onnxruntime stores 4, which need no training."""

TRAINED_BYTES: Final = 16
"""Bytes in training for each trained value: the update in float32, its gradient and two moments of Adam."""


@stage(needs=("texts", "folder", "report"), sets=("report",))
def train_weights(state: DecoderState, options: RunOptions) -> DecoderState:
    """Train the 2-bit weights of the written file against the float decoder, with EFFORT best; a note says how it went.

    Without torch, with operators that torch does not have, or beyond the memory budget, the file stays as it is.
    """
    decoder, windows = state.decoding.decoder, state.windows
    if windows is None or state.request.recipe.effort != "best":
        return state
    written = state.written()
    narrow = [weight for weight in written.structure.weights if weight.bits == NARROW]
    if not narrow:
        return state
    note = _trained(written, {weight.table for weight in narrow}, decoder, windows, options)
    return replace(state, report=replace(state.report, notes=(*state.report.notes, note)))


def _trained(written: Decoder, weights: set[str], source: Decoder, windows: TokenWindows, options: RunOptions) -> Note:
    if find_spec("torch") is None:
        return Note("not-trained", "2-bit weights were not trained, because torch is not installed: sbonnx[qat]")
    if written.embedder is not None or written.encoder is not None or written.position_axes:
        return Note(
            "not-trained",
            "2-bit weights were not trained: it reads what another model computes, or positions of three axes",
        )
    from sbonnx.qat import Adapters, decoder_adapters

    settings = decoder_adapters.WHOLE
    sizes = {weight.table: weight.rows * weight.columns for weight in written.structure.weights}
    tokens = min(settings.batch, len(windows.calibration)) * windows.ids.shape[1]
    needed = sum(8 * size + TRAINED_BYTES * size * (name in weights) for name, size in sizes.items())
    needed += TRAINED_BYTES * tokens * (source.vocabulary or 0)
    if needed > options.memory_bytes:
        texts = size_text(needed), size_text(options.memory_bytes)
        why = "2-bit weights were not trained, which takes {} of memory, and {} are allowed: --memory"
        return Note("not-trained", why.format(*texts))
    fixed = {} if written.branch is None else {written.branch: np.array([False])}
    graph = graphs.load(onnx.load(written.model))  # not mapped: the file is written again
    teacher = graphs.load(source.model)
    adapters = Adapters(rank=None, targets=tuple(sorted(map(escape, weights))))
    device = "cpu" if options.device == "auto" else options.device
    try:
        module = decoder_adapters.adapted(graph, adapters, device=device, fixed=fixed, teacher=teacher)
        trained = decoder_adapters.train_adapters(
            module,
            [decoder_feed(written, ids[None]) for ids in windows.calibration],
            tokens=written.tokens,
            logits=written.logits,
            teacher=teacher,
            fixed=fixed,
            settings=settings,
            progress=options.progress,
            resampled=decoder_adapters.RESAMPLED,
        )
    except (ModelError, RecipeError) as error:
        return Note("not-trained", f"2-bit weights were not trained: {error}")
    decoder_adapters.write_adapters(graph, module)
    graphs.save(graph, written.model, force=True)
    return trained.note


def list_inputs(model: Path, factors: Mapping[str, Array]) -> None:
    """List the factors of adapters among the inputs of a model file, in place; the rank is a dynamic axis.

    Args:
        model: file with one initializer of rank 0 for each factor.
        factors: A (inputs, rank) and B (rank, outputs) of the adapters, by initializer.
    """
    proto = read_proto(model)
    for tensor in proto.graph.initializer:
        if tensor.name in factors:
            dims = [size or RANK for size in tensor.dims]
            proto.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, dims))
    onnx.save(proto, model)


def write_adapter(path: Path, factors: Mapping[str, Array]) -> None:
    """Write the factors of adapters, by input, in onnxruntime's format."""
    ort = onnxruntime()
    adapter = ort.AdapterFormat()
    adapter.set_adapter_version(VERSION)
    adapter.set_model_version(VERSION)
    adapter.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(values) for name, values in factors.items()})
    adapter.export_adapter(str(path))

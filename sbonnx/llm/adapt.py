"""`adapt`: low-rank adapters trained on a quantized decoder (QLoRA), as branches or inputs of its file."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np

from sbonnx import graph as graphs
from sbonnx.errors import RecipeError
from sbonnx.llm.adapter_file import ADAPTER, list_inputs, write_adapter
from sbonnx.llm.decoding import decoder_feed
from sbonnx.llm.evaluate import DecoderEvaluation, evaluate_windows
from sbonnx.llm.folder import check_folder, copy_rest, model_place, staged_folder, write_provenance
from sbonnx.llm.layout import Decoder, read_decoder
from sbonnx.llm.texts import Texts
from sbonnx.llm.windows import TOKENS, read_windows
from sbonnx.progress import Progress
from sbonnx.report.notebook import NotebookView
from sbonnx.spec import Array
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
from sbonnx.version import __version__

if TYPE_CHECKING:
    from sbonnx.qat import Adapters, Settings
    from sbonnx.qat.adapters import Mode


Form = Literal["branches", "merged", "inputs"]

FORMS: Final[tuple[str, ...]] = get_args(Form)

MODES: Final[dict[str, Mode]] = {"branches": "outside", "merged": "inside", "inputs": "outside"}
"""Mode of `sbonnx.qat.Adapters` by form."""


@dataclass(frozen=True)
class AdaptedDecoder(NotebookView):
    """Result of `adapt`.

    Attributes:
        output: the folder that was written.
        adapter: the .onnx_adapter file in it; None for branches.
        weights: number of weights that have an adapter.
        losses: mean loss of each epoch.
        before, after: evaluations of the quantized decoder and of the written one, on the same held-out windows.
    """

    output: str
    weights: int
    losses: tuple[float, ...]
    before: DecoderEvaluation
    after: DecoderEvaluation
    adapter: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        return asdict(self)


def adapt(  # noqa: PLR0913 - public entry point
    source: str | os.PathLike[str],
    texts: Texts | Array,
    *,
    output: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    adapters: Adapters | int = 16,
    form: Form = "branches",
    settings: Settings | None = None,
    window: int | None = None,
    tokens: int = TOKENS,
    tokenizer: str | os.PathLike[str] | None = None,
    device: str = "cpu",
    force: bool = False,
    latency: bool = True,
    progress: Progress | None = None,
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
        window, tokens: see `read_windows`.
        tokenizer: see `read_decoder`.
        device: torch device of the training.
        force: replace a folder that an earlier run wrote.
        latency: measure speed and memory.
        progress: receiver of progress updates.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial folder is left.
    """
    from sbonnx.qat.decoder_adapters import DEFAULTS, adapted, train_adapters, write_adapters
    from sbonnx.qat.lora import low_ranks

    decoder = read_decoder(source, tokenizer=tokenizer)
    reference = None if against is None else read_decoder(against, tokenizer=tokenizer)
    if form not in FORMS:
        raise RecipeError(f"the form of adapters must be {', '.join(FORMS[:-1])} or {FORMS[-1]}, got {form!r}")
    inputs, mode = form == "inputs", MODES[form]
    if not isinstance(adapters, int) and adapters.mode != mode:
        raise RecipeError(f"adapters of the form '{form}' need Adapters(mode='{mode}'), got '{adapters.mode}'")
    if inputs and not isinstance(adapters, int) and adapters.norms:
        raise RecipeError("adapters as inputs share one base, whose norms stay as they are: use Adapters(norms=False)")
    target = Path(output)
    with protecting(input_paths([texts, tokenizer, against])):
        check_folder(target, decoder, force=force)
    windows = read_windows(decoder, texts, window=window, tokens=tokens)
    graph = graphs.load(decoder.model)
    fixed = {} if decoder.branch is None else {decoder.branch: np.array([False])}  # whole windows, without a past
    module = adapted(graph, adapters, device=device, fixed=fixed, mode=mode, norms=not inputs)
    trained = train_adapters(
        module,
        [decoder_feed(decoder, ids[None]) for ids in windows.calibration],
        tokens=decoder.tokens,
        logits=decoder.logits,
        teacher=None if reference is None else graphs.load(reference.model),
        fixed=fixed,
        settings=settings or DEFAULTS,
        progress=progress,
    )
    factors = write_adapters(graph, module, inputs=inputs)
    with staged_folder(target, decoder, force=force) as stage:
        place = model_place(decoder, stage)
        graphs.save(graph, place)
        adapter = None
        if inputs:
            list_inputs(place, factors)
            adapter = place.with_name(ADAPTER)
            write_adapter(adapter, factors)
        notes = copy_rest(decoder, stage)
        written = read_decoder(stage if decoder.folder is not None else place, adapter=adapter)
        before = evaluate_windows(decoder, windows.held_out, against=reference, latency=False)
        after = evaluate_windows(written, windows.held_out, against=reference, latency=latency)
        after = replace(after, notes=(*after.notes, *notes))
        file = None if adapter is None else str(target / adapter.relative_to(stage))
        result = AdaptedDecoder(str(target), len(low_ranks(module)), tuple(trained.losses), before, after, file)
        write_provenance(stage, _adapter_provenance(result, decoder, windows.digest()))
    return result


def _adapter_provenance(result: AdaptedDecoder, decoder: Decoder, digest: str) -> dict[str, Any]:
    figures = {
        name: {key: getattr(each, key) for key in ("perplexity", "float_perplexity", "kl", "agreement", "windows")}
        for name, each in (("before", result.before), ("after", result.after))
    }
    return {
        "program": f"sbonnx {__version__}",
        "model": decoder.model.name,
        "adapters": result.weights,
        "losses": list(result.losses),
        "texts": {"sha256": digest},
        "evaluation": figures,
    }

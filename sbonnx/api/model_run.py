"""``run``: a model on data or on random inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sbonnx import graph as graphs
from sbonnx import verify
from sbonnx.api.arguments import File, Shapes, feeds_of, known_keywords, model_files, random_inputs, reading
from sbonnx.calib.data import Preprocessing
from sbonnx.calib.data.labels import LABELS_NOT_USED
from sbonnx.calib.data.saved_outputs import check_outputs_path, saving_outputs
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.metrics.output_statistics import KeptOutputs, RunOutput, StatisticsOfOutputs
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.report.codes import Note
from sbonnx.verify import Feeds
from sbonnx.verify.runtimes import CPU, exact_products
from sbonnx.verify.sessions import output_names
from sbonnx.verify.sessions import run as run_session


@known_keywords
@shown_by_default
def run(
    model: ModelSource,
    data: Any = None,
    *,
    output: File | None = None,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    samples: int | None = None,
    device: str = CPU,
    shape: Shapes | None = None,
    batch: int = 1,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
    ort_libraries: Sequence[File] = (),
) -> RunOutput:
    """Run a model, and save its outputs if asked to.

    Args:
        model: path of an ONNX file, float or quantized, or a model in memory.
        data: feeds, as calibration data of `sbonnx.quantize`; None: one feed is drawn at random.
        output, force: path of the outputs, and whether to overwrite files: ``FILE.npz`` (several feeds: joined along
            the leading axis), or a folder of one .npz per feed; None: none are written.
        preprocess, split: see `sbonnx.quantize`.
        samples: number of feeds at most; None: all.
        device: "cpu", "cuda" or "auto".
        shape: random inputs: shapes of inputs with dynamic axes, by name.
        batch, seed: random inputs: size of dynamic leading axes, seed of the values.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Returns:
        Type, shape and range of each output. ``result["NAME"]`` is the array of an output, and ``result.values`` has
        the arrays of each feed, up to 256 MiB together; larger outputs are saved with `output` alone.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    progress = progress or Silent()
    target = None if output is None else Path(output)
    with reading(model, data, ort_libraries=ort_libraries), ExitStack() as stack:
        (file,), (name,) = stack.enter_context(model_files(model))
        if target is not None:
            check_outputs_path(target, [file], force=force)
        graph = graphs.load(file, opset=1)
        if data is None:
            drawn: Feeds = random_inputs(graph, batch=batch, shape=shape, seed=seed)
            feeds: Iterable[Feeds] = [drawn]
            count: int | None = 1
            notes: tuple[Note, ...] = ()
        else:
            feeds = dataset = feeds_of(data, graph, preprocess=preprocess, split=split, samples=samples)
            count = dataset.count
        session = verify.session(file, device=device, exact=exact_products(file))
        names, outputs, kept = output_names(session), StatisticsOfOutputs(), KeptOutputs()
        save = None if target is None else stack.enter_context(saving_outputs(target))
        progress.start("inference", count)
        for index, feed in enumerate(feeds):
            values = dict(zip(names, run_session(session, feed, index), strict=True))
            outputs.add(values)
            kept.add(values)
            if save is not None:
                save(values)
            progress.advance()
        if data is not None:
            notes = tuple(note for note in dataset.notes if note.code != LABELS_NOT_USED)
    written = None if target is None else str(target)
    return RunOutput(name, outputs.feeds, written, outputs.rows(), notes, kept.values)

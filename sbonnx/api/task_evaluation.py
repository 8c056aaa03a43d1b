"""``eval``: a metric of one or several models on labelled data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sbonnx import graph as graphs
from sbonnx.api.arguments import File, evaluation_data, known_keywords, listed, model_files, reading
from sbonnx.calib.data import Preprocessing
from sbonnx.errors import RecipeError
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.progress import Progress, Silent, shown_by_default
from sbonnx.verify import labelled
from sbonnx.verify.labelled import EvaluationData, MetricTable
from sbonnx.verify.runtimes import CPU, chosen_runtime


@known_keywords
@shown_by_default
def eval(
    models: ModelSource | Sequence[ModelSource] | Mapping[str, ModelSource],
    data: Any,
    metric: str | None = None,
    *,
    labels: str | None = None,
    head: str | None = None,
    decode: str | None = None,
    vocabulary: File | None = None,
    blank: int | None = None,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    samples: int | None = None,
    device: str = CPU,
    runtime: str | None = None,
    progress: Progress | None = None,
    ort_libraries: Sequence[File] = (),
) -> MetricTable:
    """Compute a metric on labelled data: models side by side, with 95 % intervals.

    Args:
        models: path of an ONNX file, float or quantized, or several, or several by name; or models in
            memory. The first is the reference.
        data: labelled data, as calibration data of `sbonnx.quantize` with labels; or an `EvaluationData`, which names
            the metric too.
        metric: such as "top1" or "map50" (docs/metrics.md).
        labels, head, decode, vocabulary, blank, split: see `sbonnx.EvaluationData`.
        preprocess: see `sbonnx.quantize`.
        samples: number of feeds at most; None: all.
        device: "cpu", "cuda" or "auto".
        runtime: "onnxruntime" or "openvino"; None: that of each file's backend if it is installed, else onnxruntime.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    progress = progress or Silent()
    titles = tuple(models) if isinstance(models, Mapping) else ()
    sources = listed(models.values() if isinstance(models, Mapping) else models)
    with reading(ort_libraries=ort_libraries), model_files(*sources) as (paths, names):
        files = dict(zip(titles or names, paths, strict=True))
        if isinstance(data, EvaluationData):
            evaluation = data
        elif metric is None:
            raise RecipeError("--metric (metric=) is missing: name what to compute, such as top1")
        else:
            evaluation = evaluation_data(
                data,
                metric,
                labels,
                decode,
                split=split,
                limit=samples,
                vocabulary=vocabulary,
                blank=blank,
                head=head,
                preprocess=preprocess,
            )
        loaded = [graphs.load(file) for file in files.values()]  # validates the files, for a clear error message
        runtimes = {name: chosen_runtime(runtime, [file], device=device) for name, file in files.items()}
        progress.start("evaluation", None)
        table = labelled.evaluate(files, evaluation, device=device, feeds_done=progress.advance, runtimes=runtimes)
        return MetricTable(**vars(table), runtimes=tuple(runtimes.values()), notes=evaluation.notes(loaded[0]))

"""Entry points `sbonnx.quantize`, `prune` and `simplify`: settings and checks; the stages are in `sbonnx.pipeline`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.api.arguments import check_evaluation, known_keywords
from sbonnx.calib.data import Preprocessing, with_preprocess
from sbonnx.calib.data.objects import repeatable
from sbonnx.errors import RecipeError
from sbonnx.progress import Progress, by_keyword, shown_by_default
from sbonnx.recipe import as_yaml
from sbonnx.recipe.sections.whole import PRUNING_FORMS
from sbonnx.report import Report
from sbonnx.report.pruned import PruningReport
from sbonnx.report.searched import LatencyTuning
from sbonnx.report.simplified import SimplifyReport
from sbonnx.search import Metric, searched
from sbonnx.search.advice import after_search, with_advice
from sbonnx.search.latency_tuning import tuned
from sbonnx.stages.state import PruneOptions, Request, Source, read_recipe
from sbonnx.stages.verify import with_causes
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
from sbonnx.verify import EvaluationData, check_labels, use_libraries

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from sbonnx.recipe.keywords import BackendForm, PruneKeywords, RecipeKeywords
    from sbonnx.recipe.loading import Source as RecipeSource


@shown_by_default
@by_keyword("model, data and output", "sbonnx.quantize('m.onnx', 'samples/', 'q.onnx', bits='w4a8')", most=3)
def quantize(
    model: Source,
    data: Any,
    output: str | os.PathLike[str] | None = None,
    *,
    backend: BackendForm | None = None,
    recipe: RecipeSource = None,
    force: bool = False,
    verify: bool = True,
    split: int | None = None,
    preprocess: Preprocessing | None = None,
    progress: Progress | None = None,
    trt_cache: str | os.PathLike[str] | None = None,
    write_overrides: str | os.PathLike[str] | None = None,
    save_recipe: str | os.PathLike[str] | None = None,
    metric: Metric | None = None,
    evaluation: EvaluationData | None = None,
    advise: bool = False,
    details: bool = False,
    ort_libraries: Sequence[str | os.PathLike[str]] = (),
    **overrides: Unpack[RecipeKeywords],
) -> Report:
    """Quantize a float ONNX model and verify the result.

    With ``recipe="auto"``, recipe changes that may reduce the error are tried; with ``average_bits=5`` or
    ``minimize="bits"``, each layer gets its own bit width. Both are evaluated on a hold-out set. With
    ``tune="latency"``, placements of integers are measured.

    Args:
        model: path, ModelProto or serialized model. It is never modified.
        data: calibration data: path or any reader that `sbonnx.calib.data.dataset.read` accepts. None if the mode
            measures nothing (dynamic, weight_only); the result is then not compared with the float model.
        output, force: path of the result, and whether to overwrite a file; None keeps the result in memory
            (``Report.quantized``).
        backend: "onnxruntime" (default), "openvino", "qnn", "tensorrt", "virtual" or "web".
        recipe: None (the backend's 8-bit defaults), "auto" (the defaults and changes that reduce the error), a path,
            or a nested dict.
        verify: check the file and compare it with the float model.
        split: cut arrays with a long leading axis into batches of this many samples.
        preprocess: how images, audio and texts become inputs, if `data` is a path of them: a preset such as
            "imagenet", the path of a YAML or JSON file, or its keys and values (docs/data.md).
        progress: receiver of progress updates; None: a bar in notebooks and on terminals. `sbonnx.Silent()` shows none.
        trt_cache: path for TensorRT's calibration cache.
        write_overrides: path for the types and scales of all tensors, as JSON in the form of onnxruntime's
            TensorQuantOverrides (docs/qnn.md).
        save_recipe: path for the recipe that was run, as YAML. Passing it as `recipe` reproduces the same file.
        metric: maps the (quantized, float) outputs of one feed, by name, to a loss. ``max_loss`` then limits its mean
            over the hold-out set, instead of changed classes or the error of the outputs.
        evaluation: labelled data and a metric (``sbonnx.EvaluationData("val/", "top1")``), which is computed for the
            float and the quantized model, see ``report.metrics.evaluation``. ``max_loss`` then limits the loss in
            that metric: of what a search tries, and of the result.
        advise: if accuracy is lost, try the cheapest changes that may repair it, for about as long as the run took (at
            least 20 s); if it is uncertain, at most two changes for the worst layers. The result is in
            ``report.advice``. After a search, nothing more is tried: it says what the search tried, and what is next.
        details: measure what the page (``report.to_html()``) shows beyond the figures: losses of each layer by weights
            and by inputs, histograms of the worst tensors, and the graph. Costs up to 10 ms of CPU time a layer.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.
        overrides: recipe keys by keyword, such as ``bits="w4a8"``, ``max_loss="0.5%"`` or ``device="cuda"``.

    Returns:
        The report. ``report.ok`` is False if the result is unusable or misses a requested limit; ``report.problems``
        says why. ``report.search`` lists what was tried.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    if ort_libraries:
        use_libraries(ort_libraries)
    check_evaluation(evaluation, metric)
    resolved, rules = read_recipe(recipe, backend, overrides)
    data = with_preprocess(data, preprocess)
    if metric is not None and resolved.mixed.max_loss is None:
        raise RecipeError("a metric says what max_loss is of: give max_loss as well")
    if evaluation is not None and not verify:
        raise RecipeError("an evaluation is part of the verification: drop --no-verify (verify=False)")
    with protecting(_inputs((model, data, resolved.tensor_overrides), recipe, evaluation)):
        _check_targets(output, (save_recipe, trt_cache, write_overrides), force=force)
    request = Request(
        model,
        resolved,
        rules,
        data=repeatable(data, resolved.samples if resolved.calibration.pick == "first" else None),
        split=split,
        output=output,
        trt_cache=trt_cache,
        write_overrides=write_overrides,
        force=force,
        verify=verify,
        evaluation=evaluation,
        max_loss=resolved.mixed.max_loss,
        details=details,
    )
    if request.evaluation is not None:
        check_labels(request.source, request.evaluation, device=resolved.device)
    request, search = searched(request, metric=metric, progress=progress)
    tuning: LatencyTuning | None = None
    if resolved.tune.wanted:
        request, tuning = tuned(request, seconds=resolved.tune.seconds, progress=progress)
    begin = time.perf_counter()
    state = pipeline.quantize(request, progress)
    advise = advise and state.report.verdict.accuracy != "doubtful"  # layers do not repair wrong data
    if advise:
        state = with_causes(state)
    if advise and search is None and not resolved.sparse.wanted:
        state = with_advice(state, time.perf_counter() - begin)  # which does not repair a pruned network
    report = replace(state.report, tuning=tuning)
    if advise and search is not None and not resolved.sparse.wanted:
        report = replace(report, advice=after_search(state, search))
    if save_recipe is not None:
        graphs.write_text(Path(save_recipe), as_yaml(request.recipe))
    return report if search is None else search.added_to(report)


@known_keywords
def simplify(
    model: Source,
    data: Any = None,
    *,
    output: str | os.PathLike[str] | None = None,
    fuse: bool = True,
    force: bool = False,
    split: int | None = None,
    preprocess: Preprocessing | None = None,
    samples: int | None = None,
    ort_libraries: Sequence[str | os.PathLike[str]] = (),
) -> SimplifyReport:
    """Simplify and fuse an ONNX model, and verify that its outputs are equal.

    Args:
        model: path, ModelProto or serialized model. It is never modified.
        data: feeds to compare on, as calibration data of `quantize`; None: synthetic feeds.
        output, force: path of the result, and whether to overwrite a file; None keeps the result in memory
            (``SimplifyReport.simplified``).
        fuse: fold batch norms and join operators as well, not only remove what computes nothing.
        split, preprocess: see `quantize`.
        samples: number of samples to compare on at most.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Returns:
        The report. ``report.ok`` is False if outputs differ (less than 80 dB signal to error, 40 in half precision), or
        if the model does not run on synthetic feeds.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    if ort_libraries:
        use_libraries(ort_libraries)
    recipe, rules = read_recipe(None, None, {} if samples is None else {"samples": samples})
    data = with_preprocess(data, preprocess)
    with protecting(_inputs((model, data), None, None)):
        _check_targets(output, (), force=force)
    fusions = None if fuse else ()
    request = Request(model, recipe, rules, data=data, split=split, fusions=fusions, output=output, force=force)
    return pipeline.simplify_only(request)


@shown_by_default
@by_keyword("model, data and output", "sbonnx.prune('m.onnx', 'samples/', 'p.onnx', macs=0.5)", most=3)
def prune(
    model: Source,
    data: Any = None,
    output: str | os.PathLike[str] | None = None,
    *,
    recipe: RecipeSource = None,
    masked: bool = False,
    force: bool = False,
    split: int | None = None,
    preprocess: Preprocessing | None = None,
    metric: Metric | None = None,
    evaluation: EvaluationData | None = None,
    quantized: bool = False,
    progress: Progress | None = None,
    **settings: Unpack[PruneKeywords],
) -> PruningReport:
    """Remove channels from a float ONNX model, refit the remaining weights, and verify the result.

    Args:
        model: path, ModelProto or serialized model. It is never modified.
        data: calibration data: path or any reader that `sbonnx.calib.data.dataset.read` accepts, or a `HeldOutSplit`.
            None: only with `ratio`, by norms of the weights and without refit.
        output, force: path of the result, and whether to overwrite a file; None keeps it in memory
            (`PruningReport.pruned`).
        recipe: path, nested dict or `Recipe`, of which the section SPARSE is read, and DEVICE, SAMPLES, CALIBRATION
            and VERIFY.MIN_SQNR_DB. None: no file.
        masked: write the masked model: shapes unchanged, weights that read removed channels zero.
        split, preprocess: see `quantize`.
        metric: maps the (pruned, float) outputs of one feed, by name, to a loss, which ``max_loss`` then limits.
        evaluation: labelled data and a metric, which is computed for the original and the pruned model, see
            ``report.metrics.evaluation``; ``max_loss`` then limits the loss in it.
        quantized: the pruned model will be quantized, so that MULTIPLE: auto is for kernels in integers.
        progress: receiver of progress updates; None: a bar in notebooks and on terminals. `sbonnx.Silent()` shows none.
        settings: recipe keys by keyword. A goal is needed, here or in the recipe: `macs`, `size` or `latency` (share of
            the multiplications, of the bytes of all constants, or of the estimated time that may remain), `max_loss`
            (loss on hold-out samples up to which multiplications are removed), `ratio` (share of the channels to
            remove from each dimension), `sparsity` (share of the weights of each layer that become zero) or `pattern`
            (of zeros, "2:4"). Others are `strategy`, `multiple`, `rounds`, `least`, `loss`, `refit`,
            `specific`, `finetune` (epochs), `lr` and `augment` (SPARSE in docs/recipe.md), `backend`, `min_sqnr`,
            `samples`, `device`, `memory` and `threads`.

    Returns:
        The report. ``report.ok`` is False if the result misses the budget or another limit (the nearest network is
        written then), is slower than the original with a `latency` budget, or fails verification.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix. No partial file is left.
    """
    overrides = {PRUNING_FORMS.get(name, name): value for name, value in settings.items()}
    check_evaluation(evaluation, metric)
    resolved, rules = read_recipe(recipe, None, overrides)
    if evaluation is not None and data is None:
        raise RecipeError("an evaluation is part of the verification: give calibration data")
    data = with_preprocess(data, preprocess)
    with protecting(_inputs((model, data), recipe, evaluation)):
        _check_targets(output, (), force=force)
    request = Request(
        model,
        resolved,
        rules,
        data=data,
        split=split,
        output=output,
        force=force,
        evaluation=evaluation,
        pruning=PruneOptions(masked, metric, quantized),
    )
    if request.evaluation is not None:
        check_labels(request.source, request.evaluation, device=resolved.device)
    return pipeline.prune_only(request, progress)


def _inputs(given: Iterable[Any], recipe: Any, evaluation: EvaluationData | None) -> list[str]:
    """Return the files that are read, which no output may replace."""
    return [*input_paths(list(given), [recipe]), *([] if evaluation is None else evaluation.inputs())]


def _check_targets(output: Any, others: Iterable[Any], *, force: bool) -> None:
    """Run `check_target` on the model and on other targets, with the earlier targets counted as inputs."""
    taken: list[Path] = []
    for target in (output, *others):
        if target is not None:
            graphs.check_target(Path(target), inputs=taken, force=force, model=target is output)
            taken.append(Path(target))

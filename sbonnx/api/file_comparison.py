"""``compare``: a quantized model against its float model on the same data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from sbonnx import graph as graphs
from sbonnx import recipe as recipes
from sbonnx import verify
from sbonnx.api.arguments import File, check_evaluation, cpu_of_file, feeds_of, known_keywords, model_files, reading
from sbonnx.calib.data import DataPath, Preprocessing
from sbonnx.calib.input_check import doubts_about, first_layer_of
from sbonnx.errors import ModelError, RecipeError, SbonnxError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource
from sbonnx.profiling import subject_of
from sbonnx.qdq import is_quantized
from sbonnx.report import Problem, verdict_of
from sbonnx.report.comparison import CommandAdvice, FileComparison
from sbonnx.runtimes import chosen_runtimes
from sbonnx.runtimes.portability import portability
from sbonnx.system.cpu import target_cpu
from sbonnx.verify import EvaluationData, Tasks
from sbonnx.verify.runtimes import CPU, chosen_runtime, exact_products, recorded_cpu

LIMITS: Final = {
    "min_sqnr_db": "--min-sqnr",
    "min_cosine": "--min-cosine",
    "max_size_ratio": "--max-size",
    "max_latency_ratio": "--max-latency",
    "min_integer": "--min-integer",
}
"""Names of the limits in messages, by field of `sbonnx.verify.Limits`."""


@known_keywords
def compare(
    float_model: ModelSource,
    quant_model: ModelSource,
    data: Any,
    *,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    samples: int | None = None,
    device: str = CPU,
    runtime: str | None = None,
    runtimes: str | Sequence[str] | None = None,
    cpu: str | None = None,
    task: str | Mapping[str, str] | None = None,
    head: str | None = None,
    evaluation: EvaluationData | None = None,
    max_loss: float | str | None = None,
    min_sqnr: float | None = None,
    min_cosine: float | None = None,
    max_size: float | None = None,
    max_latency: float | None = None,
    min_integer: float | None = None,
    ort_libraries: Sequence[File] = (),
) -> FileComparison:
    """Compare a quantized model with its float model: error of each output, size, latency, integer kernels.

    Args:
        float_model, quant_model: paths of ONNX files, or models in memory; the second may be of any tool.
        data: feeds to compare on, as calibration data of `sbonnx.quantize`.
        preprocess, split: see `sbonnx.quantize`.
        samples: number of feeds at most; None: all.
        device: "cpu", "cuda" or "auto".
        runtime: "onnxruntime" or "openvino"; None: that of the file's backend if it is installed, else onnxruntime.
        runtimes: names of `sbonnx.runtimes.RUNTIMES` in which the quantized file runs as well, or "all".
        cpu: kind of CPU that the file is for, such as "vnni" or "this"; None: as its metadata says.
        task: kind of the outputs, such as "classification", or of each by name; None: recognized.
        head: head of a detector, for the task detection and metrics of boxes, such as "yolov8"; None: recognized.
        evaluation: labelled data and a metric, which is computed for both models.
        max_loss: limit of the loss in that metric, such as "0.5%".
        min_sqnr, min_cosine: limits of each output: signal-to-noise ratio in dB, cosine similarity.
        max_size, max_latency: limits of size and latency relative to float.
        min_integer: least share of the planned operators that run in integers.
        ort_libraries: libraries of custom operators that onnxruntime loads, for all later sessions of the process.

    Returns:
        The comparison. ``ok`` is False if the quantized model is unusable or misses a limit; ``problems`` says why.

    Raises:
        SbonnxError: a subclass, for every error that the user can fix.
    """
    thresholds = (min_sqnr, min_cosine, max_size, max_latency, min_integer)
    limits = verify.Limits(*thresholds, names={key.upper(): name for key, name in LIMITS.items()})
    others = () if runtimes is None else chosen_runtimes(runtimes)
    check_evaluation(evaluation)
    share, tasks = _max_loss(max_loss, evaluation), _tasks(task)
    with reading(ort_libraries=ort_libraries), model_files(float_model, quant_model) as (paths, names):
        files = paths[0], paths[1]
        graph = _float_graph(*files)
        verify.check_tasks(tasks, graph, head)
        feeds = feeds_of(data, graph, preprocess=preprocess, split=split, samples=samples)
        doubts = doubts_about(first_layer_of(graph), feeds)
        runtime = chosen_runtime(runtime, files[1:], device=device)
        kind = cpu_of_file(cpu, runtime)
        depth = verify.Depth(latency=kind in ("", target_cpu().name), levels=True, kernels=True)
        exact = exact_products(files[1], kind)
        options = verify.VerifyOptions(exact=exact, device=device, runtime=runtime, task=tasks, head=head)
        comparison = verify.compare(*files, feeds, depth=depth, options=options)
        kind = kind or (recorded_cpu(files[1]) if comparison.saturating or comparison.unknown_sums else "")
        comparison = replace(comparison, doubts=doubts, cpu=kind)
        missed: tuple[Problem, ...] = ()
        notes = list(feeds.notes)
        if evaluation is not None:
            evaluation = evaluation.with_head(head)
            notes += evaluation.notes(graph)
            models = dict(zip(("float", "quantized"), files, strict=True))
            metric = verify.evaluate(models, evaluation, device=device, runtimes={"quantized": runtime}, cpu=kind)
            metric = replace(metric, max_loss=share)
            comparison, missed = replace(comparison, evaluation=metric), metric.problems("--max-loss")
        answers = portability(*files, feeds, others, evaluation) if others else None
        differing = () if answers is None else answers.problems()
        problems = (*comparison.problems(), *comparison.unknown(), *missed, *limits.problems(comparison), *differing)
        verdict = verdict_of(comparison, problems=problems, backend=comparison.runtime)
        advice = None
        if limits.below(comparison) and _can_profile(*files):
            options_of_data: dict[str, Any] = {"preprocess": preprocess, "split": split, "samples": samples}
            options_of_data["device"] = None if device == CPU else device
            advice = _profile_advice((float_model, quant_model), data, options_of_data)
        return FileComparison(
            problems, verdict, names[0], names[1], comparison, advice, tuple(dict.fromkeys(notes)), answers
        )


def _float_graph(float_model: Path, quant_model: Path) -> Graph:
    """Load the float model, after a check that not it is the quantized one, and the second is not.

    Raises:
        ModelError: a file cannot be read, or the files are in the other order.
    """
    quantized = graphs.load(quant_model)  # validates the file, for a clear error message
    graph = graphs.load(float_model)
    if is_quantized(graph) and not is_quantized(quantized):
        raise ModelError(
            f"{float_model} is quantized and {quant_model} is not: give the float model first, sbonnx compare "
            f"{quant_model} {float_model}"
        )
    return graph


def _max_loss(value: float | str | None, evaluation: EvaluationData | None) -> float | None:
    """Parse a limit of the loss.

    Raises:
        RecipeError: it is no share, or there is no metric.
    """
    if value is None:
        return None
    if evaluation is None:
        raise RecipeError("--max-loss limits the loss in a metric: give --eval DATA and --metric")
    return recipes.load(None, overrides=[f"max_loss={value}"]).mixed.max_loss


def _tasks(task: str | Mapping[str, str] | None) -> Tasks:
    """Parse the task of the outputs.

    Raises:
        RecipeError: there is no such task.
    """
    return None if not task else recipes.load(None, overrides={"task": task}).verify.task


def _can_profile(float_model: Path, quant_model: Path) -> bool:
    """Whether `sbonnx.profile` finds pairs in the quantized file."""
    try:
        subject_of(float_model, quant_model)
    except SbonnxError:
        return False
    return True


def _profile_advice(models: tuple[ModelSource, ModelSource], data: Any, options: Mapping[str, Any]) -> CommandAdvice:
    """Return the command that shows the layers with the largest loss; of data or models that are no paths, without a
    command.
    """
    if isinstance(data, DataPath):
        data, options = data.path, {**options, "preprocess": data.preprocess}
    words = ["sbonnx", "profile", *map(str, models), "--data", str(data)]
    for name, value in options.items():
        words += [] if value is None else [f"--{name}", str(value)]
    paths = all(isinstance(value, (str, os.PathLike)) for value in (data, *models))
    paths = paths and not isinstance(options["preprocess"], Mapping)
    return CommandAdvice("show which layers lose most", shlex.join(words) if paths else "")

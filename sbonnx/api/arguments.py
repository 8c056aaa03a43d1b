"""Arguments that several verbs have: data, inputs of a run, and the CPU of a file."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from onnx import ModelProto

from sbonnx.calib.data import Preprocessing, with_preprocess
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset, input_defaults, input_specs
from sbonnx.calib.data.random_feeds import random_feed
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource, label_of, open_model, path_or_bytes
from sbonnx.graph.storage.temporary import temporary_folder
from sbonnx.system.cpu import CPUS, THIS, target_cpu
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
from sbonnx.verify import EvaluationData, Feeds, use_libraries
from sbonnx.verify.labelled.conversions import readers_of

File = str | os.PathLike[str]

OTHER_WORDS: Final = {
    "backend": ("target", "target"),
    **dict.fromkeys(("metric", "eval"), ("evaluation", "evaluation=sbonnx.EvaluationData(DATA, METRIC)")),
}
"""Words for a keyword that some functions have and others not: the keyword, and how it is written."""

P = ParamSpec("P")
R = TypeVar("R")

Shapes = Mapping[str, Sequence[int]]
"""Shapes of random inputs by name."""


def known_keywords(function: Callable[P, R]) -> Callable[P, R]:
    """Answer an unknown keyword of a function with the nearest that it has, or all."""
    parameters = inspect.signature(function).parameters

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        unknown = next((name for name in kwargs if name not in parameters), None)
        if unknown is None:
            return function(*args, **kwargs)
        keyword, example = OTHER_WORDS.get(unknown, ("", ""))
        near = [example] if keyword in parameters else difflib.get_close_matches(unknown, parameters, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(parameters)}"
        raise TypeError(f"sbonnx.{function.__name__} has no keyword {unknown}: {hint}")

    return called


@contextmanager
def model_files(*models: ModelSource) -> Iterator[tuple[tuple[Path, ...], tuple[str, ...]]]:
    """Yield the files of models, and their names in results. A model in memory is written to a temporary file.

    Raises:
        ModelError: one is neither a path nor a model, or a model in memory cannot be read.
    """
    names = []
    for number, model in enumerate(models, start=1):
        label_of(model)
        in_memory = "model in memory" if len(models) == 1 else f"model {number} in memory"
        names.append(str(Path(model)) if isinstance(model, (str, os.PathLike)) else in_memory)
    with ExitStack() as stack:
        files = [_file_of(model, name, stack) for model, name in zip(models, names, strict=True)]
        yield tuple(files), tuple(names)


def _file_of(model: ModelSource, name: str, stack: ExitStack) -> Path:
    if isinstance(model, (str, os.PathLike)):
        return Path(model)
    open_model(model)  # for messages about the model, not about the temporary file
    content = path_or_bytes(model)
    assert isinstance(content, bytes)
    file = stack.enter_context(temporary_folder()) / f"{name}.onnx"
    file.write_bytes(content)
    return file


@contextmanager
def reading(*inputs: object, ort_libraries: Sequence[File] = ()) -> Iterator[None]:
    """Load libraries of custom operators, and refuse outputs in place of these inputs."""
    if ort_libraries:
        use_libraries(ort_libraries)
    with protecting(input_paths(inputs)):
        yield


def feeds_of(
    data: Any,
    graph: Graph,
    *,
    preprocess: Preprocessing | None = None,
    split: int | None = None,
    samples: int | None = None,
) -> Dataset:
    """Open the data of a model, see `sbonnx.quantize`.

    Raises:
        DataError: it does not fit.
    """
    return datasets.read(with_preprocess(data, preprocess), graph, split=split, limit=samples)


def evaluation_data(
    data: Any,
    metric: str,
    labels: str | None = None,
    decode: str | None = None,
    *,
    split: int | None = None,
    limit: int | None = None,
    vocabulary: File | None = None,
    blank: int | None = None,
    head: str | None = None,
    preprocess: Preprocessing | None = None,
) -> EvaluationData:
    """Return labelled data and the metric on it, which is checked as far as no model is needed.

    Args:
        preprocess: of the data, see `sbonnx.quantize`; the others: see `EvaluationData`.

    Raises:
        DataError: the data takes no preprocessing.
        RecipeError: the metric, a function of it or the head does not exist, or they do not fit each other.
    """
    tokens = None if vocabulary is None else os.fspath(vocabulary)
    evaluation = EvaluationData(data, metric, labels, decode, split, limit, tokens, blank, head, preprocess)
    evaluation.converter(readers_of(b""))
    return evaluation


def check_evaluation(evaluation: Any, metric: Any = None) -> None:
    """Check the forms of labelled data and of a function of outputs.

    Raises:
        RecipeError: one is of another type, or both are given.
    """
    form = "evaluation=sbonnx.EvaluationData(DATA, METRIC), such as EvaluationData('val/', 'top1')"
    if evaluation is not None and not isinstance(evaluation, EvaluationData):
        raise RecipeError(f"evaluation is no EvaluationData but {type(evaluation).__name__}: write {form}")
    if metric is not None and not callable(metric):
        raise RecipeError(
            f"metric is no function of outputs but {metric!r}: for a metric on labelled data, write {form}"
        )
    if metric is not None and evaluation is not None:
        raise RecipeError("max_loss is of one metric: give metric, or evaluation")


def random_inputs(graph: Graph, *, batch: int = 1, shape: Shapes | None = None, seed: int = 0) -> Feeds:
    """Draw a feed.

    Args:
        batch: size of dynamic leading axes.
        shape: shapes of inputs with other dynamic axes.

    Raises:
        DataError: a size is not known, or an input has another shape.
    """
    if batch < 1:
        raise DataError(f"--batch {batch}: a batch has 1 or more samples")
    defaults = input_defaults(graph)
    specs = [spec for spec in input_specs(graph) if spec.name not in defaults]
    shapes = {name: tuple(sizes) for name, sizes in (shape or {}).items()}
    return random_feed(specs, batch=batch, shapes=shapes, seed=seed)


def cpu_of_file(name: str | None, runtime: str) -> str:
    """Return the kind of CPU that a file is for, by name; "" if none is given.

    Raises:
        RecipeError: there is no such kind, or the runtime is not onnxruntime.
    """
    name = name or ""
    if name not in ("", THIS, *CPUS):
        raise RecipeError(f"--cpu '{name}' is not known: choose one of {', '.join((THIS, *CPUS))}")
    if name and runtime != "onnxruntime":
        raise RecipeError(f"--cpu is about kernels of onnxruntime, and {runtime} is another runtime")
    return target_cpu(name).name if name else ""


def listed(models: ModelSource | Iterable[ModelSource]) -> list[ModelSource]:
    """Return one or several models as a list.

    Raises:
        ModelError: there is none.
    """
    if isinstance(models, (str, os.PathLike, ModelProto, bytes)) or not isinstance(models, Iterable):
        return [models]
    rows = list(models)
    if not rows:
        raise ModelError("there is no model: give the path of one, or a list of paths")
    return rows

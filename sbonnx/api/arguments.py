"""Arguments that several verbs have: data, inputs of a run, and the CPU of a file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sbonnx.calib.data import Preprocessing, with_preprocess
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset, input_defaults, input_specs
from sbonnx.calib.data.random_feeds import random_feed
from sbonnx.errors import DataError, ModelError, RecipeError
from sbonnx.graph import Graph
from sbonnx.system.cpu import CPUS, THIS, target_cpu
from sbonnx.system.input_files import protecting
from sbonnx.system.python_files import input_paths
from sbonnx.verify import EvaluationData, Feeds, use_libraries
from sbonnx.verify.labelled.conversions import readers_of

File = str | os.PathLike[str]

Shapes = Mapping[str, Sequence[int]]
"""Shapes of random inputs by name."""


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
    source, tokens = with_preprocess(data, preprocess), None if vocabulary is None else os.fspath(vocabulary)
    evaluation = EvaluationData(source, metric, labels, decode, split, limit, tokens, blank, head)
    evaluation.converter(readers_of(b""))
    return evaluation


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


def files_of(models: File | Sequence[File]) -> list[Path]:
    """Return the paths of one or several models.

    Raises:
        ModelError: there is none.
    """
    files = [Path(models)] if isinstance(models, (str, os.PathLike)) else list(map(Path, models))
    if not files:
        raise ModelError("there is no model: give the path of one, or a list of paths")
    return files

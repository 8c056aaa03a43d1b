"""Task metrics of models on labelled data, side by side, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from sbonnx.backends.runtime_types import Runtime
from sbonnx.calib.data import LabelledFeed, Preprocessing, with_preprocess
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.data.dataset import Dataset
from sbonnx.calib.data.labels import LABELS_NOT_USED
from sbonnx.calib.data.objects import repeatable
from sbonnx.calib.data.validate import InputSpec
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.graph.storage.model_file import ModelSource, path_or_bytes
from sbonnx.metrics import TaskMetric, TaskMetricKind, task_metric
from sbonnx.metrics.arrays import output_name
from sbonnx.metrics.classification import TopK
from sbonnx.report.codes import Note
from sbonnx.report.figures import Evaluation, MetricRow, MetricValue
from sbonnx.report.verdict import ON_CPU
from sbonnx.spec import Array
from sbonnx.system.python_files import input_paths, load_function, names_function
from sbonnx.verify import intervals
from sbonnx.verify.intervals import Interval
from sbonnx.verify.labelled.conversions import (
    Convert,
    ModelReaders,
    of_function,
    readers_of,
    to_boxes,
    to_embeddings,
    to_texts,
    unchanged,
)
from sbonnx.verify.natures import decoder_of, zeros_of
from sbonnx.verify.runtimes import open_in
from sbonnx.verify.sessions import input_specs, output_names, run


@dataclass(frozen=True)
class EvaluationData:
    """Labelled data, and the metric to compute on it.

    Attributes:
        data: path or any reader of `sbonnx.calib.data.dataset.read`, with labels.
        metric: see `sbonnx.metrics.task_metric`.
        labels: name of the array that holds the labels; None: recognized by its name.
        decode: ``script.py:function`` that converts the outputs of one feed, by name, to those that the metric takes
            (a mapping, or one array); None: `conversions`, by what the metric takes.
        head: head of a detector whose boxes the metric takes, ``NAME`` or ``NAME:KEY=VALUE,...`` of
            `sbonnx.detectors.HEADS`; None: recognized by the structure of the model.
        split, limit: cut feeds into batches of this many samples; use at most this many feeds.
        vocabulary: file of the tokens (tokens.txt, vocab.json, tokenizer.json), for metrics of texts; None: as the
            metadata of the model says.
        blank: number of the blank of CTC; None: as the vocabulary or the metadata of the model says.

    Args:
        preprocess: how images, audio and texts of a path become inputs, see `sbonnx.quantize`.

    Raises:
        DataError: the data takes no preprocessing.
    """

    data: Any
    metric: str
    labels: str | None = None
    decode: str | None = None
    split: int | None = None
    limit: int | None = None
    vocabulary: str | None = None
    blank: int | None = None
    head: str | None = None
    preprocess: InitVar[Preprocessing | None] = None

    def __post_init__(self, preprocess: Preprocessing | None) -> None:
        feeds = repeatable(self.data, self.limit)  # several models read it, one after another
        object.__setattr__(self, "data", with_preprocess(feeds, preprocess))

    def inputs(self) -> list[str]:
        """Return the files and folders that it names."""
        return input_paths([self.data, self.vocabulary], [self.metric, self.decode])

    def kind(self) -> TaskMetricKind:
        """Return the metric.

        Raises:
            RecipeError: there is no such metric, or its function cannot be loaded.
        """
        return task_metric(self.metric, self.labels)

    def with_head(self, head: str | None) -> EvaluationData:
        """Return it with the head that a recipe states, if its metric takes boxes and it states no conversion itself.

        Raises:
            RecipeError: see `kind`.
        """
        stated = head is None or self.head is not None or self.decode is not None
        return self if stated or self.kind().takes != "boxes" else replace(self, head=head)

    def converter(self, model: ModelReaders) -> Convert:
        """Return the conversion of outputs to those that the metric takes.

        Args:
            model: readers of the model.

        Raises:
            RecipeError: the function of `decode` cannot be loaded, there is no such head, or it is not applied.
        """
        takes = self.kind().takes
        if self.head is not None and (self.decode is not None or takes != "boxes"):
            other = "--decode converts the outputs" if self.decode else f"the metric {self.metric} takes no boxes"
            raise RecipeError(f"--head is for the boxes of a detector, and {other}: leave one of them out")
        if self.decode is not None:
            return of_function(load_function(self.decode, "--decode"))
        kind = self.kind()
        if takes == "embeddings":
            return to_embeddings(kind)
        if takes == "boxes":
            return to_boxes(self.head, model.graph)
        return unchanged if takes == "outputs" else to_texts(kind, self.vocabulary, self.blank, model.metadata)

    def check_outputs(self, graph: Graph) -> None:
        """Check what is known without running the model: the metric, and its output in the model.

        Raises:
            RecipeError: there is no such metric, head or function.
            DataError: the metric is of one output, and the model has several, or none of that name.
        """
        kind = self.kind()
        self.converter(ModelReaders(lambda: graph.info.metadata, lambda: graph))
        of_one = kind.takes == "outputs" and not names_function(self.metric)
        if self.decode is None and (of_one or kind.output is not None):
            output_name([tensor.name for tensor in graph.outputs], kind.output, self.metric.partition(":")[0])

    def check_first(self, graph: Graph) -> None:
        """Read the first labelled sample, and check that the head of a detector is known, as far as shapes say it.

        Raises:
            DataError: the data or its labels do not fit; or the structure does not say how the outputs are boxes.
        """
        _, labelled = next(iter(replace(self, limit=1).open(graph).labelled()))
        if self.decode is not None or self.kind().takes != "boxes":
            return
        samples = max((len(value) for value in labelled.feed.values() if np.ndim(value)), default=1)
        outputs = {tensor.name: zeros_of(tensor, samples) for tensor in graph.outputs}
        of_known_size = {name: value for name, value in outputs.items() if value is not None}
        if len(of_known_size) == len(outputs):
            decoder_of(lambda: graph, self.head).check(of_known_size, labelled.feed, labelled.labels)

    def notes(self, graph: Graph) -> tuple[Note, ...]:
        """Return what was done to the data so that it fits a model, such as inputs that were filled.

        Raises:
            DataError: see `open`.
        """
        return tuple(note for note in self.open(graph).notes if note.code != LABELS_NOT_USED)

    def open(self, inputs: Graph | Sequence[InputSpec]) -> Dataset:
        """Open the data for a model with these inputs.

        Raises:
            DataError: the data does not fit.
        """
        return datasets.read(self.data, inputs, split=self.split, limit=self.limit)


@dataclass(frozen=True, repr=False)
class MetricTable(Evaluation):
    """Metric of models that are compared without a limit.

    Attributes:
        runtimes: the runtime that executed each model.
        notes: one sentence each about the data.
    """

    json_keys: ClassVar = (
        *("ok", "runtimes", "metric", "unit", "higher_is_better", "share", "samples", "interval", "rows", "chance"),
        "notes",
    )

    runtimes: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def ok(self) -> bool:
        """Always true."""
        return True


def evaluate(
    models: Mapping[str, ModelSource],
    evaluation: EvaluationData,
    *,
    device: str = "cpu",
    feeds_done: Callable[[], None] | None = None,
    runtimes: Mapping[str, str | Runtime] | None = None,
    cpu: str = "",
) -> Evaluation:
    """Compute the metric of models on the same labelled data. One model is open at a time.

    Args:
        models: files (or models in memory) by name.
        feeds_done: called after each feed of each model.
        runtimes: runtime of each model, or its name, see `sbonnx.verify.runtimes.chosen_runtime`; without: onnxruntime.
        cpu: kind of CPU that the models are for, see `sbonnx.verify.runtimes.exact_products`.

    Raises:
        DataError: the data, its labels or the outputs do not fit the metric; a model cannot run a feed.
        ModelError: a model does not load.
        RecipeError: there is no such metric, or a function cannot be loaded.
    """
    kind, metrics = evaluation.kind(), {}
    for name, model in models.items():
        metrics[name] = kind.make()
        try:
            source = path_or_bytes(model)
            runtime = (runtimes or {}).get(name, ON_CPU)
            convert = evaluation.converter(readers_of(source))
            for where, outputs, feed in _outputs(source, evaluation, device, runtime, cpu):
                add_feed(metrics[name], outputs, feed, where, convert)
                if feeds_done is not None:
                    feeds_done()
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    return summarized(kind, metrics)


def check_labels(model: Path | bytes, evaluation: EvaluationData, *, device: str = "cpu") -> None:
    """Run the first feed, so that data, labels, outputs and metric are known to fit before long work begins.

    Raises: see `evaluate`.
    """
    where, outputs, feed = next(_outputs(model, evaluation, device))
    add_feed(evaluation.kind().make(), outputs, feed, where, evaluation.converter(readers_of(model)))


class LabelledLoss:
    """Loss of variants of a model in a task metric, on labelled data, see `TaskMetricKind.loss`.

    Attributes:
        kind: the metric.
    """

    def __init__(self, model: Path | bytes, evaluation: EvaluationData, *, device: str = "cpu") -> None:
        """Compute the metric of the float model.

        Raises: see `evaluate`.
        """
        self.kind = evaluation.kind()
        self._evaluation = evaluation
        self._reference = evaluate({"the float model": model}, evaluation, device=device).rows[0].metric.value

    def of(self, run_feed: Callable[[dict[str, Array]], Mapping[str, Any]], inputs: Graph) -> float:
        """Compute the loss of a variant; inf if its metric has no value.

        Args:
            run_feed: runs one feed and returns the outputs by name.
            inputs: graph whose inputs the variant has.
        """
        metric = filled_metric(self._evaluation, run_feed, inputs)
        loss = self.kind.loss(self._reference, metric.value())
        return loss if loss == loss else math.inf


def filled_metric(
    evaluation: EvaluationData,
    run_feed: Callable[[dict[str, Array]], Mapping[str, Any]],
    graph: Graph,
    feeds_done: Callable[[], None] | None = None,
) -> TaskMetric:
    """Return the metric of a variant of a model, with all samples of the labelled data.

    Args:
        run_feed: runs one feed and returns the outputs by name.
        graph: graph whose inputs and outputs the variant has.
        feeds_done: called after each feed.

    Raises: see `evaluate`.
    """
    metric, convert = (
        evaluation.kind().make(),
        evaluation.converter(ModelReaders(lambda: graph.info.metadata, lambda: graph)),
    )
    names = [tensor.name for tensor in graph.outputs]
    for where, labelled in evaluation.open(graph).labelled():
        values = run_feed(labelled.feed)
        add_feed(metric, {name: values[name] for name in names}, labelled, where, convert)
        if feeds_done is not None:
            feeds_done()
    return metric


def add_feed(metric: TaskMetric, outputs: Mapping[str, Any], feed: LabelledFeed, where: str, convert: Convert) -> None:
    """Add the outputs of one feed to a metric.

    Raises:
        DataError: outputs or labels do not fit; the message names the feed.
    """
    try:
        metric.add(convert(outputs, feed), feed.labels)
    except DataError as error:
        raise DataError(f"{error} ({where})") from error


def _outputs(
    model: Path | bytes, evaluation: EvaluationData, device: str, runtime: str | Runtime = ON_CPU, cpu: str = ""
) -> Iterator[tuple[str, dict[str, Any], LabelledFeed]]:
    """Run a model and yield (where, outputs by name, feed with its labels)."""
    opened = open_in(runtime, model, device=device, cpu=cpu)
    names = output_names(opened)
    for number, (where, labelled) in enumerate(evaluation.open(input_specs(opened)).labelled()):
        yield where, dict(zip(names, run(opened, labelled.feed, number), strict=True)), labelled


def summarized(kind: TaskMetricKind, metrics: Mapping[str, TaskMetric]) -> Evaluation:
    """Return values, differences against the first model, and their intervals."""
    filled = list(metrics.values())
    values = [metric.value() for metric in filled]
    draws = intervals.resampled([metric.value for metric in filled], filled[0].count)
    wilson = all(isinstance(metric, TopK) for metric in filled)
    rows = []
    for number, (name, metric) in enumerate(metrics.items()):
        own = _own_interval(metric, draws[number])
        difference = None
        if number:
            low, high = _difference(filled[0], metric, draws[number] - draws[0])
            difference = MetricValue(values[number] - values[0], low, high)
        rows.append(
            MetricRow(name, MetricValue(values[number], *own), difference, kind.loss(values[0], values[number]))
        )
    interval = "wilson" if wilson else "bootstrap"
    chance = filled[0].chance if isinstance(filled[0], TopK) else None
    count, share = filled[0].count, kind.share
    return Evaluation(kind.name, kind.unit, kind.higher_is_better, share, count, interval, tuple(rows), chance=chance)


def _difference(first: TaskMetric, other: TaskMetric, draws: Array) -> Interval:
    """Return the interval of a difference: of shares in closed form, as equal decisions on few samples prove little."""
    if isinstance(first, TopK) and isinstance(other, TopK):
        gained = int(((other.hits > 0) & (first.hits == 0)).sum())
        lost = int(((other.hits == 0) & (first.hits > 0)).sum())
        return intervals.paired(gained, lost, first.count)
    return intervals.percentile(draws)


def _own_interval(metric: TaskMetric, draws: Array) -> Interval:
    if isinstance(metric, TopK):
        return intervals.wilson(int(metric.hits.sum()), metric.count)
    return intervals.percentile(draws)

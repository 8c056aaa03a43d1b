"""Task metrics by name: ``top1``, ``miou``, ..., or a function of the user."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, Protocol

import numpy as np

from sbonnx import plugins
from sbonnx.errors import DataError, RecipeError, foreign_code
from sbonnx.metrics.arrays import TaskMetric, counts_of, joined
from sbonnx.metrics.classification import F1, Auc, Correlation, TopK
from sbonnx.metrics.dense import MeanIoU, Perplexity, SquaredError
from sbonnx.metrics.detection import ALL_AREAS, COCO_AREAS, COCO_OVERLAPS, AreaRange, MeanAveragePrecision
from sbonnx.metrics.retrieval import Retrieval, Similarity, ndcg, recall, reciprocal_rank
from sbonnx.metrics.text_metrics import ErrorRate, ExactMatch, TokenAccuracy
from sbonnx.plugins.registry import Registry, instance_of
from sbonnx.spec import Array
from sbonnx.system.python_files import load_function, names_function

Takes = Literal["outputs", "boxes", "texts", "tokens", "embeddings"]
"""Form that a metric takes: outputs, boxes of a detector, texts, tokens (texts if the labels are), embeddings."""


class MetricMaker(Protocol):
    """Function that creates a metric without samples."""

    def __call__(self, output: str | None, labels: str | None) -> TaskMetric:
        """Create a metric of an output and of labels, both by name; None: the only output, the usual labels.

        Raises:
            RecipeError: the metric takes no output by name, and there is one.
        """


@dataclass(frozen=True)
class TaskMetricKind:
    """A task metric, by its properties.

    Attributes:
        name: as the user gives it.
        make: creates an empty one.
        higher_is_better: direction.
        share: it is between 0 and 1 (correlations: -1 and 1), so that a difference in it means something by itself;
            of other metrics the relative change does.
        unit: "dB" or "".
        takes: what the metric takes; outputs are converted to it, see `sbonnx.verify.labelled.conversions`.
        output: name of the output; None: the only one.
    """

    name: str
    make: Callable[[], TaskMetric]
    higher_is_better: bool = True
    share: bool = True
    unit: str = ""
    takes: Takes = "outputs"
    output: str | None = None

    def loss(self, reference: float, value: float) -> float:
        """Compute how much worse `value` is than `reference`: the difference of shares, else relative to `reference`.

        It is nan if one of them is, or the reference is 0.
        """
        worse = reference - value if self.higher_is_better else value - reference
        if self.share:
            return worse
        return worse / abs(reference) if reference else float("nan") if worse else 0.0

    def text(self, value: float) -> str:
        """Format a value: ``0.9125``, ``31.24 dB``."""
        return f"{value:.4f}" if self.share else f"{value:.5g}{' ' if self.unit else ''}{self.unit}"


@dataclass(frozen=True)
class MetricDefinition:
    """A metric of the table or of a plug-in: how it is made, and its properties, which are those of `TaskMetricKind`.

    Attributes:
        make: creates an empty one.
        higher_is_better, share, unit, takes: as in `TaskMetricKind`.
        ranks: it is of the first K of a ranking, given as ``NAME@K``, the argument `cutoff` of `make`.
    """

    make: MetricMaker
    higher_is_better: bool = True
    share: bool = True
    unit: str = ""
    takes: Takes = "outputs"
    ranks: bool = False


MAPS: Final[Mapping[str, tuple[tuple[float, ...], AreaRange]]] = {
    "map50": (COCO_OVERLAPS[:1], ALL_AREAS),
    "map75": (COCO_OVERLAPS[5:6], ALL_AREAS),
    "map": (COCO_OVERLAPS, ALL_AREAS),
    "map50-95": (COCO_OVERLAPS, ALL_AREAS),
    **{f"map-{name}": (COCO_OVERLAPS, areas) for name, areas in COCO_AREAS.items()},
}
"""Overlaps and areas of the mean average precisions."""


def _map(overlaps: tuple[float, ...], areas: AreaRange, *, output: str | None, labels: str | None) -> TaskMetric:
    if output is not None:
        raise RecipeError("map is of all outputs: choose some with --decode script.py:function")
    return MeanAveragePrecision(overlaps, labels, areas)


_BUILT_IN: Final[Mapping[str, MetricDefinition]] = {
    "top1": MetricDefinition(partial(TopK, 1)),
    "top5": MetricDefinition(partial(TopK, 5)),
    "f1": MetricDefinition(F1),
    "auc": MetricDefinition(Auc),
    "miou": MetricDefinition(MeanIoU),
    **{name: MetricDefinition(partial(_map, *settings), takes="boxes") for name, settings in MAPS.items()},
    "pearson": MetricDefinition(partial(Correlation, False)),
    "spearman": MetricDefinition(partial(Correlation, True)),
    "wer": MetricDefinition(ErrorRate, higher_is_better=False, takes="texts"),
    "cer": MetricDefinition(partial(ErrorRate, characters=True), higher_is_better=False, takes="texts"),
    "exact": MetricDefinition(ExactMatch, takes="tokens"),
    "token_accuracy": MetricDefinition(TokenAccuracy),
    "ndcg": MetricDefinition(partial(Retrieval, ndcg, "ndcg"), takes="embeddings", ranks=True),
    "recall": MetricDefinition(partial(Retrieval, recall, "recall"), takes="embeddings", ranks=True),
    "mrr": MetricDefinition(partial(Retrieval, reciprocal_rank, "mrr"), takes="embeddings", ranks=True),
    "sts": MetricDefinition(Similarity, takes="embeddings"),
    "perplexity": MetricDefinition(Perplexity, higher_is_better=False, share=False),
    "mse": MetricDefinition(partial(SquaredError, False), higher_is_better=False, share=False),
    "psnr": MetricDefinition(partial(SquaredError, True), share=False, unit="dB"),
}

TASK_METRICS: Final = Registry(
    plugins.METRICS, instance_of(MetricDefinition, "sbonnx.metrics.MetricDefinition"), _BUILT_IN
)
"""Metrics by name, with those of installed packages; a name can be followed by a colon and the name of an output."""


@dataclass
class ScriptedMetric:
    """Metric of a user's function ``(outputs, labels) -> values``, both by name, called for each feed.

    It returns one value for each sample, shape (samples,), and the metric is their mean; or a numerator and a
    denominator for each sample, shape (samples, 2), and the metric is the ratio of the sums (word error rate).

    Attributes:
        named: ``script.py:function``, for messages.
        function: the function.
    """

    named: str
    function: Callable[..., Any]
    _values: list[Array] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of samples."""
        return len(joined(self._values))

    def add(self, outputs: Mapping[str, Array], labels: Mapping[str, Any]) -> None:
        with foreign_code(lambda reason: DataError(f"'{self.named}' failed: {reason}")):
            values = np.asarray(self.function(dict(outputs), dict(labels)), np.float64)
        values = values.reshape(1) if values.ndim == 0 else values
        pairs = np.stack([values, np.ones_like(values)], 1) if values.ndim == 1 else values
        if pairs.ndim != 2 or pairs.shape[1] != 2:
            size = ", ".join(map(str, values.shape))
            raise DataError(f"'{self.named}' must return an array (samples,) or (samples, 2), and it is ({size})")
        self._values.append(pairs)

    def value(self, weights: Array | None = None) -> float:
        above, below = counts_of(weights, self.count) @ joined(self._values)
        return float(above / below) if below else float("nan")


OTHER_NAMES: Final = {
    **dict.fromkeys(("accuracy", "acc", "top-1", "top_1", "acc1", "accuracy_score"), "top1"),
    **dict.fromkeys(("top-5", "top_5", "acc5"), "top5"),
    **dict.fromkeys(("map0.5", "map_50", "ap50", "map.50"), "map50"),
    **dict.fromkeys(("map50_95", "map5095", "coco", "map0.5:0.95"), "map50-95"),
    **dict.fromkeys(("f1_score", "f1-score"), "f1"),
    **dict.fromkeys(("roc_auc", "auroc"), "auc"),
    **dict.fromkeys(("iou", "mean_iou", "jaccard"), "miou"),
    "ppl": "perplexity",
}
"""Metrics by names that other tools have for them."""


def task_metric(named: str, labels: str | None = None) -> TaskMetricKind:
    """Return a metric by name: one of `TASK_METRICS`, ``top1:OUTPUT``, ``ndcg@10``, or ``script.py:function``.

    A function with an attribute ``lower_is_better = True`` is minimized.

    Args:
        labels: name of the array that holds the labels; None: by its name (`arrays.LABEL_NAMES`).

    Raises:
        RecipeError: there is no such metric, or the function cannot be loaded.
    """
    if names_function(named):
        function = load_function(named, "--metric")
        better = not getattr(function, "lower_is_better", False)
        return TaskMetricKind(named, partial(ScriptedMetric, named, function), better, share=False)
    name, colon, output = named.partition(":")
    stem, at, cutoff = name.lower().partition("@")
    row = TASK_METRICS.get(stem)
    if at and row is not None and not (row.ranks and cutoff.isdecimal() and int(cutoff) > 0):
        ranked = ", ".join(f"{name}@10" for name, kind in TASK_METRICS.items() if kind.ranks)
        raise RecipeError(f"there is no metric '{named}': @ and a number from 1 on belong to rankings, as in {ranked}")
    if row is None or (colon and not output):
        close = [OTHER_NAMES[stem]] if stem in OTHER_NAMES else difflib.get_close_matches(stem, list(TASK_METRICS), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise RecipeError(f"there is no metric '{named}': {hint}use {', '.join(TASK_METRICS)} or script.py:function")
    make = partial(row.make, output=output or None, labels=labels, **({"cutoff": int(cutoff)} if at else {}))
    make()  # raises the error of a metric that takes no output by name
    return TaskMetricKind(named, make, row.higher_is_better, row.share, row.unit, row.takes, output or None)

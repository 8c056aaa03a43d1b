"""Task metrics on labelled data: data, conversion of outputs, evaluation of models side by side."""

from __future__ import annotations

from sbonnx.verify.labelled.evaluation import (
    EvaluationData,
    LabelledLoss,
    MetricTable,
    check_labels,
    evaluate,
    filled_metric,
    summarized,
)

__all__ = [
    "EvaluationData",
    "LabelledLoss",
    "MetricTable",
    "check_labels",
    "evaluate",
    "filled_metric",
    "summarized",
]

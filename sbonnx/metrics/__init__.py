"""Metrics: errors of quantized outputs against float outputs, and task metrics of outputs against labels."""

from __future__ import annotations

from sbonnx.metrics.arrays import TaskMetric
from sbonnx.metrics.error_sums import CosineSum, ErrorSum, errors_by_feed, ratio_db, sqnr_db
from sbonnx.metrics.output_differences import (
    IMAGE_RANK,
    LOSS_TEXT,
    LossKind,
    Metric,
    OutputDifferences,
    changed_share,
    loss_kind,
    loss_of,
)
from sbonnx.metrics.task import TASK_METRICS, MetricDefinition, TaskMetricKind, task_metric

__all__ = [
    "IMAGE_RANK",
    "LOSS_TEXT",
    "TASK_METRICS",
    "CosineSum",
    "ErrorSum",
    "LossKind",
    "Metric",
    "MetricDefinition",
    "OutputDifferences",
    "TaskMetric",
    "TaskMetricKind",
    "changed_share",
    "errors_by_feed",
    "loss_kind",
    "loss_of",
    "ratio_db",
    "sqnr_db",
    "task_metric",
]

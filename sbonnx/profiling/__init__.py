"""Error profiles of quantized models: per layer, by weights and activations, at other widths, in files of any tool."""

from __future__ import annotations

from sbonnx.profiling.causes import causes_of, losses_to_explain
from sbonnx.profiling.checkers import COLUMNS, MEASURES, TITLES, Checker, Measure, Profile, make_measure
from sbonnx.profiling.file_losses import file_losses
from sbonnx.profiling.float_reasons import with_float_reasons
from sbonnx.profiling.imported_file import Subject, subject_of
from sbonnx.profiling.layer_losses import errors, first_lost, losses, node_errors, worst_first
from sbonnx.profiling.metric_losses import LayerMetric, MetricLosses, metric_losses
from sbonnx.profiling.page_details import details
from sbonnx.profiling.sensitivity import Sensitivities, Sensitivity, sensitivity
from sbonnx.profiling.variants import Candidate, Part
from sbonnx.profiling.walk import WalkOptions
from sbonnx.report import LayerError
from sbonnx.report.details import Column, Details, LayerLoss, NodeRow, TensorHistogram

__all__ = [
    "COLUMNS",
    "MEASURES",
    "TITLES",
    "Candidate",
    "Checker",
    "Column",
    "Details",
    "LayerError",
    "LayerLoss",
    "LayerMetric",
    "Measure",
    "MetricLosses",
    "NodeRow",
    "Part",
    "Profile",
    "Sensitivities",
    "Sensitivity",
    "Subject",
    "TensorHistogram",
    "WalkOptions",
    "causes_of",
    "details",
    "errors",
    "file_losses",
    "first_lost",
    "losses",
    "losses_to_explain",
    "make_measure",
    "metric_losses",
    "node_errors",
    "sensitivity",
    "subject_of",
    "with_float_reasons",
    "worst_first",
]

"""Error profiles of quantized models: per layer, by weights and activations, at other widths, in files of any tool."""

from __future__ import annotations

from sbonnx.profile.activations import LayerError, errors, first_lost, worst_first
from sbonnx.profile.checkers import MEASURES, Checker, Measure, make_measure
from sbonnx.profile.files import Subject, same_model, subject_of
from sbonnx.profile.losses import losses, node_errors
from sbonnx.profile.numbers import Candidate, Part
from sbonnx.profile.rows import COLUMNS, Column, LayerLoss, Profile
from sbonnx.profile.sensitivity import Sensitivities, Sensitivity, sensitivity

__all__ = [
    "COLUMNS",
    "MEASURES",
    "Candidate",
    "Checker",
    "Column",
    "LayerError",
    "LayerLoss",
    "Measure",
    "Part",
    "Profile",
    "Sensitivities",
    "Sensitivity",
    "Subject",
    "errors",
    "first_lost",
    "losses",
    "make_measure",
    "node_errors",
    "same_model",
    "sensitivity",
    "subject_of",
    "worst_first",
]

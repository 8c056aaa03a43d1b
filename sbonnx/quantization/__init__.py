"""The module path of Sparsebit's `sparsebit.quantization`: the same names, from where they are in sbonnx."""

from __future__ import annotations

from sbonnx.quant_model import GraphVisitor, QuantizationErrorProfiler, QuantModel, SharedData
from sbonnx.recipe import parse_qconfig, update_config

__all__ = [
    "GraphVisitor",
    "QuantModel",
    "QuantizationErrorProfiler",
    "SharedData",
    "parse_qconfig",
    "update_config",
]

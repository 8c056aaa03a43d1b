"""Stepwise quantization API: `QuantModel` and its tools, with the method names of the ancestor (Sparsebit)."""

from __future__ import annotations

from sbonnx.errors import LifeCycleError
from sbonnx.quant_model.life_cycle import QuantizationErrorProfiler, QuantModel, mse
from sbonnx.quant_model.visitor import GraphVisitor, SharedData

__all__ = ["GraphVisitor", "LifeCycleError", "QuantModel", "QuantizationErrorProfiler", "SharedData", "mse"]

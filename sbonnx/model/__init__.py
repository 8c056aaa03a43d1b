"""`QuantModel` and the tools around it: the pipeline step by step, with the ancestor's calls."""

from __future__ import annotations

from sbonnx.model.pipeline_steps import LifeCycleError
from sbonnx.model.profiler import QuantizationErrorProfiler
from sbonnx.model.quant_model import QuantModel, mse
from sbonnx.model.visitor import GraphVisitor, SharedData

__all__ = ["GraphVisitor", "LifeCycleError", "QuantModel", "QuantizationErrorProfiler", "SharedData", "mse"]

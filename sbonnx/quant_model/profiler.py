"""`QuantizationErrorProfiler`: alias of the ancestor for `QuantModel.get_quantization_error`."""

from __future__ import annotations

from typing import Any

from sbonnx import profile
from sbonnx.quant_model.life_cycle import QuantModel, mse


class QuantizationErrorProfiler:
    """Measures the error of each quantized node of one model.

    Args:
        model: a calibrated model.
    """

    def __init__(self, model: QuantModel) -> None:
        self.model = model

    def apply(self, data: Any, checker: profile.Checker = mse, is_async: bool = True) -> dict[str, float]:
        """Call `QuantModel.get_quantization_error`."""
        return self.model.get_quantization_error(data, checker, is_async)

"""Conversion of Q/DQ to other operators of a runtime: integer ops, block-wise weights, dynamic quantization."""

from __future__ import annotations

from sbonnx.export.finish import finish
from sbonnx.export.read import Converted

__all__ = ["Converted", "finish"]

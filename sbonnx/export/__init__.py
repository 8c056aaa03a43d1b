"""From Q/DQ to the operators that a runtime has beside it: integer ops, weights in blocks, scales at run time."""

from __future__ import annotations

from sbonnx.export.finish import finish
from sbonnx.export.read import Converted

__all__ = ["Converted", "finish"]

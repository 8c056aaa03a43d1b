"""Runtimes to quantize for. A new one: a file beside these and a line in `BACKENDS`."""

from __future__ import annotations

from typing import Final

from sbonnx.backends.base import Backend, Rule
from sbonnx.backends.ort import ONNXRUNTIME
from sbonnx.backends.tensorrt import TENSORRT
from sbonnx.backends.virtual import VIRTUAL

BACKENDS: Final[dict[str, Backend]] = {
    "virtual": VIRTUAL,
    "onnxruntime": ONNXRUNTIME,
    "tensorrt": TENSORRT,
}

__all__ = ["BACKENDS", "Backend", "Rule"]

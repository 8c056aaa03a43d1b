"""What the tests share: the folder of real models, and the one meaning of the markers."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACK = Path(os.environ.get("SBONNX_PACK") or ROOT.parent / "shared" / "data")
"""Trained models and real inputs, beside the repository where they are at hand."""

# Started in the background of a shell, everything begun from here would ignore Ctrl-C, which some tests send.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pack() -> Path:
    """The folder of real models (`manifest.json`, `eval.py`, models/, data/), or a skip where there is none."""
    if not (PACK / "manifest.json").is_file():
        pytest.skip("the real models are neither in ../shared/data nor where SBONNX_PACK points")
    return PACK


def has_gpu() -> bool:
    """Whether the installed onnxruntime can run on an NVIDIA GPU."""
    if importlib.util.find_spec("onnxruntime") is None:
        return False
    import onnxruntime

    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where nothing can run them."""
    if has_gpu():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU, or onnxruntime-gpu is not installed"))

"""What the tensorrt backend writes, run on an NVIDIA GPU: the same numbers as on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import sbonnx
from sbonnx.assets import digits
from sbonnx.spec import Array

pytestmark = pytest.mark.gpu

CLOSE_DB = 30.0
"""Kernels of a GPU sum in another order, and in TF32."""


def sqnr(one: Array, other: Array) -> float:
    noise = float(np.square(one.astype(np.float64) - other).sum())
    return float(10 * np.log10(float(np.square(one.astype(np.float64)).sum()) / max(noise, 1e-30)))


def run(path: Path, provider: str, feeds: dict[str, Any]) -> Array:
    session = ort.InferenceSession(str(path), providers=[provider])
    if provider == "TensorrtExecutionProvider" and session.get_providers()[0] != provider:
        pytest.skip("TensorRT's libraries are not installed")
    assert session.get_providers()[0] == provider
    found: Array = session.run(None, feeds)[0]
    return found


def written(folder: Path, **overrides: Any) -> Path:
    path = folder / "q.onnx"
    images = np.load(digits().calib)["image"]
    sbonnx.quantize(digits().model, {"image": images}, backend="tensorrt", output=path, **overrides)
    return path


@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("bits", ["w8a8", "w0a0"])
@pytest.mark.parametrize("provider", ["CUDAExecutionProvider", "TensorrtExecutionProvider"])
def test_the_gpu_computes_what_the_cpu_does(provider: str, bits: str, kind: str, tmp_path: Path) -> None:
    if provider not in ort.get_available_providers():
        pytest.skip(f"this onnxruntime has no {provider}")
    if (bits, kind) == ("w0a0", "fp32"):
        pytest.skip("nothing is left to change")
    path = written(tmp_path, bits=bits, high_precision=kind)
    feeds = {"image": np.load(digits().eval)["image"][:64]}
    assert sqnr(run(path, "CPUExecutionProvider", feeds), run(path, provider, feeds)) > CLOSE_DB


def test_a_file_for_the_cpu_is_verified_on_its_kernels(tmp_path: Path) -> None:
    """Calibration runs on the GPU, whose provider has no integer kernels to count or to time."""
    feeds = {"image": np.load(digits().calib)["image"]}
    report = sbonnx.quantize(digits().model, feeds, output=tmp_path / "q.onnx", device="cuda")
    assert report.settings["DEVICE"] == "cuda"
    assert report.metrics is not None and report.metrics.kernels is not None


def test_cuda_runs_a_file_and_names_the_nodes_on_the_cpu(tmp_path: Path) -> None:
    path = written(tmp_path)
    data = {"image": np.load(digits().eval)["image"][:8]}
    result = sbonnx.compare(digits().model, path, data, runtimes=["onnxruntime-cuda"])
    assert result.portability is not None and result.portability.portable, result.portability

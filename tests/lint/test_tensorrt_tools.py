"""What TensorRT would say of whole models: ours, and those of onnxruntime's quantizer."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.linting import TARGETS, Finding, lint
from sbonnx.spec import Array
from tests.support.models import residual

TENSORRT = [target for target in TARGETS if target.startswith("tensorrt")]

SWITCHES: dict[str, Any] = {
    "ActivationSymmetric": True,
    "WeightSymmetric": True,
    "QuantizeBias": False,
    "AddQDQPairToWeight": True,
}
"""What onnxruntime's documents ask for where TensorRT is to read the file."""


class Reader:
    """Data for onnxruntime's quantizer."""

    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self._feeds: Iterator[dict[str, Array]] = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


def by_onnxruntime(folder: Path, **options: Any) -> list[Finding]:
    """Findings on one residual block that onnxruntime quantized."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    source, target = folder / "f.onnx", folder / "q.onnx"
    onnx.save(residual(), str(source))
    quantization.quantize_static(str(source), str(target), Reader(feeds), **options)
    return lint(target, "tensorrt@11")


def errors(findings: list[Finding]) -> set[str]:
    return {one.rule for one in findings if one.severity == "error"}


def test_onnxruntimes_default_is_refused(tmp_path: Path) -> None:
    """Asymmetric activations and int32 biases, and a pair on either side of the residual add."""
    findings = by_onnxruntime(tmp_path)
    assert errors(findings) == {"T02", "T03", "T17"}
    assert {one.node for one in findings if one.rule == "P04"} == {"add"}
    assert {"P02", "P03"} & {one.rule for one in findings}


def test_onnxruntimes_switches_for_tensorrt_leave_its_placement(tmp_path: Path) -> None:
    findings = by_onnxruntime(tmp_path, per_channel=True, extra_options=SWITCHES)
    assert not errors(findings)
    assert {"P02", "P04"} <= {one.rule for one in findings}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar_resnet20", "fastestdet", "squeezenet11", "ultraface_rfb320"])
def test_our_real_models_are_accepted(name: str, pack: Path) -> None:
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None and spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    feeds = data.load_calib(name, limit=4)
    report = sbonnx.quantize(pack / "models" / f"{name}.onnx", feeds, backend="tensorrt", verify=False, effort="fast")
    assert report.quantized is not None
    for target in TENSORRT:
        found = [one for one in lint(report.quantized, target) if one.severity == "error"]
        assert not found, found[:3]

"""Command lines of trtexec by version and types, and the one in a report."""

from __future__ import annotations

import shlex

import pytest

from sbonnx.backends.runtime_types import EngineInput
from sbonnx.backends.tensorrt.profiles import PROFILES
from sbonnx.backends.tensorrt.trtexec import engine_command

PRECISIONS = {"--int8", "--fp16", "--fp8", "--int4", "--stronglyTyped"}


@pytest.mark.parametrize(
    ("version", "types", "strong", "wanted"),
    [
        ("11", ["int8"], False, set()),
        ("11", ["fp8"], True, set()),
        ("10", ["int8"], False, {"--int8", "--fp16"}),
        ("10", ["fp8", "int4"], False, {"--fp8", "--int4", "--fp16"}),
        ("10", ["int8"], True, {"--stronglyTyped"}),
        ("10", ["nvfp4"], False, {"--stronglyTyped"}),
        ("11", ["nvfp4"], False, set()),
        ("8.6", ["int8"], True, {"--int8", "--fp16"}),
    ],
)
def test_precision_flags(version: str, types: list[str], strong: bool, wanted: set[str]) -> None:
    """Strong typing excludes precision flags; TensorRT 11 has none."""
    words = shlex.split(engine_command("a b/m.onnx", PROFILES[version], types=types, strong=strong))
    assert PRECISIONS & set(words) == wanted
    assert words[:3] == ["trtexec", "--onnx=a b/m.onnx", "--saveEngine=a b/m.engine"]


def test_dynamic_dimensions_need_a_profile() -> None:
    inputs = [EngineInput("x", (None, 3, None), (8, 3, 224)), EngineInput("n", ()), EngineInput("m", (2, 5), None)]
    words = engine_command("m.onnx", PROFILES["11"], inputs).split()
    assert words[3:6] == ["--minShapes=x:1x3x224,m:2x5", "--optShapes=x:8x3x224,m:2x5", "--maxShapes=x:8x3x224,m:2x5"]
    assert "Shapes" not in engine_command("m.onnx", PROFILES["11"], inputs[1:])
    assert "--minShapes=x:1x1" in engine_command("m.onnx", PROFILES["11"], [EngineInput("x", (None, None))])

"""Small Q/DQ files, written as text: what a pair is, is in the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime

from tests.support.models import model

RNG = np.random.default_rng(0)
CHANNELS = 8

NUMBERS: dict[str, Any] = {
    "s": np.float32(0.02),
    "s2": np.float32(0.03),
    "low": np.uint8(0),
    "mid": np.uint8(128),
    "zero": np.int8(0),
    "wide": np.uint16(32768),
    "w": RNG.integers(-127, 128, (CHANNELS, CHANNELS, 3, 3)).astype(np.int8),
    "m": RNG.integers(-127, 128, (CHANNELS, CHANNELS)).astype(np.int8),
    "b": RNG.integers(-999, 999, CHANNELS).astype(np.int32),
    "bs": np.float32(0.02) * np.float32(0.02),
    "bz": np.int32(0),
    "half": np.array([1, 1, 2, 2], np.float32),
}
"""Scales, zero points, codes of weights."""

IMAGE = f"float[1,{CHANNELS},8,8]"
START = "xq = QuantizeLinear (x, s, mid) xd = DequantizeLinear (xq, s, mid)"
WEIGHT = "wd = DequantizeLinear (w, s, zero) bd = DequantizeLinear (b, bs, bz)"
CONV = f"{START} {WEIGHT} c = Conv <pads = [1,1,1,1]> (xd, wd, bd)"
END = "yq = QuantizeLinear (c, s, mid) y = DequantizeLinear (yq, s, mid)"


def qdq(body: str, shape: str = IMAGE, **numbers: Any) -> onnx.ModelProto:
    """A model from x to y with `numbers` and those constants of `NUMBERS` that it reads; nodes are named by output."""
    return named(model(f"agraph ({shape} x) => (float y) {{ {body} }}", **needed(body, numbers)))


def needed(body: str, numbers: dict[str, Any]) -> dict[str, Any]:
    words = set(body.replace(",", " ").replace("(", " ").replace(")", " ").split())
    return {name: value for name, value in {**NUMBERS, **numbers}.items() if name in words}


def named(proto: onnx.ModelProto) -> onnx.ModelProto:
    for node in proto.graph.node:
        node.name = f"{node.op_type}_{node.output[0]}"
    return proto


def optimised(proto: onnx.ModelProto, folder: Path, level: str) -> onnx.ModelProto:
    """The graph that onnxruntime makes of a model."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(folder / f"{level}.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return onnx.load(str(folder / f"{level}.onnx"))

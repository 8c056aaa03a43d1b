"""A recurrent model: one step, whose state goes from output to input."""

from __future__ import annotations

from typing import Any

import onnx

from tests.support.models import model

STEP = """
agraph (float[N,4] x, float[N,8] h) => (float[N,8] next, float[N,2] y) {
    a = MatMul (x, w)
    b = MatMul (h, u)
    c = Add (a, b)
    next = Tanh (c)
    y = MatMul (next, v)
}"""
WEIGHTS: dict[str, Any] = {"w": (4, 8), "u": (8, 8), "v": (8, 2)}
BACK = {"next": "h"}


def step() -> onnx.ModelProto:
    """The model, with random weights."""
    return model(STEP, **WEIGHTS)

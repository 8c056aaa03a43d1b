"""Clips of activations work on codes: the same codes, and no float kernel for them."""

from __future__ import annotations

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.backends.onnxruntime.rewrites import clip_codes
from sbonnx.spec import QuantSpec, bounds_of, params_from_bounds
from tests.support.models import model, run
from tests.support.writing import ops

TEXT = """agraph (float[N,8] x) => (float[N,8] y) {
    r = Relu (x)
    c = Clip (r, low, high)
    q = QuantizeLinear (c, s, z)
    y = DequantizeLinear (q, s, z)
}"""


def clipped(bits: int, symmetric: bool, signed: bool, spread: float, seed: int) -> tuple[onnx.ModelProto, np.ndarray]:
    """A tensor in codes of few bits, stored in bytes behind a Clip, and values about and past its range."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((64, 8)) * spread).astype(np.float32)
    spec = QuantSpec(bits=bits, signed=signed, symmetric=symmetric)
    made = params_from_bounds(bounds_of(x), spec)
    limits = made.limits
    return model(TEXT, low=limits.lo, high=limits.hi, s=made.scale, z=made.zero_point), x * 2


@settings(max_examples=40, derandomize=True, deadline=None)
@given(st.integers(2, 7), st.booleans(), st.booleans(), st.floats(1e-3, 1e3), st.integers(0, 999))
def test_the_codes_are_the_same(bits: int, symmetric: bool, signed: bool, spread: float, seed: int) -> None:
    proto, x = clipped(bits, symmetric, signed, spread, seed)
    graph = graphs.load(proto)
    assert len(clip_codes(graph)) == 1
    after = graphs.to_proto(graph)
    onnx.checker.check_model(after, full_check=True)
    assert [node.op_type for node in after.graph.node] == ["Relu", "QuantizeLinear", "Clip", "DequantizeLinear"]
    for level in ("off", "all"):
        np.testing.assert_array_equal(run(after, {"x": x}, level=level)["y"], run(proto, {"x": x})["y"])


def test_a_clip_that_others_read_stays() -> None:
    text = TEXT.replace(" y)", " y, float[N,8] c)", 1)
    proto = model(text, low=np.float32(0), high=np.float32(1), s=np.float32(0.1), z=np.uint8(0))
    assert clip_codes(graphs.load(proto)) == []
    assert ops(proto)["Clip"] == 1


def test_codes_of_two_bytes_have_no_clip_of_codes() -> None:
    proto = model(TEXT, opset=21, low=np.float32(0), high=np.float32(1), s=np.float32(0.1), z=np.uint16(0))
    assert clip_codes(graphs.load(proto)) == []


def test_a_clip_at_whose_bounds_codes_saturate_is_removed_and_restored() -> None:
    """A range from 0 to 6 in all codes of a byte, whose last step is rounded beyond 6."""
    scale = np.nextafter(np.float32(6 / 255), np.float32(1))
    proto = model(TEXT, low=np.float32(0), high=np.float32(6), s=scale, z=np.uint8(0))
    graph = graphs.load(proto)
    assert len(clip_codes(graph)) == 1
    after = graphs.to_proto(graph)
    assert [node.op_type for node in after.graph.node] == ["Relu", "QuantizeLinear", "DequantizeLinear"]
    x = np.linspace(-2, 8, 64 * 8, dtype=np.float32).reshape(64, 8)
    np.testing.assert_array_equal(run(after, {"x": x}, level="off")["y"], run(proto, {"x": x}, level="off")["y"])
    qdq.strip(graph)
    assert [node.op for node in graph.nodes] == ["Relu", "Clip"]

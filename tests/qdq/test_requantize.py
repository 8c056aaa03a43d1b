"""Pairs that others wrote: found with their numbers, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.spec import Array
from tests.support.models import model, residual, run


class Reader:
    """Data for onnxruntime's quantizer."""

    def __init__(self, feeds: list[dict[str, Array]]) -> None:
        self._feeds: Iterator[dict[str, Array]] = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        return next(self._feeds, None)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("float_weights", [False, True])
def test_what_onnxruntime_quantized(per_channel: bool, float_weights: bool, tmp_path: Path) -> None:
    quantization = pytest.importorskip("onnxruntime.quantization")
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(3)]
    source, target = tmp_path / "f.onnx", tmp_path / "q.onnx"
    onnx.save(residual(), str(source))
    options: dict[str, Any] = {"AddQDQPairToWeight": float_weights, "QDQKeepRemovableActivations": True}
    quantization.quantize_static(
        str(source), str(target), Reader(feeds), per_channel=per_channel, extra_options=options
    )
    proto = onnx.load(str(target))
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    expected = {
        node.output[0]: held[node.input[1]]
        for node in proto.graph.node
        if node.op_type == "DequantizeLinear" and held[node.input[2]].dtype != np.int32
    }
    graph = graphs.load(target)
    pairs = {pair.output: pair for pair in qdq.read(graph)}
    assert set(pairs) == set(expected)
    for name, scale in expected.items():
        np.testing.assert_array_equal(pairs[name].qparams.scale, scale.reshape(pairs[name].qparams.scale.shape))
    assert qdq.strip(graph) >= len(expected)
    assert not [node.op for node in graph.nodes if "Quantize" in node.op]
    stripped, reference = run(graphs.to_proto(graph), feeds[0])["y"], run(residual(), feeds[0])["y"]
    assert np.abs(stripped - reference).max() < 0.05 * np.abs(reference).max()


def test_blocked_weights_are_dequantized_along_their_axis() -> None:
    codes = np.arange(-8, 8, dtype=np.int8).reshape(8, 2)
    scale = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    proto = model(
        """agraph (float[3,8] x) => (float[3,2] y) {
            w = DequantizeLinear <axis = 0, block_size = 4> (codes, scale)
            y = MatMul (x, w)
        }""",
        opset=21,
        codes=codes,
        scale=scale,
    )
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    expected = run(proto, {"x": x})["y"]
    graph = graphs.load(proto, opset=21)
    assert qdq.strip(graph) == 1
    np.testing.assert_allclose(run(graphs.to_proto(graph), {"x": x})["y"], expected, rtol=1e-6)


@pytest.mark.parametrize("computed", ["s", "z"])
def test_computed_numbers_are_left_alone(computed: str) -> None:
    """A weight stays quantized, because its float values are not known; a pair of an activation is not read."""
    kind = {"s": "float", "z": "uint8"}[computed]
    given: dict[str, Any] = {"s": np.array(0.5, np.float32), "z": np.array(7, np.uint8)}
    feeds: dict[str, Array] = {computed: given.pop(computed), "x": np.array([3.2, -1, 9], np.float32)}
    proto = model(
        f"""agraph (float[3] x, {kind} {computed}) => (float[3] y) {{
            q = QuantizeLinear (x, s, z)
            d = DequantizeLinear (q, s, z)
            w = DequantizeLinear (c, s, z)
            y = Add (d, w)
        }}""",
        c=np.array([10, 20, 30], np.uint8),
        **given,
    )
    graph = graphs.load(proto)
    assert qdq.read(graph) == ()
    refusals = qdq.make_float(graph, requantize=True)
    assert [refusal.why for refusal in refusals] == ["its codes or numbers are computed"]
    expected = feeds["x"] + 0.5 * (np.array([10, 20, 30]) - 7)
    np.testing.assert_allclose(run(graphs.to_proto(graph), feeds)["y"], expected, rtol=1e-6)

"""Tables that Gather reads rows of: 8 bits in the file and in memory, rows decoded as they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.profiling.file_losses import file_losses
from sbonnx.profiling.imported_file import subject_of
from sbonnx.spec import Array
from tests.support.models import model, run

NET = """agraph (int64[1,T] ids, int64[1,T] kinds) => (float[1,T,160] y) {
    a = Gather (words, ids)
    b = Gather (types, kinds)
    c = Add (a, b)
    y = MatMul (c, w)
}"""


def encoder() -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    """Words and two token types, and a product."""
    rng = np.random.default_rng(0)
    sizes = {"words": (300, 144), "types": (2, 144), "w": (144, 160)}
    weights: dict[str, Any] = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    weights["words"] *= np.exp(rng.standard_normal((300, 1))).astype(np.float32)
    feeds = [{"ids": rng.integers(0, 300, (1, 9)), "kinds": rng.integers(0, 2, (1, 9))} for _ in range(8)]
    return model(NET, **weights), feeds


Mode = Literal["static", "dynamic", "weight_only"]


@pytest.mark.parametrize("mode", ["static", "dynamic", "weight_only"])
def test_rows_are_decoded_as_they_are_read(mode: Mode, tmp_path: Path) -> None:
    """onnxruntime would dequantize a whole table in every run; two token types are in every sample and stay float."""
    proto, feeds = encoder()
    path = tmp_path / "q.onnx"
    settings: dict[str, Any] = {"w_bit": 8} if mode == "weight_only" else {}
    sbonnx.quantize(proto, feeds if mode == "static" else None, path, mode=mode, verify=False, **settings)
    kinds = {one.name: one.data_type for one in onnx.load(path).graph.initializer if one.dims[-1:] == [144]}
    assert kinds.pop("types") == onnx.TensorProto.FLOAT
    assert set(kinds.values()) == {onnx.TensorProto.INT8}
    for level in ("off", "all"):
        floats, decoded = (run(one, feeds[0], level=level)["y"] for one in (proto, str(path)))
        assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - decoded) ** 2)) > (25 if mode == "static" else 30)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    loaded = onnx.load(tmp_path / "loaded.onnx")
    assert not any(node.op_type == "DequantizeLinear" for node in loaded.graph.node)


def test_decoded_rows_are_read_as_pairs(tmp_path: Path) -> None:
    """With the numbers of the table: the file and its form with pairs have equal outputs; the profile has a row."""
    proto, feeds = encoder()
    path = tmp_path / "q.onnx"
    sbonnx.quantize(proto, feeds, path, verify=False)
    graph = graphs.load(path)
    qdq.unfold(graph)
    words = [node for node in graph.nodes if node.op == "Gather" and node.inputs[0].name != "types"]
    assert [node.inputs[0].inputs[0].op for node in words] == ["DequantizeLinear"]
    graphs.save(graph, tmp_path / "pairs.onnx")
    decoded, paired = (run(str(one), feeds[0], level="off")["y"] for one in (path, tmp_path / "pairs.onnx"))
    np.testing.assert_array_equal(decoded, paired)
    subject = subject_of(proto, path)
    rows = file_losses(proto, path, subject.graph, subject.plan, subject.solution, feeds).layers
    assert {(row.op, row.label) for row in rows} >= {("Gather", "int8 axis 0")}


@pytest.mark.parametrize(
    "settings",
    [
        {"recipe": {"QUANTIZE_INPUTS_OF": {"EMBEDDING": False}}},
        {"recipe": {"EMBEDDING_BITS": 0}},
        {"backend": "tensorrt"},
    ],
)
def test_tables_stay_float_on_request_and_elsewhere(settings: dict[str, Any], tmp_path: Path) -> None:
    proto, feeds = encoder()
    sbonnx.quantize(proto, feeds, tmp_path / "q.onnx", verify=False, **settings)
    kinds = [one.data_type for one in onnx.load(tmp_path / "q.onnx").graph.initializer if one.dims[-1:] == [144]]
    assert kinds == [onnx.TensorProto.FLOAT] * 2


def test_columns_with_the_scales_of_rows_are_no_table() -> None:
    """A Gather of columns reads other codes than those of the rows whose scales are read."""
    text = """agraph (int64[1,T] ids) => (float[64,T,T] y) {
        a = Gather <axis = 1> (codes, ids)
        b = Cast <to = 1> (a)
        s = Gather (scales, ids)
        y = Mul (b, s)
    }"""
    codes = np.arange(64 * 64, dtype=np.int64).reshape(64, 64).astype(np.int8)
    graph = graphs.load(model(text, codes=codes, scales=np.ones((64, 1), np.float32)))
    qdq.unfold(graph)
    assert [node.op for node in graph.nodes] == ["Gather", "Cast", "Gather", "Mul"]

"""Weights of recurrent operators: 8 bits in the file, floats once it is loaded, or integers in the kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
from tests.support.values import some

NET = """agraph (float[8,N,24] x) => (float[8,D,N,{h}] y) {{
    a, la{more} = {op} <hidden_size = {h}, direction = "{way}"> (x, w1, r1)
    b = Transpose <perm = [0,2,1,3]> (a)
    c = Reshape (b, shape)
    y, ly = {op} <hidden_size = {h}, direction = "{way}"> (c, w2, r2)
}}"""
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def recurrent(op: str, *, both: bool, hidden: int = 32) -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    """Two layers, the second of which reads what the first computes."""
    rng, directions, gates = np.random.default_rng(0), 1 + both, hidden * GATES[op]
    text = NET.format(op=op, more=", lc" if op == "LSTM" else "", way="bidirectional" if both else "forward", h=hidden)
    sizes = {"w1": 24, "r1": hidden, "w2": hidden * directions, "r2": hidden}
    weights = {
        name: (rng.standard_normal((directions, gates, size)) / size**0.5).astype(np.float32)
        for name, size in sizes.items()
    }
    proto = model(text, shape=np.array([8, -1, hidden * directions], np.int64), **weights)
    return proto, [{"x": rng.standard_normal((8, 1, 24)).astype(np.float32)} for _ in range(8)]


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("both", [False, True])
def test_weights_are_stored_in_8_bits(op: str, both: bool, tmp_path: Path) -> None:
    """But those that a model input is multiplied with, whose features may differ in scale."""
    proto, feeds = recurrent(op, both=both)
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, feeds, output=path, verify=False)
    file = onnx.load(path)
    kinds = {one.data_type for one in file.graph.initializer if len(one.dims) == 3 and one.dims[2] != 24}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.FLOAT}
    codes = [one for one in file.graph.initializer if one.data_type == onnx.TensorProto.INT8 and len(one.dims) == 3]
    assert len(codes) == 3
    assert sum("input weights stay float" in refusal.why for refusal in report.refusals) == 1
    for level in ("off", "all"):
        floats, found = (run(one, feeds[0], level=level)["y"] for one in (proto, str(path)))
        assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - found) ** 2)) > 30


@pytest.mark.parametrize("settings", [{}, {"mode": "dynamic"}, {"mode": "weight_only"}, {"bits": "w4a8"}])
def test_onnxruntime_decodes_them_when_it_loads_the_file(settings: dict[str, Any], tmp_path: Path) -> None:
    proto, feeds = recurrent("LSTM", both=False)
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, feeds, output=path, **settings)
    assert sum(site.role == "weight" for site in report.sites) == 3
    assert some(some(report.metrics).kernels).float_weights.keys() == {"LSTM"}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    loaded = onnx.load(tmp_path / "loaded.onnx")
    assert {node.op_type for node in loaded.graph.node} <= {"LSTM", "Transpose", "Reshape"}


def test_other_runtimes_and_excluded_layers_keep_floats(tmp_path: Path) -> None:
    proto, feeds = recurrent("GRU", both=False)
    for number, settings in enumerate(({"backend": "virtual"}, {"recipe": {"EXCLUDE": ["op:GRU"]}})):
        path = tmp_path / f"{number}.onnx"
        sbonnx.quantize(proto, feeds, output=path, verify=False, **settings)  # type: ignore[arg-type]
        kinds = [one.data_type for one in onnx.load(path).graph.initializer if len(one.dims) == 3]
        assert kinds == [onnx.TensorProto.FLOAT] * 4


@pytest.mark.parametrize("op", GATES)
def test_the_profile_has_their_rows(op: str, tmp_path: Path) -> None:
    """Losses by weights alone; together, the layers explain the loss of the file."""
    proto, feeds = recurrent(op, both=True)
    path = tmp_path / "q.onnx"
    sbonnx.quantize(proto, feeds, output=path, verify=False)
    subject = subject_of(proto, path)
    assert not [note for note in subject.notes if "not those of the float model" in note]
    found = file_losses(proto, path, subject.graph, subject.plan, subject.solution, feeds)
    assert [(row.op, row.label) for row in found.layers] == [(op, "int8 axis 1")] * 2
    for row in found.layers:
        assert row.weights is not None and 30 < row.weights < 60
    assert not found.notes


@pytest.mark.parametrize("both", [False, True])
def test_large_lstm_computes_in_integers(both: bool, tmp_path: Path) -> None:
    """The layer after the first, with one scale a column; unfolding restores the codes of its weights."""
    proto, feeds = recurrent("LSTM", both=both, hidden=128)
    path = tmp_path / "q.onnx"
    report = sbonnx.quantize(proto, feeds, output=path, recipe={"CPU": "vnni"})
    nodes = {node.op_type: node for node in onnx.load(path).graph.node}
    assert {"LSTM", "DynamicQuantizeLSTM"} <= nodes.keys()
    kernels = some(some(report.metrics).kernels)
    assert kernels.integer == {"DynamicQuantizeLSTM": 1}
    sizes = [(1 + both) * 512 * size for size in (24, 128, 128 * (1 + both), 128)]
    assert abs(kernels.weights_in_integers - sum(sizes[2:]) / sum(sizes)) < 0.01
    floats, values = (run(file, feeds[0], level="all")["y"] for file in (proto, str(path)))
    assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - values) ** 2)) > 30

    graph = graphs.load(path)
    qdq.unfold(graph)
    stored = {one.name: onnx.numpy_helper.to_array(one) for one in onnx.load(path).graph.initializer}
    layer = next(node for node in graph.nodes if node.name == nodes["DynamicQuantizeLSTM"].name)
    for tensor, name in zip(layer.inputs[1:3], nodes["DynamicQuantizeLSTM"].input[1:3], strict=True):
        codes = some(graphs.query.constant(some(graphs.query.producer(tensor)).inputs[0]))
        assert np.array_equal(codes, stored[name].transpose(0, 2, 1))
    unfolded = run(graphs.to_proto(graph), feeds[0], level="off")["y"]
    assert 10 * np.log10(np.sum(floats**2) / np.sum((floats - unfolded) ** 2)) > 30


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "weight_only"},
        {"recipe": {"CPU": "avx2"}},
        {"bits": "w8a16"},
        {"recipe": {"EXCLUDE": ["op:LSTM"]}},
    ],
)
def test_lstm_computes_in_float_where_integers_do_not_fit(settings: dict[str, Any], tmp_path: Path) -> None:
    proto, feeds = recurrent("LSTM", both=False, hidden=128)
    path = tmp_path / "q.onnx"
    sbonnx.quantize(proto, feeds, output=path, verify=False, **settings)
    assert [node.op_type for node in onnx.load(path).graph.node].count("LSTM") == 2

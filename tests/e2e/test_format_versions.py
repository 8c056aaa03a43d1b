"""Opset and IR version of the input are kept unless the file needs newer ones, and then a note says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from tests.support.models import residual, run

FEEDS = [{"x": np.random.default_rng(n).standard_normal((2, 3, 8, 8)).astype(np.float32)} for n in range(4)]


def old(opset: int = 13, version: int = 7) -> onnx.ModelProto:
    proto = residual()
    proto.opset_import[0].version = opset
    proto.ir_version = version
    return proto


def quantized(path: Path, model: onnx.ModelProto, **wishes: Any) -> tuple[onnx.ModelProto, list[str]]:
    report = sbonnx.quantize(model, FEEDS, output=path, verify=False, **wishes)
    return onnx.load(path), [note for note in report.notes if "IR version" in note]


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt@8.6", "qnn", "virtual"])
def test_quantized_files_keep_opset_and_ir_version(backend: str, tmp_path: Path) -> None:
    written, notes = quantized(tmp_path / "q.onnx", old(), backend=backend)
    assert (written.opset_import[0].version, written.ir_version, notes) == (13, 7, [])
    run(str(tmp_path / "q.onnx"), FEEDS[0])
    graph = graphs.load(tmp_path / "q.onnx")
    pairs = [node for node in graph.nodes if node.op == "QuantizeLinear"]
    assert pairs
    assert all(graphs.node_metadata(graph, node.name)["sbonnx.bits"] == "8" for node in pairs)


def test_a_newer_opset_and_ir_version_have_a_reason(tmp_path: Path) -> None:
    written, (note,) = quantized(tmp_path / "q.onnx", old(), backend="virtual", bits="w4a8")
    assert (written.opset_import[0].version, written.ir_version) == (21, 10)
    assert note == (
        "opset converted from 13 to 21, and IR version 7 raised to 10: Q/DQ of 4 or 16 bits or in blocks need it"
    )


def test_pruned_files_keep_opset_and_ir_version(tmp_path: Path) -> None:
    sbonnx.prune(old(), FEEDS, output=tmp_path / "p.onnx", ratio=0.3)
    written = onnx.load(tmp_path / "p.onnx")
    assert (written.opset_import[0].version, written.ir_version) == (13, 7)
    assert any("sbonnx.pruned" in entry.value for entry in written.metadata_props)
    run(str(tmp_path / "p.onnx"), FEEDS[0])

"""Training towards another teacher: a pruned model, quantized, learns from the model before pruning."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from sbonnx import graph as graphs
from sbonnx import qat
from sbonnx.errors import ModelError
from sbonnx.qat.module import origin_of, source_of
from tests.pruning.test_prune import feeds, inverted, pruned
from tests.support.models import model, run


def test_a_pruned_model_is_trained_towards_the_original(tmp_path: Path) -> None:
    graph = inverted()
    original, small = graphs.to_proto(graph), graphs.to_proto(pruned(graph, ratio=0.5, refit=False).graph)
    data = feeds(64)
    module = qat.prepare(small, data, teacher=original, bits="w8a8")
    twin = qat.float_twin(module)
    x = np.concatenate([feed["x"] for feed in feeds(30, seed=3)])
    want = run(original, {"x": x})["y"]
    np.testing.assert_allclose(twin(torch.from_numpy(x))["y"].numpy(), want, rtol=0, atol=1e-4 * np.abs(want).max())

    def error() -> float:
        path = tmp_path / "q.onnx"
        qat.export(module, path, force=True, verify=False)
        return float(np.square(run(str(path), {"x": x})["y"] - want).sum() / np.square(want).sum())

    before = error()
    qat.train(module, data, epochs=6)
    assert error() < 0.7 * before
    assert source_of(module)[0] is original  # which `export` compares the file with
    origin = origin_of(module)
    again = pickle.loads(pickle.dumps(origin))
    assert again.teacher is not None and origin.teacher is not None
    assert len(again.teacher.nodes) == len(origin.teacher.nodes)


def test_a_teacher_with_other_outputs_is_refused() -> None:
    graph = inverted()
    other = model("agraph (float[N,3,8,8] x) => (float[N,3,8,8] z) { z = Relu (x) }")
    with pytest.raises(ModelError, match="teacher has the outputs z, and the model to train has y"):
        qat.prepare(graphs.to_proto(graph), feeds(8), teacher=other, bits="w8a8")

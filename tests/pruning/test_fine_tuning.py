"""Fine-tuning of pruned networks: lower error on other samples, exact zeros, repeatable bytes, errors in one line."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import DataError, DeviceError, ModelError
from sbonnx.graph import Graph
from sbonnx.graph.query import constant, node_by_name
from sbonnx.options import RunOptions
from sbonnx.pruning.fine_tuning import fine_tune, remaining_entries, require_fine_tuning
from sbonnx.pruning.graph_pruning import Pruned
from sbonnx.pruning.settings import LayerPruning, Pruning
from sbonnx.recipe import names
from sbonnx.recipe.sections.sparsity import SparseFinetune
from sbonnx.report.pruned import FineTuneRow
from tests.pruning.test_prune import error, feeds, inverted, pruned
from tests.support.models import model, run

ONE = RunOptions(threads=1)


@cache
def network() -> tuple[Graph, Pruned]:
    """An original network and the result of pruning half of its channels."""
    graph = inverted()
    return graph, pruned(graph, ratio=0.5, refit=False)


def tuned(epochs: int = 10, done: Pruned | None = None, skip: str = "", lr: float = 0.5) -> tuple[Pruned, FineTuneRow]:
    """The network after fine-tuning on 100 images, and the row of the report."""
    pytest.importorskip("torch")
    graph, small = network()
    done = done or small
    layers = {skip: LayerPruning(skip=True)} if skip else {}
    settings = Pruning(ratio=0.5, layers=layers, finetune=SparseFinetune(epochs, lr))
    small, masked, row = fine_tune(
        graph, done.plan, done.graph, done.masked, Samples.of(feeds(100), graph, ONE), settings
    )
    return replace(done, graph=small, masked=masked), row


def test_the_error_on_other_samples_falls_and_the_bytes_repeat() -> None:
    graph, small = network()
    (done, row), (again, _) = tuned(), tuned()
    assert 0 < row.epoch <= row.epochs == 10 and row.after < row.before and not row.note
    assert error(graph, done.graph) < 0.85 * error(graph, small.graph)
    assert graphs.to_proto(done.graph).SerializeToString() == graphs.to_proto(again.graph).SerializeToString()


def test_the_masked_network_gets_the_same_values() -> None:
    _, small = network()
    done, _ = tuned(2)
    x = {"x": np.concatenate([feed["x"] for feed in feeds(20, seed=7)])}
    outputs = [run(graphs.to_proto(each), x)["y"] for each in (done.graph, done.masked, small.graph)]
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=0, atol=1e-5 * float(np.abs(outputs[0]).max()))
    assert np.abs(outputs[2] - outputs[0]).max() > 1e-3
    before, after = node_by_name(small.masked), node_by_name(done.masked)
    zeros = 0
    for name, node in before.items():
        for index, tensor in enumerate(node.inputs):
            values = constant(tensor)
            if values is not None and values.ndim > 1:
                zeros += int((values == 0).sum())
                assert not np.asarray(constant(after[name].inputs[index]))[values == 0].any()
    assert zeros > 50


def test_zeros_of_sparse_weights_stay_exactly_zero() -> None:
    _, small = network()
    sparse = graphs.copy(small.graph)
    wanted = {}
    for node in sparse.nodes:
        for index, tensor in enumerate(node.inputs):
            values = constant(tensor)
            if values is not None and values.ndim > 1:
                line = np.array(values)
                line[np.abs(line) < np.quantile(np.abs(line), 0.3)] = 0
                tensor.values = line
                wanted[node.name, index] = line == 0
    done, row = tuned(3, done=replace(small, graph=sparse))
    assert row.masked == len(wanted) >= 4 and row.epoch
    nodes, old = node_by_name(done.graph), node_by_name(sparse)
    for (name, index), zero in wanted.items():
        values = np.asarray(constant(nodes[name].inputs[index]))
        assert zero.any() and not values[zero].any()
        assert (values != np.asarray(constant(old[name].inputs[index])))[~zero].mean() > 0.9


def test_weights_that_got_worse_are_not_kept() -> None:
    _, small = network()
    done, row = tuned(1, lr=30.0)
    assert done.graph is small.graph and done.masked is small.masked and row.epoch == 0 and row.after == row.before
    assert "the weights before were kept" in str(row.note)


def test_a_diverged_training_keeps_the_weights_before() -> None:
    _, small = network()
    done, row = tuned(3, lr=1e30)
    assert (
        done.graph is small.graph
        and done.masked is small.masked
        and "smaller lr" in str(row.note)
        and "ended after" in str(row.note)
    )


def test_augmentation_follows_from_the_input() -> None:
    pytest.importorskip("torch")
    from sbonnx.training.finetune import augmentation

    def network(dims: str) -> Graph:
        return graphs.load(model(f"agraph (float[{dims}] x) => (float[{dims}] y) {{ y = Relu (x) }}"))

    assert augmentation(network("N,3,32,32"), "auto") == ("flip", "shift", "mixup")
    assert augmentation(network("N,H,W,3"), "auto") == ("flip", "shift", "mixup")
    for other in ("N,3,8,8", "N,16,32,32", "N,3,32", "N,3"):
        assert augmentation(network(other), "auto") == ()
    assert augmentation(network("N,3,32,32"), "none") == ()
    assert augmentation(network("N,3"), "mixup") == ("mixup",)


def test_tensors_that_lost_channels_are_compared_in_part() -> None:
    """The remaining entries of each float tensor have the shape of the pruned one; the stem's are its values."""
    graph, small = network()
    kept = remaining_entries(graph, small.plan)
    names = sorted(kept.keys() & {tensor.name for node in small.graph.nodes for tensor in node.outputs})
    x = {"x": np.concatenate([feed["x"] for feed in feeds(3)])}
    whole, part = (_tensors(each, names, x) for each in (graph, small.graph))
    equal = 0
    for name in names:
        expected = whole[name]
        for axis, places in kept[name]:
            expected = expected.take(places, axis)
        assert expected.shape == part[name].shape != whole[name].shape
        equal += np.allclose(expected, part[name], rtol=1e-5, atol=1e-5)
    assert len(names) > equal >= 2  # the stem reads the images: its weights are not refitted


def _tensors(graph: Graph, names: list[str], x: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    proto = graphs.to_proto(graph)
    proto.graph.output.extend(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in names)
    return run(proto, x)


def test_a_model_that_torch_cannot_train_is_refused_with_its_node() -> None:
    pytest.importorskip("torch")
    text = "agraph (float[N,4] x) => (float[N,4] y) { a = MatMul (x, w)\n y = Mod <fmod = 1> (a, x) }"
    graph = graphs.load(model(text, w=(4, 4)))
    node = graph.nodes[1]
    node.op = "Unknown"
    with pytest.raises(ModelError, match=f"op Unknown .*node '{node.name}'.*not supported in training"):
        require_fine_tuning(graph, SparseFinetune(1))


def test_half_precision_is_refused_by_name() -> None:
    pytest.importorskip("torch")
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { y = MatMul (x, w) }"
    graph = graphs.load(model(text, w=np.ones((4, 4), np.float16)))
    with pytest.raises(ModelError, match="weight 'w' is float16: fine-tuning needs a float32 model"):
        require_fine_tuning(graph, SparseFinetune(1))


def test_a_skipped_layer_is_not_trained() -> None:
    _, small = network()
    name = next(node.name for node in small.graph.nodes if node.op == "Gemm")
    done, row = tuned(2, skip=name)
    assert row.epoch
    before, after = node_by_name(small.graph), node_by_name(done.graph)
    changed = {
        key
        for key, node in after.items()
        for one, other in zip(node.inputs, before[key].inputs, strict=True)
        if constant(one) is not None and not np.array_equal(np.asarray(constant(one)), np.asarray(constant(other)))
    }
    assert name not in changed and len(changed) >= 3


def test_the_whole_call_fine_tunes_and_reports(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    graph, small = network()
    path = tmp_path / "small.onnx"
    images = feeds(100)
    more: dict[str, Any] = {"ratio": 0.5, "refit": False, "threads": 1}
    report = sbonnx.prune(graphs.to_proto(inverted()), images, output=path, finetune=5, augment="none", **more)
    assert report.ok, report.problems
    assert report.tuned is not None and report.tuned.after < report.tuned.before
    assert json.loads(json.dumps(report.to_dict(), default=str))["tuned"]["epochs"] == 5
    assert error(graph, graphs.load(path)) < 0.9 * error(graph, small.graph)
    masked = sbonnx.prune(graphs.to_proto(inverted()), images, masked=True, finetune=5, augment="none", **more)
    x = {"x": np.concatenate([feed["x"] for feed in feeds(9, seed=8)])}
    want, got = run(str(path), x)["y"], run(masked.pruned or "", x)["y"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))


def test_fine_tuning_needs_data() -> None:
    with pytest.raises(DataError, match="fine-tuning needs samples: give calibration data"):
        sbonnx.prune(graphs.to_proto(inverted()), ratio=0.5, finetune=2)


def test_augmentations_are_those_of_the_recipe() -> None:
    pytest.importorskip("torch")
    from sbonnx.training.batches import AUGMENTATIONS

    assert tuple(AUGMENTATIONS) == names.AUGMENTATIONS


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("sbonnx.qat", "sbonnx.training"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(DeviceError, match=r"torch is not installed: pip install 'sbonnx\[qat\]'$"):
        require_fine_tuning(network()[0], SparseFinetune(1))

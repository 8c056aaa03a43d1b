"""`sbonnx.SparseModel`: the life cycle, Sparsebit's removal order, and what is written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx import graph as graphs
from sbonnx.errors import DataError, LifeCycleError, OutputError, RecipeError
from sbonnx.sparse_model import SparseModel
from tests.pruning.test_prune import NET, WEIGHTS, feeds, inverted
from tests.support.models import batchnorm, model, residual, run

SCONFIG = "SPARSER:\n  TYPE: structed\n  STRATEGY: l1norm\n  RATIO: {}\nDEVICE: cpu\n"


@pytest.fixture
def sconfig(tmp_path: Path) -> Path:
    path = tmp_path / "sconfig.yaml"
    path.write_text(SCONFIG.format(0.5))
    return path


def weights(proto: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    """Weight of each convolution by name of the node."""
    values = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    return {node.name: values[node.input[1]] for node in proto.graph.node if node.op_type == "Conv"}


def ancestors_channels(weight: np.ndarray[Any, Any], ratio: float) -> list[int]:
    """Sparsebit's structured l1norm: the int(C * ratio) output channels with the least sum of absolute weights."""
    norms = np.abs(weight.astype(np.float64)).reshape(len(weight), -1).sum(axis=1)
    return sorted(np.argsort(norms, kind="stable")[: int(len(norms) * ratio)].tolist())


def removed_outputs(sparse: SparseModel) -> dict[str, list[int]]:
    assert sparse.pruned is not None
    return {side.layer: list(gone) for side, gone in sparse.pruned.plan.removed.items() if side.direction == "out"}


def test_the_life_cycle(tmp_path: Path, sconfig: Path) -> None:
    graph = inverted()
    source = graphs.to_proto(graph)
    with SparseModel(source, sconfig) as sparse:
        assert set(sparse.disable_sparse_before_add()) == {"Conv_0", "Conv_3"}
        x = feeds(1, seed=3)[0]
        np.testing.assert_allclose(sparse(x)["y"], run(source, x)["y"], rtol=1e-4, atol=1e-5)
        sparse.prepare_calibration()
        for feed in feeds(40):
            sparse(feed)
        found = sparse.calc_params()
        assert [(row.writers, row.after) for row in found.dimensions] == [(("Conv_0", "Conv_3"), 8), (("Conv_1",), 8)]
        assert found.layers
        masked, small = tmp_path / "masked.onnx", tmp_path / "small.onnx"
        sparse.export_onnx(small)
        sparse.export_onnx(masked, masked=True)
        outputs = sparse(x)["y"]
    for path in (small, masked):
        np.testing.assert_allclose(run(onnx.load(path), x)["y"], outputs, rtol=1e-3, atol=1e-4)
    assert weights(onnx.load(small))["Conv_1"].shape == (8, 8, 1, 1)
    assert weights(onnx.load(masked))["Conv_1"].shape == (16, 8, 1, 1)
    with pytest.raises(OutputError, match="exists"):
        sparse.export_onnx(small)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.9])
def test_sparsebits_channels_are_removed(ratio: float, tmp_path: Path) -> None:
    """By norms of the weights before batch norms are folded; int(C * ratio) of each layer, outputs excepted."""
    proto = model(NET, **{**WEIGHTS, **batchnorm("b", 8)})
    path = tmp_path / "sconfig.yaml"
    path.write_text(SCONFIG.format(ratio))
    with SparseModel(proto, path) as sparse:
        sparse.set_ratio("Conv_3", 0.0)
        sparse.calc_params()
        assert removed_outputs(sparse).keys() == {"Conv_1", "Conv_2"}
        gone = removed_outputs(sparse)["Conv_1"]
        assert len(gone) == int(16 * ratio)
    values = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    assert gone == ancestors_channels(values["we"], ratio)


def test_norms_are_those_before_batch_norms_are_folded() -> None:
    net = """agraph (float[N,3,8,8] x) => (float[N,4,8,8] y) {
        c = Conv (x, wc)
        b = BatchNormalization (c, b_gamma, b_beta, b_mean, b_var)
        r = Relu (b)
        y = Conv (r, wy)
    }"""
    weight = np.random.default_rng(0).standard_normal((8, 3, 1, 1)).astype(np.float32)
    scales: dict[str, Any] = {**batchnorm("b", 8), "b_gamma": np.geomspace(0.01, 100, 8).astype(np.float32)}
    proto = model(net, wc=weight, wy=(4, 8, 1, 1), **scales)
    raw, folded = (
        removed_outputs(sparse)["Conv_0"]
        for config in ({"SPARSER": {"RATIO": 0.5}}, {"SPARSE": {"RATIO": 0.5}})
        for sparse in [SparseModel(proto, config)]
        if sparse.calc_params()
    )
    assert raw == ancestors_channels(weight, 0.5)
    assert folded != raw
    with SparseModel(proto, {"SPARSER": {"RATIO": 0.5}}) as sparse:
        assert "BatchNormalization" not in [node.op for node in sparse.calc_params().graph.nodes]


def test_a_layer_that_would_become_empty_is_named() -> None:
    sparse = SparseModel(residual(), {"SPARSER": {"TYPE": "structed", "STRATEGY": "l1norm", "RATIO": 1.0}})
    with pytest.raises(RecipeError, match=r"a ratio of 1 leaves no channels of 'conv2 \+ stem'"):
        sparse.calc_params()


def test_wrong_order_of_calls(tmp_path: Path) -> None:
    with SparseModel(residual(), ratio=0.5) as sparse:
        with pytest.raises(LifeCycleError, match=r"call calc_params\(\) before export_onnx\(\)"):
            sparse.export_onnx(tmp_path / "p.onnx")
        sparse.calc_params()
        with pytest.raises(LifeCycleError, match=r"call set_ratio\(\) before calc_params\(\)"):
            sparse.set_ratio("conv1", 0.0)
        with pytest.raises(LifeCycleError, match=r"call disable_sparse_before_add\(\) before calc_params\(\)"):
            sparse.disable_sparse_before_add()
        with pytest.raises(LifeCycleError, match="was called already"):
            sparse.calc_params()
        sparse.prepare_calibration()
        sparse.set_ratio("conv1", 0.25)
        sparse.calc_params()
        assert len(removed_outputs(sparse)["conv1"]) == 2
    assert not list(tmp_path.iterdir())


def test_patterns_and_ratios_are_checked_at_once() -> None:
    with SparseModel(residual(), ratio=0.5) as sparse:
        with pytest.raises(RecipeError, match=r"'conv9'.*matches no node.*Nearest: 'conv1'"):
            sparse.set_ratio("conv9", 0.5)
        with pytest.raises(RecipeError, match="a share, from 0 to 1"):
            sparse.set_ratio("conv1", -1)
        with pytest.raises(DataError):
            sparse({"z": np.zeros(3, np.float32)})


def test_the_last_ratio_wins() -> None:
    with SparseModel(residual(), ratio=0.5) as sparse:
        sparse.set_ratio("conv*", 0.0)
        sparse.set_ratio("conv1", 0.75)
        sparse.calc_params()
        removed: Mapping[str, list[int]] = removed_outputs(sparse)
        assert {name: len(gone) for name, gone in removed.items()} == {"conv1": 6}


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    files = []
    for number in range(2):
        with SparseModel(graphs.to_proto(inverted()), macs=0.7) as sparse:
            sparse.prepare_calibration()
            for feed in feeds(40):
                sparse(feed)
            sparse.calc_params()
            files.append(sparse.export_onnx(tmp_path / f"{number}.onnx").read_bytes())
    assert files[0] == files[1]


def test_it_is_public() -> None:
    assert sbonnx.SparseModel is SparseModel


@pytest.mark.slow
def test_a_trained_network_loses_sparsebits_channels(pack: Path, sconfig: Path, tmp_path: Path) -> None:
    """ResNet-20, structed 0.5: the first convolution of each block loses the channels that Sparsebit masks."""
    path = pack / "models" / "cifar_resnet20.onnx"
    proto = onnx.load(path)
    with SparseModel(path, sconfig) as sparse:
        kept = set(sparse.disable_sparse_before_add())
        sparse.calc_params()
        removed = removed_outputs(sparse)
        sparse.export_onnx(tmp_path / "small.onnx")
    before, after = weights(proto), weights(onnx.load(tmp_path / "small.onnx"))
    assert len(removed) == 9
    for name, gone in removed.items():
        assert gone == ancestors_channels(before[name], 0.5)
        assert len(after[name]) == len(before[name]) // 2
    assert kept.isdisjoint(removed)

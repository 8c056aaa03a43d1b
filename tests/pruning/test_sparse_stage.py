"""Sparse weights in small networks: which layers, what the file holds, and how much error is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import DataError, RecipeError
from sbonnx.graph import Graph
from sbonnx.linear.zero_patterns import GroupSparsity, SparsityPattern, Unstructured
from sbonnx.options import RunOptions
from sbonnx.pruning.groups.dimensions import dependencies
from sbonnx.pruning.settings import LayerPruning, Pruning
from sbonnx.pruning.sparsity.stage import SparsifiedGraph, sparsify
from tests.pruning.test_prune import error, feeds, inverted
from tests.support.models import model, run
from tests.support.sparse_files import most_in_a_group, stored_weights

TWO_OF_FOUR = GroupSparsity(2, 4)


def sparsified(graph: Graph, pattern: SparsityPattern, *, data: bool = True, **more: Any) -> SparsifiedGraph:
    samples = Samples.of(feeds(), graph, RunOptions(threads=1)) if data else None
    return sparsify(graph, samples, pattern, Pruning(**more))


def file_of(graph: Graph) -> onnx.ModelProto:
    return graphs.to_proto(graph)


@pytest.mark.parametrize("data", [True, False])
def test_two_of_four_in_the_file(data: bool) -> None:
    graph = inverted()
    before = stored_weights(file_of(graph))
    found = sparsified(graph, TWO_OF_FOUR, data=data)
    after = stored_weights(file_of(found.graph))
    assert {name: weight.shape for name, (_, weight) in before.items()} == {
        name: weight.shape for name, (_, weight) in after.items()
    }
    rows = {row.layer: row for row in found.sparse}
    by_output = {node.output[0]: name for name, (node, _) in after.items()}
    assert {name for output, name in by_output.items() if output in ("e", "p", "y")} <= set(rows)
    assert len(rows) == 3
    for name, row in rows.items():
        node, weight = after[name]
        assert most_in_a_group(node, weight, 4) == 2
        assert (weight == 0).sum() == row.zeros == row.values // 2
        assert row.pattern == "2:4" and "256" in row.tensorrt
    whys = {refusal.where: refusal.why for refusal in found.refusals}
    assert len(whys) == 2
    assert sorted(why.split(":")[1].split()[0] for why in whys.values()) == ["depthwise", "reads"]
    for name in whys:
        assert (after[name][1] != 0).all()
    assert bool(found.layers) == data


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pattern", [TWO_OF_FOUR, Unstructured(0.5)])
def test_refit_leaves_less_error_than_magnitude(pattern: SparsityPattern) -> None:
    graph = inverted()
    plain = error(graph, sparsified(inverted(), pattern, refit=False).graph)
    refitted = error(graph, sparsified(inverted(), pattern).graph)
    assert refitted < 0.5 * plain


def test_the_share_of_zeros_is_that_of_each_layer() -> None:
    found = sparsified(inverted(), Unstructured(0.7))
    for row in found.sparse:
        assert row.zeros == int(row.values * 0.7)
        assert row.tensorrt.startswith("no sparse kernels")


@pytest.mark.slow
def test_two_runs_write_the_same_bytes() -> None:
    first, second = (file_of(sparsified(inverted(), TWO_OF_FOUR).graph).SerializeToString() for _ in range(2))
    assert first == second


def test_rows_that_never_fit_are_refused_by_name() -> None:
    proto = model("agraph (float[N,6] x) => (float[N,6] y) { a = MatMul (x, w)\n r = Relu (a)\n y = MatMul (r, v) }",
                  w=(6, 6), v=(6, 6))  # fmt: skip
    with pytest.raises(RecipeError, match=r"2:4.*6 input channels are not a multiple of 4"):
        sparsify(graphs.load(proto), None, TWO_OF_FOUR, Pruning())
    with pytest.raises(RecipeError, match="below 1"):
        sparsified(inverted(), Unstructured(1.0), data=False)


def test_batches_of_matrices_and_transposed_gemm() -> None:
    text = """agraph (float[2,5,4] x) => (float[2,5,8] z) {
        a = MatMul (x, first)
        r = Relu (a)
        b = MatMul (r, w)
        z = Tanh (b)
    }"""
    proto = model(text, first=(4, 8), w=(2, 8, 8))
    graph = graphs.load(proto)
    rng = np.random.default_rng(2)
    data = [{"x": rng.standard_normal((2, 5, 4)).astype(np.float32)} for _ in range(30)]
    samples = Samples.of(data, graph, RunOptions(threads=1))
    found = sparsify(graph, samples, TWO_OF_FOUR, Pruning())
    (row,) = found.sparse
    assert row.zeros == 64
    weight = stored_weights(file_of(found.graph))[row.layer][1]  # (batch, inputs, outputs)
    assert ((weight.reshape(2, 2, 4, 8) != 0).sum(axis=2) == 2).all()
    x = rng.standard_normal((2, 5, 4)).astype(np.float32)
    want, got = run(proto, {"x": x})["z"], run(file_of(found.graph), {"x": x})["z"]
    assert np.square(want - got).mean() < 0.3 * np.square(want).mean()


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["w4a32", "w8a8"])
@pytest.mark.parametrize("rounding", ["gptq", "adaround"])
def test_zeros_are_exact_in_the_quantized_file(bits: str, rounding: str) -> None:
    sparse = file_of(sparsified(inverted(), TWO_OF_FOUR).graph)
    settings = {"W.ROUNDING.TYPE": rounding}
    report = sbonnx.quantize(
        sparse, feeds(), backend="virtual", bits=bits, recipe=settings, verify=False, effort="default"
    )
    assert report.quantized is not None
    before, after = stored_weights(sparse), stored_weights(report.quantized)
    zeros = {name: weight == 0 for name, (_, weight) in before.items() if np.mean(weight == 0) > 0.4}
    assert len(zeros) == 3
    for name, gone in zeros.items():
        node, weight = after[name]
        assert not weight[gone].any()
        assert weight[~gone].any()
        assert most_in_a_group(node, weight, 4) <= 2


def test_settings_of_single_layers() -> None:
    graph = inverted()
    names = [each.node.name for each in dependencies(graph).linears]
    layers = {
        names[1]: LayerPruning(skip=True, why="SPARSE.SPECIFIC[0].e"),
        names[3]: LayerPruning(ratio=0.25, why="SPARSE.SPECIFIC[1].p"),
    }
    found = sparsified(graph, Unstructured(0.5), data=False, layers=layers)
    assert {row.layer: row.zeros / row.values for row in found.sparse} == {names[3]: 0.25, names[4]: 0.5}
    assert "skipped by SPARSE.SPECIFIC[0].e" in {one.where: one.why for one in found.refusals}[names[1]]
    refitted = sparsified(inverted(), Unstructured(0.5), layers=layers)
    assert names[1] not in {row.layer for row in refitted.layers}
    before, after = (stored_weights(file_of(each))[names[1]][1] for each in (graph, refitted.graph))
    np.testing.assert_array_equal(before, after)
    with pytest.raises(RecipeError, match=r"SPECIFIC\[1\].p.RATIO is for unstructured zeros, and TYPE is 2:4"):
        sparsified(inverted(), TWO_OF_FOUR, layers=layers)


@pytest.mark.slow
def test_zeros_by_error_after_refit_are_best() -> None:
    graph = inverted()
    best, output, norms = (
        error(graph, sparsified(inverted(), TWO_OF_FOUR, strategy=name).graph) for name in ("auto", "output", "l1norm")
    )
    assert best < 0.9 * output
    assert best < 0.75 * norms


def test_strategies_are_those_of_weights_and_need_data() -> None:
    with pytest.raises(RecipeError, match="strategy random is for channels"):
        sparsified(inverted(), TWO_OF_FOUR, strategy="random")
    with pytest.raises(RecipeError, match="strategy output finds zeros in the refit"):
        sparsified(inverted(), TWO_OF_FOUR, refit=False, strategy="output")
    with pytest.raises(DataError, match="'obs' reads activations"):
        sparsified(inverted(), TWO_OF_FOUR, data=False, strategy="obs")


@pytest.mark.slow
def test_prune_writes_and_compares_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sparse.onnx"
    report = sbonnx.prune(file_of(inverted()), feeds(), pattern="2:4", output=path, threads=1)
    assert report.ok and report.metrics
    assert [row.pattern for row in report.sparse] == ["2:4"] * 3
    assert any("no kernels for sparse weights" in note for note in report.notes)
    stored = stored_weights(path)
    assert [most_in_a_group(*stored[row.layer], 4) for row in report.sparse] == [2, 2, 2]
    other = sbonnx.prune(file_of(inverted()), feeds(), sparsity=0.5, backend="tensorrt", threads=1)
    assert not any("no kernels" in note for note in other.notes)
    assert [row.zeros / row.values for row in other.sparse] == [0.5] * 3


@pytest.mark.slow
def test_a_recipe_makes_weights_sparse_and_quantizes_them() -> None:
    recipe = {"SPARSE": {"TYPE": "2:4"}, "BACKEND": "tensorrt"}
    report = sbonnx.quantize(file_of(inverted()), feeds(), recipe=recipe, bits="w8a8", verify=False)
    assert report.quantized is not None
    rows = {name: most_in_a_group(*one, 4) for name, one in stored_weights(report.quantized).items()}
    assert list(rows.values()) == [3, 2, 1, 2, 2]


@pytest.mark.slow
def test_a_trained_network(pack: Path, tmp_path: Path) -> None:
    """SparseGPT on one stream reaches 9.7 dB, magnitude 3.9 dB."""
    tools, path = load_pack(pack), tmp_path / "sparse.onnx"
    model = tools.model_path("cifar_resnet20")
    sbonnx.prune(model, tools.load_calib("cifar_resnet20", limit=192), output=path, threads=1, pattern="2:4")
    assert tools.evaluate("cifar_resnet20", str(path), limit=500)["clean:logit_sqnr_db"] > 16
    stored, original = stored_weights(path), stored_weights(model)
    dense, *sparse = stored.values()
    assert (dense[1] != 0).all()
    assert len(sparse) == len(original) - 1 == 19
    for node, weight in sparse:
        assert np.mean(weight == 0) == pytest.approx(0.5, abs=0.01)
        assert most_in_a_group(node, weight, 4) == 2

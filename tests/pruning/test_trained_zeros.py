"""Zeros in training: `--finetune` of sparse weights, quantization-aware training, `SparseModel.init_finetune`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch

import sbonnx
from sbonnx import graph as graphs
from sbonnx import qat
from sbonnx.cli import main
from sbonnx.errors import DataError, LifeCycleError, RecipeError
from sbonnx.qat.module import origin_of
from sbonnx.sparse_model import SparseModel
from tests.pruning.test_prune import feeds, inverted, pruned
from tests.support.models import run
from tests.support.sparse_files import most_in_a_group, stored_weights

GOALS: list[dict[str, Any]] = [{"pattern": "2:4"}, {"sparsity": 0.6}]


@cache
def original() -> onnx.ModelProto:
    return graphs.to_proto(inverted())


@cache
def sparse_model() -> onnx.ModelProto:
    """2:4 by magnitude, without refit."""
    report = sbonnx.prune(original(), pattern="2:4")
    assert report.pruned is not None
    return report.pruned


def zeros_of(model: Any, least: float = 0.25) -> dict[str, np.ndarray[Any, Any]]:
    """Masks of the zeros of each weight with this share of zeros."""
    return {name: weight == 0 for name, (_, weight) in stored_weights(model).items() if np.mean(weight == 0) > least}


def assert_zero(model: Any, zeros: dict[str, np.ndarray[Any, Any]]) -> None:
    """The file has a value of exactly zero wherever `zeros` has."""
    assert len(zeros) == 3
    stored = stored_weights(model)
    for name, gone in zeros.items():
        assert not stored[name][1][gone].any()
        assert stored[name][1][~gone].any()


def distance(model: Any) -> float:
    """Error of the output on other images, relative to the output of the original."""
    x = {"x": np.concatenate([feed["x"] for feed in feeds(40, seed=5)])}
    want, got = (run(each, x)["y"] for each in (original(), model))
    return float(np.square(got - want).sum() / np.square(want).sum())


@pytest.mark.slow
@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_fine_tuning_keeps_the_zeros_of_sparse_weights(goal: dict[str, Any]) -> None:
    more: dict[str, Any] = {**goal, "strategy": "l1norm", "refit": False, "threads": 1}
    plain = sbonnx.prune(original(), feeds(100), **more)
    report = sbonnx.prune(original(), feeds(100), finetune=6, **more)
    assert report.ok, report.problems
    assert report.tuned is not None and report.tuned.epoch > 0 and report.tuned.masked == 3
    assert report.tuned.after < report.tuned.before
    assert_zero(report.pruned, zeros_of(plain.pruned))
    assert [row.zeros for row in report.sparse] == [row.zeros for row in plain.sparse]
    assert distance(report.pruned) < 0.8 * distance(plain.pruned)


@pytest.mark.slow
def test_the_verb_fine_tunes_sparse_weights(tmp_path: Path) -> None:
    model, data, output, page = (tmp_path / name for name in ("m.onnx", "d.npz", "s.onnx", "r.json"))
    onnx.save(original(), model)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(80)]))
    arguments = ["prune", str(model), "--data", str(data), "--split", "1", "-o", str(output), "--pattern", "2:4"]
    assert main([*arguments, "--finetune", "3", "--report", str(page)]) == 0
    report = json.loads(page.read_text())
    assert report["tuned"]["masked"] == 3 and report["tuned"]["after"] <= report["tuned"]["before"]
    stored = stored_weights(output)
    assert [most_in_a_group(*stored[row["layer"]], 4) for row in report["sparse"]] == [2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["lsq", "dorefa", "lsq+"])
def test_quantization_aware_training_keeps_the_zeros_of_a_sparse_model(weights: str, tmp_path: Path) -> None:
    module = qat.prepare(sparse_model(), feeds(64), teacher=original(), bits="w4a8", weights=weights)
    paths = [tmp_path / "before.onnx", tmp_path / "after.onnx"]
    qat.export(module, paths[0], verify=False)
    qat.train(module, feeds(64), epochs=3)
    report = qat.export(module, paths[1], feeds(8))
    assert not [one for one in report.problems if "differs from that of the module" in one]
    for path in paths:
        assert_zero(path, zeros_of(sparse_model()))
    assert distance(str(paths[1])) < distance(str(paths[0]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["inside", "outside"])
def test_adapters_keep_zeros(mode: Any, tmp_path: Path) -> None:
    module = qat.prepare(sparse_model(), feeds(64), bits="w4a8", adapters=qat.Adapters(rank=1, mode=mode),
                         teacher=original())  # fmt: skip
    qat.train(module, feeds(64), epochs=2)
    if mode == "inside":
        qat.export(module, tmp_path / "inside.onnx", verify=False)
        assert_zero(tmp_path / "inside.onnx", zeros_of(sparse_model()))
    qat.merge(module)
    qat.export(module, tmp_path / "merged.onnx", verify=False)
    assert_zero(tmp_path / "merged.onnx", zeros_of(sparse_model()))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("goal", [{"TYPE": "2:4"}, {"RATIO": 0.5}], ids=str)
def test_a_recipe_with_sparse_trains_towards_the_model_before_pruning(goal: dict[str, Any], tmp_path: Path) -> None:
    recipe = {"SPARSE": {**goal, "REFIT": "none", "STRATEGY": "l1norm"}}
    module = qat.prepare(original(), feeds(64), recipe, bits="w8a8")
    x = np.concatenate([feed["x"] for feed in feeds(30, seed=3)])
    want = run(original(), {"x": x})["y"]
    twin = qat.float_twin(module)(torch.from_numpy(x))["y"].numpy()
    np.testing.assert_allclose(twin, want, rtol=0, atol=1e-4 * np.abs(want).max())
    origin = origin_of(module)
    assert origin.teacher is not None and len(origin.teacher.nodes) > 0
    paths = [tmp_path / "before.onnx", tmp_path / "after.onnx"]
    qat.export(module, paths[0], verify=False)
    qat.train(module, feeds(64), epochs=6)
    qat.export(module, paths[1], verify=False)
    assert distance(str(paths[1])) < 0.8 * distance(str(paths[0]))
    if "TYPE" in goal:
        assert_zero(paths[1], zeros_of(sparse_model()))


def test_the_verb_qat_prunes_first_and_trains_towards_the_original(tmp_path: Path) -> None:
    model, data, recipe, output = (tmp_path / name for name in ("m.onnx", "d.npz", "r.yaml", "q.onnx"))
    onnx.save(original(), model)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(64)]))
    recipe.write_text("SPARSE: {TYPE: '2:4', REFIT: none, STRATEGY: l1norm}\n")
    given = ["--data", str(data), "--split", "1", "--recipe", str(recipe), "--bits", "w8a8"]
    assert main(["qat", str(model), *given, "-o", str(output), "--epochs", "3"]) == 0
    assert_zero(output, zeros_of(sparse_model()))
    assert distance(str(output)) < 0.8 * distance(sparse_model())


@pytest.mark.parametrize("goal", [*GOALS, {"ratio": 0.5}], ids=str)
def test_the_module_of_a_sparse_model_is_trained_and_written(goal: dict[str, Any], tmp_path: Path) -> None:
    """The files with removed and with masked channels compute what the trained module does."""
    names = ("before.onnx", "small.onnx", "masked.onnx")
    before, small, masked = paths = [tmp_path / name for name in names]
    x = {"x": np.concatenate([feed["x"] for feed in feeds(20, seed=7)])}
    with SparseModel(original(), strategy="l1norm", refit=False, **goal) as model:
        with pytest.raises(LifeCycleError, match=r"call calc_params\(\) before init_finetune\(\)"):
            model.init_finetune()
        model.calc_params()
        untrained = model(x)["y"]
        model.export_onnx(before)
        module = model.init_finetune()
        np.testing.assert_allclose(model(x)["y"], untrained, rtol=0, atol=1e-4 * np.abs(untrained).max())
        want = run(original(), x)["y"]
        twin = qat.float_twin(module)(torch.from_numpy(x["x"]))["y"].numpy()
        np.testing.assert_allclose(twin, want, rtol=0, atol=1e-4 * np.abs(want).max())
        qat.train(module, feeds(100), epochs=8)
        outputs = model(x)["y"]
        model.export_onnx(small)
        model.export_onnx(masked, masked=True)
        model.prepare_calibration()
        np.testing.assert_allclose(model(x)["y"], want, rtol=0, atol=1e-4 * np.abs(want).max())
    for path in (small, masked):
        np.testing.assert_allclose(run(str(path), x)["y"], outputs, rtol=0, atol=1e-4 * np.abs(outputs).max())
    assert distance(str(small)) < 0.8 * distance(str(before))
    if "ratio" in goal:
        sizes = [sum(weight.size for _, weight in stored_weights(path).values()) for path in paths]
        assert sizes[0] == sizes[1] < sizes[2]
        assert {name for name, gone in zeros_of(masked, 0.0).items() if gone.any()}
    else:
        assert_zero(small, zeros_of(before))
        assert_zero(masked, zeros_of(before))


def test_few_zeros_are_held_and_skipped_layers_are_not_trained(tmp_path: Path) -> None:
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    with SparseModel(original(), sparsity=0.1) as model:
        model.calc_params()
        skipped = model.pruned.sparse[0].layer if model.pruned else ""
    with SparseModel(original(), sparsity=0.1, specific=[{skipped: {"SKIP": True}}]) as model:
        model.calc_params()
        model.export_onnx(before)
        qat.train(model.init_finetune(), feeds(32), epochs=2)
        model.export_onnx(after)
    old, new = stored_weights(before), stored_weights(after)
    zeros = zeros_of(before, 0.05)
    assert len(zeros) == 2 and skipped not in zeros
    for name, gone in zeros.items():
        assert not new[name][1][gone].any() and (new[name][1] != old[name][1]).any()
    np.testing.assert_array_equal(new[skipped][1], old[skipped][1])


@pytest.mark.parametrize("goal", GOALS, ids=str)
def test_a_sparse_model_refits_and_fine_tunes_in_calc_params(goal: dict[str, Any], tmp_path: Path) -> None:
    with SparseModel(original(), finetune=3, threads=1, **goal) as model:
        with pytest.raises(DataError, match="fine-tuning needs samples: give calibration data"):
            model.calc_params()
        model.prepare_calibration()
        for feed in feeds(70):
            model(feed)
        found = model.calc_params()
        assert found.layers and found.tuned is not None and found.tuned.masked == 3
        assert found.tuned.after <= found.tuned.before
        path = model.export_onnx(tmp_path / "s.onnx")
        x = feeds(1, seed=3)[0]
        outputs = model(x)["y"]
    zeros = zeros_of(path)
    assert {name: int(gone.sum()) for name, gone in zeros.items()} == {row.layer: row.zeros for row in found.sparse}
    np.testing.assert_allclose(run(str(path), x)["y"], outputs, rtol=0, atol=1e-4 * np.abs(outputs).max())


def test_ratios_of_layers_are_for_unstructured_zeros() -> None:
    with SparseModel(original(), sparsity=0.5) as model:
        model.set_ratio("Gemm*", 0.25)
        shares = {row.layer: row.zeros / row.values for row in model.calc_params().sparse}
    assert sorted(shares.values()) == [0.25, 0.5, 0.5]
    with SparseModel(original(), pattern="2:4") as model:
        model.set_ratio("Gemm*", 0.25)
        with pytest.raises(RecipeError, match="RATIO is for unstructured zeros, and TYPE is 2:4"):
            model.calc_params()


def test_a_pruned_graph_without_zeros_gets_no_masks() -> None:
    small = graphs.to_proto(pruned(inverted(), ratio=0.5, refit=False).graph)
    module = qat.prepare(small, feeds(16), bits="w8a8")
    assert "masks" not in module.code and not [name for name in module.state_dict() if "mask" in name]

"""A recipe with SPARSE: the model is pruned, then quantized, and the result is compared with the original."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx import graph as graphs
from sbonnx import pipeline
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.held_out import HeldOutSplit, divide
from sbonnx.cli import main
from sbonnx.errors import RecipeError
from sbonnx.pruning.graph_pruning import prune_graph
from sbonnx.stages.state import Request, read_recipe
from tests.pruning.test_prune import feeds, inverted
from tests.support.models import run
from tests.support.values import some

SAMPLES = 80


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its samples."""
    folder = tmp_path_factory.mktemp("pruned")
    model, data = folder / "m.onnx", folder / "d.npz"
    graphs.save(inverted(), model)
    np.savez(data, x=np.concatenate([feed["x"] for feed in feeds(SAMPLES)]))
    return model, data


def held_out(files: tuple[Path, Path]) -> HeldOutSplit:
    graph = graphs.load(files[0])
    return divide(Samples.of(datasets.read(files[1], graph, split=1), graph), 0.0625)


def sqnr(want: onnx.ModelProto, got: onnx.ModelProto, data: Iterable[Mapping[str, Any]] | None = None) -> float:
    """Signal to error of the output in decibel; on other images if no data is given."""
    x = np.concatenate([feed["x"] for feed in data or feeds(40, seed=5)])
    left, right = (run(each, {"x": x})["y"].astype(np.float64) for each in (want, got))
    return float(10 * np.log10(np.square(left).sum() / np.square(left - right).sum()))


@pytest.mark.slow
def test_pruned_then_quantized(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, data = files
    recipe = {"SPARSE": {"BUDGET": {"MACS": 0.7}}}
    small, output, again = (tmp_path / name for name in ("small.onnx", "q.onnx", "again.onnx"))
    report = sbonnx.quantize(model, data, recipe=recipe, output=output, split=1)
    assert report.ok, report.problems
    assert some(report.pruning).macs <= 0.7
    assert some(report.pruning).dimensions and some(report.pruning).layers
    assert report.counts.weights == 5
    # the comparison is with the original, on the samples held out
    original, quantized = onnx.load(model), onnx.load(output)
    figure = some(report.metrics).outputs[0].sqnr_db
    assert figure == pytest.approx(sqnr(original, quantized, held_out(files).judged), abs=0.05)
    # quantization costs little on top of pruning
    sbonnx.prune(model, data, recipe=recipe, split=1, output=small)
    assert sqnr(original, quantized) > sqnr(original, onnx.load(small)) - 1
    sbonnx.quantize(model, data, recipe=recipe, output=again, split=1)
    assert output.read_bytes() == again.read_bytes()


def test_pruning_does_not_see_the_samples_of_verification(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def recorded(graph: Any, fit: Any, settings: Any, judged: Any) -> Any:
        seen.append((fit, judged))
        return prune_graph(graph, fit, settings, judged)

    monkeypatch.setattr("sbonnx.stages.channel_pruning.prune_graph", recorded)
    report = sbonnx.quantize(*files, recipe={"SPARSE": {"RATIO": 0.25}}, split=1)
    parts = held_out(files)
    assert some(report.metrics).held_out == parts.count == 6
    held = {feed["x"].tobytes() for feed in parts.judged}
    assert len(held) == 6
    fit, judged = seen[0]
    assert {feed["x"].tobytes() for feed in judged} == held
    assert len(list(fit.data)) == SAMPLES - 6
    assert not {feed["x"].tobytes() for feed in fit.data} & held


def test_patterns_name_nodes_of_the_original(files: tuple[Path, Path]) -> None:
    """Nodes that fusion removes can be named, and layers keep their names."""
    recipe = {"SPARSE": {"RATIO": 0.5, "SPECIFIC": {"Conv_1": {"RATIO": 0.0}}}, "EXCLUDE": ["Gemm_0", "Flatten_0"]}
    report = sbonnx.quantize(*files, recipe=recipe, split=1)
    after = {row.writers: row.after for row in some(report.pruning).dimensions}
    assert after == {("Conv_0", "Conv_3"): 4, ("Conv_1",): 16}
    assert report.counts.weights == 4


def test_a_newer_opset_and_four_bits(files: tuple[Path, Path]) -> None:
    """The plan of 4 bits raises the opset after pruning."""
    recipe = {"BACKEND": "virtual", "SPARSE": {"RATIO": 0.25}, "W": {"QUANTIZER": {"BIT": 4}}}
    report = sbonnx.quantize(*files, recipe=recipe, split=1)
    assert report.quantized is not None
    assert report.quantized.opset_import[0].version >= 21
    assert (12, 6, 1, 1) in [tuple(each.dims) for each in report.quantized.graph.initializer]
    assert {row.bits for row in report.sites if row.role == "weight"} == {4}


def test_without_data_for_weights_alone(files: tuple[Path, Path]) -> None:
    recipe = {"MODE": "weight_only", "BACKEND": "virtual", "SPARSE": {"RATIO": 0.5}}
    report = sbonnx.quantize(files[0], None, recipe=recipe)
    assert [row.after for row in some(report.pruning).dimensions] == [4, 8]


@pytest.mark.slow
def test_a_search_works_on_the_pruned_model(files: tuple[Path, Path]) -> None:
    report = sbonnx.quantize(*files, recipe={"SPARSE": {"RATIO": 0.5}}, average_bits=6, backend="virtual", split=1)
    assert some(report.search).mixed
    assert [row.after for row in some(report.pruning).dimensions] == [4, 8]
    assert report.quantized is not None
    assert {tuple(each.dims) for each in report.quantized.graph.initializer} >= {(8, 4, 1, 1)}


def test_a_plan_says_that_it_is_not_pruned(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(files[0]), "--set", "SPARSE.RATIO=0.5"]) == 0
    assert "nothing is pruned without a run on data" in " ".join(capsys.readouterr().out.split())


def test_the_verb_shows_what_remains(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(files[0]), "--data", str(files[1]), "--split", "1", "--set", "SPARSE.RATIO=0.5"]
    output, page = tmp_path / "q.onnx", tmp_path / "r.json"
    assert main([*arguments, "-o", str(output), "--report", str(page)]) == 0
    assert "of the multiplications remain" in capsys.readouterr().out
    assert json.loads(page.read_text())["pruning"]["plan"]


@pytest.mark.parametrize(
    ("sparse", "why"),
    [
        ({"STRATEGY": "l1norm"}, "'SPARSE' in the recipe has no goal"),
        ({"RATIO": 0.5, "BUDGET": {"MACS": 0.5}}, "has 2 goals"),
        ({"RATIO": 1}, "a ratio of 1 leaves no channels of 'Conv_"),
    ],
)
def test_wrong_sections_leave_no_file(
    files: tuple[Path, Path], tmp_path: Path, sparse: dict[str, Any], why: str
) -> None:
    with pytest.raises(RecipeError, match=why):
        sbonnx.quantize(*files, recipe={"SPARSE": sparse}, output=tmp_path / "q.onnx", split=1)
    assert not list(tmp_path.iterdir())


def test_quant_model_says_where_to_prune(files: tuple[Path, Path]) -> None:
    with pytest.raises(RecipeError, match="QuantModel cannot prune"):
        sbonnx.QuantModel(files[0], {"SPARSE": {"RATIO": 0.5}})


@pytest.mark.slow
def test_without_a_goal_nothing_changes(files: tuple[Path, Path]) -> None:
    found = [sbonnx.quantize(*files, recipe=recipe, split=1) for recipe in (None, {"SPARSER": {"RATIO": 0}})]
    assert not found[1].pruning
    assert found[0].quantized == found[1].quantized


@pytest.mark.slow
def test_a_trained_network_pruned_then_quantized(pack: Path, tmp_path: Path) -> None:
    """Quantization costs ResNet-20 at most 0.3 dB on top of pruning."""
    model = pack / "models" / "cifar_resnet20.onnx"
    tools = load_pack(pack)
    data = list(tools.load_calib("cifar_resnet20", limit=64))
    recipe, rules = read_recipe({"SPARSE": {"BUDGET": {"MACS": 0.75}}}, None, {"threads": 1})
    request = pipeline.pruned(Request(model, recipe, rules, data=data))
    assert request.pruned is not None
    assert request.pruned.report.macs <= 0.75
    report = pipeline.quantize(request).report
    assert report.ok, report.problems
    assert report.quantized is not None
    figures = []
    for number, proto in enumerate((request.pruned.proto, report.quantized)):
        onnx.save(proto, tmp_path / f"{number}.onnx")
        metrics = tools.evaluate("cifar_resnet20", str(tmp_path / f"{number}.onnx"), limit=200, threads=1)
        figures.append(next(value for key, value in metrics.items() if key.endswith("db")))
    assert figures[1] > figures[0] - 0.3
    assert figures[0] > 8

"""The section SPARSE, Sparsebit's section SPARSER, and the pruning settings that they give for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sbonnx import graph as graphs
from sbonnx.errors import RecipeError
from sbonnx.linear.zero_patterns import GroupSparsity, Unstructured
from sbonnx.planning.node_infos import node_infos
from sbonnx.pruning.criteria import CRITERIA
from sbonnx.pruning.settings import LayerPruning, Pruning, pruning_of
from sbonnx.recipe import Recipe, load, yaml_text
from sbonnx.recipe.sections.base import schema_of
from sbonnx.recipe.sections.sparsity import Sparse, SparseFinetune
from sbonnx.recipe.sections.whole import KEYS, PRUNING_FORMS
from tests.support.models import residual


def settings(sparse: dict[str, Any] | Recipe) -> Pruning:
    """Pruning settings for a network with the layers stem, conv1, conv2 and fc."""
    graph = graphs.load(residual())
    recipe = sparse if isinstance(sparse, Recipe) else load({"SPARSE": sparse})
    resolved, _ = recipe.for_model(node_infos(graph), [])
    return pruning_of(resolved, graph)


def test_off_by_default() -> None:
    recipe = load()
    assert not recipe.sparse.wanted
    with pytest.raises(RecipeError, match="needs a goal"):
        settings(recipe)


def test_strategies_are_those_of_pruning() -> None:
    allowed = schema_of(Sparse)["properties"]["STRATEGY"]["anyOf"][0]["enum"]
    assert set(allowed) == {"auto", *CRITERIA}


def test_keywords_of_prune_are_keys() -> None:
    assert set(PRUNING_FORMS.values()) <= set(KEYS)


def test_the_section_sets_every_field() -> None:
    section = {"BUDGET": {"SIZE": 0.4}, "STRATEGY": "output", "MULTIPLE": 4, "LEAST": 0.2, "REFIT": False}
    assert settings(section) == Pruning("output", size=0.4, multiple=4, least=0.2, refit=False)
    assert settings({"RATIO": 0.25}) == Pruning(ratio=0.25)
    assert settings({"BUDGET": {"MACS": 0.75}}) == Pruning(macs=0.75)


def test_fine_tuning_is_off_without_epochs() -> None:
    assert settings({"RATIO": 0.25, "FINETUNE": {"LR": 0.1}}).finetune is None
    chosen = settings({"RATIO": 0.25, "FINETUNE": {"EPOCHS": 7, "LR": 0.1, "AUGMENT": ["Flip", "mixup"]}}).finetune
    assert chosen == SparseFinetune(7, 0.1, "flip,mixup")
    assert settings({"RATIO": 0.25, "FINETUNE": {"EPOCHS": 1, "AUGMENT": "None"}}).finetune == SparseFinetune(
        1, augment="none"
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"EPOCHS": -1}, "SPARSE.FINETUNE.EPOCHS.*0 or more"),
        ({"EPOCHS": 1, "LR": 0}, "SPARSE.FINETUNE.LR.*above 0"),
        ({"EPOCHS": 1, "AUGMENT": "flop"}, "SPARSE.FINETUNE.AUGMENT.*must be auto, none, or some of flip, shift"),
        ({"EPOCHS": 1, "AUGMENT": "auto,flip"}, "SPARSE.FINETUNE.AUGMENT.*must be auto, none, or some of"),
    ],
)
def test_wrong_values_of_fine_tuning(section: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load({"SPARSE": {"RATIO": 0.25, "FINETUNE": section}})


@pytest.mark.parametrize("form", ["mapping", "list", "pairs"])
def test_specific_is_resolved_on_node_names(form: str) -> None:
    entries: Any = {"conv2": {"RATIO": 0.5, "STRATEGY": "l2norm"}, "op:Conv": {"SKIP": True}}
    if form == "list":
        entries = [{pattern: change} for pattern, change in entries.items()]
    elif form == "pairs":
        entries = [{"conv2": ["RATIO", 0.5, "STRATEGY", "l2norm"]}, {"op:Conv": ["SKIP", "true"]}]
    layers = settings({"RATIO": 0.3, "SPECIFIC": entries}).layers
    assert layers["conv2"] == LayerPruning(0.5, "l2norm", why=layers["conv2"].why)
    assert {name for name, layer in layers.items() if layer.skip} == {"stem", "conv1"}
    assert layers["conv1"].why.startswith("SPARSE.SPECIFIC[")


@pytest.mark.parametrize(
    ("sparse", "why"),
    [
        ({"RATIO": 0.5, "BUDGET": {"MACS": 0.5}}, "has 2 goals, BUDGET.MACS, RATIO.*Drop the others"),
        (
            {"STRATEGY": "obs"},
            "'SPARSE' in the recipe has no goal.*Set RATIO, BUDGET.MACS, .* MAX_LOSS or SPARSITY",
        ),
        ({"RATIO": 0}, "needs a goal.*; SPARSE.RATIO is 0"),
        ({"RATION": 0.5}, "'SPARSE.RATION' .*Did you mean RATIO?"),
        ({"RATIO": "half"}, "'SPARSE.RATIO' .*a share, from 0 to 1, got 'half'"),
        ({"BUDGET": {"MACS": 1}}, "'SPARSE.BUDGET.MACS' .*between 0 and 1"),
        ({"STRATEGY": "wanda"}, "must be auto, obs, output, l1norm, l2norm or random"),
        ({"TYPE": "dense"}, "must be structured, unstructured or N:M such as 2:4"),
        ({"TYPE": "4:2"}, "must be structured, unstructured or N:M such as 2:4"),
        ({"TYPE": "2:4", "RATIO": 0.5}, "has 2 goals, RATIO, TYPE"),
        ({"TYPE": "2:4", "SPECIFIC": {"conv1": {"RATIO": 2}}}, "a share, from 0 to 1"),
        ({"TYPE": "unstructured", "BUDGET": {"MACS": 0.5}}, "BUDGET.MACS.*counts channels"),
        ({"SPARSITY": 1}, "'SPARSE.SPARSITY' .*between 0 and 1"),
        ({"MULTIPLE": 0}, "'SPARSE.MULTIPLE' .*1 or more"),
        ({"REFIT": "twice"}, "must be pruned or none"),
        ({"RATIO": 0.5, "SPECIFIC": {"conv9": {"RATIO": 0.1}}}, "'conv9'.*matches no node.*Nearest: 'conv1'"),
        ({"RATIO": 0.5, "SPECIFIC": {"op:Relu": {"RATIO": 0.1}}}, "'op:Relu'.*matches no layer that can be pruned"),
        ({"RATIO": 0.5, "SPECIFIC": {"tensor:x": {"RATIO": 0.1}}}, "is a pattern for tensors, and this key has nodes"),
        ({"RATIO": 0.5, "SPECIFIC": {"conv1": {"LEAST": 0.1}}}, "is not a key.*Keys here: RATIO, STRATEGY, SKIP"),
    ],
)
def test_wrong_sections_are_one_error(sparse: dict[str, Any], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        settings(sparse)


def test_patterns_of_zeros(tmp_path: Path) -> None:
    assert settings({"RATIO": 0.5}).pattern is None
    assert settings({"SPARSITY": 0.5}).pattern == Unstructured(0.5)
    assert settings({"TYPE": "unstructured", "RATIO": 0.25}).pattern == Unstructured(0.25)
    path = tmp_path / "sconfig.yaml"
    path.write_text('SPARSER: {TYPE: "unstructed", STRATEGY: "l1norm", RATIO: 0.5}\n')
    assert settings(load(path)) == Pruning("l1norm", ratio=0.5, pattern=Unstructured(0.5))
    for text in ("2:4", "'2:4'", "1:4", "4:8"):  # YAML reads the first as a number in base 60
        path.write_text(f"SPARSE:\n  TYPE: {text}\n")
        recipe = load(path)
        assert str(settings(recipe).pattern) == text.strip("'")
        assert load(recipe.to_dict()) == recipe
        again = tmp_path / "again.yaml"
        again.write_text(yaml_text.dump(recipe.to_dict()))
        assert load(again).sparse.type == text.strip("'")
    assert settings(load(overrides=["SPARSE.TYPE=2:4"])).pattern == GroupSparsity(2, 4)


@pytest.mark.parametrize("spelling", ["structed", "structured", "STRUCTED"])
def test_the_file_of_sparsebit_is_read_unchanged(spelling: str, tmp_path: Path) -> None:
    path = tmp_path / "sconfig.yaml"
    path.write_text(f'SPARSER:\n    TYPE: "{spelling}"\n    STRATEGY: "l1norm"\n    RATIO: 0.5\nDEVICE: cpu\n')
    recipe = load(path)
    assert settings(recipe) == Pruning("l1norm", ratio=0.5)
    assert recipe.device == "cpu"
    assert load(recipe.to_dict()) == recipe
    assert settings(load(path, overrides={"SPARSER.RATIO": 0.25})).ratio == 0.25


def test_sparsebits_defaults_remove_nothing() -> None:
    recipe = load({"sparser": {"type": "structed", "strategy": ""}})
    assert recipe.sparse.strategy == "l1norm"
    assert recipe.sparse.ratio == 0
    assert not recipe.sparse.wanted


def test_errors_name_the_line_of_sparsebits_key(tmp_path: Path) -> None:
    path = tmp_path / "sconfig.yaml"
    path.write_text("DEVICE: cpu\nSPARSER:\n  TYPE: structed\n  RATIO: 7\n")
    with pytest.raises(RecipeError, match=r"'SPARSE.RATIO' in .*sconfig.yaml line 4 must be a share"):
        load(path)
    with pytest.raises(RecipeError, match=r"'SPARSER' .*SPARSE, which is given too: drop one"):
        load({"SPARSER": {"RATIO": 0.5}, "SPARSE": {"RATIO": 0.5}})

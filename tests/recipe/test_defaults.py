"""Every way to give a recipe resolves to the same defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from sbonnx import backends
from sbonnx.batch.jobs.jobfile import read_jobs
from sbonnx.batch.jobs.steps import recipe_of
from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe, annotated_default, as_yaml, load
from sbonnx.recipe.defaults import EFFORTS, by_width, widths_of
from sbonnx.recipe.documentation import maker_by_key
from sbonnx.stages.state import read_recipe

BACKENDS = ("onnxruntime", "tensorrt", "tensorrt@10", "virtual")
WISHES: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "w4a8": {"bits": "w4a8"},
    "w8a16": {"bits": "w8a16"},
    "w4a4": {"bits": 4},
    "weight only": {"mode": "weight_only"},
    "weight only, 8": {"mode": "weight_only", "w_bit": 8},
    "dynamic": {"mode": "dynamic"},
    "half": {"high_precision": "fp16"},
    "fp8": {"bits": "fp8"},
}


def accepted(backend: str, wishes: str) -> bool:
    """Whether the backend supports the wishes."""
    try:
        load(None, backend=backend, overrides=WISHES[wishes])
    except RecipeError:
        return False
    return True


CASES = [(backend, wishes) for backend in BACKENDS for wishes in WISHES if accepted(backend, wishes)]


def job(folder: Path, backend: str, wishes: Mapping[str, Any], recipe: Path | None) -> Recipe:
    """The recipe of a job."""
    (folder / "m.onnx").touch()
    entry = {"model": "m.onnx", "backend": backend, "set": dict(wishes), **({"recipe": str(recipe)} if recipe else {})}
    file = folder / "jobs.yaml"
    file.write_text(yaml.safe_dump({"output": "out", "jobs": [entry]}))
    return recipe_of(read_jobs(file)[2][0])


def every_way(folder: Path, backend: str, wishes: Mapping[str, Any]) -> dict[str, Recipe]:
    """The recipe for a backend and some wishes, by the way to give it."""
    pairs = [f"{key}={value}" for key, value in wishes.items()]
    files = {"empty": "", "comments": "# nothing\n", "braces": "{}\n", "backend": f"BACKEND: {backend}\n"}
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    recipe = load(None, backend=backend, overrides=wishes)
    return {
        "keywords": read_recipe(None, backend, wishes)[0],
        "flags": read_recipe(None, backend, pairs)[0],
        "--set BACKEND": read_recipe(None, None, [f"BACKEND={backend}", *pairs])[0],
        "empty dict": read_recipe({}, backend, wishes)[0],
        "dict": read_recipe(recipe.given, None, {})[0],
        **{f"file: {name}": read_recipe(folder / f"{name}.yaml", backend, pairs)[0] for name in files},
        "file with only BACKEND": read_recipe(folder / "backend.yaml", None, wishes)[0],
        "a recipe": read_recipe(load(None), backend, wishes)[0],
        "a recipe for another backend": read_recipe(
            load(None, backend="virtual"), None, {**wishes, "backend": backend}
        )[0],
        "resolved": read_recipe(yaml.safe_load(as_yaml(recipe)), None, {})[0],
        "job": job(folder, backend, wishes, None),
        "job with a file": job(folder, backend, wishes, folder / "empty.yaml"),
    }


@pytest.mark.parametrize(("backend", "wishes"), CASES)
def test_every_way_resolves_to_the_same(tmp_path: Path, backend: str, wishes: str) -> None:
    expected = load(None, backend=backend, overrides=WISHES[wishes])
    found = every_way(tmp_path, backend, WISHES[wishes])
    assert {name: recipe.to_dict() for name, recipe in found.items()} == dict.fromkeys(found, expected.to_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_printed_default_is_the_default(tmp_path: Path, backend: str) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(annotated_default(backend))
    assert load(file) == load(None, backend=backend)
    assert load(file, overrides={"bits": "w8a8"}) == load(None, backend=backend)


def test_the_backend_without_a_word() -> None:
    assert load(None).backend == load({}).backend == load("auto").backend == "onnxruntime"


def test_every_default_is_a_key() -> None:
    """A misspelt key in the table would be refused as a user's would, but only where that row is used."""
    for backend, mode in [(name, mode) for name in backends.BACKENDS for mode in backends.BACKENDS[name].modes]:
        limits = backends.BACKENDS[backend].modes[mode]
        resolved = load({"BACKEND": backend, "MODE": mode}).to_dict()
        for key, value in limits.defaults.items():
            assert resolved[key] == value
        for name, side in limits.sides.items():
            assert side.width in side.bits and side.scheme in side.schemes
            assert resolved[name]["QSCHEME"] == side.scheme
            assert resolved[name]["QUANTIZER"]["BIT"] == side.width
            assert resolved[name]["OBSERVER"]["TYPE"] == side.observer
    assert set(maker_by_key().values()) == {"ancestor", "new"}


def test_widths_are_in_the_document() -> None:
    """When this fails: the rows of sbonnx.recipe.defaults.EFFORTS are in docs/recipe.md, below "By width"."""
    text = (Path(__file__).parents[2] / "docs" / "recipe.md").read_text()
    for effort, widths in EFFORTS.items():
        low = 2
        for row in widths:
            rounding = f"`{row.rounding}`" + (" of convolutions" if row.ops else "")
            search = ", ".join(str(row.search.get(key, "")) for key in ("beams", "steps", "sweeps"))
            search = search if row.search else "16, 8, 20" if row.rounding == "gptq" else ""
            cells = (f"`{effort}`", f"{low} to {row.below - 1}", f"`{row.scheme}`", rounding, f"`{row.scale}`", search)
            line = "| " + " | ".join((*cells, str(row.samples or "all"))) + " |"
            assert line in text, line
            assert all(by_width(bits, widths) is row for bits in range(low, row.below))
            low = row.below
        assert low == 17


@pytest.mark.parametrize("effort", EFFORTS)
def test_effort(effort: str) -> None:
    recipe = load({"EFFORT": effort})
    conv, product = (recipe.settings("w", node="a", op=op, tensor="w") for op in ("Conv", "MatMul"))
    assert conv.rounding_name == ("nearest" if effort == "fast" else "gptq") and product.rounding_name == "nearest"
    assert recipe.rounding_samples == {"fast": 16, "default": 32, "best": None}[effort]
    assert conv.rounding_options == ({"beams": 4, "steps": 0, "sweeps": 2, **PLAIN} if effort == "default" else PLAIN)
    low = load({"EFFORT": effort, "W.QUANTIZER.BIT": 4, "W.ROUNDING.GPTQ.BEAMS": 2})
    product = low.settings("w", node="a", op="MatMul", tensor="w")
    assert product.rounding_name == "gptq" and product.rounding_options["beams"] == 2
    for mode in ("dynamic", "weight_only"):  # data are optional there
        assert all(row.rounding == "nearest" for row in widths_of(effort, mode) if row.below > 8)
    assert load({"EFFORT": effort, "CALIBRATION.MOMENTS.SAMPLES": 0}).rounding_samples is None
    assert load({"EFFORT": effort, "CALIBRATION.MOMENTS.SAMPLES": 5}).rounding_samples == 5


PLAIN: Mapping[str, Any] = {"damping": 0.01, "order": "pivot"}


AUTO_MEANS = [
    # the rounding goes by the narrowest of the weight, W and A; scheme and scale by the width of the weight
    ({"W.QUANTIZER.BIT": 4}, (False, "gptq", "search"), (True, "gptq", "observer")),
    ({"W.QUANTIZER.BIT": 4, "W.QUANTIZER.DISABLE": True}, (False, "gptq", "search"), (True, "gptq", "observer")),
    ({"A.QUANTIZER.BIT": 4}, (True, "gptq", "observer"), (True, "gptq", "observer")),
    ({"A.QUANTIZER.BIT": 0}, (True, "gptq", "observer"), (True, "gptq", "observer")),
    ({}, (True, "gptq", "observer"), (True, "gptq", "observer")),
    ({"EFFORT": "fast"}, (True, "nearest", "observer"), (True, "nearest", "observer")),
]


@pytest.mark.parametrize(("source", "whole", "raised"), AUTO_MEANS)
def test_what_auto_means(source: dict[str, Any], whole: tuple[Any, ...], raised: tuple[Any, ...]) -> None:
    recipe = load({**source, "W.SPECIFIC": [{"a": {"QUANTIZER": {"BIT": 8, "DISABLE": False}}}], "LAST_BITS": {"W": 8}})
    found = recipe.settings("w", node="b", op="Conv", tensor="w")
    assert (found.symmetric, found.rounding_name, found.scale_name) == whole
    entry = recipe.settings("w", node="a", op="Conv", tensor="w")
    last = recipe.settings("w", node="c", op="Conv", tensor="w", place="last")
    for found in (entry, last)[: 1 if "W.QUANTIZER.DISABLE" in source else 2]:
        assert (found.symmetric, found.rounding_name, found.scale_name) == raised


def test_activations_that_stay_float_do_not_count() -> None:
    recipe = load({"MODE": "weight_only", "W.QUANTIZER.BIT": 8, "A.QUANTIZER.BIT": 4}, backend="virtual")
    assert recipe.settings("w", node="a", op="MatMul", tensor="w").rounding_name == "nearest"

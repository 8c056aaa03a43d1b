"""The table of keys, the annotated default and the JSON schema tell the same story as the code."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sbonnx.backends import BACKENDS, ModeLimits, SideLimits
from sbonnx.backends.virtual import VIRTUAL
from sbonnx.errors import RecipeError
from sbonnx.recipe import annotated_default, json_schema, key_facts, keywords, limits_table, load, table
from sbonnx.recipe.sections.whole import KEYS, SHORT_FORMS
from sbonnx.recipe.yaml_text import parse
from tests.recipe.keyword_source import source

DOC = Path(__file__).resolve().parents[2] / "docs" / "recipe.md"

GOOD: list[str] = [
    "BACKEND: tensorrt\nW: {QSCHEME: per-channel-symmetric, QUANTIZER: {TYPE: LSQ, BIT: 8}, OBSERVER: {TYPE: MSE}}",
    "A:\n  OBSERVER: {LAYOUT: NLC}\n  SPECIFIC: [{'*ln*': [QUANTIZER.DISABLE, true], x: {QUANTIZER.BIT: 4}}]",
    "FIRST_BITS: w8a8\nLAST_BITS: w8\nEXCLUDE: op:Softmax\nINCLUDE: [a, b]\nRANGES: {x: [0, 1]}",
    "FIRST_BITS: {W: 8}\nSHARED_SCALES: [[a, b]]\nQUANTIZE_INPUTS_OF: {ADD: true}\nDEVICE: cuda:0\nSAMPLES: 3",
    "CALIBRATION: {ASYM: true, GRANULARITY: Layer, THREADS: 1, CACHE: here, FEEDBACK: {h: h0}, SEED: 1}",
    "CALIBRATION: {ASYM: {ENABLE: true, RANGES: false}, PICK: random, MEMORY: 1 GiB, CACHE: none}",
    "BACKEND: tensorrt\nVERSION: 8.6",
    "SPARSE: {TYPE: Structed, RATIO: 0.5, REFIT: false, SPECIFIC: {a: {RATIO: 0}, b: [SKIP, true]}}",
    "SPARSE: {BUDGET: {MACS: 0.5}, STRATEGY: OBS, MULTIPLE: 8, REFIT: pruned, SPECIFIC: [{a: {SKIP: true}}]}",
    "BACKEND: virtual\nW: {BLOCK_SIZE: 32, QUANTIZER: {BIT: 4}, SPECIFIC: [{x: {BLOCK_SIZE: none}}]}",
    "BACKEND: virtual\nW: {QSCHEME: per-channel-symmetric, QUANTIZER: {DTYPE: FP8}}",
]
BAD: list[str] = [
    "BACKEND: tflite",
    "W: {QUANTIZER: {BIT: eight}}",
    "W: {QUANTIZER: {BITS: 8}}",
    "W: {QUANTIZER: [8]}",
    "A: {OBSERVER: {PERCENTILE: {ALPHA: 99.9}}}",
    "FIRST_BITS: 8w",
    "A: {SPECIFIC: [{x: {QUANTIZER: {BITT: 3}}}]}",
    "RANGES: {x: [0]}",
    "W: {OBSERVER: {MOVING_AVERAGE: {EMA_RATIO: 0.9}}}",
    "SPARSE: {TYPE: dense}",
    "SPARSE: {RATIO: half}",
    "SPARSE: {BUDGET: {MACS: 1}}",
    "SPARSE: {STRATEGY: wanda}",
    "SPARSE: {MULTIPLE: 0}",
    "SPARSE: {SPECIFIC: [{a: {RATE: 0.5}}]}",
    "CALIBRATION: {ASYM: maybe}",
    "CALIBRATION: {FEEDBACK: {h: 1}}",
    "CALIBRATION: {THREADS: 0}",
    "CALIBRATION: {PICK: last}",
    "BACKEND: tensorrt\nVERSION: nine",
    "W: {BLOCK_SIZE: 48}",
    "W: {QUANTIZER: {DTYPE: fp4}}",
]


def test_the_document_has_the_table() -> None:
    """When this fails: replace the table in docs/recipe.md by the text of sbonnx.recipe.table()."""
    assert table() in DOC.read_text()


def test_the_document_has_every_limit() -> None:
    """When this fails: replace the table in docs/recipe.md by the text of sbonnx.recipe.limits_table()."""
    assert limits_table() in DOC.read_text()


def test_a_backend_of_a_plugin_documents_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {
        "static": ModeLimits(
            SideLimits((4, 8), ("per-channel-symmetric",), "per-channel-symmetric"),
            SideLimits((8,), ("per-tensor-symmetric",), "per-tensor-symmetric", observer="percentile"),
        )
    }
    monkeypatch.setitem(BACKENDS, "mcu", replace(VIRTUAL, name="mcu", modes=modes))
    facts = {
        key: key_facts(key) or {} for key in ("W.QUANTIZER.BIT", "A.QUANTIZER.BIT", "A.OBSERVER.TYPE", "A.QSCHEME")
    }
    assert "; mcu: 0, 4, 8" in facts["W.QUANTIZER.BIT"]["values"]
    assert "tensorrt, openvino and mcu: 0, 8" in facts["A.QUANTIZER.BIT"]["values"]
    assert facts["A.OBSERVER.TYPE"]["default"] == "mse; virtual: minmax; mcu: percentile"
    assert facts["A.QSCHEME"]["default"] == "per-tensor-affine; tensorrt and mcu: per-tensor-symmetric"
    assert "| `mcu` | static | 4, 8 | per-channel-symmetric | 8 | per-tensor-symmetric |" in limits_table()
    assert load(None, backend="mcu").a.observer.type == "percentile"
    with pytest.raises(RecipeError, match="must be 4 or 8 for the backend mcu"):
        load(None, backend="mcu", overrides={"bits": 5})


def test_the_document_has_every_short_form() -> None:
    text = DOC.read_text()
    for name, key in SHORT_FORMS.items():
        assert f"| `{name}` | `{key}` |" in text


def test_the_example_of_the_document_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(blocks) == 1
    (tmp_path / "r.yaml").write_text(blocks[0])
    recipe = load(tmp_path / "r.yaml")
    assert recipe.settings("w", node="/conv1/Conv", op="Conv", tensor="w").observer == "mse"


def test_short_forms_lead_to_keys() -> None:
    assert set(SHORT_FORMS.values()) <= set(KEYS)


def test_typed_keywords_are_those_of_the_recipe() -> None:
    """When this fails: run ``python -m tests.recipe.keyword_source``.

    Editors complete all short forms and top-level keys; BACKEND and VERIFY are parameters of their own.
    """
    assert Path(keywords.__file__ or "").read_text() == source()
    own = {key.partition(".")[0].lower() for key in KEYS} - {"backend", "verify"}
    assert set(keywords.RecipeKeywords.__annotations__) == {*SHORT_FORMS, "bits", *own}


@pytest.mark.parametrize("backend", BACKENDS)
def test_annotated_default_is_the_default(backend: str, tmp_path: Path) -> None:
    text = annotated_default(backend)
    (tmp_path / "r.yaml").write_text(text)
    assert load(tmp_path / "r.yaml") == load(None, backend=backend)
    assert max(map(len, text.splitlines())) <= 120
    for line in table().splitlines()[2:]:
        name = line.split("`")[1].rsplit(".", 1)[-1]
        assert re.search(rf"^ *(# )?{name}: ", text, re.MULTILINE), name


def test_examples_of_the_annotated_default_are_valid() -> None:
    """What stands behind a # loads as well, once it is uncommented."""
    text = annotated_default("virtual")
    text = re.sub(r"^( *)(\w+): (\[\]|\{\})  # such as (.*)$", r"\1\2: \4", text, flags=re.MULTILINE)
    text = re.sub(r"^( *)# ([A-Z_]+): (.*?)  # default.*$", r"\1\2: \3", text, flags=re.MULTILINE)
    value, _ = parse(text, "text")
    del value["VERSION"]  # TensorRT's alone
    recipe = load(value)
    assert recipe.samples == 256 and recipe.first_bits.a == 8 and len(recipe.exclude) == 3
    assert recipe.quantize_inputs_of.softmax is True and recipe.ranges and recipe.a.specific


def valid(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """As much of JSON schema as ours uses."""
    if "$ref" in schema:
        return valid(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value, root)
    kinds = schema.get("type")
    types: dict[str, Any] = {"string": str, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    types |= {"integer": int, "number": (int, float)}
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(
        isinstance(value, types[k]) and (k == "boolean" or not isinstance(value, bool)) for k in kinds
    ):
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return False
    if "anyOf" in schema and not any(valid(inner, value, root) for inner in schema["anyOf"]):
        return False
    if isinstance(value, int | float) and (
        value < schema.get("minimum", value)
        or value <= schema.get("exclusiveMinimum", value - 1)
        or value >= schema.get("exclusiveMaximum", value + 1)
    ):
        return False
    if isinstance(value, list):
        right_length = schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value))
        return right_length and all(valid(schema.get("items", {}), item, root) for item in value)
    return not isinstance(value, dict) or all(valid(part_for(schema, name), value[name], root) for name in value)


def part_for(schema: dict[str, Any], name: str) -> dict[str, Any]:
    if name in schema.get("properties", {}):
        found: dict[str, Any] = schema["properties"][name]
        return found
    for pattern, inner in schema.get("patternProperties", {}).items():
        if re.search(pattern, name):
            return dict(inner)
    extra = schema.get("additionalProperties", {})
    return {"enum": []} if extra is False else dict(extra)


@pytest.mark.parametrize("text", [*GOOD, *map(annotated_default, BACKENDS)])
def test_the_schema_accepts_what_loads(text: str) -> None:
    value, _ = parse(text, "text")
    value = without_empty(value)
    assert load(value) is not None
    assert valid(json_schema(), value, json_schema())


@pytest.mark.parametrize("text", BAD)
def test_the_schema_refuses_what_does_not_load(text: str) -> None:
    value, _ = parse(text, "text")
    with pytest.raises(Exception, match="recipe"):
        load(value)
    assert not valid(json_schema(), value, json_schema())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("jsonschema") is None, reason="jsonschema is not installed")
def test_the_schema_with_a_real_validator() -> None:
    validator = importlib.import_module("jsonschema").Draft202012Validator
    validator.check_schema(json_schema())
    for text in GOOD:
        validator(json_schema()).validate(parse(text, "text")[0])
    assert not any(validator(json_schema()).is_valid(parse(text, "text")[0]) for text in BAD)


def without_empty(value: Any) -> Any:
    return {k: without_empty(v) for k, v in value.items() if v is not None} if isinstance(value, dict) else value

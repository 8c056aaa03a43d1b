"""Defaults, precedence, overrides."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe, load, parse_qconfig


@pytest.mark.parametrize(
    ("backend", "weights", "activations"),
    [
        ("virtual", "per-channel-symmetric", "per-tensor-affine"),
        ("onnxruntime", "auto", "per-tensor-affine"),
        ("tensorrt", "per-channel-symmetric", "per-tensor-symmetric"),
    ],
)
@pytest.mark.parametrize("source", [None, "auto", "AUTO"])
def test_defaults_by_backend(source: str | None, backend: str, weights: str, activations: str) -> None:
    recipe = load(source, backend=backend)
    assert (recipe.backend, recipe.schedule.fuse_bn) == (backend, True)
    assert (recipe.w.qscheme, recipe.a.qscheme) == (weights, activations)
    assert (recipe.w.quantizer.bit, recipe.a.quantizer.bit) == (8, 8)
    nearest = "minmax" if backend == "virtual" else "mse"
    assert (recipe.w.observer.type, recipe.a.observer.type) == ("minmax", nearest)


@pytest.mark.parametrize(
    ("bits", "widths"),
    [
        ("w4a8", (4, 8)),
        ("w4", (4, 6)),
        ("W4", (4, 6)),
        ("int4", (4, 4)),
        (4, (4, 4)),
        ("w32a16", (0, 16)),
        ("w32", (0, 6)),
    ],
)
def test_bits_of_weights_alone_leave_those_of_activations(bits: str | int, widths: tuple[int, int]) -> None:
    recipe = load({"BACKEND": "virtual", "A": {"QUANTIZER": {"BIT": 6}}}, overrides={"bits": bits})
    assert (recipe.w.quantizer.bit, recipe.a.quantizer.bit) == widths
    ends = load({"BACKEND": "virtual", "FIRST_BITS": bits}).first_bits
    assert (ends.w, ends.a) == (widths[0], None if str(bits).lower() in ("w4", "w32") else widths[1])


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_bits_of_weights_alone_in_a_mode_without_activations(backend: str) -> None:
    recipe = load(None, backend=backend, overrides={"mode": "weight_only", "bits": "w4"})
    assert (recipe.mode, recipe.w.quantizer.bit) == ("weight_only", 4)


def test_missing_scheme_and_bits_come_from_the_backend() -> None:
    recipe = load({"BACKEND": "TensorRT"})
    assert (recipe.a.qscheme, recipe.a.quantizer.bit) == ("per-tensor-symmetric", 8)


def test_backend_argument_fills_a_silent_recipe_and_agrees_with_a_speaking_one() -> None:
    assert load({"SIMPLIFY": False}, backend="tensorrt").backend == "tensorrt"
    assert load({"BACKEND": "tensorrt"}, backend="TENSORRT").backend == "tensorrt"


def test_backend_argument_against_the_recipe(tmp_path: Path) -> None:
    file = tmp_path / "trt.yaml"
    file.write_text("# mine\nBACKEND: tensorrt\n")
    with pytest.raises(RecipeError, match=r"trt.yaml line 2 is tensorrt, but the backend onnxruntime was requested"):
        load(file, backend="onnxruntime")
    assert load(file, backend="onnxruntime", overrides={"BACKEND": "virtual"}).backend == "virtual"


def test_overrides_win_over_the_recipe() -> None:
    recipe = load({"W": {"QUANTIZER": {"BIT": 4, "TYPE": "adaround"}}}, overrides=["w.quantizer.bit=3"])
    assert (recipe.w.quantizer.bit, recipe.w.quantizer.type) == (3, "adaround")


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("A.OBSERVER.TYPE=Percentile", "a.observer.type", "percentile"),
        ("a.observer.percentile.alpha=1e-4", "a.observer.percentile.alpha", 1e-4),
        ("EXCLUDE=[op:Softmax, /head/*]", "exclude", ("op:Softmax", "/head/*")),
        ("EXCLUDE=op:Softmax", "exclude", ("op:Softmax",)),
        ('RANGES={x.y: [-1, 1], "tensor:2": [0, 1]}', "ranges", {"x.y": (-1.0, 1.0), "tensor:2": (0.0, 1.0)}),
        ("FIRST_BITS=w8a16", "first_bits.a", 16),
        ("last_bits.w=2", "last_bits.w", 2),
        ("SIMPLIFY=no", "simplify", False),
        ("WEIGHTS=qdq", "weights", "qdq"),
        ("scale_rule=Sparsebit", "scale_rule", "sparsebit"),
        ("CALIBRATION.MEMORY=512 MB", "calibration.memory", "512 MB"),
        ("memory=1GiB", "calibration.memory", "1GiB"),
        ("granularity=Layer", "calibration.granularity", "layer"),
        ("threads=4", "calibration.threads", 4),
        ("CALIBRATION.THREADS=2", "calibration.threads", 2),
        ("cache=some/folder", "calibration.cache", "some/folder"),
        ("cache=None", "calibration.cache", None),
        ("asym=true", "calibration.asym.enable", True),
        ("asym=true", "calibration.asym.rounding", True),
        ("asym={enable: true, ranges: false}", "calibration.asym.ranges", False),
        ("CALIBRATION.ASYM.ROUNDING=no", "calibration.asym.rounding", False),
        ("feedback={stateN: state, a.b: c}", "calibration.feedback", {"stateN": "state", "a.b": "c"}),
        ("pick=Random", "calibration.pick", "random"),
        ("seed=7", "calibration.seed", 7),
        ("bits=w4a8", "w.quantizer.bit", 4),
        ("bits=w4a32", "a.quantizer.bit", 0),
        ("BITS=W8A16", "a.quantizer.bit", 16),
        ("bits=6", "a.quantizer.bit", 6),
        ("observer=mse", "a.observer.type", "mse"),
        ("w_observer=mse", "w.observer.type", "mse"),
        ("SHARED_SCALES=[[a, b], [c]]", "shared_scales", (("a", "b"), ("c",))),
        ("W={QUANTIZER: {BIT: 5}}", "w.quantizer.bit", 5),
        ("QUANTIZE_INPUTS_OF.ADD=true", "a.qadd.enable_quant", True),
        ("A.QADD.ENABLE_QUANT=false", "quantize_inputs_of.add", False),
        ("DEVICE=cuda:1", "device", "cuda:1"),
        ("SAMPLES=16", "samples", 16),
    ],
)
def test_flags(override: str, path: str, expected: Any) -> None:
    value: Any = load(None, overrides=[override])
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected


def test_calibration_without_a_word() -> None:
    found = load(None).calibration
    assert (found.memory, found.granularity, found.threads) == ("2 GiB", "auto", None)
    assert (found.cache, found.feedback, found.pick, found.seed) == (None, {}, "first", 0)
    assert (found.asym.enable, found.asym.ranges, found.asym.rounding) == (None, True, True)


def test_calibration_in_python() -> None:
    recipe = load({"CALIBRATION": {"ASYM": True}}, overrides={"cache": Path("a: b"), "feedback": {"h": "h0"}})
    assert (recipe.calibration.cache, recipe.calibration.feedback) == ("a: b", {"h": "h0"})
    assert recipe.calibration.asym.enable is True
    assert load(recipe.to_dict()) == recipe
    assert load(recipe, overrides={"asym": False, "cache": "none"}).calibration.asym.enable is False


def test_keywords() -> None:
    overrides = {"w_bit": 4, "observer": "percentile", "weights": "qdq", "exclude": ["op:Gemm"], "fuse_bn": False}
    recipe = load(None, overrides=overrides)
    assert (recipe.w.quantizer.bit, recipe.a.observer.type, recipe.weights) == (4, "percentile", "qdq")
    assert recipe.exclude == ("op:Gemm",) and recipe.schedule.fuse_bn is False


def test_a_section_as_override_is_merged() -> None:
    recipe = load({"W": {"QUANTIZER": {"TYPE": "adaround", "BIT": 4}}}, overrides={"w": {"quantizer": {"bit": 3}}})
    assert (recipe.w.quantizer.type, recipe.w.quantizer.bit) == ("adaround", 3)


def test_pattern_mappings_as_override_replace() -> None:
    assert load({"RANGES": {"x": [0, 1]}}, overrides={"RANGES": {"y": [0, 2]}}).ranges == {"y": (0.0, 2.0)}


def test_none_takes_a_key_back_to_its_default() -> None:
    assert load({"W": {"QUANTIZER": {"BIT": 4}}}, overrides={"w_bit": None}).w.quantizer.bit == 8


def test_either_spelling_of_add_overrides_the_other() -> None:
    source = {"A": {"QADD": {"ENABLE_QUANT": True}}}
    assert load(source).quantize_inputs_of.add is True
    assert load(source, overrides=["QUANTIZE_INPUTS_OF.ADD=false"]).a.qadd.enable_quant is False
    assert load({}).quantize_inputs_of.add is None


def test_dotted_keys_in_a_dict() -> None:
    recipe = load({"W.QUANTIZER.BIT": 4, "W.QUANTIZER": {"TYPE": "adaround"}, "w": {"observer.type": "mse"}})
    assert (recipe.w.quantizer.bit, recipe.w.quantizer.type, recipe.w.observer.type) == (4, "adaround", "mse")


def test_empty_keys_keep_their_defaults(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("W:\n  QUANTIZER:\n    BIT:\nA:\nSCHEDULE: ~\nSAMPLES: null\n")
    assert parse_qconfig(file) == load({})


def test_merge_keys_and_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xef\xbb\xbfW: &w\n  QUANTIZER: {BIT: 4}\nA:\n  <<: *w\n  QSCHEME: per-tensor-symmetric\n")
    recipe = load(file)
    assert (recipe.a.quantizer.bit, recipe.a.qscheme) == (4, "per-tensor-symmetric")


def test_plain_values_lead_back_to_an_equal_recipe() -> None:
    recipe = load({"W": {"SPECIFIC": [{"a": ["QUANTIZER.BIT", 4], "b": {"QSCHEME": "per-tensor-affine"}}]}})
    again = load(recipe.to_dict())
    assert again == recipe and hash(again) == hash(recipe) and again.digest == recipe.digest
    assert recipe != load({}) and recipe != load({"W": {"SPECIFIC": [{"a": ["QUANTIZER.BIT", 4]}]}})
    assert load(recipe, overrides=["w_bit=4"]).w.quantizer.bit == 4


def test_the_digest_does_not_depend_on_where_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("w: {quantizer: {bit: 4}}\n")
    assert load(file) == load({"W.QUANTIZER.BIT": "4"}) == load({}, overrides=["bits=w4a8"])


def test_recipes_are_frozen_and_copy() -> None:
    recipe = load({"RANGES": {"x": [0, 1]}})
    with pytest.raises(FrozenInstanceError):
        recipe.backend = "tensorrt"  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del recipe.backend
    kind: Any = type(recipe.equalize)
    with pytest.raises(TypeError, match="two values for 'cross_layer'"):
        kind(True, cross_layer=False)
    with pytest.raises(TypeError, match="keys, got 99 values"):
        kind(*range(99))
    assert copy.deepcopy(recipe) == recipe == pickle.loads(pickle.dumps(recipe))


def test_the_source_is_not_changed() -> None:
    source = {"w": {"quantizer": {"bit": 4}}}
    load(source, overrides=["w_bit=3"])
    assert source == {"w": {"quantizer": {"bit": 4}}}


def test_types_are_checked_against_what_exists() -> None:
    recipe = load({"A": {"OBSERVER": {"TYPE": "minmx"}}, "W": {"SPECIFIC": [{"c": ["QUANTIZER.TYPE", "gptq"]}]}})
    recipe.check_types(observers={"minmax", "minmx"}, quantizers={"uniform", "gptq"})
    with pytest.raises(
        RecipeError, match=r"'A.OBSERVER.TYPE' .* must be minmax or mse, got 'minmx'. Did you mean minmax"
    ):
        recipe.check_types(observers=["mse", "minmax"])
    with pytest.raises(RecipeError, match=r"'W.SPECIFIC\[0\]\['c'\].QUANTIZER.TYPE' .* must be uniform, got 'gptq'"):
        recipe.check_types(quantizers=["uniform"])
    load({"A": {"QUANTIZER": {"DISABLE": True, "TYPE": "new"}}}).check_types(quantizers=["uniform"])


def test_recipe_is_complete_without_load() -> None:
    assert Recipe.read({"backend": "tensorrt"}).a.qscheme == "per-tensor-symmetric"

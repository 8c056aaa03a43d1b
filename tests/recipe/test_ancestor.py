"""Recipes in the form of the ancestor's files are read unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from sbonnx.recipe import Recipe, empty_file, load, other_defaults, parse_qconfig
from sbonnx.recipe.defaults import value_at

IMAGENET_PTQ = """\
BACKEND: tensorrt
SCHEDULE:
  FUSE_BN: True
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
A:
  QSCHEME: per-tensor-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MSE
    LAYOUT: NLC
  SPECIFIC: [{ # one dict in a list, with flat pairs
    "*ln*": ["QUANTIZER.DISABLE", True],
    "softmax*": ["QUANTIZER.DISABLE", True],
    "lm_head": ["OBSERVER.TYPE", "ACIQ", "OBSERVER.ACIQ.DISTRIBUTION", "laplace"],
  }]
"""

QAT = """\
BACKEND: virtual
SKIP_TRACE_MODULES: [
  "blocks.*.drop_path",
]
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: LSQ_plus
    BIT: 4
  SPECIFIC: [{"stem_conv1": ["QUANTIZER.BIT", 8], "head_*_1": ["QUANTIZER.BIT", 8]}]
A:
  QSCHEME: per-tensor-affine
  QUANTIZER:
    TYPE: pact
    BIT: 4
    PACT:
      ALPHA_VALUE: 6
  QADD:
    ENABLE_QUANT: True
  OBSERVER:
    TYPE: MOVING_AVERAGE
    MOVING_AVERAGE:
      EMA_RATIO: 0.8
DEVICE: cuda
"""


def written(folder: Path, text: str) -> Recipe:
    file = folder / "qconfig.yaml"
    file.write_text(text)
    return parse_qconfig(file)


def test_ptq_file(tmp_path: Path) -> None:
    recipe = written(tmp_path, IMAGENET_PTQ)
    assert (recipe.backend, recipe.schedule.fuse_bn, recipe.a.observer.layout) == ("tensorrt", True, "NLC")
    assert (recipe.w.observer.type, recipe.a.observer.type) == ("minmax", "mse")
    ln = recipe.settings("a", node="block_ln_1", op="LayerNormalization", tensor="x")
    assert not ln.enabled and ln.why == "A.SPECIFIC[0]['*ln*'].QUANTIZER.DISABLE"
    head = recipe.settings("a", node="lm_head", op="MatMul", tensor="x")
    assert head.enabled and head.observer == "aciq" and head.observer_arguments == {"distribution": "laplace"}


def test_qat_file(tmp_path: Path) -> None:
    recipe = written(tmp_path, QAT)
    assert recipe.skip_trace_modules == ("blocks.*.drop_path",)
    assert (recipe.w.quantizer.type, recipe.a.quantizer.type) == ("lsq+", "pact")
    assert recipe.device == "cuda"
    assert recipe.quantize_inputs_of.add is True and recipe.a.qadd.enable_quant is True
    stem = recipe.settings("w", node="stem_conv1", op="Conv", tensor="stem.weight")
    other = recipe.settings("w", node="body_conv1", op="Conv", tensor="body.weight")
    assert (stem.bits, other.bits) == (8, 4)
    activation = recipe.settings("a", node="body_conv1", op="Conv", tensor="x")
    assert activation.observer_arguments == {"ema_ratio": 0.8} and activation.quantizer_arguments == {"alpha": 6.0}


def test_keys_that_a_file_does_not_set_have_the_defaults_of_sbonnx(tmp_path: Path) -> None:
    ours, theirs = written(tmp_path, QAT), written(tmp_path, QAT + "DEFAULTS: sparsebit\n")
    assert (ours.schedule.fuse_bn, theirs.schedule.fuse_bn) == (True, False)
    assert (ours.scale_rule, theirs.scale_rule) == ("exact", "sparsebit")
    for key in ("BACKEND", "W.QSCHEME", "W.QUANTIZER", "W.SPECIFIC", "A"):  # all of these are in the file
        assert value_at(ours.to_dict(), key.split(".")) == value_at(theirs.to_dict(), key.split("."))


def test_defaults_of_the_ancestor_on_request() -> None:
    """Its documents and its code say so: see the table of section 1 of its configuration."""
    recipe = load(None, overrides={"defaults": "Sparsebit"})
    assert recipe == load({"DEFAULTS": "sparsebit"}) == load(recipe.to_dict())
    assert recipe.backend == "virtual" and recipe.schedule.disable_unnecessary_quant is True
    assert (recipe.schedule.fuse_bn, recipe.a.qadd.enable_quant, recipe.quantize_inputs_of.add) == (False, False, False)
    assert (recipe.w.observer.type, recipe.a.observer.type) == ("minmax", "minmax")
    assert (recipe.a.quantizer.pact.alpha_value, recipe.a.observer.percentile.alpha) == (10, 0.001)
    assert load(recipe, backend="onnxruntime").a.observer.type == "minmax"
    assert load(recipe, overrides={"A.QADD.ENABLE_QUANT": True}).quantize_inputs_of.add is True


@pytest.mark.parametrize("source", [{}, {"W.ROUNDING": "nearest"}, {"DEFAULTS": "sparsebit"}])
def test_adaround_of_one_layer_wins_over_the_rounding_of_the_side(source: dict[str, str]) -> None:
    recipe = load({**source, "W.QUANTIZER.BIT": 4, "W.SPECIFIC": [{"a": ["QUANTIZER.TYPE", "AdaRound"]}]})
    chosen = [recipe.settings("w", node=node, op="Conv", tensor="w").rounding_name for node in "ab"]
    assert chosen == ["adaround", "nearest" if source else "gptq"]
    assert load({**source, "W.QUANTIZER.TYPE": "adaround"}).w.rounding.type == (
        "nearest" if "W.ROUNDING" in source else "adaround"
    )


def test_one_line_names_the_other_defaults_of_the_ancestor(tmp_path: Path) -> None:
    line = other_defaults(written(tmp_path, IMAGENET_PTQ))
    assert line is not None and "\n" not in line and "qconfig.yaml" in line
    told = line.partition("'DEFAULTS: sparsebit' gives ")[2].split(", ")
    assert {"A.QADD.ENABLE_QUANT: false", "SCALE_RULE: sparsebit", "W.ROUNDING.TYPE: nearest"} <= set(told)
    assert not any(key.startswith(("SCHEDULE.FUSE_BN", "A.OBSERVER.TYPE", "KERNEL_COSTS")) for key in told)
    file = tmp_path / "qconfig.yaml"
    assert other_defaults(load(file, overrides={"min_sqnr": 20})) == line  # flags do not count
    assert other_defaults(load(file, overrides={"DEFAULTS": "sparsebit"})) is None


@pytest.mark.parametrize("text", ["", "W: {QUANTIZER: {BIT: 4}}\n", IMAGENET_PTQ + "SIMPLIFY: true\n"])
def test_other_files_are_not_the_ancestors(tmp_path: Path, text: str) -> None:
    assert other_defaults(written(tmp_path, text)) is None


@pytest.mark.parametrize("side", ["W", "A"])
@pytest.mark.parametrize(
    ("written_as", "canonical"),
    [
        ("uniform", "uniform"),
        ("UNIFORM", "uniform"),
        ("DoReFa", "dorefa"),
        ("LSQ", "lsq"),
        ("LSQ_plus", "lsq+"),
        ("lsq+", "lsq+"),
        ("Lsq-Plus", "lsq+"),
    ],
)
def test_quantizer_names_in_any_case(side: str, written_as: str, canonical: str) -> None:
    recipe = load({side: {"QUANTIZER": {"TYPE": written_as}}})
    assert (recipe.w if side == "W" else recipe.a).quantizer.type == canonical


@pytest.mark.parametrize("name", ["minmax", "MSE", "Percentile", "KL_HISTOGRAM", "aciq"])
def test_observer_names_in_any_case(name: str) -> None:
    recipe = load({"w": {"observer": {"type": name}}, "a": {"Observer": {"Type": name}}})
    assert recipe.w.observer.type == recipe.a.observer.type == name.lower()


def test_values_in_quotes_are_decoded() -> None:
    """The ancestor's reader evaluated text, so these worked there."""
    recipe = load({"W": {"QUANTIZER": {"BIT": "4", "DISABLE": "False"}, "OBSERVER": {"PERCENTILE": {"ALPHA": "1e-4"}}}})
    assert recipe.w.quantizer.bit == 4 and recipe.w.quantizer.disable is False
    assert recipe.w.observer.percentile.alpha == 1e-4


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    recipe = written(tmp_path, "A: {OBSERVER: {PERCENTILE: {ALPHA: 1e-3}}}\n")
    assert recipe.a.observer.percentile.alpha == 0.001


def test_every_dict_of_specific_is_read(tmp_path: Path) -> None:
    """The ancestor read the first only."""
    recipe = written(tmp_path, "W:\n  SPECIFIC:\n  - a: [QUANTIZER.BIT, 2]\n  - b: [QUANTIZER.BIT, 3]\n")
    assert [recipe.settings("w", node=n, op="Conv", tensor="t").bits for n in "abc"] == [2, 3, 8]


@pytest.mark.parametrize("key", ["BIT", "DISABLE"])
def test_bit_0_and_disable_mean_float(key: str) -> None:
    recipe = load({"A": {"QUANTIZER": {key: 0 if key == "BIT" else True}}}, backend="onnxruntime")
    settings = recipe.settings("a", node="n", op="Conv", tensor="x")
    assert not settings.enabled and settings.why == f"A.QUANTIZER.{key}"
    assert recipe.settings("w", node="n", op="Conv", tensor="w").enabled


def test_a_file_without_keys_gets_a_note(tmp_path: Path) -> None:
    file = tmp_path / "empty.yaml"
    file.write_text("# W: {}\n")
    note = empty_file(load(file, overrides={"bits": "w4a8"}))
    assert note is not None and "empty.yaml sets no key" in note
    file.write_text("BACKEND: onnxruntime\n")
    assert empty_file(load(file)) is None and empty_file(load()) is None

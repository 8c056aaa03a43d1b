"""Modes, quantized types and versions of TensorRT: what a recipe may request, and the one-line errors."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx.backends import BACKENDS
from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe, as_yaml, load
from sbonnx.recipe.names import MODES
from sbonnx.recipe.yaml_text import parse
from sbonnx.schemes import VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_is_written_in_three_ways(version: str) -> None:
    for recipe in (
        load(backend=f"tensorrt@{version}"),
        load({"BACKEND": f"TensorRT@{version}"}),
        load({"BACKEND": "tensorrt", "VERSION": version}),
        load({"BACKEND": "tensorrt", "VERSION": float(version)}),
        load({"BACKEND": "tensorrt"}, backend=f"tensorrt@{version}"),
        load({"BACKEND": f"tensorrt@{version}"}, backend="tensorrt"),
        load(overrides=[f"BACKEND=tensorrt@{version}"]),
        load(backend="tensorrt", overrides={"version": version}),
    ):
        assert (recipe.backend, recipe.version) == ("tensorrt", version)
        assert load(recipe.to_dict()) == recipe


def test_the_newest_version_is_meant_where_none_is_named() -> None:
    assert load(backend="tensorrt").version == VERSIONS[0]
    assert load(backend="virtual").version is None
    assert "VERSION" not in load(backend="virtual").to_dict()


def test_fp8_on_both_sides() -> None:
    for backend in ("tensorrt", "tensorrt@10", "virtual"):
        recipe = load(backend=backend, overrides={"bits": "FP8"})
        for side in (recipe.w, recipe.a):
            assert (side.quantizer.dtype, side.quantizer.bit) == ("fp8", 8)
            assert side.qscheme.endswith("-symmetric")
        settings = recipe.settings("a", node="n", op="Conv", tensor="t")
        assert settings.dtype == "fp8"


def test_first_and_last_widths_are_of_integers() -> None:
    recipe = load(backend="virtual", overrides={"bits": "fp8", "first_bits": 8})
    assert recipe.settings("w", node="n", op="Conv", tensor="t", place="first").dtype == "int"
    assert recipe.settings("w", node="n", op="Conv", tensor="t").dtype == "fp8"


def test_a_block_size_for_some_weights() -> None:
    specific = [{"head": {"QUANTIZER.BIT": 4, "BLOCK_SIZE": 64}}, {"tail": {"BLOCK_SIZE": "none"}}]
    recipe = load({"BACKEND": "virtual", "W": {"BLOCK_SIZE": 32, "SPECIFIC": specific}})
    sizes = [recipe.settings("w", node=name, op="MatMul", tensor="t").block_size for name in ("head", "tail", "body")]
    assert sizes == [64, None, 32]
    assert recipe.settings("a", node="head", op="MatMul", tensor="t").block_size is None
    assert load(recipe.to_dict()) == recipe


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("tensorrt", {"version": 9}, "version= must be a version of TensorRT, 11, 10 or 8.6, got 9"),
    ("tensorrt@10", {"version": 11}, "contradicts BACKEND: tensorrt@10"),
    ("virtual", {"version": 10}, "version= is for the backend tensorrt only"),
    ("tensorrt@8.6", {"bits": "fp8"}, "requires fp8, which TensorRT 8.6 does not have"),
    ("tensorrt@8.6", {"bits": "w4a0"}, "requires int4, which TensorRT 8.6 does not have"),
    ("tensorrt@8.6", {"mode": "weight_only"}, "mode= requires int4, which TensorRT 8.6 does not"),
    ("tensorrt@8.6", {"last_bits": {"W": 4}}, "last_bits= (LAST_BITS.W) requires int4"),
    ("onnxruntime", {"bits": "fp8"}, "onnxruntime has no kernels that compute on fp8"),
    ("virtual", {"bits": "fp8", "mode": "weight_only"}, "with MODE: static"),
    ("virtual", {"w_bit": 4, "W.QUANTIZER.DTYPE": "fp8"}, "must be 8 (or 0 for float) with DTYPE: fp8, got 4"),
    ("virtual", {"bits": "fp8", "a_qscheme": "per-tensor-affine"}, "must be symmetric with DTYPE: fp8"),
    ("virtual", {"bits": "fp8", "w_observer": "aciq"}, "is for integers with uniform steps; use minmax, mse or"),
    ("tensorrt", {"W.QUANTIZER.DTYPE": "fp8"}, "must be fp8 on both sides or on none for the backend tensorrt"),
    ("virtual", {"A.QUANTIZER.DTYPE": "fp4"}, "must be int, fp8, mxfp8, mxfp4 or nvfp4, got 'fp4'"),
    ("virtual", {"A.QUANTIZER.DTYPE": "mxfp8", "a_bit": 8}, "is for weights: scales of blocks of activations change"),
    ("virtual", {"bits": "nvfp4", "mode": "static"}, "with MODE: weight_only"),
    ("virtual", {"bits": "nvfp4", "block_size": 32}, "must be 16 with DTYPE: nvfp4, got 32"),
    ("virtual", {"bits": "mxfp4", "w_bit": 8}, "is set twice"),
    ("virtual", {"bits": "mxfp4", "w_qscheme": "per-channel-affine"}, "must be symmetric with DTYPE: mxfp4"),
    ("virtual", {"bits": "mxfp4", "w_qscheme": "per-tensor-symmetric"}, "must be per-channel-symmetric with blocks"),
    ("tensorrt", {"bits": "mxfp4"}, "tensorrt has no kernels that compute on mxfp4"),
    ("tensorrt@8.6", {"bits": "nvfp4"}, "requires int4, which TensorRT 8.6 does not have"),
    ("onnxruntime", {"bits": "nvfp4"}, "onnxruntime has no kernels that compute on nvfp4"),
    ("tensorrt", {"bits": "w4a8"}, "is for weights only on tensorrt, got w4. Leave activations float (bits: w4a0)"),
    ("tensorrt", {"bits": "w5a8"}, "must be 4 or 8 for the backend tensorrt"),
    ("tensorrt", {"bits": "w4a0", "block_size": 32}, "must be 64 or 128 for the backend tensorrt, got 32"),
    ("tensorrt", {"block_size": 64}, "is for weights of 4 bits on tensorrt: use none, or BIT: 4, got 64"),
    ("onnxruntime", {"block_size": 64}, "is for MODE: weight_only on onnxruntime"),
    ("virtual", {"block_size": 48}, "must be none or a power of two from 16 to 256, got 48"),
    ("virtual", {"block_size": 16, "w_qscheme": "per-tensor-symmetric"}, "with BLOCK_SIZE, got 'per-tensor-symmetric'"),
]


@pytest.mark.parametrize(("backend", "wishes", "said"), WRONG, ids=[f"{row[0]} {row[1]}" for row in WRONG])
def test_what_a_backend_lacks_is_one_line(backend: str, wishes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(backend=backend, overrides=wishes)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unknown_versions_of_a_backend() -> None:
    versions = "tensorrt@11, tensorrt@10 or tensorrt@8.6"
    with pytest.raises(RecipeError, match=rf"tensorrt has no version '7': write {versions}"):
        load(backend="trt@7")
    known = "virtual, onnxruntime, tensorrt, openvino, qnn or web"
    with pytest.raises(RecipeError, match=rf"the backend must be {known}, got 'qnn@7'"):
        load(backend="qnn@7")
    with pytest.raises(RecipeError, match=r"'BACKEND' in the recipe is tensorrt@11, but the backend tensorrt@10 was"):
        load({"BACKEND": "tensorrt@11"}, backend="tensorrt@10")


def made(backend: str, **overrides: Any) -> Recipe:
    return load(None, backend=backend, overrides=overrides)


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_and_qdq_are_the_default(backend: str) -> None:
    recipe = made(backend)
    assert (recipe.mode, recipe.format, recipe.accuracy_level) == ("static", "qdq", 4)


@pytest.mark.parametrize(
    ("backend", "mode", "bits", "scheme", "observer"),
    [
        ("onnxruntime", "dynamic", 8, "per-channel-symmetric", "minmax"),
        ("onnxruntime", "weight_only", 4, "per-channel-affine", "mse"),
        ("tensorrt", "weight_only", 4, "per-channel-symmetric", "mse"),
        ("virtual", "weight_only", 4, "per-channel-symmetric", "mse"),
    ],
)
def test_defaults_of_a_mode(backend: str, mode: str, bits: int, scheme: str, observer: str) -> None:
    recipe = made(backend, mode=mode.upper())
    assert (recipe.w.quantizer.bit, recipe.w.qscheme, recipe.w.observer.type) == (bits, scheme, observer)
    value, _ = parse(as_yaml(recipe), "text")
    assert load(value) == recipe


def test_what_is_said_is_kept() -> None:
    recipe = made("onnxruntime", mode="weight_only", w_bit=8, w_observer="minmax", w_qscheme="per-channel-symmetric")
    assert (recipe.w.quantizer.bit, recipe.w.observer.type, recipe.w.qscheme) == (8, "minmax", "per-channel-symmetric")
    assert made("onnxruntime", mode="weight_only", bits=4).w.quantizer.bit == 4


@pytest.mark.parametrize(
    ("backend", "overrides", "said"),
    [
        ("tensorrt", {"mode": "dynamic"}, "mode= must be static or weight_only"),
        ("virtual", {"mode": "dynamic"}, "mode= must be static or weight_only"),
        ("tensorrt", {"format": "qoperator"}, "format= must be qdq for the backend tensorrt"),
        ("onnxruntime", {"mode": "dynamic", "format": "qoperator"}, "must be qdq with MODE: dynamic"),
        ("onnxruntime", {"mode": "dynamic", "weights": "qdq"}, "must be codes with MODE: dynamic"),
        ("onnxruntime", {"format": "qoperator", "weights": "qdq"}, "must be codes with FORMAT: qoperator"),
        ("onnxruntime", {"mode": "weight_only", "w_bit": 9}, "must be 2 to 8 for the backend onnxruntime with MODE"),
        ("onnxruntime", {"w_bit": 10}, "must be 2 to 8 for the backend onnxruntime (or 0 for float)"),
        ("onnxruntime", {"mode": "dynamic", "w_qscheme": "per-channel-affine"}, "must be per-channel-symmetric or"),
        ("onnxruntime", {"mode": "dynamic", "a_qscheme": "per-tensor-symmetric"}, "must be per-tensor-affine"),
        ("onnxruntime", {"mode": "weight_only", "first_bits": "w9a8"}, "must be 2 to 8"),
        ("onnxruntime", {"accuracy_level": 5}, "must be auto, or a level of MatMulNBits, 0 to 4, got 5"),
        ("onnxruntime", {"mode": "fast"}, "must be static, dynamic or weight_only, got 'fast'"),
    ],
)
def test_what_a_backend_does_not_have_is_refused(backend: str, overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeError) as error:
        made(backend, **overrides)
    assert said in str(error.value)


def test_every_mode_is_some_backends() -> None:
    for mode in MODES:
        assert any(_takes(backend, mode) for backend in BACKENDS)


def _takes(backend: str, mode: str) -> bool:
    try:
        return made(backend, mode=mode).mode == mode
    except RecipeError:
        return False

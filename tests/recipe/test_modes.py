"""MODE and FORMAT: what each backend has, and what holds when a recipe does not say."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx.errors import RecipeError
from sbonnx.recipe import Recipe, as_yaml, load
from sbonnx.recipe.names import BACKENDS, MODES
from sbonnx.recipe.text import parse


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
        ("tensorrt", {"mode": "dynamic"}, "'MODE' in the overrides must be static or weight_only"),
        ("virtual", {"mode": "dynamic"}, "'MODE' in the overrides must be static or weight_only"),
        ("tensorrt", {"format": "qoperator"}, "'FORMAT' in the overrides must be qdq for the backend tensorrt"),
        ("onnxruntime", {"mode": "dynamic", "format": "qoperator"}, "must be qdq with MODE: dynamic"),
        ("onnxruntime", {"mode": "dynamic", "weights": "qdq"}, "must be codes with MODE: dynamic"),
        ("onnxruntime", {"format": "qoperator", "weights": "qdq"}, "must be codes with FORMAT: qoperator"),
        ("onnxruntime", {"mode": "weight_only", "w_bit": 9}, "must be 2 to 8 for the backend onnxruntime with MODE"),
        ("onnxruntime", {"w_bit": 10}, "must be 2 to 8 for the backend onnxruntime (or 0 for float)"),
        ("onnxruntime", {"mode": "dynamic", "w_qscheme": "per-channel-affine"}, "must be per-channel-symmetric or"),
        ("onnxruntime", {"mode": "dynamic", "a_qscheme": "per-tensor-symmetric"}, "must be per-tensor-affine"),
        ("onnxruntime", {"mode": "weight_only", "first_bits": "w9a8"}, "must be 2 to 8"),
        ("onnxruntime", {"accuracy_level": 5}, "must be a level of MatMulNBits, 0 to 4, got 5"),
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

"""Short names of backends and widths, and values that need no quotes of YAML."""

from __future__ import annotations

import pytest

from sbonnx import recipe
from sbonnx.errors import RecipeError


@pytest.mark.parametrize(
    ("short", "full"),
    [("ort", "onnxruntime"), ("ONNX", "onnxruntime"), ("cpu", "onnxruntime"), ("trt@10", "tensorrt@10")],
)
def test_backends(short: str, full: str) -> None:
    """As an argument, as an override, in a file, and against a file that has the full name."""
    wanted = recipe.load(backend=full).to_dict()
    name = full.partition("@")[0]
    assert recipe.load(backend=short).to_dict() == wanted
    assert recipe.load(overrides=[f"BACKEND={short}"]).to_dict() == wanted
    assert recipe.load({"BACKEND": short}).to_dict() == wanted
    assert recipe.load({"BACKEND": full}, backend=short).to_dict() == wanted
    assert recipe.backend_of({"BACKEND": short}).partition("@")[0] == name


@pytest.mark.parametrize(("short", "widths"), [("int8", (8, 8)), ("INT4", (4, 4)), ("8", (8, 8)), ("w4a8", (4, 8))])
def test_bits(short: str, widths: tuple[int, int]) -> None:
    made = recipe.load(overrides=[f"bits={short}"])
    assert (made.w.quantizer.bit, made.a.quantizer.bit) == widths


def test_regular_expressions_need_no_quotes() -> None:
    expression = "re:Conv_(19[3-9]|2..): #x"
    assert recipe.load(overrides=[f"EXCLUDE={expression}"]).exclude == (expression,)


@pytest.mark.parametrize(("typed", "meant"), [("trtt", "trt"), ("ortt", "ort"), ("tensort", "tensorrt"), ("OVV", "ov")])
def test_suggestion(typed: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=rf"got '{typed}'\. Did you mean {meant}\?"):
        recipe.load(backend=typed)

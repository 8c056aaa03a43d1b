"""Kernels for block-wise weights: slow combinations are avoided by default, and named if the recipe asks for them."""

from __future__ import annotations

from typing import Any

import pytest

from sbonnx.backends.onnxruntime.ort_nbits import TWO_BIT_BLOCKS, slow_path, stored_bits
from sbonnx.planning import Plan
from tests.support.models import model
from tests.support.writing import prepared

PRODUCT = "agraph (float[N,256] x) => (float[N,64] y) { m = MatMul (x, w) a = Tanh (m) y = MatMul (a, v) }"


def planned(**wish: Any) -> Plan:
    return prepared(model(PRODUCT, w=(256, 64), v=(64, 64)), mode="weight_only", **wish).plan


def slow(plan: Plan) -> list[str]:
    return [refusal.why for refusal in plan.refusals if refusal.what == "take a fast kernel"]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_no_default_is_slow(bits: int) -> None:
    plan = planned(w_bit=bits)
    assert not slow(plan)
    assert {site.spec.block_size for site in plan.sites} == {64 if bits == 2 else 32}


@pytest.mark.parametrize(
    ("wish", "factor"),
    [
        ({"w_bit": 8, "accuracy_level": 0}, "20 to 45"),
        ({"w_bit": 6, "accuracy_level": 1}, "20 to 45"),
        ({"w_bit": 2, "block_size": 16}, "28 to 42"),
        ({"w_bit": 2, "block_size": 256}, "28 to 42"),
        ({"w_bit": 2, "accuracy_level": 0}, "28 to 42"),
    ],
)
def test_a_slow_path_is_named_with_its_factor(wish: dict[str, Any], factor: str) -> None:
    (why,) = slow(planned(**wish))
    assert factor in why and "take" in why


def test_four_bits_are_fast_at_every_level_but_with_float_zero_points() -> None:
    assert not any(slow_path(4, block, level) for block in (16, 32, 64, 128, 256) for level in range(5))
    found = slow_path(4, 32, 4, float_zero_points=True)
    assert found is not None and "21 times" in found.text()
    assert [stored_bits(bits) for bits in range(2, 9)] == [2, 4, 4, 8, 8, 8, 8]
    assert set(TWO_BIT_BLOCKS) == {32, 64, 128}

"""Which weights the modes other than static quantize, and what they say of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.backends import BACKENDS
from sbonnx.pipeline import prepare
from sbonnx.planning import Plan, from_dict
from sbonnx.stages.state import read_recipe
from tests.support.models import model, residual

MODES = [(name, mode) for name in BACKENDS for mode in BACKENDS[name].modes if mode != "static"]

TWO = """
agraph (float[N,384] x) => (float[N,8] y, float[N,3] z) {
    h = MatMul (x, w)
    y = MatMul (h, v)
    z = Gemm <transB = 1> (h, u, b)
}"""


def two() -> onnx.ModelProto:
    return model(TWO, w=(384, 256), v=(256, 8), u=(3, 256), b=3)


def planned(proto: onnx.ModelProto, backend: str, mode: str, **overrides: Any) -> Plan:
    recipe, rules = read_recipe(None, backend, {"mode": mode, **overrides})
    return prepare(proto, recipe, rules).plan


def test_no_mode_quantizes_an_activation_or_a_bias() -> None:
    for backend, mode in MODES:
        plan = planned(two(), backend, mode)
        assert plan.sites and {site.role for site in plan.sites} == {"weight"}
        assert plan.weights_alone
        assert from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("asked", [None, 0, 1000, 10**6])
@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_small_weights_are_refused_by_their_size(backend: str, mode: str, asked: int | None) -> None:
    plan = planned(two(), backend, mode, **({} if asked is None else {"min_weight_size": asked}))
    method = BACKENDS[backend].modes[mode]
    smallest, why = (method.smallest, f", below which {method.below}") if asked is None else (asked, "")
    sizes = {"MatMul_0": 384 * 256, "MatMul_1": 256 * 8, "Gemm_0": 3 * 256}
    taken = {reader.node for site in plan.sites for reader in site.readers}
    assert taken == {node for node, size in sizes.items() if size >= smallest}
    for refusal in plan.refusals:
        assert refusal.why == f"it has {sizes[refusal.where]} weights; MIN_WEIGHT_SIZE is {smallest}{why}"


def test_weight_only_takes_the_layers_of_a_small_decoder() -> None:
    """onnxruntime's own quantizer takes every MatMul with a constant matrix; a layer of 128 x 64 is worth its bytes."""
    decoder = model("agraph (float[N,128] x) => (float[N,64] y) { y = MatMul (x, w) }", w=(128, 64))
    assert [site.tensor for site in planned(decoder, "onnxruntime", "weight_only").sites] == ["w"]
    assert not planned(decoder, "onnxruntime", "dynamic").sites


@pytest.mark.parametrize(("backend", "block"), [("onnxruntime", 32), ("tensorrt", 128), ("virtual", 32)])
def test_blocks_lie_along_the_summed_axis(backend: str, block: int) -> None:
    plan = planned(two(), backend, "weight_only")
    found = {site.tensor: (site.spec.axis, site.spec.block_size, site.spec.bits) for site in plan.sites}
    assert found["w"] == (0, block, 4)
    if backend == "virtual":
        assert found["u"] == (1, block, 4)
    wider = planned(two(), backend, "weight_only", block_size=64)
    assert {site.spec.block_size for site in wider.sites} == {64}


def test_convolutions_say_why_they_stay_float() -> None:
    for backend, mode in MODES:
        refusals = {refusal.where: refusal.why for refusal in planned(residual(), backend, mode).refusals}
        assert refusals["conv1"].startswith("Conv: ")


@pytest.mark.parametrize("wish", [{"exclude": ["MatMul_0"]}, {"w": {"SPECIFIC": [{"MatMul_0": ["QUANTIZER.BIT", 0]}]}}])
def test_the_recipe_can_leave_a_product_float(wish: dict[str, Any]) -> None:
    plan = planned(two(), "onnxruntime", "dynamic", **wish)
    assert not plan.sites
    (refusal,) = (refusal for refusal in plan.refusals if refusal.where == "MatMul_0")
    assert refusal.why.startswith("the recipe says so")


def test_dynamic_needs_both_sides() -> None:
    plan = planned(two(), "onnxruntime", "dynamic", a={"SPECIFIC": [{"MatMul_0": ["QUANTIZER.DISABLE", True]}]})
    assert not plan.sites
    assert ("quantize input", "MatMul_0") in {(refusal.what, refusal.where) for refusal in plan.refusals}


@pytest.mark.parametrize(
    ("text", "weights", "why"),
    [
        ("y = MatMul (w, x)", {"w": (512, 384)}, "the constant is the left factor"),
        ("y = Gemm <transA = 1> (x, w)", {"w": (512, 384)}, "Gemm with transA"),
        ("c = Sin (x)  y = MatMul (x, c)", {}, "it multiplies two activations"),
    ],
)
def test_forms_that_no_kernel_has(text: str, weights: dict[str, Any], why: str) -> None:
    square = "512,384" if "transA" in text else "384,384"
    proto = model(f"agraph (float[{square}] x) => (float[A,B] y) {{ {text} }}", **weights)
    for mode in ("dynamic", "weight_only"):
        plan = planned(proto, "onnxruntime", mode, simplify=False, fuse_bn=False)
        assert not plan.sites
        assert any(refusal.why.startswith(why) for refusal in plan.refusals), plan.refusals


def test_products_in_a_loop_store_their_weights() -> None:
    text = """
    agraph (float[2,256] x) => (float[2,256] y) {
        y = Loop (count, yes, x) <
            body = step (int64 i, bool go, float[2,256] state) => (bool keep, float[2,256] next) {
                keep = Identity (go)
                next = MatMul (state, w)
            }
        >
    }"""
    proto = model(text, w=(256, 256), count=np.array(3), yes=np.array(True))
    plan = planned(proto, "onnxruntime", "weight_only")
    assert [(site.rule, site.spec.bits) for site in plan.sites] == [("stored", 8)]
    assert any("is in the body of" in refusal.why for refusal in plan.refusals)


def test_ranges_fixed_by_hand_hold_for_every_block() -> None:
    recipe, rules = read_recipe(None, "virtual", {"mode": "weight_only", "ranges": {"tensor:w": [-2.0, 2.0]}})
    ready = prepare(two(), recipe, rules)
    from sbonnx.calib.qparams.solve import weights_alone

    numbers = weights_alone(ready.graph, ready.plan).qparams["w"]
    assert numbers.scale.shape == (12, 256)
    np.testing.assert_allclose(numbers.scale, 2 / 7, rtol=1e-6)


def test_wishes_about_activations_are_refused_by_name() -> None:
    wish = {"quantize_inputs_of": {"ADD": True, "EMBEDDING": True, "POOL": False}, "asym": True}
    plan = planned(two(), "onnxruntime", "weight_only", **wish)
    keys = {refusal.where for refusal in plan.refusals if "." in refusal.where}
    assert keys == {"QUANTIZE_INPUTS_OF.ADD", "CALIBRATION.ASYM"}


def test_half_precision_has_no_scales_at_run_time() -> None:
    weight = np.ones((256, 256), np.float16)
    proto = model("agraph (float16[N,256] x) => (float16[N,256] y) { y = MatMul (x, w) }", w=weight)
    plan = planned(proto, "onnxruntime", "dynamic")
    assert not plan.sites
    assert plan.refusals[0].why == "its type is float16, scales are computed from float32 only"

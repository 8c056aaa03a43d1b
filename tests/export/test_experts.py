"""Mixtures of experts: QMoE against onnxruntime's MoE of the dequantized weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sbonnx.backends.onnxruntime import backend as ort
from sbonnx.spec import Array
from tests.support.models import run
from tests.support.writing import ops, prepared, solved, written

EXPERTS, HIDDEN, INNER, TOKENS = 3, 32, 48, 6


def mixture(weights: dict[str, Array], **attributes: Any) -> onnx.ModelProto:
    """A MoE that reads activations and the scores of a router."""
    names = ["x", "scores", *(name if name in weights else "" for name in ("w1", "b1", "w2", "b2", "w3"))]
    node = helper.make_node("MoE", names, ["y"], "moe", domain="com.microsoft", **{"k": 2, **attributes})
    values = {"x": HIDDEN, "scores": EXPERTS}
    inputs = [helper.make_tensor_value_info(name, 1, ["tokens", width]) for name, width in values.items()]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "mixture", inputs, [helper.make_tensor_value_info("y", 1, None)], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def random_weights(fused: int = 1, **sizes: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    inner, hidden = sizes.get("inner", INNER), sizes.get("hidden", HIDDEN)
    shapes = {"w1": (EXPERTS, fused * inner, hidden), "b1": (EXPERTS, fused * inner), "w2": (EXPERTS, hidden, inner)}
    return {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in shapes.items()}


def feed() -> dict[str, Array]:
    rng = np.random.default_rng(1)
    return {
        "x": rng.standard_normal((TOKENS, HIDDEN), np.float32),
        "scores": rng.standard_normal((TOKENS, EXPERTS), np.float32),
    }


@pytest.mark.skipif(not ort.has_experts(), reason="QMoE of this onnxruntime is older")
@pytest.mark.parametrize(
    ("bits", "scheme", "db"),
    [
        *((2, "per-channel-affine", 100.0), (4, "per-channel-affine", 100.0), (4, "per-channel-symmetric", 100.0)),
        (8, "per-channel-affine", 35.0),  # blocks of 8 bits have int8 activations at every level
    ],
)
@pytest.mark.parametrize("attributes", [{"activation_type": "gelu"}, {"activation_type": "swiglu", "swiglu_fusion": 1}])
def test_the_kernel_computes_what_the_codes_say(bits: int, scheme: str, db: float, attributes: dict[str, Any]) -> None:
    weights = random_weights(2 if "swiglu_fusion" in attributes else 1)
    attributes = {**attributes, "normalize_routing_weights": 1}
    settings = {"w_bit": bits, "w_qscheme": scheme, "accuracy_level": 1}
    ready = prepared(mixture(weights, **attributes), mode="weight_only", **settings)
    solution = solved(ready, None)
    file, refusals = written(ready, solution)
    assert not refusals and ops(file) == {"QMoE": 1}
    rounded = {
        site.tensor: solution.qparams[site.key].dequantize(solution.codes[site.key]) for site in ready.plan.sites
    }
    assert rounded.keys() == {"w1", "w2"}
    expected = run(mixture({**weights, **rounded}, **attributes), feed())["y"]
    for level in ("off", "all"):
        noise = run(file, feed(), level=level)["y"] - expected
        assert 10 * np.log10(np.square(expected).sum() / np.square(noise).sum()) > db


def test_each_projection_has_its_width() -> None:
    settings = {"w_bit": 4, "w.specific": [{"tensor:w2": {"QUANTIZER.BIT": 8}}]}
    ready = prepared(mixture(random_weights()), mode="weight_only", **settings)
    file, _ = written(ready, solved(ready, None))
    attributes = {entry.name: entry.i for entry in file.graph.node[0].attribute}
    assert (attributes["expert_weight_bits"], attributes["fc2_expert_weight_bits"]) == (4, 8)


@pytest.mark.parametrize(
    ("mode", "sizes", "third", "why"),
    [
        ("weight_only", {"inner": 24}, False, "do not divide into blocks of 16"),
        ("weight_only", {}, True, "two projections of an expert"),
        ("dynamic", {}, False, "MODE: weight_only"),
    ],
)
def test_experts_that_stay_float_have_a_reason(mode: str, sizes: dict[str, int], third: bool, why: str) -> None:
    weights = random_weights(**sizes)
    if third:
        weights["w3"] = weights["w1"]
    ready = prepared(mixture(weights), mode=mode)
    assert not ready.plan.sites
    assert [why in refusal.why for refusal in ready.refusals if refusal.what == "quantize"] == [True]

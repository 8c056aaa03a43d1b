"""OpenVINO's rules: each finds the mistake that was seeded for it, and says nothing of the clean twin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.backends.decoded_weights import decode_at_load
from sbonnx.backends.openvino.runtime import OPENVINO_RUNTIME
from sbonnx.backends.runtime_types import layers_by_name
from sbonnx.linting import lint
from sbonnx.linting import openvino as rules_of_openvino
from sbonnx.linting.openvino import OPENVINO_RULES
from tests.backends.openvino.graphs import SHOWN, between, conv, net, single, softmax, weight
from tests.support.extras import needs_openvino

Made = Callable[[], onnx.ModelProto]


def computed() -> onnx.ModelProto:
    """A scale that is computed."""
    it = net()
    scale = it.op("ReduceMax", it.op("Abs", "x"), keepdims=0)
    y = it.op(
        "DequantizeLinear", it.op("QuantizeLinear", "x", scale, it.keep(128, "uint8")), scale, it.keep(128, "uint8")
    )
    return it.done(conv(it, y, "op"))


def alone(*, data: bool, quantized: bool) -> Made:
    """A convolution with a pair on its input, its weight, both or none."""

    def make() -> onnx.ModelProto:
        it = net()
        x = it.pair("x", zero=128) if data else "x"
        w = weight(it, 16, 16, 3, 3) if quantized else it.keep(it.rng.normal(0, 0.1, (16, 16, 3, 3)))
        return it.done(conv(it, x, "op", w=w))

    return make


def shown(name: str) -> Made:
    return SHOWN[name].make


SEEDED: dict[str, tuple[Made, Made]] = {
    "V01": (single(scale=0.0, zero=128), single(zero=128)),
    "V02": (computed, single(zero=128)),
    "V03": (shown("weight zero"), shown("channels")),
    "V04": (shown("u16"), shown("u8")),
    "V05": (shown("transposed zero"), shown("transposed")),
    "V06": (shown("activations u8"), shown("activations i8")),
    "V07": (shown("recurrent weights"), shown("recurrent")),
    "V08": (alone(data=False, quantized=True), alone(data=True, quantized=True)),
    "V09": (alone(data=True, quantized=False), alone(data=False, quantized=False)),
    "V10": (shown("concat scales"), shown("concat same")),
    "V11": (shown("max before"), shown("max")),
    "V12": (between("AveragePool", kernel_shape=[2, 2]), shown("average")),
    "V13": (softmax, single(zero=128)),
    "V14": (shown("weight int4"), shown("weight cast")),
}
"""A model with the mistake, and one without, by rule. V15 and V16 need the compiled model."""

REFUSED = frozenset({"V15"})


def compiled() -> dict[str, onnx.ModelProto]:
    """Models with the mistake that only the compiled model shows, by rule: scales of input channels for V16."""
    it = net()
    w = it.codes(it.weight(16, 16, 3, 3), np.full(16, 0.01, np.float32), 0, "int8", 1)
    return {"V15": SHOWN["recurrent weights"].make(), "V16": it.done(conv(it, it.pair("x", zero=128), "op", w=w))}


"""What else is found if the mistake keeps the model from being compiled."""


def found(model: Any) -> set[str]:
    return {one.rule for one in lint(model, "openvino")}


@pytest.mark.parametrize("rule", SEEDED)
def test_a_seeded_mistake_is_found_by_its_rule_alone(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules_of_openvino, "OPENVINO_RUNTIME", replace(OPENVINO_RUNTIME, absent=lambda: "not asked"))
    bad, good = SEEDED[rule]
    assert found(bad()) == {rule}
    assert found(good()) == set()


@needs_openvino
@pytest.mark.parametrize("rule", ["V03", "V05", "V07", "V10", "V14"])
def test_the_compiled_model_adds_no_second_finding(rule: str) -> None:
    bad, good = SEEDED[rule]
    assert found(bad()) - REFUSED == {rule}
    assert found(good()) == set()


@needs_openvino
@pytest.mark.parametrize("rule", ["V03", "V04", "V05", "V06", "V08", "V09", "V14"])
def test_ops_that_a_finding_says_run_in_float_do_so(rule: str) -> None:
    """In the compiled model; those of the clean twin run in integers, but for V09, whose twin is all float."""
    bad, good = SEEDED[rule]
    for made, integer in ((bad, False), (good, rule != "V09")):
        layers = layers_by_name(OPENVINO_RUNTIME.open(made().SerializeToString(), None).layers())
        assert (layers.get("op_out") or layers["op"]).integer is integer


@needs_openvino
def test_a_model_that_does_not_compile_is_refused() -> None:
    (one,) = [one for one in lint(compiled()["V15"], "openvino") if one.rule == "V15"]
    assert one.severity == "error"
    assert "OpenVINO refuses the model: " in one.why


@needs_openvino
@pytest.mark.parametrize(
    ("name", "effect"),
    [
        ("recurrent float", "does not compile"),
        ("recurrent i8", "runs in integers, with wrong states"),
        ("gru i8", "runs in integers, with wrong states"),
    ],
)
def test_what_dequantized_weights_of_recurrent_ops_lead_to(name: str, effect: str) -> None:
    findings = lint(SHOWN[name].make(), "openvino")
    assert [one.rule for one in findings if effect in one.why] == ["V07"]
    assert ("V15" in {one.rule for one in findings}) is (effect == "does not compile")


def test_weights_of_recurrent_ops_that_a_file_for_onnxruntime_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenVINO does not compile an LSTM with such weights; the rule says so where it is not installed."""
    monkeypatch.setattr(rules_of_openvino, "OPENVINO_RUNTIME", replace(OPENVINO_RUNTIME, absent=lambda: "not asked"))
    graph = graphs.load(SHOWN["recurrent weights"].make())
    assert decode_at_load(graph)
    assert found(graphs.to_proto(graph)) == {"V07"}


@needs_openvino
def test_ops_in_float_for_other_reasons_are_found_in_the_compiled_model() -> None:
    assert found(compiled()["V16"]) == {"V16"}


def test_every_rule_is_tested() -> None:
    ids = [rule.id for rule in OPENVINO_RULES]
    assert ids == sorted(set(ids))
    assert set(ids) - set(SEEDED) == {"V15", "V16"}

"""The rules of the QNN provider: each finds the mistake that was seeded for it, and nothing in the clean twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import quantize
from sbonnx.linting import lint
from sbonnx.linting.qnn import QNN_RULES
from tests.backends.qnn.graphs import feeds_for
from tests.backends.qnn.test_plan import residual
from tests.support.qdq_models import CHANNELS, Net

Made = Callable[[], onnx.ModelProto]


def conv(it: Net, x: str, *bias: str, **weights: Any) -> str:
    w = it.codes(it.weight(CHANNELS, CHANNELS, 1, 1), weights.pop("scale", np.full(CHANNELS, 0.01)), **weights)
    return it.op("Conv", x, w, *bias)


def single(*, scale: Any = 0.05, bias: float | None = None, leaves: bool = False, **weights: Any) -> Made:
    """A convolution between pairs."""

    def make() -> onnx.ModelProto:
        it = Net()
        y = conv(it, it.pair("x", scale), *([] if bias is None else [it.bias(bias)]), **weights)
        return it.done(y if leaves else it.pair(y, 0.1))

    return make


def computed() -> onnx.ModelProto:
    it = Net()
    scale = it.op("ReduceMax", it.op("Abs", "x"), keepdims=0)
    zero = it.keep(0, "uint8")
    x = it.op("DequantizeLinear", it.op("QuantizeLinear", "x", scale, zero), scale, zero)
    return it.done(it.pair(conv(it, x), 0.1))


def unary(op: str, kind: Any = "uint8", scale: float = 0.1, zero: int = 0, before: Any = None, **attrs: Any) -> Made:
    """One op between two pairs."""

    def make() -> onnx.ModelProto:
        it = Net()
        x = it.pair("x", 0.1, kind=before or kind)
        return it.done(it.pair(it.op(op, x, **attrs), scale, zero, kind=kind))

    return make


def add(*, constant: bool) -> Made:
    """An Add of a constant, in float or as integers."""

    def make() -> onnx.ModelProto:
        it = Net()
        other = it.keep(np.ones((CHANNELS, 1, 1))) if constant else it.codes(np.full((4, 1, 1), 9), 0.1, 0, "uint8")
        return it.done(it.pair(it.op("Add", it.pair("x"), other), 0.1))

    return make


def matmul(axis: int) -> Made:
    """A product whose weight has scales along an axis."""

    def make() -> onnx.ModelProto:
        it = Net(("N", 8, CHANNELS))
        w = it.codes(it.weight(CHANNELS, CHANNELS), np.full(CHANNELS, 0.01), axis=axis)
        return it.done(it.pair(it.op("MatMul", it.pair("x"), w), 0.1))

    return make


def converted(*, chained: bool) -> Made:
    """8 bits before an op of 16 bits, with and without a conversion."""

    def make() -> onnx.ModelProto:
        it = Net()
        x = it.pair("x")
        x = it.pair(x, 0.001, kind="uint16") if chained else x
        x = it.pair(it.op("Relu", x), 0.001, kind="uint16")
        return it.done(it.pair(it.op("Mul", x, x), 0.1))  # arithmetic may write another width than it reads

    return make


SEEDED: dict[str, tuple[Made, Made]] = {
    "Q01": (single(scale=0.0), single()),
    "Q02": (computed, single()),
    "Q03": (unary("Erf"), unary("Gelu")),
    "Q04": (add(constant=True), add(constant=False)),
    "Q05": (single(leaves=True), single()),
    "Q06": (matmul(0), matmul(1)),
    "Q07": (single(zero=3), single(scale=0.05)),
    "Q08": (single(kind="int2", scale=0.01), single(kind="int4", scale=0.01)),
    "Q09": (converted(chained=False), converted(chained=True)),
    "Q10": (unary("Sigmoid", "uint16", 0.001), unary("Sigmoid", "uint16", 2.0**-16)),
    "Q11": (unary("Transpose", perm=[0, 1, 3, 2], scale=0.2), unary("Transpose", perm=[0, 1, 3, 2])),
    "Q12": (single(bias=0.0007), single(bias=0.0005)),
}
"""A model with the mistake, and one without, by rule."""


def found(model: Any) -> set[str]:
    return {one.rule for one in lint(model, "qnn")}


@pytest.mark.parametrize("rule", SEEDED)
def test_a_seeded_mistake_is_found_by_its_rule_alone(rule: str) -> None:
    bad, good = SEEDED[rule]
    assert found(bad()) == {rule}
    assert found(good()) == set()


@pytest.mark.parametrize("bits", ["w8a8", "w8a16"])
def test_our_files_have_no_findings(bits: str) -> None:
    report = quantize(residual(), feeds_for(residual()), backend="qnn", bits=bits, verify=False)
    assert report.quantized is not None
    assert lint(report.quantized, "qnn") == []


def test_a_rectifier_that_onnxruntime_removes_is_part_of_its_unit() -> None:
    it = Net()
    assert found(it.done(it.pair(it.op("Relu", conv(it, it.pair("x"))), 0.1))) == set()
    it = Net()
    kept = it.op("Relu", conv(it, it.pair("x")))
    assert found(it.done(it.pair(kept, 0.1, 9))) == {"Q04", "Q05"}


def test_every_rule_is_tested() -> None:
    ids = [rule.id for rule in QNN_RULES]
    assert ids == sorted(set(ids)) == list(SEEDED)

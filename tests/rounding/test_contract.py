"""What every rounding keeps to: the contract of plug-ins, and arbitrary layers. A row in `ROUNDERS` is tested here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper

from sbonnx import testing
from sbonnx.errors import RecipeError
from sbonnx.rounding import ROUNDERS, Rounded, make_rounder
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import CASES, Case, Layer, layer, rows

by_name = pytest.mark.parametrize("name", ROUNDERS)
by_case = pytest.mark.parametrize("case", CASES)

FAST: dict[str, dict[str, Any]] = {"adaround": {"iterations": 200}, "adaquant": {"iterations": 100}}
"""Arguments that take less time than the defaults."""


def rounded(name: str, one: Layer) -> Rounded:
    """The weight of a layer, by the rounding called `name`."""
    return make_rounder(name, FAST.get(name, {})).round(one.weight, one.qparams, one.moments)


@by_name
def test_the_contract_of_plugins(name: str) -> None:
    testing.check_rounding(name, FAST.get(name))


@pytest.mark.sampled(20)
@by_name
@by_case
def test_never_worse_than_nearest(name: str, case: str) -> None:
    """By the explicit rows: in all, and output by output where no other output reads the scales that may move."""
    one = layer(CASES[case])
    found = rounded(name, one)
    nearest = Rounded(one.qparams.quantize(one.weight), one.qparams)
    assert found.codes.dtype == one.qparams.spec.dtype and found.codes.shape == one.weight.shape
    assert found.codes.min() >= one.qparams.spec.qmin and found.codes.max() <= one.qparams.spec.qmax
    error, plain = one.error(found), one.error(nearest)
    assert error.sum() <= plain.sum() * (1 + 1e-5)
    if found.loss is not None and found.nearest is not None:
        np.testing.assert_allclose([found.loss, found.nearest], [error.sum(), plain.sum()], rtol=1e-4, atol=1e-9)
    if not ROUNDERS[name].moves_scales or (one.qparams.spec.axis == 0 and one.layout.op == "Conv"):
        assert (error <= plain * (1 + 1e-5) + 1e-9).all()


@by_name
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    bits=st.integers(2, 8),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 12)),
    loud=st.floats(-12, 12),
    two=st.booleans(),
    symmetric=st.booleans(),
)
def test_any_layer(
    name: str, seed: int, bits: int, shape: tuple[int, int], loud: float, two: bool, symmetric: bool
) -> None:
    """Whatever the width and magnitude, with fewer rows than inputs too: in range and no worse than nearest."""
    one = layer(Case("Gemm", shape, QuantSpec(bits, axis=0, symmetric=symmetric), {"transB": 1}, two), seed)
    few = rows(np.random.default_rng(seed), 1, shape[1], count=max(1, seed % 20)) * np.float32(10.0**loud)
    one = replace(one, x=few, quantized=few)
    found = rounded(name, one)
    nearest = one.error(Rounded(one.qparams.quantize(one.weight), one.qparams))
    assert found.codes.min() >= one.qparams.spec.qmin and found.codes.max() <= one.qparams.spec.qmax
    # Where rows are few, errors of 0 are reached up to the last bits of the moments.
    tiny = 1e-9 * float((few.astype(np.float64) ** 2).sum()) * float((one.weight**2).sum())
    assert one.error(found).sum() <= nearest.sum() * (1 + 1e-4) + tiny


@by_name
@pytest.mark.parametrize("symmetric", [True, False])
def test_onnxruntime_makes_the_same_error(name: str, symmetric: bool) -> None:
    """The codes in a file, run by onnxruntime, lose what the rounding says."""
    ort = pytest.importorskip("onnxruntime")
    spec = QuantSpec(bits=8, axis=0, symmetric=symmetric)
    one = layer(Case("Conv", (6, 4, 1, 1), spec, {"group": 2}))
    found = rounded(name, one)
    image = one.x.transpose(0, 2, 1).reshape(1, 8, 20, -1)

    def run(*weight: onnx.NodeProto, tensors: dict[str, Array]) -> Array:
        nodes = [*weight, helper.make_node("Conv", ["x", "w"], ["y"], group=2)]
        x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, image.shape)
        y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
        constants = [numpy_helper.from_array(value, key) for key, value in tensors.items()]
        graph = helper.make_graph(nodes, "g", [x], [y], constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.asarray(session.run(None, {"x": image})[0], np.float64)

    dequantize = helper.make_node("DequantizeLinear", ["q", "s", "z"], ["w"], axis=0)
    stored = {"q": found.codes, "s": found.qparams.scale, "z": found.qparams.zero_point}
    error = ((run(tensors={"w": one.weight}) - run(dequantize, tensors=stored)) ** 2).mean(axis=(0, 2, 3))
    np.testing.assert_allclose(error, one.error(found).ravel(), rtol=1e-3, atol=1e-9)
    if found.loss is not None:
        assert error.sum() == pytest.approx(found.loss, rel=1e-3)


def test_an_unknown_name() -> None:
    with pytest.raises(RecipeError, match=r"no rounding 'up': there are .*adaquant, adaround"):
        make_rounder("up", {})

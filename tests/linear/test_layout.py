"""Weights as stacks of matrices and back, and their scales spread the same way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from sbonnx.linear.layout import KNOWN, layout_of
from sbonnx.spec import QuantSpec, bounds_of, params_from_bounds
from tests.rounding.layers import scales
from tests.support.linear_ops import FIXED, Linear, linear_ops


@settings(max_examples=100, deadline=None)
@given(linear_ops())
def test_matrices_and_back(case: Linear) -> None:
    layout, weight = case.layout, case.constant(0)
    matrices = layout.matrices(weight)
    assert matrices.shape == (layout.groups, layout.outputs, layout.inputs)
    assert np.array_equal(np.sort(matrices, axis=None), np.sort(weight, axis=None))
    back = layout.weight(matrices)
    assert np.array_equal(back, weight)
    assert back.flags.c_contiguous


@pytest.mark.parametrize("name", FIXED)
def test_the_input_keeps_the_order_of_channels(name: str) -> None:
    """One input channel after the other, and the window within: what every file with rows or moments relies on."""
    case = FIXED[name]
    layout = case.layout
    weight = np.arange(np.prod(case.weight)).reshape(case.weight)
    row = layout.matrices(weight)[0, 0]
    if case.op == "Conv":
        assert np.array_equal(row, weight[0].reshape(-1))
    elif case.op == "ConvTranspose":
        channels = case.weight[0] // layout.groups
        assert np.array_equal(row, weight[:channels, 0].reshape(-1))
    elif case.op == "Gather":
        assert row == weight.reshape(-1)[0]
    else:
        across = case.attributes.get("transB", 0)
        first = weight.reshape(-1, *case.weight[-2:])[0]
        assert np.array_equal(row, first[0] if across else first[:, 0])


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_every_weight_has_its_scale(name: str, axis: int | None) -> None:
    """Codes times scales, matrix by matrix, are what `QParams` says of the whole weight."""
    case = FIXED[name]
    layout, weight = case.layout, case.constant(0)
    spec = QuantSpec(bits=4, axis=axis, symmetric=False)
    qparams = params_from_bounds(bounds_of(weight, axis), spec)
    codes = qparams.quantize(weight)
    scale, zero = layout.spread(qparams.scale, qparams), layout.spread(qparams.zero_point, qparams)
    meant = (layout.matrices(codes).astype(np.float32) - zero.astype(np.float32)) * scale
    assert np.array_equal(layout.weight(meant), qparams.dequantize(codes))


def test_blocks_of_scales_are_spread() -> None:
    layout = layout_of("MatMul", {}, (8, 3))
    assert layout is not None
    weight = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    qparams = scales(weight, QuantSpec(bits=4, axis=0, block_size=4))
    spread = layout.spread(qparams.scale, qparams)
    assert spread.shape == (1, 3, 8)
    assert np.array_equal(spread[0], np.repeat(qparams.scale.T, 4, axis=1))


@pytest.mark.parametrize(
    ("op", "attributes", "shape"),
    [
        ("Relu", {}, (3, 3)),
        ("Conv", {}, (3, 3)),
        ("Conv", {}, (0, 3, 1, 1)),
        ("Gemm", {}, (2, 3, 4)),
        ("MatMul", {}, (3,)),
        ("Gather", {"axis": 1}, (3, 4)),
        ("Gather", {}, ()),
    ],
)
def test_what_is_no_product_has_no_layout(op: str, attributes: dict[str, int], shape: tuple[int, ...]) -> None:
    assert layout_of(op, attributes, shape) is None


def test_the_known_ops_are_known() -> None:
    assert {case.op for case in FIXED.values()} == set(KNOWN)

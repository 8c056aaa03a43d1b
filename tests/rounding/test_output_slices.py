"""Large weights in slices of outputs, against the whole weight at once."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.rounding import output_slices as module
from sbonnx.rounding.gptq import Gptq
from sbonnx.rounding.output_slices import output_slices, round_in_slices
from sbonnx.spec import QuantSpec
from tests.rounding.layers import Case, layer

CASES = {
    "gemm": Case("Gemm", (24, 9), QuantSpec(bits=4, axis=1)),
    "gemm, transB": Case("Gemm", (9, 24), QuantSpec(bits=4, axis=0), {"transB": 1}, two=True),
    "affine blocks": Case("MatMul", (48, 9), QuantSpec(bits=3, axis=0, block_size=16, symmetric=False), two=True),
}


@pytest.mark.parametrize("case", CASES)
def test_slices_give_what_the_whole_weight_gives(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = layer(CASES[case])
    whole = Gptq().round(one.weight, one.qparams, one.moments)
    monkeypatch.setattr(module, "WIDE", 8)
    monkeypatch.setattr(module, "WEIGHTS", 4 * one.layout.inputs)
    assert [each.layout.outputs for each in output_slices(one.layout, one.qparams)] == [4, 4, 1]
    found = round_in_slices(Gptq(), one.weight, one.qparams, one.moments)
    np.testing.assert_array_equal(found.codes, whole.codes)
    assert found.codes.dtype == whole.codes.dtype
    assert found.loss == pytest.approx(whole.loss)
    assert found.nearest == pytest.approx(whole.nearest)


@pytest.mark.parametrize(
    "case",
    [
        Case("MatMul", (2, 12, 4), QuantSpec(bits=4)),
        Case("MatMul", (12, 6), QuantSpec(bits=4, axis=0)),
        Case("MatMul", (12, 6), QuantSpec(bits=4)),
    ],
    ids=["batches", "a scale an input", "one scale"],
)
def test_scales_of_all_outputs_are_one_slice(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDE", 8)
    monkeypatch.setattr(module, "WEIGHTS", 1)
    one = layer(case)
    (only,) = output_slices(one.layout, one.qparams)
    assert one.weight[only.index].shape == one.weight.shape

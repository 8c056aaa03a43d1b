"""Which axis a product sums over, against numpy; and how long the blocks along it are."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from sbonnx.graph import load
from sbonnx.plan.blocks import block_for, in_blocks, summed_axis
from sbonnx.spec import Array, QuantSpec
from tests.support.models import model, run

CALLS = {
    "MatMul (x, w)": ((3, 8), (8, 5), 1),
    "MatMul (w, x)": ((8, 3), (5, 8), 0),
    "MatMul (x, w) ": ((2, 3, 8), (2, 8, 5), 1),
    "Gemm (x, w)": ((3, 8), (8, 5), 1),
    "Gemm <transB = 1> (x, w)": ((3, 8), (5, 8), 1),
    "Gemm <transA = 1> (x, w)": ((8, 3), (8, 5), 1),
    "MatMul (x, w)  ": ((3, 8), (8,), 1),
}
"""Shape of x, of w, and the input that w is."""


@pytest.mark.parametrize("call", CALLS)
def test_the_summed_axis_does_not_come_out(call: str) -> None:
    """Changing one place of that axis changes every output that any other change of the weight could."""
    shape, weight, index = CALLS[call]
    rng = np.random.default_rng(0)
    dims = ",".join(map(str, shape))
    proto = model(f"agraph (float[{dims}] x) => (float y) {{ y = {call} }}", w=weight)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    node = load(proto).nodes[0]
    axis = summed_axis(node, index)
    assert axis is not None and weight[axis] == 8
    x = rng.standard_normal(shape).astype(np.float32)
    values = rng.standard_normal(weight).astype(np.float32)
    whole = run(model_with(call, dims, values), {"x": x})["y"]
    changed = values.copy()
    np.moveaxis(changed, axis, 0)[3] += 1
    assert (run(model_with(call, dims, changed), {"x": x})["y"] != whole).all()


def model_with(call: str, dims: str, weight: Array) -> onnx.ModelProto:
    proto = model(f"agraph (float[{dims}] x) => (float y) {{ y = {call} }}", w=weight)
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def test_other_ops_have_none() -> None:
    conv = load(model("agraph (float[1,4,5,5] x) => (float[1,6,3,3] y) { y = Conv (x, w) }", w=(6, 4, 3, 3))).nodes[0]
    spec = QuantSpec(bits=4, axis=0)
    assert summed_axis(conv, 1) is None
    assert in_blocks(conv, 1, spec, 64) == spec


def test_lengths_of_blocks() -> None:
    assert block_for(256, None, (64, 128)) == 128
    assert block_for(192, None, (64, 128)) == 64
    assert block_for(100, None, (64, 128)) == 128  # fits nothing: refused by name later
    assert block_for(256, 64, (64, 128)) == 64
    assert block_for(256, None, ()) is None
    assert block_for(100, 32, ()) == 32


def test_the_spec_runs_along_the_summed_axis() -> None:
    node = load(model("agraph (float[N,8] x) => (float[N,5] y) { y = Gemm <transB = 1> (x, w) }", w=(5, 8))).nodes[0]
    spec = QuantSpec(bits=4, axis=0)
    assert in_blocks(node, 1, spec, 16) == QuantSpec(bits=4, axis=1, block_size=16)
    assert in_blocks(node, 1, spec, None) == spec

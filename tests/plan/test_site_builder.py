"""Blocks along the axis that a product sums over."""

from __future__ import annotations

from sbonnx.graph import load
from sbonnx.planning.site_builder import block_for, in_blocks
from sbonnx.spec import QuantSpec
from tests.support.models import model


def test_other_ops_have_none() -> None:
    conv = load(model("agraph (float[1,4,5,5] x) => (float[1,6,3,3] y) { y = Conv (x, w) }", w=(6, 4, 3, 3))).nodes[0]
    spec = QuantSpec(bits=4, axis=0)
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

"""Control flow that depends on the values of a batch: rows do not run alone, whichever feed comes first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import read
from sbonnx.calib.engine.samples import SampleSplitter
from sbonnx.graph.query import branches_on_values
from sbonnx.spec import Array
from tests.support.models import model

BY_MAXIMUM = """
agraph (float[N,4] x) => (float[N,4] y) {
    h = MatMul (x, w0)
    top = ReduceMax <keepdims = 0> (x)
    zero = Constant <value = float {0.0}> ()
    c = Greater (top, zero)
    y = If (c) <
        then_branch = above () => (float[N,4] t) { t = MatMul (h, w1) },
        else_branch = below () => (float[N,4] e) { e = Neg (h) }
    >
}"""
CONDITIONS = {
    "size": ("s = Shape (x) n = Gather (s, i0) c = Greater (n, i0)", False),
    "constant": ("c = Greater (i1, i0)", False),
    "value": ("m = ReduceMax <keepdims = 0> (x) zero = Constant <value = float {0.0}> () c = Greater (m, zero)", True),
    "number found": ("p = NonZero (x) s = Size (p) c = Greater (s, i0)", True),
    "value after a shape": ("p = Relu (x) s = Size (p) c = Greater (s, i0)", False),
}
IF = """
agraph (float[N,4] x) => (float[N,4] y) {{
    i0 = Constant <value = int64 {{0}}> ()
    i1 = Constant <value = int64 {{1}}> ()
    {condition}
    y = If (c) <
        then_branch = a () => (float[N,4] t) {{ t = Relu (x) }},
        else_branch = b () => (float[N,4] e) {{ e = Neg (x) }}
    >
}}"""
LOOP = """
agraph (float[N,4] x) => (float[N,4] y) {{
    n = Constant <value = int64 {{3}}> ()
    go = Constant <value = bool {{1}}> ()
    y = Loop (n, go, x) <
        body = round (int64 i, bool before, float[N,4] state) => (bool after, float[N,4] next) {{
            next = Relu (state)
            {after}
        }}
    >
}}"""


def feeds() -> list[dict[str, Array]]:
    """Batches whose rows take one branch, and one whose rows take two."""
    random = np.random.default_rng(0)
    rows = random.uniform(0.5, 1, (8, 4)).astype(np.float32)
    rows[5] *= -1
    return [{"x": rows[begin : begin + 2]} for begin in range(0, 8, 2)]


def test_the_order_of_the_feeds_changes_no_byte(tmp_path: Path) -> None:
    proto = model(BY_MAXIMUM, w0=(4, 4), w1=(4, 4))
    onnx.save(proto, tmp_path / "m.onnx")
    contents = set()
    for order in ([0, 1, 2, 3], [2, 1, 0, 3], [3, 0, 1, 2]):
        data = [feeds()[place] for place in order]
        sbonnx.quantize(tmp_path / "m.onnx", data, output=tmp_path / "q.onnx", force=True, advise=False, verify=False)
        contents.add((tmp_path / "q.onnx").read_bytes())
        graph = graphs.load(tmp_path / "m.onnx")
        assert [unit.feed["x"].shape[0] for unit in SampleSplitter(graph).units(read(data, graph).items())] == [2] * 4
    assert len(contents) == 1


@pytest.mark.parametrize("name", CONDITIONS)
def test_conditions_of_if(name: str) -> None:
    condition, wanted = CONDITIONS[name]
    graph = graphs.load(model(IF.format(condition=condition)))
    assert branches_on_values(graph) is wanted


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ("after = Identity (before)", False),
        ("m = ReduceMax <keepdims = 0> (next) z = Constant <value = float {0.0}> () after = Greater (m, z)", True),
    ],
)
def test_conditions_of_loop(after: str, wanted: bool) -> None:
    assert branches_on_values(graphs.load(model(LOOP.format(after=after)))) is wanted

"""Branches: decided by inputs that are fixed, else refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.errors import ModelError  # noqa: E402
from sbonnx.qat.onnx_to_torch.reimport import reimport, settle  # noqa: E402
from tests.support.models import model, residual, run  # noqa: E402

torch.set_num_threads(1)

BRANCHES = """g (float[N,T] x, int64 rate) => (float[N,T] y) {
    fast = Equal (rate, limit)
    y = If (fast) <
        then_branch = t () => (float[N,T] a) {
            s = Shape (x)
            t = Gather (s, one)
            long = Equal (t, four)
            a = If (long) <
                then_branch = tt () => (float[N,T] b) { b = Mul (x, w) },
                else_branch = te () => (float[N,T] c) { c = Neg (x) }
            >
        },
        else_branch = e () => (float[N,T] d) { d = Add (x, v) }
    >
}"""


def branches() -> onnx.ModelProto:
    values: dict[str, Any] = {"limit": np.array(16000), "one": np.array(1), "four": np.array(4), "w": 4}
    return model(BRANCHES, v=np.array([0.5, 1, 2, 3], np.float32), **values)


@pytest.mark.parametrize(("rate", "weights"), [(16000, ["w"]), (8000, ["v"])])
def test_branches_are_decided_by_fixed_inputs(rate: int, weights: list[str]) -> None:
    proto, x = branches(), np.random.default_rng(5).standard_normal((3, 4)).astype(np.float32)
    graph = graphs.load(proto)
    module = reimport(graph, fixed={"rate": rate}, shapes={"x": ("N", 4)})
    assert list(dict(module.named_parameters())) == weights
    assert list(module.meta["sbonnx"]["inputs"].values()) == ["x"]
    want = run(proto, {"x": x, "rate": np.array(rate)})["y"]
    np.testing.assert_allclose(module(torch.from_numpy(x))["y"].detach().numpy(), want, rtol=1e-6)
    assert [tensor.name for tensor in graph.inputs] == ["x", "rate"]  # the graph is as it was


def test_a_branch_that_is_not_decided_is_named() -> None:
    graph = graphs.load(branches())
    with pytest.raises(ModelError, match=r"the condition 'fast' of node 'If_\d' \(If\) is not constant"):
        reimport(graph)
    with pytest.raises(ModelError, match=r"the condition 'long' of node 'If_\d' \(If\) is not constant"):
        reimport(graph, fixed={"rate": 16000})


def test_what_cannot_be_settled() -> None:
    graph = graphs.load(branches())
    with pytest.raises(ModelError, match="the model has no input 'speed' to settle; its inputs are x, rate"):
        settle(graph, fixed={"speed": 1})
    with pytest.raises(ModelError, match=r"input 'rate' has the shape \[\]: it cannot be \[2\]"):
        settle(graph, fixed={"rate": [1, 2]})
    plain = graphs.load(residual())
    assert settle(plain) is plain

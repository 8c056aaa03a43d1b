"""Einsum as a matrix product: every layout that exporters write, against onnxruntime's own Einsum."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from sbonnx.graph import load, to_proto
from sbonnx.patterns import FUSE, SIMPLIFY, apply
from sbonnx.patterns.fuse.canonical import EINSUM_TO_MATMUL
from sbonnx.pipeline import prepare
from sbonnx.stages.state import read_recipe
from tests.support.models import model, run

SIZES = {"b": 2, "n": 5, "d": 6, "h": 3, "k": 4, "i": 5}

PRODUCTS = ["bnd,dhk->bhnk", "bhik,dhk->bid", "bnd,dh->bnh", "bdn,dh->bhn", "nd,hd->nh", "bnd,d->bn", "bnhk,hk->bn"]
"""data,weight->out"""


def einsum(equation: str, *, weight_first: bool = False, dynamic: str = "", **sizes: int) -> onnx.ModelProto:
    """One Einsum; axes of the data in `dynamic` have a name for a length, `sizes` are other lengths than usual."""
    lengths = SIZES | sizes
    terms, out = equation.split("->")
    data, weight = terms.split(",")
    shapes = [
        ",".join(letter.upper() if letter in dynamic else str(lengths[letter]) for letter in t) for t in (data, out)
    ]
    written = f"{weight},{data}->{out}" if weight_first else equation
    inputs = "w, x" if weight_first else "x, w"
    text = (
        f'agraph (float[{shapes[0]}] x) => (float[{shapes[1]}] y) {{ y = Einsum <equation = "{written}"> ({inputs}) }}'
    )
    return model(text, w=tuple(lengths[letter] for letter in weight))


@pytest.mark.parametrize("equation", PRODUCTS)
@pytest.mark.parametrize("weight_first", [False, True])
@pytest.mark.parametrize("dynamic", ["", "bn"])
def test_it_computes_the_same(equation: str, weight_first: bool, dynamic: str) -> None:
    proto = einsum(equation, weight_first=weight_first, dynamic=dynamic)
    graph = load(proto)
    apply(graph, [EINSUM_TO_MATMUL])
    assert "Einsum" not in {node.op for node in graph.nodes}
    assert sum(node.op == "MatMul" for node in graph.nodes) == 1
    made = to_proto(graph)
    for batch in (2, 3) if dynamic else (2,):
        shape = [batch if letter == "b" else SIZES[letter] for letter in equation.split(",")[0]]
        feed = {"x": np.random.default_rng(batch).standard_normal(shape).astype(np.float32)}
        assert run(made, feed)["y"] == pytest.approx(run(proto, feed)["y"], abs=2e-5)


@pytest.mark.parametrize(
    ("equation", "why"),
    [
        ("bhk,hkd->bhd", "'h' is an axis of input, weight and output"),
        ("bnd,dk->bk", "'n' is summed over in one input only"),
        ("d,dk->k", "sums over all axes"),
        ("bnd,dhk->bnk", "'h' is summed over in one input only"),
    ],
)
def test_what_is_no_matrix_product_is_refused_with_its_reason(equation: str, why: str) -> None:
    graph = load(einsum(equation))
    (refusal,) = apply(graph, [EINSUM_TO_MATMUL]).refusals
    assert refusal.what == "einsum_to_matmul"
    assert why in refusal.why
    assert [node.op for node in graph.nodes] == ["Einsum"]


def test_an_outer_product_is_left_alone() -> None:
    """Positions times frequencies of a rotary embedding: nothing is summed, so nothing is refused either."""
    graph = load(einsum("n,d->nd"))
    done = apply(graph, [EINSUM_TO_MATMUL])
    assert not done.fired
    assert not done.refusals


def test_a_weight_that_is_also_read_elsewhere_stays_for_that_reader() -> None:
    proto = model(
        """agraph (float[2,5,6] x) => (float[2,5,4] y, float[4,6] v) {
            y = Einsum <equation = "bnd,kd->bnk"> (x, w)
            v = Identity (w)
        }""",
        w=(4, 6),
    )
    graph = load(proto)
    apply(graph, [*SIMPLIFY, *FUSE])
    feed = {"x": np.random.default_rng(0).standard_normal((2, 5, 6)).astype(np.float32)}
    made, expected = run(to_proto(graph), feed), run(proto, feed)
    assert np.array_equal(made["v"], expected["v"])
    assert made["y"] == pytest.approx(expected["y"], abs=2e-5)


@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt", "virtual"])
def test_its_weight_is_quantized(backend: str) -> None:
    wishes, rules = read_recipe(None, backend, {})
    plan = prepare(einsum("bnd,dhk->bhnk", dynamic="bn", d=16, k=8), wishes, rules).plan
    (weight,) = plan.of_role("weight")
    assert weight.spec.axis == 1, "one scale an output channel"

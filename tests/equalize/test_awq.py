"""Activation-aware scaling: the function stays, the error of rounded weights falls, by explicit rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.backends import BACKENDS
from sbonnx.calib.data import dataset as datasets
from sbonnx.calib.engine.samples import Samples
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.equalize import awq as aware
from sbonnx.equalize.awq import WRITES_OUTPUT, Aware, Scaled, scale_by_activations
from sbonnx.graph.query import constant
from sbonnx.options import RunOptions
from sbonnx.pipeline import quantized_graph
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, round_by_site
from tests.support.models import model, run
from tests.support.writing import ops, prepared, sqnr

RNG = np.random.default_rng(0)
WIDE = 64

NORM = """agraph (float[N,5,64] x) => (float[N,5,32] y) {
    n = LayerNormalization (x, gamma, beta)
    a = MatMul (n, wa)
    b = MatMul (n, wb)
    y = Mul (a, b)
}"""
"""A norm that two products read: its gain and offset take up a scale."""

GELU = """agraph (float[N,64] x) => (float[N,32] y) {
    h = MatMul (x, w1)
    e = Erf (h)
    g = Mul (h, e)
    o = MatMul (g, w2)
    y = LeakyRelu (o)
}"""
"""Nothing before the second product takes up a scale."""

CHAIN = """agraph (float[N,64] x) => (float[N,32] y) {
    h = Gemm (x, w1, b1)
    r = Relu (h)
    o = Gemm <transB = 1> (r, w2, b2)
    y = LeakyRelu (o)
}"""


@pytest.fixture(autouse=True)
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small products count as large."""
    for name in BACKENDS:
        modes = {mode: replace(limits, smallest=1) for mode, limits in BACKENDS[name].modes.items()}
        monkeypatch.setitem(BACKENDS, name, replace(BACKENDS[name], modes=modes))


def uneven(*shape: int) -> Array:
    """Values whose last axis holds a few large channels."""
    x = RNG.standard_normal(shape).astype(np.float32)
    x[..., :3] *= 20
    return x


def net(text: str) -> tuple[onnx.ModelProto, list[dict[str, Array]]]:
    gamma = np.ones(WIDE, np.float32)
    gamma[:3] = 20
    all_weights: dict[str, dict[str, Any]] = {
        NORM: {"gamma": gamma, "beta": WIDE, "wa": (WIDE, 32), "wb": (WIDE, 32)},
        GELU: {"w1": (WIDE, WIDE), "w2": (WIDE, 32)},
        CHAIN: {"w1": (WIDE, WIDE), "b1": gamma * 2, "w2": (32, WIDE), "b2": 32},
    }
    weights = all_weights[text]
    shape = (4, 5, WIDE) if text is NORM else (16, WIDE)
    feeds = [{"x": uneven(*shape) if text is not NORM else RNG.standard_normal(shape).astype(np.float32)}] * 3
    return model(text, **weights), feeds


def scaled(text: str, **wishes: Any) -> tuple[onnx.ModelProto, Prepared, list[Scaled], list[dict[str, Array]]]:
    """The float model, its graph after scaling, what was said, and the data."""
    proto, feeds = net(text)
    ready = prepared(proto, mode="weight_only", **{"w.rounding.type": "nearest", "accuracy_level": 1, **wishes})
    notes, refusals = scale_by_activations(
        ready.graph, ready.plan, Samples.of(feeds, ready.graph, RunOptions(threads=1))
    )
    assert not refusals or text is CHAIN or text is GELU
    return proto, ready, notes, feeds


@pytest.mark.parametrize(("text", "muls"), [(NORM, 1), (GELU, 3), (CHAIN, 1)])
def test_the_function_stays(text: str, muls: int) -> None:
    proto, ready, notes, feeds = scaled(text)
    assert notes
    after = graphs.to_proto(ready.graph)
    onnx.checker.check_model(after, full_check=True)
    assert ops(after)["Mul"] == muls  # of the model its own, and one before each product that nothing serves
    before, now = run(proto, feeds[0])["y"], run(after, feeds[0])["y"]
    assert np.abs(before - now).max() <= 1e-5 * np.abs(before).max()


@pytest.mark.parametrize("text", [NORM, GELU, CHAIN])
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine"])
@pytest.mark.parametrize("block", [16, 32])
def test_the_error_falls(text: str, scheme: str, block: int) -> None:
    wishes: dict[str, Any] = {"w_qscheme": scheme, "block_size": block, "w_bit": 4, "w_observer": "minmax"}
    proto, ready, notes, feeds = scaled(text, **wishes)
    plain = prepared(proto, mode="weight_only", **{"w.rounding.type": "nearest", "accuracy_level": 1, **wishes})
    reference = run(proto, feeds[0])["y"]
    figures = []
    for one in (plain, ready):
        graph = quantized_graph(one, weights_alone(one.graph, one.plan, round_by_site))
        figures.append(sqnr(reference, run(graphs.to_proto(graph), feeds[0])["y"]))
    assert notes and figures[1] > figures[0] + 1, figures


def test_even_channels_are_left_alone() -> None:
    text = "agraph (float[N,64] x) => (float[N,32] y) { o = MatMul (x, w) y = LeakyRelu (o) }"
    proto = model(text, w=np.ones((64, 32), np.float32))
    ready = prepared(proto, mode="weight_only", **{"w.rounding.type": "nearest"})
    feeds = [{"x": RNG.standard_normal((8, 64)).astype(np.float32)}]
    notes, refusals = scale_by_activations(
        ready.graph, ready.plan, Samples.of(feeds, ready.graph, RunOptions(threads=1))
    )
    assert not notes
    assert [(one.where, one.what) for one in refusals] == [("x", "scale by activations")]
    assert ops(graphs.to_proto(ready.graph)) == {"MatMul": 1, "LeakyRelu": 1}


def test_a_product_that_writes_an_output_is_left_alone() -> None:
    """A classifier: what lowers the squared error of its scores need not lower the distance of probabilities."""
    proto = model("agraph (float[N,64] x) => (float[N,32] y) { y = MatMul (x, w) }", w=(64, 32))
    ready = prepared(proto, mode="weight_only", **{"w.rounding.type": "nearest"})
    feeds = [{"x": uneven(16, WIDE)}]
    notes, refusals = scale_by_activations(
        ready.graph, ready.plan, Samples.of(feeds, ready.graph, RunOptions(threads=1))
    )
    assert not notes and WRITES_OUTPUT in refusals[0].why


@pytest.mark.parametrize("observer", ["minmax", "mse"])
@pytest.mark.parametrize("scheme", ["per-channel-symmetric", "per-channel-affine"])
def test_scales_are_searched_with_the_quantizer_of_the_file(
    observer: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proto, feeds = net(NORM)
    wishes = {"w.rounding.type": "nearest", "w_observer": observer, "w_qscheme": scheme}
    ready = prepared(proto, mode="weight_only", **wishes)
    seen: dict[str, Aware] = {}
    monkeypatch.setattr(aware, "awq", lambda graph, layers, multiply: (seen.update(layers), ([], []))[1])
    scale_by_activations(ready.graph, ready.plan, Samples.of(feeds, ready.graph, RunOptions(threads=1)))
    solution = weights_alone(ready.graph, ready.plan, round_by_site)
    weights = {node.name: (node.inputs[1].name, constant(node.inputs[1])) for node in ready.graph.nodes}
    assert len(seen) == 2
    for name, one in seen.items():
        tensor, weight = weights[name]
        assert weight is not None
        np.testing.assert_array_equal(
            one.fake_quant(weight), solution.qparams[tensor].dequantize(solution.codes[tensor])
        )


@pytest.mark.parametrize("data", [True, False])
def test_the_recipe_asks_for_it(data: bool) -> None:
    proto, feeds = net(NORM)
    report = sbonnx.quantize(proto, feeds if data else None, mode="weight_only", awq=True, accuracy_level=1)
    assert report.quantized is not None
    assert [one.pattern for one in report.applied if one.pattern.startswith("awq")] == (["awq"] if data else [])
    assert any(one.where == "EQUALIZE.AWQ" for one in report.refusals) != data
    assert ops(report.quantized)["Mul"] == 1


def test_moments_in_several_passes_give_the_same() -> None:
    kinds = []
    proto, feeds = net(GELU)
    for memory in ("2 GiB", "4 MiB"):
        ready = prepared(proto, mode="weight_only", **{"w.rounding.type": "nearest"})
        data = datasets.read(feeds, ready.graph)
        notes, _ = scale_by_activations(
            ready.graph, ready.plan, Samples.of(data, ready.graph, RunOptions(threads=1, memory=memory))
        )
        kinds.append((notes, run(graphs.to_proto(ready.graph), feeds[0])["y"]))
    assert [one.tensor for one in kinds[0][0]] == [one.tensor for one in kinds[1][0]] == ["x", "g"]
    np.testing.assert_allclose(kinds[0][1], kinds[1][1], rtol=1e-4, atol=1e-4)


def test_a_weight_that_several_products_read_is_left_alone() -> None:
    """Their inputs need other scales, and a copy of the weight for each would make the file larger."""
    text = """agraph (float[N,64] x) => (float[N,64] y) {
        h = MatMul (x, w)
        e = Erf (h)
        o = MatMul (e, w)
        y = LeakyRelu (o)
    }"""
    ready = prepared(model(text, w=(WIDE, WIDE)), mode="weight_only", **{"w.rounding.type": "nearest"})
    data = datasets.read([{"x": uneven(16, WIDE)}], ready.graph)
    done, refusals = scale_by_activations(ready.graph, ready.plan, Samples.of(data, ready.graph))
    assert not done
    assert [one.why for one in refusals] == [aware.SHARED.format(ready.graph.nodes[0].name)]
    assert ready.graph.nodes[0].inputs[1] is ready.graph.nodes[2].inputs[1]

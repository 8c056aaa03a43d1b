"""Which scales are chosen, what they are good for, and what is said of the rest."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.calib.engine.samples import Samples
from sbonnx.equalize import Equalization, Equalized, channel_ranges, equalize, equalize_measured, wanted_ranges
from sbonnx.errors import RecipeError
from sbonnx.graph.query import constant
from sbonnx.quant_model import QuantModel
from sbonnx.recipe import load
from sbonnx.spec import Array
from tests.support.models import model, run
from tests.support.values import some

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Make the numbers independent of the tests that ran before."""
    RNG.bit_generator.state = np.random.default_rng(5).bit_generator.state


PAIR = """agraph (float[N,3,8,8] x) => (float[N,5,8,8] y) {
    c = Conv <kernel_shape = [3,3], pads = [1,1,1,1]> (x, w, b)
    r = Relu(c)
    y = Conv (r, v, d)
}"""


def uneven(shape: tuple[int, ...], axis: int, octaves: float = 4.0) -> Array:
    """Normal numbers whose channels along `axis` differ by up to so many octaves either way."""
    size = [1] * len(shape)
    size[axis] = shape[axis]
    factor = 2.0 ** RNG.uniform(-octaves, octaves, size)
    return (RNG.standard_normal(shape) * factor).astype(np.float32)


def pair(bias: Any = 16) -> onnx.ModelProto:
    return model(PAIR, w=uneven((16, 3, 3, 3), 0), b=bias, v=uneven((5, 16, 1, 1), 1), d=5)


def images(count: int = 4, channels: int = 3) -> list[dict[str, Array]]:
    return [{"x": RNG.standard_normal((1, channels, 8, 8)).astype(np.float32)} for _ in range(count)]


def measured(graph: graphs.Graph, settings: Equalization, feeds: list[dict[str, Array]]) -> Equalized:
    """`equalize_measured` on the ranges of feeds."""
    data = Samples.of(feeds, graph)
    return equalize_measured(graph, settings, channel_ranges(graph, wanted_ranges(graph, settings), data))


def close(before: onnx.ModelProto, graph: graphs.Graph, feeds: list[dict[str, Array]]) -> None:
    after = graphs.to_proto(graph)
    for feed in feeds:
        want, got = run(before, feed)["y"], run(after, feed)["y"]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def weights(graph: graphs.Graph) -> list[Array]:
    found = [constant(node.inputs[1]) for node in graph.nodes if node.op in ("Conv", "MatMul")]
    return [weight for weight in found if weight is not None]


def test_cross_layer_reaches_the_fixed_point_of_the_paper() -> None:
    """Every channel has the same share of the largest range in both layers: r1_i / R1 = r2_i / R2."""
    proto = pair(np.zeros(16, np.float32))
    graph = graphs.load(proto)
    done = equalize(graph, Equalization(cross_layer=True))
    close(proto, graph, images())
    first, second = weights(graph)
    rows, columns = np.abs(first).max((1, 2, 3)), np.abs(second).max((0, 2, 3))
    np.testing.assert_allclose(rows / rows.max(), columns / columns.max(), rtol=1e-3)
    assert [row.node for row in done.fired] == [graph.nodes[2].name]
    assert [refusal.why for refusal in done.refusals] == ["'x' is an input"]


def test_a_channel_that_is_nearly_constant_leaves_the_others_their_range() -> None:
    """Weights near 0 and a large bias: equal ranges of weights would give it nearly all of its tensor's range."""
    w, b = RNG.standard_normal((16, 3, 3, 3)).astype(np.float32), np.zeros(16, np.float32)
    w[0], b[0] = w[0] * 1e-4, 3.0
    proto = model(PAIR, w=w, b=b, v=(5, 16, 1, 1), d=5)
    wishes: dict[str, Any] = {"w_qscheme": "per-tensor-symmetric", "cross_layer": True}
    report = sbonnx.quantize(proto, images(8), backend="virtual", **wishes)
    assert some(report.metrics).outputs[0].sqnr_db > 30  # 20 by the formula alone


def test_cross_layer_helps_per_tensor_weights() -> None:
    """On onnxruntime, 8 bits a tensor, neighbouring layers of channels that differ by octaves."""
    proto, feeds = pair(), images(8)
    how: dict[str, Any] = {"w_qscheme": "per-tensor-symmetric", "backend": "virtual"}
    plain = sbonnx.quantize(proto, feeds, **how)
    better = sbonnx.quantize(proto, feeds, cross_layer=True, **how)
    assert some(better.metrics).outputs[0].sqnr_db > some(plain.metrics).outputs[0].sqnr_db + 3


NORMED = """agraph (float[N,6,16] x) => (float[N,6,16] y) {
    n = LayerNormalization <axis = -1> (x, g, s)
    m = MatMul(n, w)
    k = MatMul(n, u)
    h = Add(m, k)
    y = OUT
}"""
NORM: dict[str, Any] = {"g": uneven((16,), 0), "s": 16, "w": (16, 16), "u": (16, 16)}


def rows(count: int = 4) -> list[dict[str, Array]]:
    return [{"x": RNG.standard_normal((1, 6, 16)).astype(np.float32)} for _ in range(count)]


@pytest.mark.parametrize(("out", "nodes"), [("Relu(h)", 0), ("Add(h, n)", 1)], ids=["folded", "with a Mul"])
def test_smooth_quant_evens_what_products_read(out: str, nodes: int) -> None:
    """Into the norm where only products read it; by one Mul for both where an addition reads it too."""
    proto, feeds = model(NORMED.replace("OUT", out), **NORM), rows()
    graph = graphs.load(proto)
    before = max(spread(graph, feeds).values())
    done = measured(graph, Equalization(smooth=(0.5, 0.5)), feeds)
    close(proto, graph, feeds)
    assert sum(node.op == "Mul" for node in graph.nodes) == nodes
    assert len(done.fired) == 2 and not done.refusals
    (after,) = spread(graph, feeds).values()
    assert after < before / 4


def spread(graph: graphs.Graph, feeds: list[dict[str, Array]]) -> dict[str, float]:
    """By tensor that products read: its largest channel in parts of its smallest."""
    ranges = channel_ranges(graph, wanted_ranges(graph, Equalization(smooth=(0.5, 0.5))), Samples.of(feeds, graph))
    ends = {name: np.maximum(np.abs(found.lo), np.abs(found.hi)) for name, found in ranges.items()}
    return {name: float(found.max() / found.min()) for name, found in ends.items()}


def test_a_bias_that_is_never_cut_moves_to_the_next_layer() -> None:
    values: dict[str, Any] = {
        "w": (4, 3, 3, 3),
        "b": np.array([100, 200, 0, -100], np.float32),
        "v": (5, 4, 1, 1),
        "d": 5,
    }
    proto, feeds = model(PAIR, **values), images()
    graph = graphs.load(proto)
    done = measured(graph, Equalization(absorb_bias=True), feeds)
    close(proto, graph, feeds)
    bias = constant(graph.nodes[0].inputs[2])
    assert bias is not None and (bias[:2] < 60).all()
    np.testing.assert_array_equal(bias[2:], values["b"][2:])
    assert [row.node for row in done.fired] == [graph.nodes[0].name]
    padded = model(
        PAIR.replace("Conv (r", "Conv <pads = [1,1,1,1], kernel_shape = [3,3]> (r"), **values | {"v": (5, 4, 3, 3)}
    )
    graph = graphs.load(padded)
    refused = measured(graph, Equalization(absorb_bias=True), feeds).refusals
    assert len(refused) == 1 and "pads with zeros" in refused[0].why


OFFSET = """agraph (float[N,6,16] x) => (float[N,6,16] y) {
    n = LayerNormalization <axis = -1> (x, g, s)
    size = Shape(n)
    m = MatMul(n, w)
    a = Add(b, m)
    k = MatMul(n, u)
    c = Add(k, d)
    h = Add(a, c)
    y = Reshape(h, size)
}"""
OFFSETS: dict[str, Any] = {"g": 16, "s": np.eye(16)[3] * 20 - np.eye(16)[5] * 9, "w": (16, 16), "u": (16, 16)}


def offset(bias: Any = 16) -> onnx.ModelProto:
    """A norm two of whose channels have large offsets, as outliers of transformers do, before two layers."""
    values = {**OFFSETS, "s": OFFSETS["s"].astype(np.float32), "b": bias, "d": (1, 1, 16)}
    return model(OFFSET, **values)


def test_centers_of_the_channels_of_a_norm_move_to_the_next_layers() -> None:
    proto, feeds = offset(), rows()
    graph = graphs.load(proto)
    done = measured(graph, Equalization(absorb_bias=True), feeds)
    close(proto, graph, feeds)
    assert [row.node for row in done.fired] == [graph.nodes[0].name] and not done.refusals
    ranges = channel_ranges(graph, {"n": 2}, Samples.of(feeds, graph))["n"]
    np.testing.assert_allclose(ranges.lo, -ranges.hi, atol=1e-5)
    graph = graphs.load(offset(()))
    refused = measured(graph, Equalization(absorb_bias=True), feeds).refusals
    assert [refusal.why.code for refusal in refused] == ["no-bias"]


def test_one_scale_serves_all_channels_of_a_norm_without_offsets() -> None:
    how: dict[str, Any] = {"backend": "virtual", "w_bit": 8, "a_bit": 4, "rounding": "nearest"}
    proto, feeds = offset(), rows()
    plain = some(sbonnx.quantize(proto, feeds, **how).metrics).outputs[0].sqnr_db
    better = some(sbonnx.quantize(proto, feeds, absorb_bias=True, **how).metrics).outputs[0].sqnr_db
    assert better > plain + 3


def test_the_recipe_asks_for_it_and_the_report_says_what_was_done() -> None:
    proto, feeds = pair(), images()
    report = sbonnx.quantize(proto, feeds, smooth_quant=0.4, cross_layer=True, backend="virtual")
    assert {"smooth_quant", "equalize_cross_layer"} <= {row.pattern for row in report.applied}
    assert any(refusal.what == "smooth_quant" for refusal in report.refusals)
    nothing = sbonnx.quantize(proto, feeds, backend="virtual")
    assert not {"smooth_quant", "equalize_cross_layer"} & {row.pattern for row in nothing.applied}
    with pytest.raises(RecipeError, match="SMOOTH_QUANT"):
        load({"EQUALIZE": {"SMOOTH_QUANT": 2}})


def test_step_by_step_gives_the_same_numbers(tmp_path: Path) -> None:
    proto, feeds = pair(), images()
    report = sbonnx.quantize(proto, feeds, smooth_quant=True, backend="virtual", verify=False)
    with QuantModel(proto, backend="virtual", smooth_quant=True) as stepwise:
        for _ in range(2):  # the second time nothing is left to do
            stepwise.prepare_calibration()
            for feed in feeds:
                stepwise(feed)
            stepwise.calc_qparams()
        stepwise.export_onnx(tmp_path / "q.onnx")
    assert report.quantized is not None
    one = {value.name: value.raw_data for value in report.quantized.graph.initializer}
    other = {value.name: value.raw_data for value in onnx.load(tmp_path / "q.onnx").graph.initializer}
    assert one == other


@pytest.mark.slow
def test_it_saves_a_mobile_net(pack: Path) -> None:
    """Per-tensor weights by cross-layer scales, per-channel ones by SmoothQuant: nearer to float, by themselves."""
    sys.path.insert(0, str(pack))
    evaluation = importlib.import_module("eval")
    samples = evaluation.load_calib("mobilenetv2_tin200", limit=128)
    source = pack / "models" / "mobilenetv2_tin200.onnx"

    def db(feeds: list[dict[str, Array]], **how: Any) -> float:
        report = sbonnx.quantize(source, feeds, bias_correction="none", effort="fast", cpu="vnni", heads="none", **how)
        return float(some(report.metrics).outputs[0].sqnr_db)

    tensor: dict[str, Any] = {"w_qscheme": "per-tensor-symmetric"}
    few = samples[:32]
    assert db(few, cross_layer=True, **tensor) > db(few, **tensor) + 6
    assert db(samples, smooth_quant=True) > db(samples) + 1

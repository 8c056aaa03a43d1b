"""`strip` undoes `insert`: real models to the last name, weights within half a quantum; and pairs of other forms."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx import graph as graphs
from sbonnx import qdq
from sbonnx.backends.onnxruntime.convolutions import align
from sbonnx.calib.data import dataset as datasets
from sbonnx.graph import Graph, query
from sbonnx.pipeline import prepare, quantized_graph
from sbonnx.planning import Solution
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, read_recipe, round_by_site
from tests.support import calibration as walk
from tests.support.models import model, residual, run
from tests.support.qdq_models import CHANNELS, Net

Shape = list[tuple[str, str, list[str], list[str]]]

SETTINGS: dict[str, dict[str, Any]] = {
    "onnxruntime": {"backend": "onnxruntime", "cpu": "vnni"},
    "tensorrt": {"backend": "tensorrt"},
    "float weights": {"backend": "tensorrt", "weights": "qdq"},
    "narrow": {"backend": "virtual", "bits": "w4a6"},
}
"""Uint8 with int32 biases, int8, weights as float + Q + DQ, int4 codes and Clips before the QuantizeLinear.

Pair limits of other CPUs than vnni move codes by more than half a step.
"""


def structure(graph: Graph) -> Shape:
    """Every node in order with the names of what it reads and writes."""
    return [
        (node.name, node.op, [tensor.name for tensor in node.inputs], [tensor.name for tensor in node.outputs])
        for node in query.all_nodes(graph)
    ]


def interface(graph: Graph) -> list[tuple[str, Any, Any]]:
    return [(tensor.name, tensor.shape, tensor.dtype) for tensor in [*graph.inputs, *graph.outputs]]


def inserted(source: Any, feeds: Any, wishes: dict[str, Any]) -> tuple[Prepared, Solution]:
    overrides = {key: value for key, value in wishes.items() if key != "backend"}
    recipe, rules = read_recipe(None, wishes["backend"], overrides)
    prepared = prepare(source, recipe, rules)
    samples = datasets.read(feeds, prepared.graph)
    return prepared, walk.calibrate(prepared.graph, prepared.plan, samples, solve=round_by_site)


def worst_distance(prepared: Prepared, solution: Solution, stripped: Graph) -> float:
    """How far any weight or bias is from its float value, in quanta past what float32 itself rounds."""
    before, after = query.tensors_by_name(prepared.graph), query.tensors_by_name(stripped)
    worst = 0.0
    for site in prepared.plan.sites:
        if site.key not in solution.codes:
            continue
        x, y = query.constant(before[site.tensor]), query.constant(after[site.tensor])
        assert x is not None and y is not None
        scale = solution.bias_scales[site.key] if site.role == "bias" else None
        if scale is None:
            found = solution.qparams[site.key]
            along = [-1 if at == site.spec.axis else 1 for at in range(x.ndim)] if found.scale.ndim else []
            scale = found.scale.reshape(along)
        rounding = np.finfo(np.float32).eps * np.abs(x.astype(np.float64))
        worst = max(worst, float(((np.abs(x.astype(np.float64) - y) - rounding) / scale).max()))
    return worst


def undone(prepared: Prepared, solution: Solution) -> None:
    """Insert, save to bytes, load, strip: the float graph is back."""
    base, made = graphs.copy(prepared.graph), graphs.copy(prepared.graph)
    pairs = qdq.insert(made, prepared.plan, solution)
    for graph in (graphs.load(graphs.to_proto(made), opset=1), made):
        assert qdq.strip(graph) >= pairs > 0
        assert structure(graph) == structure(base)
        assert interface(graph) == interface(base)
        assert worst_distance(prepared, solution, graph) <= 0.5 + 1e-5


@pytest.mark.parametrize("name", SETTINGS)
def test_a_residual_block_comes_back(name: str) -> None:
    rng = np.random.default_rng(0)
    feeds = [{"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)} for _ in range(2)]
    undone(*inserted(residual(), feeds, SETTINGS[name]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("net", "name"),
    [
        *(("cifar_resnet20", name) for name in SETTINGS),
        ("squeezenet11", "tensorrt"),
        ("fastestdet", "onnxruntime"),
        ("minilm_l6", "tensorrt"),
        ("mobilenetv2_tin200", "narrow"),
        ("ultraface_rfb320", "float weights"),
    ],
)
def test_real_models_come_back(net: str, name: str, pack: Path) -> None:
    """Every setting on one network; the others, which have other ops, in one setting each."""
    undone(*inserted(pack / "models" / f"{net}.onnx", calibration(pack, net), SETTINGS[name]))


def calibration(pack: Path, net: str) -> Any:
    spec = importlib.util.spec_from_file_location("pack_eval", pack / "eval.py")
    assert spec is not None
    assert spec.loader is not None
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)
    return data.load_calib(net, limit=2)


# --- files made legal for a runtime -----------------------------------------------------------------------------------


def legal(prepared: Prepared, solution: Solution) -> None:
    """Channels that were widened and Pads on codes for onnxruntime's kernels go as well; names there may differ."""
    graph = graphs.load(graphs.to_proto(quantized_graph(prepared, solution)), opset=1)
    qdq.strip(graph)
    assert sorted(node.op for node in graph.nodes) == sorted(node.op for node in prepared.graph.nodes)
    assert interface(graph) == interface(prepared.graph)
    assert worst_distance(prepared, solution, graph) <= 0.5 + 1e-5


def separable() -> onnx.ModelProto:
    """Three channels in, 24 between: onnxruntime's kernels want 4 and 32."""
    text = """agraph (float[N,3,96,96] x) => (float[N,8,96,96] y) {
        a = Conv <pads = [1,1,1,1]> (x, ws, bs)
        b = Relu (a)
        c = Conv <pads = [1,1,1,1], group = 24> (b, wd, bd)
        d = Relu (c)
        y = Conv (d, wp)
    }"""
    return model(text, ws=(24, 3, 3, 3), bs=24, wd=(24, 1, 3, 3), bd=24, wp=(8, 24, 1, 1))


def test_channels_that_were_added_go() -> None:
    feeds = [{"x": np.random.default_rng(0).standard_normal((2, 3, 96, 96)).astype(np.float32)}]
    prepared, solution = inserted(separable(), feeds, {"backend": "virtual"})
    base, made = graphs.copy(prepared.graph), graphs.copy(prepared.graph)
    qdq.insert(made, prepared.plan, solution)
    assert align(made)
    assert {node.attrs.get("group", 1) for node in made.nodes if node.op == "Conv"} == {1, 32}
    graph = graphs.load(graphs.to_proto(made), opset=1)
    qdq.strip(graph)
    shapes = [
        [
            (node.op, node.inputs[0].name, [tuple(tensor.shape) for tensor in node.inputs + node.outputs])
            for node in one.nodes
        ]
        for one in (graph, base)
    ]
    assert shapes[0] == shapes[1]
    assert interface(graph) == interface(base)
    reference, stripped = (run(graphs.to_proto(one), feeds[0])["y"] for one in (base, graph))
    assert np.abs(reference - stripped).max() < 0.05 * np.abs(reference).max()


@pytest.mark.slow
@pytest.mark.parametrize("net", ["cifar_resnet20", "squeezenet11", "mobilenetv2_tin200", "ultraface_rfb320"])
def test_real_models_made_legal_come_back(net: str, pack: Path) -> None:
    legal(*inserted(pack / "models" / f"{net}.onnx", calibration(pack, net), SETTINGS["onnxruntime"]))


# --- graphs of any shape ----------------------------------------------------------------------------------------------


@st.composite
def nets(draw: st.DrawFn) -> onnx.ModelProto:
    """Convolutions, activations, sums and pools in any order; tensors read more than once, weights shared."""
    net = Net(("N", CHANNELS, 8, 8))
    tensors = ["x"]
    weights: list[str] = []
    for _ in range(draw(st.integers(1, 7))):
        source = draw(st.sampled_from(tensors))
        kind = draw(st.sampled_from(["Conv", "Relu", "Add", "MaxPool", "Transpose", "Sigmoid"]))
        if kind == "Conv":
            if not weights or draw(st.booleans()):
                weights.append(net.keep(net.rng.standard_normal((CHANNELS, CHANNELS, 3, 3))))
            bias = [net.keep(net.rng.standard_normal(CHANNELS))] if draw(st.booleans()) else []
            tensors.append(net.op("Conv", source, draw(st.sampled_from(weights)), *bias, pads=[1, 1, 1, 1]))
        elif kind == "Add":
            tensors.append(net.op("Add", source, draw(st.sampled_from(tensors))))
        elif kind == "MaxPool":
            tensors.append(net.op("MaxPool", source, kernel_shape=[3, 3], pads=[1, 1, 1, 1]))
        elif kind == "Transpose":
            tensors.append(net.op("Transpose", source, perm=[0, 1, 3, 2]))
        else:
            tensors.append(net.op(kind, source))
    return net.done(net.op("Conv", tensors[-1], net.keep(net.rng.standard_normal((CHANNELS, CHANNELS, 1, 1)))))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(nets(), st.sampled_from(list(SETTINGS)))
def test_any_net_comes_back(net: onnx.ModelProto, name: str) -> None:
    feeds = [{"x": np.random.default_rng(0).standard_normal((2, CHANNELS, 8, 8)).astype(np.float32)}]
    prepared, solution = inserted(net, feeds, SETTINGS[name])
    if solution.qparams:
        undone(prepared, solution)


# --- other forms ------------------------------------------------------------------------------------------------------

TEXT = """agraph (float[3,8] x) => (float[3,4] y) {{
    {body}
    y = MatMul (x, w)
}}"""


@pytest.mark.parametrize(
    ("body", "constants"),
    [
        ("w = DequantizeLinear (c, s)", {"c": np.ones((8, 4)), "s": np.float32(0.5)}),
        ("w = DequantizeLinear (c, s)", {"c": np.ones((8, 4), np.int8), "s": np.float32(0.5)}),
        (
            "w = DequantizeLinear <axis = -1> (c, s, z)",
            {
                "c": np.arange(32, dtype=np.uint8).reshape(8, 4),
                "s": np.ones(4, np.float32),
                "z": np.arange(1, 5, dtype=np.uint8),
            },
        ),
        (
            "w = DequantizeLinear <axis = 0, block_size = 3> (c, s)",
            {
                "c": np.arange(-16, 16, dtype=np.int8).reshape(8, 4),
                "s": np.arange(1, 13, dtype=np.float32).reshape(3, 4),
            },
        ),
        (
            "v = DequantizeLinear (t, u)\n w = DequantizeLinear <axis = 0, block_size = 4> (c, v)",
            {
                "c": np.arange(32).reshape(8, 4) % 7 - 3,
                "t": np.arange(1, 9).reshape(2, 4).astype(ml_dtypes.float8_e4m3fn),
                "u": np.float32(0.25),
            },
        ),
        ("q = QuantizeLinear (f, s, z)\n w = DequantizeLinear (q, s, z)", {"f": np.eye(8, 4, dtype=np.float32) * 3}),
    ],
)
def test_weights_in_every_form_become_floats(body: str, constants: dict[str, Array]) -> None:
    given_ = {"s": np.float32(0.5), "z": np.int8(0), **constants}
    kinds = {"c": ml_dtypes.int4 if "t" in given_ else ml_dtypes.float8_e4m3fn}
    read = {
        name: value.astype(kinds["c"]) if name == "c" and value.dtype in (np.float64, np.int64) else value
        for name, value in given_.items()
        if f"({name}," in body or f", {name}" in body
    }
    proto = model(TEXT.format(body=body), opset=21, **read)
    x = {"x": np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)}
    graph = graphs.load(proto, opset=1)
    assert qdq.strip(graph) >= 1
    assert [node.op for node in graph.nodes] == ["MatMul"]
    np.testing.assert_allclose(run(graphs.to_proto(graph), x)["y"], run(proto, x)["y"], rtol=1e-6, atol=1e-6)


def test_pairs_of_small_floats_on_activations_are_taken_out() -> None:
    proto = model(
        """agraph (float[3,8] x) => (float[3,8] y) {
            q = QuantizeLinear (x, s, z)
            d = DequantizeLinear (q, s, z)
            y = Relu (d)
        }""",
        opset=19,
        s=np.float32(0.5),
        z=np.zeros((), ml_dtypes.float8_e4m3fn),
    )
    graph = graphs.load(proto, opset=1)
    assert qdq.strip(graph) == 1
    assert [(node.op, node.inputs[0].name) for node in graph.nodes] == [("Relu", "x")]


def test_a_relu_that_a_zero_point_did_the_work_of_is_written_back() -> None:
    net = Net()
    y = net.pair(net.conv(net.pair("x", 0.05, 128)), 0.02, 0)
    proto = net.done(net.conv(y))
    graph = graphs.load(proto, opset=1)
    qdq.strip(graph)
    assert [node.op for node in graph.nodes] == ["Conv", "Relu", "Conv"]
    x = {"x": np.random.default_rng(0).standard_normal((2, CHANNELS, 8, 8)).astype(np.float32)}
    (expected,), (made,) = (run(one, x).values() for one in (proto, graphs.to_proto(graph)))
    assert np.abs(expected - made).max() < 0.1 * np.abs(expected).max()


def test_what_is_computed_stays() -> None:
    proto = model(
        """agraph (uint8[3] c, float[3] x, float s) => (float[3] y, float[3] v) {
            y = DequantizeLinear (c, t)
            q = QuantizeLinear (x, s)
            w = DequantizeLinear (q, s)
            v = Neg (w)
        }""",
        t=np.float32(0.5),
    )
    graph = graphs.load(proto, opset=1)
    assert qdq.strip(graph) == 1
    assert [node.op for node in graph.nodes] == ["DequantizeLinear", "Neg"]

"""Forward against onnxruntime running a Q/DQ model that this file writes itself, node by node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

from sbonnx.calib.quantized.forward import Forward, forward
from sbonnx.graph import load
from sbonnx.planning.types import Plan, Reader, Site, Solution
from sbonnx.spec import QuantSpec
from tests.calib.engine.branching import all_nodes, nested
from tests.support.calibration import calibrate
from tests.support.models import model, residual, run
from tests.support.naive import plan_linear

X = np.random.default_rng(2).standard_normal((4, 3, 8, 8)).astype(np.float32)
FEEDS = [{"x": X[:2]}, {"x": X[2:]}]


def with_qdq(proto: onnx.ModelProto, plan: Plan, solution: Solution) -> onnx.ModelProto:
    """The model with a Q/DQ pair (or codes and DQ) in front of every reader of every site, one pair a reader."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graphs = [made.graph]
    for node in all_nodes(made.graph):
        graphs.extend(attribute.g for attribute in node.attribute if attribute.HasField("g"))
    for graph in graphs:
        for node in list(graph.node):
            for site in plan.sites:
                for reader in site.readers:
                    if reader.node == node.name and (site.key in solution.qparams or site.key in solution.bias_scales):
                        node.input[reader.index] = _pair(graph, node, site, reader, node.input[reader.index], solution)
    onnx.checker.check_model(made, full_check=True)
    return made


def _pair(graph: Any, node: Any, site: Site, reader: Reader, tensor: str, solution: Solution) -> str:
    """Write the pair of one reader; its output's name."""
    stem = f"{tensor}_{node.name}_{reader.index}"
    if site.role == "bias":
        codes, scale, zero = solution.codes[site.key], solution.bias_scales[site.key], np.zeros((), np.int32)
        zero = np.zeros(scale.shape, np.int32)
    else:
        qparams = solution.qparams[site.key]
        codes, scale, zero = solution.codes.get(site.key, np.empty(0)), qparams.scale, qparams.zero_point
        zero = zero.astype(site.spec.native_dtype())
        codes = codes.astype(site.spec.native_dtype())
    graph.initializer.append(numpy_helper.from_array(scale, f"{stem}_s"))
    graph.initializer.append(numpy_helper.from_array(zero, f"{stem}_z"))
    axis: dict[str, Any] = {} if scale.ndim == 0 else {"axis": 0 if site.role == "bias" else site.spec.axis}
    at = list(graph.node).index(node)
    if site.role == "activation":
        pair = [tensor, f"{stem}_s", f"{stem}_z"]
        graph.node.insert(at, helper.make_node("QuantizeLinear", pair, [f"{stem}_q"], name=f"{stem}_Q", **axis))
        at += 1
    else:
        graph.initializer.append(numpy_helper.from_array(codes, f"{stem}_q"))
    pair = [f"{stem}_q", f"{stem}_s", f"{stem}_z"]
    graph.node.insert(at, helper.make_node("DequantizeLinear", pair, [f"{stem}_d"], name=f"{stem}_DQ", **axis))
    return f"{stem}_d"


SPECS = [
    pytest.param(QuantSpec(signed=False, symmetric=False), QuantSpec(axis=0), id="w8a8 affine, per channel"),
    pytest.param(QuantSpec(), QuantSpec(), id="w8a8 symmetric, per tensor"),
    pytest.param(QuantSpec(bits=16, signed=False, symmetric=False), QuantSpec(axis=0), id="a16"),
    pytest.param(QuantSpec(bits=4, signed=False, symmetric=False), QuantSpec(bits=4, axis=0), id="w4a4"),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("activation", "weight"), SPECS)
def test_equals_onnxruntime_on_qdq(activation: QuantSpec, weight: QuantSpec, bias: bool) -> None:
    proto = residual(opset=21)
    graph = load(proto)
    plan = plan_linear(graph, activation=activation, weight=weight, bias=bias)
    solution = calibrate(graph, plan, FEEDS)
    qdq = with_qdq(proto, plan, solution)
    assert sum(node.op_type == "QuantizeLinear" for node in qdq.graph.node) == 4
    with Forward(graph, plan, solution) as made:
        for feed in FEEDS:
            np.testing.assert_allclose(made(feed)["y"], run(qdq, feed)["y"], rtol=1e-5, atol=1e-5)


def test_products_are_summed_as_in_the_exported_file() -> None:
    """onnxruntime packs constant weights of MatMul and then sums in another order; behind DQ they are not constant."""
    text = """
    agraph (float[N,96] x) => (float[N,96] y) {
        a = MatMul (x, w1)
        h = Relu (a)
        y = MatMul (h, w2)
    }"""
    proto = model(text, w1=(96, 384), w2=(384, 96))
    for node, name in zip(proto.graph.node, ("up", "relu", "down"), strict=True):
        node.name = name
    graph = load(proto)
    plan = plan_linear(graph)
    feed = {"x": np.random.default_rng(0).standard_normal((24, 96)).astype(np.float32)}
    solution = calibrate(graph, plan, [feed])
    qdq = with_qdq(proto, plan, solution)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # more would cut the sums
    session = ort.InferenceSession(qdq.SerializeToString(), options, providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(forward(graph, plan, solution, feed)["y"], session.run(["y"], feed)[0])


def test_weights_or_activations_only() -> None:
    graph = load(residual())
    plan = plan_linear(graph, bias=True)
    solution = calibrate(graph, plan, FEEDS)
    expected = {
        (False, False): residual(),
        (True, False): with_qdq(residual(), Plan(plan.of_role("weight")), solution),
        (False, True): with_qdq(residual(), Plan(plan.of_role("activation")), solution),
        (True, True): with_qdq(residual(), plan, solution),
    }
    for (w_quant, a_quant), proto in expected.items():
        found = forward(graph, plan, solution, FEEDS[0], w_quant=w_quant, a_quant=a_quant)
        np.testing.assert_allclose(found["y"], run(proto, FEEDS[0])["y"], rtol=1e-5, atol=1e-5)


def test_only_the_listed_readers_are_quantized() -> None:
    """`r` is read by conv1 and by the residual Add: quantized for one, the other, or both."""
    graph = load(residual())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, FEEDS)
    site = plan.by_key()["r"]
    outputs = []
    for readers in ((Reader("conv1", 0),), (Reader("add", 1),), (Reader("conv1", 0), Reader("add", 1))):
        only = Plan((replace(site, readers=readers),))
        outputs.append(forward(graph, only, solution, FEEDS[0])["y"])
        np.testing.assert_allclose(
            outputs[-1], run(with_qdq(residual(), only, solution), FEEDS[0])["y"], rtol=1e-5, atol=1e-5
        )
    assert not np.array_equal(outputs[0], outputs[1])


def test_one_tensor_with_two_sites() -> None:
    """Two readers, two types."""
    graph = load(residual())
    base = plan_linear(graph).by_key()["r"]
    other = QuantSpec(bits=8, signed=True, symmetric=True)
    plan = Plan(
        (
            replace(base, key="r@conv1", group="r@conv1", readers=(Reader("conv1", 0),)),
            replace(base, key="r@add", group="r@add", spec=other, readers=(Reader("add", 1),)),
        )
    )
    solution = calibrate(graph, plan, FEEDS)
    qdq = with_qdq(residual(opset=21), plan, solution)
    np.testing.assert_allclose(
        forward(graph, plan, solution, FEEDS[0])["y"], run(qdq, FEEDS[0])["y"], rtol=1e-5, atol=1e-5
    )


def test_inner_tensors_on_demand() -> None:
    graph = load(residual())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, FEEDS)
    with Forward(graph, plan, solution, tensors=["c1", "r1", "x"]) as made:
        found = made(FEEDS[0])
    assert set(found) == {"y", "c1", "r1", "x"}
    np.testing.assert_array_equal(found["r1"], np.maximum(found["c1"], 0))
    with Forward(graph, plan, solution, w_quant=False, a_quant=False, tensors=["r1"]) as plain:
        assert not np.array_equal(plain(FEEDS[0])["r1"], found["r1"])


BRANCH_FEEDS = [
    {"x": np.array([[1, -2, 3, 0.5]], np.float32) * (i + 1), "a": np.array(a), "b": np.array(b)}
    for i, (a, b) in enumerate([(True, True), (True, False), (False, True)])
]


def test_branches_equal_onnxruntime_on_qdq() -> None:
    graph = load(nested())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, BRANCH_FEEDS)
    assert not solution.refusals
    qdq = with_qdq(nested(), plan, solution)
    assert sum(node.op_type == "QuantizeLinear" for node in all_nodes(qdq.graph)) == 5
    with Forward(graph, plan, solution, tensors=["v", "k"]) as made:
        for feed in BRANCH_FEEDS:
            found = made(feed)
            np.testing.assert_allclose(found["y"], run(qdq, feed)["y"], rtol=1e-5, atol=1e-5)
            assert ("v" in found) == bool(feed["a"] and feed["b"])
            assert ("k" in found) == (not feed["a"])


def test_an_outer_tensor_quantized_for_a_reader_in_a_branch() -> None:
    """The site lies outside, its reader inside; the reader outside stays float."""
    graph = load(nested())
    names = {node.output[0]: node.name for node in all_nodes(nested().graph)}
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    site = Site("r", "r", "activation", spec, (Reader(names["v"], 1),), "test", "r")
    solution = calibrate(graph, Plan((site,)), BRANCH_FEEDS)
    qdq = with_qdq(nested_21(), Plan((site,)), solution)
    for feed in BRANCH_FEEDS:
        found = forward(graph, Plan((site,)), solution, feed)["y"]
        np.testing.assert_allclose(found, run(qdq, feed)["y"], rtol=1e-5, atol=1e-5)


def nested_21() -> onnx.ModelProto:
    """`nested` at an opset with 4-bit codes."""
    proto = nested()
    proto.opset_import[0].version = 21
    proto.ir_version = 10
    return proto


def test_outputs_that_pass_through() -> None:
    """An input that is an output, a constant branch, an output read on."""
    text = """
    agraph (float[N,4] x, bool c) => (float[N,4] h, float[N,4] y, float[1,4] z) {
        h = Relu (x)
        y = MatMul (h, w)
        z = If (c) <
            then_branch = yes () => (float[1,4] t) { t = Constant <value = float[1,4] {1.0, 2.0, 3.0, 4.0}> () },
            else_branch = no () => (float[1,4] e) { e0 = Constant <value = float[1,4] {4.0, 3.0, 2.0, 1.0}> ()
                e = MatMul (e0, w) }
        >
    }"""
    proto = model(text, w=(4, 4))
    for number, node in enumerate(all_nodes(proto.graph)):
        node.name = f"n{number}"
    graph = load(proto)
    plan = Plan(tuple(site for site in plan_linear(graph).sites if site.role == "weight" or site.tensor == "h"))
    feeds = [{"x": np.array([[1, -2, 3, 0.5]], np.float32), "c": np.array(c)} for c in (True, False)]
    solution = calibrate(graph, plan, feeds)
    qdq = with_qdq(proto, plan, solution)
    for feed in feeds:
        found, wanted = forward(graph, plan, solution, feed), run(qdq, feed)
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)


def test_half_precision() -> None:
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { y = MatMul (x, w) }"
    proto = model(text, opset=19, w=np.random.default_rng(0).standard_normal((4, 4)).astype(np.float16))
    proto.graph.node[0].name = "mm"
    graph = load(proto)
    plan = plan_linear(graph)
    feed = {"x": np.random.default_rng(1).standard_normal((3, 4)).astype(np.float16)}
    solution = calibrate(graph, plan, [feed])
    found = forward(graph, plan, solution, feed)["y"]
    assert found.dtype == np.float16
    quantum = float(solution.qparams["x"].scale)
    np.testing.assert_allclose(found.astype(np.float32), run(proto, feed)["y"].astype(np.float32), atol=20 * quantum)


def test_the_graph_is_not_changed() -> None:
    graph = load(nested())
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, BRANCH_FEEDS)
    before = run(nested(), BRANCH_FEEDS[0])["y"]
    forward(graph, plan, solution, BRANCH_FEEDS[0])
    after = forward(graph, plan, solution, BRANCH_FEEDS[0], w_quant=False, a_quant=False)["y"]
    np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    assert len(graph.inputs) == 3


def test_a_site_without_a_solution_stays_float() -> None:
    graph = load(residual())
    plan = plan_linear(graph)
    found = forward(graph, plan, Solution({}, {}, {}), FEEDS[0])["y"]
    np.testing.assert_allclose(found, run(residual(), FEEDS[0])["y"], rtol=1e-5, atol=1e-5)


def test_closed_sessions_do_not_run() -> None:
    graph = load(residual())
    made = Forward(graph, Plan(()), Solution({}, {}, {}))
    made.close()
    made.close()
    with pytest.raises(ValueError, match="closed"):
        made(FEEDS[0])

"""Random graphs of every scale: typed, run at every level, few Casts, and no NaN or Inf that float has not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sbonnx import graph as graphs
from sbonnx import precision
from sbonnx.calib.engine.samples import Samples
from sbonnx.precision.tensor_magnitudes import magnitudes
from sbonnx.spec import Array
from tests.precision.converting import assert_few_casts, types
from tests.support.models import run

PLAIN = ("Relu", "Abs", "Neg", "Tanh", "Sigmoid", "Softmax", "Softplus", "Erf", "Identity", "Softsign")
WITH_CONSTANT = ("Mul", "Add", "Sub", "Div", "Max", "Min")
OF_TWO = ("Add", "Mul", "Sub", "Concat")

Step = tuple[str, int, int, float]


@st.composite
def steps(draw: st.DrawFn) -> list[Step]:
    """(op, place of its inputs among what there is, exponent of its constant)."""
    ops = st.sampled_from([*PLAIN, *WITH_CONSTANT, "two", "root", "mean", "norm", "whole", "transpose", "square"])
    row = st.tuples(ops, st.integers(0, 20), st.integers(0, 20), st.floats(-12, 6))
    return draw(st.lists(row, min_size=2, max_size=9))


def build(chosen: list[Step]) -> onnx.ModelProto:
    """A model of these steps over x, float32 (N, 8, 8); every tensor that nothing reads is an output."""
    nodes: list[onnx.NodeProto] = []
    held: list[onnx.TensorProto] = []
    names = ["x"]

    def constant(value: float) -> str:
        held.append(numpy_helper.from_array(np.array(value, np.float32), f"c{len(held)}"))
        return str(held[-1].name)

    def node(op: str, inputs: list[str], **attrs: Any) -> str:
        nodes.append(helper.make_node(op, inputs, [f"t{len(nodes)}"], **attrs))
        return str(nodes[-1].output[0])

    for op, first, second, exponent in chosen:
        one, other = names[first % len(names)], names[second % len(names)]
        value = float(np.float32(10.0**exponent))
        if op in PLAIN:
            names.append(node(op, [one]))
        elif op in WITH_CONSTANT:
            names.append(node(op, [one, constant(value)]))
        elif op == "two":
            names.append(node(("Add", "Mul", "Sub")[second % 3], [one, other]))
        elif op == "root":
            names.append(node("Sqrt", [node("Add", [node("Mul", [one, one]), constant(value)])]))
        elif op == "mean":
            names.append(node("Sub", [one, node("ReduceMean", [one], axes=[-1], keepdims=1)]))
        elif op == "norm":
            spread = node("Sub", [one, node("ReduceMean", [one], axes=[-1], keepdims=1)])
            square = node("ReduceMean", [node("Pow", [spread, constant(2.0)])], axes=[-1], keepdims=1)
            names.append(node("Div", [spread, node("Sqrt", [node("Add", [square, constant(value)])])]))
        elif op == "whole":
            names.append(
                node("Cast", [node("Cast", [node("Tanh", [one])], to=TensorProto.INT64)], to=TensorProto.FLOAT)
            )
        elif op == "transpose":
            names.append(node("Transpose", [one], perm=[0, 2, 1]))
        else:
            names.append(node("Pow", [one, constant(2.0)]))
    read = {name for each in nodes for name in each.input}
    ends = [each.output[0] for each in nodes if each.output[0] not in read]
    value_of = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "random",
        [value_of("x", TensorProto.FLOAT, ["N", 8, 8])],
        [value_of(name, TensorProto.FLOAT, None) for name in ends],
        held,
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return onnx.shape_inference.infer_shapes(proto)


def finite(outputs: dict[str, Array]) -> bool:
    return all(np.isfinite(value).all() for value in outputs.values())


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=steps(), kind=st.sampled_from(["fp16", "fp16", "bf16"]), keep_io=st.booleans(), scale=st.floats(-5, 4))
def test_any_graph_comes_out_typed(chosen: list[Step], kind: str, keep_io: bool, scale: float) -> None:
    proto = build(chosen)
    rng = np.random.default_rng(0)
    feeds = [{"x": (10.0**scale * rng.standard_normal((2, 8, 8))).astype(np.float32)} for _ in range(2)]
    expected = run(proto, feeds[0])
    graph = graphs.load(proto, opset=precision.OPSET[kind])
    found = magnitudes(graph, Samples.of(feeds, graph))
    precision.convert(graph, found, kind, keep_io=keep_io)
    made = graphs.to_proto(graph)
    onnx.checker.check_model(made, full_check=True)
    kinds = types(made)
    assert_few_casts(made)
    if keep_io:
        assert {kinds[value.name] for value in [*made.graph.input, *made.graph.output]} <= {"fp32"}
    if kind == "bf16":
        made = graphs.to_proto(precision.emulated(graph))
    given_in = np.float16 if kind == "fp16" and types(made)["x"] == "fp16" else np.float32
    feed = {"x": feeds[0]["x"].astype(given_in)}
    for level in ("off", "all"):
        outputs = run(made, feed, level=level)
        assert not finite(expected) or finite(outputs), level


def test_the_generator_makes_what_it_says() -> None:
    proto = build([("norm", 0, 0, -12.0), ("Mul", 1, 0, 5.0), ("two", 1, 2, 0.0)])
    assert run(proto, {"x": np.ones((1, 8, 8), np.float32)}).keys() == {"t8"}
    with pytest.raises(KeyError):
        precision.convert(graphs.load(proto), {}, "fp8")

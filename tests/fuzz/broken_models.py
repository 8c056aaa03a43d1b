"""Makers of models that once ended a command badly."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.fuzz import seeds
from tests.support.bad_models import good

F: Final = TensorProto.FLOAT


def graph_model(
    nodes: list[onnx.NodeProto],
    held: Mapping[str, Any] | None = None,
    *,
    shape: list[Any] | None = None,
    opset: int = 17,
    ir: int = 8,
    name: str = "g",
    output: onnx.ValueInfoProto | None = None,
) -> onnx.ModelProto:
    """A model from `x` (float) to `y` that nothing has checked."""
    graph = helper.make_graph(
        nodes,
        name,
        [helper.make_tensor_value_info("x", F, shape or ["N", 4])],
        [output or helper.make_tensor_value_info("y", F, None)],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in (held or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)


def node(op: str, inputs: str, outputs: str = "y", **attributes: Any) -> onnx.NodeProto:
    """A node called as its operator."""
    return helper.make_node(op, inputs.split(), outputs.split(), name=op.lower(), **attributes)


WEIGHT: Final = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)


def linear(*more: onnx.NodeProto, **held: Any) -> onnx.ModelProto:
    """MatMul from `x` to `h`, then `more`."""
    return graph_model([node("MatMul", "x weight", "h"), *more], {"weight": WEIGHT, **held})


def wrong_attribute() -> onnx.ModelProto:
    """A Squeeze below opset 13 whose `axes` is a text."""
    return graph_model([node("Squeeze", "x", axes="text")], opset=11)


def least_by_minus_one(op: str) -> onnx.ModelProto:
    """Division of the least integer by -1, of constants."""
    held = {"a": np.array([np.iinfo(np.int64).min]), "b": np.array([-1])}
    return linear(node(op, "a b", "d"), node("Cast", "d", "c", to=F), node("Add", "h c"), **held)


def by_zero() -> onnx.ModelProto:
    held = {"a": np.array([1]), "b": np.array([0])}
    return linear(node("Div", "a b", "d"), node("Cast", "d", "c", to=F), node("Add", "h c"), **held)


def ranges(limit: float) -> onnx.ModelProto:
    held = {"a": np.float32(0), "b": np.float32(limit), "c": np.float32(1)}
    return linear(node("Range", "a b c", "d"), node("ReduceSum", "d", "e", keepdims=0), node("Add", "h e"), **held)


def branches(depth: int = 1, *, outputs: int = 1, graph: bool = True) -> onnx.ModelProto:
    """If on a constant, nested `depth` times; its branches have `outputs` outputs."""
    inner = [node("Relu", "h", "a")]
    large = numpy_helper.from_array(np.zeros(400, np.float32), "large")
    for level in range(depth):
        body = helper.make_graph(
            inner, f"b{level}", [], [helper.make_tensor_value_info("a", F, None)][:outputs], [large]
        )
        inner = [helper.make_node("If", ["flag"], ["a"], name=f"if{level}", then_branch=body, else_branch=body)]
        if not graph:
            del inner[0].attribute[:]
            inner[0].attribute.extend(
                [helper.make_attribute("then_branch", 1), helper.make_attribute("else_branch", body)]
            )
    return linear(*inner, node("Add", "h a"), flag=np.array(True))


def nested(depth: int) -> onnx.ModelProto:
    """Ifs within ifs, built as bytes from inside out: a message of that depth cannot be copied around."""
    proto = linear(node("Relu", "h", "a"), node("Add", "h a"), flag=np.array(True))
    inner: onnx.NodeProto = node("Relu", "h", "a")
    for level in range(depth):
        body = onnx.GraphProto(name=f"b{level}")
        body.node.add().CopyFrom(inner)
        body.output.add().name = "a"
        inner = onnx.NodeProto(op_type="If", name=f"if{level}", input=["flag"], output=["a"])
        for key in ("then_branch", "else_branch")[: 2 if level == 0 else 1]:
            inner.attribute.add(name=key, type=onnx.AttributeProto.GRAPH).g.CopyFrom(body)
    proto.graph.node[1].CopyFrom(inner)
    return proto


def functions(levels: int) -> onnx.ModelProto:
    """Local functions that each call the next one twice: 2**levels nodes once inlined."""
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("local", 1)]
    made = []
    for level in range(levels):
        last = level == levels - 1
        call = [
            helper.make_node("Relu" if last else f"F{level + 1}", [a], [b], domain="" if last else "local")
            for a, b in (("a", "b"), ("b", "c"))
        ]
        made.append(helper.make_function("local", f"F{level}", ["a"], ["c"], call, opsets))
    proto = linear(helper.make_node("F0", ["h"], ["y"], domain="local", name="call"))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.functions.extend(made)
    return proto


def pad(**attributes: Any) -> onnx.ModelProto:
    return graph_model(
        [node("Pad", "x", "p", **attributes), node("Conv", "p w")],
        {"w": WEIGHT.reshape(4, 4, 1, 1)},
        shape=[1, 4, 4, 4],
        opset=9,
        ir=4,
    )


def listed_twice() -> onnx.ModelProto:
    proto = linear(node("Relu", "h"))
    proto.graph.output.append(proto.graph.output[0])
    return proto


def constant_without_output() -> onnx.ModelProto:
    return linear(helper.make_node("Constant", [], [], name="c", value_float=1.0), node("Relu", "h"))


def changed(change: Callable[[onnx.ModelProto], object], proto: onnx.ModelProto | None = None) -> onnx.ModelProto:
    """`proto`, or the good model, after `change`."""
    proto = proto or good()
    change(proto)
    return proto


def as_text(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].data_type = TensorProto.STRING


def many_dimensions(proto: onnx.ModelProto) -> None:
    proto.graph.initializer[0].dims.extend([1] * 65)


def located(location: str) -> onnx.ModelProto:
    proto = good()
    weight = proto.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value=location)
    return proto


def minus_one(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1


def nameless(proto: onnx.ModelProto) -> None:
    proto.graph.ClearField("name")


def seven() -> onnx.ModelProto:
    """Opset 7, IR 3, where initializers are listed as inputs."""
    proto = graph_model([node("MatMul", "x weight", "h"), node("Relu", "h")], {"weight": WEIGHT}, opset=7, ir=3)
    proto.graph.input.append(helper.make_tensor_value_info("weight", F, [4, 4]))
    return proto


def seven_unlisted() -> onnx.ModelProto:
    proto = seven()
    del proto.graph.input[1]
    return proto


def unknown_output() -> onnx.ModelProto:
    """A Reshape to what an input says: nobody can infer its shape, and the output declares none."""
    proto = graph_model([node("MatMul", "x weight", "h"), node("Reshape", "h shape")], {"weight": WEIGHT})
    proto.graph.input.append(helper.make_tensor_value_info("shape", TensorProto.INT64, [2]))
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    return proto


def empty_size() -> onnx.ModelProto:
    return graph_model(
        [node("MatMul", "x weight", "h"), node("Concat", "h none", axis=1)],
        {"weight": WEIGHT, "none": np.zeros((4, 0), np.float32)},
        shape=[4, 4],
    )


def mode_of_bytes() -> onnx.ModelProto:
    """An Upsample, which lifting the opset rewrites, whose mode is not UTF-8."""
    proto = onnx.load_from_string(seeds.seed("old"))
    (up,) = [one for one in proto.graph.node if one.op_type == "Upsample"]
    (mode,) = [one for one in up.attribute if one.name == "mode"]
    mode.s = b"nea\xaaest"
    return proto


def parameter_twice() -> onnx.ModelProto:
    """A function whose last parameter, which its call leaves out, has the name of one that a node needs."""
    proto = onnx.load_from_string(seeds.seed("function"))
    (outer,) = [one for one in proto.functions if one.name == "Outer"]
    outer.input.append(outer.input[-1])
    return proto


def clip_to_nan() -> onnx.ModelProto:
    proto = onnx.load_from_string(seeds.seed("plain"))
    (high,) = [one for one in proto.graph.initializer if one.name == "high"]
    high.CopyFrom(numpy_helper.from_array(np.array(np.nan, np.float32), "high"))
    return proto


def future_domain() -> onnx.ModelProto:
    """Local functions of an opset that no 32-bit integer holds."""
    proto = onnx.load_from_string(seeds.seed("function"))
    (local,) = [entry for entry in proto.opset_import if entry.domain]
    local.version = 1 << 31
    return proto


def long_name(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "X" * 1_000_000


def escape(proto: onnx.ModelProto) -> None:
    proto.graph.node[1].op_type = "Relux"
    proto.graph.node[1].name = "\x1b[2J\x1b[31m\x00\u202e"


def pattern() -> onnx.ModelProto:
    """A pattern that the native library complains about on stderr."""
    proto = linear(node("Relu", "h"), node("RegexFullMatch", "t", "z", pattern="("), t=np.array(["a"], dtype=object))
    proto.opset_import[0].version = 20
    proto.graph.output.append(helper.make_tensor_value_info("z", TensorProto.BOOL, None))
    return proto

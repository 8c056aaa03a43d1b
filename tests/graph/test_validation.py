"""Faults that native code would crash on, or trip over later: refused when the file is read, in one line.

onnxruntime refuses every one of these models too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

from sbonnx.errors import ModelError
from sbonnx.graph import load, to_proto
from sbonnx.patterns import SIMPLIFY, apply
from tests.patterns.simplified import ops
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, random_feeds

UNARY = "g (float[2,1] x) => (float[N] y) { y = Squeeze <axes = [1]> (x) }"
BRANCHES = """g (float[2,1] x, bool c) => (float[2,1] y) { y = If (c) <
    then_branch = t () => (float[2,1] a) { a = Relu(x) }, else_branch = e () => (float[2,1] b) { b = Neg(x) }> }"""
LOOP = """g (float[2] x, int64 n, bool c) => (float[2] y) { y = Loop (n, c, x) <
    body = b (int64 i, bool k, float[2] v) => (bool o, float[2] w) { o = Identity(k) w = Relu(v) }> }"""
FUNCTION = """g (float[2,1] x) => (float[N] y) { y = my.f <axes = [1]> (x) }
    <domain: "my", opset_import: ["": 11]> f <axes> (a) => (b) { b = Squeeze <axes: ints = @axes> (a) }"""
CONSTANT = "g (float[2] x) => (float[2] y) { c = Constant <value = float[2] {1.0, 2.0}> () y = Add(x, c) }"

Change = Callable[[ModelProto], object]


def parsed(text: str, opset: int = 11) -> ModelProto:
    imports = f'"" : {opset}, "my" : 1' if "my." in text else f'"" : {opset}'
    made: ModelProto = parser.parse_model(f"<ir_version: 10, opset_import: [{imports}]> {text}")
    return made


def attribute(name: str, value: Any, node: Callable[[ModelProto], NodeProto] = lambda m: m.graph.node[0]) -> Change:
    """Give a node another value of an attribute."""

    def change(model: ModelProto) -> None:
        kept = [AttributeProto.FromString(one.SerializeToString()) for one in node(model).attribute if one.name != name]
        del node(model).attribute[:]
        node(model).attribute.extend([*kept, helper.make_attribute(name, value)])

    return change


def in_branch(model: ModelProto) -> NodeProto:
    """The node of a branch, made a Squeeze."""
    node: NodeProto = model.graph.node[0].attribute[0].g.node[0]
    node.op_type = "Squeeze"
    return node


def in_function(model: ModelProto) -> NodeProto:
    node: NodeProto = model.functions[0].node[0]
    return node


def tensor(change: Callable[[TensorProto], object]) -> Change:
    """Change the value of the first node."""
    return lambda model: change(model.graph.node[0].attribute[0].t)


def drop(name: str) -> Change:
    def change(model: ModelProto) -> None:
        node = model.graph.node[0]
        kept = [AttributeProto.FromString(one.SerializeToString()) for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend(kept)

    return change


def body(model: ModelProto, number: int = 0) -> Any:
    return model.graph.node[0].attribute[number].g


FAULTS: dict[str, tuple[str, Change, str]] = {
    "attribute of another type": (UNARY, attribute("axes", "one"), r"Squeeze node of 'y': attribute 'axes' .* STRING"),
    "in a branch": (BRANCHES, attribute("axes", "one", in_branch), r"Squeeze node of 'a': attribute 'axes' .* STRING"),
    "in a function": (FUNCTION, attribute("axes", "one", in_function), r"Squeeze node of 'b': attribute 'axes'"),
    "in a call": (FUNCTION, attribute("axes", "one"), r"my\.f node of 'y': attribute 'axes' is of type STRING"),
    "list for a number": (UNARY, attribute("axes", 1), r"attribute 'axes' is of type INT, .* INTS"),
    "branch that is no graph": (BRANCHES, attribute("then_branch", 1), r"attribute 'then_branch' is of type INT"),
    "no type": (UNARY, lambda m: m.graph.node[0].attribute[0].ClearField("type"), "attribute 'axes' has no type"),
    "two values": (UNARY, lambda m: setattr(m.graph.node[0].attribute[0], "i", 1), "holds a value in the field 'i'"),
    "listed twice": (UNARY, lambda m: m.graph.node[0].attribute.append(helper.make_attribute("axes", [0])), "twice"),
    "graph without a value": (BRANCHES, lambda m: m.graph.node[0].attribute[0].ClearField("g"), "has no value"),
    "required attribute": (BRANCHES, drop("else_branch"), "lacks attribute 'else_branch'"),
    "too many inputs": (UNARY, lambda m: m.graph.node[0].input.append("x"), "has 2 inputs; the operator has 1"),
    "no input": (UNARY, lambda m: m.graph.node[0].ClearField("input"), "has no inputs; the operator has 1"),
    "input left out": (UNARY, lambda m: m.graph.node[0].input.__setitem__(0, ""), "input 0 has no name"),
    "too many outputs": (UNARY, lambda m: m.graph.node[0].output.append("z"), "has 2 outputs; the operator has 1"),
    "Constant without outputs": (CONSTANT, lambda m: m.graph.node[0].ClearField("output"), "has no outputs"),
    "Constant of nothing": (CONSTANT, lambda m: m.graph.node[0].ClearField("attribute"), "must have one value, not 0"),
    "branch with fewer outputs": (BRANCHES, lambda m: body(m).ClearField("output"), "'then_branch' has no outputs"),
    "branch with inputs": (BRANCHES, lambda m: body(m).input.add(name="q"), "has 1 input, and its node gives none"),
    "body with fewer outputs": (LOOP, lambda m: body(m).output.pop(), "'body' has 1 output, and its node needs 2"),
    "body with fewer inputs": (LOOP, lambda m: body(m).input.pop(), "reads 'v'|'body' has 2 inputs, .* gives 3"),
    "value too short": (CONSTANT, tensor(lambda t: setattr(t, "raw_data", b"1234")), "needs 8 bytes, and 4 are stored"),
    "numbers called strings": (CONSTANT, tensor(lambda t: setattr(t, "data_type", TensorProto.STRING)), "'c'"),
    "bytes called strings": (
        CONSTANT,
        tensor(lambda t: t.CopyFrom(TensorProto(data_type=TensorProto.STRING, dims=[2], raw_data=bytes(16)))),
        "holds bytes instead of strings",
    ),
    "huge": (CONSTANT, tensor(lambda t: t.dims.__setitem__(0, 1 << 62)), "'c'"),
    "huge product": (CONSTANT, tensor(lambda t: t.dims.extend([1 << 40, 1 << 40])), "larger than any memory"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(fault: str) -> None:
    text, change, says = FAULTS[fault]
    made = parsed(text)
    load(made)
    change(made)
    with pytest.raises(ModelError, match=says) as caught:
        load(made)
    assert "\n" not in str(caught.value)
    if not made.functions:  # onnxruntime does not convert functions of another opset
        options = ort.SessionOptions()
        options.log_severity_level = 4
        with pytest.raises(Exception, match=r"ONNXRuntimeError|Unexpected input data type"):
            ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_more_dimensions_than_numpy_holds() -> None:
    made = parsed("g (float[2] x) => (float[N] y) { y = Add(x, w) }", 17)
    made.graph.initializer.append(numpy_helper.from_array(np.ones(1, np.float32), "w"))
    made.graph.initializer[0].dims.extend([1] * 68)
    with pytest.raises(ModelError, match="'w' has 69 dimensions; sbonnx reads up to 64"):
        load(made)
    made.graph.initializer[0].dims[:] = [1]
    made.graph.value_info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [1] * 65))
    with pytest.raises(ModelError, match="'y' has 65 dimensions"):
        load(made)


INTEGERS = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]


def divided(op: str, kind: Any, a: list[int], b: list[int]) -> Any:
    text = f"g (float[2] x) => (float[2] y) {{ d = {op} (a, b) f = Cast <to = 1> (d) y = Add(x, f) }}"
    return model(text, a=np.array(a, kind), b=np.array(b, kind))


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("op", ["Div", "Mod", "Mod <fmod = 1>"])
def test_division_of_integers(op: str, kind: Any) -> None:
    """By zero always; the lowest by -1 from 32 bits on, where it is computed at all."""
    with pytest.raises(ModelError, match=r"divides integers by a constant that holds 0 \('b'\): onnxruntime would end"):
        load(divided(op, kind, [1, 2], [1, 0]))
    low = np.iinfo(kind).min
    if kind.kind == "i":
        made = divided(op, kind, [low, 2], [-1, 1])
        if kind.itemsize >= 4 and "fmod" not in op:
            with pytest.raises(ModelError, match=f"divides {low} by -1, which overflows"):
                load(made)
        else:
            load(made)
    fits = divided(op, kind, [low, 6], [1, np.iinfo(kind).max])
    graph = load(fits)
    apply(graph, SIMPLIFY)
    assert ops(graph) == ["Add"]
    assert_same_outputs(fits, to_proto(graph), random_feeds(fits))


def test_a_division_of_what_is_folded_first() -> None:
    text = """g (float[1] x) => (float[1] y) { b = Sub(one, two) a = Sub(low, zero) d = Div(a, b)
        f = Cast <to = 1> (d) y = Add(x, f) }"""
    parts: dict[str, Any] = {"one": np.array([1]), "two": np.array([2]), "zero": np.array([0])}
    graph = load(model(text, low=np.array([np.iinfo(np.int64).min]), **parts))
    with pytest.raises(ModelError, match=r"node 'Div_0' \(Div\) divides -9223372036854775808 by -1"):
        apply(graph, SIMPLIFY)
    graph = load(model(text, low=np.array([8]), **parts))
    apply(graph, SIMPLIFY)
    assert ops(graph) == ["Add"]


@pytest.mark.parametrize(
    ("text", "weights", "says"),
    [
        ("y = ConvTranspose <group = 0> (x, w)", {"w": (2, 2, 1, 1)}, "attribute 'group' is 0; it must be 1 or more"),
        ("y = DepthToSpace <blocksize = 0> (x)", {}, "attribute 'blocksize' is 0"),
        ("y = GatherND <batch_dims = -1> (x, i)", {"i": np.zeros((1, 1), np.int64)}, "'batch_dims' is -1"),
        ("s = SplitToSequence (x, k) y = ConcatFromSequence <axis = 0> (s)", {"k": np.array(0)}, "parts of 0 elements"),
        (
            "k = Constant <value = int64 {0}> () s = SplitToSequence (x, k) y = ConcatFromSequence <axis = 0> (s)",
            {},
            "parts of 0 elements",
        ),
        ("n = InstanceNormalization (e, s, s) y = Add(n, x)", {"e": (1, 2, 0), "s": 2}, "normalizes over no elements"),
    ],
)
def test_other_traps(text: str, weights: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        load(model(f"g (float[1,2,2,2] x) => (float[a,b,c,d] y) {{ {text} }}", **weights))


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0])
def test_a_range_without_a_length(place: int, value: float) -> None:
    bounds: dict[str, Any] = {name: np.array(float(count + 1), np.float32) for count, name in enumerate("abc")}
    bounds["abc"[place]] = np.array(value, np.float32)
    text = "g (float[1] x) => (float[M] y) { r = Range(a, b, c) y = Add(x, r) }"
    graph = load(model(text, **bounds))
    applied = apply(graph, SIMPLIFY)
    assert all("not known" in refusal.why for refusal in applied.refusals)
    assert applied.refusals or ops(graph) == ["Add"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("y = MatMul (x, h)", r"node '.*' \(MatMul\) takes 'x' of float32 and 'h' of float16"),
        ("y = Concat <axis = 0> (x, x, h)", r"\(Concat\) takes 'x' of float32 and 'h' of float16"),
        (
            "c = Constant <value = bool {1}> () y = Where (c, h, x)",
            r"\(Where\) takes 'h' of float16 and 'x' of float32",
        ),
    ],
)
def test_inputs_of_two_float_types(text: str, says: str) -> None:
    """onnxruntime refuses such a node only when the file is loaded, which is after the work."""
    proto = model(f"g (float[2,2] x) => (float[a,b] y) {{ {text} }}", h=np.ones((2, 2), np.float16))
    with pytest.raises(Exception, match="different types"):
        ort.InferenceSession(proto.SerializeToString())
    with pytest.raises(ModelError, match=says):
        load(proto)


def test_float_types_of_other_parameters_may_differ() -> None:
    """The input and the output of a Cast have different type parameters."""
    text = "g (float[2,4] x) => (float[2,4] y) { n = Cast <to = 10> (x) w = Cast <to = 1> (n) y = Add (w, x) }"
    load(model(text))

"""The lift to a newer opset leaves onnxruntime's answers as they were, or is refused by name."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from sbonnx.errors import ModelError
from sbonnx.graph import load, node_metadata, to_proto
from sbonnx.graph.query import all_nodes
from sbonnx.spec import Array
from tests.support.models import run

TARGETS = (13, 18, 21)
Case = tuple[int, str, dict[str, Any]]


def case(opset: int, text: str, **feeds: Any) -> Case:
    """A graph in the text form of an opset, and values for inputs that cannot be random."""
    return opset, text, feeds


def parsed(opset: int, text: str) -> ModelProto:
    made: ModelProto = onnx.parser.parse_model(f'<ir_version: 6, opset_import: ["" : {opset}]> g {text}')
    return made


FINE: dict[str, Case] = {
    "Slice": case(9, "(float[5,6] x) => (float[a,b] y) { y = Slice<starts=[1,-3], ends=[4,100], axes=[0,1]>(x) }"),
    "Slice all axes": case(9, "(float[5,6] x) => (float[a,b] y) { y = Slice<starts=[1,-3], ends=[4,100]>(x) }"),
    "TopK": case(9, "(float[5,6] x) => (float[a,b] y, int64[a,b] i) { y, i = TopK<k=3, axis=-1>(x) }"),
    "Split": case(11, "(float[5,6] x) => (float[a,b] y, float[a,c] z) { y, z = Split<axis=1, split=[2,4]>(x) }"),
    "Split evenly": case(11, "(float[5,6] x) => (float[a,b] y, float[a,b] z) { y, z = Split<axis=1>(x) }"),
    "Squeeze": case(
        11,
        "(float[1,6,1] x) => (float[6] y, float[1,1,6] z) { y = Squeeze<axes=[0,2]>(x) z = Unsqueeze<axes=[0,1]>(y) }",
    ),
    "Squeeze all": case(11, "(float[1,6,1] x) => (float[6] y) { y = Squeeze(x) }"),
    "Dropout": case(9, "(float[5] x) => (float[5] y) { y, m = Dropout<ratio=0.2>(x) }"),
    "Scatter": case(
        9, "(float[3,3] x, float[1,3] u) => (float[3,3] y) <int64[1,3] i = {0,1,2}> { y = Scatter(x, i, u) }"
    ),
    "Gemm": case(
        9, "(float[2,3] x, float[3,4] w, float[4] b) => (float[2,4] y) { y = Gemm<alpha=0.5, beta=2.0>(x, w, b) }"
    ),
    "OneHot": case(9, "(int64[3] x) => (float[3,5] y) <int64 d = {5}, float[2] v = {0.0,2.0}> { y = OneHot(x, d, v) }"),
    "Mod": case(10, "(int64[3] x) => (int64[3] y) <int64 d = {2}> { y = Mod(x, d) }"),
    "LSTM": case(
        7,
        """(float[4,2,3] x, float[1,20,3] w, float[1,20,5] r, float[1,2,5] h, float[1,2,5] c) => (float[1,2,5] yh)
        { , yh = LSTM<hidden_size=5>(x, w, r, , , h, c) }""",
    ),
    "ConvTranspose": case(
        9,
        """(float[1,2,4,4] x, float[2,3,3,3] w) => (float[1,3,a,b] y)
        { y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,1]>(x, w) }""",
    ),
    "AveragePool": case(
        9,
        """(float[1,2,5,5] x) => (float[1,2,a,b] y)
        { y = AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,1,1,1]>(x) }""",
    ),
    "BatchNormalization": case(
        9, "(float[2,3,4] x, float[3] s) => (float[2,3,4] y) { v = Abs(s) y = BatchNormalization(x, s, s, s, v) }"
    ),
    "RoiAlign": case(
        10,
        """(float[1,2,8,8] x, float[1,4] b) => (float[1,2,2,2] y) <int64[1] n = {0}>
        { y = RoiAlign<output_height=2, output_width=2, sampling_ratio=2>(x, b, n) }""",
        b=np.array([[1, 1, 5, 6]], np.float32),
    ),
    "GridSample": case(
        16, '(float[1,1,4,4] x, float[1,3,3,2] g) => (float[1,1,3,3] y) { y = GridSample<mode="bilinear">(x, g) }'
    ),
    "Optional": case(15, "(float[2] x) => (float[2] y) { o = Optional(x) y = OptionalGetElement(o) }"),
    "If": case(
        11,
        """(bool c, float[2,6] x) => (float[a,b] y) {
        k = Relu(x)
        y = If (c) <
            then_branch = t () => (float[a,b] o) { m = ReduceSum<axes=[1]>(k) o = Softmax<axis=0>(m) },
            else_branch = e () => (float[a,b] q) {
                z = If (c) <
                    then_branch = t2 () => (float[a,b] p) { p = Neg(k) },
                    else_branch = e2 () => (float[a,b] r) {
                        u = Unsqueeze<axes=[0]>(k)
                        r = Squeeze<axes=[0]>(u) }>
                q = Neg(z) }> }""",
        c=np.array(False),
    ),
    "Loop": case(
        11,
        """(int64 n, bool c, float[6] x) => (float[a] y, float[b,d] s) {
        y, s = Loop (n, c, x) <body = b (int64 i, bool ci, float[6] v) => (bool co, float[6] w, float[k] sc) {
            co = Identity(ci)
            u = Unsqueeze<axes=[0]>(v)
            t = Add(u, x)
            w = Squeeze<axes=[0]>(t)
            sc = ReduceSum<axes=[0]>(w) }> }""",
        n=np.array(3),
        c=np.array(True),
    ),
    "Scan": case(
        9,
        """(float[2] i, float[3,2] x) => (float[2] y, float[3,2] z) {
        y, z = Scan (i, x) <num_scan_inputs = 1, body = b (float[2] a, float[2] e) => (float[2] o, float[2] p) {
            o = Add(a, e)
            p = Clip<max=0.5>(o) }> }""",
    ),
    "Upsample with scales from outside": case(
        9,
        "(float[1,2,5,7] x, float[4] s) => (float[a,b,c,d] y) { y = Upsample(x, s) }",
        s=np.array([1, 1, 1.5, 2], np.float32),
    ),
    "Resize with scales from outside": case(
        10,
        '(float[1,2,5,7] x, float[4] s) => (float[a,b,c,d] y) { y = Resize<mode="linear">(x, s) }',
        s=np.array([1, 1, 0.7, 2], np.float32),
    ),
    "Softmax of unknown rank": case(
        12,
        "(float[2,3,4] x, int64[k] s) => (float[a,b,c] y) { r = Reshape(x, s) y = Softmax<axis=2>(r) }",
        s=np.array([2, 3, 4]),
    ),
    "Hardmax": case(11, "(float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax<axis=2>(x) }"),
}
for _op, _axis, _shape in product(("Softmax", "LogSoftmax"), (0, 1, 2, -1, -2), ("2,3,4", "a,b,c")):
    FINE[f"{_op} {_axis} of [{_shape}]"] = case(
        11, f"(float[2,3,4] x) => (float[{_shape}] y) {{ y = {_op}<axis={_axis}>(x) }}"
    )
for _op, _axes in product(
    ("Sum", "Mean", "Max", "L2", "Prod", "SumSquare", "LogSumExp"), ("axes=[1],", "axes=[0,2],", "")
):
    FINE[f"Reduce{_op} {_axes}"] = case(
        10, f"(float[2,6,3] x) => (float[a,b,c] y) {{ y = Reduce{_op}<{_axes} keepdims=1>(x) }}"
    )
for _op, _mode, _scales in product(("Upsample", "Resize"), ("nearest", "linear"), ("2.0,2.0", "1.7,2.3", "0.6,0.7")):
    if (_op, _scales) != ("Upsample", "0.6,0.7"):
        FINE[f"{_op} {_mode} {_scales}"] = case(
            9 if _op == "Upsample" else 10,
            f"""(float[1,2,9,7] x) => (float[a,b,c,d] y) <float[4] s = {{1.0,1.0,{_scales}}}>
            {{ y = {_op}<mode="{_mode}">(x, s) }}""",
        )
for _type in ("float", "float16", "double"):
    if _type != "double":  # onnxruntime has no such kernels
        for _bounds in ("min=-0.5, max=0.5", "max=0.5", "min=0.1"):
            FINE[f"Clip {_bounds} {_type}"] = case(9, f"({_type}[5] x) => ({_type}[5] y) {{ y = Clip<{_bounds}>(x) }}")
    for _mode in ("value=0.5", 'mode="reflect"', 'mode="edge", value=0.5'):
        FINE[f"Pad {_mode} {_type}"] = case(
            9, f"({_type}[5] x) => ({_type}[8] y) {{ y = Pad<pads=[1,2], {_mode}>(x) }}"
        )


def feeds_of(source: ModelProto, given: dict[str, Any]) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    feeds: dict[str, Array] = {}
    for value in source.graph.input:
        tensor = value.type.tensor_type
        shape = [dim.dim_value or 3 for dim in tensor.shape.dim]
        kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = given.get(value.name, rng.standard_normal(shape).astype(kind))
    return feeds


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", FINE)
def test_the_lift_keeps_the_answers(name: str) -> None:
    opset, text, given = FINE[name]
    source = parsed(opset, text)
    feeds = feeds_of(source, given)
    want = run(source, feeds)
    for target in TARGETS:
        if target < opset:
            continue
        graph = load(source, opset=target)
        assert graph.opset == target and graph.info.original_opset == opset
        made = {tensor.name for node in all_nodes(graph) for tensor in node.outputs}
        assert made >= {name for node in source.graph.node for name in node.output if node.op_type != "Constant"}
        written = to_proto(graph)
        onnx.checker.check_model(written, full_check=True)
        got = run(written, feeds)
        assert list(got) == list(want)
        for output in want:
            assert got[output].dtype == want[output].dtype and got[output].shape == want[output].shape
            np.testing.assert_allclose(got[output], want[output], rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[int, str, str]] = {
    "Hardmax not over the last axis": (
        11,
        "(float[2,3,4] x) => (float[2,3,4] y) { y = Hardmax<axis=1>(x) }",
        "Hardmax",
    ),
    "Hardmax of unknown rank": (
        12,
        "(float[2,3,4] x, int64[k] s) => (float[a,b,c] y) { r = Reshape(x, s) y = Hardmax<axis=2>(r) }",
        "Hardmax",
    ),
    "Resize nearest, scales from outside": (
        10,
        "(float[1,2,5,7] x, float[4] s) => (float[a,b,c,d] y) { y = Resize(x, s) }",
        "Resize",
    ),
    "Resize nearest, up and down": (
        10,
        "(float[1,2,5,7] x) => (float[a,b,c,d] y) <float[4] s = {1.0,1.0,0.5,2.0}> { y = Resize(x, s) }",
        "Resize",
    ),
    "PRelu with a slope a channel": (
        6,
        "(float[2,3,4] x, float[3] s) => (float[2,3,4] y) { y = PRelu(x, s) }",
        "PRelu",
    ),
    "Dropout whose mask is used": (10, "(float[5] x) => (float[5] y, bool[5] m) { y, m = Dropout(x) }", "Dropout"),
    "Scan with a batch axis": (
        8,
        """(float[1,2] i, float[1,3,2] x) => (float[1,2] y, float[1,3,2] z) {
        y, z = Scan ( , i, x) <num_scan_inputs = 1, body = b (float[2] a, float[2] e) => (float[2] o, float[2] p) {
            o = Add(a, e)
            p = Identity(o) }> }""",
        "Scan",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lifted_is_refused_by_name(name: str) -> None:
    opset, text, op = REFUSED[name]
    with pytest.raises(
        ModelError, match=rf"from opset {opset} to 13: node '{op}_0' \({op}\): .*Export it with a newer opset"
    ):
        load(parsed(opset, text))


def test_what_the_converter_has_no_adapter_for_is_refused_by_name() -> None:
    text = "(float[2,3] x, float[3] s) => (float[2,3] y) { y = BatchNormalization<spatial=0>(x, s, s, s, s) }"
    with pytest.raises(ModelError, match=r"from opset 7 to 13.*[Ss]patial.*Export it with a newer opset"):
        load(parsed(7, text))


def test_a_newer_model_is_left_alone() -> None:
    source = parsed(17, "(float[2] x) => (float[2] y) { y = Relu(x) }")
    graph = load(source)
    assert graph.opset == 17 and graph.info.notes == ["1 nodes had no name: named after their operator"]


def lifted_with_everything() -> ModelProto:
    source = parsed(
        9,
        """(float[N,2,4,4] x) => (float[N,b,c,d] y) <float[4] s = {1.0,1.0,2.0,2.0}> {
        a = Upsample <__bits = 4> (x, s)
        b = my.Thing <strings = ["a", "b"]> (a)
        c = Clip <min = 0.0> (a)
        y = Softmax <axis = 1> (c) }""",
    )
    source.opset_import.add(domain="my", version=3)
    for node, name in zip(source.graph.node, ("up", "thing", "clip", "soft"), strict=True):
        node.name = name
        node.doc_string = f"doc of {name}"
        node.metadata_props.add(key="who", value=name)
    source.ir_version = 10
    source.graph.doc_string = "graph doc"
    source.graph.metadata_props.add(key="g", value="1")
    source.metadata_props.add(key="author", value="me")
    source.producer_name = "maker"
    weight = numpy_helper.from_array(np.arange(900, dtype=np.float32), "large")
    weight.doc_string = "weight doc"
    source.graph.initializer.append(weight)
    source.graph.node.append(helper.make_node("Neg", ["large"], ["unused"], name="neg"))
    source.graph.value_info.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, ["N", 2, "rows", 8]))
    return source


def test_the_lift_keeps_names_metadata_and_foreign_domains() -> None:
    graph = load(lifted_with_everything())
    names = {node.name: node.op for node in all_nodes(graph)}
    assert {"up": "Resize", "thing": "Thing", "clip": "Clip", "soft": "Softmax", "neg": "Neg"}.items() <= names.items()
    assert node_metadata(graph, "up") == {"who": "up"}
    written = to_proto(graph)
    assert {entry.domain: entry.version for entry in written.opset_import} == {"": 13, "my": 3}
    docs = {node.name: node.doc_string for node in written.graph.node}
    assert docs["up"] == "doc of up" and docs["soft"] == "doc of soft"
    assert written.graph.doc_string == "graph doc" and written.graph.metadata_props[0].key == "g"
    assert written.metadata_props[0].value == "me" and written.producer_name == "maker"
    weight = next(tensor for tensor in written.graph.initializer if tensor.name == "large")
    assert weight.doc_string == "weight doc" and numpy_helper.to_array(weight)[-1] == 899
    known = {value.name: value for value in written.graph.value_info}["b"]
    assert [dim.dim_param or dim.dim_value for dim in known.type.tensor_type.shape.dim] == ["N", 2, "rows", 8]

"""What onnxruntime made of a file: models in which one op cannot become an integer kernel, and why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from sbonnx import ops
from sbonnx.report.figures import Kernels
from sbonnx.verify.kernel_count import count
from tests.support.models import model
from tests.verify.qdq import CONV, END, IMAGE, NUMBERS, START, WEIGHT, named, needed, optimised, qdq


def counted(proto: onnx.ModelProto, folder: Path) -> Kernels:
    return count(proto, optimised(proto, folder, "EXTENDED"), optimised(proto, folder, "ALL"))


def reasons(found: Kernels) -> dict[str, str]:
    return {one.node: one.why for one in found.left_float}


def test_all_in_integers(tmp_path: Path) -> None:
    found = counted(qdq(f"{CONV} {END}"), tmp_path)
    assert (found.planned, found.in_integers, found.share, found.weights_in_integers) == (1, 1, 1.0, 1.0)
    assert found.integer["QLinearConv"] == 1
    assert (found.quantize, found.dequantize) == (1, 1)
    assert not found.left_float and not found.refusals()
    assert found.summary() == "1 of 1 planned ops"


FLOAT = {
    "graph output": (f"{CONV.replace('c =', 'y =')}", "Conv_y", "is an output of the model"),
    "int8 activations": (
        "xq = QuantizeLinear (x, s, zero) xd = DequantizeLinear (xq, s, zero) "
        f"{WEIGHT} y = Conv <pads = [1,1,1,1]> (xd, wd, bd)",
        "Conv_y",
        "has int8 codes",
    ),
    "relu": (
        f"{CONV} r = Relu (c) yq = QuantizeLinear (r, s, mid) y = DequantizeLinear (yq, s, mid)",
        "Conv_c",
        "the Relu after it stays in float: the zero point 128",
    ),
    "clip": (
        f"{CONV} r = Clip (c, lo, hi) yq = QuantizeLinear (r, s, low) y = DequantizeLinear (yq, s, low)",
        "Conv_c",
        "the Clip after it stays in float",
    ),
    "epilogue": (
        f"{CONV} r = Tanh (c) yq = QuantizeLinear (r, s, mid) y = DequantizeLinear (yq, s, mid)",
        "Conv_c",
        "Tanh 'Tanh_r' is between it and the next pair",
    ),
    "two readers": (f"{CONV} {END.replace('y =', 'd =')} n = Neg (c) y = Add (d, n)", "Conv_c", "read in float by Neg"),
    "float activation": (
        f"{WEIGHT} c = Conv <pads = [1,1,1,1]> (x, wd, bd) {END}",
        "Conv_c",
        "its input 'x' is float",
    ),
    "16 bits": (
        f"xq = QuantizeLinear (x, s, wide) xd = DequantizeLinear (xq, s, wide) {WEIGHT} "
        f"c = Conv <pads = [1,1,1,1]> (xd, wd, bd) {END}",
        "Conv_c",
        "codes of type uint16",
    ),
}


@pytest.mark.parametrize("case", FLOAT)
def test_a_weighted_op_left_float_has_a_reason(case: str, tmp_path: Path) -> None:
    body, node, why = FLOAT[case]
    opset = 21 if case == "16 bits" else 17
    numbers = needed(body, {"lo": np.float32(0), "hi": np.float32(1), "f": np.ones(8, np.float32)})
    proto = named(model(f"agraph ({IMAGE} x) => (float y) {{ {body} }}", opset=opset, **numbers))
    found = counted(proto, tmp_path)
    assert [one.node for one in found.float_weighted] == [node]
    assert why in found.float_weighted[0].why
    assert (found.share, found.weights_in_integers) == (0.0, 0.0)
    assert (found.refusals()[0].what, found.refusals()[0].where) == ("integer kernel", node)


def test_onnxruntime_gives_a_float_bias_codes(tmp_path: Path) -> None:
    body = f"{START} wd = DequantizeLinear (w, s, zero) c = Conv <pads = [1,1,1,1]> (xd, wd, f) {END}"
    assert counted(qdq(body, f=np.ones(8, np.float32)), tmp_path).share == 1.0


def test_an_op_without_integer_kernel_between_pairs_is_stranded(tmp_path: Path) -> None:
    found = counted(qdq(f"{START} c = Tanh (xd) {END}"), tmp_path)
    assert found.planned == 0 and found.share is None
    assert reasons(found) == {"Tanh_c": "onnxruntime has no integer kernel for Tanh on CPU"}


def test_a_float_branch_strands_an_add(tmp_path: Path) -> None:
    found = counted(qdq(f"{START} e = Exp (x) c = Add (xd, e) {END}"), tmp_path)
    assert reasons(found) == {"Add_c": "its input 'e' is float"}


def test_a_product_joined_with_its_float_bias(tmp_path: Path) -> None:
    """onnxruntime 1.31 makes a Gemm of MatMul and Add where ranks and shapes are known, and leaves that in float."""
    body = f"{START} wd = DequantizeLinear (m, s, zero) p = MatMul (xd, wd) y = Add (p, f)"
    proto = named(
        model(f"agraph (float[4,8] x) => (float y) {{ {body} }}", **needed(body, {"f": np.ones(8, np.float32)}))
    )
    found = counted(proto, tmp_path)
    assert reasons(found) == {"MatMul_p": "onnxruntime joins it with the Add after it into a Gemm, whose bias is float"}


def test_products_need_no_pair_behind_them(tmp_path: Path) -> None:
    body = f"{START} wd = DequantizeLinear (m, s, zero) y = MatMul (xd, wd)"
    found = counted(named(model(f"agraph (float[4,8] x) => (float y) {{ {body} }}", **needed(body, {}))), tmp_path)
    assert (found.in_integers, dict(found.integer)) == (1, {"MatMulIntegerToFloat": 1})


def branch(text: str, prefix: str) -> onnx.GraphProto:
    """A body without inputs; what is made inside has names of its own."""
    graph = onnx.parser.parse_graph(f"b () => ({IMAGE} y) {{ {text} }}")
    made = {name for node in graph.node for name in node.output}
    for node in graph.node:
        for names in (node.input, node.output):
            names[:] = [f"{prefix}{name}" if name in made else name for name in names]
        node.name = f"{node.op_type}_{node.output[0]}"
    graph.output[0].name = f"{prefix}y"
    return graph


def test_bodies_count(tmp_path: Path) -> None:
    """The branches of an If: one with an integer kernel, one that has none."""
    good, bad = f"{CONV} {END}", FLOAT["relu"][0]
    proto = model(f"agraph (bool cond, {IMAGE} x) => ({IMAGE} y) {{ y = Identity (x) }}", **needed(f"{good} {bad}", {}))
    branches = {"then_branch": branch(good, "t_"), "else_branch": branch(bad, "e_")}
    proto.graph.node[0].CopyFrom(helper.make_node("If", ["cond"], ["y"], "if", **branches))
    found = counted(proto, tmp_path)
    assert (found.planned, found.in_integers) == (2, 1)
    assert [one.node for one in found.float_weighted] == ["Conv_e_c"]
    assert found.weights_in_integers == 0.5


ALONE: dict[str, str] = {
    "Conv": f"{CONV}",
    "Gemm": f"{START} wd = DequantizeLinear (m, s, zero) c = Gemm (xd, wd)",
    "MatMul": f"{START} wd = DequantizeLinear (m, s, zero) c = MatMul (xd, wd)",
    "Add": f"{START} c = Add (xd, xd)",
    "Mul": f"{START} c = Mul (xd, xd)",
    "Concat": f"{START} c = Concat <axis = 1> (xd, xd)",
    "Where": f"{START} c = Where (cond, xd, xd)",
    "MaxPool": f"{START} c = MaxPool <kernel_shape = [2,2]> (xd)",
    "AveragePool": f"{START} c = AveragePool <kernel_shape = [2,2]> (xd)",
    "GlobalAveragePool": f"{START} c = GlobalAveragePool (xd)",
    "ReduceMax": f"{START} c = ReduceMax <axes = [2]> (xd)",
    "ReduceMin": f"{START} c = ReduceMin <axes = [2]> (xd)",
    "LeakyRelu": f"{START} c = LeakyRelu (xd)",
    "Sigmoid": f"{START} c = Sigmoid (xd)",
    "Softmax": f"{START} c = Softmax (xd)",
    "Resize": f'{START} c = Resize <mode = "nearest"> (xd, , half)',
    "Reshape": f"{START} c = Reshape (xd, shape)",
    "Transpose": f"{START} c = Transpose (xd)",
    "Squeeze": f"{START} c = Squeeze (xd, first)",
    "Unsqueeze": f"{START} c = Unsqueeze (xd, first)",
    "Flatten": f"{START} c = Flatten (xd)",
    "Slice": f"{START} c = Slice (xd, first, one)",
    "Gather": f"{START} c = Gather (xd, first)",
    "GatherElements": f"{START} c = GatherElements (xd, places)",
    "Split": f"{START} c = Split <axis = 1> (xd, eight)",
    "Tile": f"{START} c = Tile (xd, twice)",
    "DepthToSpace": f"{START} c = DepthToSpace <blocksize = 2> (xd)",
}
OTHERS = {
    "cond": np.array([True]),
    "shape": np.array([8, 64]),
    "first": np.array([0]),
    "one": np.array([1]),
    "eight": np.array([8]),
    "twice": np.array([1, 2, 1, 1]),
    "places": np.zeros((1, 8, 8, 8), np.int64),
}


def test_every_op_of_the_table_is_tried() -> None:
    assert set(ALONE) == ops.INTEGER_ON_CPU


@pytest.mark.parametrize("op", sorted(ops.INTEGER_ON_CPU))
def test_an_op_of_the_table_runs_in_integers(op: str, tmp_path: Path) -> None:
    body = f"{ALONE[op]} {END}"
    shape = "float[8,8]" if op == "Gemm" else IMAGE
    proto = named(model(f"agraph ({shape} x) => (float y) {{ {body} }}", **needed(body, OTHERS)))
    found = counted(proto, tmp_path)
    assert not found.left_float, found.left_float
    assert found.in_integers + found.folded == 1
    assert sum(found.integer.values()) >= found.in_integers
    assert not set(found.floating) & {op, "FusedConv"}


def test_a_share_is_none_where_nothing_is_counted() -> None:
    assert Kernels(planned=3, skipped="no room").share is None
    assert Kernels(skipped="no room").summary() == "not counted: no room"
    assert NUMBERS["w"].dtype == np.int8


def test_all_weights_count(tmp_path: Path) -> None:
    """Those of recurrent ops, tables and constant operands too, each once; biases and scales do not."""
    body = (
        f"{CONV} {END.replace('y =', 'd =')} i = Shape (x) e = Gather (table, i) "
        "l, last, state = LSTM <hidden_size = 4> (rows, input_weights, hidden_weights, gates) "
        "p = MatMul (rows, shared) n = MatMul (p, shared) o = Add (n, plane) y = Identity (d)"
    )
    constants = {
        "table": np.ones((200, 5), np.float32),
        "input_weights": np.ones((1, 16, 6), np.float32),
        "hidden_weights": np.ones((1, 16, 4), np.float32),
        "gates": np.ones((1, 32), np.float32),
        "shared": np.ones((6, 6), np.float32),
        "plane": np.ones((1, 1, 6, 6), np.float32),
    }
    outputs = "float y, float e, float l, float o"
    text = f"agraph ({IMAGE} x, float[3,1,6] rows) => ({outputs}) {{ {body} }}"
    proto = named(model(text, **needed(body, constants)))
    found = counted(proto, tmp_path)
    conv = int(np.prod(next(one.dims for one in proto.graph.initializer if len(one.dims) == 4)))
    assert found.float_weights == {"Gather": 1000, "LSTM": 160, "MatMul": 36, "Add": 36}
    assert found.weights_in_integers == pytest.approx(conv / (conv + 1232))

"""What stands between the two products of softmax attention is a block; what only looks like attention is none."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx.graph import load
from sbonnx.patterns import Block, find_blocks
from tests.support.models import model, run
from tests.support.pattern_checks import random_feeds

SCORES = "s = MatMul (q, k)"
PATHS = {
    "softmax alone": ("", "s"),
    "scale": ("a = Div (s, eight)", "a"),
    "scale and mask": ("a = Div (s, eight) b = Add (a, mask)", "b"),
    "mask first operand": ("a = Mul (eight, s) b = Add (mask, a)", "b"),
    "where": ("a = Mul (s, eight) b = Where (keep, a, low)", "b"),
    "where, the other way": ("a = Mul (s, eight) b = Where (keep, low, a)", "b"),
    "cap": ("a = Div (s, eight) b = Tanh (a) c = Mul (b, eight) d = Add (c, mask)", "d"),
    "floor": ("a = Add (s, mask) b = Max (a, low)", "b"),
    "reshapes": ("a = Add (s, mask) b = Reshape (a, wide) c = Add (b, mask) d = Reshape (c, narrow)", "d"),
}
ENDS = {
    "plain": "p = Softmax ({})",
    "cast": "p0 = Softmax ({}) p = Cast <to = 1> (p0)",
    "nan": "p0 = Softmax ({}) n = IsNaN (p0) p = Where (n, zero, p0)",
}


def attention(path: str, end: str, *, outputs: str = "", product: str = "MatMul (p, v)") -> onnx.ModelProto:
    steps, last = PATHS[path]
    return model(
        f"""g (float[2,4,5,8] q, float[2,4,8,5] k, float[2,4,5,8] v, float[5,5] mask, bool[5,5] keep)
            => (float[a,b,c,d] y{outputs}) {{ {SCORES} {steps} {ENDS[end].format(last)} y = {product} }}""",
        eight=np.float32(8),
        low=np.float32(-1e9),
        zero=np.float32(0),
        wide=np.array([1, 2, 4, 5, 5], np.int64),
        narrow=np.array([2, 4, 5, 5], np.int64),
        table=(5, 8),
    )


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("path", PATHS)
def test_attention(path: str, end: str) -> None:
    source = attention(path, end)
    assert run(source, random_feeds(source))["y"].shape == (2, 4, 5, 8)
    graph = load(source)
    (block,) = find_blocks(graph)
    assert (block.kind, block.inputs[0], block.output) == ("attention_softmax", "s", "p")
    products = {node.name for node in graph.nodes if node.op == "MatMul"}
    assert set(block.nodes) == {node.name for node in graph.nodes} - products
    assert set(block.inputs[1:]) <= {"mask", "keep"}


def test_attention_whose_probabilities_are_an_output() -> None:
    (block,) = find_blocks(load(attention("scale", "plain", outputs=", float[a,b,e,f] p")))
    assert block.output == "p"


@pytest.mark.parametrize("inner", ["a", "b"])
def test_attention_whose_inside_is_an_output(inner: str) -> None:
    assert find_blocks(load(attention("scale and mask", "plain", outputs=f", float[e,f,g,h] {inner}"))) == ()


def test_a_softmax_before_a_constant_table_is_no_attention() -> None:
    assert find_blocks(load(attention("scale", "plain", product="MatMul (p, table)"))) == ()


def test_a_classifier_is_no_attention() -> None:
    source = model(
        "g (float[2,8] x, float[4,4] v) => (float[2,4] y) { s = MatMul (x, w) p = Softmax (s) y = MatMul (p, v) }",
        w=(8, 4),
    )
    assert find_blocks(load(source)) == ()


def test_attention_as_one_op() -> None:
    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4, 5, 8]) for name in "qkvy"]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], "attention")
    graph = helper.make_graph([node], "g", value[:3], value[3:])
    source = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    assert find_blocks(load(source)) == (Block("attention_softmax", ("attention",), ("q", "k", "v"), "y", ""),)

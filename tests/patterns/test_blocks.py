"""Blocks are found in every way that exporters write them, and only where nothing reads what is inside.

What a written form computes in onnxruntime is compared with the function itself: a form with a typo tests nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from sbonnx.graph import load
from sbonnx.patterns import FUSE, SIMPLIFY, Block, apply, find_blocks
from tests.support.models import model, run
from tests.support.pattern_checks import random_feeds

Function = Callable[[Any], Any]
erf = np.vectorize(math.erf)


def scalars(**values: float) -> dict[str, Any]:
    return {name: np.float32(value) for name, value in values.items()}


NUMBERS = scalars(
    one=1,
    two=2,
    three=3,
    six=6,
    zero=0,
    twenty=20,
    half=0.5,
    sixth=1 / 6,
    minus_half=-0.5,
    root2=math.sqrt(2),
    inv_root2=math.sqrt(0.5),
    cubic=0.044715,
    k=math.sqrt(2 / math.pi),
    quick=1.702,
    eps=1e-5,
)
GAMMA = np.linspace(0.5, 2.0, 8, dtype=np.float32)
BETA = np.linspace(-1.0, 1.0, 8, dtype=np.float32)


def gelu(x: Any) -> Any:
    return 0.5 * x * (1 + erf(x / math.sqrt(2)))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def hardswish(x: Any) -> Any:
    return x * np.clip(x + 3, 0, 6) / 6


def mish(x: Any) -> Any:
    return x * np.tanh(np.log1p(np.exp(x)))


def layernorm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)


def rmsnorm(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def affine(function: Function) -> Function:
    return lambda x: function(x) * GAMMA + BETA


def scaled(function: Function) -> Function:
    return lambda x: function(x) * GAMMA


ERF = "d = Div (x, root2) e = Erf (d) a = Add (e, one)"
TANH = "q = Pow (x, three) r = Mul (cubic, q) s = Add (x, r) u = Mul (k, s) t = Tanh (u) a = Add (t, one)"
RELU6 = "p = Add (x, three) c = Clip (p, zero, six)"
CENTRE = "m = ReduceMean <axes = [-1]> (x) d = Sub (x, m)"
SPREAD = f"{CENTRE} q = Pow (d, two) v = ReduceMean <axes = [-1]> (q) w = Add (v, eps) r = Sqrt (w)"
SQUARES = "q = Mul (x, x) v = ReduceMean <axes = [-1]> (q) w = Add (v, eps) r = Sqrt (w)"

FORMS: dict[str, tuple[str, str, Function]] = {
    "gelu, half last": ("gelu", f"{ERF} m = Mul (x, a) y = Mul (m, half)", gelu),
    "gelu, half first": ("gelu", f"h = Mul (half, x) {ERF} y = Mul (h, a)", gelu),
    "gelu, half inside": ("gelu", f"{ERF} h = Mul (half, a) y = Mul (x, h)", gelu),
    "gelu, div by two": ("gelu", f"{ERF} m = Mul (a, x) y = Div (m, two)", gelu),
    "gelu, mul by root": (
        "gelu",
        "d = Mul (inv_root2, x) e = Erf (d) a = Add (one, e) m = Mul (x, a) y = Mul (half, m)",
        gelu,
    ),
    "tanh gelu, torch": ("gelu", f"{TANH} h = Mul (half, a) y = Mul (x, h)", gelu_tanh),
    "tanh gelu, half first": ("gelu", f"h = Mul (x, half) {TANH} y = Mul (h, a)", gelu_tanh),
    "tanh gelu, cube as products": (
        "gelu",
        """q = Mul (x, x) c = Mul (x, q) r = Mul (cubic, c) s = Add (x, r) u = Mul (k, s) t = Tanh (u)
           a = Add (one, t) m = Mul (x, a) y = Mul (half, m)""",
        gelu_tanh,
    ),
    "tanh gelu, factored": (
        "gelu",
        """h = Mul (half, x) l = Mul (x, k) c = Mul (cubic, x) q = Mul (c, x) g = Add (one, q) u = Mul (l, g)
           t = Tanh (u) a = Add (t, one) y = Mul (h, a)""",
        gelu_tanh,
    ),
    "quick gelu": ("gelu", "s = Mul (quick, x) g = Sigmoid (s) y = Mul (x, g)", lambda x: x * sigmoid(1.702 * x)),
    "silu": ("silu", "s = Sigmoid (x) y = Mul (x, s)", lambda x: x * sigmoid(x)),
    "silu, other order": ("silu", "s = Sigmoid (x) y = Mul (s, x)", lambda x: x * sigmoid(x)),
    "swish": ("silu", "z = Mul (x, two) s = Sigmoid (z) y = Mul (x, s)", lambda x: x * sigmoid(2 * x)),
    "hardswish, div last": ("hardswish", f"{RELU6} m = Mul (x, c) y = Div (m, six)", hardswish),
    "hardswish, mul last": ("hardswish", f"{RELU6} m = Mul (c, x) y = Mul (sixth, m)", hardswish),
    "hardswish, div inside": ("hardswish", f"{RELU6} m = Div (c, six) y = Mul (x, m)", hardswish),
    "hardswish, div first": ("hardswish", f"m = Div (x, six) {RELU6} y = Mul (m, c)", hardswish),
    "hardswish, unit clip": (
        "hardswish",
        "s = Div (x, six) p = Add (s, half) c = Clip (p, zero, one) y = Mul (x, c)",
        hardswish,
    ),
    "hardswish, HardSigmoid": ("hardswish", "h = HardSigmoid <alpha = 0.16666667> (x) y = Mul (x, h)", hardswish),
    "hardswish, native": ("hardswish", "y = HardSwish (x)", hardswish),
    "mish": ("mish", "s = Softplus (x) t = Tanh (s) y = Mul (x, t)", mish),
    "mish, by hand": ("mish", "e = Exp (x) p = Add (one, e) s = Log (p) t = Tanh (s) y = Mul (x, t)", mish),
    "mish, torch": (
        "mish",
        "s = Softplus (x) g = Greater (x, twenty) w = Where (g, x, s) t = Tanh (w) y = Mul (x, t)",
        mish,
    ),
    "layernorm, native": ("layernorm", "y = LayerNormalization (x, gamma, beta)", affine(layernorm)),
    "layernorm": ("layernorm", f"{SPREAD} n = Div (d, r) g = Mul (n, gamma) y = Add (g, beta)", affine(layernorm)),
    "layernorm, no affine": ("layernorm", f"{SPREAD} y = Div (d, r)", layernorm),
    "layernorm, scale alone": ("layernorm", f"{SPREAD} n = Div (d, r) y = Mul (gamma, n)", scaled(layernorm)),
    "layernorm, reciprocal": (
        "layernorm",
        f"{SPREAD} i = Reciprocal (r) n = Mul (d, i) g = Mul (gamma, n) y = Add (beta, g)",
        affine(layernorm),
    ),
    "layernorm, two subtractions": (
        "layernorm",
        f"{SPREAD} m2 = ReduceMean <axes = [-1]> (x) d2 = Sub (x, m2) n = Div (d2, r) "
        "g = Mul (n, gamma) y = Add (g, beta)",
        affine(layernorm),
    ),
    "layernorm, deviation squared by Mul, power": (
        "layernorm",
        f"{CENTRE} q = Mul (d, d) v = ReduceMean <axes = [-1]> (q) w = Add (eps, v) "
        "p = Pow (w, minus_half) y = Mul (p, d)",
        layernorm,
    ),
    "layernorm, gamma before the division": (
        "layernorm",
        f"{SPREAD} g = Mul (gamma, d) n = Div (g, r) y = Add (n, beta)",
        affine(layernorm),
    ),
    "layernorm, mean of squares": (
        "layernorm",
        f"{CENTRE} q = Mul (x, x) e = ReduceMean <axes = [-1]> (q) f = Mul (m, m) v = Sub (e, f) "
        "w = Add (v, eps) r = Sqrt (w) y = Div (d, r)",
        layernorm,
    ),
    "rmsnorm": ("rmsnorm", f"{SQUARES} n = Div (x, r) y = Mul (n, gamma)", scaled(rmsnorm)),
    "rmsnorm, reciprocal": (
        "rmsnorm",
        f"{SQUARES} i = Reciprocal (r) n = Mul (x, i) y = Mul (gamma, n)",
        scaled(rmsnorm),
    ),
    "rmsnorm, one over": ("rmsnorm", f"{SQUARES} i = Div (one, r) y = Mul (x, i)", rmsnorm),
    "rmsnorm, casts": (
        "rmsnorm",
        f"{SQUARES} n = Div (x, r) c = Cast <to = 1> (n) y = Mul (gamma, c)",
        scaled(rmsnorm),
    ),
}
"""name → kind, nodes from x to y (ops of opset 17), the function."""


def written(nodes: str, *, tail: str = "", outputs: str = "") -> onnx.ModelProto:
    return model(
        f"g (float[2,3,8] x) => (float[2,3,8] y{outputs}) {{ {nodes} {tail} }}", **NUMBERS, gamma=GAMMA, beta=BETA
    )


@pytest.mark.parametrize("name", FORMS)
def test_form_computes_the_function(name: str) -> None:
    source = written(FORMS[name][1])
    x = random_feeds(source)["x"]
    np.testing.assert_allclose(run(source, {"x": x})["y"], FORMS[name][2](x.astype(np.float64)), atol=2e-5)


@pytest.mark.parametrize("name", FORMS)
def test_form_is_one_block(name: str) -> None:
    kind, nodes, _ = FORMS[name]
    graph = load(written(nodes))
    everything = tuple(node.name for node in graph.nodes)
    assert find_blocks(graph) == (Block(kind, everything, ("x",), "y", ""),)


@pytest.mark.parametrize("name", FORMS)
def test_form_is_still_a_block_after_simplification_and_fusion(name: str) -> None:
    """Between two layers, which must not swallow the block's constants."""
    source = written(FORMS[name][1])
    for node in source.graph.node:
        for side in (node.input, node.output):
            side[:] = [{"x": "before", "y": "after"}.get(tensor, tensor) for tensor in side]
    source.graph.node.insert(0, helper.make_node("MatMul", ["x", "left"], ["before"], "first"))
    source.graph.node.append(helper.make_node("MatMul", ["after", "right"], ["y"], "last"))
    for weight in ("left", "right"):
        values = np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)
        source.graph.initializer.append(onnx.numpy_helper.from_array(values, weight))
    graph = load(source)
    apply(graph, SIMPLIFY)
    fired = [fired.pattern for fired in apply(graph, FUSE).fired]
    assert fired == []
    (block,) = find_blocks(graph)
    assert block.kind == FORMS[name][0]
    assert {node.name for node in graph.nodes} - set(block.nodes) == {"first", "last"}


INTERIORS = {
    "gelu, half last": ("e", "m"),
    "tanh gelu, torch": ("q", "u", "a"),
    "silu": ("s",),
    "hardswish, div last": ("c",),
    "mish": ("t",),
    "layernorm": ("d", "m", "g"),
    "rmsnorm": ("r",),
}


@pytest.mark.parametrize(("name", "inner"), [(name, inner) for name, inners in INTERIORS.items() for inner in inners])
def test_inside_that_is_read_elsewhere_is_no_block(name: str, inner: str) -> None:
    """Neither by another node nor as an output. A smaller block within may remain, never one that hides the tensor."""
    as_output = written(FORMS[name][1], outputs=f", float[a,b,c] {inner}")
    by_node = written(FORMS[name][1], tail=f"z = Neg ({inner})", outputs=", float[a,b,c] z")
    for source in (as_output, by_node):
        graph = load(source)
        for block in find_blocks(graph):
            hidden = {t.name for n in graph.nodes if n.name in block.nodes for t in n.outputs} - {block.output}
            assert inner not in hidden
            assert block.output != "y" or "d" not in hidden


def test_what_looks_like_a_block_and_is_none() -> None:
    near_misses = (
        "d = Div (x, two) e = Erf (d) a = Add (e, one) m = Mul (x, a) y = Mul (m, half)",  # another root
        f"{ERF} m = Mul (x, a) y = Mul (m, two)",  # doubled, not halved
        "s = Sigmoid (x) z = Neg (x) y = Mul (z, s)",  # two different factors
        "p = Add (x, two) c = Clip (p, zero, six) m = Mul (x, c) y = Div (m, six)",
        "s = Softplus (x) y = Tanh (s)",
        f"{CENTRE} q = Mul (d, x) v = ReduceMean <axes = [-1]> (q) w = Add (v, eps) r = Sqrt (w) y = Div (d, r)",
    )
    for nodes in near_misses:
        assert find_blocks(load(written(nodes))) == ()


def test_a_computed_scale_is_no_part_of_a_norm() -> None:
    source = written(f"{SPREAD} n = Div (d, r) t = Tanh (x) y = Mul (n, t)")
    graph = load(source)
    (block,) = find_blocks(graph)
    assert (block.kind, block.output) == ("layernorm", "n")


def test_blocks_come_in_order_and_share_no_node() -> None:
    source = written(
        f"g = Sigmoid (x) h = Mul (x, g) {SPREAD.replace('(x', '(h')} n = Div (d, r) s = Sigmoid (n) y = Mul (n, s)"
    )
    blocks = find_blocks(load(source))
    assert [block.kind for block in blocks] == ["silu", "layernorm", "silu"]
    nodes = [name for block in blocks for name in block.nodes]
    assert len(nodes) == len(set(nodes)) == 11


def test_inside_branches() -> None:
    source = model(
        """g (float[2,8] x, bool flag) => (float[2,8] y) {
            h = Relu (x)
            y = If (flag) <
                then_branch = t () => (float[2,8] p) { s = Sigmoid (h) p = Mul (h, s) },
                else_branch = e () => (float[2,8] q) { v = Softplus (h) w = Tanh (v) q = Mul (h, w) }
            >
        }"""
    )
    source.graph.node[1].name = "choice"
    found = {(block.kind, block.scope, block.inputs, block.output) for block in find_blocks(load(source))}
    assert found == {
        ("silu", "choice/then_branch", ("h",), "p"),
        ("mish", "choice/else_branch", ("h",), "q"),
    }


def test_inside_that_a_branch_reads() -> None:
    source = model(
        """g (float[2,8] x, bool flag) => (float[2,8] y, float[2,8] z) {
            s = Sigmoid (x) y = Mul (x, s)
            z = If (flag) <
                then_branch = t () => (float[2,8] p) { p = Relu (s) },
                else_branch = e () => (float[2,8] q) { q = Neg (x) }
            >
        }"""
    )
    assert find_blocks(load(source)) == ()


GROUP_HEAD = "a = Reshape (x, groups) i = InstanceNormalization (a, ones, zeros)"


@pytest.mark.parametrize(
    "nodes",
    [
        f"{GROUP_HEAD} r = Reshape (i, back) m = Mul (r, gamma) y = Add (m, beta)",
        f"{GROUP_HEAD} s = Shape (x) r = Reshape (i, s) m = Mul (gamma, r) y = Add (beta, m)",
        f"{GROUP_HEAD} y = Reshape (i, back)",
    ],
)
def test_groupnorm(nodes: str) -> None:
    source = model(
        f"g (float[2,8,3,3] x) => (float[2,8,3,3] y) {{ {nodes} }}",
        groups=np.array([0, 4, -1], np.int64),
        back=np.array([2, 8, 3, 3], np.int64),
        ones=np.ones(4, np.float32),
        zeros=np.zeros(4, np.float32),
        gamma=GAMMA.reshape(8, 1, 1),
        beta=BETA.reshape(8, 1, 1),
    )
    graph = load(source)
    apply(graph, SIMPLIFY)
    (block,) = find_blocks(graph)
    assert (block.kind, block.inputs, block.output) == ("groupnorm", ("x",), "y")
    assert len(block.nodes) == len(graph.nodes)


NATIVE = {
    "Gelu": ("gelu", 20),
    'Gelu <approximate = "tanh">': ("gelu", 20),
    "HardSwish": ("hardswish", 17),
    "Mish": ("mish", 18),
    "Swish": ("silu", 24),
    "RMSNormalization": ("rmsnorm", 23),
}


@pytest.mark.parametrize("call", NATIVE)
def test_native(call: str) -> None:
    kind, opset = NATIVE[call]
    weight = ", gamma" if "Normalization" in call else ""
    source = model(f"g (float[2,3,8] x) => (float[2,3,8] y) {{ y = {call} (x{weight}) }}", opset=opset, gamma=GAMMA)
    (block,) = find_blocks(load(source))
    assert (block.kind, block.inputs, block.output) == (kind, ("x",), "y")


@pytest.mark.slow
def test_a_long_model_takes_no_longer_than_its_length() -> None:
    """600 attentions and GELUs: seconds if a tree were searched in more than a few ways."""
    layer = (
        "s{1} = MatMul (x{0}, keys) a{1} = Div (s{1}, eight) b{1} = Add (a{1}, mask) p{1} = Softmax (b{1}) "
        "o{1} = MatMul (p{1}, values) d{1} = Div (o{1}, root2) e{1} = Erf (d{1}) f{1} = Add (e{1}, one) "
        "m{1} = Mul (o{1}, f{1}) x{1} = Mul (m{1}, half)"
    )
    nodes = "\n".join(layer.format(number, number + 1) for number in range(300))
    source = model(
        f"""g (float[5,8] x0, float[8,5] keys, float[5,8] values, float[5,5] mask)
            => (float[5,8] x300) {{ {nodes} }}""",
        eight=np.float32(8),
        **NUMBERS,
    )
    blocks = find_blocks(load(source))
    assert [block.kind for block in blocks] == ["attention_softmax", "gelu"] * 300

"""Constant Mul, Div, Add and Sub around linear layers, Gemm's factors, MatMul with a bias, Clip as Relu."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.graph import load
from sbonnx.patterns import FUSE, Applied, apply, find_blocks
from tests.patterns.layers import LAYERS, Layer
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

TOLERANCE = 5e-6
USES = {
    "mul": "Mul (c, k)",
    "mul_first": "Mul (k, c)",
    "div": "Div (c, k)",
    "add": "Add (c, k)",
    "sub": "Sub (c, k)",
    "sub_from": "Sub (k, c)",
}


def operand(shape: tuple[int, ...]) -> np.ndarray:
    """Values around 1 and -1: safe to divide by."""
    rng = np.random.default_rng(7)
    return np.asarray(rng.choice([-1.0, 1.0], shape) * rng.uniform(0.5, 2.0, shape), np.float32)


def assert_becomes(before: onnx.ModelProto, ops: list[str], tolerance: float = TOLERANCE) -> Applied:
    graph = load(before)
    applied = apply(graph, FUSE)
    after = assert_sound(graph)
    assert [node.op for node in graph.nodes] == ops
    assert_same_outputs(before, after, random_feeds(before), tolerance=tolerance)
    return applied


def after(layer: Layer, use: str, k: np.ndarray, *, opset: int = 17) -> onnx.ModelProto:
    dims = ",".join("abcdef"[: layer.rank])
    text = f"g (float[{layer.dims(layer.x)}] x) => (float[{dims}] y) {{ c = {layer.call()} y = {USES[use]} }}"
    return model(text, opset=opset, **layer.weights(), k=k)


def before(layer: Layer, use: str, k: np.ndarray) -> onnx.ModelProto:
    dims = ",".join("abcdef"[: layer.rank])
    text = f"g (float[{layer.dims(layer.x)}] c) => (float[{dims}] y) {{ n = {USES[use]} y = {layer.call('n')} }}"
    return model(text, **layer.weights(), k=k)


@pytest.mark.sampled
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", LAYERS)
def test_one_number_a_channel_after_every_layer(name: str, use: str) -> None:
    layer = LAYERS[name]
    gemm = layer.op == "MatMul" and use in ("add", "sub", "sub_from")
    applied = assert_becomes(after(layer, use, operand(layer.along(layer.outputs))), ["Gemm" if gemm else layer.op])
    assert not applied.refusals


@pytest.mark.sampled(5)
@pytest.mark.parametrize("opset", [13, 21])
@pytest.mark.parametrize("shape", [(), (1,), (4, 1), (1, 4, 1), (1, 1, 1)])
def test_operand_shapes_after_a_convolution(shape: tuple[int, ...], opset: int) -> None:
    for use in USES:
        assert_becomes(after(LAYERS["conv1d"], use, operand(shape), opset=opset), ["Conv"])


@pytest.mark.parametrize("shape", [(4,), (4, 4), (2, 1, 1), (2, 4, 1), (1, 1, 4, 1), (1, 1, 1, 1)])
def test_operands_that_vary_elsewhere_or_enlarge_the_result_are_refused(shape: tuple[int, ...]) -> None:
    layer = LAYERS["conv1d"]  # its output is (2, 4, 4)
    dims = ",".join("abcdef"[: max(3, len(shape))])
    text = f"g (float[2,3,9] x) => (float[{dims}] y) {{ c = {layer.call()} y = Mul (c, k) }}"
    applied = assert_becomes(model(text, **layer.weights(), k=operand(shape)), ["Conv", "Mul"])
    assert [refusal.what for refusal in applied.refusals] == ["fuse_constant"]
    assert "is not one number for each of 4 channels" in applied.refusals[0].why


def test_constant_over_layer_is_not_linear() -> None:
    layer = LAYERS["gemm"]
    text = f"g (float[3,5] x) => (float[3,4] y) {{ c = {layer.call()} y = Div (k, c) }}"
    assert_becomes(model(text, **layer.weights(), k=operand((4,))), ["Gemm", "Div"])


def test_division_by_zero_is_refused() -> None:
    applied = apply(load(after(LAYERS["gemm"], "div", np.zeros(4, np.float32))), FUSE)
    assert not applied.fired
    assert "not be finite" in applied.refusals[0].why


@pytest.mark.sampled
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", [name for name in LAYERS if not name.startswith("transpose")])
def test_before_every_layer(name: str, use: str) -> None:
    layer = LAYERS[name]
    moved = layer.op == "MatMul" and use in ("add", "sub", "sub_from")
    assert_becomes(before(layer, use, operand(layer.along(layer.inputs))), ["Gemm" if moved else layer.op])


def test_normalised_input_through_a_resize_and_a_padded_convolution() -> None:
    """The scale goes into the padded convolution, the shift cannot."""
    source = model(
        """g (uint8[1,3,4,4] x) => (float[1,4,8,8] y) {
            f = Cast <to = 1> (x) r = Resize <mode = "nearest"> (f, , s) m = Sub (r, mean) n = Div (m, std)
            y = Conv <pads = [1,1,1,1]> (n, w) }""",
        s=np.array([1, 1, 2, 2], np.float32),
        mean=operand((1, 3, 1, 1)),
        std=operand((3, 1, 1)),
        w=(4, 3, 3, 3),
    )
    applied = assert_becomes(source, ["Cast", "Resize", "Sub", "Conv"])
    assert any("whole kernel" in refusal.why for refusal in applied.refusals)


@pytest.mark.parametrize("shape", [(2, 3, 6, 7), (1, 3, 6, 1)])
def test_before_a_convolution_only_one_number_a_channel(shape: tuple[int, ...]) -> None:
    assert_becomes(before(LAYERS["conv2d"], "mul", operand(shape)), ["Mul", "Conv"])


def test_operand_that_enlarges_the_input_stays() -> None:
    source = model(
        "g (float[1,1,5,5] x) => (float[1,4,3,3] y) { n = Mul (x, k) y = Conv (n, w) }",
        k=operand((1, 3, 1, 1)),
        w=(4, 3, 3, 3),
    )
    applied = assert_becomes(source, ["Mul", "Conv"])
    assert "is not known to have 3 channels" in applied.refusals[0].why


def test_constants_of_a_gelu_are_not_pulled_into_the_layers_around_it() -> None:
    source = model(
        """g (float[2,6,5] x) => (float[2,6,3] y) {
            p = MatMul (x, w1) a = Add (p, b1) d = Div (a, root) e = Erf (d) o = Add (e, one)
            m = Mul (a, o) h = Mul (m, half) y = MatMul (h, w2) }""",
        w1=(5, 8),
        b1=8,
        w2=(8, 3),
        root=np.float32(np.sqrt(2)),
        one=np.float32(1),
        half=np.float32(0.5),
    )
    graph = load(source)
    assert apply(graph, FUSE) == Applied()
    assert [block.kind for block in find_blocks(graph)] == ["gelu"]


@pytest.mark.parametrize("x", [(3, 5), (2, 3, 5), (5,)])
def test_matmul_add_scale(x: tuple[int, ...]) -> None:
    """Rank 2 becomes a Gemm; other ranks keep MatMul and Add, with the scale in both."""
    dims = ",".join(map(str, (*x[:-1], 4)))
    source = model(
        f"""g (float[{",".join(map(str, x))}] x) => (float[{dims}] y) {{
            p = MatMul (x, w) a = Add (b, p) y = Mul (a, k) }}""",
        w=(5, 4),
        b=4,
        k=operand((4,)),
    )
    assert_becomes(source, ["Gemm"] if len(x) == 2 else ["MatMul", "Add"])


def test_matmul_with_a_stack_of_weights_scales_its_columns() -> None:
    source = model(
        "g (float[2,3,5] x) => (float[2,3,4] y) { p = MatMul (x, w) y = Mul (p, k) }",
        w=(2, 5, 4),
        k=operand((1, 1, 4)),
    )
    assert_becomes(source, ["MatMul"])


def test_scores_of_attention_are_left_alone() -> None:
    source = model(
        "g (float[2,3,5] q, float[2,5,4] k) => (float[2,3,4] y) { p = MatMul (q, k) s = Mul (p, c) y = Add (s, m) }",
        c=operand(()),
        m=operand((4,)),
    )
    assert assert_becomes(source, ["MatMul", "Mul", "Add"]) == Applied()


@pytest.mark.parametrize("shape", [(4,), (1, 4), (), (1, 1)])
@pytest.mark.parametrize("order", ["Add (p, b)", "Add (b, p)"])
def test_matmul_add_is_gemm(order: str, shape: tuple[int, ...]) -> None:
    source = model(
        f"g (float[N,5] x) => (float[N,4] y) {{ p = MatMul (x, w) y = {order} }}", w=(5, 4), b=operand(shape)
    )
    source.graph.node[0].name = "head"
    graph = load(source)
    apply(graph, FUSE)
    assert [(node.op, node.name) for node in graph.nodes] == [("Gemm", "head")]
    assert_same_outputs(source, assert_sound(graph), random_feeds(source), tolerance=TOLERANCE)


@pytest.mark.parametrize(
    ("x", "b", "refused"),
    [((2, 3, 5), (4,), []), ((3, 5), (3, 4), ["fuse_constant"]), ((3, 5), (2, 3, 4), ["fuse_constant"])],
)
def test_matmul_add_that_is_no_gemm(x: tuple[int, ...], b: tuple[int, ...], refused: list[str]) -> None:
    """A bias after a stack of matrices is what it should be; one that differs by row is no bias."""
    dims = ",".join("abc"[: max(len(x), len(b))])
    text = f"g (float[{','.join(map(str, x))}] x) => (float[{dims}] y) {{ p = MatMul (x, w) y = Add (p, b) }}"
    source = model(text, w=(5, 4), b=operand(b))
    assert [refusal.what for refusal in assert_becomes(source, ["MatMul", "Add"]).refusals] == refused


@pytest.mark.parametrize("turned", ["transA=1, transB=1", "transA=1", "transB=1", ""])
@pytest.mark.parametrize("bias", [(), (1,), (4,), (1, 4), (3, 1), (3, 4), None])
def test_factors_of_gemm_are_exact(bias: tuple[int, ...] | None, turned: str) -> None:
    """A peer resets beta and leaves the bias as it is: the output is then off by its whole range."""
    x = (5, 3) if "transA" in turned else (3, 5)
    w = (4, 5) if "transB" in turned else (5, 4)
    attributes = ", ".join(part for part in ("alpha = 0.25, beta = 8.0", turned) if part)
    weights: dict[str, Any] = {"w": w} if bias is None else {"w": w, "b": bias}
    source = model(
        f"""g (float[{x[0]},{x[1]}] x) => (float[3,4] y) {{
            y = Gemm <{attributes}> (x, w{", b" if bias is not None else ""}) }}""",
        **weights,
    )
    graph = load(source)
    apply(graph, FUSE)
    gemm = graph.nodes[0]
    assert not {"alpha", "beta"} & set(gemm.attrs)
    assert [tensor.name for tensor in gemm.inputs[1:]] == (["w"] if bias is None else ["w", "b"])
    assert_same_outputs(source, assert_sound(graph), random_feeds(source), tolerance=TOLERANCE)


def gemm_with_computed_bias(attributes: str) -> onnx.ModelProto:
    return model(f"g (float[3,5] x, float[3,4] b) => (float[3,4] y) {{ y = Gemm <{attributes}> (x, w, b) }}", w=(5, 4))


def test_factors_of_gemm_with_a_computed_bias() -> None:
    applied = assert_becomes(gemm_with_computed_bias("alpha = 0.5"), ["Gemm"])
    assert [fired.pattern for fired in applied.fired] == ["fold_gemm_factors"]
    applied = assert_becomes(gemm_with_computed_bias("alpha = 0.5, beta = 2.0"), ["Gemm"])
    assert not applied.fired
    assert "bias 'b' is computed" in applied.refusals[0].why


def test_integer_layers_are_left_alone() -> None:
    source = model(
        "g (int32[3,5] x) => (int32[3,4] y) { p = MatMul (x, w) y = Add (p, b) }",
        w=np.ones((5, 4), np.int32),
        b=np.arange(4, dtype=np.int32),
    )
    assert assert_becomes(source, ["MatMul", "Add"]) == Applied()


def test_a_shift_before_batches_of_matrices_is_refused() -> None:
    source = model(
        "g (float[2,3,5] x) => (float[2,3,4] y) { a = Sub (x, k) y = MatMul (a, w) }", k=operand((5,)), w=(2, 5, 4)
    )
    assert "MatMul has no bias" in assert_becomes(source, ["Sub", "MatMul"]).refusals[0].why


@pytest.mark.parametrize(
    ("bounds", "op"),
    [
        ("(x, zero)", "Relu"),
        ("(x, zero, inf)", "Relu"),
        ("(x, zero, six)", "Clip"),
        ("(x, six)", "Clip"),
        ("(x, , six)", "Clip"),
        ("(x)", "Clip"),
        ("(x, low)", "Clip"),
    ],
)
def test_clip_at_zero_is_relu(bounds: str, op: str) -> None:
    source = model(
        f"g (float[2,3] x, float low) => (float[2,3] y) {{ y = Clip {bounds} }}",
        zero=np.float32(0),
        inf=np.float32(np.inf),
        six=np.float32(6),
    )
    assert_becomes(source, [op], tolerance=0.0)

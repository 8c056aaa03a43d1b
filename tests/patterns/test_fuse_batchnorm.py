"""BatchNormalization into the linear layer before or after it; what is computed is compared in onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from sbonnx.graph import Graph, load
from sbonnx.patterns import FUSE, Applied, apply
from sbonnx.patterns.fuse.batchnorm import FUSE_BN, FUSE_BN_BEFORE
from tests.patterns.layers import LAYERS, Layer, batchnorm
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

TOLERANCE = 5e-6
CALL = "BatchNormalization <epsilon = 0.01> ({}, gamma, beta, mean, variance)"


def fused(before: onnx.ModelProto) -> tuple[Graph, Applied, onnx.ModelProto]:
    graph = load(before)
    applied = apply(graph, FUSE)
    return graph, applied, assert_sound(graph)


def assert_fuses(before: onnx.ModelProto, ops: list[str], tolerance: float = TOLERANCE) -> Graph:
    """The whole model becomes `ops`, and computes the same."""
    graph, _, after = fused(before)
    assert [node.op for node in graph.nodes] == ops
    assert_same_outputs(before, after, random_feeds(before), tolerance=tolerance)
    return graph


def assert_refused(before: onnx.ModelProto, *words: str) -> None:
    """Nothing changes, and a reason with these words is on record."""
    graph, applied, after = fused(before)
    assert not applied.fired
    assert [node.op for node in graph.nodes] == [node.op_type for node in before.graph.node]
    assert any(all(word in str(refusal) for word in words) for refusal in applied.refusals), applied.refusals
    assert_same_outputs(before, after, random_feeds(before))


def after(layer: Layer, *, opset: int = 17, call: str = CALL, outputs: str = "") -> onnx.ModelProto:
    dims = ",".join("abcdef"[: layer.rank])
    return model(
        f"""g (float[{layer.dims(layer.x)}] x) => (float[{dims}] y{outputs}) {{
            c = {layer.call()} y = {call.format("c")} }}""",
        opset=opset,
        **layer.weights(),
        **batchnorm(layer.outputs),
    )


def before(layer: Layer, *, opset: int = 17) -> onnx.ModelProto:
    dims = ",".join("abcdef"[: layer.rank])
    return model(
        f"g (float[{layer.dims(layer.x)}] x) => (float[{dims}] y) {{ n = {CALL.format('x')} y = {layer.call('n')} }}",
        opset=opset,
        **layer.weights(),
        **batchnorm(layer.inputs),
    )


@pytest.mark.sampled
@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize("name", LAYERS)
def test_after_every_layer(name: str, opset: int) -> None:
    op = LAYERS[name].op
    graph = assert_fuses(after(LAYERS[name], opset=opset), ["Gemm" if op == "MatMul" else op])
    assert graph.nodes[0].name.startswith(op)  # the name of the layer, not of the norm


NOT_BEFORE = {"transpose2d", "transpose2d_group2"}


@pytest.mark.parametrize("name", [name for name in LAYERS if name not in NOT_BEFORE])
def test_before_every_layer(name: str) -> None:
    op = LAYERS[name].op
    assert_fuses(before(LAYERS[name]), ["Gemm" if op == "MatMul" else op])


@pytest.mark.parametrize("name", sorted(NOT_BEFORE))
def test_before_a_transposed_convolution_that_spreads_the_shift_is_refused(name: str) -> None:
    assert_refused(before(LAYERS[name]), "fuse_bn_before", "whole kernel")


@pytest.mark.parametrize("padding", ["pads=[0,1,0,0]", 'auto_pad="SAME_UPPER"'])
def test_before_a_padded_convolution_only_without_shift(padding: str) -> None:
    layer = Layer("Conv", padding, (1, 3, 6, 6), (4, 3, 3, 3), 3, 4, (4,))
    assert_refused(before(layer), "whole kernel")
    plain = before(layer)
    for tensor in plain.graph.initializer:
        if tensor.name in ("beta", "mean"):
            tensor.CopyFrom(numpy_helper.from_array(np.zeros(3, np.float32), tensor.name))
    assert_fuses(plain, ["Conv"])


def test_names_of_layer_weight_and_last_tensor_survive() -> None:
    source = after(LAYERS["conv1d"])
    source.graph.node[0].name, source.graph.node[1].name = "stem/conv", "stem/bn"
    source.graph.node.append(helper.make_node("Relu", ["y"], ["z"], name="stem/relu"))
    source.graph.output[0].name = "z"
    graph, applied, _ = fused(source)
    assert [(one.pattern, one.node) for one in applied.fired] == [("fuse_bn", "stem/bn")]
    conv = graph.nodes[0]
    assert (conv.name, conv.inputs[1].name, conv.inputs[2].name, conv.outputs[0].name) == ("stem/conv", "w", "b", "y")


def test_a_shared_weight_is_duplicated() -> None:
    shared = model(
        """g (float[1,3,5,5] x) => (float[1,4,3,3] y, float[1,4,3,3] z) {
            c = Conv (x, w) y = BatchNormalization (c, gamma, beta, mean, variance) z = Conv (x, w) }""",
        w=(4, 3, 3, 3),
        **batchnorm(4),
    )
    graph = assert_fuses(shared, ["Conv", "Conv"])
    first, second = (node.inputs[1].name for node in graph.nodes)
    assert second == "w"  # who still reads it keeps it
    assert first != "w"


def test_two_norms_on_one_weight() -> None:
    shared = model(
        """g (float[1,3,5,5] x) => (float[1,4,3,3] y, float[1,4,3,3] z) {
            c = Conv (x, w) y = BatchNormalization (c, gamma, beta, mean, variance)
            d = Conv (x, w) z = BatchNormalization (d, beta, gamma, mean, variance) }""",
        w=(4, 3, 3, 3),
        **batchnorm(4),
    )
    assert_fuses(shared, ["Conv", "Conv"])


def test_chain_of_norms_and_constants_becomes_one_layer() -> None:
    chain = model(
        """g (float[1,3,5,5] x) => (float[1,4,3,3] y) {
            a = BatchNormalization (x, g3, g3, g3, v3) c = Conv (a, w)
            n = BatchNormalization (c, gamma, beta, mean, variance) m = Mul (n, s) p = Add (t, m)
            q = BatchNormalization (p, beta, gamma, mean, variance) y = Div (q, s) }""",
        w=(4, 3, 3, 3),
        s=np.array([0.5, -1.5, 2.0, 1.0], np.float32).reshape(4, 1, 1),
        t=(1, 4, 1, 1),
        g3=3,
        v3=np.array([0.5, 1.0, 2.0], np.float32),
        **batchnorm(4),
    )
    assert_fuses(chain, ["Conv"], tolerance=2e-5)


def test_second_reader_of_the_layer() -> None:
    source = after(LAYERS["conv1d"])
    source.graph.node.append(helper.make_node("Relu", ["c"], ["r"]))
    source.graph.output.append(helper.make_tensor_value_info("r", TensorProto.FLOAT, None))
    assert_refused(source, "'c' is also read by")


def test_layer_output_that_is_a_graph_output() -> None:
    assert_refused(after(LAYERS["conv1d"], outputs=", float[a,b,c] c"), "'c' is an output of the graph")


def test_reader_inside_a_branch() -> None:
    branchy = model(
        """g (float[1,3,5,5] x, bool flag) => (float[1,4,3,3] y, float[1,4,3,3] z) {
            c = Conv (x, w)
            y = BatchNormalization (c, gamma, beta, mean, variance)
            z = If (flag) <
                then_branch = t () => (float[1,4,3,3] p) { p = Relu (c) },
                else_branch = e () => (float[1,4,3,3] q) { q = Neg (c) }
            >
        }""",
        w=(4, 3, 3, 3),
        **batchnorm(4),
    )
    assert_refused(branchy, "'c' is read in a branch body")


def test_inside_a_branch() -> None:
    body = "c{0} = Conv (x, w) {1} = BatchNormalization (c{0}, gamma, beta, mean, variance)"
    branchy = model(
        f"""g (float[1,3,5,5] x, bool flag) => (float[1,4,3,3] z) {{
            z = If (flag) <
                then_branch = t () => (float[1,4,3,3] p) {{ {body.format(1, "p")} }},
                else_branch = e () => (float[1,4,3,3] q) {{ {body.format(2, "q")} }}
            >
        }}""",
        w=(4, 3, 3, 3),
        **batchnorm(4),
    )
    graph, applied, result = fused(branchy)
    assert len(applied.fired) == 2
    convolutions = [body.g.node[0] for body in result.graph.node[0].attribute]
    assert len({node.input[1] for node in convolutions}) == 1  # one folded weight, as it was one before
    for flag in (True, False):
        feeds = random_feeds(branchy) | {"flag": np.array(flag)}
        assert_same_outputs(branchy, result, feeds, tolerance=TOLERANCE)
    assert [node.op for node in graph.nodes] == ["If"]


def test_training_mode_is_refused() -> None:
    call = "BatchNormalization <training_mode = 1> ({}, gamma, beta, mean, variance)"
    graph = load(after(LAYERS["conv1d"], call=call))
    applied = apply(graph, FUSE)
    assert not applied.fired
    assert "training_mode" in applied.refusals[0].why


@pytest.mark.parametrize("computed", ["w", "b", "gamma", "variance"])
def test_what_is_computed_cannot_be_folded(computed: str) -> None:
    source = after(LAYERS["conv1d"])
    held = next(tensor for tensor in source.graph.initializer if tensor.name == computed)
    source.graph.initializer.remove(held)
    source.graph.input.append(helper.make_tensor_value_info(computed, TensorProto.FLOAT, list(held.dims)))
    graph = load(source)
    applied = apply(graph, FUSE)
    assert not applied.fired
    assert f"'{computed}'" in applied.refusals[0].why


@pytest.mark.parametrize("shift", [1.0, 0.0])
def test_matmul_of_rank_3_has_other_channels(shift: float) -> None:
    parameters = batchnorm(4)
    for name in ("beta", "mean"):
        parameters[name] *= np.float32(shift)
    stack = """g (float[2,4,4] x) => (float[2,4,4] y) { c = MatMul (x, w)
        y = BatchNormalization (c, gamma, beta, mean, variance) }"""
    assert_refused(model(stack, w=(4, 4), **parameters), "after MatMul", "rank 2")
    stack = """g (float[2,4,4] x) => (float[2,4,4] y) {
        c = BatchNormalization (x, gamma, beta, mean, variance) y = MatMul (c, w) }"""
    assert_refused(model(stack, w=(4, 4), **parameters), "before MatMul", "rank 2")


@pytest.mark.parametrize("name", ["gemm_factors", "gemm_scalar_bias", "gemm_full_bias"])
def test_factors_of_gemm_are_not_lost_when_a_pattern_works_alone(name: str) -> None:
    for source, pattern in ((after(LAYERS[name]), FUSE_BN), (before(LAYERS[name]), FUSE_BN_BEFORE)):
        graph = load(source)
        assert len(apply(graph, [pattern]).fired) == 1
        assert_same_outputs(source, assert_sound(graph), random_feeds(source), tolerance=TOLERANCE)


def test_gemm_that_transposes_the_normalised_tensor() -> None:
    turned = model(
        """g (float[5,5] x) => (float[5,4] y) {
            n = BatchNormalization (x, gamma, beta, mean, variance) y = Gemm <transA = 1> (n, w) }""",
        w=(5, 4),
        **batchnorm(5),
    )
    assert_refused(turned, "transposes")


@pytest.mark.parametrize(("variance", "epsilon"), [(0.0, 0.0), (-0.01, 0.001)])
def test_numbers_that_are_not_finite_are_refused(variance: float, epsilon: float) -> None:
    source = after(
        LAYERS["conv1d"], call=f"BatchNormalization <epsilon = {epsilon}> ({{}}, gamma, beta, mean, variance)"
    )
    for tensor in source.graph.initializer:
        if tensor.name == "variance":
            tensor.CopyFrom(numpy_helper.from_array(np.full(4, variance, np.float32), "variance"))
    applied = apply(load(source), FUSE)
    assert not applied.fired
    assert "not be finite" in applied.refusals[0].why


def half(shape: tuple[int, ...], scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).normal(size=shape) * scale).astype(np.float16)


def test_float16_stays_float16() -> None:
    bn = {name: value.astype(np.float16) for name, value in batchnorm(4).items()}
    source = model(
        """g (float16[1,3,5,5] x) => (float16[1,4,3,3] y) {
            c = Conv (x, w) y = BatchNormalization (c, gamma, beta, mean, variance) }""",
        w=half((4, 3, 3, 3)),
        **bn,
    )
    graph = assert_fuses(source, ["Conv"], tolerance=4e-3)
    assert {tensor.dtype for tensor in graph.nodes[0].inputs[1:]} == {np.dtype(np.float16)}


def test_float16_overflow_is_refused() -> None:
    bn = {name: value.astype(np.float16) for name, value in batchnorm(4).items()}
    bn["gamma"] = np.full(4, 6e4, np.float16)
    source = model(
        """g (float16[1,3,5,5] x) => (float16[1,4,3,3] y) {
            c = Conv (x, w) y = BatchNormalization (c, gamma, beta, mean, variance) }""",
        w=half((4, 3, 3, 3), 4.0),
        **bn,
    )
    applied = apply(load(source), FUSE)
    assert not applied.fired
    assert "not be finite" in applied.refusals[0].why


def test_a_norm_with_nothing_to_fold_into_stays() -> None:
    alone = model(
        """g (float[1,4,5,5] x) => (float[1,4,5,5] y) {
            r = Relu (x) y = BatchNormalization (r, gamma, beta, mean, variance) }""",
        **batchnorm(4),
    )
    graph, applied, _ = fused(alone)
    assert applied == Applied()
    assert [node.op for node in graph.nodes] == ["Relu", "BatchNormalization"]


@st.composite
def convolutions(draw: st.DrawFn) -> onnx.ModelProto:
    """Conv or ConvTranspose of 1 to 3 dimensions with any attributes, then a BatchNormalization."""
    op = draw(st.sampled_from(["Conv", "ConvTranspose"]))
    dims, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    per_in, per_out = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    kernel, strides, dilations = (draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims)) for _ in range(3))
    pads = draw(st.lists(st.integers(0, 1), min_size=2 * dims, max_size=2 * dims))
    pads = [min(pad, size - 1) for pad, size in zip(pads, kernel * 2, strict=True)]
    attributes: dict[str, Any] = {"group": group, "strides": strides, "dilations": dilations, "pads": pads}
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    channels_in, channels_out = group * per_in, group * per_out
    first, second = (channels_out, per_in) if op == "Conv" else (channels_in, per_out)
    values = {"w": rng.normal(size=(first, second, *kernel))} | batchnorm(channels_out, seed=draw(st.integers(0, 99)))
    inputs = ["x", "w"]
    if draw(st.booleans()):
        values["b"] = rng.normal(size=channels_out)
        inputs.append("b")
    epsilon = draw(st.sampled_from([1e-5, 1e-3, 0.1]))
    nodes = [
        helper.make_node(op, inputs, ["c"], "conv", **attributes),
        helper.make_node(
            "BatchNormalization", ["c", "gamma", "beta", "mean", "variance"], ["y"], "bn", epsilon=epsilon
        ),
    ]
    shape = [draw(st.integers(1, 2)), channels_in, *(8 for _ in range(dims))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in values.items()],
    )
    opset = draw(st.sampled_from([13, 17, 21]))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(convolutions())
def test_any_convolution(source: onnx.ModelProto) -> None:
    assert_fuses(source, [source.graph.node[0].op_type], tolerance=1e-5)

"""Simplification node by node: what is taken out, what stays, and what the interface keeps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx.graph import load, to_proto
from sbonnx.graph.query import all_nodes
from sbonnx.patterns import SIMPLIFY, apply
from sbonnx.patterns.simplify import fold
from sbonnx.patterns.simplify.no_ops import reshapes_nothing
from tests.patterns.simplified import INT64, ints, ops, simplified, target
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

# -- nodes that do nothing, and the interface


def test_identity_between_input_and_output_stays() -> None:
    graph, applied = simplified("g (float[N,2] x) => (float[N,2] y, float[N,2] z) { y = Identity(x) z = Identity(x) }")
    assert ops(graph) == ["Identity", "Identity"]
    assert applied.fired == ()


def test_identity_of_a_tensor_that_is_an_output_stays() -> None:
    graph, _ = simplified("g (float[2] x) => (float[2] y, float[2] z) { y = Relu(x) z = Identity(y) }")
    assert ops(graph) == ["Relu", "Identity"]


def test_one_tensor_under_two_output_names_keeps_one_identity() -> None:
    graph, _ = simplified("g (float[2] x) => (float[2] y, float[2] z) { a = Relu(x) y = Identity(a) z = Identity(a) }")
    assert sorted(ops(graph)) == ["Identity", "Relu"]


def test_a_chain_of_nothing_is_gone() -> None:
    text = """g (float[N,3,4] x) => (float[N,3,4] y) {
        a = Identity(x) b = Cast<to=1>(a) c = Reshape(b, s) d = Transpose<perm=[0,1,2]>(c) e = Dropout(d)
        f = Slice(e, zero, all, axis) g = Pad(f, pads) h = Concat<axis=0>(g) i = Expand(h, one) y = Relu(i) }"""
    graph, _ = simplified(
        text,
        s=ints(0, 3, -1),
        zero=ints(0),
        all=ints(2**31 - 1),
        axis=ints(1),
        pads=ints(0, 0, 0, 0, 0, 0),
        one=ints(1),
    )
    assert ops(graph) == ["Relu"]


def test_reader_inside_a_branch_follows() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) { a = Relu(x) b = Identity(a)
        y = If (c) <
            then_branch = t () => (float[2] p) { p = Neg(b) }, else_branch = e () => (float[2] q) { q = Exp(b) }
        >
    }"""
    graph, _ = simplified(text)
    assert ops(graph) == ["Relu", "If"]


def test_inside_a_branch_nodes_are_dropped_too() -> None:
    text = """g (float[2] x, bool c) => (float[2] y) { a = Relu(x)
        y = If (c) <
            then_branch = t () => (float[2] p) { i = Identity(a) n = Neg(i) p = Identity(n) },
            else_branch = e () => (float[2] q) { q = Identity(a) }
        > }"""
    graph, _ = simplified(text)
    assert Counter(node.op for node in all_nodes(graph)) == {"Relu": 1, "If": 1, "Neg": 1, "Identity": 1}


def test_dropout_whose_mask_is_used_is_refused() -> None:
    text = "g (float[2] x) => (float[2] y, bool[2] mask) { [drop] a, mask = Dropout(x) y = Relu(a) }"
    graph, applied = simplified(text)
    assert ops(graph) == ["Dropout", "Relu"]
    assert [(refusal.what, refusal.where) for refusal in applied.refusals] == [("dropout", "drop")]
    assert "'mask'" in applied.refusals[0].why


def test_unused_inputs_stay() -> None:
    graph, _ = simplified("g (float[2] x, float[M] unused) => (float[2] y) { d = Exp(unused) y = Relu(x) }")
    assert [tensor.name for tensor in graph.inputs] == ["x", "unused"]
    assert ops(graph) == ["Relu"]


def test_slice_is_dropped_only_when_it_is_known_to_take_everything() -> None:
    text = "g (float[N,3] x) => (float[A,B] y) { [s] a = Slice(x, zero, end, axis) y = Relu(a) }"
    for end, axis, dropped in ((3, 1, True), (2, 1, False), (2, 0, False), (2**63 - 1, 0, True), (7, -1, True)):
        graph, _ = simplified(text, zero=ints(0), end=ints(end), axis=ints(axis))
        assert (ops(graph) == ["Relu"]) is dropped, (end, axis)


@pytest.mark.parametrize(
    ("own", "target", "allowzero", "same"),
    [
        ((2, 3), [2, 3], False, True),
        ((None, 3), [-1, 3], False, True),
        ((None, 3), [0, 3], False, True),
        ((None, 3), [0, 3], True, False),
        ((0, 3), [0, 3], True, True),
        ((None, None), [-1, 0], False, True),
        ((None, None), [0, 0], False, True),
        ((None, 4), [-1, 2], False, False),
        ((None, 4), [2, -1], False, False),
        ((2, 3), [6], False, False),
        ((2, 3), [3, 2], False, False),
    ],
)
def test_when_a_reshape_does_nothing(own: Any, target: Any, allowzero: bool, same: bool) -> None:
    assert reshapes_nothing(own, target, allowzero) is same


# -- two in a row


@pytest.mark.parametrize(
    ("inner", "outer", "left"),
    [
        ((0, 12), (0, 4, 3), 1),  # a 0 that means a 0 of the inner one
        ((0, 12), (0, 3, 4), 0),  # there and back
        ((-1, 4), (0, 2, 2), 1),  # a 0 that means the -1 of the inner one
        ((-1, 6), (0, -1, 2), 2),  # two unknown: the second Reshape needs the first
        ((-1, 4), (0, -1), 1),  # the second does nothing
        ((3, -1), (-1, 12), 1),
        ((-1, 12), (-1, 4, 3), 1),
    ],
)
def test_reshape_of_reshape(inner: tuple[int, ...], outer: tuple[int, ...], left: int) -> None:
    dims = ",".join("ABC"[: len(outer)])
    text = f"g (float[N,3,4] x) => (float[{dims}] y) {{ a = Reshape(x, s) b = Reshape(a, t) y = Relu(b) }}"
    graph, _ = simplified(text, s=ints(*inner), t=ints(*outer))
    assert ops(graph) == ["Reshape"] * left + ["Relu"]


def test_reshape_with_allowzero_is_left_as_it_is() -> None:
    text = """g (float[N,0,4] x) => (float[A,B,C] y)
        { a = Reshape<allowzero=1>(x, s) b = Reshape<allowzero=1>(a, t) y = Relu(b) }"""
    graph, _ = simplified(text, s=ints(0, 4, 1), t=ints(0, 2, 2))
    assert ops(graph) == ["Reshape", "Relu"]
    assert graph.nodes[0].attrs["allowzero"] == 1


def test_flatten_before_reshape() -> None:
    text = "g (float[N,3,4] x) => (float[N,4,3] y) { a = Flatten(x) b = Reshape(a, s) y = Relu(b) }"
    assert ops(simplified(text, s=ints(-1, 4, 3))[0]) == ["Reshape", "Relu"]
    assert ops(simplified(text, s=ints(0, 4, 3))[0]) == ["Flatten", "Reshape", "Relu"]


def test_transposes_compose() -> None:
    text = """g (float[2,3,4] x) => (float[3,4,2] y)
        { a = Transpose<perm=[2,0,1]>(x) b = Transpose<perm=[2,0,1]>(a) y = Relu(b) }"""
    graph, _ = simplified(text)
    assert ops(graph) == ["Transpose", "Relu"]
    assert graph.nodes[0].attrs["perm"] == [1, 2, 0]


def test_transposes_that_cancel_between_input_and_output_leave_one_that_does_nothing() -> None:
    text = "g (float[2,3] x) => (float[2,3] y) { a = Transpose(x) y = Transpose(a) }"
    graph, applied = simplified(text)
    assert ops(graph) == ["Transpose"]
    assert [refusal.what for refusal in applied.refusals] == ["transpose_to_own_order"]


def test_a_transpose_that_others_read_stays_for_them() -> None:
    text = """g (float[2,3] x) => (float[2,3] y, float[3,2] z)
        { r = Relu(x) a = Transpose(r) b = Transpose(a) y = Neg(b) z = Exp(a) }"""
    assert sorted(ops(simplified(text)[0])) == ["Exp", "Neg", "Relu", "Transpose"]


@pytest.mark.parametrize(("inner", "outer", "gone"), [([1], [1], True), ([-1], [2], True), ([0], [1], False)])
def test_unsqueeze_then_squeeze(inner: list[int], outer: list[int], gone: bool) -> None:
    text = "g (float[1,1] x) => (float[1,1] y) { r = Relu(x) a = Unsqueeze(r, i) b = Squeeze(a, j) y = Neg(b) }"
    graph, _ = simplified(text, i=ints(*inner), j=ints(*outer))
    assert (ops(graph) == ["Relu", "Neg"]) is gone


# -- shapes


def test_a_static_shape_chain_is_a_constant() -> None:
    text = """g (float[2,3,4] x) => (float[2,12] y) {
        s = Shape(x) b = Gather(s, zero) b1 = Unsqueeze(b, axis) t = Concat<axis=0>(b1, rest) y = Reshape(x, t) }"""
    graph, _ = simplified(text, zero=np.array(0, INT64), axis=ints(0), rest=ints(-1))
    assert ops(graph) == ["Reshape"]
    assert target(graph.nodes[0]) == [2, -1]


def test_a_dynamic_batch_becomes_a_zero() -> None:
    text = """g (float[N,3,4] x) => (float[N,12] y) {
        s = Shape(x) b = Gather(s, zero) b1 = Unsqueeze(b, axis) t = Concat<axis=0>(b1, rest)
        r = Relu(x) u = Transpose<perm=[0,2,1]>(r) y = Reshape(u, t) }"""
    graph, _ = simplified(text, zero=np.array(0, INT64), axis=ints(0), rest=ints(12))
    assert ops(graph) == ["Relu", "Transpose", "Reshape"]
    assert target(graph.nodes[-1]) == [0, 12]


def test_one_number_that_is_computed_otherwise_becomes_minus_one() -> None:
    text = """g (float[N,12] x) => (float[A,3] y) {
        s = Shape(x) n = Gather(s, zero) m = Mul(n, four) t = Concat<axis=0>(m, three) y = Reshape(x, t) }"""
    graph, _ = simplified(text, zero=ints(0), four=ints(4), three=ints(3))
    assert ops(graph) == ["Reshape"]
    assert target(graph.nodes[0]) == [-1, 3]


def test_an_empty_batch_still_runs() -> None:
    """0 and -1 together would divide by zero where the computed shape does not: they are not put side by side."""
    text = """g (float[N,T,12] x) => (float[N,A,3] y) {
        s = Shape(x) n = Gather(s, zero) t = Gather(s, one) m = Mul(t, four)
        u = Concat<axis=0>(n, m, three) y = Reshape(x, u) }"""
    before = model(text, zero=ints(0), one=ints(1), four=ints(4), three=ints(3))
    graph = load(before)
    apply(graph, SIMPLIFY)
    feeds = {"x": np.zeros((0, 2, 12), np.float32)}
    assert_same_outputs(before, to_proto(graph), feeds)
    assert "Mul" in ops(graph)


def test_axes_of_another_tensor_are_not_taken_for_those_of_the_input() -> None:
    """Both are called N; only one is the axis of the tensor that is reshaped."""
    text = """g (float[N,4] x, float[M,2] other) => (float[A,B] y) {
        s = Shape(other) n = Gather(s, zero) t = Concat<axis=0>(n, n) y = Reshape(x, t) }"""
    before = model(text, zero=ints(0))
    graph = load(before)
    apply(graph, SIMPLIFY)
    feeds = {"x": np.arange(16, dtype=np.float32).reshape(4, 4), "other": np.zeros((4, 2), np.float32)}
    assert_same_outputs(before, assert_sound(graph), feeds)
    assert "Shape" in ops(graph)


def test_shapes_that_the_file_claims_are_not_believed() -> None:
    """Somebody made the batch dynamic and left the old shapes of the tensors between in the file."""
    text = "g (float[N,4] x) => (float[A] y) <float[1,4] r> { r = Relu(x) s = Shape(r) c = Cast<to=1>(s) y = Neg(c) }"
    before = model(text)
    graph = load(before)
    apply(graph, SIMPLIFY)
    assert_same_outputs(before, assert_sound(graph), {"x": np.zeros((3, 4), np.float32)})
    assert "Shape" in ops(graph)


def test_a_shape_that_is_an_output_is_refused() -> None:
    graph, applied = simplified("g (float[2,3] x) => (int64[2] y) { y = Shape(x) }")
    assert ops(graph) == ["Shape"]
    assert [refusal.what for refusal in applied.refusals] == ["known_shape"]


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_upsample_is_resize_after_loading(mode: str) -> None:
    text = f'g (float[1,2,3,3] x) => (float[1,2,6,6] y) {{ y = Upsample<mode="{mode}">(x, s) }}'
    before = onnx.parser.parse_model(f'<ir_version: 4, opset_import: ["" : 9]> {text}')
    before.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s"))
    graph = load(before)
    apply(graph, SIMPLIFY)
    assert ops(graph) == ["Resize"]
    assert_same_outputs(before, assert_sound(graph), random_feeds(before))


# -- computed matrices

FOURIER = """g (float[N,64] x) => (float[N,512] y) {
    rows = Range(zero, n, step) columns = Range(zero, m, step)
    r = Reshape(rows, upright) angle = Mul(r, columns) scaled = Mul(angle, pitch) basis = Cos(scaled)
    total = ReduceSum(basis) near = Add(x, total) a = MatMul(near, w) b = MatMul(near, basis) c = Mul(a, gain)
    y = Add(b, c) }"""
"""A 64 x 512 matrix that is computed from a few numbers, a sum of it, and a weight."""


@pytest.mark.parametrize(("share", "stays"), [(0.1, True), (2.0, False)])
def test_a_computed_matrix_that_would_be_most_of_the_file_stays(
    share: float, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the size of the weights. Small operands are folded, and so is what is small again."""
    monkeypatch.setattr(fold, "STORED_SHARE", share)
    monkeypatch.setattr(fold, "STORED_BYTES", 16 << 10)
    numbers = {name: np.float32(value) for name, value in {"zero": 0, "n": 64, "m": 512, "step": 1}.items()}
    proto = model(FOURIER, **numbers, upright=ints(64, 1), pitch=np.float32(0.01), w=(64, 512), gain=(512,))
    graph = load(proto)
    applied = apply(graph, SIMPLIFY)
    made = to_proto(graph)
    kinds = Counter(node.op_type for node in made.graph.node)
    assert "Range" not in kinds
    assert kinds["Cos"] == stays
    bytes_before, bytes_after = (sum(one.ByteSize() for one in one.graph.initializer) for one in (proto, made))
    assert (bytes_after < bytes_before + fold.STORED_BYTES) == stays
    refused = [refusal for refusal in applied.refusals if "of the file" in refusal.why]
    assert bool(refused) == stays
    assert_same_outputs(proto, made, random_feeds(proto))


def test_many_computed_matrices_together() -> None:
    """Each would be allowed alone; together, over all rounds, they grow the file by at most what one may."""
    count, size = 8, 16
    lines = " ".join(
        f"m{each} = Mul(column{each}, row) c{each} = Cos(m{each}) x{each + 1} = MatMul(x{each}, c{each})"
        for each in range(count)
    )
    numbers: dict[str, Any] = {
        f"column{each}": np.arange(size, dtype=np.float32).reshape(-1, 1) * each for each in range(count)
    }
    text = f"g (float[N,{size}] x0) => (float[N,{size}] x{count}) {{ {lines} }}"
    proto = model(text, row=np.arange(size, dtype=np.float32).reshape(1, -1) / size, **numbers)
    graph = load(proto)
    apply(graph, SIMPLIFY)
    made = to_proto(graph)
    bytes_before, bytes_after = (sum(one.ByteSize() for one in one.graph.initializer) for one in (proto, made))
    assert 0 < bytes_after - bytes_before <= fold.STORED_BYTES
    assert 0 < graph.info.folded <= fold.STORED_BYTES
    kinds = Counter(node.op_type for node in made.graph.node)
    assert 0 < kinds["Cos"] < count
    assert_same_outputs(proto, made, random_feeds(proto))

"""Pad into convolutions and pools."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sbonnx.graph import load
from sbonnx.patterns import FUSE, apply
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, assert_sound, random_feeds

SPATIAL = np.array([0, 0, 1, 2, 0, 0, 2, 0], np.int64)


def padded(
    reader: str,
    pads: np.ndarray = SPATIAL,
    *,
    value: float | None = None,
    mode: str = "constant",
    opset: int = 17,
    first: str = "",
) -> onnx.ModelProto:
    """x, perhaps an op before it, a Pad, and `reader` of "p"."""
    operands = "pads" if value is None else "pads, value"
    start = f"s = {first} (x)" if first else ""
    source = model(
        f"""g (float[1,4,7,7] x) => (float[n,c,h,v] y) {{
            {start} p = Pad <mode = "{mode}"> ({"s" if first else "x"}, {operands}) y = {reader} }}""",
        opset=opset,
        pads=pads,
        value=np.float32(0 if value is None else value),
        w=(4, 4, 3, 3),
        wg=(8, 2, 3, 3),
        b=4,
    )
    used = {name for node in source.graph.node for name in node.input}
    for tensor in list(source.graph.initializer):
        if tensor.name not in used:
            source.graph.initializer.remove(tensor)
    return source


def assert_fused(source: onnx.ModelProto) -> dict[str, object]:
    """The Pad is gone and nothing changed; the attributes of the window."""
    graph = load(source)
    applied = apply(graph, FUSE)
    assert len(applied.fired) == 1
    assert "Pad" not in [node.op for node in graph.nodes]
    assert_same_outputs(source, assert_sound(graph), random_feeds(source), tolerance=1e-6)
    return dict(graph.nodes[-1].attrs)


def assert_refused(source: onnx.ModelProto, words: str) -> None:
    graph = load(source)
    applied = apply(graph, FUSE)
    assert not applied.fired
    assert any(words in refusal.why for refusal in applied.refusals), applied.refusals
    assert_same_outputs(source, assert_sound(graph), random_feeds(source))


@pytest.mark.parametrize("opset", [13, 17, 21])
@pytest.mark.parametrize(
    "reader",
    [
        "Conv (p, w)",
        "Conv <pads = [1,0,0,1]> (p, w, b)",
        "Conv <group = 2, strides = [2,2], dilations = [2,1]> (p, wg)",
        'Conv <auto_pad = "VALID"> (p, w)',
    ],
)
def test_into_a_convolution(reader: str, opset: int) -> None:
    assert "auto_pad" not in assert_fused(padded(reader, opset=opset))


def test_pads_are_added() -> None:
    assert assert_fused(padded("Conv <pads = [1,0,0,1]> (p, w)"))["pads"] == [2, 2, 2, 1]


def test_pads_by_axes() -> None:
    source = model(
        "g (float[1,4,7,7] x) => (float[1,4,h,v] y) { p = Pad (x, pads, , axes) y = Conv (p, w) }",
        opset=21,
        pads=np.array([1, 2, 3, 0], np.int64),
        axes=np.array([-1, 2], np.int64),
        w=(4, 4, 3, 3),
    )
    assert assert_fused(source)["pads"] == [2, 1, 0, 3]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "reflect"}, "mode 'reflect'"),
        ({"mode": "edge"}, "mode 'edge'"),
        ({"value": 1.0}, "another value than 0"),
        ({"value": -np.inf}, "another value than 0"),
        ({"pads": np.array([0, 0, -1, 0, 0, 0, 0, 0], np.int64)}, "negative pads"),
        ({"pads": np.array([1, 0, 0, 0, 0, 0, 0, 0], np.int64)}, "the batch or the channels"),
    ],
)
def test_other_pads_before_a_convolution(options: dict[str, object], words: str) -> None:
    assert_refused(padded("Conv (p, w)", **options), words)  # type: ignore[arg-type]


def test_same_padding_depends_on_the_padded_size() -> None:
    assert_refused(padded('Conv <auto_pad = "SAME_UPPER", strides = [2,2]> (p, w)'), "SAME_UPPER")


def test_pads_that_are_computed() -> None:
    source = padded("Conv (p, w)")
    source.graph.initializer.remove(next(tensor for tensor in source.graph.initializer if tensor.name == "pads"))
    source.graph.input.append(helper.make_tensor_value_info("pads", TensorProto.INT64, [8]))
    applied = apply(load(source), FUSE)
    assert not applied.fired
    assert "'pads' is not a constant" in applied.refusals[0].why


def test_a_pad_with_a_second_reader() -> None:
    source = padded("Conv (p, w)")
    source.graph.node.append(helper.make_node("Relu", ["p"], ["z"]))
    source.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    assert_refused(source, "also read by")


def average(attributes: str) -> onnx.ModelProto:
    return padded(f"AveragePool <kernel_shape = [3,3]{attributes}> (p)")


@pytest.mark.parametrize("attributes", ["", ", strides = [2,2]", ", count_include_pad = 1", ', auto_pad = "VALID"'])
def test_into_an_average(attributes: str) -> None:
    assert assert_fused(average(attributes))["count_include_pad"] == 1


def test_into_an_average_that_counts_its_own_padding() -> None:
    pads = np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64)
    source = padded("AveragePool <kernel_shape = [3,3], pads = [1,1,1,1], count_include_pad = 1> (p)", pads)
    assert assert_fused(source)["pads"] == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        (", ceil_mode = 1", "ceil_mode"),
        (", pads = [1,0,0,0]", "does not count"),
        (", pads = [0,1,0,0], count_include_pad = 1", "not smaller than kernel"),
        (', auto_pad = "SAME_LOWER"', "SAME_LOWER"),
    ],
)
def test_other_averages(attributes: str, words: str) -> None:
    assert_refused(average(attributes), words)


def maximum(value: float | None, first: str, attributes: str = "") -> onnx.ModelProto:
    return padded(f"MaxPool <kernel_shape = [3,3]{attributes}> (p)", value=value, first=first)


@pytest.mark.parametrize("attributes", ["", ", strides = [2,2]"])
@pytest.mark.parametrize(
    ("value", "first"),
    [(-np.inf, "Tanh"), (None, "Relu"), (0.0, "Sigmoid"), (-3.0, "Softmax <axis = 1>"), (-np.inf, "")],
)
def test_into_a_maximum(value: float | None, first: str, attributes: str) -> None:
    assert_fused(maximum(value, first, attributes))


@pytest.mark.parametrize(("value", "first"), [(None, "Tanh"), (0.5, "Relu"), (-1.0, "Neg"), (0.0, "")])
def test_a_maximum_that_the_padding_could_win(value: float | None, first: str) -> None:
    assert_refused(maximum(value, first), "a maximum ignores its padding")


@pytest.mark.parametrize("attributes", [", ceil_mode = 1", ", dilations = [2,2]"])
def test_windows_that_could_hold_nothing_but_padding(attributes: str) -> None:
    assert_refused(maximum(None, "Relu", attributes), attributes.split()[1].rstrip("s")[:5])


def test_a_maximum_with_its_indices() -> None:
    """They count in the padded tensor."""
    source = model(
        """g (float[1,2,6,6] x) => (float[1,2,h,v] y, int64[1,2,h,v] i) {
            r = Relu (x) p = Pad (r, pads) y, i = MaxPool <kernel_shape = [3,3]> (p) }""",
        pads=np.array([0, 0, 1, 1, 0, 0, 1, 1], np.int64),
    )
    assert_refused(source, "is used")

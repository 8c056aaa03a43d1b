"""Resize and Pad written for all axes compute the same bits, with constant and computed numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from sbonnx import graph as graphs
from sbonnx.patterns import SIMPLIFY, apply
from tests.support.models import model
from tests.support.pattern_checks import assert_same_outputs, random_feeds

INT64 = np.int64
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sizes": ("Resize <axes = [3,2]> (a, , , s)", {"s": np.array([7, 5], INT64)}),
    "scales": ('Resize <axes = [-1], mode = "linear"> (a, , s)', {"s": np.array([2.5], np.float32)}),
    "computed sizes": ('Resize <axes = [2,3], mode = "cubic"> (a, , , more)', {}),
    "region": (
        'Resize <axes = [3,2], mode = "linear", coordinate_transformation_mode = "tf_crop_and_resize"> (a, r, , s)',
        {"s": np.array([7, 5], INT64), "r": np.array([0.1, 0.2, 0.7, 0.9], np.float32)},
    ),
    "not larger": (
        'Resize <axes = [2,3], mode = "linear", keep_aspect_ratio_policy = "not_larger"> (a, , , s)',
        {"s": np.array([8, 13], INT64)},
    ),
    "rounded down": (
        'Resize <axes = [2,3], mode = "cubic", keep_aspect_ratio_policy = "not_larger"> (a, , , s)',
        {"s": np.array([11, 13], INT64)},
    ),
    **{
        f"rounded up, {mode}": (
            f'Resize <axes = [3,2], mode = "{mode}", {how}> (a, , , s)',
            {"s": np.array([9, 5], INT64)},
        )
        for mode, how in (
            ("linear", 'keep_aspect_ratio_policy = "not_larger"'),
            ("nearest", 'keep_aspect_ratio_policy = "not_smaller", coordinate_transformation_mode = "asymmetric"'),
            ("cubic", 'keep_aspect_ratio_policy = "not_larger"'),
        )
    },
    "computed policy": (
        'Resize <axes = [2,3], mode = "linear", keep_aspect_ratio_policy = "not_smaller"> (a,,,more)',
        {},
    ),
    "not smaller": (
        'Resize <axes = [3,2], mode = "linear", keep_aspect_ratio_policy = "not_smaller"> (a, , , s)',
        {"s": np.array([9, 3], INT64)},
    ),
    "antialias": (
        'Resize <axes = [2,3], mode = "linear", antialias = 1> (a, , , s)',
        {"s": np.array([2, 3], INT64)},
    ),
    "pads": ("Pad (a, p, , axes)", {"p": np.array([1, 0, 2, 1], INT64), "axes": np.array([-1, 1], INT64)}),
    "computed pads": ('Pad <mode = "edge"> (a, pads, , axes)', {"axes": np.array([3], INT64)}),
}


@pytest.mark.parametrize("batch", ["1", "N"])
@pytest.mark.parametrize("form", FORMS)
def test_all_axes_give_the_same_bits(form: str, batch: str) -> None:
    op, numbers = FORMS[form]
    text = f"""agraph (float[{batch},2,4,6] x, int64[2] sizes, int64[2] pads) => (float[A,B,C,D] y) {{
        more = Add (sizes, one)
        a = Relu (x)
        y = {op}
    }}"""
    proto = model(text, opset=19, one=np.array([1, 1], INT64), **numbers)
    graph = graphs.load(onnx.ModelProto.FromString(proto.SerializeToString()))
    done = apply(graph, SIMPLIFY)
    assert {"resize_all_axes", "pad_all_axes"} & {fired.pattern for fired in done.fired}
    simple = graphs.to_proto(graph)
    onnx.checker.check_model(simple, full_check=True)
    for node in simple.graph.node:
        assert not any(attribute.name == "axes" for attribute in node.attribute)
        assert node.op_type != "Pad" or len(node.input) < 4
    read = {name for node in simple.graph.node for name in node.input}
    assert {tensor.name for tensor in simple.graph.initializer} <= read
    tolerance = 1e-6 if "rounded up" in form else 0.0  # the edge is a mean of equal values
    for seed, dynamic in enumerate((2, 1, 3)):
        feeds = random_feeds(proto, dynamic=dynamic, seed=seed)
        assert_same_outputs(proto, simple, feeds, tolerance=tolerance)


@pytest.mark.parametrize(
    "given", ["antialias = 1", "exclude_outside = 1", 'coordinate_transformation_mode = "pytorch_half_pixel"']
)
def test_sizes_that_are_rounded_up_keep_their_axes(given: str) -> None:
    op = f'Resize <axes = [2,3], mode = "cubic", keep_aspect_ratio_policy = "not_larger", {given}> (x, , , s)'
    text = f"agraph (float[1,2,4,6] x) => (float[A,B,C,D] y) {{ y = {op} }}"
    graph = graphs.load(model(text, opset=19, s=np.array([5, 9], INT64)))
    assert any("keep_aspect_ratio_policy" in refusal.why for refusal in apply(graph, SIMPLIFY).refusals)

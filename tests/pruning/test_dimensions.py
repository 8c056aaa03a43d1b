"""Which channels are removed together, which are pinned and why, and plans that do not fit."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.errors import ModelError
from sbonnx.pruning.groups.dimensions import dependencies
from sbonnx.pruning.groups.pruning_plan import LayerSide, PruningPlan
from tests.support.models import model, residual

IMAGE = "agraph (float[2,3,6,6] x) => (float[2,4,H,W] y)"
W: dict[str, Any] = {"w": (8, 3, 1, 1), "v": (4, 8, 1, 1)}


def chain(middle: str, **weights: Any) -> Any:
    """Dependencies of a model with `middle` between two convolutions: 8 channels c, read as r."""
    proto = model(f"{IMAGE} {{ c = Conv (x, w) {middle} y = Conv (r, v) }}", **{**W, **weights})
    return dependencies(graphs.load(proto))


def test_a_residual_block_has_a_stream_and_an_inner_dimension() -> None:
    found = dependencies(graphs.load(residual()))
    sides = [sorted((side.layer, side.direction) for side in dimension.channels) for dimension in found.dimensions]
    stream = [("conv1", "in"), ("conv2", "out"), ("fc", "in"), ("stem", "out")]
    assert sorted(sides) == [stream, [("conv1", "out"), ("conv2", "in")]]
    assert [dimension.groups for dimension in found.dimensions] == [8, 8]
    (pinned,) = found.pinned()
    assert (pinned.where, pinned.why) == ("fc", "all output channels stay: 'y' is an output")


@pytest.mark.parametrize(
    ("middle", "weights", "why"),
    [
        ("s = Softmax <axis = 1> (c) r = Relu (s)", {}, "Softmax '.*' normalizes over it"),
        ("r = Softmax <axis = 2> (c)", {}, None),
        ("r = LayerNormalization <axis = 1> (c, g)", {"g": (8, 6, 6)}, "LayerNormalization '.*' normalizes over it"),
        ("r = LRN <size = 3> (c)", {}, "LRN '.*' does not keep channels apart"),
        ("m = ReduceMax <axes = [1]> (c) r = Sub (c, m)", {}, "ReduceMax '.*' does not keep channels apart"),
        ("d = Pad (x, p) r = Add (c, d)", {"p": [0, 0, 0, 0, 0, 5, 0, 0]}, "whose channels are pinned"),
        ("z = Shape (c) f = Cast <to = 1> (z) m = ReduceMax (f) r = Mul (c, m)", {}, "Shape '.*' reads its size"),
        ("z = Shape <start = 2> (c) f = Cast <to = 1> (z) m = ReduceMax (f) r = Mul (c, m)", {}, None),
        ("r = Slice (c, i, j, k, l)", {"i": [0], "j": [8], "k": [1], "l": [2], "v": (4, 4, 1, 1)}, "at a step"),
        ("r = Gather <axis = 1> (c, i)", {"i": [3, 1, 1, -1], "v": (4, 4, 1, 1)}, None),
        ("d = Conv (c, u) r = Conv (d, u)", {"u": (8, 8, 1, 1)}, None),
        ("n = Neg (u) d = Conv (c, u) r = Mul (d, n)", {"u": (8, 8, 1, 1)}, "weight 'u' of '.*' is read 2 times"),
    ],
)
def test_what_pins_channels(middle: str, weights: dict[str, Any], why: str | None) -> None:
    arrays = {name: np.array(value) if isinstance(value, list) else value for name, value in weights.items()}
    found = chain(middle, **arrays)
    reasons = " | ".join(f"{one.why}" for one in found.pinned() if "'y' is an output" not in one.why)
    if why is None:
        assert not reasons
        assert found.dimensions
    else:
        assert re.search(why, reasons), reasons


def test_groups_lose_the_same_places() -> None:
    found = chain("d = Conv <group = 2> (c, k) r = Relu (d)", k=(8, 4, 1, 1))
    before, after = sorted(found.dimensions, key=lambda one: one.name)
    assert before.groups == after.groups == 4
    side = next(side for side in before.channels if side.direction == "in")
    assert before.channels[side].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_shuffled_channels_are_removed_in_rows() -> None:
    """ShuffleNet: (2, 4) places turned to (4, 2): the same place of each half goes."""
    middle = "g = Reshape (c, s) t = Transpose <perm = [0,2,1,3,4]> (g) r = Reshape (t, q)"
    found = chain(middle, s=np.array([2, 2, 4, 6, 6]), q=np.array([2, 8, 6, 6]))
    (dimension,) = found.dimensions
    out = next(side for side in dimension.channels if side.direction == "out")
    assert dimension.channels[out].tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_one_channel_remains_of_each_part() -> None:
    """Both parts of a split have the same readers, and neither may become empty."""
    found = chain("a, b = Split <axis = 1> (c, n) r = Concat <axis = 1> (b, a)", n=np.array([2, 6]))
    (dimension,) = found.dimensions
    assert dimension.removable(range(8)) == (0, 2, 3, 4, 5, 6)


def test_one_channel_remains_of_a_tensor_from_parts_of_two_dimensions() -> None:
    """One channel of the first dimension remains in each; the parts of the second may become empty."""
    found = chain(
        "d = Conv (x, u) p = Concat <axis = 1> (c, d) a = Gather <axis = 1> (p, i) b = Gather <axis = 1> (p, j)"
        "r = Concat <axis = 1> (a, b)",
        i=np.array([8, 0, 1, 9]),
        j=np.array([2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15]),
        u=(8, 3, 1, 1),
        v=(4, 16, 1, 1),
    )
    first, second = found.dimensions
    assert first.removable(range(8)) == (0, 2, 3, 4, 5, 6)
    assert second.removable(range(8)) == (0, 1, 2, 3, 4, 5, 6)


def test_plans_that_do_not_fit_are_refused() -> None:
    found = dependencies(graphs.load(residual()))
    inner = next(dimension for dimension in found.dimensions if dimension.writers == ("conv1",))
    plan = found.plan_of([(inner, (1,))])
    assert PruningPlan.from_dict(plan.to_dict()) == plan
    out, read = LayerSide("conv1", "out"), LayerSide("conv2", "in")
    for removed, why in (
        ({LayerSide("conv9", "out"): (1,)}, "no such channels of 'conv9'"),
        ({out: (8,), read: (8,)}, "no such channels of 'conv1'"),
        ({out: (1,)}, r"does not list all channels of 'conv2' \(in\)"),
        ({out: (1,), read: (2,)}, "does not list all channels of 'conv"),
        ({LayerSide("fc", "out"): (1,)}, "'fc' that are pinned: 'y' is an output"),
        ({out: tuple(range(8)), read: tuple(range(8))}, "would remove all channels"),
    ):
        with pytest.raises(ModelError, match=why):
            found.kept(PruningPlan(removed))
    with pytest.raises(ModelError, match="not a pruning plan"):
        PruningPlan.from_dict({"version": 1, "removed": [{"layer": "conv1", "side": "left", "channels": [1]}]})

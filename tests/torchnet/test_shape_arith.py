"""Arithmetic with sizes against numpy's and onnxruntime's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.torchnet import Call  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.operators import ShapeArithmetic  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.shape_arith import SIZES  # noqa: E402
from tests.support.models import model, run  # noqa: E402

NUMBERS = st.integers(-50, 50)
VECTORS = st.lists(NUMBERS, min_size=1, max_size=5).map(tuple)
PAIRS = st.one_of(
    st.tuples(NUMBERS, NUMBERS),
    st.tuples(VECTORS, NUMBERS),
    st.tuples(NUMBERS, VECTORS),
    VECTORS.flatmap(lambda one: st.tuples(st.just(one), st.tuples(*[NUMBERS] * len(one)))),
)


def computed(op: str, *inputs: Any, **attributes: Any) -> Any:
    return SIZES[op](Call(torch, "node", op, attributes, 17), *inputs)


def truncated(a: Any, b: Any) -> Any:
    return np.trunc(np.true_divide(a, b)).astype(np.int64)


@pytest.mark.parametrize(
    ("op", "function"),
    [
        ("Add", np.add),
        ("Sub", np.subtract),
        ("Mul", np.multiply),
        ("Div", truncated),
        ("Mod", np.mod),
        ("Max", np.maximum),
        ("Min", np.minimum),
        ("Equal", np.equal),
        ("Less", np.less),
        ("GreaterOrEqual", np.greater_equal),
    ],
)
@settings(max_examples=60, deadline=None)
@given(pair=PAIRS)
def test_two_inputs(op: str, function: Any, pair: Any) -> None:
    a, b = pair
    if op in ("Div", "Mod"):
        b = tuple(value or 1 for value in b) if isinstance(b, tuple) else b or 1
    want = function(np.array(a), np.array(b))
    made = computed(op, a, b)
    assert np.array_equal(np.array(made), want)
    assert isinstance(made, tuple) == bool(want.ndim)


@settings(max_examples=100, deadline=None)
@given(x=VECTORS, start=st.integers(-9, 9), stop=st.integers(-9, 9), step=st.sampled_from([-3, -2, -1, 1, 2, 3]))
def test_slices(x: tuple[int, ...], start: int, stop: int, step: int) -> None:
    from sbonnx.torchnet import FUNCTIONS

    wide = FUNCTIONS["Slice"](Call(torch, "", "Slice", {}, 17), torch.tensor(x), (start,), (stop,), (0,), (step,))
    assert computed("Slice", x, (start,), (stop,), (0,), (step,)) == tuple(wide.tolist())


WAYS = """g (float[N,T,3] x) => (int64[2] a, int64 b, int64[5] c, float[P,Q,3] y) {
    s = Shape (x)
    parts = Slice (s, zero, two, zero)
    a = Mul (parts, parts)
    n = Gather (s, first)
    b = Sub (n, seven)
    back = Slice (s, last, far, zero, down)
    long = Concat <axis = 0> (back, parts)
    c = Mod (long, seven1)
    wanted = Where (flags, s, ones)
    short = Equal (wanted, ones)
    twice = Where (short, threes, ones)
    y = Tile (x, twice)
}"""


@pytest.mark.parametrize("shape", [(2, 5, 3), (1, 1, 3), (9, 2, 3)])
def test_a_graph_of_sizes(shape: tuple[int, ...]) -> None:
    one = {"zero": [0], "two": [2], "seven1": [7], "last": [-1], "far": [-9], "down": [-1], "ones": [1, 1, 1]}
    values: dict[str, Any] = {name: np.array(value) for name, value in one.items()}
    values |= {"first": np.array(0), "seven": np.array(7), "flags": np.array([True, False, True])}
    proto = model(WAYS, **values, threes=np.array([3, 3, 3]))
    module = reimport(graphs.load(proto))
    assert sum(isinstance(child, ShapeArithmetic) for child in module.children()) == 11
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    made = module(torch.from_numpy(x))
    for name, want in run(proto, {"x": x}).items():
        assert np.array_equal(made[name].numpy(), want), name

"""What is reduced on a device is, bit for bit, what a sketch makes of the whole tensors. The same code, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.data.sample import Sample
from sbonnx.calib.engine.cuda import (
    DeviceRun,
    count,
    observe_tensors,
    place_on,
    torch_on,
)
from sbonnx.calib.engine.sample_runner import Key, StatsRequest
from sbonnx.calib.engine.segments import cut
from sbonnx.calib.sketches import Sketch
from sbonnx.calib.sketches.kernels import Pages
from sbonnx.errors import NumericError
from sbonnx.graph import Graph, load
from sbonnx.spec import Array
from sbonnx.system.cpu import CPU, CUDA
from tests.calib.engine.branching import nested
from tests.calib.observing import IMAGES, PLAIN, POISON, ROOTS, assert_same, batches, observation_of, squares
from tests.support.models import model, residual

RNG = np.random.default_rng(11)
UNIT = Sample(0, "here", {})
RANGE, TRACKED = StatsRequest(), StatsRequest(track=True)


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch counts on devices, and is not installed")


def observed(
    graph: Graph, wishes: Mapping[Key, StatsRequest], data: Any, *, on_device: bool, device: str = "cpu", **more: Any
) -> dict[Key, Sketch]:
    """What a stream leaves."""
    observation, units = observation_of(graph, wishes, data, device=device, on_device=on_device, **more)
    for _ in observation.stream(units):
        pass
    found = observation.found()
    observation.close()
    return found


def assert_equal(one: Sketch, other: Sketch) -> None:
    assert_same({("x", None): one}, {("x", None): other})


def some_values(shape: tuple[int, ...], kind: str, dtype: str, seed: int) -> Array:
    """Values of one kind."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4)
    if kind == "relu":
        x = np.maximum(x, 0)
    elif kind == "extreme":
        x = np.ldexp(x, rng.integers(-140, 120, shape))
    elif kind == "zero":
        x = np.where(x > 0, 0.0, -0.0)
    elif kind == "nan":
        x.flat[:: max(1, x.size // 3)] = [np.nan, np.inf, -np.inf][seed % 3]
    with np.errstate(over="ignore"):
        return x.astype(dtype)


KINDS = st.sampled_from(["normal", "relu", "extreme", "zero", "nan"])
SHAPES = st.sampled_from([(2, 3, 40), (1, 3, 9000), (3, 3, 6000), (2, 3, 1), (0, 3, 7), (1, 3, 20000)])


@settings(max_examples=60, deadline=None)
@given(
    arrays=st.lists(
        st.tuples(SHAPES, KINDS, st.sampled_from(["float16", "float32", "float64"])), min_size=1, max_size=4
    ),
    axis=st.sampled_from([None, 0, 1]),
    detail=st.sampled_from(["histogram", "range"]),
    track=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_torch_makes_the_sketch_that_the_array_makes(
    torch: Any, arrays: list[Any], axis: int | None, detail: Any, track: bool, seed: int
) -> None:
    """Small arrays, which are kept as they are, and large ones, which are counted, in any order."""
    whole, parts = (Sketch(axis=axis, detail=detail, track=track) for _ in range(2))
    for index, (shape, kind, dtype) in enumerate(arrays):
        if axis == 0:
            shape = (3, *shape[1:])
        x = some_values(shape, kind, dtype, seed + index)
        whole.observe(x, index, shape[0])
        observe_tensors(torch, [(parts, torch.from_numpy(x))], Sample(index, "", {}, shape[0]))
    assert_equal(whole, parts)


def test_many_channels_are_counted_in_turns(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sbonnx.calib.engine.cuda.COUNTERS", 3 << 14)
    x = some_values((20, 400), "extreme", "float32", 3)
    brute = Pages.empty(len(x), 5)
    brute.count(x)
    found = count(torch, torch.from_numpy(x), 5)
    pages = np.flatnonzero(brute.slots >= 0)
    np.testing.assert_array_equal(pages, np.flatnonzero(found.slots >= 0))
    np.testing.assert_array_equal(brute.counts[:, brute.slots[pages]], found.counts[:, found.slots[pages]])


def test_the_channel_axis_is_checked_here_too(torch: Any) -> None:
    sketch = Sketch(axis=1)
    observe_tensors(torch, [(sketch, torch.zeros(1, 3, 9000))], UNIT)
    for shape, says in (((20000,), "needs that axis"), ((1, 4, 9000), "had 3 channels and now has 4")):
        with pytest.raises(NumericError, match=says):
            observe_tensors(torch, [(sketch, torch.zeros(shape))], UNIT)


@pytest.mark.parametrize(
    "wish",
    [RANGE, TRACKED, StatsRequest("histogram"), StatsRequest("histogram", track=True)],
    ids=["range", "track", "bins", "all"],
)
def test_a_model_is_observed_the_same(wish: StatsRequest) -> None:
    graph = load(residual())
    wishes: dict[Key, StatsRequest] = {(name, None): wish for name in ("x", "s", "r", "r1", "f")}
    found = observed(graph, wishes, batches(5), on_device=False)
    assert_same(found, observed(graph, wishes, batches(3), on_device=True))


def test_per_channel_and_mixed() -> None:
    graph = load(residual())
    wishes: dict[Key, StatsRequest] = {
        ("r", 1): RANGE,
        ("r", None): StatsRequest("histogram"),
        ("r1", 1): TRACKED,
        ("f", 1): StatsRequest("histogram"),
        ("x", 1): RANGE,
    }
    assert_same(
        observed(graph, wishes, batches(1), on_device=False), observed(graph, wishes, batches(1), on_device=True)
    )


@pytest.mark.parametrize("kind", ["float16", "double"])
def test_other_floats(kind: str) -> None:
    text = f"agraph ({kind}[2,T,4] x, {kind} s) => ({kind}[2,T,4] y) {{ m = Mul (x, s)\n y = Relu (m) }}"
    graph = load(model(text))
    dtype = {"float16": np.float16, "double": np.float64}[kind]
    data = [{"x": RNG.standard_normal((2, t, 4)).astype(dtype), "s": np.array(3, dtype)} for t in (1, 3000, 7)]
    wishes: dict[Key, StatsRequest] = {
        ("m", None): TRACKED,
        ("y", None): StatsRequest("histogram"),
        ("y", 2): RANGE,
        ("s", None): RANGE,
    }
    assert_same(observed(graph, wishes, data, on_device=False), observed(graph, wishes, data, on_device=True))


def test_tensors_without_rank_or_values() -> None:
    """Where the rank is not known, a range per channel is found here; empty tensors have no extremes."""
    text = """
    agraph (float[N,4] x, int64[K] shape) => (float y) {
        z = Reshape (x, shape)
        e = NonZero (x)
        g = Cast <to = 1> (e)
        y = ReduceSum <keepdims = 0> (z)
    }"""
    graph = load(model(text))
    data = [
        {"x": np.zeros((2, 4), np.float32), "shape": np.array([2, 2, 2])},
        {"x": np.ones((2, 4), np.float32), "shape": np.array([4, 2])},
    ]
    wishes: dict[Key, StatsRequest] = {("z", None): RANGE, ("z", 1): RANGE, ("g", None): TRACKED, ("y", None): TRACKED}
    found = observed(graph, wishes, data, on_device=True)
    assert_same(observed(graph, wishes, data, on_device=False), found)
    assert found["g", None].elements == 16


def test_branches_and_values_that_pass_between_pieces() -> None:
    graph = load(nested())
    data = [
        {"x": RNG.standard_normal((2, 4)).astype(np.float32), "a": np.array(i % 3 > 0), "b": np.array(i % 2 > 0)}
        for i in range(9)
    ]
    outer = next(node for node in graph.nodes if node.op == "If")
    scopes = {"": ["r", "m"], f"{outer.name}/else_branch": ["k"]}
    wishes: dict[Key, StatsRequest] = {("r", None): RANGE, ("m", None): StatsRequest("histogram"), ("k", None): TRACKED}
    for granularity in ("whole", "budget"):
        more: dict[str, Any] = {"scopes": scopes, "granularity": granularity, "memory": 64}
        found = observed(graph, wishes, data, on_device=True, **more)
        assert_same(observed(graph, wishes, data, on_device=False, **more), found)
    assert found["k", None].samples == 6


@pytest.mark.parametrize("wish", [RANGE, TRACKED, StatsRequest("histogram")])
def test_nan_is_blamed_in_the_same_words(wish: StatsRequest) -> None:
    graph = load(model(POISON, w=(4, 4)))
    wishes = {key: replace(wish) for key in ROOTS}
    messages = []
    for on_device in (False, True):
        with pytest.raises(NumericError, match="'r' holds 1 NaN and 0 infinite values at feed 5; the first") as caught:
            observed(graph, wishes, squares(5), on_device=on_device)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_only_a_few_numbers_leave_the_device(torch: Any) -> None:
    graph = load(residual())
    (segment,) = cut(graph, ["s", "r", "f"])
    wishes: dict[Key, StatsRequest] = {("s", None): RANGE, ("r", 1): RANGE, ("f", None): TRACKED}
    with DeviceRun(
        segment.model(graph), segment, frozenset(), wishes, device="cpu", place="cpu", name="the model"
    ) as run:
        copied, kept = run.run({"x": IMAGES[:2]}, where="here")
        assert not copied and run.kept == kept.keys() == {"s", "r", "f"}
        places = [value.device_name() for value in run._binding.get_outputs_as_ortvaluevector()]
        assert places == ["Cpu"] * 3


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load(residual())
    found = observed(graph, PLAIN, batches(4), on_device=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert torch_on("cpu") is None
    assert_same(found, observed(graph, PLAIN, batches(4), on_device=True))


def test_outputs_that_are_kept() -> None:
    graph = load(residual())
    kept = []
    for on_device in (False, True):
        observation, units = observation_of(graph, PLAIN, batches(4), on_device=on_device, kept=("y", "r"))
        kept.append([values for _, values in observation.stream(units, keep=("y", "r"))])
        observation.close()
    for one, other in zip(*kept, strict=True):
        for name in ("y", "r"):
            np.testing.assert_array_equal(one[name], other[name])


def test_places() -> None:
    assert place_on([CPU]) == "cpu"
    assert place_on([(CUDA, {"device_id": "1"}), CPU]) == "cuda:1"


@pytest.mark.gpu
@pytest.mark.parametrize("wish", [RANGE, TRACKED, StatsRequest("histogram", track=True)])
def test_on_a_gpu(wish: StatsRequest) -> None:
    graph = load(residual())
    wishes: dict[Key, StatsRequest] = {(name, None): wish for name in ("x", "s", "r", "r1", "f")}
    found = observed(graph, wishes, batches(4), on_device=True, device="cuda")
    for key, sketch in observed(graph, wishes, batches(4), on_device=False, device="cuda").items():
        np.testing.assert_allclose(found[key].lo, sketch.lo, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[key].hi, sketch.hi, rtol=1e-4, atol=1e-5)
        assert (found[key].elements, found[key].samples) == (sketch.elements, sketch.samples)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", [None, 1])
def test_torch_counts_on_a_gpu(torch: Any, axis: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch is installed without CUDA")
    whole, parts = Sketch(axis=axis), Sketch(axis=axis)
    for seed, kind in enumerate(("normal", "relu", "extreme", "nan", "zero")):
        x = some_values((2, 5, 4000), kind, "float32", seed)
        whole.observe(x, seed, 1)
        observe_tensors(torch, [(parts, torch.from_numpy(x).cuda())], Sample(seed, "", {}))
    assert_equal(whole, parts)

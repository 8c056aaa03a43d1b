"""Calibration against ranges computed by onnxruntime alone, and the promises of `calibrate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx.calib.calibrator import Calibrator
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.graph import Graph, load
from sbonnx.planning.types import ObserverChoice, Plan, Solution
from sbonnx.progress import Progress
from sbonnx.reconstruct.solution import WeightRounding, reconstruct
from sbonnx.spec import Array, QParams, QuantSpec, params_from_bounds
from tests.support.calibration import calibrate
from tests.support.models import model, residual, run
from tests.support.naive import plan_linear

RNG = np.random.default_rng(1)
IMAGES = RNG.standard_normal((12, 3, 8, 8)).astype(np.float32) * np.arange(1, 13, dtype=np.float32)[:, None, None, None]


def batches(size: int, images: Array = IMAGES) -> list[dict[str, Array]]:
    return [{"x": images[i : i + size]} for i in range(0, len(images), size)]


def with_outputs(proto: onnx.ModelProto, names: list[str]) -> onnx.ModelProto:
    """The model with inner tensors as outputs."""
    shown = onnx.shape_inference.infer_shapes(proto)
    values = {value.name: value for value in shown.graph.value_info}
    shown.graph.output.extend(values[name] for name in names)
    return shown


def same(one: Solution, other: Solution) -> bool:
    """Bit for bit the same scales, zero points and codes."""
    return (
        one.qparams.keys() == other.qparams.keys()
        and all(np.array_equal(one.qparams[k].scale, q.scale) for k, q in other.qparams.items())
        and all(np.array_equal(one.qparams[k].zero_point, q.zero_point) for k, q in other.qparams.items())
        and all(np.array_equal(one.codes[k], codes) for k, codes in other.codes.items())
    )


@pytest.fixture
def graph() -> Graph:
    return load(residual())


def test_ranges_are_those_of_onnxruntime(graph: Graph) -> None:
    plan = plan_linear(graph)
    solution = calibrate(graph, plan, batches(5))
    values = run(with_outputs(residual(), ["r", "r1", "f"]), {"x": IMAGES})
    assert solution.bounds.keys() == {"x", "r", "r1", "f"}
    for name, value in {"x": IMAGES, **values}.items():
        if name in solution.bounds:
            np.testing.assert_allclose(solution.bounds[name].lo, value.min(), rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(solution.bounds[name].hi, value.max(), rtol=1e-5)
    assert solution.samples == 12
    assert solution.refusals == ()
    np.testing.assert_array_equal(solution.bounds["x"].hi, IMAGES.max())


def test_activations_of_every_kind_of_tensor(graph: Graph) -> None:
    """The model's input, an inner tensor, its output; per channel; each with the scale of its range."""
    plan = plan_linear(graph, activation=QuantSpec(signed=False, symmetric=False, axis=1))
    solution = calibrate(graph, plan, batches(4))
    assert solution.qparams["x"].scale.shape == (3,)
    assert solution.qparams["r"].scale.shape == (8,)
    np.testing.assert_array_equal(solution.bounds["x"].lo, IMAGES.min(axis=(0, 2, 3)))


@pytest.mark.parametrize("observer", ["minmax", "moving_average"])
@pytest.mark.parametrize("granularity", ["auto", "whole", "layer", "budget"])
def test_batch_size_and_workers_do_not_matter(graph: Graph, observer: str, granularity: Any) -> None:
    plan = plan_linear(graph, observer=ObserverChoice(observer))
    memory = "2 GiB" if granularity in ("auto", "whole") else "8 KiB"
    options: Any = {"granularity": granularity, "memory": memory}
    alone = calibrate(graph, plan, batches(1), threads=1, **options)
    for size, workers in ((1, 3), (3, 2), (5, 1), (12, 4)):
        assert same(alone, calibrate(graph, plan, batches(size), threads=workers, **options))


def test_order_does_not_matter_to_minmax(graph: Graph) -> None:
    plan = plan_linear(graph)
    assert same(calibrate(graph, plan, batches(2)), calibrate(graph, plan, batches(3, IMAGES[::-1].copy())))


def test_moving_average_is_per_sample(graph: Graph) -> None:
    plan = plan_linear(graph, observer=ObserverChoice("moving_average", {"ema_ratio": 0.5}))
    solution = calibrate(graph, plan, batches(5))
    hi = float(IMAGES[0].max())
    for image in IMAGES[1:]:
        hi = 0.5 * hi + 0.5 * float(image.max())
    assert solution.bounds["x"].hi == np.float32(hi)


def test_layers_and_memory_agree_with_the_whole(graph: Graph) -> None:
    plan = plan_linear(graph)
    whole = calibrate(graph, plan, batches(2), granularity="whole")
    for granularity, memory in (("layer", 1000), ("layer", "1 GiB"), ("budget", 1000)):
        cut = calibrate(graph, plan, batches(2), granularity=granularity, memory=memory)
        for key, bounds in whole.bounds.items():
            np.testing.assert_allclose(cut.bounds[key].lo, bounds.lo, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(cut.bounds[key].hi, bounds.hi, rtol=1e-5)


def test_rows_that_see_each_other_stay_together() -> None:
    """A model that looks across the batch is run on the batch as it is."""
    text = """
    agraph (float[N,4] x) => (float[N,4] y) {
        m = ReduceMean <axes = [0]> (x)
        d = Sub (x, m)
        y = MatMul (d, w)
    }"""
    graph = load(model(text, w=(4, 4)))
    x = RNG.standard_normal((6, 4)).astype(np.float32)
    solution = calibrate(graph, plan_linear(graph), [{"x": x}])
    np.testing.assert_allclose(solution.bounds["d"].hi, (x - x.mean(0)).max(), rtol=1e-5)
    assert solution.samples == 6


def test_feeds_of_different_shapes() -> None:
    graph = load(model("agraph (float[N,T,4] x) => (float[N,T,4] y) { y = MatMul (x, w) }", w=(4, 4)))
    feeds = [{"x": np.full((n, t, 4), n * t, np.float32)} for n, t in ((1, 3), (2, 5), (3, 1))]
    solution = calibrate(graph, plan_linear(graph), feeds)
    assert solution.bounds["x"].hi == 10
    assert solution.samples == 6


def test_a_fixed_batch() -> None:
    graph = load(model("agraph (float[2,4] x) => (float[2,4] y) { y = MatMul (x, w) }", w=(4, 4)))
    solution = calibrate(graph, plan_linear(graph), [{"x": np.ones((2, 4), np.float32)}] * 3)
    assert solution.samples == 6


def test_groups_share_the_union_of_their_ranges(graph: Graph) -> None:
    plan = plan_linear(graph)
    grouped = Plan(tuple(replace(s, group="g") if s.key in ("r", "r1") else s for s in plan.sites))
    alone, together = calibrate(graph, plan, batches(4)), calibrate(graph, grouped, batches(4))
    union = alone.bounds["r"].union(alone.bounds["r1"])
    for key in ("r", "r1"):
        assert together.bounds[key] == union
        assert together.qparams[key].scale == params_from_bounds(union, plan.by_key()[key].spec).scale
    assert same_site(alone, together, "f")


def same_site(one: Solution, other: Solution, key: str) -> bool:
    return bool(one.qparams[key].scale == other.qparams[key].scale)


def test_a_fixed_range_is_not_measured(graph: Graph) -> None:
    plan = plan_linear(graph)
    sites = tuple(replace(s, fixed=(-1.0, 3.0)) if s.key == "r" else s for s in plan.sites)
    solution = calibrate(graph, Plan(sites), batches(4))
    assert [float(solution.bounds["r"].lo), float(solution.bounds["r"].hi)] == [-1, 3]
    grouped = tuple(replace(s, group="g") if s.key in ("r", "r1") else s for s in sites)
    assert calibrate(graph, Plan(grouped), batches(4)).bounds["r1"].hi == 3


def test_weights_per_channel_and_their_codes(graph: Graph) -> None:
    plan = plan_linear(graph, weight=QuantSpec(axis=0))
    solution = calibrate(graph, plan, batches(12))
    weight = next(t for t in residual().graph.initializer if t.name == "w1")
    w = onnx.numpy_helper.to_array(weight)
    key = next(key for key in solution.codes if key.startswith("w1"))
    scale = solution.qparams[key].scale
    np.testing.assert_allclose(scale, np.maximum(-w.min(axis=(1, 2, 3)) / 128, w.max(axis=(1, 2, 3)) / 127), rtol=1e-6)
    assert solution.codes[key].dtype == np.int8
    assert np.abs(solution.qparams[key].dequantize(solution.codes[key]) - w).max() <= scale.max() / 2 * 1.0001


def test_weights_in_blocks() -> None:
    graph = load(model("agraph (float[N,6] x) => (float[N,4] y) { y = MatMul (x, w) }", w=(6, 4)))
    plan = plan_linear(graph, weight=QuantSpec(bits=4, axis=0, block_size=4))
    solution = calibrate(graph, plan, [{"x": np.ones((1, 6), np.float32)}])
    key = next(iter(solution.codes))
    assert solution.qparams[key].scale.shape == (2, 4)
    assert solution.codes[key].shape == (6, 4)


def test_a_solver_rounds_the_weights(graph: Graph) -> None:
    seen: list[str] = []

    def zero(site: Any, weight: Array, qparams: QParams) -> Array:
        seen.append(site.tensor)
        assert qparams.spec == site.spec
        return np.zeros(weight.shape, np.int8)

    solution = calibrate(graph, plan_linear(graph), batches(12), solve=zero)
    assert seen == ["ws", "w1", "w2", "wf"]
    assert not any(codes.any() for codes in solution.codes.values())


def test_bias_codes_follow_both_scales(graph: Graph) -> None:
    plan = plan_linear(graph, weight=QuantSpec(axis=0), bias=True)
    solution = calibrate(graph, plan, batches(12))
    (site,) = (s for s in plan.of_role("bias") if s.tensor == "b1")
    assert site.follows is not None
    scale = solution.qparams[site.follows[0]].scale * solution.qparams[site.follows[1]].scale
    np.testing.assert_array_equal(solution.bias_scales[site.key], scale)
    bias = onnx.numpy_helper.to_array(next(t for t in residual().graph.initializer if t.name == "b1"))
    np.testing.assert_array_equal(solution.codes[site.key], np.rint(bias.astype(np.float64) / scale).astype(np.int32))
    assert site.key not in solution.qparams


def test_a_bias_that_would_overflow_widens_the_scale_of_its_channel() -> None:
    text = "agraph (float[N,4] x) => (float[N,3] y) { y = Gemm (x, w, b) }"
    tiny = np.zeros((4, 3), np.float32)
    tiny[:, 0] = 1
    tiny[:, 1] = 1e-30
    graph = load(model(text, w=tiny, b=np.ones(3, np.float32)))
    feeds = [{"x": np.ones((1, 4), np.float32)}]
    solution = calibrate(graph, plan_linear(graph, weight=QuantSpec(axis=1), bias=True), feeds)
    (bias,), (weight,) = solution.bias_scales, (key for key in solution.qparams if key.startswith("w"))
    assert not solution.refusals
    np.testing.assert_allclose(solution.codes[bias] * solution.bias_scales[bias], 1, rtol=0.01)
    assert solution.qparams[weight].scale[0] == np.float32(1 / 127)
    assert (np.abs(solution.codes[bias][1:]) > 2**20).all()
    assert [note for note in solution.notes if "2 of 3 scales chosen for the int32 bias" in note]


def test_one_scale_that_no_bias_fits_leaves_the_weight_float() -> None:
    text = "agraph (float[N,4] x) => (float[N,3] y) { y = Gemm (x, w, b) }"
    graph = load(model(text, w=(4, 3), b=np.array([0, 1, 1e12], np.float32)))
    feeds = [{"x": np.ones((1, 4), np.float32)}]
    plan = replace(plan_linear(graph, weight=QuantSpec(), bias=True), weights_alone=False)
    solution = calibrate(graph, plan, feeds)
    assert [r.what for r in solution.refusals] == ["quantize weight", "quantize activation", "quantize bias"]
    assert "its int32 bias 'b' would overflow" in solution.refusals[0].why
    assert not (solution.qparams or solution.codes or solution.bias_scales)


def test_half_precision_scales_are_half_precision() -> None:
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { y = MatMul (x, w) }"
    graph = load(model(text, w=RNG.standard_normal((4, 4)).astype(np.float16)))
    solution = calibrate(graph, plan_linear(graph), [{"x": RNG.standard_normal((3, 4))}])
    for qparams in solution.qparams.values():
        assert qparams.scale == qparams.scale.astype(np.float16)


POISON = """
agraph (float[N,4] x) => (float[N,4] y) {
    a = Relu (x)
    b = Sqrt (x)
    c = Add (a, b)
    d = Neg (c)
    y = MatMul (d, w)
}"""


@pytest.mark.parametrize("granularity", ["whole", "layer"])
@pytest.mark.parametrize("batch", [1, 3])
def test_nan_names_tensor_sample_and_layer(batch: int, granularity: Any) -> None:
    proto = model(POISON, w=(4, 4))
    for node, name in zip(proto.graph.node, ("relu", "root", "sum", "flip", "last"), strict=True):
        node.name = name
    graph = load(proto)
    x = np.ones((6, 4), np.float32)
    x[4, 1] = -1  # its square root is NaN
    x[5, :] = -1
    where = "feed 4" if batch == 1 else "sample 1 of feed 1"
    says = rf"activation 'd' holds 1 NaN and 0 infinite values at {where}; the first layer with any is 'root' \(Sqrt\)"
    with pytest.raises(NumericError, match=says):
        calibrate(graph, plan_linear(graph), batches(batch, x), granularity=granularity)


def test_nan_in_a_weight_is_named() -> None:
    w = np.array([[1], [np.nan]], np.float32)
    graph = load(model("agraph (float[N,2] x) => (float[N,1] y) { y = MatMul (x, w) }", w=w))
    with pytest.raises(NumericError, match="weight 'w' holds NaN"):
        calibrate(graph, plan_linear(graph), [{"x": np.ones((1, 2), np.float32)}])


def test_an_activation_observer_on_a_weight_is_refused(graph: Graph) -> None:
    plan = plan_linear(graph)
    sites = tuple(replace(s, observer=ObserverChoice("moving_average")) for s in plan.sites)
    with pytest.raises(RecipeError, match="'moving_average' is for activations; use 'minmax' for weight 'ws'"):
        calibrate(graph, Plan(sites), batches(12))


def test_no_data(graph: Graph) -> None:
    with pytest.raises(DataError, match="holds no feeds"):
        calibrate(graph, plan_linear(graph), [])
    with Calibrator(graph, plan_linear(graph)) as calibrator, pytest.raises(DataError, match="nothing was observed"):
        calibrator.ranges()


def test_a_plan_without_activations(graph: Graph) -> None:
    plan = plan_linear(graph)
    solution = calibrate(graph, Plan(plan.of_role("weight")), batches(12))
    assert len(solution.codes) == 4
    assert solution.samples == 12


def test_the_graph_is_not_changed(graph: Graph) -> None:
    before = [(node.name, [t.name for t in node.inputs]) for node in graph.nodes]
    calibrate(graph, plan_linear(graph), batches(4), granularity="layer")
    assert [(node.name, [t.name for t in node.inputs]) for node in graph.nodes] == before
    assert [t.name for t in graph.outputs] == ["y"]


def test_batch_by_batch_is_the_same(graph: Graph) -> None:
    plan = plan_linear(graph, observer=ObserverChoice("moving_average"))
    with Calibrator(graph, plan) as calibrator:
        for feed in batches(5):
            outputs = calibrator.observe(feed)
            np.testing.assert_allclose(outputs["y"], run(residual(), feed)["y"], rtol=1e-4, atol=1e-3)
        assert same(
            reconstruct(graph, plan, Samples.of(batches(1), graph), calibrator.ranges(), WeightRounding()),
            calibrate(graph, plan, batches(5)),
        )


class Counting(Progress):
    def __init__(self) -> None:
        self.total: int | None = None
        self.done = 0
        self.closed = False

    def start(self, what: str, total: int | None) -> None:
        self.total = total

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        if segment is not None:
            self.done = 0

    def advance(self, pieces: int = 1) -> None:
        self.done += pieces

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("granularity", ["whole", "layer"])
def test_progress_counts_feeds(graph: Graph, granularity: Any) -> None:
    told = Counting()
    calibrate(graph, plan_linear(graph), batches(5), progress=told, granularity=granularity)
    assert told.total == told.done > 0


def test_progress_is_closed_when_it_fails(graph: Graph) -> None:
    told = Counting()

    def feeds() -> Iterator[dict[str, Array]]:
        yield {"x": IMAGES[:1]}
        yield {"x": IMAGES[:1] * np.float32(np.nan)}

    with pytest.raises(DataError, match="holds 192 NaN"):
        sbonnx.quantize(residual(), list(feeds()), progress=told)
    assert told.closed


class Receiver:
    """Has the methods of `Progress` without deriving from it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, what: str, total: int | None) -> None:
        self.calls.append("start")

    def state(self, *, segment: tuple[int, int] | None = None, spilled: int = 0) -> None:
        self.calls.append("state")

    def advance(self, pieces: int = 1) -> None:
        self.calls.append("advance")

    def close(self) -> None:
        self.calls.append("close")


@pytest.mark.parametrize("keys", [{}, {"granularity": "layer"}, {"recipe": "auto"}])
def test_progress_needs_no_base_class(keys: dict[str, Any]) -> None:
    told = Receiver()
    sbonnx.quantize(residual(), batches(5), progress=told, **keys)
    assert told.calls[0] == "start" and "advance" in told.calls

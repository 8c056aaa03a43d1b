"""Rounding in blocks: held against onnxruntime on the written file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

import sbonnx
from sbonnx import graph as graphs
from sbonnx.calib.calibrator import calibrate
from sbonnx.calib.data.dataset import read
from sbonnx.calib.engine.samples import SampleSplitter
from sbonnx.calib.quantized.state import QuantState, StreamResult
from sbonnx.calib.quantized.stream import plainly
from sbonnx.options import RunOptions
from sbonnx.pipeline import prepare, quantized_graph
from sbonnx.plan.types import RoundingChoice
from sbonnx.reconstruct import blockwise
from sbonnx.reconstruct.solve import solution_from
from sbonnx.rounding.adaround import BLOCKS
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, read_recipe
from tests.support.models import model, run

pytest.importorskip("torch")

RESIDUAL = """agraph (float[N,4,8,8] x) => (float[N,6,8,8] y) {
    s = Conv <pads = [1, 1, 1, 1]> (x, w0, b0)
    a = Conv <pads = [1, 1, 1, 1]> (s, w1, b1)
    b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1]> (b, w2)
    d = Conv (s, w3)
    y = Add(c, d)
}"""
WEIGHTS: dict[str, Any] = {
    "w0": (5, 4, 3, 3), "b0": 5, "w1": (6, 5, 3, 3), "b1": 6, "w2": (6, 6, 3, 3), "w3": (6, 5, 1, 1),
}  # fmt: skip
CHAIN = """agraph (float[N,4,8,8] x) => (float[N,3] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    b = Relu(a)
    c = Conv <pads = [1, 1, 1, 1]> (b, w2)
    r = Constant <value = float[1,5] {0, 0, 0, 7, 7}> ()
    d = MaxRoiPool <pooled_shape = [4, 4]> (c, r)
    e = Conv (d, w3)
    f = GlobalAveragePool(e)
    g = Flatten(f)
    y = Gemm(g, w4)
}"""
ALONE = """agraph (float[1,4,8,8] x) => (float[6,64] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, w1, b1)
    b = Relu(a)
    s = Constant <value = int64[2] {6, 64}> ()
    y = Reshape(b, s)
}"""


def images(count: int = 24) -> list[dict[str, Array]]:
    rng = np.random.default_rng(0)
    x = np.tanh(rng.standard_normal((count, 4, 8, 8)).astype(np.float32).cumsum(axis=3).cumsum(axis=2) / 4)
    return [{"x": one[None]} for one in x]


def prepared(proto: onnx.ModelProto, **arguments: Any) -> Prepared:
    """At 3 bits, every weight rounded in blocks, from the nearest codes."""
    recipe, backend = read_recipe(None, "virtual", {"w_bit": 3, "a_bit": 4})
    ready = prepare(proto, recipe, backend)
    choice = RoundingChoice(BLOCKS, {"iterations": 120, "batch": 8, "start": "nearest", **arguments})
    sites = tuple(replace(site, rounding=choice) if site.role == "weight" else site for site in ready.plan.sites)
    return replace(ready, plan=replace(ready.plan, sites=sites))


def walked(ready: Prepared, *, memory: int = 1 << 30, seed: int = 0, learn: bool = True) -> StreamResult:
    """Ranges in float, then the walk."""
    data = read(images(), ready.graph)
    first = StreamResult(calibrate(ready.graph, ready.plan, data).bounds, {}, {})
    if not learn:
        return first
    units = list(SampleSplitter(ready.graph).units(data.items()))
    return blockwise.walk_blocks(ready.graph, ready.plan, units, first, seed, RunOptions(threads=1, memory=memory))


def error(ready: Prepared, found: StreamResult, proto: onnx.ModelProto) -> float:
    """Squared error of the file that these codes give, in onnxruntime, against the float model."""
    ranges = calibrate(ready.graph, ready.plan, read(images(), ready.graph))
    solution = solution_from(ready.graph, ready.plan, ranges, found)
    quantized = graphs.to_proto(quantized_graph(ready, solution))
    name = proto.graph.output[0].name
    feeds = images()
    return float(sum(((run(proto, x)[name] - run(quantized, x)[name]) ** 2).sum() for x in feeds))


def test_a_weight_that_several_blocks_read_keeps_its_codes() -> None:
    """Each block would learn other codes, and the blocks before would have been learned with those of none."""
    text = """agraph (float[N,4,8,8] x) => (float[N,4,8,8] y) {
        a = Conv <pads = [1, 1, 1, 1]> (x, w)
        b = Relu(a)
        c = Conv <pads = [1, 1, 1, 1]> (b, w)
        d = Relu(c)
        y = Conv (d, w2)
    }"""
    ready = prepared(model(text, w=(4, 4, 3, 3), w2=(4, 4, 1, 1)), scope="layer")
    found = walked(ready)
    numbers = QuantState(ready.graph, ready.plan, walked(ready, learn=False).bounds, plainly(None))
    assert list(found.gains) == ["w2"]
    assert [(one.where, one.why) for one in found.refusals] == [("w", blockwise.SHARED)]
    np.testing.assert_array_equal(found.codes["w"], numbers.codes_of(ready.plan.by_key()["w"]))


def without_last(found: StreamResult, plain: StreamResult) -> StreamResult:
    """`found` with the nearest codes, and what was measured, in its last block: the first one has w0, b0 and x."""
    codes = {key: codes for key, codes in found.codes.items() if key == "w0"}
    return replace(
        found,
        codes=codes,
        scales={key: found.scales[key] for key in codes},
        bounds={**plain.bounds, "x": found.bounds["x"]},
        constants={key: value for key, value in found.constants.items() if key == "b0"},
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arguments", [{}, {"drop": 0.0, "scale_lr": 0.01, "bias_lr": 0.01}])
def test_the_error_is_that_of_the_written_file(arguments: dict[str, Any]) -> None:
    """Of the last block over that of its nearest codes, which onnxruntime computes as well."""
    proto = model(RESIDUAL, **WEIGHTS)
    ready = prepared(proto, **arguments)
    found, plain = walked(ready), walked(ready, learn=False)
    assert len(found.gains) == 4 and not found.refusals
    losses = {key: gain.loss / gain.nearest for key, gain in found.gains.items()}
    assert losses["w1"] == losses["w2"] == losses["w3"] != losses["w0"]
    assert max(losses.values()) < 0.75
    assert error(ready, found, proto) / error(ready, without_last(found, plain), proto) == pytest.approx(
        losses["w3"], rel=0.01
    )
    assert bool(found.constants) == bool(arguments)


def test_codes_are_neighbours_of_the_weight() -> None:
    ready = prepared(model(RESIDUAL, **WEIGHTS))
    found = walked(ready)
    sites = ready.plan.by_key()
    for key, codes in found.codes.items():
        weight = weights_of(ready)[sites[key].tensor]
        spec = sites[key].spec
        scale = found.scales[key].reshape(-1, 1, 1, 1)
        assert codes.dtype == spec.dtype and codes.min() >= spec.qmin and codes.max() <= spec.qmax
        assert np.abs(np.clip(weight / scale, spec.qmin, spec.qmax) - codes).max() <= 1 + 1e-5


def weights_of(ready: Prepared) -> dict[str, Array]:
    return {t.name: np.asarray(t.values) for node in ready.graph.nodes for t in node.inputs if hasattr(t, "values")}


def test_the_same_seed_gives_the_same_codes_and_a_small_budget_too() -> None:
    ready = prepared(model(RESIDUAL, **WEIGHTS), iterations=30)
    one, other, small = walked(ready), walked(ready), walked(ready, memory=4096)
    assert one.codes.keys() == small.codes.keys() and len(one.codes) == 4
    for key, codes in one.codes.items():
        np.testing.assert_array_equal(codes, other.codes[key])
        np.testing.assert_array_equal(codes, small.codes[key])


def test_a_block_that_torch_cannot_evaluate_is_refused_by_name() -> None:
    weights: dict[str, Any] = {"w1": (6, 4, 3, 3), "b1": 6, "w2": (6, 6, 3, 3), "w3": (5, 6, 1, 1), "w4": (5, 3)}
    proto = model(CHAIN, **weights)
    ready = prepared(proto, iterations=40)
    found, plain = walked(ready), walked(ready, learn=False)
    (refusal,) = found.refusals
    assert refusal.what == "round in blocks" and refusal.where == "w2" and "MaxRoiPool" in refusal.why
    nearest = QuantState(ready.graph, ready.plan, plain.bounds, plainly(None))
    (site,) = (site for site in ready.plan.of_role("weight") if site.tensor == "w2")
    np.testing.assert_array_equal(found.codes[site.key], nearest.codes_of(site))
    assert found.gains.keys() == {site.key for site in ready.plan.of_role("weight") if site.tensor != "w2"}
    assert all(gain.loss <= gain.nearest for gain in found.gains.values())


def test_samples_that_cannot_run_together_run_apart() -> None:
    proto = model(ALONE, w1=(6, 4, 3, 3), b1=6)
    ready = prepared(proto, drop=0.0)
    found, plain = walked(ready), walked(ready, learn=False)
    (gain,) = found.gains.values()
    assert gain.loss < 0.6
    assert error(ready, found, proto) / error(ready, plain, proto) == pytest.approx(gain.loss, rel=0.01)


def test_by_recipe() -> None:
    """From the recipe to the file: better than the nearest codes, and the report says what was gained."""
    proto = model(RESIDUAL, **WEIGHTS)
    options: dict[str, Any] = {
        "w.rounding.type": "adaround",
        "w.rounding.adaround.loss": "batches",
        "w.rounding.adaround.iterations": 60,
    }
    feeds = images()
    errors = []
    for wishes in (options, {"w.rounding.type": "nearest"}):
        report = sbonnx.quantize(proto, feeds, backend="virtual", bits="w3a4", verify=False, **wishes)
        assert report.quantized is not None
        errors.append(sum(((run(proto, x)["y"] - run(report.quantized, x)["y"]) ** 2).sum() for x in feeds))
    assert errors[0] < 0.85 * errors[1]

"""Regions of a detector stay float only if quantizing them costs accuracy at the outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from benchmarks.accuracy import load_pack
from sbonnx.backends import backend_for
from sbonnx.calib.engine.samples import Samples
from sbonnx.errors import ModelError
from sbonnx.graph import to_proto
from sbonnx.heads import Quantized, protect
from sbonnx.heads.protect import restricted
from sbonnx.heads.recognition import head_layout
from sbonnx.metrics import sqnr_db
from sbonnx.pipeline import prepare, quantized_graph, solve
from sbonnx.planning import make
from sbonnx.recipe import load
from sbonnx.report.codes import Reason
from sbonnx.stages.state import Request
from tests.recipe.test_regions import detector
from tests.support.detectors import leaky_detector
from tests.support.models import model, residual, run

RULES_ALONE = {"KERNEL_COSTS": "none"}
"""A model of a few channels is faster in float by onnxruntime's table of kernel costs."""

TWO_BRANCHES = """
agraph (float[N,3,16,16] x) => (float[N,4,8,8] boxes, float[N,5,8,8] scores) {
    [stem] a = Conv <strides = [2,2], pads = [1,1,1,1]> (x, w0, b0)
    [act0] b = Relu (a)
    [trunk] c = Conv <pads = [1,1,1,1]> (b, w1, b1)
    [act1] m = Relu (c)
    [trunk2] n = Conv <pads = [1,1,1,1]> (m, w5, b5)
    [act3] o = Relu (n)
    [trunk3] p = Conv <pads = [1,1,1,1]> (o, w6, b6)
    [act4] d = Relu (p)
    [tower] e = Conv <pads = [1,1,1,1]> (d, w2, b2)
    [act2] f = Relu (e)
    [reg] h = Conv (f, w3, b3)
    [box] boxes = Tanh (h)
    [cls] g = Conv (d, w4, b4)
    [prob] scores = Sigmoid (g)
}"""


def two_branches(spread: float) -> onnx.ModelProto:
    """A trunk with a box branch and a class branch. `spread`: ratio of the channel scales between the box layers."""
    sizes: dict[str, Any] = {"w0": (16, 3, 3, 3), "w1": (32, 16, 3, 3), "w2": (32, 32, 3, 3), "w3": (4, 32, 1, 1)}
    sizes |= {"w4": (5, 32, 1, 1), "w5": (32, 32, 3, 3), "w6": (32, 32, 3, 3)}
    proto = model(TWO_BRANCHES, **sizes, b0=16, b1=32, b2=32, b3=4, b4=5, b5=32, b6=32)
    scales = spread ** np.linspace(-0.5, 0.5, 32, dtype=np.float32)
    changes = {"w2": scales[:, None, None, None], "b2": scales, "w3": 1 / scales[None, :, None, None]}
    for tensor in proto.graph.initializer:
        value = numpy_helper.to_array(tensor) * np.float32(changes.get(tensor.name, 1.0))
        fan_in = np.float32(np.sqrt(np.prod(value.shape[1:]) or 1))
        tensor.CopyFrom(numpy_helper.from_array((value / fan_in).astype(np.float32), tensor.name))
    return proto


def images(count: int, size: int = 16) -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    return [{"x": rng.standard_normal((1, 3, size, size)).astype(np.float32)} for _ in range(count)]


def quantize(proto: onnx.ModelProto, feeds: list[dict[str, Any]], **keys: Any) -> sbonnx.Report:
    keys = {"backend": "onnxruntime", "kernel_costs": "none"} | keys
    if keys["backend"] != "onnxruntime":
        del keys["kernel_costs"]
    return sbonnx.quantize(proto, feeds, verify=False, **keys)


def quality(report: sbonnx.Report, proto: onnx.ModelProto, feeds: list[dict[str, Any]], name: str) -> float:
    """SQNR of one output, by onnxruntime running the file."""
    assert report.quantized is not None
    floats = np.stack([run(proto, feed)[name] for feed in feeds])
    return sqnr_db(floats, np.stack([run(report.quantized, feed)[name] for feed in feeds]))


def notes_of(report: sbonnx.Report) -> list[str]:
    return [note for note in report.notes if note.startswith("head (")]


def weights_of(report: sbonnx.Report) -> set[str]:
    return {site.node for site in report.sites if site.role == "weight"}


def test_a_head_with_channels_of_different_scales_stays_float() -> None:
    proto, feeds = two_branches(spread=1000.0), images(20)
    before, after = (quantize(proto, feeds[:12], heads=heads) for heads in ("none", "auto"))
    assert weights_of(before) == {"stem", "trunk", "trunk2", "trunk3", "tower", "reg", "cls"}
    assert weights_of(before) - weights_of(after) == {"tower", "reg", "cls"}
    gain = quality(after, proto, feeds[12:], "boxes") - quality(before, proto, feeds[12:], "boxes")
    assert gain > 10
    (note,) = notes_of(after)
    assert "2 prediction layers on shared features" in note and ": head left in float" in note
    assert notes_of(before) == []
    reasons = {refusal.where: refusal.why for refusal in after.refusals if refusal.what == "quantize"}
    assert reasons["reg"] == "quantizing the head costs more at the outputs than it saves"


def test_a_head_that_loses_nothing_keeps_its_bytes() -> None:
    proto, feeds = two_branches(spread=1.0), images(12)
    reports = [quantize(proto, feeds, heads=heads) for heads in ("none", "auto")]
    files = [report.quantized.SerializeToString() for report in reports if report.quantized is not None]
    assert files[0] == files[1]
    assert "no part of it needs to stay float" in notes_of(reports[1])[0]


def test_order_of_the_samples_changes_nothing() -> None:
    proto, feeds = two_branches(spread=1000.0), images(12)
    files = [quantize(proto, data).quantized for data in (feeds, feeds[::-1])]
    assert files[0] is not None and files[1] is not None
    assert files[0].SerializeToString() == files[1].SerializeToString()


@pytest.mark.parametrize(
    "proto",
    [residual(), model("agraph (float[N] x) => (float[N] y) { [act] y = Relu (x) }")],
    ids=["classifier", "no layer"],
)
def test_networks_without_a_head(proto: onnx.ModelProto) -> None:
    assert head_layout(prepare(proto, load({}), backend_for("virtual", None)).graph) is None


def test_branches_without_a_shared_layer_are_no_head() -> None:
    """Two towers, such as of an image and a text encoder."""
    towers = model(
        """agraph (float[N,8] x) => (float[N,8] p, float[N,8] q) {
            [one] a = MatMul (x, w0) [two] p = MatMul (a, w1) [three] b = MatMul (x, w2) [four] q = MatMul (b, w3) }""",
        w0=(8, 8),
        w1=(8, 8),
        w2=(8, 8),
        w3=(8, 8),
    )
    assert head_layout(prepare(towers, load({}), backend_for("virtual", None)).graph) is None


def test_parts_of_a_head() -> None:
    """The regions of a detector with a decoder of edge distributions; boxes and scores are judged apart."""
    layout = head_layout(prepare(detector(), load({}), backend_for("virtual", None)).graph)
    assert layout is not None
    regions = {region.name: region.nodes for region in layout.regions}
    assert {"reg", "tower"} <= regions["branch of reg"] and regions["branch of cls"] == {"cls"}
    assert {"up", "neck"} <= regions["neck and head"] and "deep" not in regions["neck and head"]
    assert "deep" in regions["neck and head with the layers before"] and regions["stem"] == {"stem0", "act0"}
    assert list(layout.ends) == ["boxes", "scores"]


DECODED = """
agraph (float[N,3,8,8] x) => ({outputs}) {
    [trunk] a = Conv <pads = [1,1,1,1]> (x, w0)
    [act] b = Relu (a)
    [predict] c = Conv (b, w1)
    [rows] r = Reshape (c, shape)
    {tail}
}"""


@pytest.mark.parametrize(
    ("outputs", "tail", "kind", "ends"),
    [
        ("float[N,4,64] y", "[end] y = Sigmoid (r)", None, ()),
        (
            "float[N,4,64] y",
            "xy, wh = Split <axis = 1> (r, halves) c1 = Sigmoid (xy) s1 = Exp (wh) y = Concat <axis = 1> (c1, s1)",
            "a prediction layer with a box decoder",
            ("c1", "s1"),
        ),
        (
            "float[N,4,5] y",
            "m, index = TopK <axis = 2> (r, five) y = GatherElements <axis = 2> (r, index)",
            "a prediction layer before a selection of boxes",
            ("r",),
        ),
    ],
    ids=["dense", "decoder", "selection"],
)
def test_one_prediction_layer_with_a_decoder(outputs: str, tail: str, kind: str | None, ends: tuple[str, ...]) -> None:
    proto = model(
        DECODED.replace("{outputs}", outputs).replace("{tail}", tail),
        w0=(8, 3, 3, 3),
        w1=(4, 8, 1, 1),
        shape=np.array([0, 4, 64], np.int64),
        halves=np.array([2, 2], np.int64),
        five=np.array([5], np.int64),
    )
    layout = head_layout(prepare(proto, load({}), backend_for("virtual", None)).graph)
    assert (None if layout is None else layout.kind, () if layout is None else layout.ends) == (kind, ends)


def test_a_part_of_a_solution_equals_the_whole_one() -> None:
    """Layers that stay quantized keep their scales, codes and outputs."""
    proto, feeds = two_branches(spread=10.0), images(8)
    rules = backend_for("onnxruntime", None)
    state = solve(Request(proto, load({**RULES_ALONE, "BACKEND": "onnxruntime", "HEADS": "none"}), rules, data=feeds))
    prepared = state.prepared
    floats = dict.fromkeys(("reg", "tower", "act2"), Reason("recipe", "asked for"))
    plan = make(prepared.graph, prepared.recipe, rules, observers=frozenset({"minmax", "mse"}), declined=floats)
    known = Quantized(prepared.plan, state.solution)
    part = restricted(known, plan, prepared.graph)
    assert part is not None and part.qparams.keys() | part.bias_scales.keys() == {site.key for site in plan.sites}
    assert all(np.array_equal(part.codes[key], state.solution.codes[key]) for key in part.codes)
    assert restricted(Quantized(plan, part), prepared.plan, prepared.graph) is None
    whole, fewer = (
        quantized_graph(type(prepared)(prepared.graph, one, prepared.recipe, rules), solution)
        for one, solution in ((prepared.plan, state.solution), (plan, part))
    )
    files = [to_proto(graph) for graph in (whole, fewer)]
    for feed in feeds:
        one, other = (run(file, feed)["scores"] for file in files)
        assert np.array_equal(one, other)


def test_nothing_is_done_for_a_simulated_runtime_or_without_integers() -> None:
    proto, feeds = two_branches(spread=1000.0), images(8)
    assert notes_of(quantize(proto, feeds, backend="virtual")) == []
    prepared = prepare(
        proto,
        load({"BACKEND": "onnxruntime", "W": {"QUANTIZER": {"BIT": 0}}, "A": {"QUANTIZER": {"BIT": 0}}}),
        backend_for("onnxruntime", None),
    )
    state = Quantized(prepared.plan, solve(Request(proto, prepared.recipe, prepared.backend, data=feeds)).solution)
    samples = Samples.of(feeds, prepared.graph)
    assert protect(prepared.graph, state, samples, lambda _: prepared.plan, lambda _: 1.0) is None


@pytest.mark.slow
def test_leaky_detector_with_a_pyramid(pack: Path) -> None:
    """Box and class branches on two scales: all of the loss in the head is avoided, as by leaving it out by name."""
    evaluation = load_pack(pack)
    proto = leaky_detector(Path(evaluation.model_path("fastestdet")))
    feeds = evaluation.load_calib("fastestdet", limit=10)
    floats = [run(proto, feed)["detections"] for feed in feeds[6:]]

    def parts(**keys: Any) -> dict[str, float]:
        report = quantize(proto, feeds[:6], backend="tensorrt", effort="fast", **keys)
        assert report.quantized is not None
        found = [run(report.quantized, feed)["detections"] for feed in feeds[6:]]
        columns = {"boxes": slice(0, 4), "object": slice(4, 5), "classes": slice(5, 85)}
        return {
            name: sqnr_db(np.stack(floats)[..., place], np.stack(found)[..., place]) for name, place in columns.items()
        }

    plain, kept, named = parts(heads="none"), parts(), parts(heads="none", exclude=["head"])
    assert plain["classes"] < 10 and kept["classes"] > plain["classes"] + 3
    assert all(kept[name] > named[name] - 0.5 and kept[name] > plain[name] - 0.5 for name in plain)


@pytest.mark.slow
def test_ranges_that_the_float_part_widened_are_narrow_again(pack: Path) -> None:
    """A Concat joins both inputs for TensorRT; the wider one is float with the head, so the other has its own scale."""
    evaluation = load_pack(pack)
    feeds = evaluation.load_calib("fastestdet", limit=16)
    recipe = load({"EFFORT": "fast"})
    state = solve(Request(evaluation.model_path("fastestdet"), recipe, backend_for("tensorrt"), data=feeds))
    assert state.ranges is not None and "input.508" not in {site.tensor for site in state.prepared.plan.sites}
    own = np.max(np.abs([state.ranges.bounds["input.376"].lo, state.ranges.bounds["input.376"].hi]))
    assert state.solution.qparams["input.376"].scale * 128 < 1.1 * own


def test_a_head_that_does_not_run_alone_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise ModelError("onnxruntime rejects a part of the model")

    monkeypatch.setattr("sbonnx.stages.measure.protect", refuse)
    report = quantize(two_branches(spread=1000.0), images(8))
    refusals = [refusal for refusal in report.refusals if refusal.where == "HEADS"]
    assert [refusal.why for refusal in refusals] == ["onnxruntime rejects a part of the model"]
    assert "reg" in weights_of(report)

"""Data as it comes: lengths and sizes that differ, several inputs, inputs with defaults, recurrent models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import sbonnx
from sbonnx.calib.data import Sampling
from sbonnx.errors import DataError
from sbonnx.spec import Array
from tests.calib.recurrent import STEP, WEIGHTS
from tests.calib.test_recurrent import plain_loop, steps
from tests.support.models import model, run

Feeds = list[dict[str, Array]]


def ranges(quantized: onnx.ModelProto) -> dict[str, tuple[float, float]]:
    """Lowest and highest value of each quantized activation, read off the file's QuantizeLinear nodes."""
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in quantized.graph.initializer}
    found = {}
    for node in quantized.graph.node:
        if node.op_type == "QuantizeLinear" and node.input[0] not in held:
            scale, zero = held[node.input[1]], held[node.input[2]]
            codes = np.iinfo(zero.dtype)
            found[node.input[0]] = (float(scale * (codes.min - int(zero))), float(scale * (codes.max - int(zero))))
    return found


def widest(proto: onnx.ModelProto, feeds: Feeds, tensor: str) -> tuple[float, float]:
    """Lowest and highest value of an inner tensor over all feeds in onnxruntime, 0 within."""
    tapped = onnx.ModelProto()
    tapped.CopyFrom(proto)
    if tensor not in {value.name for value in [*proto.graph.output, *proto.graph.input]}:
        tapped.graph.output.append(onnx.helper.make_empty_tensor_value_info(tensor))
    values = [feed[tensor] if tensor in feed else run(tapped, feed)[tensor] for feed in feeds]
    return min(0.0, *(float(x.min()) for x in values)), max(0.0, *(float(x.max()) for x in values))


def assert_calibrated(proto: onnx.ModelProto, feeds: Feeds, tensors: list[str], **options: Any) -> onnx.ModelProto:
    """Quantize, and hold the ranges of `tensors` against onnxruntime on every feed. Half a code for the zero point."""
    report = sbonnx.quantize(proto, feeds, observer="minmax", **options)
    assert report.ok, report.problems
    assert report.quantized is not None
    found = ranges(report.quantized)
    for tensor in tensors:
        lo, hi = widest(proto, feeds, tensor)
        assert found[tensor] == pytest.approx((lo, hi), abs=(hi - lo) / 255 * 0.51), tensor
    return report.quantized


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def test_sequences_of_different_lengths() -> None:
    proto = model(
        """agraph (float[N,T,8] x) => (float[N,T,4] y) {
            a = MatMul (x, w)
            r = Relu (a)
            y = MatMul (r, v)
        }""",
        w=(8, 16),
        v=(16, 4),
    )
    feeds = [{"x": normal(2, length, 8, seed=length, scale=length)} for length in (7, 1, 12, 30, 3)]
    assert_calibrated(proto, feeds, ["x", "r"])
    for granularity in ("layer", "budget"):
        assert_calibrated(proto, feeds, ["x", "r"], granularity=granularity, memory="1 kB")


def test_images_of_different_sizes() -> None:
    proto = model(
        """agraph (float[N,3,H,W] x) => (float[N,5] y) {
            c = Conv <kernel_shape = [3,3], pads = [1,1,1,1], strides = [2,2]> (x, w)
            r = Relu (c)
            d = Conv <kernel_shape = [1,1]> (r, v)
            g = GlobalAveragePool (d)
            y = Flatten (g)
        }""",
        w=(8, 3, 3, 3),
        v=(5, 8, 1, 1),
    )
    sizes = [(32, 32), (20, 48), (5, 7), (64, 16)]
    feeds = [{"x": normal(2, 3, high, wide, seed=high, scale=wide / 16)} for high, wide in sizes]
    # ranges are measured behind rounded weights, which the pair limits of other CPUs make up to 1 % smaller
    assert_calibrated(proto, feeds, ["x", "r"], kernel_costs="none", cpu="vnni")


def test_several_inputs_of_several_types() -> None:
    proto = model(
        """agraph (int64[N,T] ids, float[N,6] more, bool[N] keep) => (float[N,4] y) {
            e = Gather (table, ids)
            m = ReduceMean <axes = [1], keepdims = 0> (e)
            j = Concat <axis = 1> (m, more)
            k = Cast <to = 1> (keep)
            u = Unsqueeze (k, one)
            s = Mul (j, u)
            y = MatMul (s, w)
        }""",
        table=(20, 5),
        w=(11, 4),
        one=np.array([1]),
    )
    rng = np.random.default_rng(0)
    feeds = [
        {
            "ids": rng.integers(0, 20, (batch, length)),
            "more": normal(batch, 6, seed=length),
            "keep": rng.integers(0, 2, batch).astype(bool) | (np.arange(batch) == 0),
        }
        for batch, length in ((2, 3), (1, 9), (4, 1))
    ]
    assert_calibrated(proto, feeds, ["s"])


SCALED = """
agraph (float[N,4] x, float[1] gain) => (float[N,3] y) {
    a = MatMul (x, w)
    b = Mul (a, gain)
    r = Relu (b)
    y = MatMul (r, v)
}"""


def with_default(ir_version: int = 8, *, all_listed: bool = False) -> onnx.ModelProto:
    """`gain` is an input that has a value: 2.5. Before IR version 4 every initializer is listed so."""
    proto = model(SCALED, w=(4, 6), v=(6, 3), gain=np.array([2.5], np.float32), opset=9 if ir_version < 4 else 17)
    if all_listed:
        for tensor in proto.graph.initializer:
            if tensor.name != "gain":
                proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, 1, tensor.dims))
    proto.ir_version = ir_version
    return proto


@pytest.mark.parametrize("proto", [with_default(), with_default(3, all_listed=True)], ids=["ir8", "ir3"])
def test_a_default_may_be_fed_or_left_out(proto: onnx.ModelProto) -> None:
    bare = [{"x": normal(2, 4, seed=seed)} for seed in range(3)]
    fed = [{**feed, "gain": np.array([2.5])} for feed in bare]
    mixed = [bare[0], fed[1], bare[2]]
    without = assert_calibrated(proto, bare, ["x", "r"])
    for feeds in (fed, mixed):
        report = sbonnx.quantize(proto, feeds, observer="minmax")
        assert report.ok and report.quantized == without
    for rows in ([(feed["x"],) for feed in bare], [(feed["x"], "label") for feed in bare]):
        assert sbonnx.quantize(proto, rows, observer="minmax").quantized == without


@pytest.mark.parametrize("value", [np.array([2.0]), np.array([2.5, 2.5]), np.array([2]), np.array(["2.5"])])
def test_another_value_than_the_default_is_refused(value: Array) -> None:
    feeds = [{"x": normal(2, 4)}, {"x": normal(2, 4), "gain": value}]
    with pytest.raises(
        DataError, match=r"feed 1 feeds 'gain' other values than its default .*: leave 'gain' out"
    ) as caught:
        sbonnx.quantize(with_default(), feeds)
    assert "\n" not in str(caught.value)


def test_defaults_in_files_and_step_by_step(tmp_path: Path) -> None:
    """A large default stays in its file; `QuantModel` and the data readers take it too."""
    gain = normal(1, 2000, seed=3)
    proto = model(
        "agraph (float[N,2000] x, float[1,2000] gain) => (float[N,3] y) {\n m = Mul (x, gain)\n y = MatMul (m, w)\n}",
        gain=gain,
        w=(2000, 3),
    )
    onnx.save(copy.deepcopy(proto), str(tmp_path / "m.onnx"), save_as_external_data=True, size_threshold=0)
    np.savez(tmp_path / "d.npz", x=normal(6, 2000), gain=gain)
    report = sbonnx.quantize(tmp_path / "m.onnx", tmp_path / "d.npz")
    assert report.ok
    with sbonnx.QuantModel(tmp_path / "m.onnx") as quant:
        outputs = quant({"x": normal(6, 2000), "gain": gain.astype(np.float64)})
    expected = run(proto, {"x": normal(6, 2000)})["y"]
    np.testing.assert_allclose(next(iter(outputs.values())), expected, rtol=0, atol=np.abs(expected).max() * 1e-5)


def test_a_recurrent_model_is_calibrated_on_its_states() -> None:
    """The ranges are those over the states of a plain loop, and the file is the same as with the states as data."""
    proto = model(STEP, **WEIGHTS)
    feeds = steps(12)
    full = plain_loop(proto, feeds, {"next": "h"}, {"h": np.zeros((1, 8), np.float32)})
    report = sbonnx.quantize(proto, feeds, feedback={"next": "h"})
    assert report.ok and report.quantized is not None
    found = ranges(report.quantized)
    for tensor in ("x", "h"):
        lo, hi = widest(proto, full, tensor)
        assert found[tensor] == pytest.approx((lo, hi), abs=(hi - lo) / 255 * 0.51)
    for granularity in ("layer", "budget"):
        again = sbonnx.quantize(proto, feeds, feedback={"next": "h"}, granularity=granularity)
        assert again.quantized == report.quantized


def test_the_picked_feeds_are_what_counts() -> None:
    """Each feed has a range of its own: what the file covers says which feeds were seen."""
    proto = model("agraph (float[N,2] x) => (float[N,3] y) { y = MatMul (x, w) }", w=(2, 3))
    feeds = [{"x": np.array([[-1.0, 10.0 + number]], np.float32)} for number in range(40)]
    for seed in (0, 1):
        places = Sampling(3, "random", seed).chosen(40)
        report = sbonnx.quantize(proto, feeds, samples=3, pick="random", seed=seed)
        assert report.quantized is not None
        assert report.counts.samples == 3
        assert ranges(report.quantized)["x"][1] == pytest.approx(10.0 + max(places), abs=0.1)

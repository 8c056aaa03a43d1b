"""Saturating sums in numpy: against plain loops, and on CPUs without VNNI against onnxruntime's own kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import sbonnx
from sbonnx.spec import Array
from sbonnx.system.cpu import target_cpu
from sbonnx.system.runtime import open_session, session_options
from sbonnx.verify.other_cpu import saturating_sums
from sbonnx.verify.other_cpu.saturating_session import SaturatingSession
from sbonnx.verify.other_cpu.saturating_sums import can_saturate, compute
from sbonnx.verify.sessions import session
from tests.calib.test_calibrate_at_scale import calibration_feeds
from tests.support.models import model
from tests.support.values import some

OPSETS = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]

SATURATING_DB = 14.88
"""SQNR of ResNet-20 with 8-bit weights, by onnxruntime's kernels without VNNI."""

LAST_BIT = 2.0**-22
"""Error of float outputs relative to the largest: kernels may multiply and add in one rounding."""


def by_onnxruntime(op: str, attributes: dict[str, Any], inputs: list[Array | None]) -> Array:
    """Output of one kernel with the input 0 given and the others constant."""
    names = ["" if value is None else f"i{number}" for number, value in enumerate(inputs)]
    domain = "com.microsoft" if op in ("QGemm", "MatMulIntegerToFloat") or "channels_last" in attributes else ""
    assert inputs[0] is not None
    kinds = {"MatMulInteger": np.int32, "MatMulIntegerToFloat": np.float32}
    codes = op != "QGemm" or len(inputs) == 9
    graph = helper.make_graph(
        [helper.make_node(op, names, ["y"], domain=domain, **attributes)],
        "g",
        [helper.make_tensor_value_info("i0", onnx.TensorProto.UINT8, inputs[0].shape)],
        [_info("y", kinds.get(op, np.uint8 if codes else np.float32))],
        [numpy_helper.from_array(np.asarray(x), name) for name, x in zip(names[1:], inputs[1:], strict=True) if name],
    )
    proto = helper.make_model(graph, opset_imports=OPSETS, ir_version=8)
    opened = open_session(proto.SerializeToString(), session_options("all", threads=1))
    return np.asarray(opened.run(None, {"i0": inputs[0]})[0])


def _info(name: str, kind: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), None)


def sum_of(x: Sequence[Any] | Array, w: Array, x_zero: int, w_zero: int) -> int:
    """The sum of one output by plain loops: pairs of products clipped to 16 bits, then the zero points."""
    total = 0
    for at in range(0, len(x), 2):
        pair = sum(int(x[i]) * int(w[i]) for i in range(at, min(at + 2, len(x))))
        total += min(max(pair, -32768), 32767) if w.dtype == np.int8 else pair
    return total - x_zero * sum(map(int, w)) - w_zero * sum(map(int, x)) + len(x) * x_zero * w_zero


def convolved(x: Array, w: Array, x_zero: int, w_zero: int, attributes: dict[str, Any]) -> Array:
    """The sums of a convolution, by plain loops over outputs and taps."""
    group, pads, strides, dilations = (attributes[key] for key in ("group", "pads", "strides", "dilations"))
    axes, channels = w.ndim - 2, w.shape[1]
    if channels == 1 and len(w) == group:
        w = w.astype(np.int16)  # depthwise: added in 32 bits
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:], strict=True)], constant_values=x_zero)
    space = [
        (padded.shape[2 + at] - (w.shape[2 + at] - 1) * dilations[at] - 1) // strides[at] + 1 for at in range(axes)
    ]
    total = np.zeros((len(x), len(w), *space), np.int32)
    for at in itertools.product(*map(range, total.shape)):
        image, output, *position = at
        first = output // (len(w) // group) * channels
        taps = itertools.product(*map(range, w.shape[2:]))
        row = []
        for tap in taps:
            place = tuple(p * s + t * d for p, s, t, d in zip(position, strides, tap, dilations, strict=True))
            channel = padded[image, first : first + channels]
            row += [one[place] for one in channel]
        weights = np.moveaxis(w[output], 0, -1).reshape(-1)
        total[at] = sum_of(row, weights, x_zero, w_zero)
    return total


def multiplied(x: Array, w: Array, x_zero: int, w_zero: int) -> Array:
    """The sums of a matrix product, by plain loops."""
    batch = np.broadcast_shapes(x.shape[:-2], w.shape[:-2])
    x, w = np.broadcast_to(x, (*batch, *x.shape[-2:])), np.broadcast_to(w, (*batch, *w.shape[-2:]))
    total = np.zeros((*batch, x.shape[-2], w.shape[-1]), np.int32)
    for at in itertools.product(*map(range, total.shape)):
        total[at] = sum_of(x[at[:-1]], w[at[:-2]][:, at[-1]], x_zero, w_zero)
    return total


def requantized(total: Array, scale: Array, zero: int) -> Array:
    return (np.rint(np.clip(total.astype(np.float32) * scale, -zero, 255 - zero)) + zero).astype(np.uint8)


def check(op: str, attributes: dict[str, Any], inputs: list[Array | None], wanted: Array) -> None:
    """Compare with plain loops, and with onnxruntime's kernels where they saturate; floats but for the last bit."""
    found = compute(op, attributes, inputs)
    others = [wanted] if target_cpu().exact else [wanted, by_onnxruntime(op, attributes, inputs)]
    for other in others:
        assert found.dtype == other.dtype
        if found.dtype.kind == "f":
            np.testing.assert_allclose(found, other, rtol=0, atol=LAST_BIT * np.abs(other).max())
        else:
            np.testing.assert_array_equal(found, other)


def random_codes(rng: np.random.Generator, *shape: int, kind: Any = np.uint8) -> Array:
    ends = np.iinfo(kind)
    low = int(rng.choice([0, 160])) if kind == np.uint8 else ends.min
    return rng.integers(low, ends.max + 1, shape).astype(kind)


@pytest.mark.parametrize("seed", range(24))
def test_convolutions(seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes, group = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    inputs, outputs = int(rng.choice([1, 2, 3, 5, 8])), int(rng.choice([1, 2, 3]))
    sizes = [(1, 4), (1, 3), (1, 3)]
    kernel, strides, dilations = (rng.integers(*ends, axes).tolist() for ends in sizes)
    attributes = {
        "group": group,
        "strides": strides,
        "dilations": dilations,
        "pads": rng.integers(0, 2, 2 * axes).tolist(),
    }
    attributes["kernel_shape"] = kernel
    kind = np.uint8 if seed % 8 == 7 else np.int8
    w = random_codes(rng, group * outputs, inputs, *kernel, kind=kind)
    x = random_codes(rng, 2, group * inputs, *(5,) * axes)
    x_zero, w_zero = np.uint8(rng.choice([0, 7, 128])), kind(rng.choice([0, 0, 3]))
    scales = rng.uniform(1e-3, 2e-3, len(w) if seed % 2 else ()).astype(np.float32)
    bias = rng.integers(-20000, 20000, len(w)).astype(np.int32)
    total = convolved(x, w, int(x_zero), int(w_zero), attributes) + bias.reshape(-1, *(1,) * axes)
    out, zero = np.float32(np.abs(total).max() * 1e-5 / 120), np.uint8(128)
    zeros = np.full(scales.shape, w_zero)
    given = [x, np.float32(0.01), x_zero, w, scales, zeros, out, zero, bias]
    factor = (np.float32(0.01) * scales / out).reshape(-1, *(1,) * axes)
    wanted = requantized(total, factor, 128)
    check("QLinearConv", attributes, given, wanted)
    if axes == 2:
        given[0] = np.ascontiguousarray(np.moveaxis(x, 1, -1))
        check("QLinearConv", {**attributes, "channels_last": 1}, given, np.moveaxis(wanted, 1, -1))


@pytest.mark.parametrize("seed", range(24))
def test_matrix_products(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, depth, columns = (int(rng.choice(sizes)) for sizes in ([1, 2, 7], [1, 2, 3, 8, 31, 64], [1, 3, 16]))
    kind = np.uint8 if seed % 8 == 7 else np.int8
    x, w = random_codes(rng, 2, rows, depth), random_codes(rng, depth, columns, kind=kind)
    x_zero, w_zero = np.uint8(rng.choice([0, 7, 128])), kind(rng.choice([0, 0, 3]))
    scales = rng.uniform(1e-3, 2e-3, columns if seed % 2 else ()).astype(np.float32)
    zeros, x_scale = np.full(scales.shape, w_zero), np.float32(0.01)
    total = multiplied(x, w, int(x_zero), int(w_zero))
    out, zero = np.float32(max(np.abs(total).max(), 1) * 1e-5 / 120), np.uint8(128)
    check("MatMulInteger", {}, [x, w, x_zero, zeros], total)
    codes = requantized(total, x_scale * scales / out, 128)
    check("QLinearMatMul", {}, [x, x_scale, x_zero, w, scales, zeros, out, zero], codes)
    floats = total.astype(np.float32) * (x_scale * scales)
    bias = rng.normal(size=columns).astype(np.float32)
    check("MatMulIntegerToFloat", {}, [x, w, x_scale, scales, x_zero, zeros, bias], floats + bias)
    batch = random_codes(rng, 2, depth, columns, kind=np.int8)
    check("MatMulInteger", {}, [x, batch, x_zero], multiplied(x, batch, int(x_zero), 0))
    turned = {"transA": seed % 3 % 2, "transB": seed % 2, "alpha": 0.5}
    a, b = (np.ascontiguousarray(one.T if turned[key] else one) for one, key in ((x[0], "transA"), (w, "transB")))
    added = rng.integers(-9999, 9999, columns).astype(np.int32)
    given = [a, x_scale, x_zero, b, scales, zeros, added]
    factor = np.float32(0.5) * (x_scale * scales)
    check("QGemm", turned, given, (total[0] + added).astype(np.float32) * factor)
    check("QGemm", turned, [*given, out, zero], requantized(total[0] + added, factor / out, 128))


def test_which_weights_can_saturate() -> None:
    """Pairs of one sign above 128, in the order of taps, then channels; not those of depthwise kernels."""
    weight = np.zeros((1, 2, 1, 2), np.int8)
    weight[0, :, 0, 0] = 64, 65
    assert can_saturate("QLinearConv", {}, weight)
    assert not can_saturate("QLinearConv", {}, weight.view(np.uint8))
    assert not can_saturate("QLinearConv", {}, np.roll(weight, 1, axis=1) - weight)
    weight[0, :, 0] = [[64, 65], [-64, -64]]  # neighbours in the file, not in the kernel
    assert not can_saturate("QLinearConv", {}, weight)
    assert not can_saturate("QLinearConv", {"group": 2}, np.full((2, 1, 1, 2), 127, np.int8))
    assert can_saturate("QLinearConv", {"group": 2}, np.full((4, 1, 1, 2), 127, np.int8))


PIECES = {
    "conv": """agraph (float[1,3,6,6] x, int64[4] k) => (float[1,4,12,12] y)
        <float s = {0.01}, uint8 z = {5}, float t = {0.004}, float o = {0.2}, int8 n = {0}> {
        q = QuantizeLinear (x, s, z)
        d = DequantizeLinear (q, s, z)
        f = DequantizeLinear (w, t, n)
        c = Conv <pads = [1,1,1,1]> (d, f)
        a = QuantizeLinear (c, o, z)
        b = DequantizeLinear (a, o, z)
        r = Sigmoid (b)
        e = Mul (r, b)
        y = Resize (e, , , k)
    }""",
    "dynamic": """agraph (float[2,64] x) => (float[2,8] y, float[2,64] h) <float t = {0.004}, int8 n = {0}> {
        h = Relu (x)
        q, s, z = DynamicQuantizeLinear (h)
        m = MatMulInteger (q, v, z, n)
        c = Cast <to = 1> (m)
        k = Mul (s, t)
        y = Mul (c, k)
    }""",
    "branches": """agraph (float[2,64] x, bool p) => (float[2,8] y) <float s = {0.01}, uint8 z = {0}, int8 n = {0}> {
        q = QuantizeLinear (x, s, z)
        i = If (p) <
            then_branch = then_graph () => (int32[2,8] t) { t = MatMulInteger (q, v, z, n) },
            else_branch = else_graph () => (int32[2,8] e) { e = MatMulInteger (q, u, z, n) }
        >
        y = Cast <to = 1> (i)
    }""",
}


NAMES = {"conv": "w", "dynamic": "v", "branches": "uv"}
"""Weights of each model."""


def piece(name: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"w": (4, 3, 3, 3), "v": (64, 8), "u": (64, 8)}
    stored: dict[str, Any] = {
        key: random_codes(rng, *shape, kind=np.int8) for key, shape in shapes.items() if key in NAMES[name]
    }
    proto = model(PIECES[name], **stored)
    shape = (1, 3, 6, 6) if name == "conv" else (2, 64)
    feeds: dict[str, Array] = {"x": rng.uniform(1, 2.5, shape).astype(np.float32)}
    others = {"conv": {"k": np.array([1, 4, 12, 12])}, "branches": {"p": np.array(True)}}
    return proto, {**feeds, **others.get(name, {})}


def cut(path: Path, folder: Path) -> tuple[Any, SaturatingSession]:
    """onnxruntime's session of a file, and the same file in pieces."""
    written = folder / "written.onnx"
    opened = session(path, write=written, threads=1)
    return opened, SaturatingSession(opened, written, 1)


@pytest.mark.parametrize("name", PIECES)
def test_pieces_compute_what_the_model_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With saturating sums on CPUs whose kernels saturate, with exact sums on others."""
    proto, feeds = piece(name)
    onnx.save(proto, tmp_path / "m.onnx")
    opened, pieces = cut(tmp_path / "m.onnx", tmp_path)
    assert pieces.computed
    assert not pieces.unknown
    saturating = pieces.run(None, feeds)
    if target_cpu().exact:
        with monkeypatch.context() as patch:
            patch.setattr(saturating_sums, "_pairs", lambda codes: (np.zeros(0, np.int64),) * 2)
            exact = pieces.run(None, feeds)
        assert any((one != other).any() for one, other in zip(saturating, exact, strict=True))
        saturating = exact
    for one, other in zip(saturating, opened.run(None, feeds), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=LAST_BIT * np.abs(other).max())
    (first,) = pieces.run([opened.get_outputs()[0].name], feeds)
    assert first.shape == saturating[0].shape


@pytest.mark.skipif(not target_cpu().exact, reason="this CPU computes saturating sums itself")
def test_only_what_saturates_is_cut(tmp_path: Path) -> None:
    proto, _ = piece("conv")
    onnx.save(proto, tmp_path / "m.onnx")
    assert isinstance(session(tmp_path / "m.onnx", exact=False), SaturatingSession)
    assert not isinstance(session(tmp_path / "m.onnx", exact=False, level="off"), SaturatingSession)  # float ops
    assert not isinstance(session(tmp_path / "m.onnx"), SaturatingSession)
    weight = next(one for one in proto.graph.initializer if one.name == "w")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) // 2, "w"))
    onnx.save(proto, tmp_path / "m.onnx")
    assert not isinstance(session(tmp_path / "m.onnx", exact=False), SaturatingSession)


def test_what_is_not_computed_is_named(tmp_path: Path) -> None:
    """Products in the body of a Loop."""
    text = """agraph (uint8[2,64] x, int64 count, bool go) => (int32[2,8] y)
        <int32[1] zero = {0}, int64[2] shape = {2, 8}> {
        start = Expand (zero, shape)
        y = Loop (count, go, start) <body = once (int64 i, bool c, int32[2,8] before) => (bool d, int32[2,8] after) {
            d = Identity (c)
            m = MatMulInteger (x, v)
            after = Add (before, m)
        }>
    }"""
    proto = model(text, v=random_codes(np.random.default_rng(0), 64, 8, kind=np.int8))
    proto.graph.node[1].attribute[0].g.node[1].name = "inner"
    onnx.save(proto, tmp_path / "m.onnx")
    _, pieces = cut(tmp_path / "m.onnx", tmp_path)
    assert (pieces.computed, pieces.unknown) == ([], ["inner"])


@pytest.mark.slow
def test_resnet20_of_exact_weights_on_avx2(pack: Path, tmp_path: Path) -> None:
    """The figure of onnxruntime's own kernels, on both kinds of CPU; with exact sums it is 30.4 dB."""
    source, feeds = pack / "models" / "cifar_resnet20.onnx", calibration_feeds(pack, "cifar_resnet20", 32)
    settings = {"recipe": {"KERNEL_COSTS": "none"}, "cpu": "avx2", "reduce_range": False, "held_out": 0}
    report = sbonnx.quantize(source, feeds, output=tmp_path / "q.onnx", **settings)  # type: ignore[arg-type]
    assert some(report.metrics).outputs[0].sqnr_db == pytest.approx(SATURATING_DB, abs=0.1)
    assert bool(some(report.metrics).saturating) == target_cpu().exact
    opened, pieces = cut(tmp_path / "q.onnx", tmp_path)
    assert len(pieces.computed) == 20
    (found,), (own,) = (one.run(None, feeds[0]) for one in (pieces, opened))
    assert np.array_equal(found, own) == (not target_cpu().exact)

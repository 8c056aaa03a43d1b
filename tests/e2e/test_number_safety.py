"""Whatever the weights: no scale is 0, denormal, infinite or NaN, no accumulator overflows, every output is finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

import sbonnx
from sbonnx.ops import QDQ
from sbonnx.recipe.keywords import BackendForm
from sbonnx.spec import Array
from tests.support.models import model

CHANNELS = 8
NET = """
agraph (float[N,8,5,5] x) => (float[N,8] y) {
    c1 = Conv <pads = [1,1,1,1]> (x, w1, b1)
    r1 = Relu (c1)
    c2 = Conv <pads = [1,1,1,1]> (r1, w2, b2)
    s = Add (c2, r1)
    p = GlobalAveragePool (s)
    f = Flatten (p)
    y = Gemm (f, w3, b3)
}"""
LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")
BREAKS_FP8 = ["QDQSelectorActionTransformer", "ReluQuantRewrite", "ClipQuantRewrite"]
"""onnxruntime's rewrites that take fp8 for integers; files for TensorRT are run without them."""
ROUNDS_BIASES = "WeightBiasQuantization"

WAYS: dict[str, tuple[BackendForm, dict[str, Any]]] = {
    "onnxruntime": ("onnxruntime", {}),
    "onnxruntime, one scale a weight": ("onnxruntime", {"w_qscheme": "per-tensor-symmetric"}),
    "onnxruntime, affine weights": ("onnxruntime", {"w_qscheme": "per-channel-affine"}),
    "tensorrt": ("tensorrt", {}),
    "tensorrt 10, fp8": ("tensorrt@10", {"bits": "fp8"}),
    "virtual": ("virtual", {}),
    "virtual, 5 bits in blocks": ("virtual", {"bits": "w5a8", "block_size": 16}),
    "virtual, fp8": ("virtual", {"bits": "fp8"}),
}

RNG = np.random.default_rng(0)
PLAIN = RNG.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 8
OTHER = RNG.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 8
ONES = RNG.standard_normal(CHANNELS)
LAST = RNG.standard_normal((CHANNELS, CHANNELS)), RNG.standard_normal(CHANNELS)
FEEDS = [{"x": RNG.standard_normal((1, CHANNELS, 5, 5)).astype(np.float32)} for _ in range(3)]


def channelwise(*factors: float) -> Array:
    """`PLAIN` with its channels times these factors, one after the other, and again."""
    return np.asarray(PLAIN * np.resize(np.array(factors, np.float64), CHANNELS)[:, None, None, None])


def outlier() -> Array:
    weight: Array = PLAIN.copy()
    weight[3, 3, 1, 1] = 1e6
    return weight


TABLE: dict[str, tuple[Array, Array]] = {
    **{f"weights 1e{e}": (PLAIN * 10.0**e, ONES) for e in (-30, -20, -6, 3, 12, 18, 30)},
    **{f"biases 1e{e}": (PLAIN, ONES * 10.0**e) for e in (-20, 4, 10)},
    "all from 1e-30 to 1e10": (channelwise(1e-30, 1e-10, 1e-5, 1, 1e3, 1e10), ONES),
    "weights and biases of one size": (PLAIN * 1e-25, ONES * 1e-25),
    "dead channels": (channelwise(0, 1, 1e-30), ONES),
    "dead and without bias": (channelwise(0, 1), np.zeros(CHANNELS)),
    "constant": (np.full_like(PLAIN, 0.01), np.zeros(CHANNELS)),
    "single outlier": (outlier(), ONES),
    "one bias": (PLAIN, np.array([1e10, *[0.0] * 7])),
    "nothing": (np.zeros_like(PLAIN), np.zeros(CHANNELS)),
}


def built(w1: Array, b1: Array, w2: Array = OTHER, b2: Array = ONES) -> onnx.ModelProto:
    arrays: dict[str, Any] = {"w1": w1, "b1": b1, "w2": w2, "b2": b2, "w3": LAST[0], "b3": LAST[1]}
    wanted: dict[str, Any] = {name: np.asarray(value, np.float32) for name, value in arrays.items()}
    return model(NET, **wanted)


def scales(quantized: onnx.ModelProto) -> dict[str, Array]:
    """Every scale of the file, by name, float64."""
    values = {tensor.name: tensor for tensor in quantized.graph.initializer}
    names = {node.input[1] for node in quantized.graph.node if node.op_type in QDQ}
    return {name: numpy_helper.to_array(values[name]).astype(np.float64) for name in sorted(names)}


def outputs(proto: onnx.ModelProto, level: str, without: list[str]) -> Array:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    runner = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"], disabled_optimizers=without
    )
    return np.concatenate([runner.run(None, feeds)[0] for feeds in FEEDS])


def check(proto: onnx.ModelProto, way: str) -> None:
    """Scales, biases and outputs at every level of a model that was quantized in one of the `WAYS`."""
    backend, wishes = WAYS[way]
    report = sbonnx.quantize(proto, FEEDS, backend=backend, verify=False, **wishes)
    assert report.quantized is not None
    normal = (2.0**-14, 65504.0) if backend.startswith("tensorrt") else (2.0**-126, 2.0**126)
    for name, scale in scales(report.quantized).items():
        assert np.isfinite(scale).all() and scale.min() >= normal[0] and scale.max() <= normal[1], name
    for tensor in report.quantized.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT32 and tensor.name.endswith("_quantized"):
            assert np.abs(numpy_helper.to_array(tensor).astype(np.int64)).max() < 2**31 - 1
    reference = outputs(proto, "ORT_ENABLE_BASIC", []).astype(np.float64)
    assert np.isfinite(reference).all()
    without = [ROUNDS_BIASES, *(BREAKS_FP8 if "fp8" in way else [])] if backend.startswith("tensorrt") else []
    noise = 0.35 if "fp8" in way or "5 bits" in way else 0.12
    for level in LEVELS:
        found = outputs(report.quantized, level, without)
        assert np.isfinite(found).all(), level
        error = np.sqrt(np.mean((found - reference) ** 2))
        assert error <= noise * np.sqrt(np.mean(reference**2)), (level, error)


@pytest.mark.sampled
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", TABLE)
def test_hostile_weights(case: str, way: str) -> None:
    check(built(*TABLE[case]), way)


@pytest.mark.sampled
@pytest.mark.parametrize("way", ["onnxruntime", "onnxruntime, one scale a weight", "tensorrt"])
@pytest.mark.parametrize("case", TABLE)
def test_hostile_weights_behind_quantized_layers(case: str, way: str) -> None:
    """The same in the second layer, beside a residual branch."""
    w2, b2 = TABLE[case]
    check(built(OTHER, ONES, w2, b2), way)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS)
def test_one_weight_in_two_layers(way: str) -> None:
    """The bias of one layer would cost the other its resolution."""
    for size in (1e3, 1e7, 1e10):
        check(built(PLAIN, ONES * size, PLAIN, ONES), way)


EXPONENTS = st.lists(st.integers(-30, 30) | st.just(-400), min_size=CHANNELS, max_size=CHANNELS)
"""Powers of ten; -400 makes a dead channel."""


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    weights=EXPONENTS.filter(lambda found: max(found) < 20),
    biases=st.lists(st.integers(-20, 10), min_size=CHANNELS, max_size=CHANNELS),
    way=st.sampled_from(list(WAYS)),
)
def test_any_channels(weights: list[int], biases: list[int], way: str) -> None:
    factors = [10.0**e for e in weights]
    check(built(channelwise(*factors), ONES * 10.0 ** np.array(biases, np.float64)), way)


def test_a_mean_that_is_nothing_beside_its_input() -> None:
    """onnxruntime's QLinearGlobalAveragePool refuses to run where the scales are 2^8 or more apart."""
    sign = np.where(np.indices((5, 5)).sum(axis=0) % 2, 1.0, -1.0)
    sign[2, 2] = 0
    sign /= np.abs(sign).sum()
    text = "agraph (float[N,8,5,5] x) => (float[N,8] y) { c = Conv (x, w, b) p = GlobalAveragePool (c) f = Flatten (p) "
    text += "y = Gemm (f, w3, b3) }"
    for size in (1e6, 1e-9):
        eye = np.eye(CHANNELS, dtype=np.float32)[:, :, None, None] * np.float32(size)
        proto = model(
            text, w=eye, b=np.zeros(CHANNELS, np.float32), w3=LAST[0].astype(np.float32), b3=LAST[1].astype(np.float32)
        )
        balanced = [{"x": np.broadcast_to(sign, (1, CHANNELS, 5, 5)).astype(np.float32) * (n + 1)} for n in range(3)]
        report = sbonnx.quantize(proto, balanced, backend="onnxruntime")
        assert report.quantized is not None
        assert "QLinearGlobalAveragePool" not in str(report.problems)


def test_sums_over_many_values_fit() -> None:
    """100000 products of full codes are more than int32 holds: the scale of the weights gives way."""
    text = "agraph (float[N,100000] x) => (float[N,8] y) { h = Gemm (x, w, b) y = Relu (h) }"
    weight = np.ones((100000, 8), np.float32)
    proto = model(text, w=weight, b=np.ones(8, np.float32))
    feeds = [{"x": np.full((1, 100000), value, np.float32)} for value in (0.0, 1.0)]
    report = sbonnx.quantize(proto, feeds, backend="onnxruntime", verify=False)
    assert report.quantized is not None
    found = dict(zip(("zero", "one"), (onnxruntime_run(report.quantized, each) for each in feeds), strict=True))
    np.testing.assert_allclose(found["one"], 100001, rtol=0.02)


def onnxruntime_run(proto: onnx.ModelProto, feeds: dict[str, Array]) -> Array:
    runner = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(runner.run(None, feeds)[0])


@pytest.mark.parametrize("way", ["onnxruntime", "tensorrt 10, fp8", "virtual, fp8", "virtual, 5 bits in blocks"])
@pytest.mark.parametrize("case", ["biases 1e10", "dead channels", "weights 1e-30"])
def test_measured_behind_quantized_layers(case: str, way: str) -> None:
    """Weights that were rounded in the stream are rounded again where their scale was chosen anew."""
    backend, wishes = WAYS[way]
    report = sbonnx.quantize(built(*TABLE[case]), FEEDS, backend=backend, asym=True, **wishes)
    assert report.ok, report.problems

"""Which scales are safe, what is raised and what stays float. The whole is proved on files in test_number_safety.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import sbonnx
from sbonnx.calib.qparams.safe_scales import (
    POOL_RATIO,
    limits_for,
    one_sided,
    pooled,
    raised_channels,
    unfit,
    with_headroom,
)
from sbonnx.graph import load
from sbonnx.graph.query import tensors_by_name
from sbonnx.planning import Plan, Reader, Site
from sbonnx.spec import HALF_LIMITS, Bounds, QParams, QuantSpec, ScaleLimits, params_from_bounds
from tests.support.models import model

TENSORRT = HALF_LIMITS
INT8 = QuantSpec()
GEMM = "agraph (float[N,K] x) => (float[N,C] y) { y = Gemm (x, w, b) }"


def site(key: str = "t", spec: QuantSpec = INT8, **more: Any) -> Site:
    values: dict[str, Any] = {"tensor": key, "role": "activation", "readers": (), "why": "", "group": key, **more}
    return Site(key=key, spec=spec, **values)


def bounds(hi: Any, lo: Any = 0.0) -> Bounds:
    hi = np.asarray(hi, np.float32)
    return Bounds(np.broadcast_to(np.float32(lo), hi.shape), hi)


def test_products_of_safe_scales_are_normal() -> None:
    """Of a weight and an activation: the scale of a bias, and what an accumulator is multiplied with."""
    limits = ScaleLimits()
    assert np.float32(limits.least) * np.float32(limits.least) == np.float32(2.0**-126)
    assert np.isfinite(np.float32(limits.most) * np.float32(limits.most))
    assert limits.within(TENSORRT) == TENSORRT == ScaleLimits(2.0**-14, 65504.0)


def test_what_is_near_is_raised_and_what_is_far_stays_float() -> None:
    step = 127 * 2.0**-14
    for top, why in (
        (step, None),
        (step / 3.9, None),
        (step / 4.1, "far below"),
        (127 * 65504.0, None),
        (1e7, "largest"),
    ):
        found = unfit(site(), bounds(top), TENSORRT, "exact")
        assert (found is None) if why is None else (found is not None and why in found), top
    weight = site(spec=QuantSpec(axis=0), role="weight")
    assert unfit(weight, bounds([1.0, 1e-20, 0]), TENSORRT, "exact") is None  # of its channels the widest counts
    assert raised_channels(bounds([1.0, 1e-20, 0]), weight, TENSORRT, "exact") == 1
    assert "throughout the calibration data" in str(unfit(site(), bounds(0.0), TENSORRT, "exact"))
    assert unfit(weight, bounds([0.0, 0.0]), TENSORRT, "exact") is None


def test_fp8_may_be_raised_further() -> None:
    step = 448 * 2.0**-14
    fp8 = site(spec=QuantSpec(kind="fp8"))
    assert unfit(fp8, bounds(step / 60), TENSORRT, "exact") is None
    assert "far below" in str(unfit(fp8, bounds(step / 70), TENSORRT, "exact"))
    params = params_from_bounds(bounds(step / 60), fp8.spec, least=TENSORRT.least)
    x = np.linspace(step / 240, step / 60, 1000, dtype=np.float32)
    assert np.max(np.abs(params.fake_quant(x) - x) / x) <= 2.0**-4


def test_the_ancestors_rule_has_floors_of_its_own() -> None:
    assert unfit(site(), bounds(1e-30), TENSORRT, "sparsebit") is None
    assert raised_channels(bounds([1e-30]), site(spec=QuantSpec(axis=0)), TENSORRT, "sparsebit") == 0


def test_half_precision_tensors_have_its_limits() -> None:
    text = "agraph (float16[N,4] x) => (float16[N,4] y) { y = MatMul (x, w) }"
    tensors = tensors_by_name(load(model(text, w=np.ones((4, 4), np.float16))))
    assert limits_for(Plan(()), tensors["x"]) == HALF_LIMITS


def test_what_loses_its_counterpart() -> None:
    """Weights whose input stays float at every reader, and inputs whose weights all do."""
    a, b = Reader("a", 0), Reader("b", 0)
    sites = (
        site("x", readers=(a,)),
        site("shared", readers=(a, b)),
        site("wa", role="weight", readers=(Reader("a", 1),)),
        site("wb", role="weight", readers=(Reader("b", 1),)),
    )
    plan = Plan(sites, weights_alone=False)
    whole = {one.key: bounds(1.0) for one in sites}

    def lost(*gone: str) -> list[str]:
        left = {key: value for key, value in whole.items() if key not in gone}
        return [one.key for one, _ in one_sided(plan, sites, left)]

    assert lost() == []
    assert lost("wa") == ["x"]
    assert lost("wa", "wb") == ["x", "shared"]
    assert lost("x") == ["wa"]
    assert list(one_sided(replace(plan, weights_alone=True), sites, {})) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    exponents=st.lists(st.integers(-30, 6), min_size=3, max_size=3),
    biases=st.lists(st.integers(-20, 10), min_size=3, max_size=3),
    x_scale=st.sampled_from([2.0**-63, 1e-9, 0.02, 1e4]),
    depth=st.sampled_from([1, 9, 4000, 100000]),
    per_channel=st.booleans(),
)
def test_no_sum_leaves_int32(
    exponents: list[int], biases: list[int], x_scale: float, depth: int, per_channel: bool
) -> None:
    """The worst input there is, against the codes that come out, counted in Python's integers."""
    rng = np.random.default_rng(0)
    weight = (rng.uniform(-1, 1, (depth, 3)) * 10.0 ** np.array(exponents)).astype(np.float32)
    bias = (rng.uniform(0.5, 1, 3) * 10.0 ** np.array(biases, np.float64)).astype(np.float32)
    text = GEMM.replace("K", str(depth)).replace("C", "3")
    tensors = tensors_by_name(load(model(text, w=weight, b=bias)))
    spec = QuantSpec(axis=1 if per_channel else None)
    data = QParams(np.array(x_scale, np.float32), np.array(128, np.uint8), QuantSpec(signed=False, symmetric=False))
    made = params_from_bounds(
        Bounds(weight.min(axis=0), weight.max(axis=0)) if per_channel else Bounds(weight.min(), weight.max()),
        spec,
        least=2.0**-63,
    )
    plan = Plan(
        (
            site("x", data.spec, readers=(Reader("Gemm_0", 0),)),
            site("w", spec, role="weight", readers=(Reader("Gemm_0", 1),)),
            site("b", QuantSpec(32, axis=0), role="bias", readers=(Reader("Gemm_0", 2),), follows=("x", "w")),
        )
    )
    found, refusals, _ = with_headroom(plan, tensors, {"x": data, "w": made})
    if refusals:
        assert "w" not in found and refusals[0].where == "w"
        return
    assert (found["w"].scale >= made.scale).all() or not weight.any()
    codes = np.abs(found["w"].quantize(weight).astype(np.int64)).sum(axis=0)
    scale = (found["x"].scale * found["w"].scale).astype(np.float32).astype(np.float64)
    assert (codes * 128 + np.rint(np.abs(bias.astype(np.float64)) / scale) <= 2**31 - 1).all()


def test_scales_that_need_not_move_do_not() -> None:
    rng = np.random.default_rng(0)
    weight, bias = rng.standard_normal((64, 3)).astype(np.float32), rng.standard_normal(3).astype(np.float32)
    text = GEMM.replace("K", "64").replace("C", "3")
    feeds = [{"x": rng.standard_normal((2, 64)).astype(np.float32)}]
    proto = model(text.replace("y = Gemm (x, w, b)", "h = Gemm (x, w, b) y = Relu (h)"), w=weight, b=bias)
    report = sbonnx.quantize(proto, feeds, backend="onnxruntime", verify=False)
    assert report.counts.biases == 1
    assert not [note for note in report.notes if "scales" in note]


@pytest.mark.parametrize("apart", [2.0**7, 2.0**7.9])
def test_pools_within_the_ratio_run_in_onnxruntime(apart: float) -> None:
    """The bound that `pooled` keeps to, from onnxruntime itself: it runs below 2^8 and refuses from there on."""
    assert POOL_RATIO < 2.0**8
    assert pool_runs(apart)
    assert not pool_runs(2.0**8.1)


def pool_runs(ratio: float) -> bool:
    numbers = {"sx": np.float32(ratio), "sy": np.float32(1), "z": np.array(128, np.uint8)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "sx", "z"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["p"]),
        helper.make_node("QuantizeLinear", ["p", "sy", "z"], ["pq"]),
        helper.make_node("DequantizeLinear", ["pq", "sy", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "pool",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 1, 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in numbers.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    runner = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    try:
        return bool(runner.run(None, {"x": np.ones((1, 8, 1, 1), np.float32)})[0].size)
    except onnxruntime.capi.onnxruntime_pybind11_state.RuntimeException as error:
        assert "out of computation range" in str(error)
        return False


def test_ranges_behind_pools_are_no_finer_than_their_input_allows() -> None:
    text = "agraph (float[1,8,4,4] x) => (float[1,8,1,1] y) { p = GlobalAveragePool (x) y = Relu (p) }"
    tensors = tensors_by_name(load(model(text)))
    node = tensors["p"].inputs[0].name
    sites = (site("x", readers=(Reader(node, 0),)), site("p", group="g"), site("other", group="g"))
    wide = {"x": bounds(100.0, -100.0), "p": bounds(1e-3), "other": bounds(1e-3)}
    found = pooled(sites, {**tensors, "other": tensors["x"]}, wide)
    assert found["x"] is wide["x"]
    for key in ("p", "other"):
        np.testing.assert_allclose([found[key].lo, found[key].hi], [-100 / 128, 100 / 128], rtol=1e-6)
    enough = {**wide, "p": bounds(50.0)}
    assert pooled(sites[:2], tensors, enough)["p"] is enough["p"]

"""Experts are rounded by the rows that the router sends to them: as MoE, on gathered rows, and on masked rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import onnx
import pytest

from sbonnx.backends.onnxruntime import backend as ort
from sbonnx.calib.qparams.solve import weights_alone
from sbonnx.graph import to_proto
from sbonnx.linear.im2col import Geometry
from sbonnx.linear.layer import LinearLayer
from sbonnx.moments import MomentSums
from sbonnx.planning import Solution
from sbonnx.reconstruct.layer_inputs import layers_of
from sbonnx.reconstruct.routed_layers import routed
from sbonnx.reconstruct.unrolled_experts import unroll
from sbonnx.report import Refusal
from sbonnx.spec import Array
from sbonnx.stages.state import Prepared, reconstruction_of, round_by_site
from tests.export import test_experts as kernels
from tests.support.calibration import calibrate
from tests.support.models import model, run
from tests.support.writing import prepared

HIDDEN, INNER, EXPERTS, ACTIVE = 32, 48, 3, 2
IDLE: Final = 2
"""Expert with a score that is always the lowest."""

SETTINGS: Final = {"mode": "weight_only", "w_bit": 3, "rounding": "gptq", "MIN_WEIGHT_SIZE": 0}

ROUTER = "s0 = MatMul(x, r) s = Add(s0, rb) p = Softmax <axis = -1> (s) b, i = TopK <axis = -1> (p, k) t = Sub(x, x)"
MASKED = """m{e} = Gather <axis = 1> (g, n{e}) h{e} = MatMul(x, u{e}) a{e} = Relu(h{e}) o{e} = MatMul(a{e}, v{e})
    y{e} = Mul(o{e}, m{e}) t{e} = Add({before}, y{e})"""
GATHERED = """q{e} = Equal(i, n{e}) z{e} = NonZero(q{e}) d{e} = Gather <axis = 0> (z{e}, zero) w{e} = Transpose(z{e})
    x{e} = Gather <axis = 0> (x, d{e}) h{e} = MatMul(x{e}, u{e}) a{e} = Relu(h{e}) o{e} = MatMul(a{e}, v{e})
    f{e} = GatherND(b, w{e}) m{e} = Unsqueeze(f{e}, one) y{e} = Mul(o{e}, m{e}) c{e} = Unsqueeze(d{e}, one)
    t{e} = ScatterND <reduction = "add"> ({before}, c{e}, y{e})"""


def weights() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shapes = {f"u{e}": (HIDDEN, INNER) for e in range(EXPERTS)} | {f"v{e}": (INNER, HIDDEN) for e in range(EXPERTS)}
    stored = {name: rng.standard_normal(shape, np.float32) / 6 for name, shape in shapes.items()}
    router = {"r": rng.standard_normal((HIDDEN, EXPERTS), np.float32) / 2, "rb": np.array([0, 0, -100], np.float32)}
    return {**stored, **router, "k": np.array([ACTIVE])}


def loop(form: str) -> onnx.ModelProto:
    text = MASKED if form == "masked" else GATHERED
    parts = [text.format(e=e, before=f"t{e - 1}" if e else "t") for e in range(EXPERTS)]
    start = ROUTER + ("\nn = Sub(p, p) g = ScatterElements <axis = 1> (n, i, b)" if form == "masked" else "")
    numbers: dict[str, Any] = {f"n{e}": np.array([e]) for e in range(EXPERTS)} | {
        "zero": np.array(0),
        "one": np.array([1]),
    }
    body = "\n".join((start, *parts, f"y = Identity(t{EXPERTS - 1})"))
    proto = model(f"agraph (float[N,{HIDDEN}] x) => (float[N,{HIDDEN}] y) {{ {body} }}", **weights(), **numbers)
    for node in proto.graph.node:
        node.name = node.output[0]
    return proto


def operator() -> onnx.ModelProto:
    stored = weights()
    whole = {"w1": "u", "w2": "v"}
    return kernels.mixture(
        {name: np.stack([stored[f"{letter}{e}"].T for e in range(EXPERTS)]) for name, letter in whole.items()}
    )


def feeds(form: str, seed: int) -> list[dict[str, Array]]:
    """Rows whose channels are correlated; with their scores for the operator."""
    rng = np.random.default_rng(seed)
    stored = weights()
    rows = [rng.standard_normal((24, HIDDEN), np.float32).cumsum(axis=1) / 4 for _ in range(12)]
    return [{"x": x} | ({"scores": x @ stored["r"] + stored["rb"]} if form == "operator" else {}) for x in rows]


def with_weights(proto: onnx.ModelProto, ready: Prepared, solution: Solution) -> onnx.ModelProto:
    """The model with dequantized weights."""
    sites = {site.tensor: site for site in ready.plan.of_role("weight")}
    changed = onnx.ModelProto()
    changed.CopyFrom(proto)
    for tensor in changed.graph.initializer:
        if tensor.name in sites:
            values = solution.dequantized(sites[tensor.name], np.float32)
            assert values is not None and values.shape == tuple(tensor.dims)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return changed


@pytest.mark.slow
@pytest.mark.skipif(not ort.has_experts(), reason="QMoE of this onnxruntime is older")
@pytest.mark.parametrize("form", ["operator", "masked", "gathered"])
def test_experts_are_rounded_by_rows_routed_to_them(form: str) -> None:
    proto = operator() if form == "operator" else loop(form)
    ready = prepared(proto, **SETTINGS)
    data, other = feeds(form, 0), feeds(form, 1)[0]
    solution = calibrate(ready.graph, ready.plan, data, rounding=reconstruction_of(ready), solve=round_by_site)
    nearest = weights_alone(ready.graph, ready.plan, round_by_site)
    expected = run(proto, other)["y"]
    errors = [
        np.square(run(with_weights(proto, ready, some), other)["y"] - expected).sum() for some in (solution, nearest)
    ]
    assert errors[0] < 0.6 * errors[1]
    idle: list[Refusal] = [refusal for refusal in solution.refusals if refusal.code == "expert-never-reached"]
    assert len(idle) == 2 and all(str(IDLE) in refusal.where for refusal in idle)
    assert not [refusal for refusal in solution.refusals if refusal not in idle]


@pytest.mark.parametrize("form", ["masked", "gathered"])
def test_gates_of_loops_over_experts(form: str) -> None:
    ready = prepared(loop(form), **SETTINGS)
    layers, _ = layers_of(ready.graph, ready.plan, correct=False)
    gates = {layer.site.tensor: (layer.gate, layer.alone) for layer in routed(ready.graph, layers)}
    selects = form == "gathered"
    expected = {f"{name}{e}": (f"m{e}", selects) for name in "uv" for e in range(EXPERTS)}
    assert {name: gates[name] for name in expected} == expected
    assert gates.get("r", (None, False)) == (None, False)
    bits = {site.tensor: site.spec.bits for site in ready.plan.sites}
    assert (bits["r"], bits["u0"]) == (8, 3), "the router decides which experts run"


@pytest.mark.parametrize(
    "attributes",
    [
        {"activation_type": "gelu"},
        {"activation_type": "silu", "normalize_routing_weights": 1},
        {"activation_type": "relu"},
        {"activation_type": "identity", "k": 1},
        {"activation_type": "swiglu", "swiglu_fusion": 1, "swiglu_limit": 0.3, "activation_beta": 1.0},
        {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.7, "normalize_routing_weights": 1},
    ],
)
def test_the_loop_computes_what_the_kernel_does(attributes: dict[str, Any]) -> None:
    fused = 2 if "swiglu_fusion" in attributes else 1
    proto = kernels.mixture(kernels.random_weights(fused), **attributes)
    ready = prepared(proto, **SETTINGS)
    loops = unroll(ready.graph, ready.plan)
    assert {len(parts) for parts in loops.parts.values()} == {kernels.EXPERTS}
    np.testing.assert_allclose(
        run(to_proto(loops.graph), kernels.feed())["y"], run(proto, kernels.feed())["y"], atol=1e-6
    )


def test_rows_have_weights_in_moments() -> None:
    rng = np.random.default_rng(0)
    x, factors = rng.standard_normal((1, 20, 8), np.float32), rng.random(20)
    layer = LinearLayer.of_shape("MatMul", {}, (8, 4))
    assert isinstance(layer, LinearLayer)
    sums = MomentSums(Geometry(layer), two_streams=False)
    sums.add(x, sample=0, weights=factors)
    moments = sums.moments()
    np.testing.assert_allclose(moments.a[0], (x[0].T * factors) @ x[0], rtol=1e-5, atol=1e-6)
    assert moments.rows == pytest.approx(factors.sum())

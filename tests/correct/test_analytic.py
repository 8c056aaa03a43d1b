"""Analytic bias correction, held against onnxruntime on inputs that are what batch norms expect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sbonnx
from tests.support.models import model, run

RNG = np.random.default_rng(11)

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "conv": ("Conv", {"w": (5, 4, 3, 3)}),
    "conv with bias": ("Conv", {"w": (5, 4, 3, 3), "b": 5}),
    "grouped": ("Conv <group = 2>", {"w": (6, 2, 3, 3)}),
    "depthwise": ("Conv <group = 4>", {"w": (8, 1, 3, 3)}),
    "transposed": ("ConvTranspose <strides = [2,2]>", {"w": (4, 5, 2, 2)}),
    "transposed, grouped": ("ConvTranspose <group = 2, strides = [2,2]>", {"w": (4, 3, 2, 2), "b": 6}),
}


def quantized(text: str, weights: dict[str, Any], feeds: list[dict[str, Any]] | None, **more: Any) -> Any:
    proto = model(text, **weights)
    wishes: dict[str, Any] = {"bits": "w3a0", "W.ROUNDING.TYPE": "nearest", "BIAS_CORRECTION": "analytic"}
    wishes |= {"SCHEDULE.FUSE_BN": False, **more}
    report = sbonnx.quantize(proto, feeds, backend="virtual", verify=False, **wishes)
    assert report.quantized is not None
    return proto, report


def numbers(channels: int = 4) -> dict[str, Any]:
    return {end: RNG.uniform(0.5, 1.5, channels).astype(np.float32) for end in "gtmv"}


@pytest.mark.parametrize("name", LAYERS)
def test_an_input_at_its_mean_gives_the_float_output(name: str) -> None:
    """A batch norm in front, fed its mean everywhere, gives beta everywhere: what the correction reckons with."""
    call, weights = LAYERS[name]
    stats = numbers()
    operands = "n, w, b" if "b" in weights else "n, w"
    text = f"""g (float[N,4,5,5] x) => (float[N,c,h,u] y) {{
        n = BatchNormalization (x, g, t, m, v)
        y = {call} ({operands})
    }}"""
    x = {"x": np.broadcast_to(stats["m"].reshape(1, 4, 1, 1), (2, 4, 5, 5)).copy()}
    errors = []
    for way in ("none", "analytic"):
        proto, report = quantized(text, {**weights, **stats}, [x], BIAS_CORRECTION=way)
        errors.append(float(np.abs(run(report.quantized, x)["y"] - run(proto, x)["y"]).max()))
    if name.startswith("transposed"):  # each output is reached by one element of the kernel: right on average
        found, reference = run(report.quantized, x)["y"], run(proto, x)["y"]
        axes = (0, 2, 3)
        np.testing.assert_allclose(found.mean(axis=axes), reference.mean(axis=axes), rtol=1e-4, atol=1e-4)
    else:
        assert errors[1] < 1e-4 < 1e-2 < errors[0], errors


def test_a_linear_layer_behind_a_rectified_pool() -> None:
    """No data at all: weight_only, on a network whose inputs are what its batch norm says."""
    stats = numbers(8)
    text = """g (float[N,8,6,6] x) => (float[N,5] y) {
        n = BatchNormalization (x, g, t, m, v)
        r = Relu (n)
        p = GlobalAveragePool (r)
        f = Flatten (p)
        y = Gemm <transB = 1> (f, w)
    }"""
    noise = RNG.standard_normal((400, 8, 6, 6)).astype(np.float32)
    x = {"x": (noise * np.sqrt(stats["v"]).reshape(1, 8, 1, 1) + stats["m"].reshape(1, 8, 1, 1)).astype(np.float32)}
    means = []
    for way in ("none", "analytic"):
        proto, report = quantized(text, {"w": (5, 8), **stats}, None, MODE="weight_only", BIAS_CORRECTION=way)
        means.append(np.abs((run(report.quantized, x)["y"] - run(proto, x)["y"]).mean(axis=0)).max())
    assert means[1] < 0.1 * means[0], means
    assert any("1 biases were corrected" in note for note in report.notes)


def test_what_is_not_known_is_named() -> None:
    text = "g (float[N,4,5,5] x) => (float[N,c,h,u] y) { y = Conv (x, w) }"
    _, report = quantized(text, {"w": (5, 4, 3, 3)}, [{"x": np.ones((1, 4, 5, 5), np.float32)}])
    (said,) = [refusal for refusal in report.refusals if refusal.what == "correct bias"]
    assert said.why == "no batch norm says what its input is on average"

"""What stays float32 for its values: judged by onnxruntime's own numbers, and by rounding the values themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.calib.sketches import Sketch
from sbonnx.planning.magnitudes import KINDS
from sbonnx.precision.representable import exactly, misfit, rounding_db
from sbonnx.precision.tensor_magnitudes import magnitudes_of
from tests.precision.converting import assert_few_casts, convert, made, normal, ops_by_type, types, whys
from tests.support.models import model, run


@settings(max_examples=80, deadline=None)
@given(exponent=st.floats(-9, 4), spread=st.floats(1, 6), seed=st.integers(0, 1000), kind=st.sampled_from(list(KINDS)))
def test_the_noise_of_a_histogram_is_that_of_its_values(exponent: float, spread: float, seed: int, kind: str) -> None:
    """Within 3 dB of rounding the values themselves: the histogram knows octaves."""
    rng = np.random.default_rng(seed)
    x = (np.sign(rng.standard_normal(40_000)) * 10.0 ** (exponent - rng.uniform(0, spread, 40_000))).astype(np.float32)
    sketch = Sketch(detail="histogram")
    sketch.observe(x)
    found = magnitudes_of(sketch)
    assert found.count == x.size
    assert found.peak == np.abs(x).max()
    assert found.smallest <= np.abs(x).min() < 2 * found.smallest
    expected = rounding_db(x, KINDS[kind])
    if found.peak < KINDS[kind].largest and expected > 20:
        assert found.sqnr_db(KINDS[kind]) == pytest.approx(expected, abs=3)


def test_magnitudes_of_little_and_of_odd_values() -> None:
    sketch = Sketch(detail="histogram")
    sketch.observe(np.array([0.0, 1.0, -3.0, np.inf, np.nan, 0.0], np.float32))
    found = magnitudes_of(sketch)
    assert (found.lo, found.hi, found.zeros, found.inf, found.nan) == (-3.0, 1.0, 2, 1, 1)
    assert found.between(1.0, 4.0) == 2
    assert found.between(2.0, 4.0) == 1
    assert magnitudes_of(Sketch(detail="histogram")).peak == 0


def test_constants_fit_or_say_why_not() -> None:
    half, brain = KINDS["fp16"], KINDS["bf16"]
    assert misfit(np.array([0.1, -2, np.inf], np.float32), half) is None
    assert misfit(np.zeros(3, np.float32), half) is None
    assert "past 65504" in str(misfit(np.array([7e4], np.float32), half))
    assert misfit(np.array([7e4], np.float32), brain) is None
    assert "past 3.38953e+38" in str(misfit(np.array([-3.4028235e38], np.float32), brain))
    assert "so small" in str(misfit(np.array([1e-12], np.float32), half))
    assert misfit(np.array([1e-12], np.float32), brain) is None
    assert exactly(np.array([0.5, 2.0**-14], np.float32), half)
    assert not exactly(np.array([0.1], np.float32), half)
    assert not exactly(np.array([2.0**-15], np.float32), half)


LARGE = """agraph (float[N,4] x) => (float[N,4] y) {
    a = Mul (x, large)  b = Relu (a)  c = Mul (b, small)  d = Tanh (c)  y = Mul (d, two) }"""


def test_activations_past_the_range_stay() -> None:
    level = "off"
    feeds = normal(8, 4, scale=3)
    proto = model(LARGE, large=np.float32(3e4), small=np.float32(1e-4), two=np.float32(2))
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert kinds["a"] == kinds["b"] == "fp32"
    assert kinds["d"] == "fp16"
    assert any(line.startswith("a: reaches") for line in whys(report)), whys(report)
    out = run(made(report), feeds[0], level=level)["y"]
    assert np.isfinite(out).all()
    assert out == pytest.approx(run(proto, feeds[0])["y"], abs=4e-3)
    assert_few_casts(made(report))
    assert set(types(made(convert(proto, feeds, "bf16"))).values()) >= {"bf16"}
    assert types(made(convert(proto, feeds, "bf16")))["b"] == "bf16"


def test_the_margin_is_two() -> None:
    proto = model("agraph (float[N,2] x) => (float[N,2] y) { a = Mul (x, k)  y = Tanh (a) }", k=np.float32(1))
    for peak, kind in ((32000, "fp16"), (33000, "fp32")):
        report = convert(proto, [{"x": np.array([[peak, -1]], np.float32)}])
        assert types(made(report))["a"] == kind


def test_values_that_would_vanish_stay() -> None:
    proto = model(
        "agraph (float[N,4] x) => (float[N,4] y) { a = Mul (x, s)  b = Neg (a)  c = Mul (b, l)  y = Tanh (c) }",
        s=np.float32(2.0**-24), l=np.float32(2.0**24),
    )  # fmt: skip
    feeds = normal(8, 4)
    report = convert(proto, feeds)
    kinds = types(made(report))
    assert kinds["a"] == kinds["b"] == "fp32"
    assert run(made(report), feeds[1])["y"] == pytest.approx(run(proto, feeds[1])["y"], abs=2e-3)


def test_a_sum_on_the_way_to_a_mean_counts() -> None:
    """GlobalAveragePool of 64 x 64 values of 100 gives 100, and sums to 409,600 on its way."""
    proto = model("agraph (float[N,2,64,64] x) => (float[N,2,1,1] y) { p = GlobalAveragePool (x)  y = Tanh (p) }")
    rng = np.random.default_rng(0)
    large = [{"x": rng.uniform(50, 100, (1, 2, 64, 64)).astype(np.float32)}]
    small = [{"x": rng.uniform(0, 1, (1, 2, 64, 64)).astype(np.float32)}]
    assert any("sums 4096 values" in line for line in whys(convert(proto, large)))
    assert types(made(convert(proto, large)))["p"] == "fp32"
    assert types(made(convert(proto, small)))["p"] == "fp16"


def test_a_sum_of_squares_counts() -> None:
    text = "agraph (float[N,64] x) => (float[N,64] y) { n = LpNormalization <axis = 1, p = 2> (x)  y = Tanh (n) }"
    report = convert(model(text, opset=17), normal(4, 64, scale=100))
    assert any("sums squares" in line for line in whys(report)), whys(report)
    assert ops_by_type(made(report))["LpNormalization"] == {"fp32"}


def test_infinities_are_counted_and_kept() -> None:
    """A mask of -inf is one in half precision too."""
    proto = model(
        "agraph (float[N,4] x, bool[N,4] m) => (float[N,4] y) { w = Where (m, low, x)  y = Softmax (w) }",
        low=np.float32(-np.inf),
    )
    rng = np.random.default_rng(0)
    feeds = [{**feed, "m": rng.random((8, 4)) < 0.3} for feed in normal(8, 4)]
    report = convert(proto, feeds)
    assert types(made(report))["w"] == "fp16"
    assert run(made(report), feeds[0])["y"] == pytest.approx(run(proto, feeds[0])["y"], abs=1e-3, nan_ok=True)

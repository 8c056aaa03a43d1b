"""Gradients of the fake-quant modules: against torch's own learnable fake quantization, and against the slope of the
functions that the formulas are derivatives of (rounding and clipping held where they are), found by differences.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbonnx.spec import Array, QParams, QuantSpec, ScaleLimits

torch = pytest.importorskip("torch")

from sbonnx.qat.fakequant import METHODS, FakeQuant, Role, make_fake_quant, quant_parameters  # noqa: E402
from sbonnx.qat.fakequant.functions import fake_quantize, fake_quantize_learned, positive, whole  # noqa: E402

STEP = 1e-6


def made(method: str, spec: QuantSpec, scale: Array, zero: Array, role: Role = "activation") -> FakeQuant:
    """A module in float64."""
    start = QParams(np.asarray(scale, np.float32), np.asarray(zero, spec.dtype), spec)
    module = make_fake_quant(method, start, name="x", role=role)
    module.double()
    return module


def slope(f: Callable[[Array], Array], at: Array, weigh: Array) -> Array:
    """Derivative of ``sum(weigh * f(v))`` by each value of `at`, by central differences."""
    out = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        moved = [at.copy(), at.copy()]
        moved[0][index] += STEP
        moved[1][index] -= STEP
        out[index] = (weigh * (f(moved[0]) - f(moved[1]))).sum() / (2 * STEP)
    return out


def frozen(x: Array, s: Array, z: Array, qmin: int, qmax: int) -> Callable[[Array, Array, Array], Array]:
    """Fake quantization whose rounding error and clipping are those at (x, s, z): differentiable."""
    left = np.rint(x / s) - x / s
    codes = np.rint(x / s) + z
    low, high = codes < qmin, codes > qmax

    def function(x: Array, s: Array, z: Array) -> Array:
        inside = (x / s + left) * s
        return np.where(low, (qmin - z) * s, np.where(high, (qmax - z) * s, inside))

    return function


def data(rng: np.random.Generator, shape: tuple[int, ...], reach: float) -> Array:
    """Values a good way beyond `reach` on both sides."""
    return rng.uniform(-1.6 * reach, 1.6 * reach, shape)


SCHEMES = [
    QuantSpec(bits=3),
    QuantSpec(bits=4, narrow=True),
    QuantSpec(bits=4, signed=False),
    QuantSpec(bits=4, signed=False, symmetric=False),
    QuantSpec(bits=4, symmetric=False),
    QuantSpec(bits=3, axis=1),
    QuantSpec(bits=3, signed=False, symmetric=False, axis=2),
    QuantSpec(bits=4, symmetric=False, axis=1, block_size=2),
]


def layout(spec: QuantSpec, values: Array, shape: tuple[int, ...]) -> Array:
    """`values` of a scale over a tensor of `shape`, by the layouts of `QParams`."""
    return np.broadcast_to(QParams(np.ones(values.shape, np.float32), values, spec).along(values, shape), shape)


def point(spec: QuantSpec, shape: tuple[int, ...], seed: int) -> tuple[Array, Array, Array, Array]:
    """x, scale, zero point and the gradient that comes in; scales are floats of 32 bits."""
    rng = np.random.default_rng(seed)
    size: tuple[int, ...] = ()
    if spec.axis is not None:
        size = (shape[spec.axis],)
        if spec.block_size is not None:
            size = (*shape[: spec.axis], -(-shape[spec.axis] // spec.block_size), *shape[spec.axis + 1 :])
    scale = rng.uniform(0.2, 0.5, size).astype(np.float32).astype(np.float64)
    middle = (spec.qmin + spec.qmax + 1) // 2
    zero = np.full(size, spec.centre) if spec.symmetric else rng.integers(middle - 2, middle + 3, size)
    reach = 0.35 * (spec.qmax - spec.qmin) / 2
    return data(rng, shape, reach), np.asarray(scale), np.asarray(zero, np.float64), rng.normal(size=shape)


@pytest.mark.parametrize("spec", SCHEMES, ids=QuantSpec.label)
@pytest.mark.parametrize("method", ["uniform", "lsq", "lsq+"])
def test_slopes(method: str, spec: QuantSpec) -> None:
    """dx, dscale and dzero against differences, times 1/sqrt(n qmax) for what is learned."""
    shape = (4, 5, 3)
    x, scale, zero, weigh = point(spec, shape, seed=5)
    module = made(method, spec, scale, zero)
    fed = torch.from_numpy(x).requires_grad_()
    (module(fed) * torch.from_numpy(weigh)).sum().backward()
    wide_scale, wide_zero = (layout(spec, each, shape) for each in (scale, zero))
    f = frozen(x, wide_scale, wide_zero, spec.qmin, spec.qmax)
    outside = (np.rint(x / wide_scale) + wide_zero < spec.qmin) | (np.rint(x / wide_scale) + wide_zero > spec.qmax)
    assert 0.1 < outside.mean() < 0.7
    np.testing.assert_allclose(fed.grad.numpy(), slope(lambda v: f(v, wide_scale, wide_zero), x, weigh), atol=1e-7)
    qmax = spec.qmax - (spec.centre if spec.symmetric else spec.qmin)
    factor = 1 / np.sqrt(x.size / scale.size * qmax)
    learned = dict(module.named_parameters())
    assert (
        set(learned)
        == {
            "uniform": set(),
            "lsq": {"scale"},
            "lsq+": {"scale"} if spec.symmetric else {"scale", "zero_point"},
        }[method]
    )
    if "scale" in learned:
        want = slope(lambda v: f(x, layout(spec, v, shape), wide_zero), scale, weigh)
        np.testing.assert_allclose(learned["scale"].grad.numpy(), factor * want, atol=1e-6)
    if "zero_point" in learned:
        want = slope(lambda v: f(x, wide_scale, layout(spec, v, shape)), zero, weigh)
        np.testing.assert_allclose(learned["zero_point"].grad.numpy(), factor * want, atol=1e-6)


@pytest.mark.parametrize("spec", SCHEMES, ids=QuantSpec.label)
def test_slopes_of_pact(spec: QuantSpec) -> None:
    """The function is a clamp between ends that move with alpha; rounding is no part of it."""
    shape = (4, 5, 3)
    x, scale, zero, weigh = point(spec, shape, seed=6)
    module = made("pact", spec, scale, zero)
    fed = torch.from_numpy(x).requires_grad_()
    (module(fed) * torch.from_numpy(weigh)).sum().backward()
    reach = np.full(scale.shape, spec.qmax - spec.centre, float)
    if not spec.symmetric:
        reach = np.maximum(spec.qmax - zero, zero - spec.qmin)
    alpha = module.alpha.detach().numpy().astype(np.float64)
    np.testing.assert_allclose(alpha, scale * reach, rtol=1e-6)

    def f(x: Array, alpha: Array) -> Array:
        low, high = ((end - zero) / reach * alpha for end in (spec.qmin, spec.qmax))
        return np.clip(x, layout(spec, np.asarray(low), shape), layout(spec, np.asarray(high), shape))

    np.testing.assert_allclose(fed.grad.numpy(), slope(lambda v: f(v, alpha), x, weigh), atol=1e-7)
    want = slope(lambda v: f(x, v), alpha, weigh)
    np.testing.assert_allclose(module.alpha.grad.numpy(), want, atol=1e-6)


def test_pact_as_in_the_paper() -> None:
    """Unsigned codes from zero: dalpha is 1 from alpha on, dx is 1 below it."""
    module = made("pact", QuantSpec(bits=2, signed=False, symmetric=False), np.array(0.5), np.array(0))
    assert module.alpha.item() == 1.5
    x = torch.tensor([-0.1, 0.3, 1.4, 1.5, 1.6, 9.0], dtype=torch.float64, requires_grad=True)
    module(x).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 0, 0, 0]
    assert float(module.alpha.grad) == 3


@pytest.mark.parametrize("magnitude", ["own", "unit"])
def test_slopes_of_dorefa(magnitude: str) -> None:
    """Through the tanh, with the maxima held."""
    spec = QuantSpec(bits=4, axis=0)
    rng = np.random.default_rng(7)
    w, weigh = rng.normal(size=(3, 8)), rng.normal(size=(3, 8))
    start = QParams(np.array([0.1, 0.2, 0.4], np.float32), np.zeros(3, np.int8), spec)
    module = make_fake_quant("dorefa", start, name="w", role="weight", magnitude=magnitude).double()
    fed = torch.from_numpy(w).requires_grad_()
    (module(fed) * torch.from_numpy(weigh)).sum().backward()
    gain = (np.abs(w).max() if magnitude == "own" else 1.0) / np.tanh(np.abs(w).max())
    scale = layout(spec, start.scale.astype(np.float64), w.shape)
    at = np.tanh(w) * gain
    f = frozen(at, scale, np.zeros_like(scale), spec.qmin, spec.qmax)
    want = slope(lambda v: f(np.tanh(v) * gain, scale, np.zeros_like(scale)), w, weigh)
    assert (want == 0).any() and (want != 0).any()
    np.testing.assert_allclose(fed.grad.numpy(), want, atol=1e-7)


def test_dorefa_leaves_activations_as_they_are() -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    start = np.array(0.2), np.array(4)
    x = torch.linspace(-2, 4, 70, dtype=torch.float64)
    assert torch.equal(made("dorefa", spec, *start)(x), made("uniform", spec, *start)(x))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), bits=st.integers(2, 8), zero=st.integers(0, 255))
def test_torchs_learnable_scale_per_tensor(seed: int, bits: int, zero: int) -> None:
    """`torch._fake_quantize_learnable_per_tensor_affine` has the same gradients, away from ties.

    Unsigned codes: torch rounds a zero point by adding a half and cutting off, which moves negative ones by one.
    """
    spec = QuantSpec(bits=bits, signed=False, symmetric=False)
    rng = np.random.default_rng(seed)
    zero %= spec.qmax + 1
    scale = float(np.float32(rng.uniform(0.01, 3)))
    ratio = rng.uniform(spec.qmin - 5, spec.qmax + 5, 300) - zero
    x = (ratio[np.abs(ratio - np.floor(ratio) - 0.5) > 1e-3] * scale).astype(np.float32)
    weigh = torch.from_numpy(rng.normal(size=x.shape).astype(np.float32))
    ends = []
    for function in (fake_quantize_learned, torch._fake_quantize_learnable_per_tensor_affine):
        fed = torch.from_numpy(x).requires_grad_()
        s, z = (torch.tensor([float(each)], requires_grad=True) for each in (scale, zero))
        y = function(fed, s, z, spec.qmin, spec.qmax)
        (y * weigh).sum().backward()
        ends.append((y.detach(), fed.grad, s.grad, z.grad))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-3 * (1 << (bits // 2)))


def test_torchs_learnable_scale_per_channel() -> None:
    rng = np.random.default_rng(11)
    scale, zero = rng.uniform(0.1, 1, 5).astype(np.float32), rng.integers(0, 16, 5).astype(np.float32)
    shape = (1, 5, 1)
    ratio = rng.uniform(-4, 20, (20, 5, 7)) - zero.reshape(shape)
    ratio += np.where(np.abs(ratio - np.floor(ratio) - 0.5) < 1e-2, 0.1, 0)
    x, weigh = (ratio * scale.reshape(shape)).astype(np.float32), torch.randn(20, 5, 7)
    ends = []
    for ours in (True, False):
        fed = torch.from_numpy(x).requires_grad_()
        s, z = (torch.from_numpy(each.copy()).requires_grad_() for each in (scale, zero))
        if ours:
            y = fake_quantize_learned(fed, s.reshape(shape), z.reshape(shape), 0, 15)
        else:
            y = torch._fake_quantize_learnable_per_channel_affine(fed, s, z, 1, 0, 15)
        (y * weigh).sum().backward()
        ends.append((y.detach(), fed.grad, s.grad, z.grad))
    for mine, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_the_ends_are_inside() -> None:
    """The highest and the lowest code keep their gradient, per tensor and per channel."""
    x = torch.tensor([-8.6, -8.4, -8.0, 7.0, 7.4, 7.6], requires_grad=True)
    fake_quantize(x, torch.tensor(1.0), torch.tensor(0.0), -8, 7).sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 1, 0]


def test_scales_stay_positive_and_can_come_back() -> None:
    """Descent on |s - 1|² from any side of zero, and from zero itself, ends at 1."""
    for start in (-3.0, -1e-30, 0.0, 1e-30, 5.0):
        s = torch.tensor(start, requires_grad=True)
        for _ in range(200):
            (grad,) = torch.autograd.grad((positive(s, 2.0**-63, 2.0**63) - 1).square(), s)
            with torch.no_grad():
                s -= 0.05 * grad
        assert abs(abs(float(s.detach())) - 1) < 1e-3
    assert torch.equal(positive(torch.tensor([-2.0, 0.0, 9.0]), 0.5, 4.0), torch.tensor([2.0, 0.5, 4.0]))


def test_zero_points_never_leave_for_good() -> None:
    """Outside the codes, and on their ends, only what leads back has a gradient."""
    z = torch.tensor([-3.0, 0.0, 7.5, 15.0, 40.0], requires_grad=True)
    assert whole(z, 0, 15).tolist() == [0, 0, 8, 15, 15]
    for sign, want in ((1.0, [0, 0, 1, 1, 1]), (-1.0, [1, 1, 1, 0, 0])):
        (grad,) = torch.autograd.grad((sign * whole(z, 0, 15)).sum(), z)
        assert (grad * sign).tolist() == want


@pytest.mark.parametrize("method", METHODS)
def test_gradients_of_signed_and_unsigned_codes_agree(method: str) -> None:
    """One grid with two ways to write its codes learns in one way."""
    x = torch.linspace(-3, 5, 64, dtype=torch.float64)
    ends = []
    for signed, zero in ((True, -3), (False, 5)):
        spec = QuantSpec(bits=4, signed=signed, symmetric=False)
        module, fed = made(method, spec, np.array(0.3), np.array(zero)), x.clone().requires_grad_()
        (module(fed) * x.cos()).sum().backward()
        ends.append([fed.grad, *(p.grad for p in module.parameters())])
    for signed_grad, unsigned_grad in zip(*ends, strict=True):
        torch.testing.assert_close(signed_grad, unsigned_grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives_pass_too(method: str) -> None:
    """Straight through twice: the Hessian of sum y² / 2 is 1 inside the range and 0 outside."""
    module = made(method, QuantSpec(bits=4), np.array(0.5), np.array(0))
    x = torch.tensor([-9.0, -1.2, 0.3, 2.2, 8.0], dtype=torch.float64)
    v = torch.arange(1.0, 6.0, dtype=torch.float64)
    _, product = torch.autograd.functional.hvp(lambda x: module(x).square().sum() / 2, x, v)
    assert product.tolist() == [0, 2, 3, 4, 0]


def test_limits_hold_in_training_too() -> None:
    spec = QuantSpec(bits=4)
    start = QParams(np.float32(1e-6).reshape(()), np.zeros((), np.int8), spec)
    module = make_fake_quant("lsq", start, name="x", role="activation", limits=ScaleLimits(2.0**-14, 65504.0))
    module(torch.ones(5)).sum().backward()
    assert module(torch.ones(1)).item() == 7 * 2.0**-14
    assert float(module.scale.grad) > 0


def test_parameters_for_a_group_of_their_own() -> None:
    spec = QuantSpec(bits=4, signed=False, symmetric=False)
    start = QParams(np.ones((), np.float32), np.zeros((), np.uint8), spec)
    kinds = {name: make_fake_quant(name, start, name=name, role="activation") for name in METHODS}
    net = torch.nn.ModuleDict({**{f"a {key}": each for key, each in kinds.items()}, "dense": torch.nn.Linear(2, 2)})
    net["again"] = kinds["lsq"]
    found = quant_parameters(net)
    assert [name for name, _ in found] == ["a lsq.scale", "a lsq+.scale", "a lsq+.zero_point", "a pact.alpha"]
    assert found[0][1] is kinds["lsq"].scale
    assert [name for name, _ in quant_parameters(kinds["pact"])] == ["alpha"]

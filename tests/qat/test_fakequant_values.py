"""Values of the fake-quant modules against `QParams`, bit for bit, and against torch's own function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sbonnx.spec import Array, QParams, QuantSpec, ScaleLimits

torch = pytest.importorskip("torch")

from sbonnx.qat.fakequant import METHODS, make_fake_quant  # noqa: E402
from sbonnx.qat.fakequant.functions import fake_quantize  # noqa: E402

PER_WEIGHT = {"uniform", "lsq", "lsq+", "dorefa"}
FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=False)
SCALES = st.floats(min_value=float(np.float32(1e-9)), max_value=1e9, width=32)


def bits_of(values: Array) -> Array:
    """The bits of float32, so that -0 and 0 differ."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@st.composite
def specs(draw: Any, rank: int) -> QuantSpec:
    """Any spec but fp8 for a tensor of `rank`."""
    axis = draw(st.sampled_from([None, *range(rank)]))
    summed = draw(st.permutations([at for at in range(rank) if at != axis]))
    if summed and draw(st.booleans()):
        return QuantSpec(axis=axis, pairs=tuple(summed))
    block = None if axis is None else draw(st.sampled_from([None, 1, 2, 3]))
    return QuantSpec(
        bits=draw(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 16])),
        signed=draw(st.booleans()),
        symmetric=draw(st.booleans()),
        axis=axis,
        block_size=block,
        narrow=draw(st.booleans()),
    )


@st.composite
def cases(draw: Any) -> tuple[QParams, Array]:
    """Scale, zero point and a tensor with values on and beside the middles between two codes."""
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=5))
    spec = draw(specs(len(shape)))
    size: tuple[int, ...] = ()
    if spec.axis is not None:
        count = -(-shape[spec.axis] // (spec.block_size or 1))
        size = (count,) if spec.block_size is None else (*shape[: spec.axis], count, *shape[spec.axis + 1 :])
    scale = draw(hnp.arrays(np.float32, size, elements=SCALES))
    zero = np.full(size, spec.centre, spec.dtype)
    if not spec.symmetric:
        zero = draw(hnp.arrays(spec.dtype, size, elements=st.integers(spec.qmin, spec.qmax)))
    qparams = QParams(scale, zero, spec)
    x = draw(hnp.arrays(np.float32, shape, elements=FLOATS))
    if draw(st.booleans()):
        halves = draw(hnp.arrays(np.int32, shape, elements=st.integers(-2 * spec.qmax - 5, 2 * spec.qmax + 5)))
        x = halves.astype(np.float32) / 2 * qparams.along(scale, shape)
    if draw(st.booleans()):
        x = np.nextafter(x, np.float32(draw(st.sampled_from([-1e38, 1e38]))))
    return qparams, np.asarray(x, np.float32)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_evaluation_is_the_files_arithmetic(method: str, case: tuple[QParams, Array]) -> None:
    qparams, x = case
    assume(method != "pact" or not qparams.spec.pairs)  # is for activations only, which have no such limits
    module = make_fake_quant(method, qparams, name="x", role="activation").eval()
    found = module.qparams()
    assert found.spec == qparams.spec and found.zero_point.dtype == qparams.spec.dtype
    assert np.array_equal(found.zero_point, qparams.zero_point)
    if method == "pact":  # goes through alpha = scale * codes and back
        np.testing.assert_allclose(found.scale, qparams.scale, rtol=2e-7)
    else:
        assert np.array_equal(found.scale, qparams.scale)
    got = module(torch.from_numpy(x.copy()))
    assert got.dtype == torch.float32 and got.shape == x.shape
    assert np.array_equal(bits_of(got.detach().numpy()), bits_of(found.fake_quant(x)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("method", sorted(PER_WEIGHT))
@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_exported_weights_are_the_trained_ones(method: str, case: tuple[QParams, Array]) -> None:
    """`export_weight`, `qparams` and `codes` say the same as the forward pass."""
    qparams, x = case
    assume(np.isfinite(x).all() and np.abs(x).max(initial=0.0) < 1e30)
    module = make_fake_quant(method, qparams, name="w", role="weight").eval()
    got = module(torch.from_numpy(x.copy())).detach().numpy()
    weight = module.export_weight(torch.from_numpy(x.copy()))
    assert np.array_equal(bits_of(got), bits_of(module.qparams().fake_quant(weight)))
    codes = module.codes(torch.from_numpy(x.copy()))
    assert codes.dtype == qparams.spec.dtype and codes.shape == x.shape
    assert np.array_equal(codes, module.qparams().quantize(weight))
    assert codes.size == 0 or (codes.min() >= qparams.spec.qmin and codes.max() <= qparams.spec.qmax)


@pytest.mark.parametrize("method", METHODS)
def test_training_computes_the_same_values(method: str) -> None:
    """The mode changes what NaN becomes, nothing else."""
    spec = QuantSpec(bits=4, signed=False, symmetric=False, axis=1)
    qparams = QParams(np.array([0.1, 0.3, 2.0], np.float32), np.array([0, 3, 15], np.uint8), spec)
    module = make_fake_quant(method, qparams, name="x", role="activation")
    x = torch.linspace(-9, 9, 120).reshape(8, 3, 5)
    assert torch.equal(module.train()(x), module.eval()(x))
    x[0, 0, 0] = torch.nan
    assert module.train()(x)[0, 0, 0].isnan()
    assert module.eval()(x)[0, 0, 0] == 0


def test_torch_agrees_away_from_ties() -> None:
    """torch multiplies by the reciprocal, which differs in the last bit: nowhere near a tie here."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=4000).astype(np.float32))
    scale, zero = torch.tensor(0.037), torch.tensor(11)
    ratio = x / scale
    x = x[(ratio - ratio.floor() - 0.5).abs() > 1e-3]
    ours = fake_quantize(x, scale, zero.float(), 0, 63)
    theirs = torch.fake_quantize_per_tensor_affine(x, scale, zero.int(), 0, 63)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert ours.unique().numel() == 64


@pytest.mark.parametrize("method", METHODS)
def test_switched_off(method: str) -> None:
    spec = QuantSpec(bits=2)
    qparams = QParams(np.float32(0.5).reshape(()), np.zeros((), np.int8), spec)
    module = make_fake_quant(method, qparams, name="x", role="activation")
    x = torch.linspace(-3, 3, 50)
    assert not torch.equal(module(x), x)
    module.enabled = False
    assert module(x) is x
    assert "off" in repr(module)


def test_export_keeps_scales_in_their_limits() -> None:
    """Whatever an optimizer makes of a parameter, the file gets a positive scale of allowed size."""
    spec = QuantSpec(bits=4, signed=False, symmetric=False, axis=0)
    qparams = QParams(np.ones(5, np.float32), np.full(5, 7, np.uint8), spec)
    limits = ScaleLimits(2.0**-14, 65504.0)
    for method in ("lsq", "lsq+", "pact"):
        module = make_fake_quant(method, qparams, name="x", role="activation", limits=limits).eval()
        with torch.no_grad():
            parameter = module.alpha if method == "pact" else module.scale
            parameter.copy_(torch.tensor([-2.0, 0.0, -1e-9, 1e9, float("inf")]))
            if method == "lsq+":
                module.zero_point.copy_(torch.tensor([-40.0, 2.5, 3.5, 99.0, 7.4]))
        found = module.qparams()
        first = 2.0 / 8 if method == "pact" else 2.0
        assert found.scale.tolist() == [first, 2.0**-14, 2.0**-14, 65504.0, 65504.0]
        if method == "lsq+":
            assert found.zero_point.tolist() == [0, 2, 4, 15, 7]
        x = np.linspace(-30, 30, 100, dtype=np.float32).reshape(5, 20)
        assert np.array_equal(bits_of(module(torch.from_numpy(x)).detach().numpy()), bits_of(found.fake_quant(x)))


def test_the_start_is_a_copy() -> None:
    """Training must not change the solution it began from."""
    spec = QuantSpec(axis=0)
    qparams = QParams(np.ones(3, np.float32), np.zeros(3, np.int8), spec)
    module = make_fake_quant("lsq", qparams, name="w", role="weight")
    with torch.no_grad():
        module.scale.mul_(3)
    assert qparams.scale.tolist() == [1, 1, 1]
    module.qparams().scale[:] = 9
    assert module.scale.tolist() == [3, 3, 3]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs torch with CUDA")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", [None, 3])
def test_a_gpu_computes_the_same(method: str, block: int | None) -> None:
    """Values bit for bit, gradients up to the order of sums, and those the same in every run."""
    spec = QuantSpec(bits=4, signed=False, symmetric=False, axis=1, block_size=block)
    rng = np.random.default_rng(0)
    shape = (6,) if block is None else (64, 2, 50)
    qparams = QParams(rng.uniform(0.05, 0.3, shape).astype(np.float32), rng.integers(0, 16, shape, np.uint8), spec)
    x = rng.normal(size=(64, 6, 50)).astype(np.float32)
    ends = []
    for device in ("cpu", "cuda", "cuda"):
        module = make_fake_quant(method, qparams, name="x", role="activation").to(device)
        fed = torch.from_numpy(x).to(device).requires_grad_()
        y = module(fed)
        (y * y.detach().sin()).sum().backward()
        grads = [fed.grad, *(p.grad for p in module.parameters())]
        ends.append([y.detach().cpu(), *(g.cpu() for g in grads)])
    assert torch.equal(ends[0][0], ends[1][0])
    for here, there, again in zip(*ends, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4)
        assert torch.equal(there, again)

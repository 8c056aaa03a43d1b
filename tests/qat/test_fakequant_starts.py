"""Where training begins: the ancestor's golden values, the formulas of the papers, and data that has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sbonnx.errors import DataError, NumericError, RecipeError
from sbonnx.spec import Array, Bounds, QParams, QuantSpec, params_from_bounds

torch = pytest.importorskip("torch")

from sbonnx.qat.fakequant import METHODS, FakeQuant, Role, make_fake_quant  # noqa: E402

W4 = QuantSpec(bits=4, axis=0)
A4 = QuantSpec(bits=4, signed=False, symmetric=False)


def golden_weights() -> Array:
    """(3, 2, 3, 3), values -0.7 to 0.7: ((17 j mod 29) - 14) / 20."""
    return (((17 * np.arange(54) % 29) - 14) / 20).astype(np.float32).reshape(3, 2, 3, 3)


def golden_activations() -> Array:
    """(4, 8, 8, 8): 4 t^3 with t = ((37 i) mod 1009) / 504.5 - 0.8, times 1 + 0.25 n for sample n."""
    t = (37 * np.arange(2048) % 1009) / 504.5 - 0.8
    x = (4 * t**3).reshape(4, 8, 8, 8) * (1 + 0.25 * np.arange(4)).reshape(4, 1, 1, 1)
    return x.astype(np.float32)


def blank(spec: QuantSpec, shape: tuple[int, ...]) -> QParams:
    return QParams(np.ones(shape, np.float32), np.full(shape, spec.centre, spec.dtype), spec)


def started(method: str, spec: QuantSpec, x: Array, role: Role, **options: Any) -> FakeQuant:
    """A module begun from `x`."""
    shape = () if spec.axis is None else (x.shape[spec.axis],)
    module = make_fake_quant(method, blank(spec, shape), name="t", role=role, **options)
    module.init_from(torch.from_numpy(x))
    return module


@pytest.mark.parametrize(
    ("method", "options", "scales"),
    [
        ("uniform", {"scale_rule": "sparsebit"}, [0.093333, 0.093333, 0.093333]),
        ("dorefa", {"scale_rule": "sparsebit", "magnitude": "unit"}, [0.133333, 0.133333, 0.133333]),
        ("lsq", {}, [0.289773, 0.260376, 0.281374]),
        ("lsq+", {}, [0.180587, 0.167352, 0.177390]),
    ],
)
def test_golden_weights(method: str, options: dict[str, Any], scales: list[float]) -> None:
    found = started(method, W4, golden_weights(), "weight", **options).qparams()
    np.testing.assert_allclose(found.scale, scales, atol=5.1e-7)
    assert not found.zero_point.any()


@pytest.mark.parametrize(
    ("method", "relu", "scale", "zero"),
    [
        ("uniform", False, 1.041344, 3),
        ("uniform", True, 0.802411, 0),
        ("lsq", True, 0.735757, 0),
        ("lsq+", False, 1.041344, 3),
        ("lsq+", True, 0.802411, 0),
        ("pact", False, 0.666667, 0),
    ],
)
def test_golden_activations(method: str, relu: bool, scale: float, zero: int) -> None:
    x = golden_activations()
    found = started(method, A4, np.maximum(x, 0) if relu else x, "activation").qparams()
    np.testing.assert_allclose(found.scale, scale, atol=5.1e-7)
    assert found.zero_point == zero


def test_golden_lsq_on_both_signs() -> None:
    """The ancestor's number for affine data with negatives is that of a symmetric scheme, to which it switched."""
    x = golden_activations()
    found = started("lsq", QuantSpec(bits=4), x, "activation").qparams()
    np.testing.assert_allclose(found.scale, 1.292236, atol=5.1e-7)
    kept = started("lsq", A4, x, "activation").qparams()
    assert kept.spec == A4 and kept.zero_point == 3  # that of the range
    np.testing.assert_allclose(kept.scale, 2 * np.abs(x).mean(dtype=np.float64) / np.sqrt(15 - 3), rtol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_signed_and_unsigned_codes_of_one_grid_start_alike(method: str) -> None:
    x = golden_activations()
    for symmetric in (True, False):
        pair = [QuantSpec(bits=4, signed=signed, symmetric=symmetric) for signed in (True, False)]
        signed, unsigned = (started(method, spec, x, "activation").qparams() for spec in pair)
        assert signed.scale == unsigned.scale
        assert int(unsigned.zero_point) - int(signed.zero_point) == 8


@pytest.mark.parametrize("method", ["uniform", "lsq", "lsq+", "dorefa"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_channel_is_as_if_alone(method: str, symmetric: bool, axis: int) -> None:
    x = np.random.default_rng(axis).normal(size=(3, 4, 5)).astype(np.float32)
    spec = QuantSpec(bits=4, symmetric=symmetric, axis=axis)
    alone = QuantSpec(bits=4, symmetric=symmetric)
    found = started(method, spec, x, "activation").qparams()
    for index in range(x.shape[axis]):
        one = started(method, alone, np.take(x, index, axis), "activation").qparams()
        np.testing.assert_allclose(found.scale[index], one.scale, rtol=1e-6)
        assert found.zero_point[index] == one.zero_point


@pytest.mark.parametrize("method", ["uniform", "lsq", "lsq+"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("axis", [0, 1])
def test_each_block_is_as_if_alone(method: str, symmetric: bool, axis: int) -> None:
    """Blocks of 3 along an axis of 7: the last one holds one value."""
    x = np.random.default_rng(axis).normal(size=(7, 7)).astype(np.float32)
    spec = QuantSpec(bits=4, symmetric=symmetric, axis=axis, block_size=3)
    shape = (3, 7) if axis == 0 else (7, 3)
    module = make_fake_quant(method, blank(spec, shape), name="w", role="weight")
    module.init_from(torch.from_numpy(x))
    found, across = module.qparams(), x if axis == 0 else x.T
    scales, zeros = (each if axis == 0 else each.T for each in (found.scale, found.zero_point))
    alone = QuantSpec(bits=4, symmetric=symmetric)
    for block, column in np.ndindex(3, 7):
        one = started(method, alone, across[3 * block : 3 * block + 3, column], "weight").qparams()
        np.testing.assert_allclose(scales[block, column], one.scale, rtol=1e-6)
        assert zeros[block, column] == one.zero_point


def test_lsq_plus_weights_in_an_affine_scheme() -> None:
    """Three deviations beside the mean, by the rule of every affine range."""
    x = np.random.default_rng(1).normal(0.5, 0.2, size=(2, 500)).astype(np.float32)
    spec = QuantSpec(bits=4, signed=False, symmetric=False, axis=0)
    found = started("lsq+", spec, x, "weight").qparams()
    mean, deviation = x.mean(1, dtype=np.float64), x.std(1, ddof=1, dtype=np.float64)
    np.testing.assert_allclose(
        found.scale, (mean + 3 * deviation - np.minimum(mean - 3 * deviation, 0)) / 15, rtol=1e-5
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spec", [A4, QuantSpec(bits=4), QuantSpec(bits=4, axis=0), QuantSpec(bits=2, narrow=True)])
def test_data_of_nothing(method: str, spec: QuantSpec) -> None:
    """Zeros, and no values at all: a scale that every float type holds."""
    for x in (np.zeros((3, 4), np.float32), np.zeros((3, 0), np.float32)):
        found = started(method, spec, x, "activation").qparams()
        assert (found.scale > 0).all()
        if method != "pact":
            assert (found.scale == 1.0).all()


@pytest.mark.parametrize("method", METHODS)
def test_data_that_does_not_fit(method: str) -> None:
    module = make_fake_quant(method, blank(W4, (3,)), name="conv.weight", role="activation")
    for shape in ((4, 3), ()):
        with pytest.raises(DataError, match=r"scale of 'conv\.weight', of shape \(3,\) for int4 axis 0"):
            module.init_from(torch.zeros(shape))
    for value in (float("nan"), float("inf")):
        with pytest.raises(NumericError, match=r"'conv\.weight' contain NaN or Inf"):
            module.init_from(torch.full((3, 2), value))


@pytest.mark.parametrize("method", ["uniform", "lsq", "lsq+", "pact"])
def test_an_optimizer_keeps_its_parameters(method: str) -> None:
    module = make_fake_quant(method, blank(A4, ()), name="x", role="activation")
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    module.init_from(torch.linspace(-1, 3, 40))
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before


def reshape(w: Array, top: float) -> Array:
    """tanh(w) / max|tanh(w)| times `top`, in float64."""
    bent = np.tanh(w.astype(np.float64))
    return np.asarray(bent / np.abs(bent).max() * top)


def test_dorefa_keeps_the_magnitude_of_the_weight() -> None:
    w = np.random.default_rng(3).normal(0, 0.8, size=(4, 30)).astype(np.float32)
    own = started("dorefa", W4, w, "weight")
    np.testing.assert_allclose(own.export_weight(torch.from_numpy(w)), reshape(w, np.abs(w).max()), rtol=3e-6)
    unit = started("dorefa", W4, w, "weight", magnitude="unit")
    np.testing.assert_allclose(unit.export_weight(torch.from_numpy(w)), reshape(w, 1.0), rtol=3e-6)
    zero = torch.zeros(4, 5)
    assert torch.equal(own(zero), zero) and torch.equal(own.latent_weight(zero), zero)


@pytest.mark.parametrize("spread", [1e-3, 0.1, 1.0, 4.0, 30.0])
def test_dorefa_begins_where_calibration_ended(spread: float) -> None:
    """The latent weight stands for the weight itself, however large it is, and its codes are the calibrated ones."""
    w = np.random.default_rng(4).normal(0, spread, size=(6, 50)).astype(np.float32)
    bounds = np.abs(w).max(1)
    qparams = params_from_bounds(Bounds(-bounds, bounds), W4)
    module = make_fake_quant("dorefa", qparams, name="w", role="weight")
    latent = module.latent_weight(torch.from_numpy(w))
    np.testing.assert_allclose(module.export_weight(latent), w, rtol=1e-5, atol=1e-6 * spread)
    ratio = w / qparams.along(qparams.scale, w.shape)
    clear = np.abs(ratio - np.floor(ratio) - 0.5) > 1e-3
    assert clear.mean() > 0.95
    assert np.array_equal(module.codes(latent)[clear], qparams.quantize(w)[clear])


def test_other_methods_train_the_weight_itself() -> None:
    w = torch.randn(3, 4)
    latent = make_fake_quant("lsq", blank(W4, (3,)), name="w", role="weight").latent_weight(w)
    assert torch.equal(latent, w) and latent.data_ptr() != w.data_ptr()


def test_names_of_methods() -> None:
    start = blank(W4, (3,))
    for name, kind in {"LSQ": "lsq", "LSQ_plus": "lsq+", "DoReFa": "dorefa", "PACT": "pact"}.items():
        assert type(make_fake_quant(name, start, name="w", role="activation")) is METHODS[kind]
    with pytest.raises(RecipeError, match=r"'w': there is no training method 'lsqq'; methods: uniform, lsq, lsq\+"):
        make_fake_quant("lsqq", start, name="w", role="weight")
    with pytest.raises(RecipeError, match="'alpha' of 'w' is not an option of lsq, which takes no options"):
        make_fake_quant("lsq", start, name="w", role="weight", alpha=3)
    with pytest.raises(RecipeError, match="takes scale_rule, magnitude"):
        make_fake_quant("dorefa", start, name="w", role="weight", alpha=3)
    with pytest.raises(RecipeError, match="must be 'own' or 'unit', got 'paper'"):
        make_fake_quant("dorefa", start, name="w", role="weight", magnitude="paper")


def test_what_cannot_be_trained() -> None:
    fp8 = QuantSpec(kind="fp8")
    wide = QuantSpec(bits=32)
    with pytest.raises(RecipeError, match="'w' is planned as fp8"):
        make_fake_quant("lsq", QParams(np.ones((), np.float32), np.zeros((), fp8.dtype), fp8), name="w", role="weight")
    with pytest.raises(RecipeError, match="'b' is planned with 32 bits; at most 16"):
        make_fake_quant("lsq", blank(wide, ()), name="b", role="weight")
    with pytest.raises(RecipeError, match="'w' is a weight, and pact clips activations"):
        make_fake_quant("pact", blank(W4, (3,)), name="w", role="weight")
    with pytest.raises(RecipeError, match="'alpha' of 'x' must be positive"):
        make_fake_quant("pact", blank(A4, ()), name="x", role="activation", alpha=-1.0)

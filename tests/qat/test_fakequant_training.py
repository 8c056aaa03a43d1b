"""Fake-quant modules in use: they learn, and they survive autocast, compilation, copies and files."""

from __future__ import annotations

import copy
import importlib
import io
from typing import Any

import numpy as np
import pytest

from sbonnx.errors import NumericError
from sbonnx.spec import QParams, QuantSpec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from sbonnx.qat.fakequant import METHODS, FakeQuant, Role, make_fake_quant, quant_parameters  # noqa: E402

A4 = QuantSpec(bits=4, signed=False, symmetric=False)
W3 = QuantSpec(bits=3, axis=0)
BLOCKS = QuantSpec(bits=4, symmetric=False, axis=1, block_size=4)
COMPILED = [
    pytest.param(A4, (), True, id="tensor"),
    pytest.param(W3, (6,), True, id="channel"),
    pytest.param(BLOCKS, (6, 3), True, id="block"),
    pytest.param(BLOCKS, (6, 3), False, id="evaluation"),
]


def module_of(method: str, spec: QuantSpec, shape: tuple[int, ...], role: Role = "activation") -> FakeQuant:
    rng = np.random.default_rng(0)
    zero = np.full(shape, spec.centre, spec.dtype)
    if not spec.symmetric:
        zero = np.asarray(rng.integers(spec.qmin, spec.qmax + 1, shape), spec.dtype)
    start = QParams(np.asarray(rng.uniform(0.1, 0.3, shape), np.float32), zero, spec)
    return make_fake_quant(method, start, name="t", role=role)


class Net(nn.Module):  # type: ignore[misc]
    """Two linear layers; a weight and an activation are fake-quantized."""

    def __init__(self, weights: str, activations: str, excess: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(6, 12), torch.nn.Linear(12, 1)
        rows = self.first.weight.detach().abs().amax(1).numpy() * np.float32(excess / 3)
        self.weight = make_fake_quant(
            weights, QParams(rows, np.zeros(12, np.int8), W3), name="first.weight", role="weight"
        )
        top = QParams(np.float32(excess / 15).reshape(()), np.zeros((), np.uint8), A4)
        self.hidden = make_fake_quant(activations, top, name="hidden", role="activation")

    def forward(self, x: Any) -> Any:
        hidden = torch.nn.functional.linear(x, self.weight(self.first.weight), self.first.bias).relu()
        return self.second(self.hidden(hidden))


def train(net: Any, steps: int = 150) -> tuple[float, float]:
    """Loss before and after plain SGD on a fixed regression."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(256, 6, generator=rng)
    y = (x[:, :1] * 1.5 - x[:, 1:2].abs() + 0.3 * x[:, 2:3]).detach()
    learned = [parameter for _, parameter in quant_parameters(net)]
    mine = {id(parameter) for parameter in learned}
    rest = [parameter for parameter in net.parameters() if id(parameter) not in mine]
    groups = [{"params": rest}, *([{"params": learned, "lr": 0.02}] if learned else [])]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[-1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        ("uniform", "uniform"),
        ("lsq", "lsq"),
        ("lsq+", "lsq+"),
        ("dorefa", "pact"),
        ("lsq", "pact"),
        ("dorefa", "dorefa"),
    ],
)
def test_training_lowers_the_error(weights: str, activations: str) -> None:
    net = Net(weights, activations, excess=1.0)
    before, after = train(net)
    assert after < 0.4 * before
    for each in (net.weight, net.hidden):
        assert (each.qparams().scale > 0).all()


def learned_error(method: str, spec: QuantSpec, x: Any, scale: float, zero: int) -> tuple[FakeQuant, float]:
    """A module that has learned to give back `x`, and its mean squared error on it."""
    start = QParams(np.float32(scale).reshape(()), np.asarray(zero, spec.dtype), spec)
    module = make_fake_quant(method, start, name="x", role="activation")
    groups = [
        {"params": [parameter], "lr": 0.2 if name == "zero_point" else 0.02}
        for name, parameter in quant_parameters(module)
    ]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 600)
    for _ in range(600):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(x), x).backward()
        optimizer.step()
        schedule.step()
    return module, torch.nn.functional.mse_loss(module(x), x).item()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", ["lsq", "lsq+"])
@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_a_learned_scale_finds_the_best(method: str, factor: float) -> None:
    """From five times too narrow and too wide to an error near the least that any scale has."""
    spec = QuantSpec(bits=3)
    x = torch.from_numpy(np.random.default_rng(2).normal(size=4000).astype(np.float32))
    errors = {}
    for scale in np.linspace(0.05, 2.0, 400, dtype=np.float32):
        each = QParams(scale.reshape(()), np.zeros((), np.int8), spec)
        errors[float(scale)] = float(np.mean((each.fake_quant(x.numpy()) - x.numpy()) ** 2))
    best = min(errors, key=lambda scale: errors[scale])
    _, found = learned_error(method, spec, x, best * factor, 0)
    assert found < 1.1 * errors[best]


def test_a_learned_zero_point_finds_the_range() -> None:
    """Data below zero that the first zero point cuts off: lsq must clip or coarsen, lsq+ moves over."""
    x = torch.linspace(-2, 1, 1000)
    _, fixed = learned_error("lsq", A4, x, 0.2, 2)
    module, moved = learned_error("lsq+", A4, x, 0.2, 2)
    assert moved < 0.2 * fixed
    assert module.qparams().zero_point >= 7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_narrow_floats_are_computed_wide(method: str, kind: str) -> None:
    """The result is that of float32, rounded once; gradients come back in the type of the input."""
    dtype = getattr(torch, kind)
    module = module_of(method, A4, ())
    x = torch.linspace(-4, 4, 200).to(dtype).requires_grad_()
    y = module(x)
    assert y.dtype == dtype
    assert torch.equal(y, module(x.float()).to(dtype))
    y.sum().backward()
    assert x.grad.dtype == dtype
    for parameter in module.parameters():
        assert parameter.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("method", "role"), [*((m, "activation") for m in METHODS), ("lsq", "weight"), ("dorefa", "weight")]
)
def test_autocast_keeps_types(method: str, role: Role) -> None:
    module = module_of(method, W3, (6,), role)
    x = torch.randn(6, 10)
    plain = module(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for dtype in (torch.float32, torch.bfloat16):
            assert module(x.to(dtype)).dtype == dtype
        assert torch.equal(module(x), plain)  # and nothing inside is rounded on the way
        out = torch.nn.functional.linear(torch.randn(3, 10), module(x.requires_grad_()))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32


@pytest.mark.parametrize("method", METHODS)
def test_scales_stay_wide_in_a_narrow_model(method: str) -> None:
    """`model.half()` would otherwise round scales to 11 bits, or to 0."""
    module = module_of(method, W3, (6,))
    before = {name: each.clone() for name, each in module.state_dict().items()}
    holder = torch.nn.Sequential(torch.nn.Linear(2, 2), module).half()
    assert holder[0].weight.dtype == torch.float16
    for name, each in module.state_dict().items():
        assert each.dtype == torch.float32 and torch.equal(each, before[name])
    holder.double()
    assert {each.dtype for each in module.state_dict().values()} == {torch.float64}
    holder.float().to("meta")
    assert all(each.is_meta for each in module.state_dict().values())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("spec", "shape", "training"), COMPILED)
def test_compiled(method: str, spec: QuantSpec, shape: tuple[int, ...], training: bool) -> None:
    """One graph without breaks, the same values and gradients, bit for bit."""
    torch._dynamo.reset()
    ends = []
    for compiled in (False, True):
        module = module_of(method, spec, shape).train(training)
        function = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
        x = torch.linspace(-3, 3, 60).reshape(6, 10).clone().requires_grad_()
        y = function(x)
        (y * x.detach().cos()).sum().backward()
        ends.append([y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
    for eager, graph in zip(*ends, strict=True):
        assert torch.equal(eager, graph)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lsq", "lsq+"])
def test_compiled_for_any_batch(method: str) -> None:
    """The number of values enters the gradient; no other size makes a new graph."""
    torch._dynamo.reset()
    module, twin = module_of(method, A4, ()), module_of(method, A4, ())
    testing = importlib.import_module("torch._dynamo.testing")
    counter = testing.CompileCounterWithBackend("aot_eager")
    function = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    counts = set()
    for batch in (4, 7, 9):
        x = torch.randn(batch, 5)
        for each, net in ((function, module), (twin, twin)):
            net.zero_grad()
            each(x.requires_grad_()).square().sum().backward()
        for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-7)
        counts.add(counter.frame_count)
    assert len(counts) == 1


@pytest.mark.parametrize("method", METHODS)
def test_state_goes_through_a_file(method: str) -> None:
    module, other = module_of(method, A4, ()), module_of(method, A4, ())
    module.init_from(torch.linspace(-1, 7, 90))
    assert module.qparams().scale != other.qparams().scale
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.qparams().scale == module.qparams().scale
    assert other.qparams().zero_point == module.qparams().zero_point


@pytest.mark.parametrize("method", METHODS)
def test_a_deep_copy_shares_no_state(method: str) -> None:
    module = module_of(method, A4, ())
    module.enabled = False
    twin = copy.deepcopy(module)
    assert not twin.enabled and twin.spec == module.spec and twin.name == module.name
    before = module.qparams()
    twin.enabled = True
    twin.init_from(torch.linspace(-1, 7, 90))
    assert not module.enabled
    assert module.qparams().scale == before.scale
    assert {p.data_ptr() for p in module.parameters()}.isdisjoint(p.data_ptr() for p in twin.parameters())


@pytest.mark.parametrize("method", ["lsq", "lsq+", "pact"])
def test_a_diverged_scale_is_not_exported(method: str) -> None:
    module = module_of(method, A4, ())
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))
    with pytest.raises(NumericError, match="training made the scale of 't' NaN"):
        module.qparams()


@pytest.mark.parametrize("method", METHODS)
def test_empty_tensors(method: str) -> None:
    module = module_of(method, W3, (6,))
    x = torch.zeros(6, 0, requires_grad=True)
    y = module(x)
    assert y.shape == (6, 0)
    y.sum().backward()
    for parameter in module.parameters():
        assert not parameter.grad.any()


@pytest.mark.parametrize("method", METHODS)
def test_two_runs_are_one(method: str) -> None:
    """Same seed, same steps, same numbers."""
    weights = method if method != "pact" else "lsq"
    ends = []
    for _ in range(2):
        net = Net(weights, method, excess=1.0)
        train(net, steps=10)
        ends.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))

"""Adam against torch's own."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.rounding.adam import Adam


@pytest.mark.parametrize("rate", [0.1, 1e-3])
def test_steps_are_those_of_torch(rate: float) -> None:
    torch = pytest.importorskip("torch")
    generator = np.random.default_rng(0)
    start = generator.normal(size=(3, 5)).astype(np.float32)
    curve = np.exp(generator.normal(0.0, 3.0, (3, 5))).astype(np.float32)
    ours, adam = start.copy(), Adam(start.shape)
    theirs = torch.tensor(start.copy(), requires_grad=True)
    optimizer = torch.optim.Adam([theirs], lr=rate)
    for _ in range(200):
        adam.step(ours, curve * ours, rate)
        optimizer.zero_grad()
        (torch.tensor(curve) * theirs * theirs / 2).sum().backward()
        optimizer.step()
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-3, atol=1e-5)


def test_a_gradient_of_zero_moves_nothing() -> None:
    values = np.ones((2, 2), np.float32)
    adam = Adam(values.shape)
    adam.step(values, np.array([[0, 1], [0, -1]], np.float32), 0.5)
    np.testing.assert_allclose(values, [[1.0, 0.5], [1.0, 1.5]], rtol=1e-6)

"""Solution of symmetric systems in the memory of the matrix, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.moments import cholesky


@pytest.mark.parametrize("count", [1, 7, 20])
def test_against_numpy(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "BLOCK", 7)
    random = np.random.default_rng(count)
    root = random.normal(size=(2, count, count + 5))
    a, right = root @ root.transpose(0, 2, 1), random.normal(size=(2, count, 3))
    wanted, kept = np.linalg.solve(a, right), right.copy()
    np.testing.assert_allclose(cholesky.solve_in_place(a, right), wanted, rtol=1e-7, atol=1e-9)
    np.testing.assert_array_equal(right, kept)


def test_what_cannot_be() -> None:
    with pytest.raises(np.linalg.LinAlgError):
        cholesky.solve_in_place(-np.eye(3)[None], np.ones((1, 3, 1)))

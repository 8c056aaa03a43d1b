"""Feeds kept for a second walk."""

from __future__ import annotations

import numpy as np
import pytest

from sbonnx.calib.data.dataset import FeedBuffer
from sbonnx.graph import load
from tests.support.models import model

ADD = "agraph (float[N,4] x, float[N,4] z) => (float[N,4] y) { y = Add (x, z) }"


@pytest.mark.parametrize("memory", [1 << 20, 100, 0])
def test_what_was_fed_comes_back_in_order_and_as_often_as_asked(memory: int) -> None:
    """In memory or on disk; a copy, so that the caller may write over what it gave."""
    kept = FeedBuffer(load(model(ADD)), memory)
    buffers = {name: np.zeros((2, 4), np.float32) for name in "xz"}
    for number in range(5):
        for offset, buffer in enumerate(buffers.values()):
            buffer[:] = number + 10 * offset
        kept.add(buffers)
    data = kept.dataset()
    assert data.count == kept.count == 5
    for _ in range(2):
        found = list(data)
        assert [float(feed["x"].mean()) for feed in found] == [0, 1, 2, 3, 4]
        assert [float(feed["z"].mean()) for feed in found] == [10, 11, 12, 13, 14]
    kept.close()
    kept.close()

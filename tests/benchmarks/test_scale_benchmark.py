"""The generated network of the benchmark of deep networks, and the split of its time."""

from __future__ import annotations

import numpy as np
import onnx

from benchmarks.scale import BLOCK, SHAPE, Network
from tests.support.models import run


def test_the_network_has_whole_blocks_and_stays_finite() -> None:
    """Layer norms bound the values however deep the network is."""
    made = Network().build(20 * BLOCK + 5)
    onnx.checker.check_model(made, full_check=True)
    assert len(made.graph.node) == 20 * BLOCK
    assert len({node.op_type for node in made.graph.node}) == 6
    (y,) = run(made, {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}).values()
    assert y.shape == tuple(SHAPE) and 0.1 < float(y.std()) < 10

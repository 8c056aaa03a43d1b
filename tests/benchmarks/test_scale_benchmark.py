"""The generated network of the benchmark of deep networks, and the split of its time."""

from __future__ import annotations

import numpy as np
import onnx

from benchmarks.scale import BLOCK, SHAPE, Network, Row, lines, timing
from tests.support.models import run


def test_the_network_has_whole_blocks_and_stays_finite() -> None:
    """Layer norms bound the values however deep the network is."""
    made = Network().build(20 * BLOCK + 5)
    onnx.checker.check_model(made, full_check=True)
    assert len(made.graph.node) == 20 * BLOCK
    assert len({node.op_type for node in made.graph.node}) == 6
    (y,) = run(made, {"x": np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)}).values()
    assert y.shape == tuple(SHAPE) and 0.1 < float(y.std()) < 10


def test_growth_is_that_of_a_node_without_imports() -> None:
    rows = [Row("default", nodes, nodes, 1 + seconds, 100.0, {"imports": 1.0}) for nodes, seconds in ((10, 1), (30, 6))]
    assert [row[4] for row in lines(rows)] == ["1.00", "2.00"]


def test_wrapped_functions_return_their_results_and_are_timed() -> None:
    seconds: dict[str, float] = {"sum": 0.0}
    assert timing(seconds, "sum", sum)([1, 2]) == 3
    assert seconds["sum"] >= 0

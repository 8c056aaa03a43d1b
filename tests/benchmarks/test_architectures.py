"""Weights and feeds of models of which only the graph is known."""

from __future__ import annotations

import numpy as np
from onnx import helper, numpy_helper

from benchmarks.architectures.feeds import TOKENS, feed_of, length_of
from benchmarks.architectures.weights import matrix_weights


def test_weights_and_feeds_by_hand() -> None:
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Gather", ["cos_table", "input_ids"], ["angles"]),
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("MatMul", ["rows", "turned"], ["product"]),
        helper.make_node("Add", ["product", "offsets"], ["y"]),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", 7, ["batch", "past_len + seq_len"])]
    shapes = {"table": (9, 4), "cos_table": (9, 2), "w": (3, 4), "offsets": (1, 3)}
    stored = [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, None)], stored)
    model = helper.make_model(graph)
    assert matrix_weights(model) == {"table": 36, "w": 12}
    feed = feed_of(model, 0, {})
    assert feed["input_ids"].shape == (1, TOKENS) and feed["input_ids"].dtype == np.int64
    assert length_of("past_len", {}) == 0 and length_of("seq_len", {"seq_len": 1}) == 1

"""How long simplification and fusion take on long graphs: seconds, and how seconds grow with nodes.

    python -m benchmarks.patterns [--nodes 1000 3000 10000] [--repeat 3] [--json FILE]

Each graph is a chain of Conv, BatchNormalization and Relu on tiny tensors, with an Identity and a chain of shape
arithmetic in front of every tenth Conv, so that folding, dropping and fusing all have work. Seconds are of processor
time, the best of some repeats. Growth is the time of a node compared with the smallest graph: 1 is linear.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from sbonnx.graph import load
from sbonnx.graph.query import all_nodes
from sbonnx.patterns import FUSE, SIMPLIFY, apply

CHANNELS = 2
PARAMETERS = ("gamma", "beta", "mean", "var")


@dataclass(frozen=True)
class Row:
    """Timings of one size, in seconds."""

    nodes: int
    left: int
    load: float
    simplify: float
    fuse: float
    growth: float = 1.0

    @property
    def total(self) -> float:
        return self.load + self.simplify + self.fuse


def chain(nodes: int) -> onnx.ModelProto:
    """Build a chain of about `nodes` nodes, float32, with input and output of shape (1, 2, 4, 4)."""
    rng = np.random.default_rng(0)
    made: list[onnx.NodeProto] = []
    held = [numpy_helper.from_array(np.array([0, 1, 2, 3], np.int64), "picked")]
    last = "x"
    for block in range(nodes // 3):
        if block % 10 == 0:
            made += [
                helper.make_node("Identity", [last], [f"i{block}"], name=f"identity{block}"),
                helper.make_node("Shape", [f"i{block}"], [f"s{block}"], name=f"shape{block}"),
                helper.make_node("Gather", [f"s{block}", "picked"], [f"g{block}"], name=f"gather{block}"),
                helper.make_node("Reshape", [f"i{block}", f"g{block}"], [f"r{block}"], name=f"reshape{block}"),
            ]
            last = f"r{block}"
        held.append(
            numpy_helper.from_array(rng.normal(size=(CHANNELS, CHANNELS, 1, 1)).astype(np.float32), f"w{block}")
        )
        for name in PARAMETERS:
            values = rng.uniform(0.5, 1.5, CHANNELS).astype(np.float32)
            held.append(numpy_helper.from_array(values, f"{name}{block}"))
        given = [f"c{block}", *(f"{name}{block}" for name in PARAMETERS)]
        made += [
            helper.make_node("Conv", [last, f"w{block}"], [f"c{block}"], name=f"conv{block}"),
            helper.make_node("BatchNormalization", given, [f"b{block}"], name=f"bn{block}"),
            helper.make_node("Relu", [f"b{block}"], [f"y{block}"], name=f"relu{block}"),
        ]
        last = f"y{block}"
    shape = [1, CHANNELS, 4, 4]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, shape)
    graph = helper.make_graph(made, "chain", [x], [y], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(nodes: int) -> Row:
    """Measure one size once."""
    gc.collect()
    model = chain(nodes)
    count = len(model.graph.node)
    clock = [time.process_time()]
    graph = load(model)
    clock.append(time.process_time())
    apply(graph, SIMPLIFY)
    clock.append(time.process_time())
    apply(graph, FUSE)
    clock.append(time.process_time())
    kinds = Counter(node.op for node in all_nodes(graph))
    if set(kinds) != {"Conv", "Relu"}:
        raise SystemExit(f"patterns left more than Conv and Relu: {dict(kinds)}")
    seconds = [clock[stage + 1] - clock[stage] for stage in range(3)]
    return Row(count, sum(kinds.values()), *seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds for load, simplify and fuse on long chains.")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    arguments = parser.parse_args()
    measure(100)  # warm-up: imports and caches
    rows: list[Row] = []
    print(f"{'nodes':>7} {'left':>7} {'load s':>8} {'simplify s':>11} {'fuse s':>8} {'total s':>8} {'growth':>7}")
    for nodes in sorted(arguments.nodes):
        row = min((measure(nodes) for _ in range(arguments.repeat)), key=lambda one: one.total)
        first = rows[0] if rows else row
        row = Row(**{**asdict(row), "growth": (row.total / row.nodes) / (first.total / first.nodes)})
        rows.append(row)
        figures = f"{row.load:>8.2f} {row.simplify:>11.2f} {row.fuse:>8.2f} {row.total:>8.2f} {row.growth:>7.2f}"
        print(f"{row.nodes:>7} {row.left:>7} {figures}")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()

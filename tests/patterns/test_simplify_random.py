"""Random graphs: whatever is put together, simplification keeps what it computes, and settles."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from sbonnx.graph import load
from sbonnx.patterns import SIMPLIFY, apply
from tests.support.pattern_checks import assert_same_outputs, assert_sound, interface

UNARY = ("Relu", "Neg", "Abs", "Identity", "Sigmoid", "Dropout")
BINARY = ("Add", "Mul", "Sub", "Max")
GRAPHS = 150


class Generator:
    """Builds one random graph on float32 tensors; every tensor has shape (N, 3, 4) or (N, 12), or is a constant."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.held: list[TensorProto] = []
        self.cubes: list[str] = ["x"]
        self.flat: list[str] = ["v"]
        self.count = 0

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def node(self, op: str, inputs: list[str], **attrs: Any) -> str:
        out = self.name()
        self.nodes.append(helper.make_node(op, inputs, [out], name=f"n{self.count}", **attrs))
        return out

    def held_as(self, values: np.ndarray) -> str:
        name = self.name()
        self.held.append(numpy_helper.from_array(values, name))
        return name

    def ints(self, *values: int) -> str:
        return self.held_as(np.array(values, np.int64))

    def pick(self, names: list[str]) -> str:
        return names[int(self.rng.integers(len(names)))]

    def cube_constant(self) -> str:
        shape = ((1, 3, 4), (4,), (3, 1))[self.rng.integers(3)]
        value = self.held_as(np.round(self.rng.normal(size=shape), 1).astype(np.float32))
        while self.rng.random() < 0.4:
            value = self.node(self.rng.choice(UNARY[:4]), [value])
        return value

    def target(self, source: str, rest: list[int]) -> str:
        """A computed shape: the first dimension of some tensor of the same batch, then numbers."""
        shape = self.node("Shape", [source])
        if self.rng.random() < 0.5:
            first = self.node("Unsqueeze", [self.node("Gather", [shape, self.held_as(np.array(0))]), self.ints(0)])
        else:
            first = self.node("Slice", [shape, self.ints(0), self.ints(1)])
        return self.node("Concat", [first, self.ints(*rest)], axis=0)

    def flatten(self, x: str) -> str:
        choice = self.rng.integers(4)
        if choice == 0:
            return self.node("Flatten", [x])
        target = self.target(self.pick(self.cubes), [12]) if choice == 1 else self.ints(0 if choice == 2 else -1, 12)
        return self.node("Reshape", [x, target])

    def lift(self, v: str) -> str:
        choice = self.rng.integers(3)
        target = self.target(self.pick(self.flat), [3, 4]) if choice == 0 else self.ints(-1 if choice == 1 else 0, 3, 4)
        return self.node("Reshape", [v, target])

    def nothing(self, x: str) -> str:
        choice = self.rng.integers(7)
        if choice == 0:
            return self.node("Transpose", [self.node("Transpose", [x], perm=[1, 2, 0])], perm=[2, 0, 1])
        if choice == 1:
            return self.node("Cast", [x], to=1)
        if choice == 2:
            return self.node("Slice", [x, self.ints(0), self.ints(2**63 - 1), self.ints(int(self.rng.integers(3)))])
        if choice == 3:
            return self.node("Pad", [x, self.ints(0, 0, 0, 0, 0, 0)])
        if choice == 4:
            return self.node("Expand", [x, self.ints(1, 4) if self.rng.random() < 0.5 else self.ints(1)])
        if choice == 5:
            return self.node("Squeeze", [self.node("Unsqueeze", [x, self.ints(1)]), self.ints(-3)])
        return self.node("Concat", [x], axis=1)

    def branch(self, x: str) -> str:
        """An If, sometimes with a constant condition, whose branches read outer tensors."""
        condition = "c" if self.rng.random() < 0.5 else self.held_as(np.array(bool(self.rng.integers(2))))
        bodies = []
        for _ in range(2):
            inner = Generator(int(self.rng.integers(1 << 30)))
            inner.count, inner.cubes, inner.flat = self.count, list(self.cubes), list(self.flat)
            inner.grow(3, bodies=False)
            self.count = inner.count
            out = inner.node("Neg", [inner.pick(inner.cubes)])
            self.count = inner.count
            info = helper.make_tensor_value_info(out, TensorProto.FLOAT, None)
            bodies.append(helper.make_graph(inner.nodes, f"body{self.count}", [], [info], inner.held))
        return self.node("If", [condition], then_branch=bodies[0], else_branch=bodies[1])

    def grow(self, steps: int, *, bodies: bool = True) -> None:
        for _ in range(steps):
            choice, x, v = self.rng.integers(8 if bodies else 7), self.pick(self.cubes), self.pick(self.flat)
            if choice == 0:
                self.cubes.append(self.node(self.rng.choice(UNARY), [x]))
            elif choice == 1:
                self.flat.append(self.node(self.rng.choice(UNARY), [v]))
            elif choice == 2:
                self.cubes.append(self.node(self.rng.choice(BINARY), [x, self.pick(self.cubes)]))
            elif choice == 3:
                self.cubes.append(self.node(self.rng.choice(BINARY), [x, self.cube_constant()]))
            elif choice == 4:
                self.cubes.append(self.nothing(x))
            elif choice == 5:
                self.flat.append(self.flatten(x))
            elif choice == 6:
                self.cubes.append(self.lift(v))
            else:
                self.cubes.append(self.branch(x))

    def model(self) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 4]),
            helper.make_tensor_value_info("v", TensorProto.FLOAT, ["N", 12]),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
        ]
        made = {name for node in self.nodes for name in node.output}
        outputs = {
            self.pick([name for name in names if name in made] or names[:1]) for names in (self.cubes, self.flat)
        }
        outputs.add(self.cubes[-1])
        infos = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 12] if name in self.flat else ["N", 3, 4])
            for name in sorted(outputs - {"x", "v"})
        ]
        graph = helper.make_graph(self.nodes, "random", inputs, infos, self.held)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, GRAPHS, 50))
def test_random_graphs_keep_their_outputs(first: int) -> None:
    fired: set[str] = set()
    for seed in range(first, first + 50):
        made = Generator(seed)
        made.grow(18)
        before = made.model()
        onnx.checker.check_model(before, full_check=True)
        graph = load(before)
        applied = apply(graph, SIMPLIFY)
        fired |= {one.pattern for one in applied.fired}
        after = assert_sound(graph)
        assert interface(after) == interface(before)
        assert not apply(graph, SIMPLIFY).fired, f"seed {seed}: a second time does more"
        for batch in (1, 2):
            rng = np.random.default_rng(seed)
            feeds = {
                "x": rng.normal(size=(batch, 3, 4)).astype(np.float32),
                "v": rng.normal(size=(batch, 12)).astype(np.float32),
                "c": np.array(bool(seed % 2)),
            }
            assert_same_outputs(before, after, feeds)
    assert len(fired) > 12, f"the graphs are too dull: only {sorted(fired)}"

"""Rules of the kernels: what they read and write in integers, and where a pair belongs."""

from __future__ import annotations

from typing import Literal

from sbonnx.backends import Backend, Numbers, Placement, Rule
from sbonnx.graph import Node
from sbonnx.ops import ADDS, CONCATS, POOLS, RECTIFIERS
from sbonnx.spec import QuantSpec

from .runtime import REFERENCE

RULES = (
    Rule("add", ADDS, "all", when="inputs_integer", output=True, switch="add", why="arm_elementwise_add_s8"),
    Rule("concat", CONCATS, "all", when="between_linear", output=True, switch="concat", why="codes are copied"),
    Rule(
        "pool",
        POOLS | {"MaxPool"},
        "first",
        when="input_written",
        output=True,
        one_scale=True,
        switch="pool",
        why="pools have one scale on both sides",
    ),
)


class Kernels(Placement):
    """Kernels for convolutions without groups, depthwise ones and matrix products."""

    def slow_linear(self, node: Node) -> str | None:
        """Return why a weighted op stays float, or None."""
        groups = int(node.attrs.get("group", 1))
        if node.op == "Conv" and groups > 1 and groups != node.inputs[1].shape[0]:
            return f"{groups} groups: only depthwise kernels have groups"
        return None


class Int8(Numbers):
    """Signed types: with zero points for activations, without for weights."""

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return the type for a side, width, symmetry and axis of a recipe."""
        return QuantSpec(bits=bits, signed=True, symmetric=symmetric or side == "w", axis=axis)


MCU = Backend(
    name="mcu",
    placement=Kernels(
        linear=frozenset({"Conv", "Gemm", "MatMul"}),
        rules=RULES,
        linear_output=frozenset({"Conv"}),
        folds=RECTIFIERS,
    ),
    numbers=Int8(int32_bias=True, joins_concat=True),
    runtime=REFERENCE,
)

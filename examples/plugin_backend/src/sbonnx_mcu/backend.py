"""Rules of the kernels: what they read and write in integers, and where a pair belongs."""

from __future__ import annotations

from typing import Any, Literal

from sbonnx.backends import Backend, Rule
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


def slow_linear(node: Node) -> str | None:
    """Return why a weighted op stays float, or None."""
    return f"{node.attrs['group']} groups: only depthwise kernels have groups" if _grouped(node) else None


def _grouped(node: Node) -> bool:
    groups = int(node.attrs.get("group", 1))
    return node.op == "Conv" and groups > 1 and groups != node.inputs[1].shape[0]


def spec(side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """Return signed types: with zero points for activations, without for weights."""
    return QuantSpec(bits=bits, signed=True, symmetric=symmetric or side == "w", axis=axis)


def legalise(graph: Any) -> list[str]:
    """Change nothing: the converter of the kernels reads the pairs as they are."""
    return []


MCU = Backend(
    name="mcu",
    linear=frozenset({"Conv", "Gemm", "MatMul"}),
    slow_linear=slow_linear,
    linear_output=frozenset({"Conv"}),
    rules=RULES,
    folds=RECTIFIERS,
    joins_concat=True,
    int32_bias=True,
    embedding=False,
    any_bits=False,
    spec=spec,
    legalise=legalise,
    runtime=REFERENCE,
)

"""What a runtime accepts and wants, as data that planning reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from sbonnx.backends.onnxruntime.costs import Costs
from sbonnx.backends.tensorrt.profiles import INT4_BITS, Profile
from sbonnx.graph import Node, query
from sbonnx.ops import ELEMENTWISE, MATRIX_PRODUCTS
from sbonnx.spec import ANY_SCALE, QuantSpec, ScaleLimits


def never(node: Node) -> str | None:
    """No reason against."""
    return None


def any_type(node: Node, spec: QuantSpec) -> str | None:
    """No reason against any type of weights."""
    return None


def interpolates(node: Node) -> str | None:
    """A reason against where a Resize computes new values."""
    mode = node.attrs.get("mode", "nearest")
    return None if mode == "nearest" else f"mode '{mode}' computes new values"


def copies(node: Node) -> str | None:
    """A reason against where a Resize only copies values."""
    return "a nearest resize copies values" if node.attrs.get("mode", "nearest") == "nearest" else None


PAD_VALUE: Final = 2
"""Index of the constant that Pad fills with, 0 where it is absent."""


def fills_zero(node: Node) -> bool:
    """Whether a Pad writes zeros, or copies of its input."""
    if query.attribute(node, "mode", "constant") != "constant" or len(node.inputs) <= PAD_VALUE:
        return True
    value = node.inputs[PAD_VALUE]
    fill = query.constant(value)
    return value.is_empty() or (fill is not None and not fill.any())


Inputs = Literal["all", "first", "skip", "none"]
When = Literal[
    "always", "input_written", "between_linear", "inputs_integer", "output_read_quantized", "not_after_producer"
]


@dataclass(frozen=True)
class Rule:
    """What a backend wants at one kind of op (or recognised block).

    Attributes:
        name: short, for reports.
        ops: op types, or block kinds written ``block:gelu``.
        inputs: which float activation inputs get a pair: "all" of them, the "first", the "skip"
            branch of a residual add alone, or "none".
        when: "always"; "input_written": an integer kernel writes one of its inputs;
            "between_linear": that, and a linear op comes after, so that it is not part of what a model ends with;
            "inputs_integer": that, and the other inputs are quantized for other readers or written as well;
            "output_read_quantized": what follows reads integers;
            "not_after_producer": unless it stands straight after a conv, linear, batch norm or add.
        output: a pair after it as well, so that an integer kernel can write integers.
        one_scale: inputs and output share one scale.
        switch: key of ``QUANTIZE_INPUTS_OF`` by which a recipe overrules `default`.
        default: whether the rule acts when the recipe is silent.
        unless: the reason not to act at this node, or None.
        why: the reason, for people.
    """

    name: str
    ops: frozenset[str]
    inputs: Inputs
    when: When = "always"
    output: bool = False
    one_scale: bool = False
    switch: str | None = None
    default: bool = True
    unless: Callable[[Node], str | None] = never
    why: str = ""


ON_REQUEST: Final = (
    Rule("matmul", MATRIX_PRODUCTS, "all", switch="matmul", default=False, why="product of activations"),
    Rule("softmax", frozenset({"Softmax"}), "first", switch="softmax", default=False, why="input of a softmax"),
    Rule("elementwise", ELEMENTWISE, "all", switch="elementwise", default=False, why="input of an element-wise op"),
    Rule(
        "norm",
        frozenset({"LayerNormalization", "RMSNormalization", "block:layernorm", "block:rmsnorm"}),
        "first",
        switch="norm",
        default=False,
        why="input of a normalization",
    ),
)
"""What runtimes compute better in float: quantized only where the recipe asks for it."""


@dataclass(frozen=True)
class Backend:
    """One runtime.

    Attributes:
        name: as written in recipes.
        linear: weighted ops whose weights and inputs are quantized.
        slow_linear: the reason why a weighted op stays float although its type is in `linear`, or None.
        linear_output: weighted ops that also want a pair after them (and after what folds into them).
        rules: placement at every other op; the first rule whose `ops` hold the op counts.
        folds: activations that the runtime folds into the op before, so that the pair stands after them.
        joins_concat: quantized tensors around a Concat share one scale.
        int32_bias: biases become int32 codes with scale s_x * s_w.
        embedding: tables of Gather are quantized, one scale a row.
        spec: bits and symmetry of a recipe's side -> `QuantSpec`.
        any_bits: accepts every width from 2 to 16.
        costs: what its kernels cost, by the path of a table (None: the bundled one); no costs where nobody measured:
            what has an integer kernel is quantized then.
        saturates: on CPUs without dot products of 8 bits its kernels add two products in 16 bits.
        judged_without: rewrites that onnxruntime leaves out when it stands in for this runtime.
        unfit: the reason why a weighted op cannot have weights of a type, or None.
        int4_blocks: sizes of the blocks in which it takes 4-bit weights, for inputs that stay float; empty where any
            form will do, with quantized inputs too.
        scales: how small and how large scales may be.
        profile: the version, for a runtime that has them.
    """

    name: str
    linear: frozenset[str]
    slow_linear: Callable[[Node], str | None]
    linear_output: frozenset[str]
    rules: tuple[Rule, ...]
    folds: frozenset[str]
    joins_concat: bool
    int32_bias: bool
    embedding: bool
    any_bits: bool
    spec: Callable[[Literal["w", "a"], int, bool, int | None], QuantSpec]
    legalise: Callable[[Any], list[str]]
    judged_without: tuple[str, ...] = ()
    costs: Callable[[str | None], Costs] | None = None
    saturates: bool = False
    unfit: Callable[[Node, QuantSpec], str | None] = any_type
    int4_blocks: tuple[int, ...] = ()
    scales: ScaleLimits = ANY_SCALE
    profile: Profile | None = None

    def alone(self, spec: QuantSpec) -> bool:
        """Whether weights of this type are for inputs that stay float."""
        return bool(self.int4_blocks) and not spec.is_fp8 and spec.bits <= INT4_BITS

    def rule_for(self, kind: str) -> Rule | None:
        """The first rule for an op type or ``block:kind``, or None."""
        for rule in self.rules:
            if kind in rule.ops:
                return rule
        return None


def signed_when_symmetric(side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """The ancestor's types: symmetric is signed about 0, affine is unsigned from 0."""
    return QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric, axis=axis)


def nothing_to_legalise(graph: Any) -> list[str]:
    """For a backend that takes plain ONNX as it is."""
    return []

"""Placement of Q/DQ pairs for a runtime: tables of operators and rules, and decisions about single nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from sbonnx.graph import Node, query
from sbonnx.ops import ELEMENTWISE, MATRIX_PRODUCTS
from sbonnx.report.codes import Reason


def never(node: Node) -> str | None:
    """Return None: no reason against any node (default of `Rule.unless`)."""
    return None


def interpolates(node: Node) -> Reason | None:
    """Return a reason against quantizing a Resize that computes new values; None for mode "nearest"."""
    mode = node.attrs.get("mode", "nearest")
    return None if mode == "nearest" else Reason("computes-new-values", f"mode '{mode}' computes new values")


def copies(node: Node) -> str | None:
    """Return a reason against quantizing a Resize that only copies values; None for other modes than "nearest"."""
    return "a nearest resize copies values" if node.attrs.get("mode", "nearest") == "nearest" else None


PAD_VALUE: Final = 2
"""Index of Pad's fill value, which is 0 if the input is absent."""


def fills_zero(node: Node) -> bool:
    """Return whether a Pad writes only zeros or copies of its input."""
    if query.attribute(node, "mode", "constant") != "constant" or len(node.inputs) <= PAD_VALUE:
        return True
    value = node.inputs[PAD_VALUE]
    fill = query.constant(value)
    return value.is_empty() or (fill is not None and not fill.any())


Inputs = Literal["all", "first", "skip", "none", "unit"]
When = Literal[
    "always", "input_written", "between_linear", "inputs_integer", "output_read_quantized", "not_after_producer"
]


@dataclass(frozen=True)
class Rule:
    """Placement rule of a backend for one kind of op or recognised block.

    Attributes:
        name: short name, for reports.
        ops: op types, or block kinds written ``block:gelu``.
        inputs: which float activation inputs get a pair: "all" of them, the "first", only the "skip" branch of a
            residual Add, "none", or "unit": all of them, and each output gets a pair as well, so that the op and the
            pairs around it are one node unit.
        when: condition of the rule.
            "always"; "input_written": an integer kernel writes one of its inputs;
            "between_linear": as "input_written", and a linear op follows, so the op is not part of the model's end;
            "inputs_integer": as "between_linear", and every other input is quantized for other readers or written by
            an integer kernel as well;
            "output_read_quantized": the readers of its output read integers;
            "not_after_producer": unless it directly follows a convolution, linear, batch norm or add.
        constants: of a node unit, which float constants are quantized: "none", "operands" (all, in the type of
            activations), or "parameters" (scale and bias of a normalization, as a weight and an int32 bias).
        output: also place a pair after the op, so that an integer kernel can write integers.
        one_scale: inputs and output share one scale.
        switch: key of ``QUANTIZE_INPUTS_OF`` with which a recipe overrides `default`.
        default: whether the rule applies if the recipe does not set the switch.
        unless: returns the reason not to apply the rule at a node, or None.
        why: the reason for the rule, for people.
    """

    name: str
    ops: frozenset[str]
    inputs: Inputs
    when: When = "always"
    constants: Literal["none", "operands", "parameters"] = "none"
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
"""Rules for ops that runtimes compute better in float: quantized only if the recipe asks for it."""


WIDE: Final = 2
"""Blocks of channels above which the smaller one is not needed: fewer leave a choice of one or two numbers."""


@dataclass(frozen=True)
class Placement:
    """Operators that a runtime computes or stores in integers, and the positions of their pairs.

    A backend gives the tables, and overrides the methods for nodes that its kernels treat differently.

    Attributes:
        linear: weighted ops whose weights and inputs are quantized.
        rules: placement at all other ops; the first rule whose `ops` contain the op applies.
        linear_output: ops of `linear` that also need a pair after them (and after an activation that folds into them).
            They stay float where they write an output of the graph.
        writes_float: kernels of `linear_output` write integers or float: the pair after them is placed only if a reader
            wants integers.
        writes_outputs: outputs of the graph get a pair as well. Without, they stay float, and so does an op of
            `linear_output` that writes one.
        folds: activations that the runtime folds into the preceding op, so that the pair is placed after them: op
            types, or block kinds written ``block:gelu``.
        opens: kinds of recognised blocks whose nodes are placed one by one.
        stored: ops that compute in float and whose weights are stored in 8 bits: Gather (tables of embeddings, with
            one scale per row), LSTM, GRU and RNN.
        recurrent: recurrent ops with an integer kernel, which quantizes input and state at run time; with the smallest
            hidden size from which it is faster than float. Modes without activations in integers do not use it.
        skips_zeros: kernels compute less for weights with 2 zeros in 4 values.
    """

    linear: frozenset[str]
    rules: tuple[Rule, ...] = ()
    linear_output: frozenset[str] = frozenset()
    writes_float: bool = False
    writes_outputs: bool = False
    folds: frozenset[str] = frozenset()
    opens: frozenset[str] = frozenset()
    stored: frozenset[str] = frozenset()
    recurrent: Mapping[str, int] = field(default_factory=dict)
    skips_zeros: bool = False

    def slow_linear(self, node: Node) -> str | None:
        """Return the reason why a weighted op stays float although its type is in `linear`, or None."""
        return None

    def blocks(self, op: str, *, integers: bool = False) -> tuple[int, ...]:
        """Return the numbers of channels that the kernels of an op compute at a time, in descending order.

        They are those of a documented machine, not of the one that runs; 1: no number of channels is slower than a
        larger one.

        Args:
            op: type of the layer that writes or reads the channels.
            integers: the model will be quantized.
        """
        return (1,)

    def channel_multiple(self, op: str, channels: int, *, integers: bool = False) -> int:
        """Return the number of which the channels of an op should be a multiple, so that fewer take less time.

        It is the largest block of its kernels of which the channels fill more than `WIDE`, else the smallest.

        Args:
            op, integers: see `blocks`.
            channels: their number.
        """
        blocks = self.blocks(op, integers=integers)
        return next((block for block in blocks if channels > WIDE * block), blocks[-1])

    def rule_for(self, kind: str) -> Rule | None:
        """Return the first rule for an op type or ``block:kind``, or None."""
        return next((rule for rule in self.rules if kind in rule.ops), None)

    def unit_for(self, op: str) -> Rule | None:
        """Return the rule for an op type if it places whole node units, or None."""
        rule = self.rule_for(op)
        return None if rule is None or rule.inputs != "unit" else rule

    @property
    def quantizes_masks(self) -> bool:
        """Whether float constants such as attention masks are quantized, so that they must be finite numbers."""
        return any(rule.constants == "operands" for rule in self.rules)

"""Base types of backends: the rules and limits of a runtime, as data that planning reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, Literal

from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.backends.runtime_types import Runtime
from sbonnx.backends.tensorrt.profiles import INT4_BITS, VersionProfile
from sbonnx.cpu import THIS, TargetCpu, target_cpu
from sbonnx.graph import Body, Graph, Node, edit, query
from sbonnx.ops import ELEMENTWISE, MATRIX_PRODUCTS
from sbonnx.spec import ANY_SCALE, QuantSpec, ScaleLimits


def never(node: Node) -> str | None:
    """Return None: no reason against any node (default of `Rule.unless`)."""
    return None


def any_type(node: Node, spec: QuantSpec) -> str | None:
    """Return None: no reason against any weight type (default of `Backend.unfit`)."""
    return None


def short_weights(node: Node, index: int, spec: QuantSpec) -> QuantSpec:
    """Return a weight type with one bit less (default of `Backend.safe_sums`)."""
    return spec.short()


def any_params(node: Node, spec: QuantSpec) -> tuple[float, int] | None:
    """Return None: no output has a prescribed scale (default of `Backend.output_params`)."""
    return None


def any_zero_point(node: Node, index: int) -> bool:
    """Return False: no input needs the zero point 0 (default of `Backend.centred`)."""
    return False


def interpolates(node: Node) -> str | None:
    """Return a reason against quantizing a Resize that computes new values; None for mode "nearest"."""
    mode = node.attrs.get("mode", "nearest")
    return None if mode == "nearest" else f"mode '{mode}' computes new values"


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


def any_count(op: str, *, integers: bool) -> tuple[int, ...]:
    """Return one block of one channel: no number of channels is slower than a larger one (`Backend.blocks`)."""
    return (1,)


WIDE: Final = 2
"""Blocks of channels above which the smaller one is not needed: fewer leave a choice of one or two numbers."""


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


@dataclass(frozen=True)
class Backend:
    """Rules and limits of one runtime.

    Attributes:
        name: name in recipes.
        linear: weighted ops whose weights and inputs are quantized.
        slow_linear: returns the reason why a weighted op stays float although its type is in `linear`, or None.
        linear_output: weighted ops that also need a pair after them (and after an activation that folds into them).
            They stay float where they write an output of the graph.
        writes_float: kernels of `linear_output` write integers or float: the pair after them is placed only if a reader
            wants integers.
        rules: placement at all other ops; the first rule whose `ops` contain the op applies.
        folds: activations that the runtime folds into the preceding op, so that the pair is placed after them: op
            types, or block kinds written ``block:gelu``.
        joins_concat: quantized tensors around a Concat share one scale.
        int32_bias: biases become int32 codes with scale s_x * s_w.
        embedding: tables of Gather are quantized, with one scale per row.
        recurrent: weights of LSTM, GRU and RNN, which compute in float, are stored in 8 bits.
        spec: maps side, bits, symmetry and axis of a recipe to a `QuantSpec`.
        any_bits: accepts every width from 2 to 16.
        legalise: rewrites a graph into the form that the runtime needs, in place; returns what was done.
        costs: loads the kernel costs from the path of a table, or those bundled for a CPU. None if nothing was
            measured: then every op with an integer kernel is quantized.
        saturates: on CPUs without 8-bit dot products its kernels add two products in 16 bits.
        safe_sums: returns the type of the 8-bit signed weight at input `index` of a node for which such sums do not
            saturate.
        writes_outputs: outputs of the graph get a pair as well. Without, they stay float, and so does an op of
            `linear_output` that writes one.
        quantizes_masks: constants of attention masks are quantized, so they must be finite numbers.
        opens: kinds of recognised blocks whose nodes are placed one by one.
        one_scale: weighted ops whose weights have one scale, whatever the recipe says, and a zero point if the recipe
            leaves the scheme to the width.
        output_params: returns the scale and zero point that the runtime prescribes for the output of an op in a type,
            or None.
        judged_without: onnxruntime graph transformers to disable when onnxruntime is used in place of this runtime.
        packs_weights: weights of up to 4 bits are 8-bit codes in the graph, packed when the file is written.
        block_products: has products of block-wise weights (MatMulNBits), for the mode weight_only.
        clips_fp8: Max and Min before fp8 pairs prevent fusions that do not support them.
        unfit: returns the reason why a weighted op cannot have weights of a type, or None.
        int4_blocks: block sizes of 4-bit weights, whose inputs stay float; empty if any form is supported, with
            quantized inputs as well.
        scales: smallest and largest scale.
        profile: version profile, for runtimes that have several.
        blocks: returns the numbers of channels that the kernels of an op compute at a time, in descending order, in
            float or in integers. They are those of a documented machine, not of the one that runs.
        centred: returns whether input `index` of an op needs a symmetric type, with zero point 0, whatever the recipe's
            scheme.
        runtime: executes files on this machine, for verification; None: onnxruntime takes its place.
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
    writes_outputs: bool = False
    quantizes_masks: bool = False
    opens: frozenset[str] = frozenset()
    one_scale: frozenset[str] = frozenset()
    output_params: Callable[[Node, QuantSpec], tuple[float, int] | None] = any_params
    judged_without: tuple[str, ...] = ()
    packs_weights: bool = False
    recurrent: bool = False
    block_products: bool = False
    clips_fp8: bool = True
    costs: Callable[[str | None, TargetCpu], KernelCosts] | None = None
    saturates: bool = False
    safe_sums: Callable[[Node, int, QuantSpec], QuantSpec] = short_weights
    unfit: Callable[[Node, QuantSpec], str | None] = any_type
    int4_blocks: tuple[int, ...] = ()
    scales: ScaleLimits = ANY_SCALE
    profile: VersionProfile | None = None
    blocks: Callable[..., tuple[int, ...]] = any_count
    centred: Callable[[Node, int], bool] = any_zero_point
    writes_float: bool = False
    runtime: Runtime | None = None

    def channel_multiple(self, op: str, channels: int, *, integers: bool = False) -> int:
        """Return the number of which the channels of an op should be a multiple, so that fewer take less time.

        It is the largest block of its kernels of which the channels fill more than `WIDE`, else the smallest.

        Args:
            op: type of the layer that writes or reads the channels.
            channels: their number.
            integers: the model will be quantized.
        """
        blocks = self.blocks(op, integers=integers)
        return next((block for block in blocks if channels > WIDE * block), blocks[-1])

    def alone(self, spec: QuantSpec) -> bool:
        """Return whether weights of this type need inputs that stay float (weight-only)."""
        return bool(self.int4_blocks) and not spec.is_fp8 and spec.bits <= INT4_BITS

    def kernel_costs(self, table: str, cpu: str = THIS) -> KernelCosts | None:
        """Return the table that KERNEL_COSTS and CPU select, or None.

        Raises:
            RecipeError: the file cannot be read.
        """
        if self.costs is None or table == "none":
            return None
        return self.costs(None if table == "bundled" else table, target_cpu(cpu))

    def rule_for(self, kind: str) -> Rule | None:
        """Return the first rule for an op type or ``block:kind``, or None."""
        return next((rule for rule in self.rules if kind in rule.ops), None)


def signed_when_symmetric(side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
    """Return Sparsebit's types: symmetric is signed with zero point 0, affine is unsigned."""
    return QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric, axis=axis)


ScopeRewrite = Callable[[Body, edit.Names], Iterator[str]]
"""Rewrite of one scope, in place; yields one sentence per change."""


def in_every_scope(*, sweep: bool = True, sort: bool = True) -> Callable[[ScopeRewrite], Callable[[Graph], list[str]]]:
    """Turn a rewrite of one scope into one of every scope of a graph, which returns the sentences.

    Args:
        sweep, sort: remove nodes without use, sort the nodes, if something changed.
    """

    def decorated(change: ScopeRewrite) -> Callable[[Graph], list[str]]:
        @wraps(change)
        def rewrite(graph: Graph) -> list[str]:
            names = edit.Names(graph)
            done = [text for _, body in query.scopes(graph) for text in change(body, names)]
            if done and sweep:
                edit.sweep(graph)
            if done and sort:
                edit.sort(graph)
            return done

        return rewrite

    return decorated

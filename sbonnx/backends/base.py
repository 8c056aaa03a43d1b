"""Base types of backends: a runtime as one value that planning, writing and verification read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Literal

from sbonnx.backends.kernel_costs import KernelCosts
from sbonnx.backends.mode_limits import ANY_STATIC, STATIC, ModeLimits
from sbonnx.backends.placement_rules import Placement
from sbonnx.backends.runtime_types import EngineInput, Runtime
from sbonnx.graph import Body, Graph, Node, edit, query
from sbonnx.small_floats import Kind
from sbonnx.spec import ANY_SCALE, QuantSpec, ScaleLimits
from sbonnx.system.cpu import THIS, TargetCpu, target_cpu
from sbonnx.system.machine_costs import table_of


@dataclass(frozen=True)
class WideTypes:
    """Types for files whose outputs would be lost with 8-bit activations.

    Attributes:
        bits: of single activations.
        mixed: ops whose inputs may have other widths than their output; all others have one width.
        channels: weighted ops of `one_scale` whose weights can have a scale for each channel.
    """

    bits: int
    mixed: frozenset[str] = frozenset()
    channels: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Numbers:
    """Types and scales of a runtime. A backend overrides the methods for types that differ.

    Attributes:
        any_bits: accepts every width from 2 to 16, and weights alone: nothing but the numbers is simulated.
        int32_bias: biases become int32 codes with scale s_x * s_w.
        joins_concat: quantized tensors around a Concat share one scale.
        one_scale: weighted ops whose weights have one scale, whatever the recipe says, and a zero point if the recipe
            leaves the scheme to the width.
        scales: smallest and largest scale.
        fp8: quantization to 8-bit floats: "kernels" compute on it, from both inputs, and Max and Min before the pairs
            would prevent their fusion; "simulated"; or "none".
        block_floats: kinds of small floats in blocks that weights may have, with float inputs.
        only_channels: integer kernels read and write float32 at most, with one scale per channel of a weight: neither
            half precision nor, with static activations, blocks.
        half_blocks: the float part of a graph may be half precision if its integers are weights in blocks only.
        tensor_overrides: types, scales and ranges of single tensors can be given in a file (TENSOR_OVERRIDES).
        saturates: on CPUs without 8-bit dot products its kernels add two products in 16 bits.
        wide: types for files whose outputs would be lost; None: there are none.
        narrow_depthwise: signed 8-bit weights of depthwise convolutions have no code -128. onnxruntime's kernels of 3x3
            for ARM64 subtract 128 from the input and add two products in int16, which two times (-128)^2 exceeds.
    """

    any_bits: bool = False
    int32_bias: bool = False
    joins_concat: bool = False
    one_scale: frozenset[str] = frozenset()
    scales: ScaleLimits = ANY_SCALE
    fp8: Literal["none", "simulated", "kernels"] = "none"
    block_floats: tuple[Kind, ...] = ()
    only_channels: bool = False
    half_blocks: bool = False
    tensor_overrides: bool = False
    saturates: bool = False
    wide: WideTypes | None = None
    narrow_depthwise: bool = False

    def spec(self, side: Literal["w", "a"], bits: int, symmetric: bool, axis: int | None) -> QuantSpec:
        """Return the type for a side, width, symmetry and axis of a recipe.

        The default are Sparsebit's types: symmetric is signed with zero point 0, affine is unsigned.
        """
        return QuantSpec(bits=bits, signed=symmetric, symmetric=symmetric, axis=axis)

    def centred(self, node: Node, index: int) -> bool:
        """Return whether input `index` of an op needs a symmetric type, whatever the recipe's scheme."""
        return False

    def output_params(self, node: Node, spec: QuantSpec) -> tuple[float, int] | None:
        """Return the scale and zero point that the runtime prescribes for the output of an op in a type, or None."""
        return None

    def unfit(self, node: Node, spec: QuantSpec) -> str | None:
        """Return the reason why a weighted op cannot have weights of a type, or None."""
        return None

    def safe_sums(self, node: Node, index: int, spec: QuantSpec) -> QuantSpec:
        """Return the type of the 8-bit signed weight at input `index` for which sums do not saturate.

        Only asked of a backend that `saturates`. The default has one bit less.
        """
        return spec.short()

    def block_sizes(self, spec: QuantSpec) -> tuple[int, ...]:
        """Return the block sizes of a weight type whose inputs stay float.

        The default is empty: any form is supported, with quantized inputs as well.
        """
        return ()


@dataclass(frozen=True)
class Files:
    """Form of the files that a runtime reads, and how they are verified. A backend overrides the methods.

    Attributes:
        packs_weights: weights of up to 4 bits are 8-bit codes in the graph, packed when the file is written.
        integer_operators: has onnxruntime's operators on integers: QLinearConv and similar ones for FORMAT qoperator,
            products with weights in blocks (MatMulNBits) for the mode weight_only.
        judged_without: onnxruntime graph transformers to disable when onnxruntime is used in place of this runtime.
        variants: files of a model folder by their dtype in transformers.js: recipe keys, or None for the recipe of the
            user; empty: a folder has one file of each model.
        builds_engine: an engine is built from the file, by the command of `engine_command`.
        whole_gelus: has Gelu and no Erf: GELUs that are decomposed by Erf are written as one operator.
    """

    packs_weights: bool = False
    integer_operators: bool = False
    judged_without: tuple[str, ...] = ()
    variants: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)
    builds_engine: bool = False
    whole_gelus: bool = False

    def legalise(self, graph: Graph) -> list[str]:
        """Rewrite a graph into the form that the runtime needs, in place; return what was done."""
        return []

    def quantize_recurrent(self, graph: Graph, nodes: Collection[str]) -> list[str]:
        """Write the named recurrent ops, whose weights are dequantized, as integer ops; return what was done."""
        return []

    def decode_weights(self, graph: Graph, nodes: Collection[str]) -> list[str]:
        """Write the dequantized weights of the named ops so that they are decoded once; return what was done."""
        return []

    @property
    def version(self) -> str | None:
        """Version of the runtime, if it has several."""
        return None

    def check_opset(self, model: str, opset: int, *, needed: int) -> None:
        """Check that the runtime's parser reads the opset of a result.

        Args:
            model: name or path of the model.
            opset: of the model as it was given.
            needed: by the types of its Q/DQ.

        Raises:
            ModelError: it does not.
        """

    def engine_command(self, file: str, inputs: Iterable[EngineInput], *, types: Collection[str], strong: bool) -> str:
        """Return the command line that builds an engine from a file; "" without `builds_engine`.

        Args:
            file: path of the ONNX file.
            inputs: of the network.
            types: quantized types in the file: "int8", "fp8", "int4", "nvfp4".
            strong: the float part of the file has the types to compute in (HIGH_PRECISION).
        """
        return ""


@dataclass(frozen=True)
class Backend:
    """Rules and limits of one runtime.

    Attributes:
        name: name in recipes.
        placement: what is quantized, and where pairs belong.
        numbers: types and scales.
        files: what it reads.
        modes: limits and defaults by mode, static among them; a recipe that asks for another mode is refused.
        costs: loads the kernel costs from the path of a table, or those bundled for a CPU. None if nothing was
            measured: then every op with an integer kernel is quantized.
        tunable: the costs of its kernels on single machines are measured by ``sbonnx tune``.
        runtime: executes files on this machine, for verification; None: onnxruntime takes its place.
    """

    name: str
    placement: Placement
    numbers: Numbers = field(default_factory=Numbers)
    files: Files = field(default_factory=Files)
    modes: Mapping[str, ModeLimits] = field(default_factory=lambda: {STATIC: ANY_STATIC})
    costs: Callable[[str | None, TargetCpu], KernelCosts] | None = None
    tunable: bool = False
    runtime: Runtime | None = None

    @property
    def times_files(self) -> bool:
        """Whether times of its files on this machine are those of its users: it has kernel costs of a CPU."""
        return self.costs is not None

    @property
    def judged_on_cpu(self) -> bool:
        """Whether its files are verified on the CPU, also where the recipe's device is a GPU.

        Integer kernels are there; onnxruntime's CUDA provider computes pairs of Q and DQ in float.
        """
        return not (self.files.builds_engine or self.numbers.any_bits)

    def cost_file(self, table: str, cpu: str = THIS) -> str | None:
        """Return the path of the table that KERNEL_COSTS and CPU select; None: a bundled one, or none."""
        if self.costs is None or table == "none":
            return None
        if table != "bundled":
            return table
        path = table_of(cpu) if self.tunable else None
        return None if path is None else str(path)

    def kernel_costs(self, table: str, cpu: str = THIS) -> KernelCosts | None:
        """Return the table that KERNEL_COSTS and CPU select, or None.

        Raises:
            RecipeError: the file cannot be read.
        """
        if self.costs is None or table == "none":
            return None
        return self.costs(self.cost_file(table, cpu), target_cpu(cpu))


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

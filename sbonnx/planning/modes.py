"""Modes that quantize weights but no activations statically: dynamic quantization and weight-only quantization."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from sbonnx.backends.mode_limits import ModeLimits
from sbonnx.backends.onnxruntime import ort_nbits as nbits_kernels
from sbonnx.backends.onnxruntime.ort_nbits import MIN_BLOCK
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.linear.embedding import table_of
from sbonnx.ops import DEQUANTIZE, EMBEDDING, EXPERTS, INTEGER_OPS, LINEAR, MATRIX_PRODUCTS, RECURRENT
from sbonnx.planning.site_builder import NO_EXPERTS, WEIGHT_ONLY, SiteBuilder, in_blocks, spec_of, weight_draft
from sbonnx.planning.survey import FLOATS, LinearInputs, Place
from sbonnx.planning.types import Reader, RoundingChoice
from sbonnx.recipe import TensorSettings
from sbonnx.report.codes import Reason
from sbonnx.spec import QuantSpec

DYNAMIC: Final = "dynamic"

EXPERT_PROJECTIONS: Final = 2
"""Projections of an expert that QMoE computes on the CPU: FC1 (gate and up interleaved) and FC2."""

CONVOLUTION: Final = {
    DYNAMIC: "onnxruntime's ConvInteger takes 1.3 to 6 times the time of a float Conv",
    WEIGHT_ONLY: "no runtime has a kernel for a convolution with its weight alone in integers",
}
"""Reasons why weighted ops other than matrix products stay float, by mode."""


@dataclass(frozen=True)
class ModePlacer(SiteBuilder):
    """Placement of weight sites for modes other than static; fills `drafts` in place."""

    def run(self) -> None:
        """Place every site, in topological order."""
        why = Reason("nothing-measured", f"MODE: {self.recipe.mode} quantizes weights, and measures nothing")
        if self.recipe.calibration.asym.enable:
            self.drafts.refuse("measure behind quantized layers", "CALIBRATION.ASYM", why)
        for name, wanted in self.recipe.quantize_inputs_of.to_keys().items():
            if wanted is True and name != "EMBEDDING":
                self.drafts.refuse("quantize inputs", f"QUANTIZE_INPUTS_OF.{name}", why)
        for place in self.survey.places:
            node = place.node
            if node.op in INTEGER_OPS:
                self._refuse(node, Reason("already-quantized", f"{node.op}: is quantized already"))
            elif node.op in EMBEDDING:
                self._at_table(place)
            elif node.op in LINEAR:
                self._at_linear(place)
            elif node.op in RECURRENT:
                self.recurrent(place)
            elif node.op in EXPERTS:
                self._at_experts(place)

    def _refuse(self, node: Node, why: Reason) -> None:
        self.drafts.refuse("quantize", node.name, why)

    def _at_linear(self, place: Place) -> None:
        node, at = place.node, self.survey.linear.get(place.node.name)
        why = next(self._obstacles(place, at), None)
        if why is not None or at is None:
            self._refuse(node, why or _no_weight(node))
            too_small = why is not None and why.code == "weight-too-small"
            if not too_small and (self.recipe.mode == WEIGHT_ONLY or node.name in self.survey.in_loop):
                self.linear_storage(place)
            return
        if self.recipe.mode == DYNAMIC and self.settings_of("a", node, node.inputs[at.data]) is None:
            return
        self._weight(place, at.weight, at.axis, f"weight of {node.op}: {self._limits.why}")

    @property
    def _in_products(self) -> bool:
        """Whether the file has MatMulNBits in place of products."""
        return self.recipe.mode == WEIGHT_ONLY and self.backend.files.integer_operators

    @property
    def _limits(self) -> ModeLimits:
        return self.backend.modes[self.recipe.mode]

    def _obstacles(self, place: Place, at: LinearInputs | None) -> Iterator[Reason]:
        """Yield the reasons why the product of a node stays float; nothing if it can be quantized."""
        node = place.node
        if node.op not in MATRIX_PRODUCTS:
            yield Reason("not-matrix-product", f"{node.op}: {CONVOLUTION[self.recipe.mode]}")
        if node.name in self.survey.in_loop:
            yield Reason(
                "in-loop-body", f"it is in the body of '{self.survey.in_loop[node.name]}', which runs step by step"
            )
        if at is None:
            yield _no_weight(node)
            return
        if at.weight == 0:
            yield Reason("constant-on-left", "the constant is the left factor; kernels require it on the right")
        if node.name in self.survey.spectra:
            yield self.survey.spectra[node.name]
        weight, data = node.inputs[at.weight], node.inputs[at.data]
        if len(weight.shape) != 2:
            yield Reason("weight-not-matrix", f"its weight has {len(weight.shape)} axes, a matrix is required")
        if isinstance(data, Constant):
            yield Reason("both-inputs-constant", "both inputs are constants")
        if query.rank(data) in (0, 1):
            yield Reason("input-not-matrix", f"its input '{data.name}' is no matrix")
        yield from _gemm(node, at)
        kind = query.dtype(data) or query.dtype(weight)  # both are of one type
        if self.recipe.mode == DYNAMIC and kind != np.dtype(np.float32):
            yield Reason("type-not-float32", f"its type is {kind}, scales are computed from float32 only")
        size, asked = int(np.prod(weight.shape)), self.recipe.min_weight_size
        least = self._limits.smallest if asked is None else asked
        if size < least:
            why = "" if asked is not None else f", below which {self._limits.below}"
            yield Reason("weight-too-small", f"it has {size} weights; MIN_WEIGHT_SIZE is {least}{why}")

    def _weight(self, place: Place, index: int, axis: int | None, why: str) -> None:
        """Add a site on the weight at input `index`, unless the recipe keeps it float."""
        node = place.node
        weight = node.inputs[index]
        settings = self.settings_of("w", node, weight)
        if settings is None:
            return
        spec = spec_of(self.backend, "w", settings, axis if settings.per_channel else None)
        if settings.per_channel:
            size = self._block(settings)
            if node.name in self.survey.heads and axis is not None:
                size = self._table_block(settings, weight.shape[1 - axis]) or size
            spec = in_blocks(node, index, spec, size, self.numbers.block_sizes(spec))
        if self.recipe.mode == DYNAMIC:
            spec = self.safe_sums(node, index, spec)
        self._add(place, Reader(node.name, index), weight, spec, settings, why)
        if self._in_products and spec.block_size is not None:
            stored = nbits_kernels.stored_bits(spec.bits)
            slow = nbits_kernels.slow_path(stored, spec.block_size, self.recipe.usual_level)
            if slow is not None:
                self.drafts.refuse(
                    "take a fast kernel", f"MatMulNBits of {stored} bits", Reason("slow-block-kernel", slow.text())
                )

    def _add(
        self, place: Place, reader: Reader, weight: Tensor, spec: QuantSpec, settings: TensorSettings, why: str
    ) -> None:
        """Add a site for one reader of a weight: one for all readers of the same codes, in any scope."""
        unfit = self.numbers.unfit(place.node, spec)
        if unfit is not None:
            self.drafts.refuse("quantize weight", place.node.name, Reason.of(unfit, "by-backend"))
            return
        home = replace(place, scope=self.survey.scope_of_readers(weight))
        self.drafts.add(weight_draft(home, weight, spec, settings, why, self.recipe.mode), reader)

    def _block(self, settings: TensorSettings) -> int | None:
        """Return the block size of the recipe, else that of the mode; 2-bit kernels need larger ones (`SMALL`)."""
        block = settings.block_size or self._limits.block
        fast = settings.block_size is None and block is not None and self.backend.files.integer_operators
        return nbits_kernels.default_block(settings.bits, block) if fast and block is not None else block

    def _table_block(self, settings: TensorSettings, length: int) -> int | None:
        """Return the largest block size, up to that of the settings, that divides a row of a table; None: none does.

        Zero points of 4 bits must fill the bytes of a row: before 1.27, onnxruntime's GatherBlockQuantized reads those
        of a row with an odd number of blocks from a wrong byte.
        """
        block = self._block(settings)
        paired = self.backend.files.integer_operators and settings.bits <= 4
        while block is not None and block >= MIN_BLOCK and length % (2 * block if paired else block):
            block //= 2
        return block if block is None or block >= MIN_BLOCK else None

    def _at_experts(self, place: Place) -> None:
        """Quantize the weights of a mixture of experts, all of them, in blocks of one size."""
        node = place.node
        weights = {index: weight for index in EXPERTS[node.op] if (weight := query.optional_input(node, index))}
        why = self._no_experts(node, list(weights.values()))
        if why is not None:
            self._refuse(node, why)
            return
        settings = {index: self.settings_of("w", node, weight) for index, weight in weights.items()}
        chosen = {index: setting for index, setting in settings.items() if setting is not None}
        if len(chosen) < len(weights):
            return
        block = min(self._block(setting) or MIN_BLOCK for setting in chosen.values())
        while any(weight.shape[-1] % block for weight in weights.values()):
            block //= 2
        for index, setting in chosen.items():
            spec = replace(spec_of(self.backend, "w", setting, 2), block_size=block)
            draft = weight_draft(place, weights[index], spec, setting, "weight of experts", self.recipe.mode)
            if draft.rounding.scale == "hqq":  # fits matrices
                draft = replace(draft, rounding=RoundingChoice())
            self.drafts.add(draft, Reader(node.name, index))

    def _no_experts(self, node: Node, weights: Sequence[Tensor]) -> Reason | None:
        """Return the reason why a mixture of experts stays float, or None; see `sbonnx.export.nbits`."""
        if not self._limits.experts:
            return NO_EXPERTS
        if len(weights) != EXPERT_PROJECTIONS:
            return Reason("no-integer-kernel", f"{node.op}: onnxruntime's CPU computes two projections of an expert")
        for weight in weights:
            if not isinstance(weight, Constant) or query.dtype(weight) not in FLOATS or len(weight.shape) != 3:
                return Reason("weight-type", f"'{weight.name}' is no constant of floats (experts, outputs, inputs)")
            if weight.shape[-1] % MIN_BLOCK:
                return Reason(
                    "rows-not-in-blocks",
                    f"inputs of {weight.shape[-1]} values do not divide into blocks of {MIN_BLOCK}",
                )
        return None

    def _at_table(self, place: Place) -> None:
        """Quantize the table of a Gather: in blocks on request or if it is that of a vocabulary, else by row."""
        node, table = place.node, table_of(place.node)
        if table is None or not isinstance(table.matrix, Constant) or len(table.matrix.shape) != 2:
            return
        rows, length = table.matrix.shape[1 - table.row_axis], table.matrix.shape[table.row_axis]
        wanted = self.recipe.quantize_inputs_of.embedding
        if wanted is False or not str(query.dtype(table.matrix)).startswith("float"):
            return
        in_blocks = wanted or (self.backend.files.integer_operators and rows in self.survey.vocabulary)
        if not in_blocks and (self.numbers.any_bits or node.op not in self.rules.stored):
            return
        if node.name in self.survey.in_loop:
            self._refuse(node, Reason("in-loop-body", f"it is in the body of '{self.survey.in_loop[node.name]}'"))
            return
        if self.recipe.mode == DYNAMIC or not in_blocks:
            if not table.turned:
                self.table(place)
            return
        settings = self.settings_of("w", node, table.matrix)
        if settings is None:
            return
        spec = self.numbers.spec("w", settings.bits, settings.symmetric, 1 - table.row_axis)
        size = self._table_block(settings, length)
        if not settings.per_channel:
            spec = replace(spec, axis=None)
        elif size is not None:
            spec = replace(spec, axis=table.row_axis, block_size=size)
        elif self.backend.files.integer_operators:
            even = "an even number of " if settings.bits <= 4 else ""
            self._refuse(
                node,
                Reason(
                    "rows-not-in-blocks",
                    f"rows of {length} values do not divide into {even}blocks of {MIN_BLOCK} or more",
                ),
            )
            return
        why = "rows of an embedding: weights alone are rounded"
        self._add(place, Reader(table.reader.name, 0), table.matrix, spec, settings, why)


def _no_weight(node: Node) -> Reason:
    """Return why an op that could have a weight has none."""
    second = node.inputs[1] if len(node.inputs) > 1 else node.inputs[0]
    producer = query.producer(second)
    if producer is not None and producer.op in DEQUANTIZE:
        return Reason("already-quantized", "its weight is quantized already")
    return (
        Reason("weight-type", f"its weight is {query.dtype(second)}")
        if isinstance(second, Constant)
        else Reason("two-activations", "it multiplies two activations")
    )


def _gemm(node: Node, at: LinearInputs) -> Iterator[Reason]:
    """Yield the reasons that follow from Gemm attributes that the kernels do not support."""
    if node.op != "Gemm":
        return
    if node.attrs.get("transA", 0):
        yield Reason("gemm-transposes-input", "Gemm with transA, which kernels do not support")
    if float(node.attrs.get("alpha", 1.0)) <= 0:
        yield Reason("gemm-alpha", f"Gemm with alpha {node.attrs['alpha']:g}, which cannot be folded into a scale")
    if float(node.attrs.get("beta", 1.0)) != 1 and at.bias is not None:
        addend, weight = node.inputs[at.bias], node.inputs[at.weight]
        width = weight.shape[at.axis or 0]
        if not isinstance(addend, Constant) or int(np.prod(addend.shape)) != width or addend.shape[-1:] != (width,):
            yield Reason("gemm-beta", f"Gemm with beta {node.attrs['beta']:g} on an addend that is no constant vector")

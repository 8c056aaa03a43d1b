"""Cost model of onnxruntime's CPU kernels, from a table of measurements that can be repeated on any machine.

``sbonnx tune`` measures one of a single machine. The package has one for each class of x86 CPU that was measured
(``python -m benchmarks.kernels``); "machine" of a table names the CPUs. Absolute times differ between machines, but
ratios of 2 and more hardly do (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Final

from sbonnx.backends.kernel_costs import (
    IMAGE_RANK,
    Amounts,
    KernelCosts,
    Price,
    channels,
    conv_sizes,
    elements,
    file_digest,
    matrix_amounts,
    positions,
    read_table,
)
from sbonnx.backends.onnxruntime import kernel_variants
from sbonnx.backends.onnxruntime.kernel_variants import FOLDED_TAPS, LANES, LARGEST_WIDENING
from sbonnx.graph import Constant, Node, Tensor, query
from sbonnx.ops import (
    BLOCKED_POOLS,
    CONCATS,
    CONVOLUTIONS,
    FUSED_INTO_CONV,
    KEEPS_BLOCKS,
    MATRIX_PRODUCTS,
    MOVES_DATA,
    RESIZES,
    WINDOWED_POOLS,
)
from sbonnx.system.cpu import CPUS, TargetCpu

MEASURED: Final = {
    "vnni": Path(__file__).with_name("kernel_costs.json"),
    "avx2": Path(__file__).with_name("kernel_costs_avx2.json"),
    "avx512": Path(__file__).with_name("kernel_costs_avx512.json"),
}
"""Bundled tables by class of CPU, a key of `CPUS`."""

BUNDLED: Final = MEASURED["vnni"]

DERIVED: Final = {
    "amx": "vnni",  # tiles compute matrix products alone, faster: integers pay at least where they do with VNNI
    "arm64-dot": "vnni",  # SDOT: 16 products an instruction, and 4 in float, the ratio of VNNI
    "arm64": "avx2",  # products are widened to 16 bits before they are added: about twice the rate of float
}
"""Class whose measured table takes the place of one that was not measured, by the ratio of instructions."""

COMMAND: Final = "sbonnx tune (--output FILE for another machine)"
"""Writes a table."""


@dataclass(frozen=True)
class OrtKernelCosts(KernelCosts):
    """Table of the costs of onnxruntime's kernels.

    Attributes:
        fits, margin: see `KernelCosts`.
        block: channels per block of the float layout of convolutions on the measured machine.
    """

    block: int = LANES

    def quantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a QuantizeLinear after a float kernel; `reorder`: from blocks of channels."""
        size = elements(tensor)
        every = Amounts(read=size, write=size, pieces=positions(tensor))
        time = self.ns("QuantizeLinear", "u8", "float", every)
        if query.rank(tensor) == IMAGE_RANK:
            time += self.ns("Transpose", "NCHW to NHWC", "u8", every)
            time += self.ns("ReorderOutput", "", "float", every) if reorder else 0.0
        producer = query.producer(tensor)
        if producer is not None and producer.op == "MaxPool":
            # onnxruntime moves the QuantizeLinear before the pool, which then runs on codes with channels first
            time += self.ns("MaxPool", _window(producer), "u8", _pooled(producer))
        return time

    def dequantize(self, tensor: Tensor, *, reorder: bool) -> float:
        """Compute the time of a DequantizeLinear before float kernels; `reorder`: into blocks of channels.

        Includes the time of an activation that would be fused into a float kernel, and runs as a separate kernel here.
        """
        size = elements(tensor)
        every = Amounts(read=size, write=size, pieces=positions(tensor))
        time = self.ns("DequantizeLinear", "", "u8", every)
        if query.rank(tensor) == IMAGE_RANK:
            time += self.ns("Transpose", "NHWC to NCHW", "u8", every)
            time += self.reorder_input(tensor) if reorder else 0.0
        for reader, _ in query.readers(tensor):
            if self.fused(reader) is tensor:
                time += self.ns(*ELEMENTWISE_KERNELS[reader.op][0], Amounts(read=size, write=size))
        return time

    def reorder_input(self, tensor: Tensor) -> float:
        """Compute the time of a ReorderInput: from channels first to blocks of channels."""
        return self.ns("ReorderInput", "", "float", Amounts(read=elements(tensor), write=elements(tensor)))

    def reorder_output(self, tensor: Tensor) -> float:
        """Compute the time of a ReorderOutput: from blocks of channels to channels first."""
        return self.ns("ReorderOutput", "", "float", Amounts(read=elements(tensor), write=elements(tensor)))

    def writes_float(self, node: Node) -> bool:
        """Return whether the node is a matrix product: MatMulIntegerToFloat and QGemm write float."""
        return node.op in MATRIX_PRODUCTS

    def fused(self, node: Node) -> Tensor | None:
        """Return the tensor over which a node is fused into the preceding convolution in float, or None.

        Activations are (ConvActivationFusion), and sums whose other input has the same shape.
        """
        if node.op not in FUSED_INTO_CONV or not node.inputs:
            return None
        for tensor in node.inputs:
            before = query.producer(tensor)
            if before is None or before.op != "Conv" or len(query.readers(tensor)) != 1:
                continue
            if len(node.inputs) == 1 or all(query.shape(operand) == query.shape(tensor) for operand in node.inputs):
                return tensor
        return None

    def blocked(self, nodes: Iterable[Node]) -> frozenset[str]:
        """Return the names of the tensors that float kernels write in blocks of channels (NCHWc).

        Args:
            nodes: all nodes of a graph, in topological order.
        """
        names: set[str] = set()
        for node in nodes:
            if self._writes_blocks(node, names):
                names.add(node.outputs[0].name)
        return frozenset(names)

    def _writes_blocks(self, node: Node, blocked: set[str]) -> bool:
        values = [tensor for tensor in node.inputs if not isinstance(tensor, Constant) and not tensor.is_empty()]
        if not values or not node.outputs or channels(node.outputs[0]) is None:
            return False
        if node.op == "Conv":
            return self._float_variant(node).endswith("blocked")
        if node.op in BLOCKED_POOLS:
            return self._pools_blocks(node)
        reads = all(tensor.name in blocked for tensor in values)
        if node.op in CONCATS:
            whole = all((channels(tensor) or 1) % self.block == 0 for tensor in values)
            return reads and whole and node.attrs.get("axis") == 1
        same = all(query.shape(tensor) == query.shape(node.outputs[0]) for tensor in values)
        return reads and (node.op in RESIZES or (node.op in KEEPS_BLOCKS and same and len(values) == len(node.inputs)))

    def _pools_blocks(self, node: Node) -> bool:
        """Return whether a pool runs on blocks of channels: whole ones only."""
        return self.block > 1 and (channels(node.inputs[0]) or 1) % self.block == 0

    def reads_blocks(self, node: Node, index: int, blocked: Collection[str]) -> bool:
        """Return whether the float kernel of a node reads an input in blocks of channels."""
        if node.op == "Conv":
            variant = self._float_variant(node)
            return index == 0 and variant.endswith("blocked") and "few" not in variant
        return bool(node.outputs) and node.outputs[0].name in blocked

    def of(self, node: Node) -> Price | None:
        """Return both costs of a node, or None for an op without measurements."""
        if node.op in CONVOLUTIONS:
            return self._conv(node)
        if node.op in MATRIX_PRODUCTS:
            return self._product(node)
        if node.op in MOVES_DATA:
            moved = Amounts(write=elements(node.outputs[0]))
            return Price(*(self.ns("Slice", "channels", kind, moved) for kind in ("float", "u8")))
        kernels = ELEMENTWISE_KERNELS.get(node.op)
        if kernels is None:
            return None
        floats, integers = kernels
        if node.op in WINDOWED_POOLS:
            window = _window(node)
            amounts = _pooled(node)
            variant = f"{window} blocked" if self._pools_blocks(node) else window
            floats, integers = (floats[0], variant, floats[2]), (integers[0], window, integers[2])
        else:
            values = [tensor for tensor in node.inputs if not isinstance(tensor, Constant)]
            gathered = positions(node.outputs[0]) * len(values) if node.op in CONCATS else 0
            read = sum(map(elements, values))
            amounts = Amounts(read=read, write=elements(node.outputs[0]), pieces=gathered)
            if node.op in BLOCKED_POOLS and not self._pools_blocks(node):
                floats = (floats[0], "", floats[2])
        fused = self.fused(node) is not None
        return Price(0.0 if fused else self.ns(*floats, amounts), self.ns(*integers, amounts))

    def _float_variant(self, node: Node) -> str:
        """Return the variant of a Conv in float; on machines whose table has no blocked kernels, the plain one."""
        inner, taps, outputs, groups = conv_sizes(node)
        variant = kernel_variants.float_conv(inner, outputs, taps, groups, self.block)
        plain = variant.replace("blocked", "plain")
        as_measured = ("Conv", variant, "float") in self.fits or ("Conv", plain, "float") not in self.fits
        return variant if as_measured and query.rank(node.outputs[0]) in (None, IMAGE_RANK) else plain

    def _conv(self, node: Node) -> Price | None:
        """Return None for unmeasured kernels: 1-D and 3-D convolutions, and ConvTranspose."""
        if node.op != "Conv" or query.rank(node.inputs[1]) != IMAGE_RANK:
            return None
        return Price(self._float_conv(node), self._integer_conv(node))

    def _float_conv(self, node: Node) -> float:
        inner, taps, outputs, groups = conv_sizes(node)
        variant, places, read = self._float_variant(node), positions(node.outputs[0]), elements(node.inputs[0])
        if variant.endswith("blocked"):
            outputs = kernel_variants.padded(outputs, self.block)
            if groups == 1 and "few" not in variant:
                read = read // inner * kernel_variants.padded(inner, self.block)
                inner = kernel_variants.padded(inner, self.block)
        macs = places * outputs * inner * taps
        return self.ns("Conv", variant, "float", Amounts(macs, read, places * outputs, outputs * inner * taps))

    def _integer_conv(self, node: Node) -> float:
        """Return the time in integers, with the zero channels that `legalise` adds (`align`, `widen_stems`)."""
        inner, taps, outputs, groups = conv_sizes(node)
        places, read, before = positions(node.outputs[0]), elements(node.inputs[0]), 0.0
        rows = int(node.inputs[1].shape[2])
        if groups > 1 and inner == 1:
            wide = kernel_variants.padded(groups, LANES)
            if outputs == groups and wide <= LARGEST_WIDENING * groups:
                read, outputs, groups = read // groups * wide, wide, wide
        elif groups == 1 and kernel_variants.folds(inner, node.inputs[1].shape[2:], node.attrs):
            before = self.ns("DepthToSpace", "", "float", Amounts(write=read))
            inner, taps, rows = 4 * inner, -(-taps // 4), -(-rows // 2)
        elif groups == 1 and taps <= FOLDED_TAPS and inner % kernel_variants.DOT:
            read = read // inner * kernel_variants.padded(inner, kernel_variants.DOT)
            inner = kernel_variants.padded(inner, kernel_variants.DOT)
            before = self.ns("Pad", "1", "u8", Amounts(write=read))
        variant = kernel_variants.integer_conv(inner, outputs, taps, groups)
        copied = kernel_variants.copied(rows, taps) if groups == 1 and variant.endswith("odd") else taps
        pieces = places * copied if taps > 1 else 0
        amounts = Amounts(places * outputs * inner * taps, read, places * outputs, outputs * inner * taps, pieces)
        return before + self.ns("QLinearConv", variant, "u8", amounts)

    def _product(self, node: Node) -> Price:
        amounts = matrix_amounts(node)
        kernel = "QGemm" if node.op == "Gemm" else "MatMulIntegerToFloat"
        return Price(self.ns(node.op, "", "float", amounts), self.ns(kernel, "", "u8", amounts))


def _window(node: Node) -> str:
    """Return the measured window that is next to that of a pool."""
    return "2x2" if prod(node.attrs.get("kernel_shape", (1,))) <= SMALL_WINDOW else "3x3"


def _pooled(node: Node) -> Amounts:
    taps, write = prod(node.attrs.get("kernel_shape", (1,))), elements(node.outputs[0])
    return Amounts(write * taps, elements(node.inputs[0]), write, pieces=positions(node.outputs[0]) * taps)


_Kernel = tuple[str, str, str]

ELEMENTWISE_KERNELS: Final[dict[str, tuple[_Kernel, _Kernel]]] = {
    "Add": (("Add", "", "float"), ("QLinearAdd", "", "u8")),
    "Mul": (("Mul", "", "float"), ("QLinearMul", "", "u8")),
    "Concat": (("Concat", "", "float"), ("QLinearConcat", "NHWC", "u8")),
    "Sigmoid": (("Sigmoid", "", "float"), ("QLinearSigmoid", "", "u8")),
    "LeakyRelu": (("LeakyRelu", "", "float"), ("QLinearLeakyRelu", "", "u8")),
    "MaxPool": (("MaxPool", "", "float"), ("NhwcMaxPool", "", "u8")),
    "AveragePool": (("AveragePool", "", "float"), ("QLinearAveragePool", "", "u8")),
    "GlobalAveragePool": (("GlobalAveragePool", "blocked", "float"), ("QLinearGlobalAveragePool", "", "u8")),
    "Resize": (("Resize", "nearest", "float"), ("Resize", "nearest", "u8")),
    "Pad": (("Pad", "1", "float"), ("Pad", "1", "u8")),
    "Softmax": (("Softmax", "", "float"), ("QLinearSoftmax", "", "u8")),
}
"""Kernels that onnxruntime has for an op, in float and in integers: name, variant and type as in the table."""

SMALL_WINDOW: Final = 6
"""Taps up to which a pool counts as one of 2 x 2."""


def load_costs(path: str | None = None, cpu: TargetCpu = CPUS["vnni"]) -> OrtKernelCosts:
    """Load a table of kernel costs.

    Args:
        path: file that ``sbonnx tune`` or ``benchmarks.kernels`` wrote; None: the one that is bundled for `cpu`.
        cpu: kind of CPU.

    Raises:
        RecipeError: the file cannot be read, or is not such a table.
    """
    if path is None:
        kind = DERIVED.get(cpu.name, cpu.name)
        return _load(str(MEASURED[kind]), kind)
    return _load(path, file_digest(path, COMMAND))


@cache
def _load(path: str, source: str) -> OrtKernelCosts:
    fits, machine = read_table(path, COMMAND, lowest={"block": LANES, "margin": 1.0})
    return OrtKernelCosts(fits, int(machine["block"]), margin=machine["margin"], source=source)

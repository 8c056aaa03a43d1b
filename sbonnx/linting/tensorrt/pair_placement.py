"""TensorRT's rules for the placement of pairs: around fusions (P01 to P10), and on ops better in float (P11 to P15)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from sbonnx.backends.tensorrt.backend import FEW, TENSORRT
from sbonnx.graph import Node, Tensor, query
from sbonnx.linear.layer import channel_axes
from sbonnx.linting.model_view import COMMUTES, Quantizer, View
from sbonnx.linting.tensorrt.pair_parameters import Site
from sbonnx.ops import (
    ADDS,
    CONCATS,
    CONVOLUTIONS,
    ELEMENTWISE,
    EPILOGUES,
    HALF_LOSES,
    LINEAR,
    MULTIPLIES,
    PICKS_MAX,
    POOLS,
    QDQ,
    RECTIFIERS,
    RESIZES,
    SOFTMAX,
    STANDARD_DOMAINS,
)
from sbonnx.small_floats import FP8
from sbonnx.spec import QuantSpec

TAKES_INT8: Final = frozenset(LINEAR) | ADDS | MULTIPLIES | POOLS | RESIZES | CONCATS
"""Ops that benefit from an int8 input."""

BETWEEN: Final = QDQ | {"BatchNormalization"}
"""Ops allowed between a convolution and the Add that it fuses with, or would fuse with without the pairs."""

WEIGHT_ONLY: Final = ("int4", "float4")
"""Weight types that are used without quantized activations."""


def one_sided(view: View) -> Iterator[Site]:
    """P01: Find weighted ops with a pair on only the activation or only the weight."""
    for node in view.weighted:
        at = LINEAR[node.op].weight
        data, weight = view.dequantizer(node.inputs[1 - at]), view.dequantizer(node.inputs[at])
        if (data is None) == (weight is None):
            continue
        if weight is not None and (weight.blocked or (weight.codes or "").startswith(WEIGHT_ONLY)):
            continue
        has, lacks = ("its weight", "activation") if data is None else ("its activation", "weight")
        tensor = node.inputs[1 - at] if data is None else node.inputs[at]
        yield node.name, tensor.name, f"{node.op} has Q/DQ on {has}, the {lacks} '{tensor.name}' is float"


def weighted_before(view: View, tensor: Tensor) -> Node | None:
    """Return the weighted op whose kernel computes a tensor, directly or with the ops that TensorRT fuses into it."""
    node = query.producer(tensor)
    while node is not None:
        if node.op in LINEAR:
            return node if view.weight(node) is not None else None
        data = _fused_data(view, node)
        if data is None or len(query.readers(data)) > (2 if node.op in MULTIPLIES else 1):
            return None
        node = query.producer(data)
    return None


def _fused_data(view: View, node: Node) -> Tensor | None:
    """Return the data input of an op that TensorRT can fuse, or None for other ops."""
    if node.op in EPILOGUES:
        return node.inputs[0]
    if node.op in ADDS:
        other = [tensor for tensor in node.inputs if not view.is_constant(tensor)]
        return other[0] if len(other) == 1 else None
    if node.op in MULTIPLIES:  # x * Sigmoid(x)
        for factor, gated in (node.inputs, reversed(node.inputs)):
            gate = query.producer(factor)
            if gate is not None and gate.op == "Sigmoid" and gate.inputs[0] is gated:
                return gated
    return None


def split_fusions(view: View) -> Iterator[tuple[Quantizer, Node, Node, int]]:
    """Yield pairs between a weighted op and an op that would fuse into it: QuantizeLinear, both ops, input index."""
    for quantizer in view.quantizers:
        source = weighted_before(view, quantizer.data) if quantizer.quantizes else None
        if source is None:
            continue
        for back in view.dequantizers_of(quantizer):
            for node, index in query.readers(back.output):
                adds = node.op in ADDS and any(view.is_constant(tensor) for tensor in node.inputs)
                if (index == 0 and node.op in EPILOGUES) or adds:
                    yield quantizer, source, node, index


def splits_fusion(view: View) -> Iterator[Site]:
    """P02: Find pairs between a weighted op and the ops that would fuse into it."""
    for quantizer, source, node, _ in split_fusions(view):
        why = f"Q/DQ between {source.op} '{source.name}' and {node.op} '{node.name}', which would fuse"
        yield quantizer.name, quantizer.data.name, why


def needless_outputs(view: View) -> Iterator[Site]:
    """P03: Find quantized outputs of weighted ops without a reader that benefits from int8."""
    for quantizer in view.quantizers:
        source = weighted_before(view, quantizer.data) if quantizer.quantizes else None
        if source is None:
            continue
        backs = view.dequantizers_of(quantizer)
        if backs and not any(_reaches(view, back.output) for back in backs):
            readers = sorted({node.op for back in backs for node, _ in query.readers(back.output)})
            why = (
                f"the output of {source.op} '{source.name}' is quantized for {', '.join(readers) or 'an output'} alone"
            )
            yield quantizer.name, quantizer.data.name, why


def _reaches(view: View, tensor: Tensor) -> bool:
    """Return whether an op that benefits from int8 reads a tensor, directly or through ops that commute or fuse."""
    stack, seen = [tensor], {id(tensor)}
    while stack:
        for node, _ in query.readers(stack.pop()):
            if node.op in TAKES_INT8 or node.op in QDQ or node.op in EPILOGUES or node.domain:
                return True  # P02 reports a fusible op directly after; an op of another domain may need it
            if node.op in COMMUTES:
                for output in node.outputs:
                    if id(output) not in seen:
                        seen.add(id(output))
                        stack.append(output)
    return False


def residual_adds(view: View) -> Iterator[Site]:
    """P04: Find residual Adds with a convolution where the skip branch is not the only one with a pair."""
    for node in view.nodes:
        if node.op not in ADDS or any(view.is_constant(tensor) for tensor in node.inputs):
            continue
        backs = [view.dequantizer(tensor) for tensor in node.inputs]
        convs = [conv_branch(view, tensor, back) for tensor, back in zip(node.inputs, backs, strict=True)]
        if not any(convs):
            continue
        why = _residual_fault(backs, convs)
        if why:
            yield node.name, node.outputs[0].name, why


def conv_branch(view: View, tensor: Tensor, back: Quantizer | None) -> str:
    """Return the name of the int8 convolution that feeds only this Add input, through batch norm and pairs, or ""."""
    node = query.producer(tensor if back is None else back.data)
    while node is not None and node.op in BETWEEN and len(query.readers(node.outputs[0])) == 1:
        node = query.producer(node.inputs[0])
    if node is None or node.op not in CONVOLUTIONS or len(query.readers(node.outputs[0])) != 1:
        return ""
    weight = view.weight(node)
    return str(node.name) if weight is not None and view.dequantizer(weight) is not None else ""


def _residual_fault(backs: list[Quantizer | None], convs: list[str]) -> str | None:
    behind = [back is not None for back in backs]
    if all(behind):
        conv = next(filter(None, convs))
        return f"both branches have Q/DQ: the Add no longer fuses with Conv '{conv}'"
    if not any(behind):
        conv = next(filter(None, convs))
        return f"the skip branch is float: Conv '{conv}' fused with the Add returns float"
    at = behind.index(True)
    if convs[at] and not convs[1 - at]:
        return f"the branch of Conv '{convs[at]}' has Q/DQ, and the skip branch is float"
    return None


def repeated(view: View) -> Iterator[Site]:
    """P05: Find tensors with more than one QuantizeLinear."""
    first: dict[int, Quantizer] = {}
    for quantizer in view.quantizers:
        if not quantizer.quantizes or not view.is_activation_pair(quantizer):
            continue
        earlier = first.setdefault(id(quantizer.data), quantizer)
        if earlier is not quantizer:
            numbers = "the same numbers" if quantizer.same_numbers(earlier) else "other numbers"
            yield (
                quantizer.name,
                quantizer.data.name,
                f"'{quantizer.data.name}' is quantized by '{earlier.name}' already, with {numbers}",
            )


def concat_scales(view: View) -> Iterator[Site]:
    """P06: Find Concats with quantized inputs or outputs of different scales."""
    for node in view.nodes:
        if node.op not in CONCATS:
            continue
        sides = [side for tensor in node.inputs if (side := view.dequantizer(tensor)) is not None]
        if not sides:
            continue
        sides += view.quantized_readers(node.outputs[0])
        other = next((side for side in sides if not side.same_scale(sides[0])), None)
        if other is not None:
            why = f"'{sides[0].name}' and '{other.name}' around the Concat have different scales"
            yield node.name, node.outputs[0].name, why


def rescaled_moves(view: View) -> Iterator[Site]:
    """P07: Find pairs with different scales around ops that commute with quantization."""
    for quantizer in view.quantizers:
        node = query.producer(quantizer.data)
        if not quantizer.quantizes or node is None or node.op not in COMMUTES:
            continue
        before = view.dequantizer(quantizer.data)
        if before is not None and not quantizer.same_scale(before) and view.is_activation_pair(before):
            why = f"{node.op} '{node.name}' between '{before.name}' and '{quantizer.name}', which have different scales"
            yield quantizer.name, quantizer.data.name, why


def half_fused(view: View) -> Iterator[Site]:
    """P08: Find ops with int8 inputs whose output is not quantized."""
    for node in view.nodes:
        if node.op not in POOLS | ADDS | RESIZES:
            continue
        data = node.inputs if node.op in ADDS else node.inputs[:1]
        if any(view.is_constant(tensor) or view.dequantizer(tensor) is None for tensor in data):
            continue
        if next(view.quantized_readers(node.outputs[0], COMMUTES | EPILOGUES), None) is None:
            yield node.name, node.outputs[0].name, f"{node.op} reads int8, and its output is not quantized"


def requantized(view: View) -> Iterator[Site]:
    """P09: Find a DequantizeLinear directly before a QuantizeLinear with other parameters."""
    for quantizer in view.quantizers:
        before = view.quantizer_of(quantizer.data) if quantizer.quantizes else None
        if before is not None and not before.quantizes and not quantizer.same_numbers(before):
            yield (
                quantizer.name,
                quantizer.data.name,
                f"quantized again right after '{before.name}', with other numbers",
            )


def quantized_interface(view: View) -> Iterator[Site]:
    """P10: Find pairs on outputs of the graph, and graph inputs that are codes."""
    inputs = {id(tensor) for tensor in view.graph.inputs}
    leaving = {id(tensor) for tensor in view.graph.outputs}
    for quantizer in view.quantizers:
        if id(quantizer.output) in leaving:
            what = "codes" if quantizer.quantizes else "quantized"
            yield quantizer.name, quantizer.output.name, f"the output '{quantizer.output.name}' of the graph is {what}"
        if not quantizer.quantizes and id(quantizer.data) in inputs:
            yield quantizer.name, quantizer.data.name, f"the input '{quantizer.data.name}' of the graph holds codes"


PLAIN: Final = frozenset(LINEAR) | POOLS | PICKS_MAX | ADDS | ELEMENTWISE | RECTIFIERS | CONCATS
"""Ops that a DLA runs in int8."""

LONGEST_INT8: Final = 512
"""Longest sequence for which int8 attention fuses."""

WHOLE_VECTOR: Final = 32
"""Channels that an int8 kernel reads at once."""

FP8_HEAD: Final = range(9, 257)
"""Head sizes for which fp8 attention fuses."""


def high_precision(view: View) -> Iterator[Site]:
    """P11: Find pairs before softmax and norms, at masks, and on only one input of attention's products."""
    for node in view.nodes:
        if node.op in HALF_LOSES and (quantizer := view.dequantizer(node.inputs[0])) is not None:
            yield (
                node.name,
                node.inputs[0].name,
                f"{node.op} reads what '{quantizer.name}' returns: it wants high precision",
            )
        elif node.op in ADDS and any(reader.op in SOFTMAX for reader, _ in query.readers(node.outputs[0])):
            masked = [tensor for tensor in node.inputs if view.dequantizer(tensor) is not None]
            if masked:
                yield node.name, masked[0].name, "the Add of a mask before Softmax reads Q/DQ"
        elif node.op == "MatMul" and not any(view.is_constant(tensor) for tensor in node.inputs):
            why = _product(view, node)
            if why:
                yield node.name, node.outputs[0].name, why


def _product(view: View, node: Node) -> str | None:
    sides = [view.dequantizer(tensor) for tensor in node.inputs]
    if not any(sides):
        return None
    if None in sides:
        return "only one factor of a product of activations has Q/DQ: quantize both or none"
    first, shape = query.shape(node.inputs[0]), query.shape(node.outputs[0])
    if not first or not shape or not _is_scores(view, node):
        return None
    length, head = shape[-1], first[-1]
    codes = {side.codes for side in sides if side is not None}
    if codes == {"int8"} and isinstance(length, int) and length > LONGEST_INT8:
        return f"int8 attention over {length} positions; TensorRT fuses up to {LONGEST_INT8}"
    if codes == {FP8} and isinstance(head, int) and head not in FP8_HEAD:
        return f"fp8 attention with heads of {head}; TensorRT fuses {FP8_HEAD.start} to {FP8_HEAD.stop - 1}"
    return None


def _is_scores(view: View, node: Node) -> bool:
    tensor: Tensor = node.outputs[0]
    for _ in range(4):
        readers = query.readers(tensor)
        if any(reader.op in SOFTMAX for reader, _ in readers):
            return True
        if len(readers) != 1 or readers[0][0].op not in ADDS | ELEMENTWISE:
            return False
        tensor = readers[0][0].outputs[0]
    return False


def tiny(view: View) -> Iterator[Site]:
    """P12: Find quantized weighted ops that are too small or have too many groups for integer kernels."""
    for node in view.weighted:
        linear = LINEAR[node.op]
        weight = view.dequantizer(node.inputs[linear.weight])
        if weight is None or view.dequantizer(node.inputs[1 - linear.weight]) is None:
            continue
        if node.op in CONVOLUTIONS:
            shape = query.shape(node.inputs[1])
            if shape is None or len(shape) < 3 or any(not isinstance(dim, int) for dim in shape):
                continue
            why: str | None = (
                TENSORRT.numbers.unfit(node, QuantSpec(kind="fp8")) if weight.codes == FP8 else None
            ) or TENSORRT.placement.slow_linear(node)
        else:
            why = _tiny_product(node)
        if why:
            yield node.name, node.outputs[0].name, why


def padded_channels(view: View) -> Iterator[Site]:
    """P12-full: Report once the int8 convolutions whose channels are not multiples of 32, to which kernels pad."""
    named = {name for name, _, _ in tiny(view)}
    total, odd = 0, []
    for node in view.weighted:
        if node.op not in CONVOLUTIONS or node.name in named:
            continue
        pairs = [view.dequantizer(tensor) for tensor in node.inputs[:2]]
        if any(pair is None or pair.codes != "int8" for pair in pairs):
            continue
        total += 1
        shape = query.shape(node.inputs[1])
        sizes = [dim for dim in (shape or ())[:2] if isinstance(dim, int)]
        if node.attrs.get("group", 1) == 1 and any(size % WHOLE_VECTOR for size in sizes):
            odd.append((node, sizes))
    if odd:
        (node, sizes), several = odd[0], f"{len(odd)} of {total} int8 convolutions"
        why = f"{several} have channels that are not multiples of {WHOLE_VECTOR}, first {' and '.join(map(str, sizes))}"
        yield node.name, node.outputs[0].name, why


def _tiny_product(node: Node) -> str | None:
    data, weight, out = (query.shape(tensor) for tensor in (node.inputs[0], node.inputs[1], node.outputs[0]))
    if weight is None or len(weight) < 2:
        return None
    columns, depth = (weight[axis or 0] for axis in channel_axes(node.op, node.attrs, len(weight)))
    shape, rows = out if out is not None else data, None  # None: a dimension is dynamic
    if shape is not None and all(isinstance(dim, int) for dim in shape[:-1]):
        rows = int(np.prod([dim for dim in shape[:-1] if isinstance(dim, int)], dtype=np.int64))
    if rows == 1 or columns == 1:
        return f"a product of a matrix with one vector ({rows or '?'} x {depth} x {columns})"
    for name, size in (("columns", columns), ("rows", depth)):
        if isinstance(size, int) and size < FEW:
            return f"a weight of {size} {name}; fewer than {FEW} do not fill an integer kernel"
    return None


def foreign_ops(view: View) -> Iterator[Site]:
    """P14: Find pairs around ops of other domains."""
    for node in view.nodes:
        if (node.domain or "") in STANDARD_DOMAINS or node.op in QDQ or node.op.startswith("TRT_"):
            continue
        tensors = [tensor for tensor in node.inputs if view.dequantizer(tensor) is not None]
        tensors += [tensor for tensor in node.outputs if next(view.quantized_readers(tensor), None) is not None]
        if tensors:
            yield node.name, tensors[0].name, f"Q/DQ at {node.op} of the domain '{node.domain}'"


def not_for_dla(view: View) -> Iterator[Site]:
    """P15: Report how much of a quantized model would stay float, which a DLA does not run."""
    if not view.quantizers:
        return
    total, plain = 0, []
    for node in view.nodes:
        if node.op not in PLAIN:
            continue
        kinds = [(tensor, query.dtype(tensor)) for tensor in node.inputs if not view.is_constant(tensor)]
        computed = [tensor for tensor, kind in kinds if kind is None or "float" in str(kind)]
        total += bool(computed)
        if any(view.dequantizer(tensor) is None for tensor in computed):
            plain.append(node)
    if plain:
        why = f"{len(plain)} of {total} ops read float tensors; a DLA in int8 needs Q/DQ on all of them"
        yield plain[0].name, plain[0].inputs[0].name, why

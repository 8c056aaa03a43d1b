"""TensorRT's rules for the placement of pairs around fusions: P01 to P10."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sbonnx.graph import Node, Tensor
from sbonnx.lint.tensorrt_codes import Site
from sbonnx.lint.view import COMMUTES, Quantizer, View
from sbonnx.ops import (
    ADDS,
    CONCATS,
    CONVOLUTIONS,
    EPILOGUES,
    LINEAR,
    MULTIPLIES,
    POOLS,
    QDQ,
    RESIZES,
)

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
    node = view.producer(tensor)
    while node is not None:
        if node.op in LINEAR:
            return node if view.weight(node) is not None else None
        data = _fused_data(view, node)
        if data is None or len(view.readers(data)) > (2 if node.op in MULTIPLIES else 1):
            return None
        node = view.producer(data)
    return None


def _fused_data(view: View, node: Node) -> Tensor | None:
    """Return the data input of an op that TensorRT can fuse, or None for other ops."""
    if node.op in EPILOGUES:
        return node.inputs[0]
    if node.op in ADDS:
        other = [tensor for tensor in node.inputs if not view.is_constant(tensor)]
        return other[0] if len(other) == 1 else None
    if node.op in MULTIPLIES:  # x * Sigmoid(x)
        for one, two in (node.inputs, reversed(node.inputs)):
            gate = view.producer(one)
            if gate is not None and gate.op == "Sigmoid" and gate.inputs[0] is two:
                return two
    return None


def splits_fusion(view: View) -> Iterator[Site]:
    """P02: Find pairs between a weighted op and the ops that would fuse into it."""
    for one in view.quantizers:
        if not one.quantizes:
            continue
        source = weighted_before(view, one.data)
        if source is None:
            continue
        for back in view.dequantizers_of(one):
            for node, index in view.readers(back.output):
                if (index == 0 and node.op in EPILOGUES) or _adds_constant(view, node):
                    why = f"Q/DQ between {source.op} '{source.name}' and {node.op} '{node.name}', which would fuse"
                    yield one.name, one.data.name, why


def _adds_constant(view: View, node: Node) -> bool:
    return node.op in ADDS and any(view.is_constant(tensor) for tensor in node.inputs)


def needless_outputs(view: View) -> Iterator[Site]:
    """P03: Find quantized outputs of weighted ops without a reader that benefits from int8."""
    for one in view.quantizers:
        source = weighted_before(view, one.data) if one.quantizes else None
        if source is None:
            continue
        backs = view.dequantizers_of(one)
        if backs and not any(_reaches(view, back.output) for back in backs):
            readers = sorted({node.op for back in backs for node, _ in view.readers(back.output)})
            why = (
                f"the output of {source.op} '{source.name}' is quantized for {', '.join(readers) or 'an output'} alone"
            )
            yield one.name, one.data.name, why


def _reaches(view: View, tensor: Tensor) -> bool:
    """Return whether an op that benefits from int8 reads a tensor, directly or through ops that commute or fuse."""
    stack, seen = [tensor], {id(tensor)}
    while stack:
        for node, _ in view.readers(stack.pop()):
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
    node = view.producer(tensor if back is None else back.data)
    while node is not None and node.op in BETWEEN and len(view.readers(node.outputs[0])) == 1:
        node = view.producer(node.inputs[0])
    if node is None or node.op not in CONVOLUTIONS or len(view.readers(node.outputs[0])) != 1:
        return ""
    weight = view.weight(node)
    return str(node.name) if weight is not None and view.dequantizer(weight) is not None else ""


def _residual_fault(backs: list[Quantizer | None], convs: list[str]) -> str | None:
    behind = [back is not None for back in backs]
    if all(behind):
        conv = next(filter(None, convs))
        return f"both branches stand behind Q/DQ: the Add no longer fuses with Conv '{conv}'"
    if not any(behind):
        conv = next(filter(None, convs))
        return f"the skip branch is float: Conv '{conv}' fused with the Add returns float"
    at = behind.index(True)
    if convs[at] and not convs[1 - at]:
        return f"the branch of Conv '{convs[at]}' stands behind Q/DQ, and the skip branch is float"
    return None


def repeated(view: View) -> Iterator[Site]:
    """P05: Find tensors with more than one QuantizeLinear."""
    first: dict[int, Quantizer] = {}
    for one in view.quantizers:
        if not one.quantizes or not view.is_activation_pair(one):
            continue
        earlier = first.setdefault(id(one.data), one)
        if earlier is not one:
            numbers = "the same numbers" if one.same_numbers(earlier) else "other numbers"
            yield one.name, one.data.name, f"'{one.data.name}' is quantized by '{earlier.name}' already, with {numbers}"


def concat_scales(view: View) -> Iterator[Site]:
    """P06: Find Concats with quantized inputs or outputs of different scales."""
    for node in view.nodes:
        if node.op not in CONCATS:
            continue
        sides = [one for tensor in node.inputs if (one := view.dequantizer(tensor)) is not None]
        if not sides:
            continue
        sides += view.quantized_readers(node.outputs[0])
        other = next((one for one in sides if not one.same_scale(sides[0])), None)
        if other is not None:
            why = f"'{sides[0].name}' and '{other.name}' around the Concat have different scales"
            yield node.name, node.outputs[0].name, why


def rescaled_moves(view: View) -> Iterator[Site]:
    """P07: Find pairs with different scales around ops that commute with quantization."""
    for one in view.quantizers:
        node = view.producer(one.data)
        if not one.quantizes or node is None or node.op not in COMMUTES:
            continue
        before = view.dequantizer(one.data)
        if before is not None and not one.same_scale(before) and view.is_activation_pair(before):
            why = f"{node.op} '{node.name}' between '{before.name}' and '{one.name}', which have different scales"
            yield one.name, one.data.name, why


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
    for one in view.quantizers:
        before = view.quantizer_of(one.data) if one.quantizes else None
        if before is not None and not before.quantizes and not one.same_numbers(before):
            yield one.name, one.data.name, f"quantized again right after '{before.name}', with other numbers"


def quantized_interface(view: View) -> Iterator[Site]:
    """P10: Find pairs on outputs of the graph, and graph inputs that are codes."""
    inputs = {id(tensor) for tensor in view.graph.inputs}
    leaving = {id(tensor) for tensor in view.graph.outputs}
    for one in view.quantizers:
        if id(one.output) in leaving:
            what = "codes" if one.quantizes else "behind Q/DQ"
            yield one.name, one.output.name, f"the output '{one.output.name}' of the graph is {what}"
        if not one.quantizes and id(one.data) in inputs:
            yield one.name, one.data.name, f"the input '{one.data.name}' of the graph holds codes"

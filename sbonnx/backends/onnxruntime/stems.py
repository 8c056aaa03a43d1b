"""Rewrites of first convolutions to input shapes for which onnxruntime's integer kernels are fast.

A convolution of 3 input channels takes 2 to 3 times as long as one of 4, so its input is padded with a channel of
zeros. A 7 by 7 convolution gathers its 49 taps slowly. With stride 2 it equals a 4 by 4 convolution over 2 by 2 blocks
of pixels (SpaceToDepth). Both rewrites compute the same integers (docs/decisions/0007).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final

import numpy as np

from sbonnx.backends.base import in_every_scope
from sbonnx.backends.kernel_costs import UNKNOWN
from sbonnx.backends.onnxruntime.convolutions import IntegerConv, integer_conv, like, set_channels, widen
from sbonnx.backends.onnxruntime.kernel_variants import BLOCK, DOT, FOLDED_TAPS, folds
from sbonnx.graph import Body, Node, Tensor, Variable, edit, query
from sbonnx.ops import QUANTIZE
from sbonnx.spec import Array

FEW_ROWS: Final = 512
"""Number of output positions below which preparing the input costs more than the convolution gains."""


@in_every_scope()
def widen_stems(body: Body, names: edit.Names) -> Iterator[str]:
    """Prepare the inputs of such convolutions."""
    widened: dict[tuple[int, str, int], Tensor] = {}
    for node in list(body.nodes):
        conv = integer_conv(node)
        if conv is None or conv.depthwise:
            continue
        codes, shape = conv.data.inputs[0], query.shape(node.outputs[0])
        if query.producer(codes) is None or query.dtype(codes) not in (np.dtype(np.uint8), np.dtype(np.int8)):
            continue
        sizes = shape[2:] if shape is not None else (None,)
        if prod(size if isinstance(size, int) else UNKNOWN for size in sizes) < FEW_ROWS:
            continue
        yield from _widened(conv, body, names, widened)


def _widened(
    conv: IntegerConv, body: Body, names: edit.Names, made: dict[tuple[int, str, int], Tensor]
) -> Iterator[str]:
    channels, *sides = conv.codes.shape[1:]
    codes = conv.data.inputs[0]
    if prod(sides) > FOLDED_TAPS:
        pads, quantize = _folded_pads(conv), query.producer(codes)
        if pads is None or quantize is None or quantize.op not in QUANTIZE:
            return
        key = (id(codes), "fold", BLOCK)
        if key not in made:
            made[key] = _folded(conv, quantize, body, names)
        edit.replace_input(conv.node, 0, made[key])
        _fold_weight(conv, pads, body, names)
        yield f"{conv.node.name}: {sides[0]} by {sides[1]} taps folded by SpaceToDepth"
    elif channels % DOT:
        missing = -channels % DOT
        key = (id(codes), "pad", missing)
        if key not in made:
            made[key] = _padded(conv, channels + missing, body, names)
        edit.replace_input(conv.node, 0, made[key])
        widen(conv, 1, missing, body, names)
        yield f"{conv.node.name}: {channels} input channels widened to {channels + missing}"


def _padded(conv: IntegerConv, channels: int, body: Body, names: edit.Names) -> Tensor:
    """Dequantize the input a second time, after a Pad of its codes with the zero point."""
    data = conv.data
    codes, _, zero = data.inputs[:3]
    rank = conv.codes.ndim
    pads = np.zeros(2 * rank, np.int64)
    pads[rank + 1] = channels - conv.codes.shape[1]
    amounts = edit.add_constant(body, f"{codes.name}_pads", pads, names)
    fill = edit.add_constant(body, f"{codes.name}_fill", np.asarray(query.constant(zero)).reshape(()), names)
    wide = like(codes, names.fresh(f"{codes.name}_wide"))
    set_channels(wide, channels)
    body.nodes.append(Node("Pad", names.fresh(f"{codes.name}_Pad"), {}, [codes, amounts, fill], [wide]))
    return _again(data, wide, like(wide, names.fresh(f"{data.outputs[0].name}_wide")), body, names)


def _folded(conv: IntegerConv, quantize: Node, body: Body, names: edit.Names) -> Tensor:
    """Quantize the input a second time, after a SpaceToDepth in float: older runtimes support it only for floats."""
    source = quantize.inputs[0]
    folded = like(source, names.fresh(f"{source.name}_folded"))
    sides = conv.data.outputs[0].shape
    folded.shape = [sides[0], conv.codes.shape[1] * BLOCK**2, *(side // BLOCK for side in sides[2:])]
    name = names.fresh(f"{source.name}_SpaceToDepth")
    body.nodes.append(Node("SpaceToDepth", name, {"blocksize": BLOCK}, [source], [folded]))
    codes = like(folded, names.fresh(f"{quantize.outputs[0].name}_folded"))
    _again(quantize, folded, codes, body, names)
    return _again(conv.data, codes, like(folded, names.fresh(f"{conv.data.outputs[0].name}_folded")), body, names)


def _again(node: Node, source: Tensor, output: Variable, body: Body, names: edit.Names) -> Tensor:
    """Copy a QuantizeLinear or DequantizeLinear for another tensor; the output has the type of that of `node`."""
    output.dtype = node.outputs[0].dtype
    inputs = [source, *node.inputs[1:]]
    body.nodes.append(Node(node.op, names.fresh(node.name), dict(node.attrs), inputs, [output], domain=node.domain))
    return output


def _folded_pads(conv: IntegerConv) -> list[int] | None:
    """Compute the padding in pixel blocks that gives the same output, or None if a side is not divisible.

    Output o reads from row ``2 o - p`` on, which is row ``2 p' - p`` (0 or 1) of block ``o - p'`` with
    ``p' = ceil(p / 2)``.
    """
    attrs = conv.node.attrs
    rank = len(conv.codes.shape) - 2
    before, after = query.shape(conv.data.outputs[0]), query.shape(conv.node.outputs[0])
    if before is None or after is None or not folds(conv.codes.shape[1], conv.codes.shape[2:], attrs):
        return None
    if attrs.get("auto_pad", "NOTSET") != "NOTSET":
        return None
    pads = list(attrs.get("pads", [0] * 2 * rank))
    begins, ends = [], []
    for axis, kernel in enumerate(conv.codes.shape[2:]):
        side, out = before[axis + 2], after[axis + 2]
        if not isinstance(side, int) or not isinstance(out, int) or side % BLOCK:
            return None
        begin = -(-pads[axis] // BLOCK)
        begins.append(begin)
        ends.append(out - 1 + _squares(kernel, pads[axis]) - begin - side // BLOCK)
    return None if min(ends) < 0 else [*begins, *ends]


def _squares(kernel: int, pad: int) -> int:
    """Count the blocks that a kernel of this side touches if its padding is `pad`."""
    return -(-(kernel + pad % BLOCK) // BLOCK)


def _fold_weight(conv: IntegerConv, pads: list[int], body: Body, names: edit.Names) -> None:
    """Fold the weight over pixel blocks: (out, 4 * in, ceil, ceil), channels in the order of SpaceToDepth."""
    old = list(conv.node.attrs.get("pads", [0] * 4))
    own = widen(conv, 1, 0, body, names)
    codes = _squared(np.asarray(query.constant(own.inputs[0])), old)
    edit.replace_input(own, 0, edit.add_constant(body, own.inputs[0].name, codes, names))
    own.outputs[0].shape = list(codes.shape)
    conv.node.attrs.update(pads=pads, strides=[1, 1], kernel_shape=list(codes.shape[2:]))


def _squared(codes: Array, pads: list[int]) -> Array:
    out, channels, *sides = codes.shape
    firsts = [pads[axis] % BLOCK for axis in range(BLOCK)]
    counts = [_squares(side, pads[axis]) for axis, side in enumerate(sides)]
    wide = np.zeros((out, channels, *(count * BLOCK for count in counts)), codes.dtype)
    wide[:, :, firsts[0] : firsts[0] + sides[0], firsts[1] : firsts[1] + sides[1]] = codes
    split = wide.reshape(out, channels, counts[0], BLOCK, counts[1], BLOCK)
    return np.ascontiguousarray(split.transpose(0, 3, 5, 1, 2, 4)).reshape(out, channels * BLOCK**2, *counts)

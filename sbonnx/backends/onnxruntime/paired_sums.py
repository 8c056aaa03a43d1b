"""Weight types whose products onnxruntime's CPU kernels sum exactly on x86 without 8-bit dot products.

There they add the products of two neighbouring inputs in 16 bits, which saturates. Neighbours are the inputs 2j and
2j + 1 in the order of kernel row, kernel column and input channel (of a group), the input channel fastest; K order in
matrix products. This holds for QLinearConv (1 to 3 spatial axes, grouped or not), QLinearMatMul, MatMulIntegerToFloat,
MatMulInteger, DynamicQuantizeMatMul and QGemm. Depthwise kernels, of one input and one output channel per group, add in
32 bits. The codes count, not their distance from a zero point (docs/decisions/0017).
"""

from __future__ import annotations

from dataclasses import replace

from sbonnx.backends.onnxruntime.kernel_variants import folds
from sbonnx.graph import Node
from sbonnx.linear.layer import LinearLayer
from sbonnx.spec import QuantSpec


def safe_sums(node: Node, index: int, spec: QuantSpec) -> QuantSpec:
    """Return an 8-bit signed weight type with codes that do not saturate, for the weight at input `index` of `node`.

    8 bits without limits for depthwise kernels, 8 bits with limits of pairs where the order of inputs is known, else 7
    bits: for affine weights, blocks, and stems whose pixels are folded into channels (`widen_stems`).
    """
    layer = LinearLayer.of_shape(node.op, node.attrs, tuple(node.inputs[index].shape), index)
    if isinstance(layer, str) or index != 1:
        return spec.short()
    if layer.depthwise:
        return spec
    own = spec.symmetric and spec.block_size is None and spec.axis in (None, layer.out_axis)
    if not own or folds(layer.in_channels, layer.kernel, node.attrs):
        return spec.short()
    return replace(spec, pairs=(*range(2, 2 + len(layer.kernel)), layer.in_axis))

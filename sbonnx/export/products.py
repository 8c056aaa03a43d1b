"""Common form of MatMul and Gemm: ``y = x @ w [+ bias]`` with a constant quantized matrix."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sbonnx.export.read import Codes, dequantized
from sbonnx.graph import Node, Tensor, query
from sbonnx.ops import MATRIX_PRODUCTS
from sbonnx.spec import Array


@dataclass(frozen=True)
class Product:
    """One product with a quantized weight.

    Attributes:
        node: the MatMul or Gemm.
        codes: its weight.
        turned: the weight is stored transposed, (N, K): Gemm with transB.
        alpha: factor of the product; can be folded into the scales.
        bias: float, (N,), including beta; None if there is none or `addend` holds it.
        addend: a term that is not a constant vector of length N, with beta 1; or None.
    """

    node: Node
    codes: Codes
    turned: bool
    alpha: float
    bias: Array | None
    addend: Tensor | None

    @property
    def data(self) -> Tensor:
        """Float matrix x, (..., K)."""
        return self.node.inputs[0]

    @property
    def sum_axis(self) -> int:
        """Reduction axis of the weight."""
        return 1 if self.turned else 0

    @property
    def scale(self) -> Array:
        """float32 scales of the weight times alpha."""
        return np.asarray(self.codes.scale.astype(np.float32) * np.float32(self.alpha))

    def matrix(self) -> tuple[Array, Array, Array]:
        """Return the integers (K, N), and scale and zero point in the same layout.

        Scales are () or (N,), for blocks (blocks, N).
        """
        values = self.codes.values
        if values is None:
            raise ValueError(f"the weight of '{self.node.name}' is no constant")
        if not self.turned:
            return values, self.scale, self.codes.zero
        return values.T, self.scale.T, self.codes.zero.T


def product(node: Node) -> Product | str | None:
    """Return `node` as a product, the reason why it is not one, or None without a quantized constant matrix.

    Source: ONNX Gemm: Y = alpha * A' * B' + beta * C, C broadcast to (M, N).
    """
    if node.op not in MATRIX_PRODUCTS or node.domain or len(node.inputs) < 2:
        return None
    codes = dequantized(node.inputs[1])
    values = None if codes is None else codes.values
    if codes is None or values is None:
        return None
    if values.ndim != 2:
        return f"its weight has {values.ndim} axes, a matrix is wanted"
    if node.op == "MatMul":
        return Product(node, codes, False, 1.0, None, None)
    if node.attrs.get("transA", 0):
        return "Gemm with transA"
    turned = bool(node.attrs.get("transB", 0))
    alpha, beta = float(node.attrs.get("alpha", 1.0)), float(node.attrs.get("beta", 1.0))
    if alpha <= 0:
        return f"Gemm with alpha {alpha:g}, which no scale can take in"
    width = values.shape[0 if turned else 1]
    third = node.inputs[2] if len(node.inputs) > 2 and not node.inputs[2].is_empty() else None
    if third is None or beta == 0:
        return Product(node, codes, turned, alpha, None, None)
    added = query.constant(third)
    if added is not None and added.size == width and added.shape[-1:] == (width,):
        return Product(node, codes, turned, alpha, (added.reshape(width) * beta).astype(added.dtype), None)
    if beta != 1:
        return f"Gemm with beta {beta:g} on an addend that is no constant vector"
    return Product(node, codes, turned, alpha, None, third)

"""Modules of low-rank adapters (LoRA): a product of two low-rank matrices, added to a frozen weight."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbonnx.ops import CONVOLUTIONS
from sbonnx.qat.training.loop import LEAST_SIZE
from sbonnx.torchnet import FUNCTIONS, Call, compute

UNIT: Final = 1.0 / LEAST_SIZE
"""Factor of the product. `B` is initialized to 0, and the training loop scales the learning rate of such a parameter
by `LEAST_SIZE`; multiplying the product by this factor makes up for it."""


class LowRank(nn.Module):  # type: ignore[misc]
    """Low-rank update D of a weight.

        D = alpha / rank * m_o / LEAST_SIZE * (B A),   A (rank, I) normal of variance 1 / rank, B (O, rank) 0

    in the layout of the weight. O is the size of its output axis, I the product of all other sizes, and m_o the mean
    magnitude of the weights of output o. `A` and `B` therefore have the same magnitude in all layers, and the learning
    rate of the loop has the same meaning for `B` as for weights: the change of the layer's output in one step, times
    ``alpha / rank``.

    Args:
        weight: weight with two or more axes.
        initializer: its name in the graph.
        axis: its output axis.
        rank, alpha: rank and scaling of the product.
        chance: random generator for `A`.

    Attributes:
        initializer, axis: as given.
        A, B: parameters.
        unit: (O, 1), factors of the rows of the product.

    Source: Hu et al. 2022, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
    """

    unit: Tensor

    def __init__(
        self, weight: Tensor, initializer: str, *, axis: int, rank: int, alpha: float, chance: torch.Generator
    ) -> None:
        super().__init__()
        self.initializer = initializer
        self.axis = axis
        matrix = self.matrix(weight.detach())
        outputs, inputs = matrix.shape
        made = torch.randn(rank, inputs, generator=chance, dtype=torch.float32) * rank**-0.5
        self.A = nn.Parameter(made.to(weight.device, weight.dtype))
        self.B = nn.Parameter(weight.detach().new_zeros(outputs, rank))
        self.register_buffer("unit", matrix.abs().mean(dim=1, keepdim=True) * (alpha / rank * UNIT))

    def matrix(self, weight: Tensor) -> Tensor:
        """Return a weight as a matrix (O, I)."""
        return weight.movedim(self.axis, 0).flatten(1)

    def product(self, like: Tensor) -> Tensor:
        """Return D in the layout and shape of `like`."""
        moved = like.movedim(self.axis, 0).shape
        return ((self.unit * self.B) @ self.A).reshape(moved).movedim(0, self.axis)

    def extra_repr(self) -> str:
        """Return the text for `print(model)`: initializer and rank."""
        return f"'{self.initializer}', rank {self.A.shape[0]}"


@final
class Inside(LowRank):
    """Adapter that is added to the weight before rounding: the layer reads the quantized sum.

        W_q = s * clip(round((W_0 + D) / s))

    Source: Bondarenko et al. 2024, "Low-Rank Quantization-Aware Training for LLMs", section 3, with the product in
    units of the weight instead of quantized values.
    """

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus the product, with the weight's shape and type."""
        return weight + self.product(weight)


@final
class Outside(LowRank):
    """Adapter as a parallel branch: its output is added to the layer's output, and the quantized weight stays frozen.

        y = x W_q + x D

    The two low-rank matrices are applied one after the other. In a convolution, `A` has the kernel and `B` is
    pointwise.

    Args:
        weight, initializer, options: see `LowRank`.
        call: the layer, a MatMul, a Gemm or a Conv with one group.

    Attributes:
        kernel: shape of one filter of a convolution, (I, ...).

    Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 5.
    """

    def __init__(self, weight: Tensor, initializer: str, *, call: Call, **options: Any) -> None:
        super().__init__(weight, initializer, **options)
        self.call = call
        self.kernel = tuple(weight.movedim(self.axis, 0).shape[1:])

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        """Add the branch to the layer's output.

        Args:
            given: output of the layer.
            x: input of the layer.

        Returns:
            shape and type of `given`.
        """
        wide = self.unit * self.B
        if self.call.op in CONVOLUTIONS:
            thin = compute(FUNCTIONS[self.call.op], self.call, (x, self.A.reshape(-1, *self.kernel), None))
            return given + functional.linear(thin.movedim(1, -1), wide).movedim(-1, 1)
        if self.call.op == "Gemm":
            rows = x.transpose(0, 1) if self.call.number("transA", 0) else x
            side = functional.linear(functional.linear(rows, self.A), wide)
            return given + self.call.number("alpha", 1.0) * side
        return given + functional.linear(functional.linear(x, self.A), wide)

    def layer(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute the layer's output with another weight and without bias."""
        reads = (x, weight) if self.call.op == "MatMul" else (x, weight, None)
        made: Tensor = compute(FUNCTIONS[self.call.op], self.call, reads)
        return made


def low_ranks(module: nn.Module) -> dict[str, LowRank]:
    """Return the adapters of a module by initializer, in the order of the layers."""
    inner = getattr(module, "module", module)
    return {part.initializer: part for part in inner.modules() if isinstance(part, LowRank)}


def weight_as_read(module: nn.Module, initializer: str, weight: Tensor) -> Tensor:
    """Return the input of a weight's fake-quant module: the weight, plus the product of its `Inside` adapter if any."""
    found = low_ranks(module).get(initializer)
    made: Tensor = found(weight) if isinstance(found, Inside) else weight
    return made


__all__ = ["UNIT", "Inside", "LowRank", "Outside", "low_ranks", "weight_as_read"]

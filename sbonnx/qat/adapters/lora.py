"""The modules of low-rank adapters: a product of two thin matrices beside a weight that stays as it is."""

from __future__ import annotations

from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbonnx.ops import CONVOLUTIONS
from sbonnx.qat.training.loop import LEAST_SIZE
from sbonnx.torchnet import FUNCTIONS, Call, compute

UNIT: Final = 1.0 / LEAST_SIZE
"""`B` begins at 0, and the loop moves a parameter of 0 as one of `LEAST_SIZE`: a `B` of that size is to count as 1."""


class LowRank(nn.Module):  # type: ignore[misc]
    """The product itself, as what is to be added to a weight.

        D = alpha / rank * m_o / LEAST_SIZE * (B A),   A (rank, I) normal of variance 1 / rank, B (O, rank) 0

    in the layout of the weight, whose axis of outputs counts O and all others together I; m_o is the mean magnitude of
    the weights of an output. So `A` and `B` have one size in all layers, and the learning rate of the loop means for
    `B` what it means for weights: by how much a step changes what the layer gives, times ``alpha / rank``.

    Args:
        weight: of two axes and more.
        initializer: its name in the graph.
        axis: of its outputs.
        rank, alpha: of the product.
        chance: where `A` comes from.

    Attributes:
        initializer, axis: as given.
        A, B: parameters.
        unit: (O, 1), what rows of the product are multiplied with.

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
        """A weight as (O, I)."""
        return weight.movedim(self.axis, 0).flatten(1)

    def product(self, like: Tensor) -> Tensor:
        """D, in the layout and shape of `like`."""
        moved = like.movedim(self.axis, 0).shape
        return ((self.unit * self.B) @ self.A).reshape(moved).movedim(0, self.axis)

    def extra_repr(self) -> str:
        """For `print(model)`."""
        return f"'{self.initializer}', rank {self.A.shape[0]}"


@final
class Inside(LowRank):
    """Adds the product to the weight before it is rounded, so that the codes of the sum are what the layer reads.

        W_q = s * clip(round((W_0 + D) / s))

    Source: Bondarenko et al. 2024, "Low-Rank Quantization-Aware Training for LLMs", section 3, with the product in
    units of the weight in place of codes.
    """

    def forward(self, weight: Tensor) -> Tensor:
        """The weight → the weight with the product, of its shape and type."""
        return weight + self.product(weight)


@final
class Outside(LowRank):
    """Adds what the product alone makes of the layer's input to what the layer gives; the weight stays at its codes.

        y = x W_q + x D

    through the thin matrices one after the other. A convolution's `A` has the kernel, and its `B` is pointwise.

    Args:
        call: the layer, one of MatMul, Gemm and Conv of one group.
        kernel: shape of one filter of a convolution, (I, ...).

    Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", equation 5.
    """

    def __init__(self, weight: Tensor, initializer: str, *, call: Call, **options: Any) -> None:
        super().__init__(weight, initializer, **options)
        self.call = call
        self.kernel = tuple(weight.movedim(self.axis, 0).shape[1:])

    def forward(self, given: Tensor, x: Tensor) -> Tensor:
        """What the layer gives, and what it reads → their shape and type, with the branch added."""
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
        """What the layer gives with another weight and without its bias."""
        reads = (x, weight) if self.call.op == "MatMul" else (x, weight, None)
        made: Tensor = compute(FUNCTIONS[self.call.op], self.call, reads)
        return made


def low_ranks(module: nn.Module) -> dict[str, LowRank]:
    """The adapters of a module, by the initializer that each belongs to, in the order of the layers."""
    inner = getattr(module, "module", module)
    return {part.initializer: part for part in inner.modules() if isinstance(part, LowRank)}


def weight_as_read(module: nn.Module, initializer: str, weight: Tensor) -> Tensor:
    """What the fake-quant module of a weight reads: the weight, with the product of an adapter inside the rounding."""
    found = low_ranks(module).get(initializer)
    made: Tensor = found(weight) if isinstance(found, Inside) else weight
    return made


__all__ = ["UNIT", "Inside", "LowRank", "Outside", "low_ranks", "weight_as_read"]

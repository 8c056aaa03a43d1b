"""Quantized biases as in the exported file: int32 with scale = activation scale * weight scale."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sbonnx.qat.fakequant import FakeQuant

LARGEST: Final = 2**31 - 1


class BiasCodes(nn.Module):  # type: ignore[misc]
    """Fake quantization of a bias to int32, in eval mode only; a no-op in train mode or if the bias does not fit int32.

    The scale is the product of two other scales, so nothing is learned here. Training can skip the rounding, because a
    bias step is far smaller than an activation step.

    Args:
        activation, weight: fake-quant modules whose scales are multiplied; they do not become submodules.
    """

    def __init__(self, activation: FakeQuant, weight: FakeQuant) -> None:
        super().__init__()
        self._follows = (activation, weight)  # in a tuple they do not become submodules, so no parameter has two names

    def forward(self, bias: Tensor) -> Tensor:
        """Fake-quantize a bias of shape (C,); shape and type are preserved."""
        activation, weight = self._follows
        if self.training or not (activation.enabled and weight.enabled):
            return bias
        scale = activation.grid()[0].float() * weight.grid()[0].float()
        codes = torch.round(bias.double() / scale.double())
        if not bool((codes.abs() <= LARGEST).all()):
            return bias
        return (codes.float() * scale).to(bias.dtype)

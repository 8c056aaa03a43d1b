"""Biases as the file will have them: int32 codes at the scale of their activation times that of their weight."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from sbonnx.qat.fakequant import FakeQuant

LARGEST: Final = 2**31 - 1


class BiasCodes(nn.Module):  # type: ignore[misc]
    """A bias, rounded to its codes in eval mode; in train mode, and where it would not fit int32, as it is.

    Its scale follows from two others and nothing of it is learned, so that training does without: a code is far
    smaller than anything that an activation can tell apart.

    Args:
        activation, weight: whose scales it follows; they stay modules of their own.
    """

    def __init__(self, activation: FakeQuant, weight: FakeQuant) -> None:
        super().__init__()
        self._follows = (activation, weight)  # a tuple: no submodules, so that no parameter has two names

    def forward(self, bias: Tensor) -> Tensor:
        """(C,) → (C,), the same type."""
        activation, weight = self._follows
        if self.training or not (activation.enabled and weight.enabled):
            return bias
        scale = activation.grid()[0].float() * weight.grid()[0].float()
        codes = torch.round(bias.double() / scale.double())
        if not bool((codes.abs() <= LARGEST).all()):
            return bias
        return (codes.float() * scale).to(bias.dtype)

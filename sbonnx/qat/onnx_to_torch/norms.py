"""BatchNormalization that can be trained."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from sbonnx.qat.onnx_to_torch.operators import Op
from sbonnx.torchnet import Call, Unfit, compute


class BatchNorm(Op):
    """ONNX BatchNormalization with the two modes of torch's own.

        train():  y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias,  moments over all axes but the channels,
                  running = momentum * running + (1 - momentum) * moment
        eval():   the same with the running mean and variance

    The running variance takes the unbiased one of the batch, as torch's BatchNorm does. Statistics that are no
    constants of the graph are used in eval mode, and not updated.

    Attributes:
        frozen: use the running statistics in train mode too, and leave them as they are.

    Args:
        kept: mean and variance are buffers of the module that holds this one.
    """

    def __init__(self, call: Call, *, kept: bool) -> None:
        super().__init__(call)
        self.kept = kept
        self.frozen = False

    def forward(self, *inputs: Any) -> Any:
        """(x, scale, bias, mean, variance) → the normal x, of its shape (N, C, ...)."""
        return compute(self._normalize, self.call, inputs)

    def _normalize(
        self,
        call: Call,
        x: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
    ) -> torch.Tensor:
        if call.outputs > 1:
            raise Unfit("the statistics of the batch are read")
        batch = self.training and not self.frozen
        if batch and x.numel() == x.shape[1]:
            raise Unfit("it needs more than one value a channel in train mode: give larger batches, or call eval()")
        if batch and not self.kept:
            mean = variance = None
        share = 1.0 - call.number("momentum", 0.9)
        return functional.batch_norm(x, mean, variance, scale, bias, batch, share, call.number("epsilon", 1e-5))

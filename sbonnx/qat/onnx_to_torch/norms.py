"""Trainable BatchNormalization."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from sbonnx.qat.onnx_to_torch.operators import Op
from sbonnx.torchnet import Call, Unfit, compute


class BatchNorm(Op):
    """ONNX BatchNormalization with the train and eval modes of torch's BatchNorm.

        train():  y = (x - mean(x)) / sqrt(var(x) + epsilon) * scale + bias,  moments over all axes except channels,
                  running = momentum * running + (1 - momentum) * moment
        eval():   the same formula with the running mean and variance

    The running variance is updated with the unbiased variance of the batch, as in torch's BatchNorm. Statistics that
    are not constants of the graph are used in eval mode, and not updated.

    Attributes:
        frozen: use the running statistics in train mode too, without updating them.

    Args:
        call: the node.
        kept: mean and variance are buffers of the parent module, to be updated in train mode.
    """

    def __init__(self, call: Call, *, kept: bool) -> None:
        super().__init__(call)
        self.kept = kept
        self.frozen = False

    def forward(self, *inputs: Any) -> Any:
        """Normalize x, given (x, scale, bias, mean, variance); the shape (N, C, ...) is preserved."""
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

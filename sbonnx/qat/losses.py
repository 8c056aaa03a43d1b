"""What training makes smaller where there are no labels: how far outputs are from those of the float network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sbonnx.errors import DataError

Outputs = Mapping[str, Tensor]
Loss = Callable[[Outputs, Outputs], Tensor]
"""(outputs of the network in training, outputs of the float network on the same feed), by name → a scalar."""


def distillation(outputs: Outputs, targets: Outputs) -> Tensor:
    """Mean over float outputs of how far they are from the targets.

    An output (N, C) with more than one class: Kullback-Leibler divergence of its softmax from that of the target
    (Hinton et al. 2015, equation 2 at temperature 1), and half the relative squared error below, without which all
    that softmax does not see is free to drift. Any other: squared error over the target's squared deviation from its
    mean.

    Raises:
        DataError: there is no float output to compare.
    """
    terms = []
    for name, target in targets.items():
        if not target.is_floating_point():
            continue
        output, wanted = outputs[name].float(), target.float()
        error = relative_error(output, wanted)
        if wanted.dim() == 2 and wanted.shape[1] > 1:
            error = 0.5 * error + divergence(output, wanted)
        terms.append(error)
    if not terms:
        raise DataError("the model has no float output to learn from: give train() a loss of your own")
    return torch.stack(terms).mean()


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error over the squared deviation of the target from its mean; 1 for the mean in place of the target."""
    spread = (target - target.mean()).square().sum()
    return (output - target).square().sum() / spread.clamp_min(torch.finfo(torch.float32).tiny)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the softmax of `output` from that of `target`, (N, C), mean over N, in nats."""
    return torch.nn.functional.kl_div(
        torch.log_softmax(output, dim=1), torch.log_softmax(target, dim=1), reduction="batchmean", log_target=True
    )

"""Distillation losses: distance of the outputs from those of the float network, without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sbonnx.errors import DataError

Outputs = Mapping[str, Tensor]
Loss = Callable[[Outputs, Outputs], Tensor]
"""(outputs of the trained network, outputs of the float network on the same feed), by name → scalar loss."""


def distillation(outputs: Outputs, targets: Outputs) -> Tensor:
    """Compute the mean over float outputs of the relative squared error; see `relative_error`.

    Class scores (logits) are treated the same way. With few samples on which the float network is confident, the
    divergence of the probabilities contains little information on most classes, and matching the logits learns more
    (Kim et al. 2021, "Comparing Kullback-Leibler divergence and mean squared error loss in knowledge distillation").

    Raises:
        DataError: there is no float output to compare.
    """
    return torch.stack([relative_error(*pair) for pair in _compared(outputs, targets)]).mean()


def with_divergence(outputs: Outputs, targets: Outputs) -> Tensor:
    """Compute the distillation loss with the Kullback-Leibler divergence for class scores, (N, C) with C > 1.

    The loss of such an output is the divergence of its softmax from that of the target (Hinton et al. 2015, equation 2
    at temperature 1) plus half its relative squared error. Without the latter, a constant shift of the scores, which
    softmax ignores, could drift. The loss of any other output is that of `distillation`.

    Raises:
        DataError: there is no float output to compare.
    """
    terms = []
    for output, target in _compared(outputs, targets):
        error = relative_error(output, target)
        if target.dim() == 2 and target.shape[1] > 1:
            error = 0.5 * error + divergence(output, target)
        terms.append(error)
    return torch.stack(terms).mean()


def _compared(outputs: Outputs, targets: Outputs) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of float outputs and their targets, in float32.

    Raises:
        DataError: there is no float output.
    """
    found = [(outputs[name].float(), target.float()) for name, target in targets.items() if target.is_floating_point()]
    if not found:
        raise DataError("the model has no float output to learn from: give train() a loss of your own")
    return found


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Compute the squared error over the squared deviation of the target from its mean (1 for the mean as output)."""
    spread = (target - target.mean()).square().sum()
    return (output - target).square().sum() / spread.clamp_min(torch.finfo(torch.float32).tiny)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    """Compute the Kullback-Leibler divergence of softmax(output) from softmax(target), (N, C), mean over N, in nats."""
    return torch.nn.functional.kl_div(
        torch.log_softmax(output, dim=1), torch.log_softmax(target, dim=1), reduction="batchmean", log_target=True
    )

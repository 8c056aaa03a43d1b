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
    """Mean over float outputs of their squared error over the target's squared deviation from its mean.

    Class scores too: with few samples, of which the float network is sure, the divergence of probabilities says next to
    nothing of most classes, and matching scores learns more from them (Kim et al. 2021, "Comparing Kullback-Leibler
    divergence and mean squared error loss in knowledge distillation").

    Raises:
        DataError: there is no float output to compare.
    """
    return torch.stack([relative_error(*pair) for pair in _compared(outputs, targets)]).mean()


def with_divergence(outputs: Outputs, targets: Outputs) -> Tensor:
    """`distillation` by probabilities where an output is class scores, (N, C) with C > 1.

    Of such an output the Kullback-Leibler divergence of its softmax from that of the target (Hinton et al. 2015,
    equation 2 at temperature 1), and half its relative squared error, without which all that softmax does not see is
    free to drift. Of any other as `distillation`.

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
    """Float outputs beside their targets, in float32.

    Raises:
        DataError: there are none.
    """
    found = [(outputs[name].float(), target.float()) for name, target in targets.items() if target.is_floating_point()]
    if not found:
        raise DataError("the model has no float output to learn from: give train() a loss of your own")
    return found


def relative_error(output: Tensor, target: Tensor) -> Tensor:
    """Squared error over the squared deviation of the target from its mean; 1 for the mean in place of the target."""
    spread = (target - target.mean()).square().sum()
    return (output - target).square().sum() / spread.clamp_min(torch.finfo(torch.float32).tiny)


def divergence(output: Tensor, target: Tensor) -> Tensor:
    """Kullback-Leibler divergence of the softmax of `output` from that of `target`, (N, C), mean over N, in nats."""
    return torch.nn.functional.kl_div(
        torch.log_softmax(output, dim=1), torch.log_softmax(target, dim=1), reduction="batchmean", log_target=True
    )

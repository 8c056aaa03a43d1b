"""Training and export of the small networks of the examples. Needs torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module, Sequence[Tensor]], Tensor]


def fit(
    network: nn.Module, data: Sequence[Tensor], loss: Loss, *, epochs: int, batch: int = 64, lr: float = 4e-3
) -> nn.Module:
    """Train a network with AdamW and a one-cycle schedule; return it in eval mode.

    Runs on one thread: networks of this size gain little from more, and threads that wait for each other in every
    operator take many times as long on a busy machine.

    Args:
        data: tensors with the samples along their first axis, passed to `loss` in batches.
        loss: `(network, batch of each tensor) -> scalar`.
    """
    optimizer = torch.optim.AdamW(network.parameters(), lr, weight_decay=0.01)
    steps = epochs * -(-len(data[0]) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.2)
    generator = torch.Generator().manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    network.train()
    try:
        for _ in range(epochs):
            for rows in torch.randperm(len(data[0]), generator=generator).split(batch):
                optimizer.zero_grad()
                loss(network, [tensor[rows] for tensor in data]).backward()
                optimizer.step()
                schedule.step()
    finally:
        torch.set_num_threads(threads)
    return network.eval()


def classification(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross entropy of the outputs for all tensors but the last, which has the class numbers."""
    *inputs, labels = batch
    return nn.functional.cross_entropy(network(*inputs), labels)


def export(
    network: nn.Module,
    inputs: dict[str, Tensor],
    outputs: Sequence[str],
    path: str | Path,
    dynamic: dict[str, dict[int, str]] | None = None,
) -> None:
    """Write a network as ONNX.

    `dynamo=False` is torch's older exporter, which needs no further package; the newer one needs onnxscript, and its
    files work as well.

    Args:
        inputs: example inputs by name.
        dynamic: names of the dynamic axes of inputs and outputs; default: axis 0 of all of them is N.
    """
    names = [*inputs, *outputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the older exporter, and shapes that become constants
        torch.onnx.export(
            network,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_axes={key: {0: "N"} for key in names} if dynamic is None else dynamic,
            opset_version=17,
            dynamo=False,
        )

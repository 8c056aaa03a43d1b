"""Quantize a CIFAR-style ResNet in 8 and 4 bits, train it at 3 bits, and prune it: top-1 and size of each file.

    python -m examples.cifar_resnet.run out/

Needs torch: ``pip install 'sbonnx[cpu,qat]'``.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from examples.commands import Figures, command, evaluated, main, size
from examples.shapes import NAMES, draw
from examples.training import classification, export, fit

MEAN, STD, SIZE = 0.45, 0.2, 24


class Block(nn.Module):
    """Basic block of ResNet: two 3x3 convolutions, and a 1x1 shortcut where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> nn.Module:
    """Return a ResNet-8 of width 8; images (N, 3, 24, 24) to scores (N, 6)."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 1, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Block(8, 8, 1),
        Block(8, 16, 2),
        Block(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, len(NAMES)),
    )


def normalized(images: np.ndarray) -> np.ndarray:
    """Return the network's inputs (N, 3, 24, 24) of uint8 images (N, 24, 24, 3)."""
    return np.ascontiguousarray(((images / 255 - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2))


def prepare() -> None:
    """Train resnet.onnx; write calib.npz, train.npz (no labels), eval.npz (others, with labels), images.npz (uint8)."""
    torch.manual_seed(0)
    training, other = draw(1500, SIZE, seed=1), draw(400, SIZE, seed=2)
    inputs, labels = normalized(training.images), training.classes[:, 0]
    network = fit(
        resnet(), [torch.from_numpy(inputs), torch.from_numpy(labels)], classification, epochs=8, batch=32, lr=1.5e-2
    )
    export(network, {"input": torch.from_numpy(inputs[:1])}, ["scores"], "resnet.onnx")
    np.savez("calib.npz", input=inputs[:256])
    np.savez("train.npz", input=inputs[:1024])
    np.savez("eval.npz", input=normalized(other.images), label=other.classes[:, 0])
    np.savez("images.npz", images=training.images[:256])


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    command("sbonnx quantize resnet.onnx --data calib.npz --split 32 -o w8a8.onnx")
    command("sbonnx quantize resnet.onnx --data calib.npz --split 32 -o w4a8.onnx --bits w4a8 --backend virtual")
    command("sbonnx quantize resnet.onnx --data calib.npz --split 32 -o w3a3.onnx --bits w3a3 --backend virtual")
    command(
        "sbonnx qat resnet.onnx --data calib.npz --train-data train.npz --split 32 -o w3a3_qat.onnx --bits w3a3 "
        "--backend virtual --epochs 4"
    )
    command("sbonnx prune resnet.onnx --data calib.npz --split 32 -o pruned.onnx --macs 0.6")
    command("sbonnx quantize pruned.onnx --data calib.npz --split 32 -o pruned_w8a8.onnx")
    files = ["resnet.onnx", "w8a8.onnx", "w4a8.onnx", "w3a3.onnx", "w3a3_qat.onnx", "pruned.onnx", "pruned_w8a8.onnx"]
    figures = evaluated(f"sbonnx eval {' '.join(files)} --data eval.npz --split 100 --metric top1")
    return figures | {f"kB {name}": size(name) for name in ("resnet.onnx", "w8a8.onnx", "pruned_w8a8.onnx")}


if __name__ == "__main__":
    main(run, __doc__)

"""Quantize a U-Net for segmentation and measure the mean IoU.

    python -m examples.segmentation.run out/

Needs torch: ``pip install 'sbonnx[cpu,qat]'``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from examples.commands import Figures, command, evaluation, main, size
from examples.shapes import NAMES, Scenes, draw
from examples.training import export, fit


def layer(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution with batch normalization and Relu."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    """Encoder of three scales, a transposed convolution and an interpolation back; (N, 3, H, W) to (N, 7, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.middle, self.coarse = layer(3, 8), layer(8, 16, 2), layer(16, 32, 2)
        self.bottom = layer(32, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.joined, self.last = layer(32, 16), layer(24, 12)
        self.classes = nn.Conv2d(12, len(NAMES) + 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        fine = self.fine(image)
        middle = self.middle(fine)
        x = self.up(self.bottom(self.coarse(middle)))
        x = self.joined(torch.cat([x, middle], 1))
        x = nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        scores: Tensor = self.classes(self.last(torch.cat([x, fine], 1)))
        return scores


def inputs(scenes: Scenes) -> np.ndarray:
    """Return float32 images (N, 3, H, W) from -1 to 1."""
    return np.ascontiguousarray((scenes.images / 127.5 - 1).astype(np.float32).transpose(0, 3, 1, 2))


def pixelwise(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Cross entropy of all pixels; the background counts a third."""
    weights = torch.ones(len(NAMES) + 1)
    weights[0] = 1 / 3
    return nn.functional.cross_entropy(network(batch[0]), batch[1], weights)


def prepare() -> None:
    """Train unet.onnx; write calib.npz and, with the masks of other pictures, eval.npz."""
    torch.manual_seed(0)
    training, other = draw(600, 32, most=2, seed=1), draw(200, 32, most=2, seed=2)
    data = [torch.from_numpy(inputs(training)), torch.from_numpy(training.masks)]
    network = fit(UNet(), data, pixelwise, epochs=9, batch=12, lr=1e-2)
    export(network, {"image": data[0][:1]}, ["scores"], "unet.onnx")
    np.savez("calib.npz", image=inputs(training)[:64])
    np.savez("eval.npz", image=inputs(other), label=other.masks)


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    evaluated = "--eval eval.npz --metric miou --eval-split 20"
    command(f"sbonnx quantize unet.onnx --data calib.npz --split 16 -o int8.onnx {evaluated} --report int8.json")
    command(
        "sbonnx quantize unet.onnx --data calib.npz --split 16 -o trt.onnx --backend tensorrt@10 "
        f"{evaluated} --report trt.json"
    )
    before, after = evaluation("int8.json")
    return {
        "mIoU float": before,
        "mIoU int8, onnxruntime": after,
        "mIoU int8, tensorrt": evaluation("trt.json")[1],
        "size of int8 / float": size("int8.onnx") / size("unet.onnx"),
    }


if __name__ == "__main__":
    main(run, __doc__)

"""Quantize an image classifier from a folder of JPEG files, and measure top-1 on class folders.

    python -m examples.image_folder.run out/

Needs torch and Pillow: ``pip install 'sbonnx[cpu,qat,images]'``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from examples.commands import Figures, command, evaluation, main, size
from examples.shapes import NAMES, Scenes, draw
from examples.training import classification, export, fit

SIZE = 48
RESIZED = 55
"""48 / 0.875, to which the preset "imagenet" resizes the shorter side before it crops."""

MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
STD = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


def depthwise(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    """Depthwise-separable convolution of MobileNet."""
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def mobilenet() -> nn.Module:
    """Return a MobileNetV1 of five blocks; images (N, 3, 48, 48) to scores (N, 6)."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        depthwise(16, 32, 1),
        depthwise(32, 48, 2),
        depthwise(48, 64, 1),
        depthwise(64, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, len(NAMES)),
    )


def write_jpegs(scenes: Scenes, folder: str) -> None:
    """Write each picture as a JPEG of twice its size and another aspect ratio: FOLDER/CLASS/NUMBER.jpg."""
    for number, (pixels, (kind,)) in enumerate(zip(scenes.images, scenes.classes, strict=True)):
        path = Path(folder) / NAMES[kind] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        margin = number % 16
        wide = np.pad(pixels, ((0, 0), (margin, margin), (0, 0)), mode="reflect")
        picture = Image.fromarray(wide)
        picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.BICUBIC).save(path, quality=92)


def tensors(images: np.ndarray) -> Tensor:
    """Return normalized centre crops (N, 3, 48, 48) of uint8 images (N, 55, 55, 3), for the training."""
    edge = (RESIZED - SIZE) // 2
    pixels = torch.from_numpy(images[:, edge : edge + SIZE, edge : edge + SIZE]).permute(0, 3, 1, 2)
    return (pixels / 255 - MEAN) / STD


def prepare() -> None:
    """Train classifier.onnx; write photos/ (calibration) and labelled/ (one folder for each class)."""
    torch.manual_seed(0)
    training = draw(1500, RESIZED, seed=1)
    folders = np.argsort(np.argsort(NAMES))  # the class of a folder is its place among the sorted names
    data = [tensors(training.images), torch.from_numpy(folders[training.classes[:, 0]])]
    network = fit(mobilenet(), data, classification, epochs=6, batch=32, lr=1.5e-2)
    export(network, {"pixels": data[0][:1]}, ["scores"], "classifier.onnx")
    write_jpegs(draw(128, RESIZED, seed=2), "photos")
    write_jpegs(draw(200, RESIZED, seed=3), "labelled")


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    command(
        "sbonnx quantize classifier.onnx --data photos/ --preprocess imagenet -o int8.onnx "
        "--eval labelled/ --metric top1 --report int8.json"
    )
    before, after = evaluation("int8.json")
    wrong = "sbonnx eval classifier.onnx int8.onnx --data labelled/ --preprocess inception --metric top1"
    command(wrong)
    return {
        "top-1 float": before,
        "top-1 int8": after,
        "size of int8 / float": size("int8.onnx") / size("classifier.onnx"),
    }


if __name__ == "__main__":
    main(run, __doc__)

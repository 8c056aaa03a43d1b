"""Quantize a YOLO-style detector and measure mAP@0.5: with float parts where they pay, all in integers, float head.

    python -m examples.detector.run out/

Needs torch and Pillow: ``pip install 'sbonnx[cpu,qat,images]'``.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from examples.commands import Figures, command, evaluated, main
from examples.shapes import NAMES, Scenes, draw
from examples.training import export, fit

SIZE = 64
SCALES = {8: 18.0, 16: 27.0}
"""Anchor in pixels by stride."""


def layer(inputs: int, outputs: int, stride: int = 1, kernel: int = 3) -> nn.Sequential:
    """Return a convolution with batch normalization and SiLU, as in YOLO."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


def cells(stride: int) -> Tensor:
    """Return column and row of each cell of a scale, (cells, 2)."""
    places = torch.arange(SIZE // stride, dtype=torch.float32)
    rows, columns = torch.meshgrid(places, places, indexing="ij")
    return torch.stack([columns, rows], -1).reshape(-1, 2)


class Detector(nn.Module):
    """Features at strides 8 and 16, a top-down path, and one head for each.

    The output has, for each cell, the box in pixels (x, y, width, height, decoded as in YOLOv5) and a score for each
    class: images (N, 3, 64, 64) to detections (N, 80, 4 + 6).
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(layer(3, 16, 2), layer(16, 24, 2), layer(24, 48, 2))
        self.coarse = layer(48, 64, 2)
        self.reduce = layer(64, 32, kernel=1)
        self.up = nn.Upsample(scale_factor=2)
        self.fine = layer(48 + 32, 40, kernel=1)
        self.heads = nn.ModuleList(
            nn.Sequential(layer(width, 40), nn.Conv2d(40, 4 + len(NAMES), 1)) for width in (40, 32)
        )
        for at, stride in enumerate(SCALES):
            self.register_buffer(f"cells_{at}", cells(stride))
        for head in self.heads:
            nn.init.constant_(head[1].bias[4:], -3.0)

    def forward(self, image: Tensor) -> Tensor:
        """Return decoded detections."""
        logits = self.logits(image)
        return torch.cat([self.boxes(logits), logits[..., 4:].sigmoid()], -1)

    def logits(self, image: Tensor) -> Tensor:
        """Return the outputs of both heads, (N, cells, 10)."""
        fine = self.stem(image)
        coarse = self.reduce(self.coarse(fine))
        fine = self.fine(torch.cat([fine, self.up(coarse)], 1))
        found = [head(feature).flatten(2) for head, feature in zip(self.heads, (fine, coarse), strict=True)]
        return torch.cat(found, 2).transpose(1, 2)

    def boxes(self, logits: Tensor) -> Tensor:
        """Return boxes in pixels, (N, cells, 4)."""
        parts = []
        counts = [(SIZE // stride) ** 2 for stride in SCALES]
        for at, ((stride, anchor), part) in enumerate(zip(SCALES.items(), logits.split(counts, 1), strict=True)):
            value = part[..., :4].sigmoid() * 2
            centre = (value[..., :2] - 0.5 + getattr(self, f"cells_{at}")) * stride
            parts.append(torch.cat([centre, value[..., 2:] ** 2 * anchor], -1))
        return torch.cat(parts, 1)


def targets(scenes: Scenes) -> tuple[Tensor, Tensor]:
    """Return box (N, cells, 4) as x, y, width, height and class (N, cells), -1 for background, of each cell.

    A shape belongs to the scale with the nearer anchor, and to the cells within 0.8 cells of its centre.
    """
    centres = [(cells(stride).numpy() + 0.5) * stride for stride in SCALES]
    reach = np.concatenate([np.full(len(rows), 0.8 * stride) for rows, stride in zip(centres, SCALES, strict=True)])
    scale = np.concatenate([np.full(len(rows), at) for at, rows in enumerate(centres)])
    places = np.concatenate(centres)
    boxes = np.zeros((len(scenes.images), len(places), 4), np.float32)
    classes = np.full(boxes.shape[:2], -1)
    middle = np.mean(list(SCALES.values()))
    for image, (corners, kinds) in enumerate(zip(scenes.boxes, scenes.classes, strict=True)):
        for (x1, y1, x2, y2), kind in zip(corners[kinds >= 0], kinds[kinds >= 0], strict=True):
            box = np.array([(x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1])
            near = np.abs(places - box[:2]).max(1) < reach
            own = near & (scale == (max(box[2:]) > middle))
            boxes[image, own], classes[image, own] = box, kind
    return torch.from_numpy(boxes), torch.from_numpy(classes)


def loss(network: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Binary cross entropy of the classes, and L1 distance of the boxes in units of their size."""
    images, boxes, classes = batch
    assert isinstance(network, Detector)
    logits = network.logits(images)
    objects = classes >= 0
    wanted = nn.functional.one_hot(classes.clamp(min=0), len(NAMES)) * objects[..., None]
    scores = nn.functional.binary_cross_entropy_with_logits(logits[..., 4:], wanted.float(), reduction="sum")
    true = boxes[objects]
    distance = (network.boxes(logits)[objects] - true).abs() / true[:, 2:].repeat(1, 2)
    return (scores + 3 * distance.sum()) / objects.sum()


def inputs(scenes: Scenes) -> np.ndarray:
    """Return float32 images (N, 3, 64, 64) from 0 to 1, as the preset "yolo" makes them."""
    return np.ascontiguousarray((scenes.images / 255).astype(np.float32).transpose(0, 3, 1, 2))


def prepare() -> None:
    """Train detector.onnx; write photos/ for calibration, eval.npz with boxes and classes, and decode.py."""
    torch.manual_seed(0)
    training, other = draw(800, SIZE, most=2, seed=1), draw(150, SIZE, most=2, seed=2)
    data = [torch.from_numpy(inputs(training)), *targets(training)]
    network = fit(Detector(), data, loss, epochs=8, batch=16, lr=6e-3)
    export(network, {"images": data[0][:1]}, ["detections"], "detector.onnx")
    Path("photos").mkdir()
    for number, pixels in enumerate(training.images[:64]):
        Image.fromarray(pixels).save(f"photos/{number}.png")
    np.savez("eval.npz", images=inputs(other), boxes=other.boxes, classes=other.classes)
    shutil.copy(Path(__file__).with_name("decode.py"), ".")


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    quantize = "sbonnx quantize detector.onnx --data photos/ --preprocess yolo"
    command(f"{quantize} -o auto.onnx")
    command(f"{quantize} -o none.onnx --set HEADS=none")
    command(f"{quantize} -o head.onnx --exclude head")
    return evaluated(
        "sbonnx eval detector.onnx auto.onnx none.onnx head.onnx --data eval.npz --split 25 "
        "--metric map50 --decode decode.py:decode"
    )


if __name__ == "__main__":
    main(run, __doc__)

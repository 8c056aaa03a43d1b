"""Train the network that sbonnx carries for its demo, and write it and its data into the package.

Needs torch, onnxscript and scikit-learn: ``pip install -c constraints.txt -e '.[cpu,examples]'``.
Takes less than a minute on two CPU cores. Seeded: the same machine and versions give the same files.

The network has one of each thing that quantization must handle: Conv-BatchNormalization-Relu, a
depthwise Conv, a residual Add, a Concat, MaxPool, GlobalAveragePool and Gemm. BatchNormalization
is left unfused on purpose, so that the demo shows it being fused.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxscript import opset18, optimizer
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

ASSETS = Path(__file__).resolve().parents[2] / "sbonnx" / "assets"
EPOCHS = 60
BATCH = 64
LEARNING_RATE = 4e-3
CALIBRATION_IMAGES = 256
EVALUATION_IMAGES = 450
WANTED_ACCURACY = 0.98
MAX_MODEL_BYTES = 500_000

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


def conv_bn_relu(inputs: int, outputs: int, kernel: int, *, groups: int = 1) -> nn.Sequential:
    """A "same" convolution without bias, its batch normalization and a rectifier."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class DigitsNet(nn.Module):
    """About 58,000 weights; images (N, 1, 8, 8) in [0, 1] to scores (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_bn_relu(1, 16, 3)
        self.depthwise = conv_bn_relu(16, 16, 3, groups=16)
        self.pointwise = conv_bn_relu(16, 32, 1)
        self.residual = nn.Sequential(
            conv_bn_relu(32, 32, 3), nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        )
        self.pool = nn.MaxPool2d(2)
        self.narrow = conv_bn_relu(32, 16, 1)
        self.wide = conv_bn_relu(32, 32, 3)
        self.head = conv_bn_relu(48, 64, 3)
        self.average = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.pointwise(self.depthwise(self.stem(image)))
        x = self.pool(torch.relu(x + self.residual(x)))
        x = self.head(torch.cat([self.narrow(x), self.wide(x)], dim=1))
        scores: Tensor = self.classifier(torch.flatten(self.average(x), 1))
        return scores


def read_digits() -> tuple[Images, Images, Labels, Labels]:
    """Train images, test images (N, 1, 8, 8) float32 in [0, 1], train labels, test labels int64."""
    pixels, labels = load_digits(return_X_y=True)
    images = (pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels.astype(np.int64), test_size=EVALUATION_IMAGES, stratify=labels, random_state=0
    )
    return train_images, test_images, train_labels, test_labels


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image moved by -1, 0 or 1 pixels along both axes, zeros moving in."""
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    moves = torch.randint(0, 3, (len(images), 2), generator=generator).tolist()
    return torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves, strict=True)])


def train(images: Images, labels: Labels) -> DigitsNet:
    """The trained network, in inference mode."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(0)
    net = DigitsNet()
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    steps = EPOCHS * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=generator)
        for rows in order[: len(x) // BATCH * BATCH].view(-1, BATCH):
            loss = loss_of(net(shifted(x[rows], generator)), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    net.train(False)
    return net


def global_average_pool(x: Any, output_size: Any) -> Any:
    """AdaptiveAvgPool2d(1) in ONNX; without this the exporter decomposes it into ReduceMean."""
    return opset18.GlobalAveragePool(x)


def export(net: DigitsNet) -> onnx.ModelProto:
    """`net` as ONNX: batch axis dynamic, constants folded, BatchNormalization unfused."""
    program = torch.onnx.export(
        net,
        (torch.zeros(2, 1, 8, 8),),
        input_names=["image"],
        output_names=["scores"],
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        opset_version=18,
        dynamo=True,
        optimize=False,  # it would fuse BatchNormalization; the two steps below do the rest of it
        custom_translation_table={torch.ops.aten.adaptive_avg_pool2d.default: global_average_pool},
        verbose=False,
    )
    if program is None:
        raise RuntimeError("the exporter returned nothing")
    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    model: onnx.ModelProto = program.model_proto
    graph = model.graph
    for node in graph.node:
        del node.metadata_props[:]  # stack traces with paths of the exporting machine
    for value in [*graph.value_info, *graph.input, *graph.output, *graph.initializer]:
        del value.metadata_props[:]
    del graph.metadata_props[:]
    return model


def accuracy(model: onnx.ModelProto, images: Images, labels: Labels) -> float:
    """Share of `images` that onnxruntime classifies as `labels`."""
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {"image": images})
    return float(np.mean(np.argmax(scores, axis=1) == labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, default=ASSETS, help="folder to write to (default: the package)")
    folder: Path = parser.parse_args().output
    train_images, test_images, train_labels, test_labels = read_digits()
    net = train(train_images, train_labels)
    model = export(net)
    share = accuracy(model, test_images, test_labels)
    print(f"test accuracy in onnxruntime: {share:.4f}")
    if share < WANTED_ACCURACY:
        raise SystemExit(f"below {WANTED_ACCURACY}: nothing written")
    onnx.helper.set_model_props(
        model,
        {
            "accuracy": f"{share:.4f}",
            "data": "handwritten digits of scikit-learn (UCI Optical Recognition of Handwritten Digits, CC BY 4.0)",
            "made_by": "examples/digits/train.py",
        },
    )
    onnx.checker.check_model(model, full_check=True)
    if model.ByteSize() > MAX_MODEL_BYTES:
        raise SystemExit(f"the model has {model.ByteSize()} bytes, more than {MAX_MODEL_BYTES}: nothing written")
    onnx.save(model, folder / "digits.onnx")
    np.savez_compressed(folder / "digits_calib.npz", image=train_images[:CALIBRATION_IMAGES])
    np.savez_compressed(folder / "digits_eval.npz", image=test_images, label=test_labels)
    print(f"wrote digits.onnx ({model.ByteSize()} bytes), digits_calib.npz and digits_eval.npz to {folder}")


if __name__ == "__main__":
    main()

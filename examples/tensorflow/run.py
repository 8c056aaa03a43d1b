"""Quantize a channels-last model with the structure that tf2onnx writes for a Keras network.

    python -m examples.tensorflow.run out/

Needs torch: ``pip install 'sbonnx[cpu,qat]'``.
"""

from __future__ import annotations

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from examples.commands import Figures, command, evaluation, main, size
from examples.shapes import NAMES, Scenes, draw
from examples.training import export, fit


class Same(nn.Module):
    """Convolution with stride 2 and the asymmetric padding "SAME" of TensorFlow, batch normalization and ReLU6."""

    def __init__(self, inputs: int, outputs: int, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu6(self.norm(self.conv(nn.functional.pad(x, (0, 1, 0, 1)))))


class KerasNet(nn.Module):
    """A Keras network as tf2onnx writes it; images (N, 32, 32, 3) to probabilities (N, 6).

    Transposes to channels first and back, mean over axes 1 and 2 of a channels-last tensor, Dense as MatMul and Add,
    Softmax at the end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(Same(3, 24), nn.Conv2d(24, 32, 1), nn.ReLU6(), Same(32, 32, 32), nn.Conv2d(32, 64, 1))
        self.tail = nn.Sequential(nn.ReLU6(), Same(64, 64))
        self.kernel, self.bias = nn.Parameter(0.1 * torch.randn(64, len(NAMES))), nn.Parameter(torch.zeros(len(NAMES)))

    def forward(self, image: Tensor) -> Tensor:
        return self.scores(image).softmax(-1)

    def scores(self, image: Tensor) -> Tensor:
        """Return scores before the softmax, (N, 6)."""
        features = self.tail(self.body(image.permute(0, 3, 1, 2)))
        return features.permute(0, 2, 3, 1).mean((1, 2)) @ self.kernel + self.bias


def inputs(scenes: Scenes) -> np.ndarray:
    """Return float32 images (N, 32, 32, 3) from -1 to 1, as `tf.keras.applications` has them."""
    return (scenes.images / 127.5 - 1).astype(np.float32)


def prepare() -> None:
    """Train keras.onnx; write calib.npz and, with the labels of other pictures, eval.npz."""
    torch.manual_seed(0)
    training, other = draw(1500, seed=1), draw(400, seed=2)
    data = [torch.from_numpy(inputs(training)), torch.from_numpy(training.classes[:, 0])]
    network = KerasNet()
    fit(
        network,
        data,
        lambda _, batch: nn.functional.cross_entropy(network.scores(batch[0]), batch[1]),
        epochs=8,
        batch=32,
        lr=1.5e-2,
    )
    export(network, {"image": data[0][:1]}, ["probabilities"], "keras.onnx")
    np.savez("calib.npz", image=inputs(training)[:160])
    np.savez("eval.npz", image=inputs(other), label=other.classes[:, 0])


def transposes(path: str) -> int:
    """Return the number of Transposes of a file."""
    return sum(node.op_type == "Transpose" for node in onnx.load(path).graph.node)


def run() -> Figures:
    """Run all steps in the current folder."""
    prepare()
    quantize = "sbonnx quantize keras.onnx --data calib.npz --split 16 --eval eval.npz --metric top1 --eval-split 50"
    command(f"{quantize} -o int8.onnx --report int8.json")
    command(f"{quantize} -o trt.onnx --backend tensorrt@10 --report trt.json")
    before, after = evaluation("int8.json")
    return {
        "top-1 float": before,
        "top-1 int8, onnxruntime": after,
        "top-1 int8, tensorrt": evaluation("trt.json")[1],
        "size of int8 / float": size("int8.onnx") / size("keras.onnx"),
        "Transposes of the float file": transposes("keras.onnx"),
        "Transposes of the int8 file": transposes("int8.onnx"),
    }


if __name__ == "__main__":
    main(run, __doc__)

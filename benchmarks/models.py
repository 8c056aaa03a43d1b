"""Two classic nets with seeded random weights, for figures that must not depend on a download."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MOBILENET_STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""(expansion, channels, repeats, first stride) of Sandler et al. 2018, table 2."""

RESNET_STAGES = ((64, 1), (128, 2), (256, 2), (512, 2))
"""(channels, first stride) of ResNet-18: two basic blocks each (He et al. 2016, table 1)."""


class Net:
    """Builder of a network; convolutions are He-initialized and include a folded batch norm."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; its output is named after its number."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], name=f"{kind}_{len(self.nodes)}", **attributes))
        return name

    def constant(self, name: str, values: Any) -> str:
        """Add a weight."""
        self.weights.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def conv(self, x: str, into: int, out: int, kernel: int, stride: int = 1, groups: int = 1) -> str:
        """Add a convolution and return its output."""
        number = len(self.nodes)
        fan = into // groups * kernel * kernel
        weight = self.rng.normal(0, np.sqrt(2 / fan), (out, into // groups, kernel, kernel)).astype(np.float32)
        bias = self.rng.normal(0, 0.1, out).astype(np.float32)
        inputs = (x, self.constant(f"w{number}", weight), self.constant(f"b{number}", bias))
        pads = [kernel // 2] * 4
        return self.op("Conv", *inputs, strides=[stride] * 2, pads=pads, kernel_shape=[kernel] * 2, group=groups)

    def finish(self, x: str, features: int, name: str) -> onnx.ModelProto:
        """Add pooling and a classifier for 1,000 classes, and return the model."""
        pooled = self.op("Flatten", self.op("GlobalAveragePool", x))
        weight = self.rng.normal(0, 0.03, (1000, features)).astype(np.float32)
        bias = np.zeros(1000, np.float32)
        logits = self.op("Gemm", pooled, self.constant("fc_w", weight), self.constant("fc_b", bias), transB=1)
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 224, 224])],
            [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["batch", 1000])],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model)


def mobilenet(seed: int = 0) -> onnx.ModelProto:
    """Build MobileNetV2 1.0 at 224 px: input "image" float32 (batch, 3, 224, 224)."""
    net = Net(seed)
    low, high = net.constant("zero", np.float32(0)), net.constant("six", np.float32(6))
    x, width = net.op("Clip", net.conv("image", 3, 32, 3, 2), low, high), 32
    for expansion, channels, repeats, first in MOBILENET_STAGES:
        for block in range(repeats):
            stride, wide, skip = first if block == 0 else 1, width * expansion, x
            if expansion != 1:
                x = net.op("Clip", net.conv(x, width, wide, 1), low, high)
            x = net.op("Clip", net.conv(x, wide, wide, 3, stride, wide), low, high)
            x = net.conv(x, wide, channels, 1)
            if stride == 1 and width == channels:
                x = net.op("Add", x, skip)
            width = channels
    return net.finish(net.op("Clip", net.conv(x, width, 1280, 1), low, high), 1280, "mobilenetv2")


def resnet(seed: int = 0) -> onnx.ModelProto:
    """Build ResNet-18 at 224 px: input "image" float32 (batch, 3, 224, 224)."""
    net = Net(seed)
    x = net.op("Relu", net.conv("image", 3, 64, 7, 2))
    x, width = net.op("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]), 64
    for channels, first in RESNET_STAGES:
        for block in range(2):
            stride, skip = first if block == 0 else 1, x
            x = net.op("Relu", net.conv(x, width, channels, 3, stride))
            x = net.conv(x, channels, channels, 3)
            if stride != 1 or width != channels:
                skip = net.conv(skip, width, channels, 1, stride)
            x = net.op("Relu", net.op("Add", x, skip))
            width = channels
    return net.finish(x, width, "resnet18")

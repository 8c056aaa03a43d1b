"""Small detectors with seeded random weights: 16 to 64 channels at 320 x 320, where float kernels are hard to beat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from benchmarks.models import Net

SIDE: Final = 320
SLOPE: Final = 0.1
"""Of LeakyRelu, as in YOLO."""


class _Detector(Net):
    """Builder of a detector: activations, pooling, upsampling, flattened predictions."""

    def layer(self, act: str, x: str, into: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> str:
        """Add a convolution and its activation: "relu", "leaky", "relu6" or "silu"."""
        x = self.conv(x, into, out, kernel, stride, groups)
        if act == "relu6":
            return self.op("Clip", x, "low", "high")
        if act == "silu":
            return self.op("Mul", x, self.op("Sigmoid", x))
        return self.op("Relu", x) if act == "relu" else self.op("LeakyRelu", x, alpha=SLOPE)

    def separable(self, act: str, x: str, into: int, out: int, stride: int = 1) -> str:
        """Add a depthwise and a pointwise convolution."""
        return self.layer(act, self.layer(act, x, into, into, 3, stride, into), into, out, 1)

    def pool(self, x: str) -> str:
        """Halve a map by its maxima."""
        return self.op("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])

    def upsample(self, x: str) -> str:
        """Double a map."""
        given: dict[str, Any] = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"}
        return self.op("Resize", x, "", "double", nearest_mode="floor", **given)

    def rows(self, x: str, fields: int) -> str:
        """Flatten predictions to rows, one for each box: (1, boxes, fields)."""
        moved = self.op("Transpose", x, perm=[0, 2, 3, 1])
        return self.op("Reshape", moved, self.constant(f"s{len(self.nodes)}", np.array([1, -1, fields], np.int64)))

    def detector(self, outputs: list[str], name: str) -> onnx.ModelProto:
        """Return the model: input "image" float32 (1, 3, 320, 320)."""
        for constant, value in (("low", 0), ("high", 6)):
            self.constant(constant, np.float32(value))
        self.constant("double", np.array([1, 1, 2, 2], np.float32))
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 3, SIDE, SIDE])
        made = [helper.make_tensor_value_info(output, TensorProto.FLOAT, None) for output in outputs]
        graph = helper.make_graph(self.nodes, name, [image], made, self.weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
        return onnx.shape_inference.infer_shapes(model)


def face(seed: int = 0, act: str = "relu") -> onnx.ModelProto:
    """Build a face detector: a plain trunk with residual blocks, a pyramid of two scales, shared heads."""
    net = _Detector(seed)
    x, width, scales = net.layer(act, "image", 3, 16, 3, 2), 16, []
    for out in (24, 32, 48, 64):
        x = net.layer(act, x, width, out, 3, 2)
        x = net.op("Add", x, net.layer(act, net.layer(act, x, out, out), out, out))
        width = out
        scales.append(x)
    fine = net.op("Concat", scales[2], net.upsample(net.layer(act, scales[3], 64, 48, 1)), axis=1)
    fine = net.layer(act, fine, 96, 48)
    outputs = []
    for feature, channels in ((fine, 48), (scales[3], 64)):
        boxes, scores = net.conv(feature, channels, 8, 3), net.conv(feature, channels, 2, 3)
        outputs += [net.rows(boxes, 4), net.op("Sigmoid", net.rows(scores, 1))]
    ends = [net.op("Concat", *outputs[which::2], axis=1) for which in (0, 1)]
    return net.detector(ends, "face")


def tiny_yolo(seed: int = 1, act: str = "leaky") -> onnx.ModelProto:
    """Build a tiny YOLO: 3 x 3 convolutions with LeakyRelu and maxima in between, two scales."""
    net = _Detector(seed)
    x, width, scales = net.layer(act, "image", 3, 16), 16, []
    for out in (16, 32, 32, 64, 64):
        x = net.layer(act, net.pool(x), width, out)
        width = out
        scales.append(x)
    coarse = net.layer(act, x, 64, 64, 1)
    fine = net.op("Concat", net.upsample(net.layer(act, coarse, 64, 32, 1)), scales[-2], axis=1)
    ends = [net.rows(net.conv(net.layer(act, fine, 96, 64), 64, 18, 1), 6), net.rows(net.conv(coarse, 64, 18, 1), 6)]
    return net.detector([net.op("Concat", *ends, axis=1)], "tiny_yolo")


def mobile(seed: int = 2, act: str = "relu6") -> onnx.ModelProto:
    """Build a detector of inverted residuals: depthwise convolutions of 48 to 384 channels."""
    net = _Detector(seed)
    x, width, scales = net.layer(act, "image", 3, 16, 3, 2), 16, []
    for out, repeats, stride in ((16, 1, 1), (24, 2, 2), (32, 2, 2), (48, 2, 2), (64, 2, 2)):
        for block in range(repeats):
            step, skip, wide = stride if block == 0 else 1, x, 3 * width
            x = net.layer(act, net.layer(act, x, width, wide, 1), wide, wide, 3, step, wide)
            x = net.conv(x, wide, out, 1)
            x = net.op("Add", x, skip) if step == 1 and width == out else x
            width = out
        scales.append(x)
    lateral = net.layer(act, scales[-1], 64, 48, 1)
    fine = net.separable(act, net.op("Add", net.upsample(lateral), scales[-2]), 48, 48)
    coarse = net.separable(act, lateral, 48, 48)
    ends = [net.rows(net.conv(feature, 48, 6, 1), 6) for feature in (fine, coarse)]
    return net.detector([net.op("Concat", *ends, axis=1)], "mobile")


def ssd(seed: int = 3, act: str = "relu") -> onnx.ModelProto:
    """Build an SSD: separable convolutions, anchors on four scales, softmax over 21 classes."""
    net = _Detector(seed)
    x, width, boxes, scores = net.layer(act, "image", 3, 16, 3, 2), 16, [], []
    for number, out in enumerate((32, 32, 48, 64, 64, 64)):
        x = net.separable(act, net.separable(act, x, width, out, 2), out, out)
        width = out
        if number > 1:
            boxes.append(net.rows(net.conv(x, out, 16, 3), 4))
            scores.append(net.rows(net.conv(x, out, 84, 3), 21))
    ends = [net.op("Concat", *boxes, axis=1), net.op("Softmax", net.op("Concat", *scores, axis=1), axis=-1)]
    return net.detector(ends, "ssd")


def silu(seed: int = 4, act: str = "silu") -> onnx.ModelProto:
    """Build a YOLO of split blocks with SiLU: half of the channels pass bottlenecks and are joined again."""
    net = _Detector(seed)
    x, width, scales = net.layer(act, "image", 3, 16, 3, 2), 16, []
    for out in (32, 48, 64, 64):
        x = net.layer(act, net.layer(act, x, width, out, 3, 2), out, out, 1)
        half = out // 2
        sizes = net.constant(f"p{len(net.nodes)}", np.array([half, half], np.int64))
        left, right = f"left{out}{len(net.nodes)}", f"right{out}{len(net.nodes)}"
        net.nodes.append(helper.make_node("Split", [x, sizes], [left, right], name=f"Split_{len(net.nodes)}", axis=1))
        inner = net.layer(act, net.layer(act, right, half, half), half, half)
        x = net.layer(act, net.op("Concat", left, right, net.op("Add", inner, right), axis=1), 3 * half, out, 1)
        width = out
        scales.append(x)
    fine = net.layer(act, net.op("Concat", net.upsample(scales[3]), scales[2], axis=1), 128, 64)
    ends = [net.rows(net.conv(net.layer(act, feature, 64, 32), 32, 12, 1), 12) for feature in (fine, scales[3])]
    return net.detector([net.op("Concat", *ends, axis=1)], "silu")


DETECTORS: Final[dict[str, Callable[[], onnx.ModelProto]]] = {
    "face": face,
    "tiny_yolo": tiny_yolo,
    "tiny_yolo_relu": lambda: tiny_yolo(act="relu"),
    "mobile": mobile,
    "ssd": ssd,
    "silu": silu,
}
"""Builders by name."""

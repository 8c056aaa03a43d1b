"""Detectors whose head is hard to quantize, made from other models without training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from sbonnx.spec import Array

SLOPE = 0.1
"""Of LeakyRelu, as in YOLO."""

SPREAD = 64.0
"""Ratio of the largest to the smallest scale of the channels between two layers of the head."""

FINE, COARSE = "onnx::Conv_735", "input.504"
"""Features of fastestdet at stride 16, after its spatial pyramid, and at stride 32."""

HEAD = tuple(range(249, 264))
"""Numbers of the nodes of its head, from the last feature to the three parts of its output."""


def leaky_detector(fastestdet: Path) -> onnx.ModelProto:
    """A ShuffleNetV2 detector with LeakyRelu and a pyramid of two scales, from the weights of fastestdet.

    Every Relu is a LeakyRelu. The coarse feature gets a lateral convolution and the same head; both scales are
    flattened and joined, and boxes are decoded to pixels. In the head, channels are scaled by up to `SPREAD` after one
    layer and back before the next, which changes nothing in float: LeakyRelu is homogeneous.

    Returns:
        A model with the input ``input.1`` (1, 3, 352, 352) and the output ``detections`` (1, 605, 85).
    """
    model = onnx.load(fastestdet)
    graph = model.graph
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    nodes = {node.name: node for node in graph.node}
    for node in graph.node:
        if node.op_type == "Relu":
            node.op_type = "LeakyRelu"
            node.attribute.append(helper.make_attribute("alpha", SLOPE))
    head = [node for node in graph.node if int(node.name.rpartition("_")[2]) in HEAD]
    for node in [*head, nodes["Concat_264"]]:
        graph.node.remove(node)
    made: dict[str, Array] = {}
    lateral = weights[nodes["Conv_231"].input[1]][:, -192:]
    made["lateral.weight"], made["lateral.bias"] = lateral, weights[nodes["Conv_231"].input[2]]
    graph.node.extend(
        [
            helper.make_node("Conv", [COARSE, "lateral.weight", "lateral.bias"], ["lateral"], "lateral/Conv"),
            helper.make_node("LeakyRelu", ["lateral"], ["coarse"], "lateral/LeakyRelu", alpha=SLOPE),
        ]
    )
    parts = [_head_at(graph, head, weights, made, feature, name) for feature, name in ((FINE, "p4"), ("coarse", "p5"))]
    made["size"] = np.array(352, np.float32)
    graph.node.extend(
        [
            helper.make_node("Concat", parts, ["scales"], "scales/Concat", axis=2),
            helper.make_node("Transpose", ["scales"], ["rows"], "scales/Transpose", perm=[0, 2, 1]),
            helper.make_node("Slice", ["rows", "zero", "one", "two"], ["object"], "decode/object"),
            helper.make_node("Slice", ["rows", "one", "five", "two"], ["edges"], "decode/edges"),
            helper.make_node("Slice", ["rows", "five", "all", "two"], ["classes"], "decode/classes"),
            helper.make_node("Sigmoid", ["edges"], ["share"], "decode/Sigmoid"),
            helper.make_node("Mul", ["share", "size"], ["boxes"], "decode/Mul"),
            helper.make_node("Concat", ["boxes", "object", "classes"], ["detections"], "decode/Concat", axis=2),
        ]
    )
    for name, value in (("zero", 0), ("one", 1), ("two", 2), ("five", 5), ("all", 85)):
        made[name] = np.array([value], np.int64)
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in made.items())
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("detections", onnx.TensorProto.FLOAT, [1, 605, 85]))
    onnx.checker.check_model(model)
    return model


def _head_at(
    graph: onnx.GraphProto,
    head: list[onnx.NodeProto],
    weights: dict[str, Array],
    made: dict[str, Array],
    feature: str,
    prefix: str,
) -> str:
    """Add a copy of the head on a feature; return its flattened output, (1, 85, positions)."""
    scales = SPREAD ** np.linspace(-0.5, 0.5, 96, dtype=np.float32)
    for source in head:
        node = onnx.NodeProto()
        node.CopyFrom(source)
        number = int(source.name.rpartition("_")[2])
        node.name = f"{prefix}/{source.name}"
        node.input[:] = [feature if name == FINE else f"{prefix}/{name}" for name in source.input]
        node.output[:] = [f"{prefix}/{name}" for name in source.output]
        graph.node.append(node)
        if source.op_type != "Conv":
            continue
        weight, bias = (weights[name] for name in source.input[1:])
        if number in (251, 255, 258):  # depthwise, before the prediction layers
            weight, bias = weight * scales[:, None, None, None], bias * scales
        elif number in (253, 257, 260):
            weight = weight / scales[None, :, None, None]
        made[node.input[1]], made[node.input[2]] = weight, bias
    ends = [f"{prefix}/{name}" for name in ("onnx::Concat_744", "onnx::Concat_960", "onnx::Concat_757")]
    made[f"{prefix}/flat"] = np.array([1, 85, -1], np.int64)
    graph.node.extend(
        [
            helper.make_node("Concat", ends, [f"{prefix}/maps"], f"{prefix}/Concat", axis=1),
            helper.make_node("Reshape", [f"{prefix}/maps", f"{prefix}/flat"], [f"{prefix}/part"], f"{prefix}/Reshape"),
        ]
    )
    return f"{prefix}/part"

"""Writes models that packages hold in another form as ONNX."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.zoo.ctranslate2 import whisper

Read = Callable[[str], bytes]


def tfjs_layers(read: Read, member: str) -> bytes:
    """Return a convolutional network of TensorFlow.js as a model of images (1, 3, H, W).

    Args:
        read: returns a file of the package.
        member: path of its ``model.json``.
    """
    content = json.loads(read(member))
    (group,) = content["weightsManifest"]
    (shard,) = group["paths"]
    values = np.frombuffer(read(f"{member.rpartition('/')[0]}/{shard}"), np.float32)
    ends = np.cumsum([np.prod(weight["shape"]) for weight in group["weights"]], dtype=np.int64)
    weights = {
        weight["name"]: part.reshape(weight["shape"])
        for weight, part in zip(group["weights"], np.split(values, ends[:-1]), strict=True)
    }
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, Any] = {"scales": np.array([1, 1, 2, 2], np.float32)}
    config = content["modelTopology"]["model_config"]["config"]
    for layer in config["layers"][1:]:
        name, inputs = layer["name"], [source[0] for source in layer["inbound_nodes"][0]]
        if layer["class_name"] == "Conv2D":
            constants[f"{name}/kernel"] = weights[f"{name}/kernel"].transpose(3, 2, 0, 1)
            constants[f"{name}/bias"] = weights[f"{name}/bias"]
            inputs += [f"{name}/kernel", f"{name}/bias"]
        if layer["class_name"] == "UpSampling2D":
            inputs += ["", "scales"]
        operator, attributes = OPERATORS[layer["class_name"]]
        nodes.append(helper.make_node(operator, inputs, [name], name, **attributes))
    image, output = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3, *sides])
        for name, sides in ((config["layers"][0]["name"], ("H", "W")), (nodes[-1].output[0], ("2H", "2W")))
    )
    tensors = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "tfjs", [image], [output], tensors)
    return bytes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())


OPERATORS: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "Conv2D": ("Conv", {"auto_pad": "SAME_UPPER"}),
    "Activation": ("Relu", {}),
    "Concatenate": ("Concat", {"axis": 1}),
    "Add": ("Add", {}),
    "UpSampling2D": ("Resize", {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}),
}
"""ONNX operators of the layers, with their attributes; channels come first."""

EXPORTERS: Final[Mapping[str, Callable[[Read, str], bytes]]] = {
    "model.json": tfjs_layers,
    "model.bin": lambda read, member: whisper(read(member)),
}
"""Functions that write a file of a package as ONNX, by the file's name."""

"""Configurations in the ancestor's YAML, and what the exported files say of where its pairs stand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from sbonnx.quant_model import QuantModel
from sbonnx.spec import Array

TENSORRT_8_8 = """\
BACKEND: tensorrt
SCHEDULE:
  FUSE_BN: True
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
A:
  QSCHEME: per-tensor-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: 8
  OBSERVER:
    TYPE: MINMAX
"""

VIRTUAL = """\
BACKEND: virtual
SCHEDULE:
  FUSE_BN: {fuse}
W:
  QSCHEME: per-channel-symmetric
  QUANTIZER:
    TYPE: uniform
    BIT: {bits}
  OBSERVER:
    TYPE: MINMAX
A:
  QSCHEME: per-tensor-{scheme}
  QUANTIZER:
    TYPE: uniform
    BIT: {bits}
  OBSERVER:
    TYPE: {observer}
  QADD:
    ENABLE_QUANT: {qadd}
"""

SPARSEBIT = "DEFAULTS: sparsebit\n"
"""Added to a configuration of the ancestor, it gives the ancestor's numbers."""


def virtual(
    bits: int = 8, *, scheme: str = "affine", observer: str = "MINMAX", qadd: bool = False, fuse: bool = True
) -> str:
    """A configuration for the virtual backend."""
    return VIRTUAL.format(bits=bits, scheme=scheme, observer=observer, qadd=qadd, fuse=fuse)


def written(folder: Path, text: str) -> Path:
    """The configuration as a file."""
    path = folder / "qconfig.yaml"
    path.write_text(text)
    return path


@dataclass(frozen=True)
class Placed:
    """Where the pairs of a file stand, read without sbonnx.

    Attributes:
        activations: by quantized float tensor, the nodes that read it through its pair, sorted.
        weights: by initializer that holds codes, the nodes that read it, sorted.
        bits: every value of ``__bits`` on Q and DQ nodes, by op type.
    """

    activations: dict[str, list[str]]
    weights: dict[str, list[str]]
    bits: dict[str, set[int]]


def placed(model: onnx.ModelProto) -> Placed:
    """The pairs of a quantized model without branches."""
    producer = {name: node for node in model.graph.node for name in node.output}
    readers: dict[str, list[str]] = {}
    for node in model.graph.node:
        for name in dict.fromkeys(node.input):
            readers.setdefault(name, []).append(node.name)
    activations: dict[str, list[str]] = {}
    weights: dict[str, list[str]] = {}
    bits: dict[str, set[int]] = {}
    for node in model.graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0].endswith("_mantissa"):
            continue  # a float bias, kept bit for bit
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            found = [attribute.i for attribute in node.attribute if attribute.name == "__bits"]
            bits.setdefault(node.op_type, set()).update(found or [-1])
        if node.op_type == "DequantizeLinear":
            quantize = producer.get(node.input[0])
            if quantize is None:
                weights[node.input[0]] = sorted(readers[node.output[0]])
            else:
                assert quantize.op_type == "QuantizeLinear"
                source = before_clip(producer, quantize.input[0])
                activations.setdefault(source, []).extend(sorted(readers[node.output[0]]))
    return Placed(activations, weights, bits)


def before_clip(producer: dict[str, onnx.NodeProto], tensor: str) -> str:
    """The tensor before the Clip that stands before the QuantizeLinear of a narrow activation, if there is one."""
    node = producer.get(tensor)
    clips = node is not None and node.op_type == "Clip" and any(one.name == "__bits" for one in node.attribute)
    return str(node.input[0]) if node is not None and clips else tensor


def scale_and_zero(model: onnx.ModelProto, tensor: str) -> tuple[Array, Array]:
    """Scale and zero point of the QuantizeLinear that reads `tensor` (or the DequantizeLinear, for codes)."""
    values = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
    pair = ("QuantizeLinear", "DequantizeLinear")
    producer = {name: node for node in model.graph.node for name in node.output}
    nodes = [node for node in model.graph.node if node.op_type in pair]
    (node,) = [node for node in nodes if before_clip(producer, node.input[0]) == tensor]
    return values[node.input[1]], values[node.input[2]]


def random_feeds(model: onnx.ModelProto, seed: int = 0) -> dict[str, Array]:
    """Seeded numbers for every float input; dynamic axes get 2."""
    rng = np.random.default_rng(seed)
    shapes = {
        value.name: [dim.dim_value or 2 for dim in value.type.tensor_type.shape.dim] for value in model.graph.input
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def exported(model: onnx.ModelProto, text: str, folder: Path) -> onnx.ModelProto:
    """The model quantized on one random feed, as read back from its file."""
    with QuantModel(model, written(folder, text)) as quantized:
        quantized.prepare_calibration()
        quantized(random_feeds(model))
        quantized.calc_qparams()
        path = folder / "quantized.onnx"
        quantized.export_onnx(path, force=True)
    return onnx.load(str(path))

"""Learned roundings on trained layers behind real images: what they gain over nearest and over gptq."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from sbonnx.rounding import Rounder
from sbonnx.rounding.adaquant import AdaQuant
from sbonnx.rounding.adaround import AdaRound
from sbonnx.rounding.gptq import Gptq
from sbonnx.spec import Array, QuantSpec
from tests.rounding.layers import Layer, scales
from tests.support.linear_ops import layer_of

IMAGES = 8
SPEC = QuantSpec(bits=4, axis=0)


def images(pack: Path) -> Array:
    """The first calibration images, as the model reads them (mean and deviation of CIFAR-10)."""
    with np.load(pack / "data" / "cifar_calib.npz") as file:
        raw = file["X"][:IMAGES]
    x = (raw.astype(np.float32) / 255 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2616])
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2), np.float32)


def real_layer(pack: Path, index: int) -> Layer:
    """The layer of the 3 by 3 convolution number `index` of cifar_resnet20, its windows unfolded by numpy."""
    ort = pytest.importorskip("onnxruntime")
    model = onnx.load(pack / "models" / "cifar_resnet20.onnx")
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    node = [node for node in model.graph.node if node.op_type == "Conv"][index]
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    weight = numpy_helper.to_array(constants[node.input[1]])
    model.graph.output.append(helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, None))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    x = np.concatenate([session.run([node.input[0]], {name: image[None]})[0] for image in images(pack)])
    x = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)])
    stride = attributes.get("strides", [1, 1])[0]
    windows = np.lib.stride_tricks.sliding_window_view(x, weight.shape[2:], axis=(2, 3))[:, :, ::stride, ::stride]
    rows = windows.transpose(0, 2, 3, 1, 4, 5).reshape(1, -1, weight[0].size)
    layout = layer_of("Conv", {}, weight.shape)
    return Layer(weight, scales(weight, SPEC), layout, rows, rows)


@pytest.mark.parametrize("index", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_learned_roundings_are_no_worse_than_gptq(pack: Path, index: int) -> None:
    """From gptq's codes on; AdaRound from the nearest codes with the paper's rate and pull loses to all of them."""
    one = real_layer(pack, index)
    moments = one.moments

    def share(rounder: Rounder) -> float:
        found = rounder.round(one.weight, one.qparams, moments)
        assert found.loss is not None and found.nearest is not None
        assert one.error(found).sum() == pytest.approx(found.loss, rel=1e-3)
        return found.loss / found.nearest

    gptq, learned, moved = share(Gptq()), share(AdaRound(iterations=300)), share(AdaQuant(iterations=200))
    assert learned <= gptq < 0.6
    assert moved < gptq
    assert learned < share(AdaRound(iterations=300, start="nearest", lr=0.01, weight=0.01, sweeps=0))

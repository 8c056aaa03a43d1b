"""ONNX's own light models, reimported, against onnxruntime. In the files most weights are constants of one value."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.torchnet.onnx_to_torch.reimport import reimport  # noqa: E402
from tests.qat.test_reimport_real import TOLERANCE, errors  # noqa: E402
from tests.support.pattern_checks import random_feeds  # noqa: E402

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LARGEST = 1 << 25
"""Weights with more elements are left as they are."""


def light_models() -> list[str]:
    """Their names."""
    return sorted(path.stem for path in FOLDER.glob("*.onnx"))


def light_model(name: str) -> onnx.ModelProto:
    """A model whose ConstantOfShape weights are normal initializers, and that gives what its last Softmax reads.

    Without that, the largest of a thousand outputs is 1 and the others are 0 whatever is computed.
    """
    rng = np.random.default_rng(0)
    model = onnx.load(FOLDER / f"{name}.onnx")
    held = {tensor.name: tensor for tensor in model.graph.initializer}
    kept = []
    for node in model.graph.node:
        dims = numpy_helper.to_array(held[node.input[0]]) if node.input and node.input[0] in held else None
        if node.op_type != "ConstantOfShape" or dims is None or np.prod(dims) > LARGEST:
            kept.append(node)
            continue
        fan_in = np.prod(dims[1:], initial=1)
        values = rng.standard_normal(dims) * np.sqrt(2 / fan_in) if len(dims) > 1 else rng.uniform(0.5, 1.5, dims)
        model.graph.initializer.append(numpy_helper.from_array(values.astype(np.float32), node.output[0]))
    last = next(
        (node for node in kept if node.op_type == "Softmax" and node.output[0] == model.graph.output[0].name), None
    )
    if last is not None:
        kept.remove(last)
        model.graph.output[0].name = last.input[0]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


HEAVY = {
    *("light_vgg19", "light_bvlc_alexnet", "light_zfnet512"),
    *("light_resnet50", "light_inception_v2", "light_densenet121"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in light_models()]
)
def test_light_models(name: str) -> None:
    graph = graphs.load(light_model(name))
    model = graphs.to_proto(graph)
    module = reimport(graph).eval()
    assert len(list(module.parameters())) >= 15
    assert max(errors(module, model, random_feeds(model)).values()) < TOLERANCE

"""ONNX's own light models, reimported, against onnxruntime."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from sbonnx import graph as graphs  # noqa: E402
from sbonnx.qat.onnx_to_torch.reimport import reimport  # noqa: E402
from tests.patterns.checks import random_feeds  # noqa: E402
from tests.qat.light import light_model, light_models  # noqa: E402
from tests.qat.test_reimport_real import TOLERANCE, errors  # noqa: E402

torch.set_num_threads(1)

HEAVY = {
    *("light_vgg19", "light_bvlc_alexnet", "light_zfnet512"),
    *("light_resnet50", "light_inception_v2", "light_densenet121"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name for name in light_models()]
)
def test_light_models(name: str) -> None:
    graph = graphs.load(light_model(name))
    model = graphs.to_proto(graph)
    module = reimport(graph).eval()
    assert len(list(module.parameters())) >= 15
    assert max(errors(module, model, random_feeds(model)).values()) < TOLERANCE

"""Networks for torch-pruning: torch's own layers compute what the file computes; which layers are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from benchmarks.peers.torch_pruning_onnx import (  # noqa: E402
    multiplications,
    set_gradients,
    torch_layers,
)
from benchmarks.pruning.files import sizes  # noqa: E402
from tests.support.models import model, run  # noqa: E402

NET = """agraph (float[N,3,8,8] x) => (float[N,5] y) {
    a = Conv <pads = [1,1,1,1], strides = [2,2]> (x, w1)
    n = BatchNormalization (a, scale, shift, mean, var)
    r = Relu (n)
    p = Pad (r, pads)
    c = Conv <group = 8> (p, w2, b2)
    d = Conv (c, w3, b3)
    g = GlobalAveragePool (d)
    f = Flatten (g)
    h = Gemm <transB = 1> (f, w4, b4)
    y = Gemm (h, w5)
}"""
WEIGHTS: dict[str, Any] = {
    "w1": (6, 3, 3, 3),
    "w2": (8, 1, 3, 3),
    "b2": 8,
    "w3": (4, 8, 1, 1),
    "b3": 4,
    "w4": (7, 4),
    "b4": 7,
}


def net(folder: Path) -> Path:
    """Write a network whose first layer is padded along channels."""
    moments = {"scale": np.linspace(1, 2, 6), "shift": np.linspace(-1, 1, 6), "mean": np.zeros(6), "var": np.ones(6)}
    values: dict[str, Any] = {name: value.astype(np.float32) for name, value in moments.items()}
    path = folder / "net.onnx"
    pads = np.array([0, 1, 0, 0, 0, 1, 0, 0])
    onnx.save(model(NET, **WEIGHTS, w5=(7, 5), pads=pads, **values), str(path))
    return path


def images(count: int = 4) -> np.ndarray:
    """Images (count, 3, 8, 8)."""
    return np.random.default_rng(0).standard_normal((count, 3, 8, 8)).astype(np.float32)


def test_torch_layers_compute_what_the_file_computes(tmp_path: Path) -> None:
    path = net(tmp_path)
    module, x = torch_layers(path), images()
    kinds = [type(layer).__name__ for layer in module.modules()]
    assert kinds.count("Conv2d") == 3 and kinds.count("Linear") == 2 and kinds.count("BatchNorm2d") == 1
    assert not [name for name, _ in module.named_parameters(recurse=False)]
    with torch.no_grad():
        np.testing.assert_allclose(module(torch.from_numpy(x)).numpy(), run(str(path), {"x": x})["y"], atol=1e-4)
    assert multiplications(module, (torch.from_numpy(x[:1]),)) == sizes(path, {"x": x[:1]})[0]


def test_gradients_are_means_over_samples(tmp_path: Path) -> None:
    module = torch_layers(net(tmp_path))
    inputs = [(torch.from_numpy(image[None]),) for image in images()]
    weight = next(module.parameters())
    set_gradients(module, inputs, squared=False)
    mean = weight.grad.clone()
    logits = module(torch.cat([sample for (sample,) in inputs]))
    (whole,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, logits.argmax(1)), weight)
    torch.testing.assert_close(mean, whole)
    set_gradients(module, inputs, squared=True)
    assert (weight.grad >= mean.square() - 1e-12).all()

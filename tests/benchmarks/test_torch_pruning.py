"""Networks for torch-pruning: torch's own layers compute what the file computes; which layers are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

torch = pytest.importorskip("torch")

from benchmarks.peers.torch_pruning_onnx import (  # noqa: E402
    fix_sizes,
    ignored_layers,
    multiplications,
    require_same,
    set_gradients,
    torch_layers,
    tune_statistics,
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


def test_bilinear_resize_gets_the_size_of_a_sample(tmp_path: Path) -> None:
    text = """agraph (float[N,3,8,8] x) => (float[N,4,12,12] y) {
        s = Shape <start = 0, end = 2> (x)
        t = Concat <axis = 0> (s, size)
        r = Resize <mode = "linear", coordinate_transformation_mode = "half_pixel"> (x, , , t)
        y = Conv (r, w)
    }"""
    path, x = tmp_path / "net.onnx", images(3)
    onnx.save(model(text, size=np.array([12, 12]), w=(4, 3, 1, 1)), str(path))
    module = torch_layers(path)
    fix_sizes(module, (torch.from_numpy(x[:1]),))
    assert [layer.size for layer in module.modules() if isinstance(layer, torch.nn.Upsample)] == [(12, 12)]
    inputs = [(torch.from_numpy(image[None]),) for image in x]
    require_same(module, path, inputs, "differs")
    with torch.no_grad():
        module.get_submodule(next(name for name, each in module.named_modules() if hasattr(each, "weight"))).weight *= 2
    with pytest.raises(SystemExit, match="differs"):
        require_same(module, path, inputs, "differs")


def test_padded_channels_and_outputs_are_left_alone(tmp_path: Path) -> None:
    module = torch_layers(net(tmp_path))
    ignored = {tuple(layer.weight.shape) for layer in ignored_layers(module)}
    assert ignored == {(6, 3, 3, 3), (8, 1, 3, 3), (5, 7)}


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


def test_statistics_are_those_of_the_samples(tmp_path: Path) -> None:
    path = net(tmp_path)
    module, x = torch_layers(path), images(8)
    tune_statistics(module, [(torch.from_numpy(image[None]),) for image in x])
    (norm,) = [layer for layer in module.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    first = next(layer for layer in module.modules() if isinstance(layer, torch.nn.Conv2d))
    with torch.no_grad():
        inside = first(torch.from_numpy(x))
    torch.testing.assert_close(norm.running_mean, inside.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    assert not norm.training

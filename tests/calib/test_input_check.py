"""Wrong scale, offset, channel order and layout of images are told from the first layer; right data is left alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sbonnx import graph as graphs
from sbonnx.calib.data.dataset import read
from sbonnx.calib.input_check import check_inputs, first_layer_of
from sbonnx.errors import DataError
from sbonnx.spec import Array
from tests.support.models import model

PACK = Path(__file__).resolve().parents[3] / "shared" / "data"
RNG = np.random.default_rng(0)
COLOR = np.array([0.9, 0.0, -0.9], np.float32)[:, None, None]
"""Mean of the channels: red is bright, blue is dark."""

NORM = """
agraph (float[N,H,W,D] x) => (float[N,16,E,F] y) {
    c = Conv <kernel_shape = [3,3]> (x, w)
    y = BatchNormalization (c, gamma, beta, mean, var)
}"""
BIAS = """
agraph (float[N,3,H,W] x) => (float[N,16,E,F] y) {
    m = Identity(x)
    c = Conv <kernel_shape = [3,3]> (m, w, b)
    y = Relu(c)
}"""
GRAY = """
agraph (float[N,3,H,W] x) => (float[N,3,H,W] y) {
    y = Relu(x)
}"""


def images(count: int = 48) -> Array:
    x: Array = (RNG.standard_normal((count, 3, 12, 12)) + COLOR).astype(np.float32)
    return x


def normed() -> Any:
    """A convolution with the batch normalization of such images."""
    w = RNG.standard_normal((16, 3, 3, 3)).astype(np.float32)
    w -= 0.8 * w.mean(axis=(2, 3), keepdims=True)
    w += RNG.standard_normal((16, 3, 1, 1)).astype(np.float32) * 0.2
    views = np.lib.stride_tricks.sliding_window_view(images(200), (3, 3), axis=(2, 3))
    y = np.einsum("nchwij,ocij->onhw", views, w).reshape(16, -1)
    ones = np.ones(16, np.float32)
    values = {"w": w, "gamma": ones, "beta": ones, "mean": y.mean(1), "var": y.var(1)}
    return graphs.load(model(NORM, **{name: x.astype(np.float32) for name, x in values.items()}))


def notes(graph: Any, x: Array) -> tuple[str, ...]:
    layer = first_layer_of(graph)
    assert layer is not None
    return check_inputs(layer, read([{"x": part} for part in np.split(x, len(x))], graph))


def test_scale_and_order_against_a_batch_normalization() -> None:
    graph, x = normed(), images()
    assert notes(graph, x) == ()
    assert notes(graph, x[:2]) == ()  # few samples: only orders of magnitude count
    (found,) = notes(graph, x * 255)
    assert "which does not look like the training data: the outputs of '" in found and "spread 25" in found
    assert f"from {x.min() * 255:.4g} to {x.max() * 255:.4g}" in found
    assert "spread 0.00" in notes(graph, x[:2] / 255)[0]
    (found,) = notes(graph, x[:, ::-1])
    assert "seem to be in the wrong order (RGB or BGR)" in found and "48 samples" in found
    fixed = x.copy()
    fixed[:, 1] = 0.25
    assert "is constant in channel 1 (0.25) over all samples" in notes(graph, fixed)[0]
    with pytest.raises(DataError, match=r"reads 3 channels on axis 1 \(NCHW\): transpose the data"):
        notes(graph, x.transpose(0, 2, 3, 1))


def test_scale_against_a_bias() -> None:
    graph = graphs.load(model(BIAS, w=(16, 3, 3, 3), b=16))
    assert notes(graph, images()) == ()
    assert "too large for the model" in notes(graph, images() * 2550)[0]
    assert "too small for the model" in notes(graph, images() / 2550)[0]


def test_models_that_tell_nothing() -> None:
    assert first_layer_of(graphs.load(model(GRAY))) is None


@pytest.mark.sampled(2)
@pytest.mark.skipif(not PACK.is_dir(), reason="the development pack is not there")
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("cifar_resnet20", True),
        ("mobilenetv1_tin200", True),
        ("mobilenetv2_tin200", False),  # its first layer responds alike to both orders
        ("ultraface_rfb320", True),
        ("squeezenet11", False),  # the batch normalization was folded
        ("fastestdet", False),
    ],
)
def test_real_models(name: str, order: bool) -> None:
    sys.path.insert(0, str(PACK))
    try:
        import eval as pack  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(PACK))
    graph = graphs.load(pack.model_path(name))
    layer = first_layer_of(graph)
    assert layer is not None
    feeds = [feed[layer.input] for _, feed in zip(range(128), pack.load_calib(name), strict=False)]

    def found(change: Callable[[Array], Array], some: list[Array]) -> str:
        data = [{layer.input: np.ascontiguousarray(change(x), np.float32)} for x in some]
        return " ".join(check_inputs(layer, read(data, graph)))

    assert found(lambda x: x, feeds) == "" and found(lambda x: x, feeds[:1]) == ""
    for change in (lambda x: x * 255, lambda x: x / 255):
        assert "check" in found(change, feeds[:8])
    assert ("wrong order" in found(lambda x: x[:, ::-1], feeds)) == order

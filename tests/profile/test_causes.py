"""Causes of losses: what is named is what was made wrong, and the change that is proposed reduces the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import sbonnx
from sbonnx import recipe
from sbonnx.report import Report
from sbonnx.spec import Array

CHANNELS = 8
LAYERS = ("first", "second", "third")
RNG = np.random.default_rng(0)


def network(gain: float = 1.0, weight: float = 0.0) -> onnx.ModelProto:
    """Three convolutions behind each other, of which the first two are joined.

    Args:
        gain: by which the outputs of the second are multiplied.
        weight: one of the first convolution.
    """
    kernels = {name: (RNG.standard_normal((CHANNELS, CHANNELS, 3, 3)) / 9).astype(np.float32) for name in LAYERS}
    kernels["second"] *= np.float32(gain)
    if weight:
        kernels["first"][0, 0, 0, 0] = weight
    tensors = ("x", "a", "b", "c")
    nodes = [
        helper.make_node("Conv", [tensors[i], f"{name}.weight"], [tensors[i + 1]], name, pads=[1, 1, 1, 1])
        for i, name in enumerate(LAYERS)
    ]
    nodes.append(helper.make_node("Concat", ["a", "b"], ["y"], "join", axis=1))
    inputs, *outputs = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", channels, 6, 6])
        for name, channels in (("x", CHANNELS), ("y", 2 * CHANNELS), ("c", CHANNELS))
    )
    held = [numpy_helper.from_array(value, f"{name}.weight") for name, value in kernels.items()]
    graph = helper.make_graph(nodes, "g", [inputs], outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def images(*, outlier: float = 0.0, rare: bool = False) -> list[dict[str, Array]]:
    """Feeds of noise, with one value of each sample, or of one sample of the last feed, that is `outlier`."""
    rng = np.random.default_rng(1)
    samples = [rng.standard_normal((4, CHANNELS, 6, 6)).astype(np.float32) for _ in range(8)]
    if outlier and rare:
        samples[-1][0, 0, 0, 0] = outlier
    elif outlier:
        for sample in samples:
            sample[:, 0, 0, 0] = outlier
    return [{"x": sample} for sample in samples]


def uneven() -> list[dict[str, Array]]:
    """Samples of which few are much larger than the others."""
    rng = np.random.default_rng(6)
    return [
        {"x": (rng.standard_normal((1, CHANNELS, 6, 6)) * scale).astype(np.float32)}
        for scale in rng.lognormal(0, 1.5, 128)
    ]


@dataclass(frozen=True)
class Case:
    """A network that is quantized badly at one layer.

    Attributes:
        code, remedy: what must be named.
        gain_db: what the remedy must gain at the outputs of the layer; None: the layer must be float then.
    """

    code: str
    remedy: str
    gain_db: float | None
    settings: dict[str, Any]
    model: onnx.ModelProto = field(default_factory=network)
    data: list[dict[str, Array]] = field(default_factory=images)


CASES = {
    "own scale": Case("shared-scale", "of its own", 12, {"backend": "tensorrt"}, network(gain=20.0)),
    "wider weights": Case("few-bits", "8 bits", 12, {"w_bit": 3}),
    "wider inputs": Case("few-bits", "8 bits", 12, {"a_bit": 3}),
    "another observer": Case("rare-outliers", "observer", 12, {}, data=images(outlier=40.0, rare=True)),
    "more samples": Case("range-exceeded", "more samples", 3, {"a_observer": "minmax", "samples": 32}, data=uneven()),
    "scales of channels": Case(
        "one-weight-scale", "each channel", 3, {"w_qscheme": "per-tensor-symmetric", "a_bit": 16}, network(weight=100.0)
    ),
    "16 bits": Case("outliers", "16 bits", 9, {}, data=images(outlier=40.0)),
    "float": Case("outliers", "in float", None, {"backend": "tensorrt"}, data=images(outlier=40.0)),
}


def quantized(case: Case, **settings: Any) -> Report:
    """The report with the losses of the layers, weights rounded to nearest."""
    return sbonnx.quantize(case.model, case.data, verify=False, details=True, **settings)


def losses(report: Report) -> dict[str, float | None]:
    """Isolated losses by layer."""
    assert report.details is not None and report.details.profile is not None
    return {layer.node: layer.alone for layer in report.details.profile.layers}


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_reduces_the_loss(name: str) -> None:
    case = CASES[name]
    before = quantized(case, rounding="nearest", **case.settings)
    cause = before.causes[0]
    assert cause.code == case.code and case.remedy in cause.remedy, before.causes
    assert cause.sqnr_db == min(loss for loss in losses(before).values() if loss is not None)
    after = quantized(case, recipe=recipe.load(before.settings, overrides=list(cause.overrides)))
    loss = losses(after).get(cause.node)
    if case.gain_db is None:
        assert loss is None
    else:
        assert loss is not None and loss - cause.sqnr_db >= case.gain_db
